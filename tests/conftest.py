"""What holds for all tests: a hang dumps every stack, and the end of a run says what was skipped and why."""

from __future__ import annotations

import faulthandler
import os
from collections import Counter

import pytest

faulthandler.enable()
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # its threads spin, and would take the cores from ours


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = terminalreporter.stats.get("skipped", [])
    reasons: Counter[str] = Counter()
    for r in skipped:
        text = r.longrepr[2] if isinstance(r.longrepr, tuple) else str(r.longrepr)
        reasons[text.removeprefix("Skipped: ")] += 1
    terminalreporter.section("skipped, and why")
    if not reasons:
        terminalreporter.line("nothing was skipped")
    for reason, n in reasons.most_common():
        terminalreporter.line(f"{n} x {reason}")
