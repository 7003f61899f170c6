"""The kernels on a GPU against the references: fresh random inputs, outputs poisoned first."""

from __future__ import annotations

import exchange
import pytest
import rig
import torch

import fabricx.kernels as fk

FP8 = torch.float8_e4m3fn
DEEPSEEK = dict(hidden=7168, experts=256, topk=8, dtype=FP8, scales=56)
SHAPES = {
    "decode EP64": dict(**DEEPSEEK, ranks=64, near_first=8, near_ranks=8, pad=64),
    "decode EP8": dict(**DEEPSEEK, ranks=8, near_ranks=8, pad=128),
    "all far": dict(**DEEPSEEK, ranks=64),
    "bf16": dict(hidden=2880, experts=128, ranks=8, topk=4, near_first=2, near_ranks=2),
    "fp16": dict(hidden=576, experts=601, ranks=7, topk=16, dtype=torch.float16, near_first=6, near_ranks=1),
    "odd hidden": dict(hidden=127, experts=9, ranks=4, topk=3, dtype=FP8, scales=1, near_first=0, near_ranks=3, pad=5),
    "hidden 1": dict(hidden=1, experts=5, ranks=5, topk=1, dtype=FP8, pad=2),
    "wide rows": dict(hidden=16384, experts=64, ranks=4, topk=6, dtype=torch.float32, combine_dtype=torch.float32),
    "more ranks than experts": dict(hidden=256, experts=3, ranks=12, topk=2, near_first=4, near_ranks=4),
}
TOKENS = [0, 1, 5, 128, 700]


def layout_for(name, tokens, private=4):
    case = dict(SHAPES[name])
    if case.get("near_ranks"):
        case |= dict(near_rows=max(tokens, 1) * case["topk"], rank=case.get("near_first", 0))
    return fk.Layout(**case, private=private)


@pytest.fixture(params=[True, False], ids=["copy engine", "registers"])
def way(request, monkeypatch):
    """Rows by the copy engine, where it can, and through registers."""
    from fabricx.kernels import send

    monkeypatch.setattr(send, "BULK", request.param)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("name", SHAPES)
def test_dispatch_send(way, name, tokens):
    layout = layout_for(name, tokens)
    gen = rig.generator(tokens)
    x = rig.random_tokens(gen, tokens, layout.hidden, layout.dtype)
    scales = torch.rand(tokens, layout.scales, generator=gen) if layout.scales else None
    for wide in (False, True):
        idx = rig.random_indices(gen, tokens, layout.topk, layout.experts, wide=wide)
        rig.check_dispatch_send(fk, layout, x, idx, scales, device="cuda")


@pytest.mark.parametrize("tokens", [1, 128, 700])
@pytest.mark.parametrize("hidden", [1, 127, 576, 7168, 10000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_cast_on_the_way(hidden, tokens, dtype):
    layout = fk.Layout(
        hidden=hidden, experts=24, ranks=4, topk=4, dtype=FP8, scales=-(-hidden // 128), near_first=1, near_ranks=2,
        rank=1, near_rows=4 * tokens,
    )  # fmt: skip
    gen = rig.generator(hidden)
    x = (torch.randn(tokens, hidden, generator=gen) * torch.rand(tokens, 1, generator=gen) * 30).to(dtype)
    x[0] = 0
    rig.check_dispatch_send(fk, layout, x, rig.random_indices(gen, tokens, 4, 24), device="cuda")


@pytest.mark.parametrize("most", [0, 1, 9, 60])
@pytest.mark.parametrize("name", SHAPES)
def test_dispatch_receive(name, most):
    layout = layout_for(name, 128, private=6)
    gen = rig.generator(most)
    counts = rig.random_counts(gen, layout, most)
    rows = int(counts.sum())
    for expected in (rows, 5000, 3):
        rig.check_dispatch_receive(fk, layout, counts, gen, device="cuda", expected_rows=expected)


def test_segments_that_do_not_fit_are_refused():
    layout = layout_for("bf16", 128)
    counts = torch.full((layout.ranks, layout.local_experts), 3, dtype=torch.int32)
    for expected in (100, 5000):
        got = rig.check_dispatch_receive(
            fk, layout, counts, rig.generator(0), device="cuda", capacity=int(counts.sum()) - 1, expected_rows=expected
        )
        assert got["totals"].tolist() == [-1, 0]


@pytest.mark.parametrize("most", [0, 1, 9, 60])
@pytest.mark.parametrize("name", SHAPES)
def test_combine_send(name, most):
    layout = layout_for(name, 128, private=6)
    gen = rig.generator(most)
    counts = rig.random_counts(gen, layout, most)
    for expected in (int(counts.sum()), 3):
        rig.check_combine_send(fk, layout, counts, gen, device="cuda", expected_rows=expected)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("name", SHAPES)
def test_combine_receive(name, tokens):
    layout = layout_for(name, tokens)
    gen = rig.generator(tokens)
    idx = rig.random_indices(gen, tokens, layout.topk, layout.experts)
    _, positions = fk.reference.route(idx, layout.experts)
    for out_dtype in (torch.bfloat16, torch.float16, torch.float32):
        for accumulate, weighted in ((False, True), (True, True), (False, False)):
            rig.check_combine_receive(
                fk, layout, positions, gen, out_dtype, accumulate=accumulate, weighted=weighted, device="cuda"
            )


@pytest.mark.parametrize("experts", [1, 2, 31, 256, 600])
@pytest.mark.parametrize("tokens", [0, 1, 33, 4096, 20000])
def test_route(experts, tokens):
    gen = rig.generator(tokens)
    idx = rig.random_indices(gen, tokens, 6, experts, wide=bool(tokens & 1)).cuda()
    counts, positions = fk.route(idx, experts)
    want_counts, want = fk.reference.route(idx, experts)
    assert torch.equal(counts, want_counts)
    assert torch.equal(positions, want)
    assert torch.equal(fk.prefix(counts), fk.reference.prefix(want_counts))


def test_prefill(way):
    """More tokens than any small kernel takes."""
    layout = layout_for("decode EP64", 4096)
    gen = rig.generator(1)
    x = rig.random_tokens(gen, 4096, layout.hidden, layout.dtype)
    idx = rig.random_indices(gen, 4096, 8, 256)
    rig.check_dispatch_send(fk, layout, x, idx, torch.rand(4096, 56, generator=gen), device="cuda")


@pytest.mark.parametrize("near", [0, 3, 8])
@pytest.mark.parametrize("cast", [False, True])
def test_whole_rounds(near, cast):
    """Ranks of one process; far rows are moved as docs/kernels.md says."""
    shape = dict(ranks=8, experts=61, hidden=896, topk=6, private=5, pad=16)
    if cast:
        shape |= dict(dtype=FP8, scales=7)
    groups = exchange.node_groups(8, near)
    tokens = [40, 0, 128, 1, 200, 7, 64, 3]
    exchange.check_round(fk, shape, tokens, groups, rig.generator(near), device="cuda", rounds=3)
