"""Where rows go: rows of each expert (count), where each expert starts (prefix), each row's place (placement).

The order is by (expert, token, choice), the same on every run and on every backend.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ._launch import pow2, programmatic
from .checks import check, check_indices, route_outputs
from .layout import ceil_div
from .signals import COUNTS, arrive, flag_index

SMALL = 1024  # (token, choice) pairs up to which each program counts for itself: cost grows with their square
_BLOCK_PAIRS = 256  # pairs that one program of the counting kernel takes
_SCAN = 64  # blocks that the scan takes at a time
_SCAN_EXPERTS = 32
_FLAG_COUNTS = tl.constexpr(flag_index(0))


def block_tokens(topk: int) -> int:
    """Tokens in a block of the counting kernel."""
    return max(_BLOCK_PAIRS // pow2(topk), 1)


def workspace_words(tokens: int, topk: int, experts: int) -> int:
    """int32 words of scratch memory that routing of up to `tokens` tokens needs."""
    return (ceil_div(tokens, block_tokens(topk)) + 1) * experts


@triton.jit
def load_experts(idx_ptr, i, m, E: tl.constexpr):
    """Experts of the pairs `i`; -1 where masked, out of range or not `m`."""
    e = tl.load(idx_ptr + i, mask=m, other=-1)
    return tl.where((e >= 0) & (e < E), e, -1).to(tl.int32)


@triton.jit
def histogram(e, EP: tl.constexpr):
    """Rows of each expert 0..EP-1 among `e`; -1 does not count."""
    return tl.histogram(tl.where(e >= 0, e, 0), EP, mask=e >= 0)


@triton.jit(do_not_specialize=["T"])
def count_blocks(idx_ptr, blocks, T, R: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, BLOCK: tl.constexpr,
                 TB: tl.constexpr, PDL: tl.constexpr):
    """Program b: rows of each expert in block b of TB tokens."""
    if PDL:
        gdc_launch_dependents()
    b = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    e = load_experts(idx_ptr + b.to(tl.int64) * (TB * R), i, (i < TB * R) & (b * (TB * R) + i < T * R), E)
    o = tl.arange(0, EP)
    tl.store(blocks + b.to(tl.int64) * E + o, histogram(e, EP), mask=o < E)


@triton.jit(do_not_specialize=["nblocks"])
def scan_blocks(blocks, totals, counts, control, nblocks, E: tl.constexpr, EB: tl.constexpr, NB: tl.constexpr,
                SIGNAL: tl.constexpr, PDL: tl.constexpr):
    """Program g: running sums over blocks for its EB experts (in place), and their totals, once for the kernels that
    follow and once for the host."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    e = tl.program_id(0) * EB + tl.arange(0, EB)
    carry = tl.zeros([EB], tl.int32)
    b0 = 0
    while b0 < nblocks:
        b = b0 + tl.arange(0, NB)
        at = blocks + b.to(tl.int64)[:, None] * E + e[None, :]
        m = (b < nblocks)[:, None] & (e < E)[None, :]
        h = tl.load(at, mask=m, other=0)
        tl.store(at, tl.cumsum(h, axis=0) - h + carry[None, :], mask=m)
        carry += tl.sum(h, axis=0)
        b0 += NB
    tl.store(totals + e, carry, mask=e < E)
    tl.store(counts + e, carry, mask=e < E)
    if SIGNAL:
        arrive(COUNTS, _FLAG_COUNTS, tl.num_programs(0), 1, control)


@triton.jit
def block_rank(idx_ptr, my, mine, t, T, R: tl.constexpr, E: tl.constexpr, BLOCK: tl.constexpr, TB: tl.constexpr):
    """How many pairs of the same expert come before pairs `mine` within the block of token t."""
    first = (t // TB) * (TB * R)
    i = first + tl.arange(0, BLOCK)
    e = load_experts(idx_ptr, i, (i < first + TB * R) & (i < T * R), E)
    same = (e[None, :] == my[:, None]) & (i[None, :] < mine[:, None])
    return tl.sum(same.to(tl.int32), axis=1)


@triton.jit(do_not_specialize=["T"])
def place_pairs(idx_ptr, blocks, totals, positions, T, R: tl.constexpr, RP: tl.constexpr, E: tl.constexpr,
                EP: tl.constexpr, BLOCK: tl.constexpr, TB: tl.constexpr, PDL: tl.constexpr):
    """Program t: the places of token t's pairs."""
    if PDL:
        gdc_wait()
    t = tl.program_id(0)
    k = tl.arange(0, RP)
    my = load_experts(idx_ptr, t * R + k, k < R, E)
    inside = block_rank(idx_ptr, my, t * R + k, t, T, R, E, BLOCK, TB)
    before = tl.load(blocks + (t // TB).to(tl.int64) * E + my, mask=my >= 0, other=0)
    o = tl.arange(0, EP)
    totals = tl.load(totals + o, mask=o < E, other=0)
    lower = tl.sum(tl.where(o[None, :] < my[:, None], totals[None, :], 0), axis=1)
    tl.store(positions + t * R + k, tl.where(my >= 0, lower + before + inside, -1), mask=k < R)


@triton.jit
def prefix_kernel(counts, starts, E: tl.constexpr, EP: tl.constexpr):
    """Exclusive running sum, and the total behind it."""
    o = tl.arange(0, EP)
    c = tl.load(counts + o, mask=o < E, other=0)
    end = tl.cumsum(c, axis=0)
    tl.store(starts + o + 1, end, mask=o < E)
    tl.store(starts, 0)


def launch_count_scan(indices, experts, blocks, totals, counts, control, signal, pdl) -> None:
    """The two kernels before placement: histograms of blocks, running sums over them."""
    tokens, topk = indices.shape
    tb = block_tokens(topk)
    nblocks = ceil_div(tokens, tb)
    more = {"launch_pdl": True} if pdl else {}
    count_blocks[(nblocks,)](
        indices, blocks, tokens, R=topk, E=experts, EP=max(pow2(experts), 128), BLOCK=pow2(tb * topk), TB=tb, PDL=pdl,
        num_warps=4,
    )  # fmt: skip
    scan_blocks[(ceil_div(experts, _SCAN_EXPERTS),)](
        blocks, totals, counts, control, nblocks, E=experts, EB=_SCAN_EXPERTS, NB=_SCAN, SIGNAL=signal, PDL=pdl,
        num_warps=4, **more,
    )  # fmt: skip


def split_workspace(workspace: torch.Tensor | None, tokens: int, topk: int, experts: int, device) -> tuple:
    """(histograms of blocks, totals) in scratch memory, which is made if None."""
    words = workspace_words(tokens, topk, experts)
    if workspace is None:
        workspace = torch.empty(words, dtype=torch.int32, device=device)
    check("workspace", workspace, (-words,), (torch.int32,), device)
    return workspace[experts:words], workspace[:experts]


def route(
    indices: torch.Tensor,
    experts: int,
    *,
    counts: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Count the rows of each expert and place every row.

    Parameters
    ----------
    indices : int32 or int64 [tokens, topk]
        Experts; what is not in 0..experts-1 is masked.
    experts : int
    counts, positions
        Where to put the results; made if None.
    workspace : int32 [workspace_words(tokens, topk, experts)]
        Scratch; made if None.

    Returns
    -------
    counts : int32 [experts]
    positions : int32 [tokens, topk]
        Place of the row among all rows in order of (expert, token, choice); -1 where masked.
    """
    tokens, topk = check_indices(indices)
    device = indices.device
    counts, positions = route_outputs(tokens, topk, experts, counts, positions, device)
    if tokens == 0:
        return counts.zero_(), positions
    blocks, totals = split_workspace(workspace, tokens, topk, experts, device)
    pdl = programmatic(device)
    launch_count_scan(indices, experts, blocks, totals, counts, counts, False, pdl)
    tb = block_tokens(topk)
    place_pairs[(tokens,)](
        indices, blocks, totals, positions, tokens, R=topk, RP=pow2(topk), E=experts, EP=pow2(experts),
        BLOCK=pow2(tb * topk), TB=tb, PDL=pdl, num_warps=1, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
    return counts, positions


def prefix(counts: torch.Tensor, *, starts: torch.Tensor | None = None) -> torch.Tensor:
    """Where each expert's rows start.

    Parameters
    ----------
    counts : int32 [experts]

    Returns
    -------
    starts : int32 [experts + 1]
        Rows before each expert; the last entry is the number of rows.
    """
    check("counts", counts, (None,), (torch.int32,))
    if starts is None:
        starts = torch.empty(counts.numel() + 1, dtype=torch.int32, device=counts.device)
    check("starts", starts, (counts.numel() + 1,), (torch.int32,), counts.device)
    prefix_kernel[(1,)](counts, starts, E=counts.numel(), EP=pow2(counts.numel()), num_warps=4)
    return starts
