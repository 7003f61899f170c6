"""fabricx._ref: the bare things that benchmarks compare the engine with.

Loops in C over shared mappings, without an engine: a flag handed to and fro, memcpy, page copies, a ring, calls of a native
function. Addresses are plain integers of memory that the caller keeps alive; nothing is checked.
"""
from libc.stdint cimport int64_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport free
from libc.string cimport memcpy
from atom cimport *

from .errors import TransferTimeout

cdef enum:
    LOOK = 1 << 20              # turns of a spinning loop between two looks at the clock
    RING = 1024                 # slots of the ring; a power of two

cdef uint64_t GIVE_UP = 30000000000     # ns that a spinning loop waits for its peer

ctypedef void (*native_t)(uint64_t, int64_t) noexcept nogil


cdef inline int spin_until(uint32_t* word, uint32_t value, bint pause) noexcept nogil:
    """Waits for `word` to be `value`; 0 when the peer does not come."""
    cdef uint64_t turns = 0, end = 0
    while ld_acq32(word) != value:
        if pause:
            cpu_pause()
        turns += 1
        if (turns & (LOOK - 1)) == 0:
            if end == 0:
                end = now_ns() + GIVE_UP
            elif now_ns() > end:
                return 0
    return 1


def tsc_hz(double seconds=0.02):
    """Ticks of the cycle counter a second, measured against CLOCK_MONOTONIC for `seconds`."""
    cdef uint64_t t0, t1, c0, c1, ns = <uint64_t>(seconds * 1e9)
    with nogil:
        t0 = now_ns()
        c0 = tsc()
        while now_ns() - t0 < ns:
            cpu_pause()
        t1 = now_ns()
        c1 = tsc()
    return (c1 - c0) * 1e9 / (t1 - t0)


# ---------------------------------------------------------------- flags

def flag_pingpong(uint64_t mine, uint64_t theirs, int n, bint first, bint pause=False):
    """A 32-bit flag to and fro between two processes, `n` times.

    Parameters
    ----------
    mine, theirs : addresses of two words on different cache lines of a shared mapping; the other side has them the other way
        round. Both start equal.
    n : round trips.
    first : whether this side begins.
    pause : a pause instruction in each turn of the spinning loop.

    Returns
    -------
    float
        ns a round trip.

    Raises
    ------
    TransferTimeout
        when the other side does not answer for 30 s.
    """
    cdef uint32_t* a = <uint32_t*><uintptr_t>mine
    cdef uint32_t* b = <uint32_t*><uintptr_t>theirs
    cdef uint32_t base = ld_acq32(a if first else b), i
    cdef uint64_t t0, t1
    cdef int ok = 1
    with nogil:
        t0 = now_ns()
        for i in range(1, <uint32_t>n + 1):
            if first:
                st_rel32(b, base + i)
                ok = spin_until(a, base + i, pause)
            else:
                ok = spin_until(a, base + i, pause)
                st_rel32(b, base + i)
            if not ok:
                break
        t1 = now_ns()
    if not ok:
        raise TransferTimeout(f"the other side did not answer at round trip {i} of {n}")
    return (t1 - t0) / <double>n


def flag_set(uint64_t addr, uint32_t value):
    """Sets a flag with release."""
    st_rel32(<uint32_t*><uintptr_t>addr, value)


def flag_wait(uint64_t addr, uint32_t value):
    """Spins until a flag has `value`, with acquire. TransferTimeout after 30 s."""
    cdef int ok
    with nogil:
        ok = spin_until(<uint32_t*><uintptr_t>addr, value, True)
    if not ok:
        raise TransferTimeout(f"the flag at {addr:#x} did not become {value}")


# ---------------------------------------------------------------- copies

def copy_slots(uint64_t dst, uint64_t src, uint64_t n, int slots, int count, bint streaming=False):
    """`count` copies of `n` bytes, slot after slot of `slots`, by memcpy (or non-temporal stores): GB/s."""
    cdef int i
    cdef uint64_t t0, t1, at
    with nogil:
        t0 = now_ns()
        for i in range(count):
            at = <uint64_t>(i % slots) * n
            if streaming:
                copy_nt(<void*><uintptr_t>(dst + at), <void*><uintptr_t>(src + at), n)
            else:
                memcpy(<void*><uintptr_t>(dst + at), <void*><uintptr_t>(src + at), n)
        t1 = now_ns()
    return <double>n * count / (t1 - t0)


def copy_then_flag(uint64_t dst, uint64_t src, uint64_t n, uint64_t flag, uint32_t value):
    """One memcpy, then a flag with release: the least that a write with immediate is."""
    with nogil:
        memcpy(<void*><uintptr_t>dst, <void*><uintptr_t>src, n)
        st_rel32(<uint32_t*><uintptr_t>flag, value)


def read_all(uint64_t addr, uint64_t n):
    """Reads `n` bytes (a multiple of 8) and returns their sum as 64-bit words: a receiver's first use of its data."""
    cdef const uint64_t* p = <const uint64_t*><uintptr_t>addr
    cdef uint64_t s = 0, i
    with nogil:
        for i in range(n // 8):
            s += p[i]
    return s


def copy_pages(uint64_t dst, uint64_t src, const uint32_t[::1] si, const uint32_t[::1] di, uint64_t page):
    """Copies page si[i] of `src` to page di[i] of `dst` for all i: ns a page. The floor of a paged write."""
    cdef uint64_t t0, t1, i, n = si.shape[0]
    if <uint64_t>di.shape[0] != n or n == 0:
        raise ValueError(f"{n} source pages and {di.shape[0]} target pages")
    with nogil:
        t0 = now_ns()
        for i in range(n):
            memcpy(<void*><uintptr_t>(dst + di[i] * page), <void*><uintptr_t>(src + si[i] * page), page)
        t1 = now_ns()
    return (t1 - t0) / <double>n


# ---------------------------------------------------------------- calls and rings

def native_calls(uint64_t address, uint64_t arg, int n):
    """Calls C ``void f(uint64_t arg, int64_t status)`` n times without the GIL: ns a call."""
    cdef native_t f = <native_t><uintptr_t>address
    cdef uint64_t t0, t1
    cdef int i
    with nogil:
        t0 = now_ns()
        for i in range(n):
            f(arg, 0)
        t1 = now_ns()
    return (t1 - t0) / <double>n


cdef struct cell_t:             # a command in a ring, of one cache line
    uint64_t seq
    uint64_t word[7]

def ring_push_pop(int n):
    """A command of 64 bytes through a multi-producer ring with a sequence number in each slot, push and pop by one thread: ns a command."""
    cdef cell_t* ring = <cell_t*>alloc_lines(RING * sizeof(cell_t))
    cdef cell_t* c
    cdef uint64_t tail = 0, head, t0, t1, got = 0
    cdef int i, k
    if ring == NULL:
        raise MemoryError
    with nogil:
        t0 = now_ns()
        for i in range(n):
            head = fadd64(&tail, 1)
            c = &ring[head & (RING - 1)]
            for k in range(7):
                c.word[k] = head + k
            st_rel64(&c.seq, head + 1)
            if ld_acq64(&c.seq) == head + 1:
                got += c.word[0]
        t1 = now_ns()
    free(ring)
    if got != <uint64_t>n * (<uint64_t>n - 1) // 2:
        raise AssertionError("the ring lost a command")
    return (t1 - t0) / <double>n
