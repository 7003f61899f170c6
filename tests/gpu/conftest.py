"""These tests need a GPU and compiled kernels: `make gpu-test` runs them, by themselves."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "kernels"))


def pytest_collection_modifyitems(items: list) -> None:
    here = Path(__file__).parent
    why = None
    if not torch.cuda.is_available():
        why = "no GPU"
    else:
        import triton

        if triton.knobs.runtime.interpret:
            why = "Triton is interpreted in this process; run make gpu-test"
    if why:
        for item in items:
            if here in Path(item.fspath).parents:
                item.add_marker(pytest.mark.skip(reason=why))
