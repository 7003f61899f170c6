"""What each kernel computes, in plain torch: slow, clear, on any device. Signals and waits have no place here.

Arguments are those of the Triton functions, but near ranks' memory is given as tensors instead of offsets.
"""

from __future__ import annotations

import torch

from .layout import FP8_GROUP, NEAR_UNIT, Layout


def route(indices: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """counts int32 [experts], positions int32 [tokens, topk]; see routing.route."""
    e = indices.reshape(-1).long()
    live = (e >= 0) & (e < experts)
    order = torch.where(live, e, experts).argsort(stable=True)
    positions = torch.empty_like(e)
    positions[order] = torch.arange(e.numel(), device=e.device)
    positions[~live] = -1
    counts = torch.bincount(e[live], minlength=experts)
    return counts.to(torch.int32), positions.to(torch.int32).reshape(indices.shape)


def prefix(counts: torch.Tensor) -> torch.Tensor:
    """int32 [experts + 1]; see routing.prefix."""
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)]).to(torch.int32)


def cast_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cast to float8_e4m3fn with a scale for each 128 elements.

    Parameters
    ----------
    x : bfloat16, float16 or float32 [tokens, hidden]

    Returns
    -------
    float8_e4m3fn [tokens, hidden] and float32 [tokens, ceil(hidden/128)]: ``scale = max(amax, 1e-10) / 448``.
    """
    tokens, hidden = x.shape
    groups = -(-hidden // FP8_GROUP)
    v = x.new_zeros((tokens, groups * FP8_GROUP), dtype=torch.float32)
    v[:, :hidden] = x
    v = v.reshape(tokens, groups, FP8_GROUP)
    top = v.abs().amax(-1).clamp(min=1e-10)
    scales = top / torch.full_like(top, 448.0)  # by a number, torch on a GPU would multiply with the reciprocal
    q = (v / scales[..., None]).to(torch.float8_e4m3fn)
    return q.reshape(tokens, groups * FP8_GROUP)[:, :hidden].contiguous(), scales


def pack(layout: Layout, x: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    """Tokens as rows: uint8 [tokens, layout.row_bytes], padding zero."""
    if x.dtype != layout.dtype:
        x, scales = cast_fp8(x)
    rows = torch.zeros(x.shape[0], layout.row_bytes, dtype=torch.uint8, device=x.device)
    if not x.shape[0]:
        return rows
    rows[:, : layout.x_bytes] = x.contiguous().view(torch.uint8).reshape(x.shape[0], layout.x_bytes)
    if layout.scales:
        s = scales.contiguous().view(torch.uint8).reshape(x.shape[0], 4 * layout.scales)
        rows[:, layout.scale_at : layout.scale_at + 4 * layout.scales] = s
    return rows


def store_row(layout: Layout, to: torch.Tensor, rows: torch.Tensor) -> None:
    """Store the bytes of rows that mean something; padding stays as it is."""
    to[:, : layout.x_bytes] = rows[:, : layout.x_bytes]
    at = layout.scale_at
    to[:, at : at + 4 * layout.scales] = rows[:, at : at + 4 * layout.scales]


def dispatch_send(
    layout: Layout,
    x: torch.Tensor,
    indices: torch.Tensor,
    send: torch.Tensor,
    *,
    scales: torch.Tensor | None = None,
    near: list[torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """counts, positions; see send.dispatch_send. `near`: uint8 [near_rows, row_bytes] at each near rank."""
    counts, positions = route(indices, layout.experts)
    starts = prefix(counts)
    rows = pack(layout, x, scales)
    for d in range(layout.ranks):
        first = int(starts[layout.first_expert(d)])
        end = int(starts[layout.first_expert(d + 1)])
        here = (positions >= first) & (positions < end)
        at = positions[here].long()
        part = rows[here.nonzero()[:, 0]]
        whole = send if not layout.is_near(d) else near[d - layout.near_first]
        if layout.is_near(d):
            at = at - first
        new = whole[at]
        store_row(layout, new, part)
        whole[at] = new
    return counts, positions


def landing(layout: Layout, counts: torch.Tensor) -> tuple[list[list[int]], list[int]]:
    """For each source the rows of the receive buffer that its rows lie in, in its order; and rows of lower far
    ranks."""
    of = counts.sum(1).tolist()
    where, behind, over, before = [], [], 0, 0
    base = layout.near_ranks * layout.near_rows
    for s, n in enumerate(of):
        behind.append(before)
        if layout.is_near(s):
            where.append([(s - layout.near_first) * layout.near_rows + j for j in range(n)])
            continue
        p = layout.private
        where.append([base + (s * p + j if j < p else layout.ranks * p + over + j - p) for j in range(n)])
        over += max(n - p, 0)
        before += n
    return where, behind


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
    """See receive.dispatch_receive."""
    c = counts.cpu().long()
    expert_tokens.copy_(c.sum(0))
    room = -(-c.sum(0) // layout.pad) * layout.pad
    if int(room.sum()) > out_x.shape[0]:
        totals.copy_(torch.tensor([-1, 0]))
        return
    where, behind = landing(layout, c)
    unit = layout.combine_row_bytes // NEAR_UNIT
    taken = [0] * layout.ranks
    flat = out_x.view(torch.uint8).reshape(out_x.shape[0], layout.x_bytes)
    i = far = 0
    for e in range(layout.local_experts):
        row = int(room[:e].sum())
        for s in range(layout.ranks):
            close = layout.is_near(s)
            for _ in range(int(c[s, e])):
                j = taken[s]
                taken[s] += 1
                data = recv[where[s][j]]
                flat[row] = data[: layout.x_bytes]
                if layout.scales:
                    at = layout.scale_at
                    out_scales[row] = data[at : at + 4 * layout.scales].view(torch.float32)
                map_row[i] = row
                if close:
                    to = int(near[s - layout.near_first]) + (int(starts[s]) + j) * unit
                    map_to[i] = to * 2 + 1
                else:
                    map_to[i] = (behind[s] + j) * unit * 2
                    far += 1
                row += 1
                i += 1
    totals.copy_(torch.tensor([i, far]))


def combine_send(
    layout: Layout,
    y: torch.Tensor,
    map_row: torch.Tensor,
    map_to: torch.Tensor,
    totals: torch.Tensor,
    send: torch.Tensor,
    *,
    near: tuple[torch.Tensor, int] | None = None,
) -> None:
    """See combine.combine_send. `near`: (uint8 [rows, combine_row_bytes], the 16-byte offset of its first row from
    `send`)."""
    n = max(int(totals[0]), 0)
    unit = layout.combine_row_bytes // NEAR_UNIT
    rows = y.contiguous().view(torch.uint8).reshape(y.shape[0], layout.y_bytes)[map_row[:n].long()]
    to = map_to[:n]
    close = (to & 1) == 1
    send[(to[~close] >> 1) // unit, : layout.y_bytes] = rows[~close]
    if close.any():
        memory, first = near
        memory[((to[close] >> 1) - first) // unit, : layout.y_bytes] = rows[close]


def combine_receive(
    layout: Layout,
    buf: torch.Tensor,
    positions: torch.Tensor,
    weights: torch.Tensor | None,
    out: torch.Tensor,
    *,
    accumulate: bool = False,
) -> torch.Tensor:
    """See combine.combine_receive; sums in float64."""
    rows = buf[:, : layout.y_bytes].contiguous().view(layout.combine_dtype).reshape(buf.shape[0], layout.hidden)
    w = torch.ones(positions.shape, dtype=torch.float32, device=out.device) if weights is None else weights
    live = (positions >= 0) & (w != 0)
    acc = out.double() if accumulate else torch.zeros(out.shape, dtype=torch.float64, device=out.device)
    for k in range(positions.shape[1]):
        m = live[:, k]
        acc[m] += rows[positions[m, k].long()].double() * w[m, k, None].double()
    return out.copy_(acc)
