"""Checks of arguments, the same for GPU and CPU: an error names the argument, what it must be and what it is."""

from __future__ import annotations

import torch

from .control import control_words
from .layout import FP8_GROUP, MAX_TOPK, NEAR_UNIT, Layout, ceil_div

INDEX_DTYPES = (torch.int32, torch.int64)
CAST_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check(name: str, t: torch.Tensor, shape: tuple, dtypes: tuple, device: torch.device | None = None) -> None:
    """Raise unless `t` is contiguous and has the shape (None: any, a negative number: at least) and one of the
    dtypes."""
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


def check_signals(layout: Layout, control, wait, host_flag, device: torch.device) -> None:
    """Raise unless the control block has room for the near ranks, and flags to wait for come with one."""
    if control is not None:
        check("control", control, (-control_words(layout.near_ranks),), (torch.int32,), device)
    if wait is not None:
        if control is None:
            raise ValueError("wait needs a control block: it says for which epoch, and how long")
        check("wait", wait, (-1,), (torch.int32,), device)
    if host_flag is not None:
        if wait is None:
            raise ValueError("host_flag needs wait: wait[0] is where it is passed on")
        check("host_flag", host_flag, (1,), (torch.int32,))


def check_indices(indices: torch.Tensor, topk: int | None = None) -> tuple[int, int]:
    """(tokens, top-k) of an index tensor, or an error."""
    check("indices", indices, (None, topk), INDEX_DTYPES)
    tokens, k = indices.shape
    if not 1 <= k <= MAX_TOPK:
        raise ValueError(f"top-k must be in 1..{MAX_TOPK}, indices have {k} columns")
    if tokens * k >= 1 << 31:
        raise ValueError(f"{tokens} tokens of top-k {k} are more than 2**31 pairs")
    return tokens, k


def route_outputs(tokens, topk, experts, counts, positions, device) -> tuple[torch.Tensor, torch.Tensor]:
    """counts and positions, checked, or made where None."""
    if counts is None:
        counts = torch.empty(experts, dtype=torch.int32, device=device)
    if positions is None:
        positions = torch.empty(tokens, topk, dtype=torch.int32, device=device)
    check("counts", counts, (experts,), (torch.int32,))
    check("positions", positions, (tokens, topk), (torch.int32,), device)
    return counts, positions


def check_tokens(layout: Layout, x: torch.Tensor, scales: torch.Tensor | None) -> bool:
    """Raise unless tokens and scales are what rows are made of. True if they must be cast to float8 on the way."""
    cast = x.dtype != layout.dtype
    if not cast:
        check("x", x, (None, layout.hidden), (layout.dtype,))
        if layout.scales:
            if scales is None:
                raise ValueError(f"scales are needed: the layout has {layout.scales} a row")
            check("scales", scales, (x.shape[0], layout.scales), (torch.float32,), x.device)
        return False
    groups = ceil_div(layout.hidden, FP8_GROUP)
    if layout.dtype != torch.float8_e4m3fn or layout.scales != groups:
        raise TypeError(
            f"x is {x.dtype} and rows are {layout.dtype} with {layout.scales} scales: the cast on the way is to "
            f"float8_e4m3fn with {groups} scales, one for {FP8_GROUP} elements"
        )
    if scales is not None:
        raise ValueError("scales are computed by the cast; pass None")
    check("x", x, (None, layout.hidden), CAST_DTYPES)
    return True


def check_dispatch_send(layout: Layout, x, indices, send, near) -> tuple[int, int]:
    """(tokens, top-k), or an error."""
    tokens, topk = check_indices(indices, layout.topk)
    check("indices", indices, (x.shape[0] if x.dim() else 0, topk), INDEX_DTYPES, x.device)
    check_rows("send", send, layout.row_bytes, x.device)
    if send.shape[0] < tokens * topk:
        raise ValueError(f"send has {send.shape[0]} rows, {tokens} tokens of top-k {topk} need {tokens * topk}")
    check_near(layout, near, x.device)
    return tokens, topk


def check_dispatch_receive(
    layout: Layout, recv, counts, out_x, map_row, map_to, expert_tokens, totals, out_scales, starts, near
) -> int:
    """Rows of `out_x`, or an error."""
    device = recv.device
    check_rows("recv", recv, layout.row_bytes, device)
    check("counts", counts, (layout.ranks, layout.local_experts), (torch.int32,), device)
    check("out_x", out_x, (None, layout.hidden), (layout.dtype,), device)
    rows = out_x.shape[0]
    check("map_row", map_row, (-rows,), (torch.int32,), device)
    check("map_to", map_to, (-rows,), (torch.int64,), device)
    check("expert_tokens", expert_tokens, (layout.local_experts,), (torch.int32,), device)
    check("totals", totals, (2,), (torch.int32,), device)
    if layout.scales:
        if out_scales is None:
            raise ValueError(f"out_scales is needed: the layout has {layout.scales} scales a row")
        check("out_scales", out_scales, (rows, layout.scales), (torch.float32,), device)
    if layout.near_ranks:
        if starts is None:
            raise ValueError("starts is needed: the layout has near ranks")
        check("starts", starts, (layout.ranks,), (torch.int32,), device)
    check_near(layout, near, device)
    return rows


def check_combine_send(layout: Layout, y, map_row, map_to, totals, send) -> None:
    """Raise unless the arguments of combine send fit each other."""
    check("y", y, (None, layout.hidden), (layout.combine_dtype,))
    check("map_row", map_row, (None,), (torch.int32,), y.device)
    check("map_to", map_to, (-map_row.numel(),), (torch.int64,), y.device)
    check("totals", totals, (2,), (torch.int32,), y.device)
    check_rows("send", send, layout.combine_row_bytes, y.device)
    if layout.near_ranks and not send.shape[0]:
        raise ValueError("send needs a row at least: near ranks' memory is found from its address")


def check_combine_receive(layout: Layout, buf, positions, weights, out) -> tuple[int, int]:
    """(tokens, top-k), or an error."""
    tokens, topk = check_indices(positions, layout.topk)
    check_rows("buf", buf, layout.combine_row_bytes, buf.device)
    check("positions", positions, (tokens, topk), (torch.int32,), buf.device)
    check("out", out, (tokens, layout.hidden), OUT_DTYPES, buf.device)
    if weights is not None:
        check("weights", weights, (tokens, topk), (torch.float32,), buf.device)
    return tokens, topk


def near_offsets(buffer: torch.Tensor, addresses: list[int]) -> torch.Tensor:
    """Offsets of peers' memory from `buffer`, for the `near` arguments.

    Parameters
    ----------
    buffer : the send buffer that the offsets count from; aligned to 16 bytes, not empty.
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
