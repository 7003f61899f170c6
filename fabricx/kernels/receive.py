"""Dispatch, receiving side: from where the rows landed into padded expert segments, and the map for the way back.

Up to `SMALL` (expert, source) pairs one kernel does it, in which every program works out its own rows; beyond, a kernel
makes the map and another copies by it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ._launch import as_words, pow2, programmatic, word_size
from .checks import check, check_dispatch_receive, check_signals
from .layout import NEAR_UNIT, Layout, ceil_div
from .signals import FAR, pass_on, wait

SMALL = 1024  # (expert, source) pairs up to which each program reads all counts
_SMALL_ROWS = 4096  # rows expected up to which that pays
_ROWS = 1024  # expected when nothing is said; the grid has an eighth more programs, for rows are seldom even
_CHUNK = 2048  # words of a row that a program copies at a time
_TILE = 4096  # counts that the counting kernel takes at a time
_MAP_ROWS = 128  # rows that a program of the map kernel takes at a time


@triton.jit
def _is_near(s, NEAR0: tl.constexpr, NEARS: tl.constexpr):
    return (s >= NEAR0) & (s < NEAR0 + NEARS)


@triton.jit
def _landed(s, j, over, close, P: tl.constexpr, N: tl.constexpr, NEAR0: tl.constexpr, NEARS: tl.constexpr,
            NEAR_ROWS: tl.constexpr):
    """Row of the receive buffer that holds row j of source s; `over` is how many rows beyond P lower far ranks have."""
    far = tl.where(j < P, s * P + j, N * P + over + j - P)
    return tl.where(close, (s - NEAR0) * NEAR_ROWS + j, NEARS * NEAR_ROWS + far)


@triton.jit
def _way_back(close, base, start, j, behind, ROW: tl.constexpr):
    """Where combine sends the row: (16-byte units from its send buffer << 1) | near. A near source's rows lie in its
    buffer in its own order; far rows lie in the send buffer by (source, j)."""
    there = base + (start + j).to(tl.int64) * ROW
    return tl.where(close, there * 2 + 1, (behind + j).to(tl.int64) * (ROW * 2))


@triton.jit
def _pick(near_ptr, starts, s, close, NEAR0: tl.constexpr, NEARS: tl.constexpr):
    """(offset of near source s's buffer, where this rank's rows start in it)."""
    if NEARS > 0:
        i = tl.where(close, s - NEAR0, 0)
        return tl.load(near_ptr + i), tl.load(starts + tl.where(close, s, 0))
    else:
        return s.to(tl.int64) * 0, s * 0


@triton.jit
def _copy_row(recv, recv32, out_x, out_s, slot, row, X: tl.constexpr, S: tl.constexpr, SP: tl.constexpr,
              CHUNK: tl.constexpr, CHUNKS: tl.constexpr, UNIT: tl.constexpr, ROW: tl.constexpr, SCALE_AT: tl.constexpr):
    src = recv + slot.to(tl.int64) * (ROW * UNIT)
    dst = out_x + row.to(tl.int64) * X
    o = tl.arange(0, CHUNK)
    v = tl.load(src + o, mask=o < X)
    if S > 0:
        i = tl.arange(0, SP)
        sv = tl.load(recv32 + slot.to(tl.int64) * (ROW * 4) + SCALE_AT + i, mask=i < S)
        tl.store(out_s + row.to(tl.int64) * S + i, sv, mask=i < S)
    tl.store(dst + o, v, mask=o < X)
    if CHUNKS > 1:
        for c in range(1, CHUNKS):
            o = c * CHUNK + tl.arange(0, CHUNK)
            tl.store(dst + o, tl.load(src + o, mask=o < X), mask=o < X)


@triton.jit
def _locate(q, c, end, padding, EL: tl.constexpr, NP: tl.constexpr, ELP: tl.constexpr, r):
    """Row r in order of (expert, source, arrival): (source, row among the source's, padded row)."""
    seg = tl.sum((end <= r).to(tl.int32), axis=0)
    s = seg % NP
    e = seg // NP
    # start of the segment and, in the upper half, this source's rows for earlier experts: one reduction
    a = tl.where(q < seg, c, 0).to(tl.int64) + (tl.where((q % NP == s) & (q // NP < e), c, 0).to(tl.int64) << 32)
    a = tl.sum(a, axis=0)
    j = r - (a & 0xFFFFFFFF).to(tl.int32) + (a >> 32).to(tl.int32)
    return s, j, r + tl.sum(tl.where(tl.arange(0, ELP) < e, padding, 0), axis=0)


@triton.jit
def _load_counts(counts, N: tl.constexpr, NP: tl.constexpr, EL: tl.constexpr, ELP: tl.constexpr):
    """All counts in order of (expert, source), both filled up to powers of two with zeros."""
    q = tl.arange(0, NP * ELP)
    s = q % NP
    e = q // NP
    return q, tl.load(counts + s * EL + e, mask=(s < N) & (e < EL), other=0)


@triton.jit
def _finish(c2, tokens_ptr, totals_ptr, EL: tl.constexpr, ELP: tl.constexpr, NP: tl.constexpr, NEAR0: tl.constexpr,
            NEARS: tl.constexpr):
    """One program: tokens of each expert; all rows and the far ones among them."""
    e = tl.arange(0, ELP)
    s = tl.arange(0, NP)
    tl.store(tokens_ptr + e, tl.sum(c2, axis=1), mask=e < EL)
    per_source = tl.sum(c2, axis=0)
    tl.store(totals_ptr, tl.sum(per_source, axis=0))
    tl.store(totals_ptr + 1, tl.sum(tl.where(_is_near(s, NEAR0, NEARS), 0, per_source), axis=0))


@triton.jit
def _void(totals_ptr):
    """One program, when the round is void: nothing to copy, and combine must not signal."""
    tl.store(totals_ptr, -1)
    tl.store(totals_ptr + 1, 0)


@triton.jit(do_not_specialize=["rows", "nflags"])
def receive_small(recv, recv32, counts, starts, near_ptr, out_x, out_s, map_row, map_to, tokens_ptr, totals_ptr,
                  control, flags, nflags, host_flag, rows,
                  N: tl.constexpr, NP: tl.constexpr, EL: tl.constexpr, ELP: tl.constexpr, P: tl.constexpr,
                  NEAR0: tl.constexpr, NEARS: tl.constexpr, NEAR_ROWS: tl.constexpr, PAD: tl.constexpr,
                  X: tl.constexpr, S: tl.constexpr, SP: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
                  UNIT: tl.constexpr, ROW: tl.constexpr, SCALE_AT: tl.constexpr, BACK_ROW: tl.constexpr,
                  WAIT: tl.constexpr, HOST: tl.constexpr):
    """Any grid; each program takes every so many-th row."""
    pid = tl.program_id(0)
    ok = 1
    if HOST:
        if pid == 0:
            pass_on(host_flag, flags, FAR, control)
    if WAIT:
        ok = wait(flags, nflags, FAR, control)
    if ok == 1:
        q, c = _load_counts(counts, N, NP, EL, ELP)
        end = tl.cumsum(c, axis=0)
        c2 = tl.reshape(c, [ELP, NP])
        et = tl.sum(c2, axis=1)
        padding = (et + PAD - 1) // PAD * PAD - et
        fits = tl.sum(et + padding, axis=0) <= rows
        total = tl.where(fits, tl.sum(c, axis=0), 0)
        ss = tl.arange(0, NP)
        r = pid
        while r < total:  # not range(): the interpreter takes only Python's integers there
            s, j, row = _locate(q, c, end, padding, EL, NP, ELP, r)
            close = _is_near(s, NEAR0, NEARS)
            lower = tl.where((ss < s) & (_is_near(ss, NEAR0, NEARS) == 0), tl.sum(c2, axis=0), 0)
            over = tl.sum(tl.maximum(lower - P, 0), axis=0)
            slot = _landed(s, j, over, close, P, N, NEAR0, NEARS, NEAR_ROWS)
            base, start = _pick(near_ptr, starts, s, close, NEAR0, NEARS)
            _copy_row(recv, recv32, out_x, out_s, slot, row, X, S, SP, CHUNK, CHUNKS, UNIT, ROW, SCALE_AT)
            tl.store(map_row + r, row)
            tl.store(map_to + r, _way_back(close, base, start, j, tl.sum(lower, axis=0), BACK_ROW))
            r += tl.num_programs(0)
        if pid == 0:
            _finish(c2, tokens_ptr, totals_ptr, EL, ELP, NP, NEAR0, NEARS)
            if fits == 0:
                _void(totals_ptr)
    else:
        if pid == 0:
            e = tl.arange(0, ELP)
            tl.store(tokens_ptr + e, tl.zeros([ELP], tl.int32), mask=e < EL)
            _void(totals_ptr)


@triton.jit(do_not_specialize=["nflags", "rows"])
def count_sources(counts, tokens_ptr, totals_ptr, segments, behind, control, flags, nflags, host_flag, rows,
                  N: tl.constexpr, NP: tl.constexpr, EL: tl.constexpr, EB: tl.constexpr, P: tl.constexpr,
                  NEAR0: tl.constexpr, NEARS: tl.constexpr, PAD: tl.constexpr, WAIT: tl.constexpr,
                  HOST: tl.constexpr, PDL: tl.constexpr):
    """One program: for each (expert, source) where its rows start, unpadded, padded, and among the source's
    (`segments`, int32 [3, EL, N]); for each source the far rows before it and those beyond P (`behind`, int32 [2, N]);
    the totals."""
    if PDL:
        gdc_launch_dependents()
    ok = 1
    if HOST:
        pass_on(host_flag, flags, FAR, control)
    if WAIT:
        ok = wait(flags, nflags, FAR, control)
    s = tl.arange(0, NP)
    mine = tl.zeros([NP], tl.int32)
    at = 0
    padded = 0
    if ok == 1:
        for e0 in range(0, EL, EB):
            e = e0 + tl.arange(0, EB)
            m = (e < EL)[:, None] & (s < N)[None, :]
            c = tl.load(counts + s[None, :] * EL + e[:, None], mask=m, other=0)
            total = tl.sum(c, axis=1)
            inside = tl.cumsum(c, axis=1) - c
            room = (total + PAD - 1) // PAD * PAD
            o = e[:, None] * N + s[None, :]
            tl.store(segments + o, inside + (at + tl.cumsum(total, axis=0) - total)[:, None], mask=m)
            tl.store(segments + EL * N + o, inside + (padded + tl.cumsum(room, axis=0) - room)[:, None], mask=m)
            tl.store(segments + 2 * EL * N + o, mine[None, :] + tl.cumsum(c, axis=0) - c, mask=m)
            tl.store(tokens_ptr + e, total, mask=e < EL)
            mine += tl.sum(c, axis=0)
            at += tl.sum(total, axis=0)
            padded += tl.sum(room, axis=0)
        far = tl.where(_is_near(s, NEAR0, NEARS), 0, mine)
        over = tl.maximum(far - P, 0)
        tl.store(behind + s, tl.cumsum(far, axis=0) - far, mask=s < N)
        tl.store(behind + N + s, tl.cumsum(over, axis=0) - over, mask=s < N)
        if padded <= rows:
            tl.store(totals_ptr, at)
            tl.store(totals_ptr + 1, tl.sum(far, axis=0))
        else:
            _void(totals_ptr)
    else:
        _void(totals_ptr)
        for e0 in range(0, EL, EB):
            e = e0 + tl.arange(0, EB)
            tl.store(tokens_ptr + e, tl.zeros([EB], tl.int32), mask=e < EL)


@triton.jit
def map_rows(counts, segments, behind, starts, near_ptr, map_row, map_to, map_slot, totals_ptr,
             N: tl.constexpr, EL: tl.constexpr, P: tl.constexpr, NEAR0: tl.constexpr, NEARS: tl.constexpr,
             NEAR_ROWS: tl.constexpr, BACK_ROW: tl.constexpr, RB: tl.constexpr, PDL: tl.constexpr):
    """Program (expert, source): its rows' entries in the maps."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    q = tl.program_id(0)
    s = q % N
    e = q // N
    if tl.load(totals_ptr) > 0:
        n = tl.load(counts + s * EL + e)
        start = tl.load(segments + q)
        padded = tl.load(segments + EL * N + q)
        j0 = tl.load(segments + 2 * EL * N + q)
        before = tl.load(behind + s)
        over = tl.load(behind + N + s)
        close = _is_near(s, NEAR0, NEARS)
        base, there = _pick(near_ptr, starts, s, close, NEAR0, NEARS)
        i0 = 0
        while i0 < n:
            i = i0 + tl.arange(0, RB)
            m = i < n
            tl.store(map_slot + start + i, _landed(s, j0 + i, over, close, P, N, NEAR0, NEARS, NEAR_ROWS), mask=m)
            tl.store(map_row + start + i, padded + i, mask=m)
            tl.store(map_to + start + i, _way_back(close, base, there, j0 + i, before, BACK_ROW), mask=m)
            i0 += RB


@triton.jit
def copy_rows(recv, recv32, out_x, out_s, map_row, map_slot, totals_ptr,
              X: tl.constexpr, S: tl.constexpr, SP: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
              UNIT: tl.constexpr, ROW: tl.constexpr, SCALE_AT: tl.constexpr, PDL: tl.constexpr):
    """Any grid: copy by the maps."""
    if PDL:
        gdc_wait()
    r = tl.program_id(0)
    total = tl.load(totals_ptr)
    while r < total:
        slot, row = tl.load(map_slot + r), tl.load(map_row + r)
        _copy_row(recv, recv32, out_x, out_s, slot, row, X, S, SP, CHUNK, CHUNKS, UNIT, ROW, SCALE_AT)
        r += tl.num_programs(0)


def receive_workspace_words(layout: Layout, rows: int) -> int:
    """int32 words of scratch memory that `dispatch_receive` into `rows` rows may need."""
    return rows + (3 * layout.local_experts + 2) * layout.ranks


def dispatch_receive(
    layout: Layout,
    recv: torch.Tensor,
    counts: torch.Tensor,
    out_x: torch.Tensor,
    map_row: torch.Tensor,
    map_to: torch.Tensor,
    expert_tokens: torch.Tensor,
    totals: torch.Tensor,
    *,
    out_scales: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
    near: torch.Tensor | None = None,
    control: torch.Tensor | None = None,
    wait: torch.Tensor | None = None,
    host_flag: torch.Tensor | None = None,
    expected_rows: int | None = None,
    workspace: torch.Tensor | None = None,
) -> None:
    """Copy what has come into padded expert segments; note for each row where combine sends it.

    Parameters
    ----------
    layout : Layout
    recv : uint8 [rows, layout.row_bytes]
        Receive buffer (docs/kernels.md): near sources' rows, private slots, the rest.
    counts : int32 [ranks, layout.local_experts]
        Rows that each source sends to each of this rank's experts.
    out_x : layout.dtype [capacity, hidden]
        Expert e's rows start at the sum of ``expert_tokens[:e]``, each rounded up to a multiple of layout.pad, and lie
        in order of (source, token). Rows between segments are left as they are.
    map_row : int32 [>= capacity]
        Gets, for row i in order of (expert, source, token), its row in `out_x`.
    map_to : int64 [>= capacity]
        Gets where `combine_send` stores it.
    expert_tokens : int32 [layout.local_experts]
        Gets the rows of each expert, without padding.
    totals : int32 [2]
        Gets the number of rows, and of those from ranks that are not near. -1 and 0 when the wait gave up (then
        expert_tokens are zeros) or when the padded segments do not fit `out_x`: nothing is copied then.
    out_scales : float32 [capacity, layout.scales]
    starts : int32 [ranks]
        For each near source, the rows it sends to ranks below this one. Needed with near ranks.
    near : int64 [near_ranks]
        Where each near rank's combine receive buffer starts, in units of 16 bytes from this rank's combine send buffer.
    control, wait
        Control block, and flags that must reach the round of the last `dispatch_send` first: int32 [flags].
    host_flag : int32 [1]
        A flag in mapped host memory, for want of GDRCopy: one program watches it and passes it on to ``wait[0]``.
    expected_rows : int
        About how many rows come; right for any number, fast when near. Default 1,024.
    workspace : int32 [receive_workspace_words(layout, capacity)]
        Scratch for many experts times ranks, or many rows; made if None.
    """
    device = recv.device
    n, el = layout.ranks, layout.local_experts
    rows = check_dispatch_receive(
        layout, recv, counts, out_x, map_row, map_to, expert_tokens, totals, out_scales, starts, near
    )
    check_signals(layout, control, wait, host_flag, device)
    size = word_size(layout.x_bytes, out_x)
    words = layout.x_bytes // size
    chunk = min(pow2(words), _CHUNK)
    near_args = dict(
        N=n, EL=el, P=layout.private, NEAR0=layout.near_first, NEARS=layout.near_ranks, NEAR_ROWS=layout.near_rows,
        BACK_ROW=layout.combine_row_bytes // NEAR_UNIT,
    )  # fmt: skip
    row_args = dict(
        X=words, S=layout.scales, SP=pow2(layout.scales), CHUNK=chunk, CHUNKS=ceil_div(words, chunk),
        UNIT=NEAR_UNIT // size, ROW=layout.row_bytes // NEAR_UNIT, SCALE_AT=layout.scale_at // 4,
    )  # fmt: skip
    recv_w, recv32 = as_words(recv, size), recv.reshape(-1).view(torch.float32)
    out_w, out_s = as_words(out_x, size), recv32 if out_scales is None else out_scales
    ctl = totals if control is None else control
    flags, nflags = (ctl, 0) if wait is None else (wait, wait.numel())
    host = ctl if host_flag is None else host_flag
    waits = dict(WAIT=wait is not None, HOST=host_flag is not None)
    starts = totals if starts is None else starts
    near = map_to if near is None else near
    expected = _ROWS if expected_rows is None else expected_rows
    grid = max(min(expected + expected // 8, rows), 1)
    np_, elp = pow2(n), pow2(el)
    if np_ * elp <= SMALL and expected <= _SMALL_ROWS:
        receive_small[(grid,)](
            recv_w, recv32, counts, starts, near, out_w, out_s, map_row, map_to, expert_tokens, totals, ctl, flags,
            nflags, host, rows, NP=np_, ELP=elp, PAD=layout.pad, num_warps=2, **near_args, **row_args, **waits,
        )  # fmt: skip
        return
    words = receive_workspace_words(layout, rows)
    if workspace is None:
        workspace = torch.empty(words, dtype=torch.int32, device=device)
    check("workspace", workspace, (-words,), (torch.int32,), device)
    map_slot, segments, behind = workspace[:rows], workspace[rows : rows + 3 * el * n], workspace[rows + 3 * el * n :]
    pdl = programmatic(device)
    more = {"launch_pdl": True} if pdl else {}
    count_sources[(1,)](
        counts, expert_tokens, totals, segments, behind, ctl, flags, nflags, host, rows, N=n, NP=np_, EL=el,
        EB=max(min(_TILE // np_, elp), 1), P=layout.private, NEAR0=layout.near_first, NEARS=layout.near_ranks,
        PAD=layout.pad, PDL=pdl, num_warps=4, **waits,
    )  # fmt: skip
    if el == 0:
        return
    map_rows[(el * n,)](
        counts, segments, behind, starts, near, map_row, map_to, map_slot, totals, RB=_MAP_ROWS, PDL=pdl, num_warps=4,
        **near_args, **more,
    )  # fmt: skip
    copy_rows[(grid,)](
        recv_w, recv32, out_w, out_s, map_row, map_slot, totals, PDL=pdl, num_warps=4, **row_args, **more
    )
