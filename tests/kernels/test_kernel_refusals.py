"""Arguments that do not fit are refused with their name, what they must be and what they are."""

from __future__ import annotations

import pytest
import torch

import fabricx.kernels as fk
from fabricx.kernels import checks

GOOD = dict(hidden=16, experts=8, ranks=4, topk=2, rank=1)


@pytest.mark.parametrize(
    "why, case",
    [
        ("hidden must be an integer in 1..", dict(hidden=0)),
        ("topk must be an integer in 1..16, not 17", dict(topk=17)),
        ("rank must be an integer in 0..3, not 4", dict(rank=4)),
        ("near_first must be an integer in 0..1, not 2", dict(near_ranks=3, near_first=2, near_rows=1)),
        ("near_rows must be an integer in 1..", dict(near_ranks=2, near_rows=0)),
        ("rank 1 is not among its own near ranks 2..3", dict(near_ranks=2, near_first=2, near_rows=1)),
        ("dtype must be one of", dict(dtype=torch.int8)),
        ("combine_dtype must be one of", dict(combine_dtype=torch.float8_e4m3fn)),
    ],
)
def test_layouts(why, case):
    with pytest.raises(ValueError, match=why):
        fk.Layout(**(GOOD | case))


def test_experts_are_split_as_evenly_as_they_go():
    for experts in range(1, 40):
        for ranks in range(1, 13):
            layout = fk.Layout(hidden=1, experts=experts, ranks=ranks, topk=1)
            firsts = [layout.first_expert(r) for r in range(ranks + 1)]
            sizes = [b - a for a, b in zip(firsts, firsts[1:], strict=False)]
            assert firsts[0] == 0
            assert firsts[-1] == experts
            assert max(sizes) - min(sizes) <= 1
            assert max(sizes) == layout.max_local_experts
            for e in range(experts):
                assert firsts[layout.owner(e)] <= e < firsts[layout.owner(e) + 1]


def test_bounds_hold_for_the_worst_routing():
    layout = fk.Layout(hidden=1, experts=6, ranks=3, topk=3, private=2, pad=4)
    tokens = 5
    one = layout.near_bound(tokens)  # two experts here, so two rows a token at most
    assert one == 10
    assert layout.receive_bound(tokens) == 3 * 2 + 3 * (10 - 2)
    assert layout.return_bound(tokens) == 30
    assert layout.expert_bound(tokens) >= 2 * 16  # 15 rows for each of the two experts, padded
    assert layout.near_bound(tokens, distinct=False) == 15


def send_args(**change):
    layout = fk.Layout(**GOOD)
    args = dict(
        x=torch.zeros(3, 16, dtype=torch.bfloat16),
        indices=torch.zeros(3, 2, dtype=torch.int32),
        send=torch.zeros(6, layout.row_bytes, dtype=torch.uint8),
        near=None,
    )
    return [layout, *(args | change).values()]


@pytest.mark.parametrize(
    "why, change",
    [
        (r"indices must have shape \[any, 2\], not \[3, 3\]", dict(indices=torch.zeros(3, 3, dtype=torch.int32))),
        (r"indices must have shape \[3, 2\], not \[4, 2\]", dict(indices=torch.zeros(4, 2, dtype=torch.int32))),
        ("indices must be torch.int32 or torch.int64", dict(indices=torch.zeros(3, 2))),
        ("send has 5 rows, 3 tokens of top-k 2 need 6", dict(send=torch.zeros(5, 32, dtype=torch.uint8))),
        ("send must be torch.uint8", dict(send=torch.zeros(6, 32))),
        ("send must be contiguous", dict(send=torch.zeros(32, 6, dtype=torch.uint8).T)),
        ("not aligned to 16", dict(send=torch.zeros(6 * 32 + 1, dtype=torch.uint8)[1:].view(6, 32))),
    ],
)
def test_dispatch_send(why, change):
    with pytest.raises((TypeError, ValueError), match=why):
        checks.check_dispatch_send(*send_args(**change))


def test_a_cast_other_than_to_float8_is_refused():
    layout = fk.Layout(**GOOD)
    with pytest.raises(TypeError, match="the cast on the way is to float8_e4m3fn with 1 scales"):
        checks.check_tokens(layout, torch.zeros(3, 16), None)
    layout = fk.Layout(**GOOD, dtype=torch.float8_e4m3fn, scales=1)
    with pytest.raises(ValueError, match="scales are computed"):
        checks.check_tokens(layout, torch.zeros(3, 16), torch.zeros(3, 1))
    with pytest.raises(ValueError, match="scales are needed"):
        checks.check_tokens(layout, torch.zeros(3, 16).to(torch.float8_e4m3fn), None)


def test_a_wait_without_a_control_block_is_refused():
    layout = fk.Layout(**GOOD)
    flags = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="wait needs a control block"):
        checks.check_signals(layout, None, flags, None, flags.device)
    with pytest.raises(ValueError, match="host_flag needs wait"):
        checks.check_signals(layout, None, None, flags, flags.device)


def test_near_memory_that_is_not_aligned_is_refused():
    buffer = torch.zeros(64, dtype=torch.uint8)
    with pytest.raises(ValueError, match="near rank 1 is not aligned"):
        fk.near_offsets(buffer, [buffer.data_ptr() + 16, buffer.data_ptr() + 24])
    with pytest.raises(ValueError, match="empty"):
        fk.near_offsets(buffer[:0], [])


def test_a_name_that_is_not_there():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = fk.nothing
    assert "dispatch_send" in dir(fk)
