"""Registration of memory with an RDMA NIC: of the host, of a GPU by a dma-buf or by nvidia-peermem."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from typing import Any

from .. import errors
from .base import Memory

#: where the calls are that pyverbs and torch do not offer; a test puts its own there
LIBIBVERBS, LIBCUDA = "libibverbs.so.1", "libcuda.so.1"
_DMA_BUF_FD = 1  # CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD


class _Mr(ctypes.Structure):
    """struct ibv_mr"""

    _fields_ = [
        ("context", ctypes.c_void_p),
        ("pd", ctypes.c_void_p),
        ("addr", ctypes.c_void_p),
        ("length", ctypes.c_size_t),
        ("handle", ctypes.c_uint32),
        ("lkey", ctypes.c_uint32),
        ("rkey", ctypes.c_uint32),
    ]


class DmaBufMr:
    """A dma-buf registered so that its addresses are those of the memory. pyverbs' own class makes them offsets in the buffer.

    Parameters
    ----------
    pd : address of the protection domain's C object.
    memory : the range; a write to its `addr` goes to `offset` in the buffer.
    fd, offset : the dma-buf. The descriptor may be closed afterwards.
    access : IBV_ACCESS_ flags.
    """

    def __init__(self, pd: int, memory: Memory, fd: int, offset: int, access: int) -> None:
        self.mr = None
        lib = ctypes.CDLL(LIBIBVERBS, use_errno=True)
        reg, self._dereg = lib.ibv_reg_dmabuf_mr, lib.ibv_dereg_mr
        reg.restype, self._dereg.argtypes = ctypes.POINTER(_Mr), (ctypes.c_void_p,)
        reg.argtypes = (
            ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_uint64, ctypes.c_int, ctypes.c_int,
        )  # fmt: skip
        mr = reg(pd, offset, memory.length, memory.addr, fd, access)
        if not mr:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        self.mr, self.lkey, self.rkey = mr, mr.contents.lkey, mr.contents.rkey

    def close(self) -> None:
        """Ends the registration. Idempotent."""
        mr, self.mr = self.mr, None
        if mr:
            rc = self._dereg(mr)
            if rc:
                raise OSError(rc, f"ibv_dereg_mr: {os.strerror(rc)}")


def export_dmabuf(memory: Memory) -> tuple[int, int]:
    """(descriptor, offset) of a dma-buf of CUDA memory, from the driver, which exports whole pages. The caller closes it."""
    call = ctypes.CDLL(LIBCUDA).cuMemGetHandleForAddressRange
    call.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_int, ctypes.c_uint64)
    page = mmap.PAGESIZE
    start = memory.addr & -page
    size = (memory.addr + memory.length - start + page - 1) & -page
    fd = ctypes.c_int(-1)
    rc = call(ctypes.byref(fd), start, size, _DMA_BUF_FD, 0)
    if rc:
        raise OSError(22, f"cuMemGetHandleForAddressRange says {rc}")
    return fd.value, memory.addr - start


def register(v: dict[str, Any], pd: Any, pd_address: int, memory: Memory, what: str) -> Any:
    """A registration with `lkey`, `rkey` and `close()`, with relaxed ordering where it is accepted.

    Parameters
    ----------
    v : modules of pyverbs. pd, pd_address : protection domain as pyverbs has it, and its C object. what : NIC, for errors.

    Raises
    ------
    RegistrationError
        with all that was tried, and why it did not work.
    """
    e, m = v["enums"], v["mr"]
    access = 0 if memory.readonly else e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE

    def by_address(flags: int) -> Any:
        return m.MR(pd, memory.length, flags, memory.addr)

    def by_dmabuf(flags: int) -> Any:
        ours = memory.dmabuf_fd < 0
        fd, offset = export_dmabuf(memory) if ours else (memory.dmabuf_fd, memory.dmabuf_offset)
        try:
            return DmaBufMr(pd_address, memory, fd, offset, flags)
        finally:
            if ours:
                os.close(fd)

    ways: list[tuple[str, Callable[[int], Any]]] = [("ibv_reg_mr", by_address)]
    if memory.device != "cpu":
        ways = [("dma-buf", by_dmabuf), ("nvidia-peermem (is the module loaded?)", by_address)]
    said, code = [], 0
    for how, make in ways:
        for flags, which in ((access | e.IBV_ACCESS_RELAXED_ORDERING, ""), (access, " without relaxed ordering")):
            try:
                return make(flags)
            except Exception as x:
                code = getattr(x, "error_code", None) or getattr(x, "errno", None) or code or 5
                said.append(f"{how}{which}: {x}")
    hint = "; raise the limit on locked memory (ulimit -l unlimited)" if code == 12 else ""
    range_ = f"{memory.length} bytes at {memory.addr:#x} on {memory.device}"
    raise errors.RegistrationError(code, f"{what}: {range_}: {'; '.join(said)}{hint}")
