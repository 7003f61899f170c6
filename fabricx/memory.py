"""Memory: HostBuffer, which peers on the host can map, page lists, and the way from a user's object to an address range."""

from __future__ import annotations

import bisect
import ctypes
import fcntl
import math
import mmap
import operator
import os
import sys
import threading
import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from .errors import InUse, NotContiguous, OutOfRange, PageListError, RegistrationError
from .fabrics.base import Memory

_F_ADD_SEALS, _F_GET_SEALS = 1033, 1034
_SEAL_SEAL, _SEAL_SHRINK, _SEAL_GROW = 1, 2, 4
_MADV_DONTFORK = 10
_MS_ASYNC = 1
_msync = ctypes.CDLL(None, use_errno=True).msync
_msync.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_LONGEST = 1 << 62
_DLPACK_CPU = (1, 3, 11)  # kDLCPU, kDLCUDAHost, kDLROCMHost
_DLPACK_CUDA = 2


class HostBuffer(mmap.mmap):
    """Zeroed host memory in a sealed memfd, so that peers on this host can map it and writes into it are plain copies.

    It is a writable buffer itself (``memoryview(b)``, ``np.frombuffer(b)``); views of it (also torch tensors) are recognised
    as mappable when they are registered. A forked child does not inherit it: touching it there is a segmentation fault,
    rather than a write that the parent silently sees.

    Parameters
    ----------
    nbytes : int
        Bytes, above 0.
    """

    fd: int
    addr: int
    nbytes: int

    def __new__(cls, nbytes: int) -> HostBuffer:
        if hasattr(nbytes, "__index__"):
            nbytes = operator.index(nbytes)
        if not isinstance(nbytes, int) or not 0 < nbytes < _LONGEST:
            raise OutOfRange(f"nbytes is {nbytes!r}; a buffer has 1 .. 2**62 - 1 bytes")
        fd = -1
        try:
            fd = os.memfd_create("fabricx", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(fd, nbytes)
            fcntl.fcntl(fd, _F_ADD_SEALS, _SEAL_GROW | _SEAL_SHRINK | _SEAL_SEAL)
            self = super().__new__(cls, fd, nbytes)
        except OSError as e:
            if fd >= 0:
                os.close(fd)
            raise RegistrationError(e.errno, f"no memory for a HostBuffer of {nbytes} bytes: {e.strerror}") from e
        self.madvise(_MADV_DONTFORK)
        self.fd, self.nbytes = fd, nbytes
        self.addr = self.array.ctypes.data
        _Known.add(self.addr, nbytes, fd)
        self._finalizer = weakref.finalize(self, _gone, fd, self.addr)
        return self

    @property
    def array(self) -> np.ndarray:
        """The memory as an np.uint8 array."""
        # made each time: an array kept here would refer back to the buffer, a cycle that the collector cannot see through
        return np.frombuffer(self, np.uint8)

    def tensor(self, dtype: Any = None, shape: Any = None) -> Any:
        """The memory as a torch tensor (uint8 and flat if not said otherwise)."""
        import torch

        t = torch.from_numpy(self.array)
        if dtype is not None:
            t = t[: self.nbytes - self.nbytes % dtype.itemsize].view(dtype)
        if shape is not None:
            n = math.prod(shape)
            if min(shape, default=0) < 0 or n > t.numel():
                raise OutOfRange(f"shape is {tuple(shape)}; there are {t.numel()} elements of {t.dtype}")
            t = t[:n].view(shape)
        return t

    def close(self) -> None:
        """Give the memory back now; without it that happens with the last view. Idempotent.

        Raises
        ------
        InUse
            while views of it (arrays, tensors) or the MrHandle of a registration exist; nothing has changed then.
        """
        if self.closed:
            return
        _Known.dead.append(self.addr)  # before the range can be mapped anew by somebody else
        try:
            super().close()
        except BufferError:
            _Known.add(self.addr, self.nbytes, self.fd)
            raise InUse(f"{self!r} has views or registrations; drop them (dereg_mr, del) before close()") from None
        self._finalizer.detach()
        os.close(self.fd)

    def __repr__(self) -> str:
        return f"HostBuffer({self.nbytes} bytes at {self.addr:#x}{', closed' if self.closed else ''})"


class _Known:
    """Live HostBuffers by address, to find the memfd behind a view."""

    lock = threading.Lock()
    starts: list[int] = []
    spans: dict[int, tuple[int, int]] = {}  # start -> (bytes, fd)
    # The collector may end a buffer in the middle of any of these methods, so its end takes no lock: it is noted here, and
    # struck off before the next look.
    dead: deque[int] = deque()

    @classmethod
    def _strike(cls) -> None:
        while cls.dead:
            start = cls.dead.popleft()
            if cls.spans.pop(start, None) is not None:
                cls.starts.remove(start)

    @classmethod
    def add(cls, start: int, size: int, fd: int) -> None:
        with cls.lock:
            cls._strike()
            bisect.insort(cls.starts, start)
            cls.spans[start] = size, fd

    @classmethod
    def find(cls, addr: int, length: int) -> tuple[int, int]:
        """(fd, offset) of a range that lies in one HostBuffer, else (-1, 0)."""
        with cls.lock:
            cls._strike()
            i = bisect.bisect_right(cls.starts, addr) - 1
            if i >= 0:
                start = cls.starts[i]
                size, fd = cls.spans[start]
                if addr + length <= start + size:
                    return fd, addr - start
        return -1, 0


def _gone(fd: int, addr: int) -> None:
    """A buffer ends."""
    _Known.dead.append(addr)
    try:
        os.close(fd)
    except OSError:
        pass


@dataclass(slots=True)
class _Held(Memory):
    """A HostBuffer's memory; as long as it is registered, a view keeps close() away."""

    hold: memoryview | None = field(default=None, repr=False)


def _host(addr: int, length: int, owner: Any) -> Memory:
    fd, offset = _Known.find(addr, length)
    return Memory(addr, length, fd, offset, "cpu", owner)


def as_memory(obj: Any, length: int | None = None, device: str | None = None, *, mapped: bool = True) -> Memory:
    """The address range of a user's object.

    Parameters
    ----------
    obj : HostBuffer, torch tensor, NumPy array, object with the buffer protocol, ``__cuda_array_interface__``,
        ``__array_interface__`` or DLPack, or an int address with `length`.
    length : bytes; less than the object has takes the front part.
    device : only with an address: ``"cpu"`` (default) or ``"cuda:N"``.
    mapped : an address must be of memory that is there.

    Raises
    ------
    NotContiguous
        with the fix in its message.
    OutOfRange
        for empty objects, or more bytes than there are.
    TypeError
    """
    if isinstance(obj, (int, np.integer)) and not isinstance(obj, bool):
        return _raw(int(obj), length, device, mapped)
    mem = _known(obj)
    if mem.length == 0:
        raise OutOfRange(f"{type(obj).__name__} is empty; a region has at least 1 byte")
    if length is not None:
        if not 0 < length <= mem.length:
            raise OutOfRange(f"length is {length}; {type(obj).__name__} has {mem.length} bytes")
        mem.length = length
    return mem


def _raw(addr: int, length: int | None, device: str | None, mapped: bool) -> Memory:
    if length is None:
        raise TypeError("an address needs a length")
    if not 0 < addr < 1 << 64:
        raise OutOfRange(f"the address is {addr:#x}; it must be above 0 and within 64 bits")
    if not 0 < length < _LONGEST or addr + length > 1 << 64:
        raise OutOfRange(f"length is {length}; a region at {addr:#x} has 1 .. 2**62 - 1 bytes within the address space")
    if device is not None and device.startswith("cuda"):
        return Memory(addr, length, device=device)
    start = addr & -mmap.PAGESIZE
    # on Linux this does nothing but look whether every page of the range belongs to a mapping
    if mapped and _msync(start, addr + length - start, _MS_ASYNC):
        raise RegistrationError(14, f"bytes {addr:#x} .. {addr + length:#x} are not all mapped in this process")
    return _host(addr, length, None)


def _known(obj: Any) -> Memory:
    if isinstance(obj, HostBuffer):
        if obj.closed:
            raise RegistrationError(f"{obj!r} cannot be registered")
        return _Held(obj.addr, obj.nbytes, obj.fd, 0, "cpu", obj, hold=memoryview(obj))
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(obj, torch.Tensor):
        return _tensor(obj)
    if hasattr(obj, "__cuda_array_interface__"):
        return _cuda(obj)
    if isinstance(obj, np.ndarray):
        return _array(obj, obj)
    try:
        view = memoryview(obj)
    except TypeError:
        view = None
    if view is not None:
        if not view.c_contiguous:
            raise NotContiguous(f"a {type(obj).__name__} that is not C-contiguous; register bytes(...) or a contiguous copy of it")
        return _array(np.frombuffer(view, np.uint8) if view.nbytes else np.empty(0, np.uint8), obj)
    if hasattr(obj, "__array_interface__"):
        return _array(np.asarray(obj), obj)
    if hasattr(obj, "__dlpack__") and hasattr(obj, "__dlpack_device__"):
        return _dlpack(obj)
    raise TypeError(
        f"cannot register a {type(obj).__name__}; give a tensor, an array, an object with the buffer protocol or DLPack, "
        "or an address and a length"
    )


def _array(a: np.ndarray, owner: Any) -> Memory:
    if not a.flags.c_contiguous:
        raise NotContiguous(f"an array of shape {a.shape} and strides {a.strides} is not contiguous; use np.ascontiguousarray(x)")
    if a.dtype.hasobject:
        raise TypeError("an array of Python objects cannot be registered")
    mem = _host(a.ctypes.data, a.nbytes, (owner, a))
    mem.readonly = not a.flags.writeable
    return mem


def _tensor(t: Any) -> Memory:
    if not t.is_contiguous():
        raise NotContiguous(f"a tensor of shape {tuple(t.shape)} and strides {t.stride()} is not contiguous; use x.contiguous()")
    nbytes = t.numel() * t.element_size()
    if t.device.type == "cpu":
        mem = _host(t.data_ptr(), nbytes, t)
        if mem.fd < 0 and nbytes and t.is_shared():
            mem.fd, mem.fd_offset = _shared_fd(t)
        return mem
    if t.device.type == "cuda":
        return Memory(t.data_ptr(), nbytes, device=f"cuda:{t.device.index or 0}", owner=t)
    raise TypeError(f"a tensor on {t.device} cannot be registered")


def _shared_fd(t: Any) -> tuple[int, int]:
    """The descriptor of shared torch storage, where peers may map it: only if no one can shrink it under them."""
    try:
        fd = t.untyped_storage()._share_fd_cpu_()[0]
    except (RuntimeError, AttributeError):
        return -1, 0
    try:
        sealed = fcntl.fcntl(fd, _F_GET_SEALS) & _SEAL_SHRINK
    except OSError:
        sealed = 0
    if not sealed:
        os.close(fd)
        return -1, 0
    weakref.finalize(t.untyped_storage(), os.close, fd)
    return fd, t.data_ptr() - t.untyped_storage().data_ptr()


def _cuda(obj: Any) -> Memory:
    i = obj.__cuda_array_interface__
    strides, shape = i.get("strides"), i["shape"]
    size = np.dtype(i["typestr"]).itemsize
    want = size
    if strides is not None:
        for n, s in zip(reversed(shape), reversed(strides), strict=True):
            if n != 1 and s != want:
                raise NotContiguous(f"a device array of shape {shape} and strides {strides} is not contiguous; make a contiguous copy")
            want *= n
    for n in shape:
        size *= n
    index = getattr(getattr(obj, "device", None), "id", 0)
    return Memory(i["data"][0], size, device=f"cuda:{index}", owner=obj)


def _dlpack(obj: Any) -> Memory:
    kind, index = obj.__dlpack_device__()
    if int(kind) in _DLPACK_CPU:
        return _array(np.from_dlpack(obj), obj)
    if int(kind) == _DLPACK_CUDA:
        import torch

        mem = _tensor(torch.from_dlpack(obj))
        return mem
    raise TypeError(f"memory on DLPack device {int(kind)}:{index} cannot be registered")


class Pages:
    """Where pages lie in a region: page i at ``offset + indices[i] * stride`` bytes.

    Parameters
    ----------
    indices : np.ndarray, optional
        One-dimensional, C-contiguous, uint32 or uint64 (int32 and int64 without negatives are taken as such). Borrowed, not
        copied: it must not change until the transfer is quiet. Without it, pages 0 .. count - 1.
    stride : int
        Bytes from one index to the next.
    offset : int
        Bytes from the start of the region to index 0.
    count : int, optional
        Pages, when there are no indices.
    """

    __slots__ = ("count", "indices", "offset", "stride")

    def __init__(self, indices: np.ndarray | None = None, *, stride: int, offset: int = 0, count: int | None = None) -> None:
        for what, v in (("stride", stride), ("offset", offset)):
            if not 0 <= v < 1 << 64:
                raise OutOfRange(f"{what} is {v}; it must be within 0 .. 2**64 - 1")
        self.stride, self.offset = int(stride), int(offset)
        if indices is None:
            if count is None or not 0 <= count < 1 << 62:
                raise OutOfRange(f"count is {count}; without indices it must be within 0 .. 2**62 - 1")
            self.indices, self.count = None, int(count)
            return
        self.indices = _indices(indices)
        self.count = len(self.indices)
        if count is not None and count != self.count:
            raise PageListError(f"count is {count}, and there are {self.count} indices")

    def __len__(self) -> int:
        return self.count

    def __repr__(self) -> str:
        return f"Pages({self.count} pages, stride={self.stride}, offset={self.offset})"


def _indices(a: np.ndarray) -> np.ndarray:
    if not isinstance(a, np.ndarray):
        raise TypeError(f"indices must be a NumPy array, not {type(a).__name__}; use np.asarray(x, np.uint32)")
    if a.ndim != 1:
        raise PageListError(f"indices have {a.ndim} dimensions; want 1: x.ravel()")
    if not a.flags.c_contiguous:
        raise NotContiguous("indices are not contiguous; use np.ascontiguousarray(x)")
    if a.dtype in (np.uint32, np.uint64):
        return a
    if a.dtype in (np.int32, np.int64):
        if len(a) and a.min() < 0:
            i = int(np.argmax(a < 0))
            raise PageListError(f"page {i} has the negative index {int(a[i])}")
        return a.view(np.uint32 if a.dtype == np.int32 else np.uint64)
    raise PageListError(f"indices are {a.dtype}; want uint32 or uint64: x.astype(np.uint32)")


class ScatterDst(NamedTuple):
    """One destination of a scatter: `length` bytes from `src_offset` of the source to `dst_offset` of `desc`."""

    length: int
    src_offset: int
    desc: Any
    dst_offset: int


def address_of(view: memoryview) -> int:
    """Address of the first byte of a writable contiguous buffer."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
