# Litmus runs for the three fences, and for the two ways a wake-up can be taken from whom it was meant for.

cdef bint asleep(group_t* g, uint64_t* word, uint64_t below) noexcept nogil:
    """With the lock in hand nobody can serve `word`: is the worker asleep on the bell although it is behind?"""
    cdef bint yes
    if not trylock(g):
        return False
    yes = ld_acq64(word) < below and bell_wake(g.bell, WORKER) == 1
    release(g)
    return yes

cdef void* publish_job(void* arg) noexcept nogil:
    """Publishes something the moment the worker may be falling asleep, rings, and waits until it is served."""
    cdef job_t* j = <job_t*>arg
    cdef group_t* g = j.g
    cdef uint64_t* word = &j.s.done if j.kind else &j.lane.taken
    cdef uint64_t k, i
    cdef req_t* r
    if j.core >= 0:
        pin_to(j.core)
    for k in range(1, j.rounds + 1):
        dither(j)
        if j.kind:
            r = ask(j, OP_NOP)
            submit(g, r)
            req_drop(g.pool, r)
        else:
            st_rel64(&j.lane.posted, k)
            kick(g)
        i = 0
        while ld_acq64(word) < k:
            i += 1
            cpu_pause()
            if i % LOOK == 0:
                if asleep(g, word, k):
                    j.lost += 1
                sched_yield()
                if over(j):
                    return NULL
        j.ran = k
        if j.lost >= j.enough:
            break
    return NULL

def published(str what, uint64_t rounds, list cores, double seconds=20, uint64_t seed=1, uint64_t window=400,
              uint64_t enough=<uint64_t>-1):
    """A worker that sleeps whenever it can. what: "arrival", by a plain store as fabrics do, or "request", by the
    queue.
    """
    rig = Rig(core=cores[1]).start()
    try:
        out = run_jobs(rig, [<uint64_t><void*>publish_job], cores[:1], rounds, seconds, seed, window,
                       NULL, NULL, what == "request", enough)
        rig.stop()
        return dict(out, sleeps=(<Rig>rig).g.sleeps, kicks=(<Rig>rig).g.kicks)
    finally:
        rig.stop()

cdef void* park_job(void* arg) noexcept nogil:
    """Holds the lock a moment and gives it back: nobody may be left parked."""
    cdef job_t* j = <job_t*>arg
    cdef group_t* g = j.g
    cdef uint64_t k
    cdef uint32_t i
    if j.core >= 0:
        pin_to(j.core)
    for k in range(1, j.rounds + 1):
        while not trylock(g):
            cpu_pause()
        dither(j)
        release(g)
        for i in range(64):
            cpu_pause()
        # No other thread takes the lock: who parks after the release finds it free and does not sleep.
        if futex_wake(&g.park, 1) == 1:
            j.lost += 1
            if j.lost >= j.enough:
                break
        j.ran = k
        if k % LOOK == 0 and over(j):
            return NULL
    return NULL

def parked(uint64_t rounds, list cores, double seconds=20, uint64_t seed=1, uint64_t window=200,
           uint64_t enough=<uint64_t>-1):
    """Release of the lock against a worker that fails the try-lock and parks."""
    rig = Rig(caller=True, core=cores[1])
    (<Rig>rig).lane.restless = 1
    rig.start()
    try:
        return run_jobs(rig, [<uint64_t><void*>park_job], cores[:1], rounds, seconds, seed, window, NULL, NULL, 0,
                        enough)
    finally:
        rig.stop()

cdef void* relook_job(void* arg) noexcept nogil:
    """Two submitters at once beside a bell that is set: the lock's holder takes what the other queued, or the bell is
    rung.
    """
    cdef job_t* j = <job_t*>arg
    cdef group_t* g = j.g
    cdef uint64_t k
    cdef req_t* r
    if j.core >= 0:
        pin_to(j.core)
    for k in range(1, j.rounds + 1):
        r = ask(j, OP_NOP)
        if j.id == 0:
            xchg32(g.bell, WORKER)      # as a worker asleep leaves it
        if not meet(j, 2 * k - 1):
            return NULL
        dither(j)
        submit(g, r)
        req_drop(g.pool, r)
        if not meet(j, 2 * k):
            return NULL
        if j.id == 0:                   # the other one waits at the next barrier
            if ld_acq64(&j.s.done) != k * j.threads:
                j.aside += 1            # for the worker
                j.lost += ld_acq32(g.bell) == WORKER
                lock_now(g)
                progress(g)
                release(g)
            if j.lost >= j.enough:
                st_rel64(&j.s.quit, 1)
                return NULL
        j.ran = k
    return NULL

def taken(uint64_t rounds, list cores, double seconds=20, uint64_t seed=1, uint64_t window=60,
          uint64_t enough=<uint64_t>-1):
    """Caller style: `lost` counts requests in the queue that nobody took and nobody was told of, `aside` those left
    to the worker.
    """
    rig = Rig(caller=True)
    return run_jobs(rig, [<uint64_t><void*>relook_job] * 2, cores[:2], rounds, seconds, seed, window, NULL, NULL, 0,
                    enough)


# ---------------------------------------------------------------- taken from whom it was meant for

cdef void* sleeper_job(void* arg) noexcept nogil:
    """Waits for one arrival after the other, driving, and asleep most of the time."""
    cdef job_t* j = <job_t*>arg
    cdef uint64_t k
    cdef req_t* r
    if j.g.nfds:
        watch_poll(&j.s.rung, &j.lane.taken, &j.lost)
    for k in range(1, j.rounds + 1):
        r = ask(j, OP_EXPECT)
        r.imm, r.n = IMM, 1
        submit(j.g, r)
        while not wait_slice(j.g, r, 50000000):
            if over(j):
                return NULL
        req_drop(j.g.pool, r)
        st_rel64(&j.s.ack, k)
        while ld_acq64(&j.s.sent) < k:
            sched_yield()
            if over(j):
                return NULL
    return NULL

cdef void* waker_job(void* arg) noexcept nogil:
    """While a caller sleeps as the driver something arrives for it, just after the worker was woken, perhaps."""
    cdef job_t* j = <job_t*>arg
    cdef group_t* g = j.g
    cdef uint64_t k, i
    for k in range(1, j.rounds + 1):
        while ld_acq32(g.bell) != CALLER:
            sched_yield()
            if over(j):
                return NULL
        for i in range(200):
            cpu_pause()
        if j.kind:
            wake_worker(g)
        st_rel64(&j.lane.posted, k)
        kick(g)
        st_rel64(&j.s.rung, k)
        if g.nfds == 0 and bell_wake(g.bell, CALLER) == 1:      # it ends with this arrival: no later sleep of it
            j.lost += 1
        while ld_acq64(&j.s.ack) < k:
            sched_yield()
            if over(j):
                return NULL
        st_rel64(&j.s.sent, k)
        j.ran = k
    return NULL

def woken_beside(uint64_t rounds, double seconds=20, uint64_t seed=1, bint descriptors=False, bint waking=True):
    """A caller who sleeps as the driver beside a sleeping worker: `lost` counts arrivals that it slept through.

    `waking`: somebody who has let go of the lock calls wake_worker() at that moment.
    """
    rig = Rig(caller=True)
    if descriptors:
        rig.sleep_on_descriptors()
    rig.start()
    try:
        return run_jobs(rig, [<uint64_t><void*>waker_job, <uint64_t><void*>sleeper_job], [], rounds, seconds, seed, 0,
                        NULL, NULL, waking)
    finally:
        rig.stop()

cdef void* hand_over_job(void* arg) noexcept nogil:
    """Two submit at once, one of them a write that finds no room: the sleeping worker must hear of it."""
    cdef job_t* j = <job_t*>arg
    cdef group_t* g = j.g
    cdef uint64_t k, slept = 0
    cdef req_t* r
    if j.core >= 0:
        pin_to(j.core)
    for k in range(1, j.rounds + 1):
        if j.id == 0:
            while ld_acq32(g.bell) != WORKER or ld_acq32(&g.lock):
                sched_yield()
                if over(j):
                    return NULL
            for slept in range(200):
                cpu_pause()
            slept = ld_acq64(&g.sleeps)
            st_rel32(&j.lane.full, 1)
        r = ask(j, OP_NOP if j.id else OP_WRITE)
        if not meet(j, 2 * k - 1):
            return NULL
        dither(j)
        submit(g, r)
        req_drop(g.pool, r)
        if not meet(j, 2 * k):
            return NULL
        if j.id == 0:
            lock_now(g)                 # the worker cannot go to sleep anew
            if g.backlog != NULL and bell_wake(g.bell, WORKER) == 1 and g.sleeps == slept:
                j.lost += 1             # it has slept since before: without end
            st_rel32(&j.lane.full, 0)
            while progress(g):
                pass
            unlock(g)
            if ld_acq64(&j.s.done) != 2 * k:
                j.aside += 1
            if j.lost >= j.enough:
                st_rel64(&j.s.quit, 1)
                return NULL
        j.ran = k
    return NULL

def handed_over(uint64_t rounds, list cores, double seconds=20, uint64_t seed=1, uint64_t window=60,
                uint64_t enough=<uint64_t>-1):
    """Caller style: a request that stays in the backlog and its timer are the worker's, whoever took it from the
    queue.
    """
    rig = Rig(caller=True).start()
    try:
        return run_jobs(rig, [<uint64_t><void*>hand_over_job] * 2, cores[:2], rounds, seconds, seed, window, NULL,
                        NULL, 0, enough)
    finally:
        rig.stop()
