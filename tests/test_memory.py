"""From users' objects to address ranges: what is taken, what is refused, and with which words."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import signal
import threading

import numpy as np
import pytest

import fabricx as fx
from fabricx.memory import _Known, as_memory


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


def test_a_buffer_is_a_writable_buffer_itself() -> None:
    b = fx.HostBuffer(100)
    memoryview(b)[3] = 7
    assert np.frombuffer(b, np.uint8)[3] == b.array[3] == 7 and bytes(b)[3] == 7
    assert as_memory(memoryview(b)[10:20]).fd_offset == 10


def test_closing_a_buffer_gives_it_back_at_once() -> None:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    b = fx.HostBuffer(4096)
    addr = b.addr
    b.close()
    b.close()
    assert len(os.listdir("/proc/self/fd")) == before
    assert _Known.find(addr, 16)[0] == -1
    with pytest.raises(fx.RegistrationError, match="closed"):
        as_memory(b)
    with pytest.raises(ValueError, match="closed"):
        b.array  # noqa: B018


def test_closing_a_buffer_with_views_is_refused_and_changes_nothing() -> None:
    b = fx.HostBuffer(4096)
    view = b.array[5:]
    with pytest.raises(fx.InUse, match="views or registrations"):
        b.close()
    view[0] = 9
    assert as_memory(view).fd == b.fd and b.array[5] == 9
    del view
    b.close()
    assert b.closed


def test_closing_a_registered_buffer_is_refused_until_its_handle_is_gone() -> None:
    with fx.TransferEngine("local") as engine:
        b = engine.alloc(4096)
        handle, _ = engine.reg_mr(b)
        with pytest.raises(fx.InUse):
            b.close()
        engine.dereg_mr(handle)
        del handle
        b.close()
        assert b.closed


def test_the_end_of_a_buffer_waits_for_no_lock() -> None:
    """The collector may end one in the middle of a look at the table, in the thread that holds its lock."""
    b = fx.HostBuffer(64)
    addr, fd = b.addr, b.fd
    ring: list[object] = [b]
    ring.append(ring)
    done = threading.Event()

    def collect() -> None:
        gc.collect()
        done.set()

    del b
    with _Known.lock:
        del ring
        thread = threading.Thread(target=collect, daemon=True)
        thread.start()
        ended = done.wait(20)
    assert ended
    with pytest.raises(OSError):
        os.fstat(fd)
    assert _Known.find(addr, 64)[0] == -1


def test_a_forked_child_has_no_buffer() -> None:
    b = fx.HostBuffer(4096)
    pid = os.fork()
    if pid == 0:
        faulthandler.disable()
        b[0] = 1  # ends the child
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGSEGV
    assert b[0] == 0


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
    for shape in ((2000,), (-1, 4)):
        with pytest.raises(fx.OutOfRange, match="there are 1024 elements"):
            b.tensor(torch.float32, shape)


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
