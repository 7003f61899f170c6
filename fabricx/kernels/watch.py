"""Raising a watched word from the GPU: a 64-bit counter in mapped pinned memory that the host polls (a UVM watcher)."""

from __future__ import annotations

import functools

import torch


def _check_word(word: torch.Tensor) -> None:
    if word.dtype not in (torch.int64, torch.uint64) or word.numel() != 1:
        raise TypeError(f"word must be one int64 or uint64, not {word.dtype} {list(word.shape)}")
    if word.device.type == "cpu" and not word.is_pinned() and torch.cuda.is_available():
        raise ValueError("word lies in pageable host memory, which a GPU cannot write: use pin_memory()")


def scalar_inc_(word: torch.Tensor, shadow: torch.Tensor | None = None) -> torch.Tensor:
    """Add one to a 64-bit word from the GPU, in stream order; what the GPU stored before is visible to who sees the
    sum.

    One GPU, and one stream at a time, may write the word. Can be captured in a CUDA graph after it has run once.

    Parameters
    ----------
    word : int64 or uint64 [1]
        Device memory or mapped pinned host memory, such as an engine's `UvmWatcher` watches.
    shadow : int64 [1]
        A copy of the word in device memory, which makes a plain store do and saves the GPU an atomic over PCIe. It must
        start with the value of `word`, and only this function may write either.

    Returns
    -------
    word
    """
    from .signals import increment, increment_copy

    _check_word(word)
    if shadow is None:
        increment[(1,)](word.view(torch.int64), num_warps=1)
    else:
        _check_word(shadow)
        increment_copy[(1,)](word.view(torch.int64), shadow.view(torch.int64), num_warps=1)
    return word


class _Word:
    """A word for Numba-CUDA, which takes mapped host memory only through this protocol."""

    def __init__(self, word: torch.Tensor) -> None:
        self.owner = word
        self.__cuda_array_interface__ = {
            "shape": (1,),
            "typestr": "<u8",
            "data": (word.data_ptr(), False),
            "version": 3,
            "strides": None,
            "stream": None,
        }


@functools.cache
def _numba_cuda():
    import numpy as np

    if not hasattr(np, "row_stack"):  # NumPy dropped it; numba-cuda versions that predate this name it when imported
        np.row_stack = np.vstack
    from numba import cuda

    return cuda


@functools.cache
def _numba_kernel():
    from numba import uint64

    cuda = _numba_cuda()

    @cuda.jit("void(uint64[::1])")
    def add(word):
        cuda.threadfence_system()
        cuda.atomic.add(word, 0, uint64(1))

    return add


def scalar_inc_numba_(word: torch.Tensor, stream: torch.cuda.Stream | None = None) -> torch.Tensor:
    """`scalar_inc_` by Numba-CUDA, for those who have Numba kernels already.

    Parameters
    ----------
    word : int64 or uint64 [1]
        Device memory or mapped pinned host memory.
    stream : torch.cuda.Stream
        The current one if None.

    Returns
    -------
    word
    """
    _check_word(word)
    cuda = _numba_cuda()
    stream = stream or torch.cuda.current_stream()
    _numba_kernel()[1, 1, cuda.external_stream(stream.cuda_stream)](cuda.as_cuda_array(_Word(word), sync=False))
    return word
