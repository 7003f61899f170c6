"""Device-side signals: arrive and raise a flag (release), wait for flags (acquire), at system scope.

Flags are u32 epochs that only ever grow (and wrap); the epoch lives in the control block (control.py), so a CUDA graph
replays with the arguments it was captured with. NVIDIA GPUs use inline assembly, which a scalar operand makes run in
every thread: each block lets through the threads that it needs and joins them again at a barrier. Elsewhere (the
interpreter, other GPUs) Triton's atomics do the same.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import control as c

INTERPRET = tl.constexpr(bool(triton.knobs.runtime.interpret))
ASM = tl.constexpr(not triton.knobs.runtime.interpret and torch.version.hip is None)
HAS_LOAD = tl.constexpr(hasattr(tl, "atomic_load"))  # newer Triton; else adding zero does as well, and slower

LINE = tl.constexpr(c.LINE)
EPOCH = tl.constexpr(c.EPOCH)
STATUS = tl.constexpr(c.STATUS)
TIMEOUT = tl.constexpr(c.TIMEOUT)
ABORT = tl.constexpr(c.ABORT)
FLAG = tl.constexpr(c.FLAG)
NEAR_FLAGS = tl.constexpr(c.NEAR_FLAGS)
PEERS = tl.constexpr(c.PEERS)
TIMED_OUT = tl.constexpr(c.TIMED_OUT)
ABORTED = tl.constexpr(c.ABORTED)
COUNTS = tl.constexpr(c.COUNTS)
FAR = tl.constexpr(c.FAR)
NEAR = tl.constexpr(c.NEAR)
BACK_FAR = tl.constexpr(c.BACK_FAR)
BACK_NEAR = tl.constexpr(c.BACK_NEAR)


def flag_index(signal: int) -> int:
    """Which of the control block's three proxy flags `signal` raises."""
    return c._FLAG_OF[signal]


# $1 flags, $2 how many, $3 the epoch's address, $4 the control block, $5 0 or 1: the number this program reports with.
# Lane i of the first warp waits for flags i, i+32, ...; the barrier at the end also tells every thread how it went.
# Only program 0 reads the abort word, which may lie in host memory: polled by every block it would choke PCIe. The
# others see what program 0 leaves in the status word. %globaltimer counts nanoseconds.
_WAIT = f"""{{
    .reg .pred p, bad; .reg .u32 t, want, v, i, s, n; .reg .s32 d; .reg .u64 a, ab, now, limit, us;
    mov.u32 t, %tid.x; setp.ne.u32 bad, t, t; setp.ge.u32 p, t, 32; @p bra DONE;
    ld.global.u32 want, [$3];
    mov.u32 i, t; mov.u64 limit, 0; mov.u32 n, 0;
NEXT: setp.ge.u32 p, i, $2; @p bra DONE;
    mad.wide.u32 a, i, 4, $1;
LOOP: ld.acquire.sys.global.u32 v, [a]; sub.s32 d, v, want; setp.ge.s32 p, d, 0; @p bra GOT;
    ld.relaxed.gpu.global.u32 s, [$4 + {4 * c.STATUS}]; setp.ne.u32 bad, s, 0; @bad bra DONE;
    mov.u64 now, %globaltimer; setp.ne.u64 p, limit, 0; @p bra TIMED;
    ld.global.u32 s, [$4 + {4 * c.TIMEOUT}]; mul.wide.u32 us, s, 1000; add.u64 limit, now, us;
TIMED: mov.u32 s, {c.TIMED_OUT}; setp.gt.u64 bad, now, limit; @bad bra FAIL;
    add.u32 n, n, 1; and.b32 s, n, 31; setp.ne.u32 p, s, 1; @p bra LOOP;
    mov.u32 s, %ctaid.x; setp.ne.u32 p, s, 0; @p bra LOOP;
    ld.global.u64 ab, [$4 + {4 * c.ABORT}]; setp.eq.u64 p, ab, 0; @p bra LOOP;
    ld.relaxed.sys.global.u32 s, [ab]; setp.ne.u32 bad, s, 0; @!bad bra LOOP;
    mov.u32 s, {c.ABORTED};
FAIL: atom.relaxed.gpu.global.cas.b32 s, [$4 + {4 * c.STATUS}], 0, s; bra DONE;
GOT: add.u32 i, i, 32; bra NEXT;
DONE: barrier.red.or.pred p, 0, bad; selp.u32 $0, 0, 1, p; }}"""
WAIT_ASM = tl.constexpr(_WAIT)

# $1 the signal's line, $2 how many arrive, $3 did this program's wait succeed, $4 the word with the flag's address. All
# in one thread: no result to broadcast, hence no second barrier. The epoch and the address are read ahead; nobody but
# the last to arrive changes the epoch. Failures ride in the upper half of the counter, so that the last one knows of
# them for free.
_ARRIVE_ONE = f"""{{
    .reg .pred p; .reg .u32 t, e, lo, hi; .reg .u64 a, o, one;
    mov.u32 t, %tid.x; setp.ne.u32 p, t, 0; @p bra DONE;
    ld.global.u32 e, [$1 + {4 * c.EPOCH}]; ld.global.u64 a, [$4];
    add.u32 e, e, 1; xor.b32 hi, $3, 1; mov.b64 one, {{1, 0}}; mov.b64 o, {{0, hi}}; add.u64 one, one, o;
    atom.acq_rel.gpu.global.add.u64 o, [$1], one; add.u64 o, o, one; mov.b64 {{lo, hi}}, o;
    setp.ne.u32 p, lo, $2; @p bra DONE;
    st.global.u32 [$1 + {4 * c.EPOCH}], e; st.global.u64 [$1], 0;
    setp.ne.u32 p, hi, 0; @p bra DONE; setp.eq.u64 p, a, 0; @p bra DONE;
    st.release.sys.global.u32 [a], e;
DONE: mov.u32 $0, 0; }}"""
ARRIVE_ONE_ASM = tl.constexpr(_ARRIVE_ONE)

# The same, but the last one raises a flag at each near rank: a lane each, addresses read ahead, one fence for all. $4
# the table of addresses, $5 the length of it.
_ARRIVE_ALL = f"""{{
    .reg .pred p, q; .reg .u32 t, e, lo, hi, i; .reg .u64 a, o, one;
    mov.u32 t, %tid.x; setp.ge.u32 p, t, 32; @p bra DONE;
    ld.global.u32 e, [$1 + {4 * c.EPOCH}]; add.u32 e, e, 1;
    mov.u64 a, 0; setp.lt.u32 q, t, $5; mad.wide.u32 o, t, 8, $4; @q ld.global.u64 a, [o];
    xor.b32 hi, $3, 1; mov.b64 one, {{1, 0}}; mov.b64 o, {{0, hi}}; add.u64 one, one, o;
    setp.eq.u32 p, t, 0; mov.u64 o, 0;
    @p atom.acq_rel.gpu.global.add.u64 o, [$1], one; add.u64 o, o, one; mov.b64 {{lo, hi}}, o;
    shfl.sync.idx.b32 lo, lo, 0, 31, 0xffffffff; shfl.sync.idx.b32 hi, hi, 0, 31, 0xffffffff;
    setp.ne.u32 p, lo, $2; @p bra DONE;
    setp.eq.u32 p, t, 0; @p st.global.u32 [$1 + {4 * c.EPOCH}], e; @p st.global.u64 [$1], 0;
    setp.ne.u32 p, hi, 0; @p bra DONE;
    bar.warp.sync 0xffffffff; fence.acq_rel.sys;
    mov.u32 i, t;
RAISE: setp.eq.u64 q, a, 0; @!q st.relaxed.sys.global.u32 [a], e;
    add.u32 i, i, 32; setp.ge.u32 p, i, $5; @p bra DONE;
    mad.wide.u32 o, i, 8, $4; ld.global.u64 a, [o]; bra RAISE;
DONE: mov.u32 $0, 0; }}"""
ARRIVE_ALL_ASM = tl.constexpr(_ARRIVE_ALL)


@triton.jit
def load_acquire(p):
    """*p with acquire semantics at system scope, where there is no inline assembly."""
    if HAS_LOAD:
        return tl.atomic_load(p, sem="acquire", scope="sys")
    else:
        return tl.atomic_add(p, 0, sem="acquire", scope="sys")


@triton.jit
def _pointer(control, word):
    """The u32 pointer that lies in the control block at `word`, as an integer and as a pointer."""
    a = tl.load(control.to(tl.pointer_type(tl.int64)) + word // 2)
    return a, a.to(tl.pointer_type(tl.int32), bitcast=True)


@triton.jit
def _give_up(control, polls):
    """0, or why a wait ends: without a clock, a poll counts as a microsecond."""
    why = tl.load(control + STATUS)
    if why == 0:
        address, word = _pointer(control, ABORT)
        if address != 0:
            if tl.atomic_add(word, 0, sem="relaxed", scope="sys") != 0:
                why = ABORTED + 0 * why
        if (why == 0) & (polls >= (tl.load(control + TIMEOUT).to(tl.int64) & 0xFFFFFFFF)):
            why = TIMED_OUT + 0 * why
        if why != 0:
            tl.atomic_cas(control + STATUS, 0, why, sem="relaxed", scope="gpu")
    return why


@triton.jit
def _wait_portable(flags, n, want, control):
    ok = want * 0 + 1
    polls = want.to(tl.int64) * 0
    i = 0
    while (i < n) & (ok == 1):
        if load_acquire(flags + i) - want >= 0:
            i += 1
        else:
            if _give_up(control, polls) != 0:
                ok = ok * 0
            polls += 1
    return ok


@triton.jit
def wait(flags, n, signal: tl.constexpr, control):
    """Wait until each of `n` consecutive flags has reached the epoch of `signal`. 1, or 0: time is up, or aborted.

    In a kernel that itself gives `signal`, that is the number of rounds before; in one that follows in the same stream,
    the present round. Ends with a barrier: no thread reads early.
    """
    epoch = control + signal * LINE + EPOCH
    if ASM:
        return tl.inline_asm_elementwise(
            WAIT_ASM, "=r,l,r,l,l", [flags, n, epoch, control], dtype=tl.int32, is_pure=False, pack=1
        )
    else:
        return _wait_portable(flags, n, tl.load(epoch), control)


@triton.jit
def _arrive_portable(line, n, ok):
    """(was this the last of n, did none fail, the new epoch)."""
    counter = line.to(tl.pointer_type(tl.int64))
    add = 1 + (1 - (tl.full([], 0, tl.int64) + ok)) * 4294967296
    tl.debug_barrier()
    now = tl.atomic_add(counter, add, sem="acq_rel", scope="sys") + add
    last = (now & 0xFFFFFFFF) == n
    epoch = tl.load(line + EPOCH) + 1
    if last:
        tl.store(line + EPOCH, epoch)
        tl.store(counter, now * 0)
    return last, now < 4294967296, epoch


@triton.jit
def arrive(signal: tl.constexpr, flag: tl.constexpr, n, ok, control):
    """Count this program in; the last of `n` ends the signal's round and raises proxy flag `flag`, unless one
    failed."""
    line = control + signal * LINE
    where = control + FLAG + 2 * flag
    if ASM:
        tl.debug_barrier()
        tl.inline_asm_elementwise(
            ARRIVE_ONE_ASM, "=r,l,r,r,l", [line, n, ok, where], dtype=tl.int32, is_pure=False, pack=1
        )
    else:
        last, fine, epoch = _arrive_portable(line, n, ok)
        if last & fine:
            address, word = _pointer(control, FLAG + 2 * flag)
            if address != 0:
                tl.atomic_xchg(word, epoch, sem="release", scope="sys")


@triton.jit
def arrive_near(signal: tl.constexpr, combine: tl.constexpr, n, ok, control, NEARS: tl.constexpr):
    """Count this program in; the last of `n` ends the signal's round and raises a flag at each near rank."""
    line = control + signal * LINE
    table = control + NEAR_FLAGS + 2 * NEARS * combine
    if ASM:
        tl.debug_barrier()
        tl.inline_asm_elementwise(
            ARRIVE_ALL_ASM, "=r,l,r,r,l,r", [line, n, ok, table, NEARS], dtype=tl.int32, is_pure=False, pack=1
        )
    else:
        last, fine, epoch = _arrive_portable(line, n, ok)
        if last & fine:
            for i in range(NEARS):
                address, word = _pointer(control, NEAR_FLAGS + 2 * NEARS * combine + 2 * i)
                if address != 0:
                    tl.atomic_xchg(word, epoch, sem="release", scope="sys")


@triton.jit
def pass_on(host_flag, flags, signal: tl.constexpr, control):
    """For ONE program of a grid: wait for a flag in host memory, then raise ``flags[0]`` in device memory."""
    ok = wait(host_flag, 1, signal, control)
    if ok == 1:
        epoch = tl.load(control + signal * LINE + EPOCH)
        tl.atomic_xchg(flags, epoch, sem="release", scope="sys")


@triton.jit
def add_release(word, n):
    """*word += n for a 64-bit word that only this GPU writes; earlier stores are visible to who sees it."""
    tl.debug_barrier()
    if ASM:
        tl.inline_asm_elementwise(
            """{ .reg .pred p; .reg .u32 t; mov.u32 t, %tid.x; setp.ne.u32 p, t, 0;
            @!p red.release.sys.global.add.u64 [$1], $2; mov.u32 $0, 0; }""",
            "=r,l,l",
            [word, n],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.atomic_add(word, n, sem="release", scope="sys")


@triton.jit
def store_release(word, value):
    """*word = value (64 bits); earlier stores are visible to who sees it."""
    tl.debug_barrier()
    if ASM:
        tl.inline_asm_elementwise(
            """{ .reg .pred p; .reg .u32 t; mov.u32 t, %tid.x; setp.ne.u32 p, t, 0;
            @!p st.release.sys.global.u64 [$1], $2; mov.u32 $0, 0; }""",
            "=r,l,l",
            [word, value],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.atomic_xchg(word, value, sem="release", scope="sys")


@triton.jit
def increment(word):
    """One program: *word += 1."""
    add_release(word, tl.full([], 1, tl.int64))


@triton.jit
def increment_copy(word, shadow):
    """One program: *word = *shadow += 1."""
    n = tl.load(shadow) + 1
    tl.store(shadow, n)
    store_release(word, n)
