"""Whole rounds among ranks of one process equal the dense computation; a proxy moves rows as docs/kernels.md says."""

from __future__ import annotations

import exchange
import pytest
import rig
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fabricx.kernels as fk

FP8 = torch.float8_e4m3fn


def fp8(shape):
    return shape | dict(dtype=FP8, scales=-(-shape["hidden"] // 128))


@st.composite
def rounds(draw):
    shape = dict(
        ranks=draw(st.integers(1, 9)),
        experts=draw(st.one_of(st.integers(1, 20), st.sampled_from([64, 601]))),
        hidden=draw(st.sampled_from([1, 7, 130, 256])),
        topk=draw(st.integers(1, 16)),
        private=draw(st.integers(0, 6)),
        pad=draw(st.sampled_from([1, 4])),
    )
    if draw(st.booleans()):
        shape = fp8(shape)
    tokens = draw(st.lists(st.sampled_from([0, 0, 1, 5, 20]), min_size=shape["ranks"], max_size=shape["ranks"]))
    return shape, tokens, draw(st.integers(0, shape["ranks"]))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(case=rounds(), seed=st.integers(0, 1 << 30))
def test_on_cpus(case, seed):
    pytest.importorskip("numba", reason="no numba")
    shape, tokens, near = case
    exchange.check_round(fk.cpu, shape, tokens, exchange.node_groups(shape["ranks"], near), rig.generator(seed))


@pytest.mark.parametrize("near", [0, 2, 3])
def test_interpreted(near):
    pytest.importorskip("triton", reason="no triton")
    from fabricx.kernels import signals

    if not signals.INTERPRET.value:
        pytest.skip("Triton was imported before it could be told to interpret")
    shape = fp8(dict(ranks=3, experts=7, hidden=130, topk=3, private=1, pad=4))
    groups = exchange.node_groups(3, near)
    exchange.check_round(fk, shape, [2, 0, 4], groups, rig.generator(near), rounds=1, expected_rows=6)
