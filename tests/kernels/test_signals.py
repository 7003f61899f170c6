"""Flags, epochs and waits in the interpreter, where a poll counts as a microsecond; control blocks."""

from __future__ import annotations

import pytest
import rig
import torch

pytest.importorskip("triton", reason="no triton")
import fabricx.kernels as fk  # noqa: E402
from fabricx.kernels import control as words  # noqa: E402
from fabricx.kernels import routing, signals  # noqa: E402

if not signals.INTERPRET.value:
    pytest.skip("Triton was imported before it could be told to interpret", allow_module_level=True)

T, R, E, N = 3, 2, 12, 4


def flag():
    return torch.zeros(1, dtype=torch.int32)


class Rank:
    """One rank with its flags; `near` ranks next to it."""

    def __init__(self, near=2, tokens=T, timeout=40e-6):
        self.layout = fk.Layout(
            hidden=16, experts=E, ranks=N, topk=R, rank=1, near_first=1 if near else 0, near_ranks=near,
            near_rows=20 if near else 0, private=2,
        )  # fmt: skip
        self.counts, self.far, self.back, self.abort = flag(), flag(), flag(), flag()
        self.near = [flag() for _ in range(near)]
        self.back_near = [flag() for _ in range(near)]
        self.control = fk.new_control(
            "cpu", timeout=timeout, counts=self.counts, far=self.far, back_far=self.back, near=self.near,
            back_near=self.back_near, abort=self.abort,
        )  # fmt: skip
        self.gen = rig.generator(1)
        self.x = rig.random_tokens(self.gen, tokens, 16, torch.bfloat16)
        self.idx = torch.randint(0, E, (tokens, R), generator=self.gen)
        self.pool, self.send, _, self.offsets = rig.scratch_pool(self.layout, tokens, 20, self.layout.row_bytes, "cpu")

    def dispatch_send(self, wait=None):
        near = self.offsets if self.layout.near_ranks else None
        fk.dispatch_send(self.layout, self.x, self.idx, self.send, near=near, control=self.control, wait=wait)

    def receive_args(self, rows=9):
        counts = torch.full((N, self.layout.local_experts), 1, dtype=torch.int32)
        recv = torch.zeros(self.layout.receive_bound(10), self.layout.row_bytes, dtype=torch.uint8)
        args = rig.outputs(self.layout, N * self.layout.local_experts + rows)
        args.pop("out_scales")
        if self.layout.near_ranks:
            args |= dict(starts=torch.zeros(N, dtype=torch.int32), near=torch.zeros_like(self.offsets))
        return dict(recv=recv, counts=counts, control=self.control, **args)

    def flags(self):
        return [int(f) for f in (self.counts, self.far, *self.near)]

    def back_flags(self):
        return [int(f) for f in (self.back, *self.back_near)]

    def epochs(self):
        return list(fk.read_epochs(self.control).values())


@pytest.fixture(params=["one kernel", "three kernels"])
def way(request, monkeypatch):
    """Both ways of dispatch send."""
    if request.param == "three kernels":
        monkeypatch.setattr(routing, "SMALL", 0)


@pytest.mark.parametrize("tokens", [0, T])
@pytest.mark.parametrize("near", [0, 1, 3])
def test_every_round_raises_every_flag_once(way, near, tokens):
    rank = Rank(near, tokens)
    for n in (1, 2, 3):
        rank.dispatch_send()
        assert rank.flags() == [n] * (2 + near)
        assert rank.epochs() == [n, n, n if near else 0, 0, 0]


def test_epochs_wrap(way):
    rank = Rank()
    lines = rank.control[: 5 * words.LINE].view(5, words.LINE)
    lines[:, words.EPOCH] = -1
    wait = torch.full((2,), -1, dtype=torch.int32)
    for n in (0, 1):
        rank.dispatch_send(wait)
        assert rank.flags() == [n] * 4
        wait[:] = n
    assert fk.read_status(rank.control) == fk.OK


def test_a_wait_that_times_out_voids_the_round_and_the_next_one_works(way):
    rank = Rank()
    wait = torch.zeros(3, dtype=torch.int32)
    rank.dispatch_send(wait)
    rank.pool.fill_(rig.POISON)
    wait[:] = torch.tensor([1, 1, 0])
    rank.dispatch_send(wait)
    assert fk.read_status(rank.control) == fk.TIMED_OUT
    assert fk.status_text(fk.TIMED_OUT) == "timed out"
    assert rank.flags() == [2, 1, 1, 1]
    assert bool((rank.pool == rig.POISON).all())
    assert rank.epochs()[:3] == [2, 2, 2]
    rank.dispatch_send(wait)  # while the status stands, waits end at once
    assert rank.flags() == [3, 1, 1, 1]
    fk.clear_status(rank.control)
    wait[:] = 3
    rank.dispatch_send(wait)
    assert rank.flags() == [4] * 4
    assert fk.read_status(rank.control) == fk.OK


@pytest.mark.parametrize("expected", [4, 5000])
def test_a_receive_that_fails_leaves_nothing_to_combine(expected):
    rank = Rank()
    rank.dispatch_send()
    args = rank.receive_args()
    rank.abort[0] = 1
    fk.dispatch_receive(rank.layout, **args, wait=torch.zeros(3, dtype=torch.int32), expected_rows=expected)
    assert fk.read_status(rank.control) == fk.ABORTED
    assert args["totals"].tolist() == [-1, 0]
    assert args["expert_tokens"].tolist() == [0] * rank.layout.local_experts
    untouched = rig.outputs(rank.layout, len(args["out_x"]))
    for name in ("out_x", "map_row", "map_to"):
        assert torch.equal(rig.raw(args[name]), rig.raw(untouched[name])), name
    combine(rank, args)
    assert rank.back_flags() == [0, 0, 0]
    assert rank.epochs()[3:] == [1, 1]


def combine(rank, args, wait=None):
    y = torch.zeros(args["out_x"].shape, dtype=torch.bfloat16)
    _, send, _, _ = rig.scratch_pool(rank.layout, 0, 40, rank.layout.combine_row_bytes, "cpu", send_rows=20)
    maps = args["map_row"], args["map_to"], args["totals"]
    fk.combine_send(rank.layout, y, *maps, send, control=rank.control, wait=wait, expected_rows=3)


@pytest.mark.parametrize("near", [0, 3])
@pytest.mark.parametrize("rows", ["all", "none", "far", "near"])
def test_a_round_of_combine_raises_every_flag(near, rows):
    rank = Rank(near)
    args = rank.receive_args()
    if near:
        unit = rank.layout.combine_row_bytes // 16
        args["near"] = 20 * unit + torch.arange(near) * 40 * unit  # behind the send buffer that combine() makes
    close = torch.tensor([rank.layout.is_near(s) for s in range(N)])
    if rows != "all":
        args["counts"][close if rows in ("far", "none") else torch.zeros(N, dtype=torch.bool)] = 0
        args["counts"][~close if rows in ("near", "none") else torch.zeros(N, dtype=torch.bool)] = 0
    wait = torch.zeros(2, dtype=torch.int32)
    for n in (1, 2):
        fk.dispatch_receive(rank.layout, **args)
        combine(rank, args, wait)
        assert rank.back_flags() == [n] * (1 + near)
        assert rank.epochs()[3:] == [n, n if near else 0]
        wait[:] = n
    assert fk.read_status(rank.control) == fk.OK


@pytest.mark.parametrize("expected", [4, 5000])
def test_a_flag_in_host_memory_is_passed_on(expected):
    rank = Rank(0)
    rank.dispatch_send()
    args = rank.receive_args()
    wait, host = flag(), flag()
    host[0] = 1
    fk.dispatch_receive(rank.layout, **args, wait=wait, host_flag=host, expected_rows=expected)
    assert wait.tolist() == [1]
    assert args["totals"].tolist() == [N * 3, N * 3]
    out = torch.zeros(T, 16, dtype=torch.bfloat16)
    buf = torch.zeros(T * R, rank.layout.combine_row_bytes, dtype=torch.uint8)
    positions = torch.zeros(T, R, dtype=torch.int32)
    combine(rank, args)
    wait.zero_()
    fk.combine_receive(rank.layout, buf, positions, None, out, control=rank.control, wait=wait, host_flag=host)
    assert wait.tolist() == [1]
    assert fk.read_status(rank.control) == fk.OK


def test_combine_receive_that_times_out_leaves_the_output():
    rank = Rank()
    rank.control[words.BACK_FAR * words.LINE + words.EPOCH] = 1
    out = torch.full((T, 16), 7.0)
    buf = torch.zeros(T * R, rank.layout.combine_row_bytes, dtype=torch.uint8)
    positions = torch.zeros(T, R, dtype=torch.int32)
    fk.combine_receive(rank.layout, buf, positions, None, out, control=rank.control, wait=flag())
    assert fk.read_status(rank.control) == fk.TIMED_OUT
    assert bool((out == 7.0).all())


def test_scalar_inc():
    word = torch.tensor([2**33 - 1], dtype=torch.int64)
    shadow = word.clone()
    assert fk.scalar_inc_(word) is word
    assert word.tolist() == [2**33]
    shadow[0] = 2**33
    for _ in range(3):
        fk.scalar_inc_(word, shadow)
    assert word.tolist() == shadow.tolist() == [2**33 + 3]
    with pytest.raises(TypeError, match="int32"):
        fk.scalar_inc_(flag())


@pytest.mark.parametrize(
    "why, case",
    [
        ("timeout must be", dict(timeout=0)),
        ("timeout must be", dict(timeout=5000)),
        ("each near rank needs both", dict(near=[4])),
        ("not aligned", dict(abort=6)),
        ("int32 or uint32", dict(counts=torch.zeros(1))),
    ],
)
def test_a_control_block_that_cannot_work_is_refused(why, case):
    with pytest.raises((TypeError, ValueError), match=why):
        fk.new_control("cpu", **case)
