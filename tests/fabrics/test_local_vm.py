"""The local fabric's process_vm_writev: whose memory is missing when the kernel says EFAULT."""

from __future__ import annotations

import ctypes
import dataclasses
import mmap

import pytest
from engines import QUICK, Pair

import fabricx as fx

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
PAGE = mmap.PAGESIZE


#: a page that cannot be touched stands for one that is not mapped: another thread cannot map it anew meanwhile
def fresh(pages: int) -> int:
    at = libc.mmap(None, pages * PAGE, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    assert at not in (None, ctypes.c_void_p(-1).value)
    return int(at)


@pytest.mark.parametrize("pages", [False, True])
@pytest.mark.parametrize("hole", [0, 2, 3])
def test_a_source_that_cannot_be_reached_is_the_sources_fault(pages: bool, hole: int) -> None:
    p = Pair(config=dataclasses.replace(QUICK, local_reach="vm"))
    at = fresh(4)
    try:
        h, _ = p.a.reg_mr(at, 4 * PAGE)
        libc.mprotect(at + hole * PAGE, PAGE, 0)
        with pytest.raises(fx.UnregisteredLocal):
            if pages:
                both = fx.Pages(count=4, stride=PAGE)
                p.a.submit_paged_writes(PAGE, None, (h, both), (p.desc, both)).wait()
            else:
                p.a.submit_single_write(4 * PAGE, None, (h, 0), (p.desc, 0)).wait()
    finally:
        p.close()
        libc.munmap(at, 4 * PAGE)


def test_a_target_that_cannot_be_reached_is_the_targets_fault() -> None:
    p = Pair(config=dataclasses.replace(QUICK, local_reach="vm"))
    at = fresh(4)
    try:
        _, desc = p.b.reg_mr(at, 4 * PAGE)
        libc.mprotect(at + PAGE, PAGE, 0)
        with pytest.raises(fx.UnregisteredRemote):
            p.a.submit_single_write(4 * PAGE, None, (p.handle, 0), (desc, 0)).wait()
    finally:
        p.close()
        libc.munmap(at, 4 * PAGE)
