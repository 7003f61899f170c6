"""Dispatch, sending side: every (token, expert) pair becomes a row, packed by destination, near ranks' rows in their
memory.

Up to `routing.SMALL` pairs one kernel does it all without a grid barrier: a row's place is the number of smaller
(expert, token) keys, and each program counts those for its own rows. Beyond, two small kernels count first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from . import bulk
from . import routing as r
from ._launch import as_words, pow2, programmatic, word_size
from .bulk import gather, scatter
from .casts import fp8_bits
from .checks import check_dispatch_send, check_signals, check_tokens, route_outputs
from .layout import FP8_GROUP, NEAR_UNIT, Layout, ceil_div
from .signals import COUNTS, FAR, NEAR, arrive, arrive_near, flag_index, wait

_FLAG_COUNTS = tl.constexpr(flag_index(0))
_FLAG_FAR = tl.constexpr(flag_index(1))
GROUP = tl.constexpr(FP8_GROUP)
FP8_MAX = tl.constexpr(448.0)  # largest float8_e4m3fn
AMAX_MIN = tl.constexpr(1e-10)  # keeps 1/scale finite for rows of zeros
BULK = True  # copy by Hopper's copy engine where it can
_CAST_GROUPS = 64  # groups of one chunk in the fused cast
_CHUNK = {4: 2048, 2: 2048, 1: 2048}  # words of one chunk of a copied row


@triton.jit
def owner(e, BASE: tl.constexpr, EXTRA: tl.constexpr):
    """Rank that owns expert e >= 0 (Layout.owner)."""
    if EXTRA == 0:
        return e // BASE
    else:
        if BASE == 0:
            return e
        else:
            BIG: tl.constexpr = EXTRA * (BASE + 1)
            return tl.where(e < BIG, e // (BASE + 1), EXTRA + (e - BIG) // BASE)


@triton.jit
def first_expert(d, BASE: tl.constexpr, EXTRA: tl.constexpr):
    """The first expert of rank d (Layout.first_expert)."""
    return d * BASE + tl.minimum(d, EXTRA)


@triton.jit
def _load_chunk(x, scales, t, c, X: tl.constexpr, S: tl.constexpr, SP: tl.constexpr, CHUNK: tl.constexpr,
                CAST: tl.constexpr):
    """Chunk c of token t: (values, scales). Casting: CHUNK groups become fp8 with the scales amax/448; else CHUNK words
    and, with the first chunk, the scales that the token came with."""
    if CAST:
        o = (c * CHUNK + tl.arange(0, CHUNK))[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        v = tl.load(x + t.to(tl.int64) * X + o, mask=o < X, other=0.0).to(tl.float32)
        s = tl.math.div_rn(tl.maximum(tl.max(tl.abs(v), axis=1), AMAX_MIN), FP8_MAX)
        return fp8_bits(tl.math.div_rn(v, s[:, None] + tl.zeros_like(v))), s
    else:
        o = c * CHUNK + tl.arange(0, CHUNK)
        v = tl.load(x + t.to(tl.int64) * X + o, mask=o < X, other=0)
        i = tl.arange(0, SP)
        return v, tl.load(scales + t.to(tl.int64) * S + i, mask=(i < S) & (c == 0), other=0.0)


@triton.jit
def _store_chunk(send, send32, at, sel, v, s, c, X: tl.constexpr, S: tl.constexpr, SP: tl.constexpr,
                 CHUNK: tl.constexpr, UNIT: tl.constexpr, SCALE_AT: tl.constexpr, R: tl.constexpr, RP: tl.constexpr,
                 CAST: tl.constexpr):
    """Store a chunk to the selected ones of R places, `at` units of 16 bytes (UNIT words) from the send buffer."""
    if CAST:
        k = tl.arange(0, RP)
        g = c * CHUNK + tl.arange(0, CHUNK)
        o = g[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        for kk in tl.static_range(R):
            to = tl.sum(tl.where(k == kk, at, 0), axis=0)
            go = tl.sum(tl.where((k == kk) & sel, 1, 0), axis=0) > 0
            tl.store(send + to * UNIT + o, v, mask=tl.where(go, o < X, False))
            tl.store(send32 + to * 4 + SCALE_AT + g, s, mask=tl.where(go, g < S, False))
    else:
        o = c * CHUNK + tl.arange(0, CHUNK)
        tl.store(send + (at * UNIT)[:, None] + o[None, :], v[None, :], mask=sel[:, None] & (o < X)[None, :])
        if S > 0:
            if c == 0:
                i = tl.arange(0, SP)
                tl.store(send32 + (at * 4 + SCALE_AT)[:, None] + i[None, :], s[None, :],
                         mask=sel[:, None] & (i < S)[None, :])


@triton.jit
def _take(x, scales, t, X: tl.constexpr, S: tl.constexpr, SP: tl.constexpr, CHUNK: tl.constexpr, CAST: tl.constexpr,
          GATHER: tl.constexpr):
    """Begin with token t as early as can be: the first chunk in registers, or all of it on its way to shared memory."""
    if GATHER != "":
        return gather(x + t.to(tl.int64) * X, scales + t.to(tl.int64) * S, GATHER), 0
    else:
        return _load_chunk(x, scales, t, 0, X, S, SP, CHUNK, CAST)


@triton.jit
def _move(x, scales, send, send32, t, at, sel, v, s, X: tl.constexpr, S: tl.constexpr, SP: tl.constexpr,
          CHUNK: tl.constexpr, CHUNKS: tl.constexpr, UNIT: tl.constexpr, SCALE_AT: tl.constexpr, R: tl.constexpr,
          RP: tl.constexpr, CAST: tl.constexpr, TABLE: tl.constexpr, SCATTER: tl.constexpr):
    """Store token t's first chunk (or all of it), which is here already, and move the others."""
    if SCATTER != "":
        scatter(v, tl.arange(0, RP), send, at, sel, UNIT, TABLE, SCATTER)
    else:
        _store_chunk(send, send32, at, sel, v, s, 0, X, S, SP, CHUNK, UNIT, SCALE_AT, R, RP, CAST)
        if CHUNKS > 1:
            for c in range(1, CHUNKS):
                v, s = _load_chunk(x, scales, t, c, X, S, SP, CHUNK, CAST)
                _store_chunk(send, send32, at, sel, v, s, c, X, S, SP, CHUNK, UNIT, SCALE_AT, R, RP, CAST)


@triton.jit
def _places(pos, j, my, d, near, ROW: tl.constexpr, NEAR0: tl.constexpr, NEARS: tl.constexpr, NP: tl.constexpr):
    """(where each row goes, in 16 bytes from the send buffer; is it live; is it a near rank's)."""
    live = my >= 0
    at = pos.to(tl.int64) * ROW
    close = live & (d >= NEAR0) & (d < NEAR0 + NEARS)
    if NEARS > 0:
        n = tl.arange(0, NP)
        base = tl.sum(tl.where((d - NEAR0)[:, None] == n[None, :], near[None, :], 0), axis=1)
        at = tl.where(close, base + j.to(tl.int64) * ROW, at)
    return at, live, close


@triton.jit
def _announce(idx_ptr, counts, control, T, R: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, PAIRS: tl.constexpr,
              NEARS: tl.constexpr, SIGNAL: tl.constexpr):
    """Program 0: the counts, for the host. Without tokens there is nobody else to give the other signals."""
    i = tl.arange(0, PAIRS)
    o = tl.arange(0, EP)
    tl.store(counts + o, r.histogram(r.load_experts(idx_ptr, i, i < T * R, E), EP), mask=o < E)
    if SIGNAL:
        arrive(COUNTS, _FLAG_COUNTS, 1, 1, control)


@triton.jit(do_not_specialize=["T"])
def send_small(x, scales, idx_ptr, send, send32, near_ptr, positions, counts, control, flags, nflags, T,
               R: tl.constexpr, RP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, BASE: tl.constexpr,
               EXTRA: tl.constexpr, NEAR0: tl.constexpr, NEARS: tl.constexpr, NP: tl.constexpr, ROLES: tl.constexpr,
               PAIRS: tl.constexpr, X: tl.constexpr, S: tl.constexpr, SP: tl.constexpr, CHUNK: tl.constexpr,
               CHUNKS: tl.constexpr, UNIT: tl.constexpr, ROW: tl.constexpr, SCALE_AT: tl.constexpr,
               CAST: tl.constexpr, SIGNAL: tl.constexpr, WAIT: tl.constexpr, GATHER: tl.constexpr,
               TABLE: tl.constexpr, SCATTER: tl.constexpr):
    """Grid: 1 + T*ROLES. With near ranks a token has two programs, far rows (role 0) and near rows, so that neither
    signal waits for the other's stores."""
    pid = tl.program_id(0)
    if pid == 0:
        _announce(idx_ptr, counts, control, T, R, E, EP, PAIRS, NEARS, SIGNAL)
        if SIGNAL:
            if T == 0:
                arrive(FAR, _FLAG_FAR, 1, 1, control)
                if NEARS > 0:
                    arrive_near(NEAR, 0, 1, 1, control, NEARS)
    else:
        role = (pid - 1) // T
        t = (pid - 1) % T
        v, s = _take(x, scales, t, X, S, SP, CHUNK, CAST, GATHER)
        i = tl.arange(0, PAIRS)
        k = tl.arange(0, RP)
        e = r.load_experts(idx_ptr, i, i < T * R, E)
        my = r.load_experts(idx_ptr, t * R + k, k < R, E)
        n = tl.arange(0, NP)
        near = tl.load(near_ptr + n, mask=n < NEARS, other=0)
        d = owner(tl.maximum(my, 0), BASE, EXTRA)
        key = tl.where(e >= 0, e * PAIRS + i, 0x7FFFFFFF)
        mine = my * PAIRS + t * R + k
        low = first_expert(d, BASE, EXTRA) * PAIRS
        # rows before mine, and (upper half) those of lower ranks: one reduction; at most PAIRS < 2**15 of each
        below = (key[None, :] < mine[:, None]).to(tl.int32) + ((key[None, :] < low[:, None]).to(tl.int32) << 16)
        below = tl.sum(below, axis=1)
        pos = below & 0xFFFF
        at, live, close = _places(pos, pos - (below >> 16), my, d, near, ROW, NEAR0, NEARS, NP)
        if role == 0:
            tl.store(positions + t * R + k, tl.where(live, pos, -1), mask=k < R)
        ok = 1
        if WAIT:
            if role == 0:
                ok = wait(flags, nflags, FAR, control)
            else:
                ok = wait(flags, nflags, NEAR, control)
        sel = live & ((close & (role == 1)) | ((role == 0) & (close == 0))) & (ok == 1)
        _move(x, scales, send, send32, t, at, sel, v, s, X, S, SP, CHUNK, CHUNKS, UNIT, SCALE_AT, R, RP, CAST, TABLE,
              SCATTER)
        if SIGNAL:
            if role == 0:
                arrive(FAR, _FLAG_FAR, T, ok, control)
            else:
                arrive_near(NEAR, 0, T, ok, control, NEARS)


@triton.jit(do_not_specialize=["T"])
def send_large(x, scales, idx_ptr, send, send32, near_ptr, positions, blocks, totals_ptr, control, flags, nflags, T,
               R: tl.constexpr, RP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, BASE: tl.constexpr,
               EXTRA: tl.constexpr, NEAR0: tl.constexpr, NEARS: tl.constexpr, NP: tl.constexpr, BLOCK: tl.constexpr,
               TB: tl.constexpr, X: tl.constexpr, S: tl.constexpr, SP: tl.constexpr, CHUNK: tl.constexpr,
               CHUNKS: tl.constexpr, UNIT: tl.constexpr, ROW: tl.constexpr, SCALE_AT: tl.constexpr,
               CAST: tl.constexpr, SIGNAL: tl.constexpr, WAIT: tl.constexpr, GATHER: tl.constexpr,
               TABLE: tl.constexpr, SCATTER: tl.constexpr, PDL: tl.constexpr):
    """Grid: T. After count_blocks and scan_blocks. Far rows, signal, near rows, signal."""
    t = tl.program_id(0)
    v, s = _take(x, scales, t, X, S, SP, CHUNK, CAST, GATHER)
    k = tl.arange(0, RP)
    my = r.load_experts(idx_ptr, t * R + k, k < R, E)
    inside = r.block_rank(idx_ptr, my, t * R + k, t, T, R, E, BLOCK, TB)
    n = tl.arange(0, NP)
    near = tl.load(near_ptr + n, mask=n < NEARS, other=0)
    if PDL:
        gdc_wait()
    before = tl.load(blocks + (t // TB).to(tl.int64) * E + my, mask=my >= 0, other=0)
    o = tl.arange(0, EP)
    totals = tl.load(totals_ptr + o, mask=o < E, other=0)
    d = owner(tl.maximum(my, 0), BASE, EXTRA)
    lower = tl.where(o[None, :] < my[:, None], totals[None, :], 0)
    start = tl.sum(tl.where(o[None, :] < first_expert(d, BASE, EXTRA)[:, None], lower, 0), axis=1)
    pos = tl.sum(lower, axis=1) + before + inside
    at, live, close = _places(pos, pos - start, my, d, near, ROW, NEAR0, NEARS, NP)
    tl.store(positions + t * R + k, tl.where(live, pos, -1), mask=k < R)
    ok = 1
    if WAIT:
        ok = wait(flags, nflags, FAR, control)
    sel = live & (close == 0) & (ok == 1)
    _move(x, scales, send, send32, t, at, sel, v, s, X, S, SP, CHUNK, CHUNKS, UNIT, SCALE_AT, R, RP, CAST, TABLE,
              SCATTER)
    if SIGNAL:
        arrive(FAR, _FLAG_FAR, T, ok, control)
    if NEARS > 0:
        tl.debug_barrier()  # the copy engine's table of addresses is free again
        sel = close & (ok == 1)
        _move(x, scales, send, send32, t, at, sel, v, s, X, S, SP, CHUNK, CHUNKS, UNIT, SCALE_AT, R, RP, CAST, TABLE,
              SCATTER)
        if SIGNAL:
            arrive_near(NEAR, 0, T, ok, control, NEARS)


def _row_options(layout: Layout, x: torch.Tensor, scales: torch.Tensor | None, send: torch.Tensor) -> tuple:
    """(x, scales, send, send as 32-bit words, constants) as the kernels take them; checks the row's format."""
    cast = check_tokens(layout, x, scales)
    if cast:
        words, chunk, flat = layout.hidden, min(pow2(layout.scales), _CAST_GROUPS), x
        size, chunks, out = 1, ceil_div(layout.scales, chunk), send
    else:
        size = word_size(layout.x_bytes, x)
        words, chunk = layout.x_bytes // size, min(pow2(layout.x_bytes // size), _CHUNK[size])
        chunks, flat, out = ceil_div(words, chunk), as_words(x, size), as_words(send, size)
    send32 = send.reshape(-1).view(torch.float32)
    constants = dict(
        X=words, S=layout.scales, SP=pow2(layout.scales), CHUNK=chunk, CHUNKS=chunks, UNIT=NEAR_UNIT // size,
        ROW=layout.row_bytes // NEAR_UNIT, SCALE_AT=layout.scale_at // 4, CAST=cast, GATHER="", TABLE="", SCATTER="",
    )  # fmt: skip
    if BULK and not cast and bulk.fits(layout, x, scales):
        constants |= dict(
            GATHER=bulk.gather_text(layout), TABLE=bulk.table_text(layout), SCATTER=bulk.scatter_text(layout)
        )
    return flat, send32 if scales is None else scales, out, send32, constants


def dispatch_send(
    layout: Layout,
    x: torch.Tensor,
    indices: torch.Tensor,
    send: torch.Tensor,
    *,
    scales: torch.Tensor | None = None,
    near: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    control: torch.Tensor | None = None,
    wait: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pack tokens into rows by (destination, expert), count them for the proxy, store near ranks' rows in their memory.

    Parameters
    ----------
    layout : Layout
    x : layout.dtype [tokens, hidden]
        Tokens. bfloat16, float16 or float32 where rows are float8_e4m3fn: then each run of 128 elements is divided by
        ``scale = max(amax, 1e-10) / 448`` and cast, and the row carries the scales.
    indices : int32 or int64 [tokens, topk]
        Experts; what is not in 0..experts-1 is masked.
    send : uint8 [>= tokens*topk, layout.row_bytes]
        Send buffer. Row ``positions[t, k]`` gets token t, unless its expert's rank is near: those places stay
        untouched.
    scales : float32 [tokens, layout.scales]
        Copied into the rows.
    near : int64 [near_ranks]
        Where each near rank has this rank's rows, in units of 16 bytes from `send` (`near_offsets`); room for
        ``layout.near_rows`` rows. Rows of a near rank lie there in order of (expert, token), from 0.
    counts : int32 [experts]
        Gets the rows of each expert. Mapped pinned host memory will do; made if None.
    positions : int32 [tokens, topk]
        Gets the rows' places among all rows in order of (expert, token, choice), -1 where masked; made if None.
    control : int32, see `new_control`
        Signals to give: counts published, far rows in place, near rows in place. None: no signals.
    wait : int32 [flags]
        Flags that must have reached the number of rounds before this one before a row is stored.
    workspace : int32 [workspace_words(tokens, topk, experts)]
        Scratch for more than 1,024 pairs; made if None.

    Returns
    -------
    counts, positions
    """
    device = x.device
    tokens, topk = check_dispatch_send(layout, x, indices, send, near)
    check_signals(layout, control, wait, None, device)
    counts, positions = route_outputs(tokens, topk, layout.experts, counts, positions, device)
    flat, scale_words, out, send32, row = _row_options(layout, x, scales, send)
    nears = layout.near_ranks
    common = dict(
        R=topk, RP=pow2(topk), E=layout.experts, BASE=layout.base, EXTRA=layout.extra, NEAR0=layout.near_first,
        NEARS=nears, NP=pow2(nears), SIGNAL=control is not None, WAIT=wait is not None, **row,
    )  # fmt: skip
    ctl = counts if control is None else control
    flags, nflags = (ctl, 0) if wait is None else (wait, wait.numel())
    near = positions if near is None else near
    warps = 8 if row["CAST"] else 4
    if tokens * topk <= r.SMALL:
        roles = 2 if nears else 1
        send_small[(1 + tokens * roles,)](
            flat, scale_words, indices, out, send32, near, positions, counts, ctl, flags, nflags, tokens, ROLES=roles,
            EP=max(pow2(layout.experts), 128), PAIRS=_pairs(tokens * topk), num_warps=warps, **common,
        )  # fmt: skip
        return counts, positions
    blocks, totals = r.split_workspace(workspace, tokens, topk, layout.experts, device)
    pdl = programmatic(device)
    r.launch_count_scan(indices, layout.experts, blocks, totals, counts, ctl, control is not None, pdl)
    tb = r.block_tokens(topk)
    send_large[(tokens,)](
        flat, scale_words, indices, out, send32, near, positions, blocks, totals, ctl, flags, nflags, tokens,
        EP=pow2(layout.experts), BLOCK=pow2(tb * topk), TB=tb, PDL=pdl, num_warps=warps if row["CAST"] else 2,
        **common, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
    return counts, positions


def _pairs(n: int) -> int:
    """Pairs that the one-kernel variant is compiled for: few sizes, so that few variants are compiled."""
    return next(p for p in (64, 256, r.SMALL) if n <= p)
