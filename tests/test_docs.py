"""The code in README.md and docs/tutorial.md runs as it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ENV = {**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"}


def blocks(name: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), re.S)


ALONE = [(n, i, b) for n in ("README.md", "docs/tutorial.md", "docs/engine.md") for i, b in enumerate(blocks(n)) if not b.startswith("# ") and "..." not in b]


@pytest.mark.parametrize(("name", "number", "code"), ALONE, ids=[f"{n}-{i}" for n, i, _ in ALONE])
def test_a_block_runs_as_it_stands(name: str, number: int, code: str) -> None:
    p = subprocess.run([sys.executable, "-c", code], env=ENV, capture_output=True, text=True, timeout=60)
    assert p.returncode == 0, p.stderr


def test_the_tutorials_two_processes() -> None:
    code = {b.split("\n", 1)[0]: b for b in blocks("docs/tutorial.md") if b.startswith("# ")}
    receiver = subprocess.Popen([sys.executable, "-c", code["# receiver.py"]], env=ENV, stdout=subprocess.PIPE, text=True)
    assert receiver.stdout is not None
    try:
        desc = receiver.stdout.readline().strip()
        sender = subprocess.run([sys.executable, "-c", code["# sender.py"], desc], env=ENV, capture_output=True, text=True, timeout=60)
        assert sender.returncode == 0, sender.stderr
        assert receiver.stdout.readline().strip() == "3000"
        assert receiver.wait(20) == 0
    finally:
        receiver.kill()
        receiver.stdout.close()
        receiver.wait()
