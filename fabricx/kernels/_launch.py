"""What the host sides of all kernels share: checks of tensors, word sizes, powers of two, programmatic launch."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton

from .control import control_words
from .layout import NEAR_UNIT, Layout

_WORDS = {4: torch.int32, 2: torch.int16, 1: torch.int8}


def pow2(n: int) -> int:
    """The smallest power of two that is at least `n` (and 1)."""
    return 1 << max(n - 1, 0).bit_length()


def check(name: str, t: torch.Tensor, shape: tuple, dtypes: tuple, device: torch.device | None = None) -> None:
    """Raise unless `t` is contiguous and has the shape (None: any, a negative number: at least) and one of the dtypes."""
    if not isinstance(t, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, not {type(t).__name__}")
    fits = t.dim() == len(shape) and all(
        want is None or (got >= -want if want < 0 else got == want) for got, want in zip(t.shape, shape, strict=True)
    )
    if not fits:
        words = ", ".join("any" if n is None else f"at least {-n}" if n < 0 else str(n) for n in shape)
        raise ValueError(f"{name} must have shape [{words}], not {list(t.shape)}")
    if t.dtype not in dtypes:
        raise TypeError(f"{name} must be {' or '.join(str(d) for d in dtypes)}, not {t.dtype}")
    if not t.is_contiguous():
        raise ValueError(f"{name} must be contiguous, its strides are {t.stride()}")
    if device is not None and t.device != device:
        raise ValueError(f"{name} is on {t.device}, the other tensors are on {device}")


def check_rows(name: str, t: torch.Tensor, row_bytes: int, device: torch.device) -> None:
    """Raise unless `t` is a buffer of rows: uint8 [rows, row_bytes], aligned to 16 bytes."""
    check(name, t, (None, row_bytes), (torch.uint8,), device)
    if t.data_ptr() % NEAR_UNIT:
        raise ValueError(f"{name} at {t.data_ptr():#x} is not aligned to {NEAR_UNIT} bytes")


def check_near(layout: Layout, near: torch.Tensor | None, device: torch.device) -> None:
    """Raise unless `near` holds one offset for each near rank."""
    if layout.near_ranks:
        if near is None:
            raise ValueError(f"near is needed: the layout has {layout.near_ranks} near ranks")
        check("near", near, (layout.near_ranks,), (torch.int64,), device)


def check_control(layout: Layout, control: torch.Tensor | None, wait: torch.Tensor | None, device: torch.device) -> None:
    """Raise unless the control block has room for the near ranks, and flags to wait for come with one."""
    if control is not None:
        check("control", control, (-control_words(layout.near_ranks),), (torch.int32,), device)
    if wait is not None:
        if control is None:
            raise ValueError("wait needs a control block: it says for which epoch, and how long")
        check("wait", wait, (-1,), (torch.int32,), device)


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


def near_offsets(buffer: torch.Tensor, addresses: list[int]) -> torch.Tensor:
    """Offsets of peers' memory from `buffer`, for the `near` arguments.

    Parameters
    ----------
    buffer : the send buffer that the offsets count from; aligned to 16 bytes.
    addresses : addresses (as kernels of the device see them) of the memory at each near rank, in rank order.

    Returns
    -------
    int64 [len(addresses)] on the buffer's device, in units of 16 bytes.
    """
    if not buffer.numel():
        raise ValueError("an empty buffer has no address to count from")
    for i, address in enumerate(addresses):
        if (address - buffer.data_ptr()) % NEAR_UNIT:
            raise ValueError(f"address {address:#x} of near rank {i} is not aligned to {NEAR_UNIT} bytes")
    offsets = [(a - buffer.data_ptr()) // NEAR_UNIT for a in addresses]
    return torch.tensor(offsets, dtype=torch.int64).to(buffer.device)
