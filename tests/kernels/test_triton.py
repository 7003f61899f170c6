"""The Triton kernels, interpreted, against the references: any shape, outputs poisoned first."""

from __future__ import annotations

import pytest
import rig
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shapes import layouts, seeds

pytest.importorskip("triton", reason="no triton")
import fabricx.kernels as fk  # noqa: E402
from fabricx.kernels import routing  # noqa: E402
from fabricx.kernels import signals as _signals  # noqa: E402

if not _signals.INTERPRET.value:
    pytest.skip("Triton was imported before it could be told to interpret", allow_module_level=True)

some = settings(max_examples=12, deadline=None, derandomize=True)
few = settings(max_examples=10, deadline=None, derandomize=True)


def case(layout, tokens, seed):
    gen = rig.generator(seed)
    x = rig.random_tokens(gen, tokens, layout.hidden, layout.dtype)
    scales = torch.rand(tokens, layout.scales, generator=gen) if layout.scales else None
    return x, rig.random_indices(gen, tokens, layout.topk, layout.experts, wide=bool(seed & 1)), scales


@some
@given(layout=layouts(), tokens=st.integers(0, 5), seed=seeds)
def test_dispatch_send(layout, tokens, seed):
    rig.check_dispatch_send(fk, layout, *case(layout, tokens, seed))


@some
@given(layout=layouts(), tokens=st.integers(1, 5), seed=seeds)
def test_dispatch_send_in_three_kernels(layout, tokens, seed):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routing, "SMALL", 0)
        rig.check_dispatch_send(fk, layout, *case(layout, tokens, seed))


@few
@given(layout=layouts(cast=True), tokens=st.integers(0, 4), seed=seeds)
def test_cast_on_the_way(layout, tokens, seed):
    gen = rig.generator(seed)
    dtype = [torch.bfloat16, torch.float16, torch.float32][seed % 3]
    x = torch.randn(tokens, layout.hidden, generator=gen) * 10.0 ** torch.randint(-3, 3, (tokens, 1), generator=gen)
    if tokens > 1:
        x[1] = 0
    x = x.to(dtype)
    rig.check_dispatch_send(fk, layout, x, rig.random_indices(gen, tokens, layout.topk, layout.experts))


@some
@given(layout=layouts(few=True), most=st.sampled_from([0, 1, 3, 12]), seed=seeds, large=st.booleans())
def test_dispatch_receive(layout, most, seed, large):
    gen = rig.generator(seed)
    counts = rig.random_counts(gen, layout, most if layout.local_experts < 9 else min(most, 1))
    rig.check_dispatch_receive(fk, layout, counts, gen, expected_rows=5000 if large else 6)


@pytest.mark.parametrize("expected", [10, 5000])
def test_segments_that_do_not_fit_are_refused(expected):
    layout = fk.Layout(hidden=8, experts=6, ranks=3, topk=2, pad=4)
    counts = torch.full((3, 2), 3, dtype=torch.int32)
    got = rig.check_dispatch_receive(fk, layout, counts, rig.generator(0), capacity=23, expected_rows=expected)
    assert got["totals"].tolist() == [-1, 0]
    got = rig.check_dispatch_receive(fk, layout, counts, rig.generator(0), capacity=24, expected_rows=expected)
    assert got["totals"].tolist() == [18, 18]


@some
@given(layout=layouts(few=True), most=st.sampled_from([0, 1, 4]), seed=seeds)
def test_combine_send(layout, most, seed):
    gen = rig.generator(seed)
    counts = rig.random_counts(gen, layout, most if layout.local_experts < 9 else min(most, 1))
    rig.check_combine_send(fk, layout, counts, gen, expected_rows=8)


@some
@given(
    layout=layouts(),
    tokens=st.integers(0, 4),
    seed=seeds,
    out=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    accumulate=st.booleans(),
    weighted=st.booleans(),
)
def test_combine_receive(layout, tokens, seed, out, accumulate, weighted):
    gen = rig.generator(seed)
    _, positions = fk.reference.route(rig.random_indices(gen, tokens, layout.topk, layout.experts), layout.experts)
    rig.check_combine_receive(fk, layout, positions, gen, out, accumulate=accumulate, weighted=weighted)


@some
@given(
    experts=st.one_of(st.integers(1, 40), st.integers(500, 600)),
    tokens=st.sampled_from([0, 1, 2, 9, 140]),
    topk=st.integers(1, 16),
    seed=seeds,
)
def test_route(experts, tokens, topk, seed):
    tokens = min(tokens, 20) if topk > 4 else tokens
    idx = rig.random_indices(rig.generator(seed), tokens, topk, experts, wide=bool(seed & 1))
    counts, positions = fk.route(idx, experts)
    want_counts, want = fk.reference.route(idx, experts)
    assert torch.equal(counts, want_counts)
    assert torch.equal(positions, want)
    assert torch.equal(fk.prefix(counts), fk.reference.prefix(want_counts))
