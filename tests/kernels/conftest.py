"""Triton runs in its interpreter here; what it compiles for a GPU is tests/gpu."""

from __future__ import annotations

import os
import sys

import pytest

pytest.importorskip("torch", reason="no torch")
if "triton" not in sys.modules:
    os.environ["TRITON_INTERPRET"] = "1"
