"""The Numba twins against the references: any shape, outputs poisoned first, on one thread and on several."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import rig
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shapes import layouts, seeds

pytest.importorskip("numba", reason="no numba")
import fabricx.kernels as fk  # noqa: E402
from fabricx.kernels import _numba, cpu, reference  # noqa: E402

many = settings(max_examples=60, deadline=None, derandomize=True)


def threaded(patch, seed):
    """Have every second case run on several threads, however small."""
    if seed & 2:
        patch.setattr(_numba, "PARALLEL_BYTES", -1)


@many
@given(layout=layouts(near_rows=1000), tokens=st.sampled_from([0, 1, 2, 7, 60]), seed=seeds)
def test_dispatch_send(layout, tokens, seed):
    gen = rig.generator(seed)
    x = rig.random_tokens(gen, tokens, layout.hidden, layout.dtype)
    scales = torch.rand(tokens, layout.scales, generator=gen) if layout.scales else None
    idx = rig.random_indices(gen, tokens, layout.topk, layout.experts, wide=bool(seed & 1))
    with pytest.MonkeyPatch.context() as patch:
        threaded(patch, seed)
        rig.check_dispatch_send(cpu, layout, x, idx, scales)


@many
@given(layout=layouts(near_rows=1000, cast=True), tokens=st.sampled_from([0, 1, 2, 7, 60]), seed=seeds)
def test_cast_on_the_way(layout, tokens, seed):
    gen = rig.generator(seed)
    dtype = [torch.bfloat16, torch.float16, torch.float32][seed % 3]
    x = torch.randn(tokens, layout.hidden, generator=gen) * 10.0 ** torch.randint(-3, 3, (tokens, 1), generator=gen)
    if tokens > 1:
        x[1] = 0
    idx = rig.random_indices(gen, tokens, layout.topk, layout.experts, wide=bool(seed & 1))
    with pytest.MonkeyPatch.context() as patch:
        threaded(patch, seed)
        rig.check_dispatch_send(cpu, layout, x.to(dtype), idx)


@many
@given(layout=layouts(few=True), most=st.sampled_from([0, 1, 3, 12]), seed=seeds)
def test_dispatch_receive(layout, most, seed):
    gen = rig.generator(seed)
    counts = rig.random_counts(gen, layout, most)
    with pytest.MonkeyPatch.context() as patch:
        threaded(patch, seed)
        rig.check_dispatch_receive(cpu, layout, counts, gen)


def test_segments_that_do_not_fit_are_refused():
    layout = fk.Layout(hidden=8, experts=6, ranks=3, topk=2, pad=4)
    counts = torch.full((3, 2), 3, dtype=torch.int32)
    assert rig.check_dispatch_receive(cpu, layout, counts, rig.generator(0), capacity=23)["totals"].tolist() == [-1, 0]
    assert rig.check_dispatch_receive(cpu, layout, counts, rig.generator(0), capacity=24)["totals"].tolist() == [18, 18]


@many
@given(layout=layouts(few=True), most=st.sampled_from([0, 1, 4]), seed=seeds)
def test_combine_send(layout, most, seed):
    gen = rig.generator(seed)
    with pytest.MonkeyPatch.context() as patch:
        threaded(patch, seed)
        rig.check_combine_send(cpu, layout, rig.random_counts(gen, layout, most), gen)


@many
@given(
    layout=layouts(),
    tokens=st.sampled_from([0, 1, 3, 40]),
    seed=seeds,
    out=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    accumulate=st.booleans(),
    weighted=st.booleans(),
)
def test_combine_receive(layout, tokens, seed, out, accumulate, weighted):
    gen = rig.generator(seed)
    _, positions = reference.route(rig.random_indices(gen, tokens, layout.topk, layout.experts), layout.experts)
    with pytest.MonkeyPatch.context() as patch:
        threaded(patch, seed)
        rig.check_combine_receive(cpu, layout, positions, gen, out, accumulate=accumulate, weighted=weighted)


@many
@given(experts=st.integers(1, 600), tokens=st.integers(0, 300), topk=st.integers(1, 16), seed=seeds)
def test_route(experts, tokens, topk, seed):
    idx = rig.random_indices(rig.generator(seed), tokens, topk, experts, wide=bool(seed & 1))
    counts, positions = cpu.route(idx, experts)
    want_counts, want = reference.route(idx, experts)
    assert torch.equal(counts, want_counts)
    assert torch.equal(positions, want)
    assert torch.equal(cpu.prefix(counts), reference.prefix(want_counts))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_narrow_float_survives(dtype):
    every = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype).reshape(1, -1)
    layout = fk.Layout(hidden=1 << 16, experts=1, ranks=1, topk=1, combine_dtype=dtype)
    got = torch.empty_like(every)
    cpu.combine_receive(layout, every.view(torch.uint8), torch.zeros(1, 1, dtype=torch.int32), None, got)
    same = (got.view(torch.int16) == every.view(torch.int16)) | (got.isnan() & every.isnan())
    zeros = (got == 0) & (every == 0)  # minus zero added to zero is zero
    assert bool((same | zeros).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrowing_rounds_as_torch_does(dtype):
    gen = rig.generator(3)
    powers = 2.0 ** torch.randint(-30, 18, (1, 1 << 16), generator=gen)
    values = (torch.randn(1, 1 << 16, generator=gen) * powers).float()
    ties = torch.arange(1 << 14).to(torch.int16).view(dtype).float()
    values[0, : ties.numel() - 1] = (ties[1:] + ties[:-1]) / 2
    layout = fk.Layout(hidden=1 << 16, experts=1, ranks=1, topk=1, combine_dtype=torch.float32)
    got = torch.empty(1, 1 << 16, dtype=dtype)
    cpu.combine_receive(layout, values.view(torch.uint8), torch.zeros(1, 1, dtype=torch.int32), None, got)
    assert torch.equal(got, values.to(dtype))


def test_many_threads_at_once():
    """Ranks that are threads of one process call the same functions."""
    layout = fk.Layout(hidden=512, experts=16, ranks=4, topk=4)
    gen = rig.generator(1)
    x = rig.random_tokens(gen, 600, 512, torch.bfloat16)
    failed = []

    def rank(seed):
        try:
            for i in range(5):
                idx = rig.random_indices(rig.generator(seed * 100 + i), 600, 4, 16)
                rig.check_dispatch_send(cpu, layout, x, idx)  # 2.4 MB: on several threads
        except BaseException as e:
            failed.append(e)

    threads = [threading.Thread(target=rank, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert not any(t.is_alive() for t in threads)
    assert not failed, failed[0]


def test_importing_loads_no_more_than_it_says():
    code = (
        "import sys, fabricx\n"
        "heavy = {'torch', 'triton', 'numba'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
        "import fabricx.kernels\n"
        "assert 'torch' in sys.modules and not {'triton', 'numba'} & set(sys.modules)\n"
        "from fabricx.kernels import cpu\n"
        "assert 'triton' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
