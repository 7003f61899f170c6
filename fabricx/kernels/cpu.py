"""The kernels on a CPU, in Numba without the GIL; large ones use Numba's threads. Same arguments, same results.

Signals and waits are for GPUs: here a function has done its work when it returns.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import prange

from . import checks
from ._numba import BF16, F16, F32, copy_bytes, inline, largest, loops, narrow, to_fp8, widen
from .checks import near_offsets  # noqa: F401
from .layout import FP8_GROUP, NEAR_UNIT, Layout

_KINDS = {torch.float32: F32, torch.bfloat16: BF16, torch.float16: F16}
_NONE = np.zeros(0, np.int64)
_NO_STARTS = np.zeros(0, np.int32)


@inline
def _owner(e, base, extra):
    big = extra * (base + 1)
    return e // (base + 1) if e < big else extra + (e - big) // base


@inline
def _first(d, base, extra):
    return d * base + min(d, extra)


def _route(idx, counts, positions, starts):
    """Counting sort: rows of each expert, and where each pair goes. `starts`: scratch, as many as experts, and one."""
    experts = counts.size
    counts[:] = 0
    n = idx.size
    for i in range(n):
        e = idx[i]
        if 0 <= e < experts:
            counts[e] += 1
    at = 0
    for e in range(experts):
        starts[e] = at
        at += counts[e]
    starts[experts] = at
    for i in range(n):
        e = idx[i]
        if 0 <= e < experts:
            positions[i] = starts[e]
            starts[e] += 1
        else:
            positions[i] = -1
    for e in range(experts):
        starts[e] -= counts[e]


def _pack(idx, positions, starts, x, scales, send, near, shape, row):
    """Copy every token to its rows. shape: (top-k, base, extra, first near rank); row: bytes of (token, scales, where
    scales lie, whole row)."""
    topk, base, extra, near0 = shape
    x_bytes, s_bytes, scale_at, row_bytes = row
    tokens = idx.size // topk
    for t in prange(tokens):
        for k in range(topk):
            pos = positions[t * topk + k]
            if pos >= 0:
                to = _place(idx[t * topk + k], pos, starts, send, near, base, extra, near0, row_bytes)
                copy_bytes(to, x + t * x_bytes, x_bytes)
                if s_bytes:
                    copy_bytes(to + scale_at, scales + t * s_bytes, s_bytes)


@inline
def _place(e, pos, starts, send, near, base, extra, near0, row_bytes):
    """Address of a row."""
    d = _owner(e, base, extra)
    i = d - near0
    if 0 <= i < near.size:
        return send + near[i] * NEAR_UNIT + (pos - starts[_first(d, base, extra)]) * row_bytes
    return send + pos * row_bytes


def _cast_pack(idx, positions, starts, x, kind, send, near, shape, row):
    """`_pack` with the cast to float8; x is the address of elements of `kind`."""
    topk, base, extra, near0 = shape
    hidden, s_bytes, scale_at, row_bytes = row
    tokens = idx.size // topk
    item = 4 if kind == F32 else 2
    for t in prange(tokens):
        values = np.empty(hidden, np.float32)
        scales = np.empty(s_bytes // 4, np.float32)
        out = np.empty(hidden, np.uint8)
        widen(kind, x + t * hidden * item, values)
        for g in range(scales.size):
            group = values[g * FP8_GROUP : (g + 1) * FP8_GROUP]
            scales[g] = max(largest(group), np.float32(1e-10)) / np.float32(448.0)
            group /= scales[g]
        to_fp8(values, out)
        for k in range(topk):
            pos = positions[t * topk + k]
            if pos >= 0:
                to = _place(idx[t * topk + k], pos, starts, send, near, base, extra, near0, row_bytes)
                copy_bytes(to, out.ctypes.data, hidden)
                copy_bytes(to + scale_at, scales.ctypes.data, s_bytes)


def _map(counts, starts, near, shape, rows, slots, map_row, map_to, expert_tokens, totals):
    """Where each row lies, goes, and returns to. shape: (private, first near rank, near rows, pad, 16-byte units of a
    combined row)."""
    private, near0, near_rows, pad, unit = shape
    n, el = counts.shape
    nears = near.size
    before = np.zeros(n, np.int64)  # far rows of lower sources
    over = np.zeros(n, np.int64)  # of those, beyond the private slots
    taken = np.zeros(n, np.int64)
    b = o = padded = far = np.int64(0)
    for s in range(n):
        before[s], over[s] = b, o
        if not 0 <= s - near0 < nears:
            of = np.int64(0)
            for e in range(el):
                of += counts[s, e]
            b += of
            o += max(of - private, 0)
            far += of
    for e in range(el):
        t = np.int64(0)
        for s in range(n):
            t += counts[s, e]
        expert_tokens[e] = t
        padded += (t + pad - 1) // pad * pad
    if padded > rows:
        totals[0], totals[1] = -1, 0
        return 0
    i = row = np.int64(0)
    base = nears * near_rows
    for e in range(el):
        segment = row
        for s in range(n):
            close = 0 <= s - near0 < nears
            for _ in range(counts[s, e]):
                j = taken[s]
                taken[s] += 1
                if close:
                    slots[i] = (s - near0) * near_rows + j
                    map_to[i] = (near[s - near0] + (starts[s] + j) * unit) * 2 + 1
                else:
                    slots[i] = base + (s * private + j if j < private else n * private + over[s] + j - private)
                    map_to[i] = (before[s] + j) * unit * 2
                map_row[i] = row
                i += 1
                row += 1
        row = segment + (expert_tokens[e] + pad - 1) // pad * pad
    totals[0], totals[1] = i, far
    return i


def _unpack(n, slots, map_row, recv, out_x, out_s, row):
    """Copy rows apart into tokens and scales."""
    x_bytes, s_bytes, scale_at, row_bytes = row
    for i in prange(n):
        src = recv + slots[i] * row_bytes
        copy_bytes(out_x + map_row[i] * x_bytes, src, x_bytes)
        if s_bytes:
            copy_bytes(out_s + map_row[i] * s_bytes, src + scale_at, s_bytes)


def _return(n, y, map_row, map_to, send, y_bytes):
    """Copy rows to where their tokens came from."""
    for i in prange(n):
        copy_bytes(send + (map_to[i] >> 1) * NEAR_UNIT, y + map_row[i] * y_bytes, y_bytes)


def _sum(buf, kind, row_bytes, positions, weights, out, out_kind, hidden, topk, accumulate):
    """Weighted sums in float32; no weights: ones."""
    tokens = positions.size // topk
    item = 4 if out_kind == F32 else 2
    for t in prange(tokens):
        acc = np.zeros(hidden, np.float32)
        v = np.empty(hidden, np.float32)
        for k in range(topk):
            i = t * topk + k
            w = weights[i] if weights.size else np.float32(1.0)
            if positions[i] >= 0 and w != 0:
                widen(kind, buf + positions[i] * row_bytes, v)
                for h in range(hidden):
                    acc[h] += w * v[h]
        to = out + t * hidden * item
        if accumulate:
            widen(out_kind, to, v)
            for h in range(hidden):
                acc[h] += v[h]
        narrow(out_kind, acc, to)


_route_j, _pack_j, _cast_pack_j, _map_j = loops(_route), loops(_pack), loops(_cast_pack), loops(_map)
_unpack_j, _return_j, _sum_j = loops(_unpack), loops(_return), loops(_sum)


def _cpu(t: torch.Tensor) -> None:
    if t.device.type != "cpu":
        raise ValueError(f"these are functions for the CPU, the tensors are on {t.device}")


def _flat(t: torch.Tensor | None, none: np.ndarray) -> np.ndarray:
    return none if t is None else t.reshape(-1).numpy()


def _routed(indices, experts, counts, positions) -> np.ndarray:
    starts = np.empty(experts + 1, np.int64)
    _route_j(0, _flat(indices, _NONE), counts.numpy(), _flat(positions, _NONE), starts)
    return starts


def route(
    indices: torch.Tensor,
    experts: int,
    *,
    counts: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Count the rows of each expert and place every row; see `fabricx.kernels.route`."""
    tokens, topk = checks.check_indices(indices)
    _cpu(indices)
    counts, positions = checks.route_outputs(tokens, topk, experts, counts, positions, indices.device)
    _routed(indices, experts, counts, positions)
    return counts, positions


def prefix(counts: torch.Tensor, *, starts: torch.Tensor | None = None) -> torch.Tensor:
    """Where each expert's rows start: int32 [experts + 1]; see `fabricx.kernels.prefix`."""
    checks.check("counts", counts, (None,), (torch.int32,))
    _cpu(counts)
    if starts is None:
        starts = torch.empty(counts.numel() + 1, dtype=torch.int32)
    checks.check("starts", starts, (counts.numel() + 1,), (torch.int32,), counts.device)
    starts[0] = 0
    torch.cumsum(counts, 0, dtype=torch.int32, out=starts[1:])
    return starts


def dispatch_send(
    layout: Layout,
    x: torch.Tensor,
    indices: torch.Tensor,
    send: torch.Tensor,
    *,
    scales: torch.Tensor | None = None,
    near: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pack tokens into rows by (destination, expert); see `fabricx.kernels.dispatch_send`."""
    _cpu(x)
    tokens, topk = checks.check_dispatch_send(layout, x, indices, send, near)
    cast = checks.check_tokens(layout, x, scales)
    counts, positions = checks.route_outputs(tokens, topk, layout.experts, counts, positions, x.device)
    starts = _routed(indices, layout.experts, counts, positions)
    shape = (topk, layout.base, layout.extra, layout.near_first)
    row = (layout.x_bytes, 4 * layout.scales, layout.scale_at, layout.row_bytes)
    near = _flat(near if layout.near_ranks else None, _NONE)
    common = _flat(indices, _NONE), _flat(positions, _NONE), starts, x.data_ptr()
    nbytes = tokens * topk * layout.row_bytes
    if cast:
        _cast_pack_j(nbytes, *common, _KINDS[x.dtype], send.data_ptr(), near, shape, row)
    else:
        s = scales.data_ptr() if layout.scales else 0
        _pack_j(nbytes, *common, s, send.data_ptr(), near, shape, row)
    return counts, positions


def dispatch_receive(
    layout: Layout,
    recv: torch.Tensor,
    counts: torch.Tensor,
    out_x: torch.Tensor,
    map_row: torch.Tensor,
    map_to: torch.Tensor,
    expert_tokens: torch.Tensor,
    totals: torch.Tensor,
    *,
    out_scales: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
    near: torch.Tensor | None = None,
) -> None:
    """Copy what has come into padded expert segments, note the way back; see `fabricx.kernels.dispatch_receive`."""
    _cpu(recv)
    rows = checks.check_dispatch_receive(
        layout, recv, counts, out_x, map_row, map_to, expert_tokens, totals, out_scales, starts, near
    )
    slots = np.empty(rows, np.int64)
    unit = layout.combine_row_bytes // NEAR_UNIT
    shape = (layout.private, layout.near_first, layout.near_rows, layout.pad, unit)
    close = layout.near_ranks > 0
    near, starts = _flat(near if close else None, _NONE), _flat(starts if close else None, _NO_STARTS)
    maps = map_row.numpy(), map_to.numpy()
    n = _map_j(0, counts.numpy(), starts, near, shape, rows, slots, *maps, expert_tokens.numpy(), totals.numpy())
    row = (layout.x_bytes, 4 * layout.scales, layout.scale_at, layout.row_bytes)
    out_s = out_scales.data_ptr() if layout.scales else 0
    _unpack_j(n * layout.row_bytes, n, slots, maps[0], recv.data_ptr(), out_x.data_ptr(), out_s, row)


def combine_send(
    layout: Layout,
    y: torch.Tensor,
    map_row: torch.Tensor,
    map_to: torch.Tensor,
    totals: torch.Tensor,
    send: torch.Tensor,
) -> None:
    """Store expert outputs for the way back; see `fabricx.kernels.combine_send`."""
    _cpu(y)
    checks.check_combine_send(layout, y, map_row, map_to, totals, send)
    n = max(int(totals[0]), 0)
    _return_j(n * layout.y_bytes, n, y.data_ptr(), map_row.numpy(), map_to.numpy(), send.data_ptr(), layout.y_bytes)


def combine_receive(
    layout: Layout,
    buf: torch.Tensor,
    positions: torch.Tensor,
    weights: torch.Tensor | None,
    out: torch.Tensor,
    *,
    accumulate: bool = False,
) -> torch.Tensor:
    """Sum each token's rows by weight, in float32; see `fabricx.kernels.combine_receive`."""
    _cpu(buf)
    tokens, topk = checks.check_combine_receive(layout, buf, positions, weights, out)
    w = np.zeros(0, np.float32) if weights is None else _flat(weights, _NONE)
    _sum_j(
        tokens * topk * layout.y_bytes, buf.data_ptr(), _KINDS[layout.combine_dtype], layout.combine_row_bytes,
        _flat(positions, _NONE), w, out.data_ptr(), _KINDS[out.dtype], layout.hidden, topk, accumulate,
    )  # fmt: skip
    return out
