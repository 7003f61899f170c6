"""One exchange at a time, run by an implementation and by the reference on the same poisoned buffers.

`impl` is fabricx.kernels (Triton, in the interpreter or on a GPU) or fabricx.kernels.cpu; both take the same arguments.
"""

from __future__ import annotations

import torch

from fabricx.kernels import reference
from fabricx.kernels.layout import NEAR_UNIT

POISON = 0x5A
BYTES = torch.uint8


def raw(t):
    """The tensor's bytes: equal means equal, not-a-numbers too."""
    return t.contiguous().view(BYTES) if t.numel() else t.reshape(-1)


def poisoned(*shape, dtype=BYTES, device="cpu"):
    n = 1
    for s in shape:
        n *= s
    flat = torch.full((n * dtype.itemsize,), POISON, dtype=BYTES, device=device)
    return flat.view(dtype).reshape(shape)


def random_bytes(gen, *shape):
    return torch.randint(0, 256, shape, dtype=BYTES, generator=gen)


def generator(seed):
    return torch.Generator().manual_seed(seed)


def random_tokens(gen, tokens, hidden, dtype):
    """Bit patterns where rows are copied, so that no value can be rounded unnoticed."""
    return random_bytes(gen, tokens, hidden * dtype.itemsize).view(dtype).reshape(tokens, hidden)


def random_indices(gen, tokens, topk, experts, *, masked=0.15, wide=False):
    """Experts with masked ones, duplicates, and numbers out of range."""
    idx = torch.randint(0, experts, (tokens, topk), generator=gen)
    if topk > 1:
        same = torch.rand(tokens, generator=gen) < 0.2
        idx[same, 1] = idx[same, 0]
    idx[torch.rand(tokens, topk, generator=gen) < masked] = -1
    if tokens > 2:
        idx[1] = -1
        idx[2, 0] = experts + 3
    return idx if wide else idx.to(torch.int32)


def scratch_pool(layout, tokens, near_rows, row_bytes, device, send_rows=None):
    """A send buffer and, behind it, each near rank's memory: offsets between allocations are not needed then."""
    rows = tokens * layout.topk if send_rows is None else send_rows
    pool = poisoned(rows + layout.near_ranks * near_rows, row_bytes, device=device)
    near = [pool[rows + i * near_rows : rows + (i + 1) * near_rows] for i in range(layout.near_ranks)]
    offsets = [(n.data_ptr() - pool.data_ptr()) // NEAR_UNIT for n in near]
    return pool, pool[:rows], near, torch.tensor(offsets, dtype=torch.int64, device=device)


def near_or_none(layout, offsets):
    return offsets if layout.near_ranks else None


def check_dispatch_send(impl, layout, x, indices, scales=None, device="cpu", **more):
    """Every byte of the send buffer and of near memory, positions and counts. Returns (counts, positions, pool)."""
    x, indices = x.to(device), indices.to(device)
    scales = None if scales is None else scales.to(device)
    tokens = x.shape[0]
    want_pool, want_send, want_near, _ = scratch_pool(layout, tokens, layout.near_rows, layout.row_bytes, device)
    counts, positions = reference.dispatch_send(layout, x, indices, want_send, scales=scales, near=want_near)
    pool, send, _, offsets = scratch_pool(layout, tokens, layout.near_rows, layout.row_bytes, device)
    got_counts = poisoned(layout.experts, dtype=torch.int32, device=device)
    got_positions = poisoned(tokens, layout.topk, dtype=torch.int32, device=device)
    impl.dispatch_send(
        layout, x, indices, send, scales=scales, near=near_or_none(layout, offsets), counts=got_counts,
        positions=got_positions, **more,
    )  # fmt: skip
    assert torch.equal(got_counts, counts), "counts"
    assert torch.equal(got_positions, positions), "positions"
    assert torch.equal(pool, want_pool), f"rows: {(pool != want_pool).nonzero()[:5].tolist()}"
    return got_counts, got_positions, pool


def outputs(layout, capacity, device="cpu"):
    """Everything that dispatch receive writes, poisoned."""
    return dict(
        out_x=poisoned(capacity, layout.hidden, dtype=layout.dtype, device=device),
        map_row=poisoned(capacity, dtype=torch.int32, device=device),
        map_to=poisoned(capacity, dtype=torch.int64, device=device),
        expert_tokens=poisoned(layout.local_experts, dtype=torch.int32, device=device),
        totals=poisoned(2, dtype=torch.int32, device=device),
        out_scales=poisoned(capacity, layout.scales, dtype=torch.float32, device=device) if layout.scales else None,
    )


def check_dispatch_receive(impl, layout, counts, gen, device="cpu", capacity=None, **more):
    """All outputs, what must stay untouched included. Returns the outputs."""
    c = counts.cpu().long()
    padded = int((-(-c.sum(0) // layout.pad) * layout.pad).sum())
    capacity = padded + 3 if capacity is None else capacity
    of = c.sum(1)
    far = sum(max(int(n) - layout.private, 0) for s, n in enumerate(of) if not layout.is_near(s))
    rows = layout.near_ranks * layout.near_rows + layout.ranks * layout.private + far
    recv = random_bytes(gen, rows, layout.row_bytes)
    starts = torch.randint(0, 50, (layout.ranks,), generator=gen, dtype=torch.int32)
    near = torch.randint(0, 1 << 40, (layout.near_ranks,), generator=gen)
    args = dict(starts=starts, near=near) if layout.near_ranks else {}
    want, got = outputs(layout, capacity), outputs(layout, capacity, device)
    reference.dispatch_receive(layout, recv, counts.cpu(), **want, **args)
    args = {k: v.to(device) for k, v in args.items()}
    impl.dispatch_receive(layout, recv.to(device), counts.to(device), **got, **args, **more)
    for name in want:
        if want[name] is not None:
            assert torch.equal(raw(got[name].cpu()), raw(want[name])), name
    return got


def random_counts(gen, layout, most):
    """Rows each source sends to each expert here: near sources within their room, some sources and experts empty."""
    c = torch.randint(0, most + 1, (layout.ranks, layout.local_experts), generator=gen, dtype=torch.int32)
    c[torch.rand(layout.ranks, generator=gen) < 0.2] = 0
    c[:, torch.rand(layout.local_experts, generator=gen) < 0.2] = 0
    if layout.near_ranks:
        close = c[layout.near_first : layout.near_first + layout.near_ranks]
        close.clamp_(max=layout.near_rows // max(layout.local_experts, 1))
    return c


def check_combine_send(impl, layout, counts, gen, device="cpu", **more):
    """Every byte of the send buffer and of near memory, for the maps of a receive with these counts."""
    c = counts.long()
    capacity = max(int((-(-c.sum(0) // layout.pad) * layout.pad).sum()), 1)
    near_rows = max(int(c.sum(1).max()) if c.numel() else 0, 1) + 7
    far = max(sum(int(n) for s, n in enumerate(c.sum(1)) if not layout.is_near(s)), 1)
    want = scratch_pool(layout, 0, near_rows, layout.combine_row_bytes, device, send_rows=far)
    got = scratch_pool(layout, 0, near_rows, layout.combine_row_bytes, device, send_rows=far)
    starts = torch.randint(0, 8, (layout.ranks,), generator=gen, dtype=torch.int32)
    maps = outputs(layout, capacity)
    recv = torch.zeros(layout.near_ranks * layout.near_rows + layout.ranks * layout.private + far, layout.row_bytes,
                       dtype=BYTES)  # fmt: skip
    reference.dispatch_receive(layout, recv, counts, **maps, starts=starts, near=want[3].cpu())
    y = random_tokens(gen, capacity, layout.hidden, layout.combine_dtype).to(device)
    args = [maps[k].to(device) for k in ("map_row", "map_to", "totals")]
    pool, send, near, offsets = want
    memory = (pool[far:], int(offsets[0])) if layout.near_ranks else None
    reference.combine_send(layout, y, *args, send, near=memory)
    impl.combine_send(layout, y, *args, got[1], **more)
    assert torch.equal(got[0], pool), f"rows: {(got[0] != pool).nonzero()[:5].tolist()}"
    return args


TOLERANCE = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-22}


def check_combine_receive(impl, layout, positions, gen, out_dtype, *, accumulate, weighted, device="cpu", **more):
    """Sums against float64; masked rows and rows of weight zero hold not-a-numbers."""
    tokens, topk = positions.shape
    values = torch.randn(tokens * topk, layout.hidden, generator=gen).to(layout.combine_dtype)
    weights = torch.rand(tokens, topk, generator=gen) + 0.05 if weighted else None
    dead = torch.ones(tokens * topk, dtype=torch.bool)
    live = positions >= 0
    if weighted:
        weights[torch.rand(tokens, topk, generator=gen) < 0.1] = 0.0
        live = live & (weights != 0)
    dead[positions[live].long()] = False
    values[dead] = float("nan")
    buf = poisoned(tokens * topk, layout.combine_row_bytes)
    buf[:, : layout.y_bytes] = values.view(BYTES).reshape(tokens * topk, layout.y_bytes)
    start = torch.randn(tokens, layout.hidden, generator=gen).to(out_dtype)
    if not accumulate:
        start.fill_(float("nan"))
    exact = start.double() if accumulate else torch.zeros(tokens, layout.hidden, dtype=torch.float64)
    exact = reference.combine_receive(layout, buf, positions, weights, exact.clone(), accumulate=True)
    got = start.to(device)
    impl.combine_receive(
        layout, buf.to(device), positions.to(device), None if weights is None else weights.to(device), got,
        accumulate=accumulate, **more,
    )  # fmt: skip
    error = (got.cpu().double() - exact).abs()
    # half a unit in the last place of the result, and float32's error on terms that cancel
    size = torch.maximum(exact.abs(), torch.tensor(1.0, dtype=torch.float64))
    assert bool((error <= TOLERANCE[out_dtype] * size + 1e-5).all()), f"off by {error.max()}"
    return got
