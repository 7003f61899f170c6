# Properties of the queues and the pool, of the end of a request, and of everything together under a schedule.

cdef struct item_t:
    qnode_t q               # first
    uint32_t who
    uint64_t seq

cdef struct queue_t:
    mpsc_t q
    uint64_t seen[16]       # next number expected of each producer
    uint64_t wrong

cdef void* produce_job(void* arg) noexcept nogil:
    cdef job_t* j = <job_t*>arg
    cdef queue_t* o = <queue_t*>j.extra
    cdef item_t* items = <item_t*>alloc_lines(j.rounds * sizeof(item_t))
    cdef uint64_t k
    for k in range(j.rounds):
        items[k].who = j.id - 1
        items[k].seq = k
        mpsc_push(&o.q, &items[k].q)
        if draw(j) & 255 == 0:
            sched_yield()
    meet(j, 1)                          # until nothing is in use any more
    free(items)
    return NULL

cdef void* consume_job(void* arg) noexcept nogil:
    cdef job_t* j = <job_t*>arg
    cdef queue_t* o = <queue_t*>j.extra
    cdef item_t* n
    cdef uint64_t total = j.rounds * (j.threads - 1), idle = 0
    while j.ran < total:
        n = <item_t*>mpsc_pop(&o.q)
        if n == NULL:
            idle += 1
            if idle % 64 == 0:
                sched_yield()
                if over(j):
                    break
            continue
        if n.who >= j.threads - 1 or n.seq != o.seen[n.who]:
            o.wrong += 1
        else:
            o.seen[n.who] += 1
        j.ran += 1
    if mpsc_pop(&o.q) != NULL or mpsc_some(&o.q):
        o.wrong += 1
    meet(j, 1)
    return NULL

def queue(int producers, uint64_t rounds, double seconds=20, uint64_t seed=1):
    """mpsc_t: what `producers` push is popped once each, each one's in its order; `wrong` counts what is not."""
    cdef queue_t* o = <queue_t*>alloc_lines(sizeof(queue_t))
    try:
        mpsc_init(&o.q)
        out = run_jobs(None, [<uint64_t><void*>consume_job] + [<uint64_t><void*>produce_job] * producers, [], rounds,
                       seconds, seed, 0, o)
        return dict(out, wrong=o.wrong, seen=[o.seen[i] for i in range(producers)])
    finally:
        free(o)

cdef struct news_t:
    cnode_t node            # first
    uint32_t who
    uint64_t seq

cdef struct stack_t:
    cbq_t q
    uint64_t seen[16]
    uint64_t wrong, batches
    uint64_t ack            # pushes of a lone producer that it saw taken

cdef void* push_job(void* arg) noexcept nogil:
    cdef job_t* j = <job_t*>arg
    cdef stack_t* o = <stack_t*>j.extra
    cdef news_t* items = <news_t*>alloc_lines(j.rounds * sizeof(news_t))
    cdef uint64_t k, i
    for k in range(j.rounds):
        items[k].who = j.id - 1
        items[k].seq = k
        cbq_push(&o.q, &items[k].node)
        if j.threads == 2:              # alone: let the consumer sleep each time
            i = 0
            while ld_acq64(&o.seen[0]) <= k:
                i += 1
                cpu_pause()
                if i % LOOK == 0:
                    if bell_wake(&o.q.bell, 1) == 1:    # rung for, and asleep; it sleeps anew only after `ack`
                        j.lost += 1
                    sched_yield()
                    if over(j):
                        break
            st_rel64(&o.ack, k + 1)
            dither(j)
        elif draw(j) & 255 == 0:
            sched_yield()
    meet(j, 1)
    free(items)
    return NULL

cdef void* take_job(void* arg) noexcept nogil:
    cdef job_t* j = <job_t*>arg
    cdef stack_t* o = <stack_t*>j.extra
    cdef cnode_t* c
    cdef cnode_t* nxt
    cdef news_t* n
    cdef uint64_t total = j.rounds * (j.threads - 1)
    while j.ran < total:
        c = cbq_wait(&o.q, 200000000)
        if c == NULL and over(j):
            break
        o.batches += c != NULL
        while c != NULL:
            nxt = c.next
            n = <news_t*>c
            if n.who >= j.threads - 1 or n.seq != o.seen[n.who]:
                o.wrong += 1
            else:
                st_rel64(&o.seen[n.who], n.seq + 1)
            j.ran += 1
            c = nxt
            if j.threads == 2:
                while ld_acq64(&o.ack) < j.ran:
                    cpu_pause()
                    if over(j):
                        break
    if cbq_take(&o.q) != NULL:
        o.wrong += 1
    meet(j, 1)
    return NULL

def stack(int producers, uint64_t rounds, double seconds=20, uint64_t seed=1):
    """cbq_t: a batch is oldest first, over all batches each producer's pushes are in its order, and none sleeps on a
    full one.
    """
    cdef stack_t* o = <stack_t*>alloc_lines(sizeof(stack_t))
    try:
        out = run_jobs(None, [<uint64_t><void*>take_job] + [<uint64_t><void*>push_job] * producers, [], rounds, seconds,
                       seed, 2000, o)
        return dict(out, wrong=o.wrong, batches=o.batches, seen=[o.seen[i] for i in range(producers)])
    finally:
        free(o)

def one_batch(int n):
    """The numbers of n pushes in the order that one cbq_take gives."""
    cdef stack_t* o = <stack_t*>alloc_lines(sizeof(stack_t))
    cdef news_t* items = <news_t*>alloc_lines(n * sizeof(news_t))
    cdef cnode_t* c
    cdef int i
    try:
        for i in range(n):
            items[i].seq = i
            cbq_push(&o.q, &items[i].node)
        c, out = cbq_take(&o.q), []
        while c != NULL:
            out.append((<news_t*>c).seq)
            c = c.next
        return out
    finally:
        free(items)
        free(o)


# ---------------------------------------------------------------- the pool

cdef void* pool_job(void* arg) noexcept nogil:
    """Takes and gives back requests; `native_arg` is not touched by the pool and says who has one."""
    cdef job_t* j = <job_t*>arg
    cdef pool_t* p = <pool_t*>j.extra
    cdef req_t* held[32]
    cdef uint64_t k
    cdef uint32_t n = 0, i
    for k in range(j.rounds):
        if n < 32 and (n == 0 or draw(j) & 1):
            held[n] = req_new(p, OP_NOP)
            if held[n].refs != 2 or held[n].state != PENDING or xchg64(&held[n].native_arg, j.id + 1):
                j.lost += 1
            n += 1
        else:
            i = <uint32_t>(draw(j) % n)
            if xchg64(&held[i].native_arg, 0) != j.id + 1:
                j.lost += 1
            req_drop(p, held[i])
            req_drop(p, held[i])
            n -= 1
            held[i] = held[n]
        if k % LOOK == 0 and over(j):
            break
        j.ran = k + 1
    while n:
        n -= 1
        xchg64(&held[n].native_arg, 0)
        req_drop(p, held[n])
        req_drop(p, held[n])
    return NULL

def pool(int threads, uint64_t rounds, double seconds=20, uint64_t seed=1):
    """req_new and req_drop of several threads: `lost` counts requests that two had at a time."""
    cdef pool_t* p = <pool_t*>alloc_lines(sizeof(pool_t))
    cdef req_t* r
    cdef uint64_t kept = 0
    try:
        out = run_jobs(None, [<uint64_t><void*>pool_job] * threads, [], rounds, seconds, seed, 0, p)
        n = p.made
        for mine in (True, False):
            r = p.head if mine else p.returned
            while r != NULL:
                kept += 1
                r = <req_t*>r.q.next
        pool_free(p)
        return dict(out, kept=kept, counted=n)
    finally:
        free(p)


# ---------------------------------------------------------------- the end of a request

cdef struct ending_t:
    req_t* r

cdef void* end_job(void* arg) noexcept nogil:
    """Ends a request while another thread falls asleep on it."""
    cdef job_t* j = <job_t*>arg
    cdef ending_t* o = <ending_t*>j.extra
    cdef group_t* g = j.g
    cdef uint64_t k
    cdef req_t* r
    if j.core >= 0:
        pin_to(j.core)
    for k in range(1, j.rounds + 1):
        r = ask(j, OP_EXPECT)
        fadd32(&r.refs, 1)              # this job's; the others are the worker's and the waiter's
        st_relp(<void**>&o.r, r)
        if not meet(j, 2 * k - 1):
            return NULL
        dither(j)
        lock_now(g)
        finish(g, r, DONE)
        unlock(g)
        if futex_wake(&r.state, 1 << 30) > 0:       # the end is out and told: nobody sleeps on it
            j.lost += 1
        if not meet(j, 2 * k):
            return NULL
        req_drop(g.pool, r)
        j.ran = k
    return NULL

cdef void* wait_job(void* arg) noexcept nogil:
    cdef job_t* j = <job_t*>arg
    cdef ending_t* o = <ending_t*>j.extra
    cdef uint64_t k
    cdef req_t* r
    if j.core >= 0:
        pin_to(j.core)
    for k in range(1, j.rounds + 1):
        if not meet(j, 2 * k - 1):
            return NULL
        r = <req_t*>ld_acqp(<void**>&o.r)
        dither(j)
        while not wait_slice(j.g, r, 50000000):
            if over(j):
                return NULL
        req_drop(j.g.pool, r)
        if not meet(j, 2 * k):
            return NULL
    return NULL

def ended(uint64_t rounds, list cores, double seconds=20, uint64_t seed=1, uint64_t window=4000):
    """tell() against a waiter that falls asleep: `lost` counts waiters asleep after the end was told."""
    cdef ending_t* o = <ending_t*>alloc_lines(sizeof(ending_t))
    rig = Rig()
    try:
        return run_jobs(rig, [<uint64_t><void*>end_job, <uint64_t><void*>wait_job], cores, rounds, seconds, seed,
                        window, o)
    finally:
        free(o)


# ---------------------------------------------------------------- an event loop's queue

cdef struct loop_t:
    loopq_t q
    uint64_t got

cdef void* tell_job(void* arg) noexcept nogil:
    """Ends requests of a group of its own, all told to one loop."""
    cdef job_t* j = <job_t*>arg
    cdef loop_t* o = <loop_t*>j.extra
    cdef group_t* g = <group_t*>alloc_lines(sizeof(group_t))
    cdef uint64_t k
    cdef req_t* r
    g.pool, g.bell = &g.pool_, &g.own_bell
    mpsc_init(&g.q)
    for k in range(j.rounds):
        r = req_new(g.pool, OP_NOP)
        r.native_arg = <uint64_t>g.pool
        r.lq = &o.q
        finish(g, r, DONE)              # the other reference is the loop's
        if j.threads == 2:              # alone: each finds the list empty
            st_rel64(&j.s.sent, k + 1)
            while ld_acq64(&o.got) <= k:
                cpu_pause()
                if over(j):
                    break
        elif draw(j) & 63 == 0:
            sched_yield()
    meet(j, 1)
    pool_free(&g.pool_)
    free(g)
    return NULL

cdef void* loop_job(void* arg) noexcept nogil:
    """What an event loop does: sleeps on the descriptor, reads it, takes the list whole."""
    cdef job_t* j = <job_t*>arg
    cdef loop_t* o = <loop_t*>j.extra
    cdef uint64_t total = j.rounds * (j.threads - 1), v
    cdef pollfd p
    cdef req_t* r
    cdef req_t* nxt
    p.fd, p.events = o.q.efd, 1
    while o.got < total:
        if c_poll(&p, 1, 200) == 0:
            # All that was to be told by now has been, this thread is the only one to take it, and nothing announces it.
            if (ld_acq64(&j.s.gate) == j.threads - 1 or ld_acq64(&j.s.sent) > o.got) and c_poll(&p, 1, 0) == 0:
                j.lost = total - o.got
                st_rel64(&j.s.quit, 1)
                break
            if over(j):
                break
        c_read(o.q.efd, &v, 8)
        r = <req_t*>xchgp(&o.q.head, NULL)
        while r != NULL:
            nxt = r.lq_next
            if ld_acq32(&r.state) != DONE:
                j.aside += 1
            req_drop(<pool_t*>r.native_arg, r)
            st_rel64(&o.got, o.got + 1)
            r = nxt
    j.ran = o.got
    meet(j, 1)
    return NULL

def told(int groups, uint64_t rounds, double seconds=20, uint64_t seed=1):
    """Ends of several groups told to one event loop: `aside` counts those that were not ended when they came."""
    cdef loop_t* o = <loop_t*>alloc_lines(sizeof(loop_t))
    o.q.efd = c_eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)
    try:
        return run_jobs(None, [<uint64_t><void*>loop_job] + [<uint64_t><void*>tell_job] * groups, [], rounds, seconds,
                        seed, 0, o)
    finally:
        c_close(o.q.efd)
        free(o)


# ---------------------------------------------------------------- everything together

cdef void native_end(uint64_t arg, int64_t status) noexcept nogil:
    fadd64(&(<shared_t*>arg).calls, 1)

cdef void* submitter_job(void* arg) noexcept nogil:
    """Writes and empty requests with every way of being told; waits for some of them."""
    cdef job_t* j = <job_t*>arg
    cdef group_t* g = j.g
    cdef uint64_t k, x
    cdef req_t* r
    for k in range(1, j.rounds + 1):
        x = draw(j)
        r = ask(j, OP_WRITE if x & 1 else OP_NOP)
        r.native, r.native_arg = native_end, <uint64_t>j.s
        r.extra |= X_REST
        if x & 6 == 0:
            r.cb = r                    # goes through the callback queue
            fadd64(&j.s.sent, 1)
        submit(g, r)
        if x & 1:
            kick(g)                     # the completion of a queued post rings, as it does on a real fabric
        if x & 24 == 0 or k % 64 == 0:
            while not wait_slice(g, r, 50000000):
                if over(j):
                    return NULL
            if ld_acq32(&r.state) != DONE:
                j.lost += 1
        req_drop(g.pool, r)
        j.ran = k
        if k % 1024 == 0:               # room comes and goes without a bell
            st_rel32(&j.lane.full, 1)
            dither(j)
            st_rel32(&j.lane.full, 0)
    return NULL

cdef void* peer_job(void* arg) noexcept nogil:
    """Arrivals, not far ahead of what was taken."""
    cdef job_t* j = <job_t*>arg
    cdef uint64_t k
    for k in range(1, j.rounds + 1):
        dither(j)
        st_rel64(&j.lane.posted, k)
        kick(j.g)
        while ld_acq64(&j.lane.taken) + 16 < k:
            sched_yield()
            if over(j):
                return NULL
    return NULL

cdef void* waiter_job(void* arg) noexcept nogil:
    """Expects the arrivals in pieces and waits for each."""
    cdef job_t* j = <job_t*>arg
    cdef uint64_t left = j.rounds, n
    cdef req_t* r
    while left:
        n = min(left, 1 + draw(j) % 8)
        r = ask(j, OP_EXPECT)
        r.imm, r.n = IMM, n
        submit(j.g, r)
        while not wait_slice(j.g, r, 50000000):
            if over(j):
                return NULL
        req_drop(j.g.pool, r)
        left -= n
        j.aside += 1
    return NULL

cdef void* callback_job(void* arg) noexcept nogil:
    """The callback thread: ends when all the others have, and nothing is left."""
    cdef job_t* j = <job_t*>arg
    cdef cnode_t* c
    cdef cnode_t* nxt
    cdef req_t* r
    while ld_acq64(&j.s.ack) < j.threads - 1 or ld_acq64(&j.s.sent) != j.aside:
        c = cbq_wait(j.g.cbq, 50000000)
        while c != NULL:
            nxt = c.next
            r = <req_t*>c.self
            if r.cb != <void*>r or ld_acq32(&r.state) != DONE:
                j.lost += 1
            r.cb = NULL
            req_drop(j.g.pool, r)
            j.aside += 1
            c = nxt
        if over(j):
            break
    return NULL

cdef void* member_job(void* arg) noexcept nogil:
    """One of the crew, by its number."""
    cdef job_t* j = <job_t*>arg
    if j.id < 2:
        submitter_job(arg)
    elif j.id == 2:
        peer_job(arg)
    elif j.id == 3:
        waiter_job(arg)
    else:
        callback_job(arg)
        return NULL
    fadd64(&j.s.ack, 1)
    return NULL

def mixed(bint caller, uint64_t rounds, double seconds=20, uint64_t seed=1, uint32_t spin=0, uint32_t yields=0):
    """Two submitters, arrivals, one who waits for them and a callback thread; then what must be left of it: nothing."""
    cdef shared_t s
    cdef group_t* g
    cdef uint64_t end = now_ns() + <uint64_t>(seconds * 1e9), want
    cdef slot_t* slot
    rig = Rig(caller=caller, spin=spin, yields=yields).start()
    g = (<Rig>rig).g
    try:
        out = run_jobs(rig, [<uint64_t><void*>member_job] * 5, [], rounds, seconds, seed, 2000, NULL, &s)
        want = 2 * rounds + out["aside"][3]
        with nogil:
            while ld_acq64(&s.done) < want and now_ns() < end:
                sched_yield()
            lock_now(g)
            slot = table_find(&g.imm, IMM)
            unlock(g)
        rig.stop()
        return dict(out, ended=s.done, wanted=want, failed=s.failed, calls=s.calls, called=2 * rounds, news=s.sent,
                    delivered=out["aside"][4], surplus=slot.count if slot != NULL else 0, backlog=g.nbacklog,
                    timers=g.wheel.n,
                    zombies=g.zombies, queued=mpsc_some(&g.q),
                    inflight=(<Rig>rig).lmr.inflight + (<Rig>rig).rmr.inflight,
                    bytes=g.nic[0].out_bytes, sleeps=g.sleeps)
    finally:
        rig.stop()
