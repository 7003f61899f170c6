"""Exchanges for hypothesis to try: few rows, but every kind of split, width and routing."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from fabricx.kernels import Layout

FP8 = torch.float8_e4m3fn
HIDDEN = [1, 2, 3, 16, 127, 130, 256, 2050]
seeds = st.integers(0, 1 << 30)


@st.composite
def layouts(draw, near_rows=80, hidden=HIDDEN, cast=False, few=False):
    """A layout; `few` keeps (expert, source) pairs few, for what visits each of them."""
    ranks = draw(st.integers(1, 6))
    experts = draw(st.one_of(st.integers(1, 12), st.sampled_from([31, 64] if few else [64, 255, 512, 513, 600])))
    near = draw(st.integers(0, ranks))
    first = draw(st.integers(0, ranks - near))
    rank = draw(st.integers(first, first + near - 1) if near else st.integers(0, ranks - 1))
    size = draw(st.sampled_from(hidden))
    dtype = FP8 if cast else draw(st.sampled_from([FP8, torch.bfloat16, torch.float16, torch.float32]))
    return Layout(
        hidden=size,
        experts=experts,
        ranks=ranks,
        topk=draw(st.integers(1, 16)),
        rank=rank,
        dtype=dtype,
        scales=-(-size // 128) if cast else draw(st.sampled_from([0, 1, 3])),
        combine_dtype=draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32])),
        private=draw(st.integers(0, 5)),
        near_first=first,
        near_ranks=near,
        near_rows=near_rows if near else 0,
        pad=draw(st.sampled_from([1, 2, 5, 8])),
    )
