"""Flags, epochs, waits: that what a flag speaks of is there, that rounds count, that nothing waits for ever."""

from __future__ import annotations

import time

import pytest
import rig
import torch

import fabricx.kernels as fk

T, R, E, N = 64, 4, 32, 8
SMALL = dict(hidden=512, experts=E, ranks=N, topk=R, near_first=2, near_ranks=2, rank=2, near_rows=T * R, private=4)


class Rank:
    """One rank's buffers, flags and control block. What others would write stays as it is, unless a test writes it."""

    def __init__(self, tokens=T, timeout=5.0, **case):
        self.layout = layout = fk.Layout(**(SMALL | dict(near_rows=max(tokens * R, 1)) | case))
        self.tokens = tokens
        near = layout.near_ranks
        self.host = torch.zeros(64, dtype=torch.int32).pin_memory()
        self.counts_flag, self.far_flag, self.back_flag = self.host[0:1], self.host[16:17], self.host[32:33]
        self.abort = self.host[48:49]
        self.peers = torch.zeros(2, near, 32, dtype=torch.int32, device="cuda")
        self.control = fk.new_control(
            "cuda", timeout=timeout, counts=self.counts_flag, far=self.far_flag, back_far=self.back_flag,
            near=[self.peers[0, i, :1] for i in range(near)], back_near=[self.peers[1, i, :1] for i in range(near)],
            abort=self.abort,
        )  # fmt: skip
        self.wait = torch.zeros(1 + near, dtype=torch.int32, device="cuda")
        self.pool, self.send, self.near, self.offsets = rig.scratch_pool(
            layout, tokens, layout.near_rows, layout.row_bytes, "cuda"
        )
        self.gen = rig.generator(5)
        self.x = rig.random_tokens(self.gen, tokens, layout.hidden, layout.dtype).cuda()
        self.counts = torch.zeros(E, dtype=torch.int32).pin_memory()
        self.positions = torch.empty(tokens, R, dtype=torch.int32, device="cuda")
        self.idx = self.indices()
        self.work = torch.empty(fk.workspace_words(tokens, R, E), dtype=torch.int32, device="cuda")

    def indices(self):
        return rig.random_indices(self.gen, self.tokens, R, E).cuda()

    def dispatch_send(self, **more):
        fk.dispatch_send(
            self.layout, self.x, self.idx, self.send, near=self.offsets, counts=self.counts, positions=self.positions,
            control=self.control, workspace=self.work, **more,
        )  # fmt: skip

    def received(self, most=5):
        """Arguments of dispatch_receive, with made-up counts."""
        counts = rig.random_counts(self.gen, self.layout, most)
        capacity = max(int(counts.sum()), 1) + 8
        recv = torch.zeros(self.layout.receive_bound(T * R), self.layout.row_bytes, dtype=torch.uint8, device="cuda")
        outs = rig.outputs(self.layout, capacity, "cuda")
        outs.pop("out_scales")
        starts = torch.zeros(N, dtype=torch.int32, device="cuda")
        return dict(recv=recv, counts=counts.cuda(), starts=starts, near=self.offsets, control=self.control, **outs)

    def flags(self):
        torch.cuda.synchronize()
        return [int(self.counts_flag), int(self.far_flag), *self.peers[0, :, 0].tolist()]

    def epochs(self):
        return list(fk.read_epochs(self.control).values())


@pytest.mark.parametrize("tokens", [0, 1, T, 700])
def test_every_round_raises_every_flag_once(tokens):
    rank = Rank(tokens)
    for n in range(1, 6):
        rank.idx = rank.indices()
        rank.dispatch_send()
        assert rank.flags() == [n] * 4
        assert rank.epochs() == [n, n, n, 0, 0]
        want, _ = fk.reference.route(rank.idx, E)
        assert torch.equal(rank.counts, want.cpu())
    assert fk.read_status(rank.control) == fk.OK


def test_epochs_wrap():
    rank = Rank()
    lines = rank.control[: 5 * 32].view(5, 32)
    lines[:, 2] = -2
    rank.host[:33] = -2
    rank.peers[:] = -2
    rank.wait[:] = -2
    for n in (-1, 0, 1):
        rank.dispatch_send(wait=rank.wait)
        assert rank.flags() == [n] * 4
        rank.wait[:] = n
    assert fk.read_status(rank.control) == fk.OK


def snapshot_kernel():
    import triton
    import triton.language as tl

    from fabricx.kernels.signals import FAR, wait

    @triton.jit
    def snap(src, out, flag, control, n, BLOCK: tl.constexpr):
        if wait(flag, 1, FAR, control) == 1:
            i = tl.program_id(0) * BLOCK
            while i < n:
                o = i + tl.arange(0, BLOCK)
                tl.store(out + o, tl.load(src + o, mask=o < n), mask=o < n)
                i += tl.num_programs(0) * BLOCK

    return snap


def missing_rows(rank, rounds, lie):
    """Rounds in which a copy, taken by another kernel as soon as the flag was up, lacked a row of which the flag
    speaks."""
    snap = snapshot_kernel()
    watchers = [torch.cuda.Stream(), torch.cuda.Stream()]
    sender = torch.cuda.Stream()
    # a watcher's own block: its epoch is the round it waits for
    blocks = [fk.new_control("cuda", timeout=5.0) for _ in watchers]
    bad = 0
    rank.dispatch_send()  # loads the kernel before anything waits
    for b in blocks:
        b[32 + 2] = 1
    layout = rank.layout
    near_pool = rank.pool[rank.send.shape[0] :]
    for n in range(1, rounds + 2):
        rank.idx = rank.indices()
        rank.pool.fill_(rig.POISON)
        copies = [torch.zeros_like(rank.send), torch.zeros_like(near_pool)]
        flags = [rank.host[16:17], rank.peers[0, -1, :1]]
        for b in blocks:
            b[32 + 2] = n + 1
        torch.cuda.synchronize()
        for w, b, flag, src, out in zip(watchers, blocks, flags, (rank.send, near_pool), copies, strict=True):
            with torch.cuda.stream(w):
                src, out = src.reshape(-1).view(torch.int32), out.reshape(-1).view(torch.int32)
                snap[(8,)](src, out, flag, b, src.numel(), BLOCK=1024, num_warps=4)
        time.sleep(1e-4)
        if lie:
            rank.host[16] = n + 1
            time.sleep(1e-4)
        with torch.cuda.stream(sender):
            rank.dispatch_send()
        torch.cuda.synchronize()
        want = [rig.poisoned(*c.shape, device="cuda") for c in copies]
        room = layout.near_rows
        nears = [want[1][i * room : (i + 1) * room] for i in range(layout.near_ranks)]
        fk.reference.dispatch_send(layout, rank.x, rank.idx, want[0], near=nears)
        ok = [torch.equal(a[: w.shape[0]], w) for a, w in zip(copies, want, strict=True)]
        bad += n > 1 and not all(ok)
    return bad


@pytest.mark.parametrize("way", ["copy engine", "registers"])
@pytest.mark.parametrize("tokens", [T, 700])
def test_what_a_flag_speaks_of_is_there(monkeypatch, tokens, way):
    from fabricx.kernels import send

    monkeypatch.setattr(send, "BULK", way == "copy engine")
    assert missing_rows(Rank(tokens), 100, lie=False) == 0


def test_the_check_of_order_can_fail():
    assert missing_rows(Rank(), 20, lie=True) > 0


@pytest.mark.parametrize("tokens", [T, 700])
def test_a_wait_that_times_out_voids_the_round_and_the_next_one_works(tokens):
    rank = Rank(tokens, timeout=0.02)
    rank.wait[:] = 0
    rank.dispatch_send(wait=rank.wait)  # round 1 waits for epoch 0
    assert rank.flags() == [1] * 4
    rank.pool.fill_(rig.POISON)
    rank.dispatch_send(wait=rank.wait)  # round 2 waits for epoch 1, which never comes
    assert rank.flags() == [2, 1, 1, 1]  # counts need no wait
    assert fk.read_status(rank.control) == fk.TIMED_OUT
    assert bool((rank.pool == rig.POISON).all())
    assert rank.epochs()[:3] == [2, 2, 2]
    fk.clear_status(rank.control)
    rank.wait[:] = 2
    rank.dispatch_send(wait=rank.wait)
    assert rank.flags() == [3] * 4
    assert fk.read_status(rank.control) == fk.OK


@pytest.mark.parametrize("expected", [64, 5000])
def test_a_receive_that_times_out_leaves_nothing_to_combine(expected):
    rank = Rank(timeout=0.02)
    rank.dispatch_send()
    args = rank.received()
    before = {k: v.clone() for k, v in args.items() if k in ("out_x", "map_row", "map_to")}
    fk.dispatch_receive(rank.layout, **args, wait=rank.wait, expected_rows=expected)
    assert fk.read_status(rank.control) == fk.TIMED_OUT
    assert args["totals"].tolist() == [-1, 0]
    assert args["expert_tokens"].tolist() == [0] * rank.layout.local_experts
    for name, was in before.items():
        assert torch.equal(rig.raw(args[name]), rig.raw(was)), name
    y = torch.zeros(args["out_x"].shape, dtype=torch.bfloat16, device="cuda")
    back = torch.zeros(64, rank.layout.combine_row_bytes, dtype=torch.uint8, device="cuda")
    fk.combine_send(rank.layout, y, args["map_row"], args["map_to"], args["totals"], back, control=rank.control)
    torch.cuda.synchronize()
    assert int(rank.back_flag) == 0
    assert rank.peers[1].sum() == 0
    assert rank.epochs() == [1, 1, 1, 1, 1]


def test_a_round_of_combine_raises_every_flag():
    rank = Rank()
    for n in range(1, 4):
        rank.dispatch_send()
        args = rank.received(most=[0, 3, 5][n - 1])
        fk.dispatch_receive(rank.layout, **args)
        y = torch.zeros(args["out_x"].shape, dtype=torch.bfloat16, device="cuda")
        rows = int(args["totals"][1]) + 1
        row_bytes = rank.layout.combine_row_bytes
        _, back, _, offsets = rig.scratch_pool(rank.layout, 0, 512, row_bytes, "cuda", send_rows=rows)
        args["near"] = offsets
        fk.dispatch_receive(rank.layout, **args)
        fk.combine_send(rank.layout, y, args["map_row"], args["map_to"], args["totals"], back, control=rank.control)
        torch.cuda.synchronize()
        assert int(rank.back_flag) == n
        assert rank.peers[1, :, 0].tolist() == [n] * rank.layout.near_ranks
        assert rank.epochs()[3:] == [n, n]


def test_an_abort_ends_a_wait_at_once():
    rank = Rank(timeout=60.0)
    rank.dispatch_send()
    args = rank.received()
    fk.dispatch_receive(rank.layout, **args)  # loads the kernel
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        fk.dispatch_receive(rank.layout, **args, wait=rank.wait, expected_rows=5000)
        fk.dispatch_receive(rank.layout, **args, wait=rank.wait)
    time.sleep(0.01)
    assert not side.query()
    rank.abort[0] = 1
    side.synchronize()
    assert fk.read_status(rank.control) == fk.ABORTED
    assert fk.status_text(fk.ABORTED) == "aborted"


def test_a_flag_in_host_memory_is_passed_on_by_one_program():
    rank = Rank(timeout=60.0, near_ranks=0, near_first=0, near_rows=0)
    host_flag = torch.zeros(1, dtype=torch.int32).pin_memory()
    rank.dispatch_send()
    args = rank.received()
    args.pop("near")
    args.pop("starts")
    buf = torch.zeros(T * R, rank.layout.combine_row_bytes, dtype=torch.uint8, device="cuda")
    out = torch.empty(T, rank.layout.hidden, dtype=torch.bfloat16, device="cuda")
    weights = torch.ones(T, R, device="cuda")
    for expected in (64, 5000):
        fk.dispatch_receive(rank.layout, **args, expected_rows=expected)
    fk.combine_receive(rank.layout, buf, rank.positions, weights, out)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    for n, expected in enumerate((64, 5000), 1):
        rank.wait[:] = 0
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            fk.dispatch_receive(
                rank.layout, **args, wait=rank.wait, host_flag=host_flag, expected_rows=expected
            )
        time.sleep(0.01)
        assert not side.query()
        host_flag[0] = n
        side.synchronize()
        assert rank.wait.tolist() == [n]
        rank.dispatch_send()
    rank.wait[:] = 0
    rank.control[3 * 32 + 2] = 9  # as if nine rounds of combine had been
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        fk.combine_receive(
            rank.layout, buf, rank.positions, weights, out, control=rank.control, wait=rank.wait, host_flag=host_flag
        )
    time.sleep(0.01)
    assert not side.query()
    host_flag[0] = 9
    side.synchronize()
    assert rank.wait.tolist() == [9]
    assert fk.read_status(rank.control) == fk.OK


@pytest.mark.parametrize("tokens", [0, T, 700])
def test_a_graph_replays_with_the_arguments_it_was_captured_with(tokens):
    rank = Rank(tokens)
    rank.dispatch_send()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rank.dispatch_send()
    for n in range(2, 8):
        rank.idx.copy_(rank.indices())
        rank.pool.fill_(rig.POISON)
        graph.replay()
        assert rank.flags() == [n] * 4
        layout = rank.layout
        pool, send, near, _ = rig.scratch_pool(layout, tokens, layout.near_rows, layout.row_bytes, "cuda")
        counts, positions = fk.reference.dispatch_send(rank.layout, rank.x, rank.idx, send, near=near)
        assert torch.equal(rank.counts.cuda(), counts)
        assert torch.equal(rank.positions, positions)
        assert torch.equal(rank.pool, pool)
