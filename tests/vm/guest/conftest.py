"""Tests that run in the guest of tests/vm, where there are Soft-RoCE devices; not collected elsewhere."""

from __future__ import annotations

import os
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[2]
for _folder in (str(TESTS / "engine"), str(TESTS.parent)):
    if _folder not in sys.path:
        sys.path.insert(0, _folder)

collect_ignore_glob = [] if os.environ.get("FABRICX_GUEST") else ["test_*.py"]
