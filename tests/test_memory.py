"""From users' objects to address ranges: what is taken, what is refused, and with which words."""

from __future__ import annotations

import ctypes
import gc
import os

import numpy as np
import pytest

import fabricx as fx
from fabricx.memory import as_memory


def test_a_host_buffer_is_zeroed_sealed_and_found_behind_its_views() -> None:
    b = fx.HostBuffer(10_000)
    assert not b.array.any() and b.nbytes == len(b) == 10_000
    with pytest.raises(OSError):
        os.ftruncate(b.fd, 5)
    m = as_memory(b.array[100:200])
    assert (m.addr, m.length, m.fd, m.fd_offset) == (b.addr + 100, 100, b.fd, 100)
    assert as_memory(b.addr + 7, 13).fd_offset == 7
    assert as_memory(b.addr + 9_999, 2).fd == -1  # reaches beyond


def test_a_buffer_lives_as_long_as_a_view_of_it_and_gives_its_descriptor_back() -> None:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    b = fx.HostBuffer(4096)
    view = b.array[1:]
    del b
    gc.collect()
    view[:] = 3
    assert as_memory(view).fd >= 0
    del view
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("n", [0, -1, 1 << 63, 1.5])
def test_a_buffer_needs_a_sensible_size(n: object) -> None:
    with pytest.raises(fx.OutOfRange, match="nbytes"):
        fx.HostBuffer(n)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "obj",
    [np.arange(10, dtype=np.float64), bytearray(80), memoryview(bytearray(80)), (ctypes.c_double * 10)(), np.zeros((2, 5))],
    ids=lambda o: type(o).__name__,
)
def test_anything_with_a_contiguous_buffer_is_taken(obj: object) -> None:
    m = as_memory(obj)
    assert m.length == 80 and m.addr and m.device == "cpu" and m.owner is not None


def test_dlpack_is_taken_by_address() -> None:
    class Capsule:
        def __init__(self, a: np.ndarray) -> None:
            self.a = a

        def __dlpack__(self, **k: object) -> object:
            return self.a.__dlpack__(**k)

        def __dlpack_device__(self) -> tuple[int, int]:
            return self.a.__dlpack_device__()

    a = np.arange(6, dtype=np.int32)
    m = as_memory(Capsule(a))
    assert (m.addr, m.length) == (a.ctypes.data, 24)


def test_cuda_arrays_are_taken_by_their_interface() -> None:
    class Device:
        __cuda_array_interface__ = {"data": (0x7F0000000000, False), "shape": (4, 8), "typestr": "<f4", "strides": None, "version": 3}

    m = as_memory(Device())
    assert (m.addr, m.length, m.device) == (0x7F0000000000, 128, "cuda:0")

    class Strided:
        __cuda_array_interface__ = {"data": (16, False), "shape": (4, 8), "typestr": "<f4", "strides": (64, 4), "version": 3}

    with pytest.raises(fx.NotContiguous, match="contiguous copy"):
        as_memory(Strided())


def test_what_is_not_contiguous_is_refused_with_the_fix() -> None:
    a = np.zeros((10, 10))
    with pytest.raises(fx.NotContiguous, match="np.ascontiguousarray"):
        as_memory(a[:, ::2])
    with pytest.raises(fx.NotContiguous, match="C-contiguous"):
        as_memory(memoryview(bytearray(100))[::2])
    torch = pytest.importorskip("torch", reason="torch is not installed")
    with pytest.raises(fx.NotContiguous, match=r"x\.contiguous\(\)"):
        as_memory(torch.zeros(4, 8).t())


def test_tensors_over_a_host_buffer_are_mappable() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    b = fx.HostBuffer(4096)
    t = b.tensor(torch.float32, (10, 100))
    t.fill_(2)
    m = as_memory(t[3:])
    assert (m.fd, m.fd_offset, m.length) == (b.fd, 1200, 2800)
    assert b.array[:4].view(np.float32)[0] == 2


def test_lengths_and_addresses_are_checked() -> None:
    for bad in ((0, 10), (-5, 10), (1 << 64, 1), (100, 0), (100, -1), ((1 << 64) - 5, 10)):
        with pytest.raises(fx.OutOfRange):
            as_memory(*bad)
    with pytest.raises(TypeError, match="needs a length"):
        as_memory(4096)
    with pytest.raises(fx.OutOfRange, match="has 10 bytes"):
        as_memory(bytearray(10), 11)
    with pytest.raises(fx.OutOfRange, match="empty"):
        as_memory(np.zeros(0))
    with pytest.raises(TypeError, match="cannot register a dict"):
        as_memory({})


def test_page_lists_say_what_is_wrong_with_them() -> None:
    with pytest.raises(fx.PageListError, match="float64.*astype"):
        fx.Pages(np.zeros(3), stride=8)
    with pytest.raises(fx.PageListError, match="page 2 has the negative index -1"):
        fx.Pages(np.array([1, 2, -1]), stride=8)
    with pytest.raises(fx.PageListError, match="2 dimensions"):
        fx.Pages(np.zeros((2, 2), np.uint32), stride=8)
    with pytest.raises(fx.NotContiguous, match="ascontiguousarray"):
        fx.Pages(np.zeros(10, np.uint32)[::2], stride=8)
    with pytest.raises(TypeError, match="np.asarray"):
        fx.Pages([1, 2], stride=8)  # type: ignore[arg-type]
    with pytest.raises(fx.OutOfRange, match="stride"):
        fx.Pages(stride=-1, count=1)
    with pytest.raises(fx.OutOfRange, match="count"):
        fx.Pages(stride=1)


def test_page_indices_are_borrowed_not_copied() -> None:
    a = np.arange(10, dtype=np.int64)
    p = fx.Pages(a, stride=8)
    assert p.indices is not None and np.shares_memory(p.indices, a) and p.indices.dtype == np.uint64 and len(p) == 10
