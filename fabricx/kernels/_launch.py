"""What the host sides of the Triton kernels share: word sizes, powers of two, programmatic launch."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton

_WORDS = {4: torch.int32, 2: torch.int16, 1: torch.int8}


def pow2(n: int) -> int:
    """The smallest power of two that is at least `n` (and 1)."""
    return 1 << max(n - 1, 0).bit_length()


def word_size(nbytes: int, *tensors: torch.Tensor) -> int:
    """The largest word (4, 2 or 1 bytes) in which rows of `nbytes` in these tensors can be copied."""
    for size in (4, 2):
        if nbytes % size == 0 and all(t.data_ptr() % size == 0 for t in tensors):
            return size
    return 1


def as_words(t: torch.Tensor, size: int) -> torch.Tensor:
    """The tensor's bytes as one run of words of `size` bytes."""
    return t.reshape(-1).view(torch.uint8).view(_WORDS[size])


@lru_cache
def _capability(device: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def programmatic(device: torch.device) -> bool:
    """Whether kernels here can start before the one before them has ended (programmatic dependent launch)."""
    if device.type != "cuda" or torch.version.hip is not None or triton.knobs.runtime.interpret:
        return False
    return _capability(device.index if device.index is not None else torch.cuda.current_device()) >= (9, 0)
