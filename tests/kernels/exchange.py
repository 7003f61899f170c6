"""A whole round among ranks of one process. Rows of far ranks are moved as docs/kernels.md says a proxy does it."""

from __future__ import annotations

import torch

import fabricx.kernels as fk

BYTES = torch.uint8


def empty_rows(n, row_bytes, device):
    return torch.full((max(n, 1), row_bytes), 0x5A, dtype=BYTES, device=device)


class Rank:
    """Buffers of one rank."""

    def __init__(self, shape, rank, tokens, most, groups, device):
        first, size = groups[rank]
        probe = fk.Layout(**shape, rank=rank)
        room = probe.near_bound(most, distinct=False) if size else 0
        self.layout = fk.Layout(**shape, rank=rank, near_first=first, near_ranks=size, near_rows=room)
        layout, n = self.layout, most * shape["topk"]
        self.tokens, self.device = tokens, device
        self.send = empty_rows(n, layout.row_bytes, device)
        self.recv = empty_rows(layout.receive_bound(most, distinct=False), layout.row_bytes, device)
        self.back = empty_rows(layout.return_bound(most, distinct=False), layout.combine_row_bytes, device)
        self.buf = empty_rows(n, layout.combine_row_bytes, device)
        capacity = layout.expert_bound(most, distinct=False)
        self.out_x = torch.zeros(capacity, layout.hidden, dtype=BYTES, device=device).repeat(1, layout.dtype.itemsize)
        self.out_x = self.out_x.view(layout.dtype)
        self.out_scales = torch.zeros(capacity, layout.scales, device=device) if layout.scales else None
        self.map_row = torch.full((capacity,), -1, dtype=torch.int32, device=device)
        self.map_to = torch.full((capacity,), -1, dtype=torch.int64, device=device)
        self.expert_tokens = torch.full((layout.local_experts,), -1, dtype=torch.int32, device=device)
        self.totals = torch.full((2,), -9, dtype=torch.int32, device=device)


def near_of(ranks, r, buffer, name, row_of):
    """Offsets of each near rank's memory from this rank's buffer."""
    layout = ranks[r].layout
    if not layout.near_ranks:
        return None
    group = ranks[layout.near_first : layout.near_first + layout.near_ranks]
    addresses = [getattr(p, name).data_ptr() + row_of(p) * getattr(p, name).shape[1] for p in group]
    return fk.near_offsets(buffer, addresses)


def start(layout, counts, d):
    """Rows that a source with these counts sends to ranks below d."""
    return int(counts[: layout.first_expert(d)].sum())


def proxy_dispatch(ranks, counts):
    """Move every far rank's rows: private slots, then the rest at offsets from all counts."""
    n = len(ranks)
    for d in range(n):
        layout = ranks[d].layout
        base, p, over = layout.near_ranks * layout.near_rows, layout.private, 0
        for s in range(n):
            if layout.is_near(s):
                continue
            a, b = start(layout, counts[s], d), start(layout, counts[s], d + 1)
            first = min(p, b - a)
            ranks[d].recv[base + s * p : base + s * p + first] = ranks[s].send[a : a + first]
            to = base + n * p + over
            ranks[d].recv[to : to + b - a - first] = ranks[s].send[a + first : b]
            over += b - a - first


def proxy_combine(ranks, counts):
    """Move every far source's rows back, one slice each."""
    for d in range(len(ranks)):
        layout, at = ranks[d].layout, 0
        for s in range(len(ranks)):
            if not layout.is_near(s):
                a, b = start(layout, counts[s], d), start(layout, counts[s], d + 1)
                ranks[s].buf[a:b] = ranks[d].back[at : at + b - a]
                at += b - a


def run(impl, ranks, xs, scales, indices, weights, outs, expert, accumulate=False, **more):
    """One round on every rank. `expert(layout, rank's x rows, scales)` makes the outputs of all local experts' rows."""
    device = ranks[0].device
    counts, positions = [], []
    for r, rank in enumerate(ranks):
        slot = near_of(ranks, r, rank.send, "recv", lambda p, r=r: (r - p.layout.near_first) * p.layout.near_rows)
        c, p = impl.dispatch_send(rank.layout, xs[r], indices[r], rank.send, scales=scales[r], near=slot)
        counts.append(c.cpu())
        positions.append(p)
    proxy_dispatch(ranks, counts)
    for r, rank in enumerate(ranks):
        layout = rank.layout
        e0 = layout.first_expert(r)
        here = torch.stack([c[e0 : e0 + layout.local_experts] for c in counts]).contiguous().to(device)
        starts = torch.tensor([start(layout, c, r) for c in counts], dtype=torch.int32, device=device)
        near = near_of(ranks, r, rank.back, "buf", lambda p: 0)
        impl.dispatch_receive(
            layout, rank.recv, here, rank.out_x, rank.map_row, rank.map_to, rank.expert_tokens, rank.totals,
            out_scales=rank.out_scales, starts=starts, near=near, **more,
        )  # fmt: skip
        y = expert(layout, rank)
        impl.combine_send(layout, y, rank.map_row, rank.map_to, rank.totals, rank.back, **more)
    proxy_combine(ranks, counts)
    for r, rank in enumerate(ranks):
        impl.combine_receive(rank.layout, rank.buf, positions[r], weights[r], outs[r], accumulate=accumulate)


def scale_by_expert(layout, rank):
    """A made-up expert e: multiply by e + 1. Rows are found by the counts, as a grouped matrix product would."""
    x = rank.out_x.float()
    if rank.out_scales is not None:
        x = x * rank.out_scales.repeat_interleave(128, 1)[:, : layout.hidden]
    y = torch.full(x.shape, float("nan"), device=x.device)
    at = 0
    for i, n in enumerate(rank.expert_tokens.tolist()):
        y[at : at + n] = x[at : at + n] * (layout.first_expert(layout.rank) + i + 1)
        at += -(-n // layout.pad) * layout.pad
    return y.to(layout.combine_dtype)


def dense(x, indices, weights, experts):
    """What the round computes, without moving anything."""
    live = (indices >= 0) & (indices < experts)
    return x.double() * (torch.where(live, weights.double() * (indices + 1), 0.0)).sum(1, keepdim=True)


def check_round(impl, shape, tokens, groups, gen, device="cpu", rounds=2, **more):
    """Rounds with fresh routing in the same buffers, against the dense computation."""
    import rig

    most = max(*tokens, 1)
    ranks = [Rank(shape, r, tokens[r], most, groups, device) for r in range(shape["ranks"])]
    cast = shape.get("scales", 0) > 0
    for _ in range(rounds):
        indices = [rig.random_indices(gen, n, shape["topk"], shape["experts"]) for n in tokens]
        x = [torch.randn(n, shape["hidden"], generator=gen).to(torch.bfloat16) for n in tokens]
        weights = [torch.rand(n, shape["topk"], generator=gen) + 0.1 for n in tokens]
        outs = [torch.full((n, shape["hidden"]), float("nan"), device=device) for n in tokens]
        run(
            impl, ranks, [v.to(device) for v in x], [None] * len(x), [i.to(device) for i in indices],
            [w.to(device) for w in weights], outs, scale_by_expert, **more,
        )  # fmt: skip
        for got, v, i, w in zip(outs, x, indices, weights, strict=True):
            want = dense(v, i, w, shape["experts"])
            size = want.abs().amax(1, keepdim=True) + 1e-9
            error = ((got.cpu().double() - want).abs() / size).max() if len(v) else 0.0
            assert float(error) < (0.1 if cast else 0.02), float(error)


def node_groups(ranks, size):
    """Near groups of `size` ranks in a row; 0: none is near."""
    if not size:
        return [(0, 0)] * ranks
    return [(r // size * size, min(size, ranks - r // size * size)) for r in range(ranks)]
