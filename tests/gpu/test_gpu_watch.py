"""scalar_inc_: a 64-bit word in mapped pinned memory, raised by the GPU in stream order and by graphs."""

from __future__ import annotations

import ctypes
import time

import pytest
import torch

import fabricx.kernels as fk

START = 2**40 + 3  # more than 32 bits


def make(kind):
    word = torch.full((1,), START, dtype=torch.int64).pin_memory()
    if kind == "numba":
        try:
            fk.scalar_inc_numba_(word.clone().pin_memory())
        except Exception as e:
            pytest.skip(f"Numba-CUDA does not work here: {type(e).__name__}: {str(e).splitlines()[0]}")
        return word, lambda: fk.scalar_inc_numba_(word)
    if kind == "shadow":
        shadow = word.cuda()
        return word, lambda: fk.scalar_inc_(word, shadow)
    return word, lambda: fk.scalar_inc_(word)


@pytest.mark.parametrize("kind", ["add", "shadow", "numba"])
def test_counts_in_a_stream_and_in_a_graph(kind):
    word, inc = make(kind)
    for _ in range(10):
        inc()
    torch.cuda.synchronize()
    assert int(word) == START + 10
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(5):
            inc()
    for _ in range(20):
        graph.replay()
    torch.cuda.synchronize()
    assert int(word) == START + 110


@pytest.mark.parametrize("kind", ["add", "shadow", "numba"])
def test_what_came_before_is_visible_to_who_sees_the_word(kind):
    word, inc = make(kind)
    n = 1 << 16
    data = torch.zeros(n, dtype=torch.int32).pin_memory()
    source = torch.zeros(n, dtype=torch.int32, device="cuda")
    inc()
    torch.cuda.synchronize()
    seen = ctypes.c_uint64.from_address(word.data_ptr())
    for i in range(1, 50):
        source.fill_(i)
        torch.cuda.synchronize()
        before = seen.value
        data.copy_(source, non_blocking=True)
        inc()
        end = time.monotonic() + 10
        while seen.value == before and time.monotonic() < end:
            pass
        assert seen.value == before + 1
        assert int(data.min()) == int(data.max()) == i


def test_a_word_that_a_gpu_cannot_write_is_refused():
    with pytest.raises(ValueError, match="pageable"):
        fk.scalar_inc_(torch.zeros(1, dtype=torch.int64))
    with pytest.raises(TypeError, match="int64"):
        fk.scalar_inc_(torch.zeros(1, dtype=torch.int32, device="cuda"))
