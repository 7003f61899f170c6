"""Combine: expert outputs back to where their tokens came from, and there the weighted sum.

The maps that dispatch receive made say where each row goes; `positions` of dispatch send says where each lies on
return.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ._launch import as_words, pow2, word_size
from .casts import round_to
from .checks import check_combine_receive, check_combine_send, check_signals
from .layout import NEAR_UNIT, Layout, ceil_div
from .signals import BACK_FAR, BACK_NEAR, arrive, arrive_near, flag_index, pass_on, wait

_FLAG_BACK = tl.constexpr(flag_index(3))
_ROWS = 1024  # expected when nothing is said; the grid has an eighth more programs, for rows are seldom even
_CHUNK = 4096  # words of a row that a program of combine send copies at a time
_SUM_CHUNK = 1024  # elements that a program of combine receive sums


@triton.jit
def _back(y, send, row, to, X: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, UNIT: tl.constexpr):
    src = y + row.to(tl.int64) * X
    dst = send + (to >> 1) * UNIT
    for c in tl.static_range(CHUNKS):
        o = c * CHUNK + tl.arange(0, CHUNK)
        tl.store(dst + o, tl.load(src + o, mask=o < X), mask=o < X)


@triton.jit(do_not_specialize=["capacity", "nflags"])
def send_back(y, send, map_row, map_to, totals, control, flags, nflags, capacity,
              X: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, UNIT: tl.constexpr, NEARS: tl.constexpr,
              SIGNAL: tl.constexpr, WAIT: tl.constexpr):
    """Any grid. Every ROW arrives at the counter of its kind, whose numbers are known: with a grid of about the rows
    that come no program waits for another."""
    pid = tl.program_id(0)
    step = tl.num_programs(0)
    r = pid
    row = tl.load(map_row + r, mask=r < capacity, other=0)  # before the total is known: one trip to memory less
    to = tl.load(map_to + r, mask=r < capacity, other=0)
    total = tl.load(totals)
    far = tl.load(totals + 1)
    ok = 1
    if WAIT:
        if r < total:  # by the epoch of its first row's kind: that one cannot end before this program has arrived
            if (NEARS > 0) & (to & 1 == 1):
                ok = wait(flags, nflags, BACK_NEAR, control)
            else:
                ok = wait(flags, nflags, BACK_FAR, control)
    while r < total:
        if ok == 1:
            _back(y, send, row, to, X, CHUNK, CHUNKS, UNIT)
        if SIGNAL:
            if (to & 1) == 0:
                arrive(BACK_FAR, _FLAG_BACK, far, ok, control)
            else:
                if NEARS > 0:
                    arrive_near(BACK_NEAR, 1, total - far, ok, control, NEARS)
        r += step
        if r < total:
            row = tl.load(map_row + r)
            to = tl.load(map_to + r)
    if SIGNAL:
        if pid == 0:  # nobody else would
            fine = (total >= 0).to(tl.int32)
            if far == 0:
                arrive(BACK_FAR, _FLAG_BACK, 1, fine, control)
            if NEARS > 0:
                if tl.maximum(total, 0) == far:
                    arrive_near(BACK_NEAR, 1, 1, fine, control, NEARS)


@triton.jit(do_not_specialize=["nflags"])
def sum_rows(buf, positions, weights, out, control, flags, nflags, host_flag,
             R: tl.constexpr, RP: tl.constexpr, H: tl.constexpr, STRIDE: tl.constexpr, CHUNK: tl.constexpr,
             CHUNKS: tl.constexpr, WEIGHTED: tl.constexpr, ACCUMULATE: tl.constexpr, WAIT: tl.constexpr,
             HOST: tl.constexpr):
    """Grid: tokens * CHUNKS. What lies in a row that is masked or has weight 0 is not read, and so cannot poison the
    sum."""
    pid = tl.program_id(0)
    t = pid // CHUNKS
    k = tl.arange(0, RP)
    pos = tl.load(positions + t * R + k, mask=k < R, other=-1)
    m = pos >= 0
    if WEIGHTED:
        w = tl.load(weights + t * R + k, mask=k < R, other=0.0)
        m = m & (w != 0.0)
    o = (pid % CHUNKS) * CHUNK + tl.arange(0, CHUNK)
    to = out + t.to(tl.int64) * H + o
    ok = 1
    if HOST:
        if pid == 0:
            pass_on(host_flag, flags, BACK_FAR, control)
    if WAIT:
        ok = wait(flags, nflags, BACK_FAR, control)
    if ok == 1:
        live = m[:, None]
        if H % CHUNK != 0:
            live = live & (o < H)[None, :]
        v = tl.load(buf + pos.to(tl.int64)[:, None] * STRIDE + o[None, :], mask=live, other=0.0).to(tl.float32)
        if WEIGHTED:
            v = v * w[:, None]
        acc = tl.sum(v, axis=0)
        if ACCUMULATE:
            acc += tl.load(to, mask=o < H, other=0.0).to(tl.float32)
        tl.store(to, round_to(acc, out.dtype.element_ty), mask=o < H)


def combine_send(
    layout: Layout,
    y: torch.Tensor,
    map_row: torch.Tensor,
    map_to: torch.Tensor,
    totals: torch.Tensor,
    send: torch.Tensor,
    *,
    control: torch.Tensor | None = None,
    wait: torch.Tensor | None = None,
    expected_rows: int | None = None,
) -> None:
    """Store expert outputs for the way back: rows of far sources into the send buffer, of near ones into their memory.

    Parameters
    ----------
    layout : Layout
    y : layout.combine_dtype [capacity, hidden]
        Expert outputs, in the rows where `dispatch_receive` put the inputs.
    map_row, map_to, totals
        As `dispatch_receive` left them.
    send : uint8 [>= rows of far sources, layout.combine_row_bytes]
        Combine send buffer: the rows of each far source follow each other, sources in order of rank, a source's rows in
        order of (expert, token): as they lay in its dispatch send buffer.
    control : int32, see `new_control`
        Signals to give: far rows in place, near rows in place. Not given when ``totals[0]`` is -1.
    wait : int32 [flags]
        Flags that must have reached the number of rounds before this one before a row is stored.
    expected_rows : int
        About how many rows there are; right for any number, fast when near. Default 1,024.
    """
    check_combine_send(layout, y, map_row, map_to, totals, send)
    check_signals(layout, control, wait, None, y.device)
    size = word_size(layout.y_bytes, y)
    words = layout.y_bytes // size
    chunk = min(pow2(words), _CHUNK)
    ctl = totals if control is None else control
    flags, nflags = (ctl, 0) if wait is None else (wait, wait.numel())
    expected = _ROWS if expected_rows is None else expected_rows
    send_back[(max(min(expected + expected // 8, map_row.numel()), 1),)](
        as_words(y, size), as_words(send, size), map_row, map_to, totals, ctl, flags, nflags, map_row.numel(),
        X=words, CHUNK=chunk, CHUNKS=ceil_div(words, chunk), UNIT=NEAR_UNIT // size, NEARS=layout.near_ranks,
        SIGNAL=control is not None, WAIT=wait is not None, num_warps=4,
    )  # fmt: skip


def combine_receive(
    layout: Layout,
    buf: torch.Tensor,
    positions: torch.Tensor,
    weights: torch.Tensor | None,
    out: torch.Tensor,
    *,
    accumulate: bool = False,
    control: torch.Tensor | None = None,
    wait: torch.Tensor | None = None,
    host_flag: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sum each token's rows by weight, in float32.

    Parameters
    ----------
    layout : Layout
    buf : uint8 [rows, layout.combine_row_bytes]
        Combine receive buffer: rows of layout.combine_dtype, in the order of this rank's dispatch send.
    positions : int32 [tokens, topk]
        From `dispatch_send`; -1: left out.
    weights : float32 [tokens, topk] or None
        None: all ones. A row of weight 0 is not read.
    out : bfloat16, float16 or float32 [tokens, hidden]
        Gets the sums; with `accumulate` they are added to what is there (in float32, rounded once). A token of which
        all choices are masked gets zeros. Untouched when the wait gives up.
    control, wait
        Control block, and flags that must reach the round of the last `combine_send` first: int32 [flags].
    host_flag : int32 [1]
        A flag in mapped host memory, for want of GDRCopy: one program watches it and passes it on to ``wait[0]``.

    Returns
    -------
    out
    """
    tokens, topk = check_combine_receive(layout, buf, positions, weights, out)
    check_signals(layout, control, wait, host_flag, buf.device)
    if tokens == 0:
        return out
    ctl = positions if control is None else control
    flags, nflags = (ctl, 0) if wait is None else (wait, wait.numel())
    chunk = min(pow2(layout.hidden), _SUM_CHUNK)
    chunks = ceil_div(layout.hidden, chunk)
    sum_rows[(tokens * chunks,)](
        buf.reshape(-1).view(layout.combine_dtype), positions, out if weights is None else weights, out, ctl, flags,
        nflags, ctl if host_flag is None else host_flag, R=topk, RP=pow2(topk), H=layout.hidden,
        STRIDE=layout.combine_row_bytes // layout.combine_dtype.itemsize, CHUNK=chunk, CHUNKS=chunks,
        WEIGHTED=weights is not None, ACCUMULATE=accumulate, WAIT=wait is not None, HOST=host_flag is not None,
        num_warps=4 if chunk >= 1024 else 2,
    )  # fmt: skip
    return out
