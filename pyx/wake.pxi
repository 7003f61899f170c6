# Bells and the progress lock, part of worker.pyx. docs/design.md, "The worker", says which fence stands for what.

cdef inline void kick(group_t* g) noexcept nogil:
    """Wakes whoever sleeps as this group's driver, after something was published."""
    cdef uint32_t who
    cdef uint64_t one = 1
    if g.nfds == 0:
        g.kicks += ring_bell(g.bell)
        return
    full_fence()
    if ld_rlx32(g.bell):
        who = xchg32(g.bell, 0)
        if who:
            c_write(g.cfd if who == CALLER else g.efd, &one, 8)

cdef inline void wake_worker(group_t* g) noexcept nogil:
    """Wakes the worker whatever the bell says."""
    cdef uint64_t one = 1
    if g.nfds == 0:
        if xchg32(g.bell, 0) == CALLER:
            bell_wake(g.bell, CALLER)   # its bell is gone: it must look for itself
        bell_wake(g.bell, WORKER)
    else:
        if xchg32(g.bell, 0) == CALLER:
            c_write(g.cfd, &one, 8)
        c_write(g.efd, &one, 8)
    if xchg32(&g.park, 0):
        futex_wake(&g.park, 1)

cdef inline bint trylock(group_t* g) noexcept nogil:
    return ld_rlx32(&g.lock) == 0 and xchg32(&g.lock, 1) == 0

cdef inline void release(group_t* g) noexcept nogil:
    """Gives the lock back and wakes a worker that failed to get it."""
    st_rel32(&g.lock, 0)
    fx_unlock_fence()
    if ld_rlx32(&g.park) == PARK_WAKE and xchg32(&g.park, 0):
        futex_wake(&g.park, 1)

cdef inline void unlock(group_t* g) noexcept nogil:
    """Gives the lock back, then looks at the queue again: a submitter that failed the try-lock relies on it."""
    release(g)
    while mpsc_some(&g.q) and trylock(g):
        if progress(g) == 0:
            release(g)                  # a submitter is between exchange and link: it looks for itself, or rings
            return
        release(g)

cdef inline void lock_now(group_t* g) noexcept nogil:
    """Takes the lock for something short. Drivers give way while `want` is set."""
    cdef uint32_t i = 0
    fadd32(&g.want, 1)
    while not trylock(g):
        i += 1
        if i > 64:
            if (i & 63) == 0:
                kick(g)             # the driver may sleep with the lock in its hand
            sched_yield()
        else:
            cpu_pause()
    fadd32(&g.want, <uint32_t>-1)
