"""MoE dispatch and combine for GPUs (Triton) and CPUs (Numba), usable by themselves: plain tensors in and out.

Importing this needs torch. A function of the GPU is loaded, and Triton with it, when it is first used; `cpu` (Numba)
and `reference` (torch) have functions of the same names. docs/kernels.md has the layout of the buffers.
"""

from __future__ import annotations

import importlib

from .control import (
    ABORTED,
    OK,
    TIMED_OUT,
    clear_status,
    control_words,
    new_control,
    read_epochs,
    read_status,
    status_text,
)
from .layout import Layout

# the modules of what is loaded on first use
_HOME = {
    "route": "routing",
    "prefix": "routing",
    "workspace_words": "routing",
    "near_offsets": "checks",
    "dispatch_send": "send",
    "dispatch_receive": "receive",
    "receive_workspace_words": "receive",
    "combine_send": "combine",
    "combine_receive": "combine",
    "scalar_inc_": "watch",
    "scalar_inc_numba_": "watch",
    "reference": "reference",
    "cpu": "cpu",
}

__all__ = [
    "ABORTED",
    "OK",
    "TIMED_OUT",
    "Layout",
    "clear_status",
    "control_words",
    "new_control",
    "read_epochs",
    "read_status",
    "status_text",
    *_HOME,
]


def __getattr__(name: str) -> object:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'fabricx.kernels' has no attribute {name!r}")
    module = importlib.import_module(f".{home}", __name__)
    value = module if home == name else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
