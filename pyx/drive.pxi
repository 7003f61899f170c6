# Completions, one turn of the loop, sleeping and driving; part of worker.pyx.

cdef inline void complete(group_t* g, uint32_t nic, uint64_t ctx, uint32_t count, int32_t status, int32_t vendor) noexcept nogil:
    """`count` posts of slot `ctx` are over."""
    cdef nic_t* d = &g.nic[nic]
    cdef uint32_t i = <uint32_t>ctx
    cdef wr_t* w
    cdef req_t* r
    if i >= d.nwr:
        return
    w = &d.wr[i]
    if not w.used or w.gen != <uint32_t>(ctx >> 32):
        return                          # of a slot that recover() has settled already
    r = w.r
    count = min(count, w.left)
    d.out_bytes -= w.unit * count
    d.completions += count
    w.left -= count
    if status:
        d.errors += 1
        if r.op == OP_SCATTER:
            target_failed(r, w.at, status)
        elif r.op != OP_FENCE:          # of whom is gone, nothing can be asked
            refuse(r, status)
        r.vendor = vendor
    if r.op == OP_FENCE:
        g.fences -= count
    if w.left == 0:
        slot_free(d, i)
    settle_posts(g, r, count)

cdef inline void settle_posts(group_t* g, req_t* r, uint64_t count) noexcept nogil:
    """`count` posts of a request are over: end it when they were the last."""
    r.left -= count
    if r.left:
        return
    if r.state != PENDING:
        if not r.listed:
            g.zombies -= 1
            retire(g, r)
    elif not r.listed and r.redo == NULL:
        finish(g, r, DONE if r.status == 0 else FAILED)
    elif r.stopped:
        finish(g, r, FAILED)

cdef inline void recovered(group_t* g, uint32_t nic, uint64_t ctx, int64_t counted) noexcept nogil:
    """What became of an outstanding post of a failed NIC, its lane being closed: `counted` of it were counted at the
    target (-1: nobody can tell). The rest goes over other NICs. Sending bytes again that carry no count does no harm."""
    cdef nic_t* d = &g.nic[nic]
    cdef wr_t* w = &d.wr[<uint32_t>ctx]
    cdef req_t* r
    cdef redo_t* redo
    cdef uint32_t left
    cdef uint64_t done
    if not w.used or w.gen != <uint32_t>(ctx >> 32):
        return
    r = w.r
    left = w.left
    if counted < left and counted and r.op != OP_SEND and not r.flags & F_IMM:
        counted = 0
    elif left != w.n and counted != <int64_t>left:
        counted = -1                    # some were completed, and which ones is not known
    if counted < 0 or counted >= <int64_t>left or r.state != PENDING or r.stopped:
        complete(g, nic, ctx, left, FE_MAYBE if counted < 0 else 0, 0)
        return
    redo = <redo_t*>malloc(sizeof(redo_t))
    if redo == NULL:
        complete(g, nic, ctx, left, FE_NIC, 0)
        return
    done = <uint64_t>counted
    if r.op == OP_PAGES and not r.flags & F_IMM:
        done = 0
    redo.at = w.at + done
    redo.n = w.n - done
    redo.next = r.redo
    r.redo = redo
    r.extra |= X_REST
    r.send.at = 0
    d.out_bytes -= w.unit * left
    r.left -= left
    slot_free(d, <uint32_t>ctx)
    if not r.listed:
        backlog_add(g, r)

cdef inline void forget_shards(group_t* g, uint32_t src) noexcept nogil:
    """Half-arrived split writes of a source that is gone."""
    cdef uint64_t i = 0
    while i <= g.shards.mask:
        if g.shards.slot[i].used and <uint32_t>(g.shards.slot[i].key >> 32) == src:
            table_remove(&g.shards, &g.shards.slot[i])
        else:
            i += 1

cdef inline void peer_lost(group_t* g, uint32_t nic, uint64_t index, uint32_t src) noexcept nogil:
    cdef nic_t* d = &g.nic[nic]
    cdef peer_t* p = NULL
    if index < d.npeers:
        p = d.peers[index]
    if p != NULL:
        if p.lost:
            return
        p.lost = 1
    event(g, EV_PEER_LOST, nic, p.id if p != NULL else NO_SRC, src)

cdef inline int poll_nic(group_t* g, uint32_t i) noexcept nogil:
    cdef comp_t c[POLL]
    cdef nic_t* d = &g.nic[i]
    cdef int n = d.ops.poll(d.dom, c, POLL), k
    cdef req_t* r
    for k in range(n):
        if c[k].kind == C_IMM:
            d.imms += c[k].count
            arrive(g, c[k].src, c[k].imm, c[k].count)
        elif c[k].kind == C_DONE:
            complete(g, i, c[k].ctx, c[k].count, 0, 0)
        elif c[k].kind == C_ERROR:
            complete(g, i, c[k].ctx, c[k].count, c[k].status, c[k].vendor)
        elif c[k].kind == C_RECV:
            r = <req_t*>c[k].ctx
            r.n = c[k].len
            r.imm = c[k].src
            r.part = 0
            r.cb_node.kind = CB_RECV
            r.cb_node.self = r
            cbq_push(g.cbq, &r.cb_node)
        elif c[k].kind == C_PEER_LOST:
            peer_lost(g, i, c[k].ctx, c[k].src)
        elif c[k].kind == C_DROPPED:
            event(g, EV_DROPPED, i, <uint32_t>min(c[k].len, <uint64_t>NO_SRC), c[k].src)
        elif c[k].kind == C_NIC_DOWN:
            nic_down(g, i)
    return n

cdef inline void timers(group_t* g) noexcept nogil:
    """Ends requests whose deadline has passed."""
    cdef uint64_t now = now_ns(), t = now >> TICK_SHIFT, i
    cdef req_t* r
    cdef req_t* nxt
    if t - g.wheel.tick >= WHEEL:
        g.wheel.tick = t - WHEEL + 1
    i = g.wheel.tick
    while i <= t:
        r = g.wheel.slot[i & (WHEEL - 1)]
        while r != NULL:
            nxt = r.t_next
            if r.deadline <= now:
                fail(g, r, FE_TIMEOUT, 0)
                nxt = g.wheel.slot[i & (WHEEL - 1)]     # failing one may have ended others
            r = nxt
        i += 1
    g.wheel.tick = t

cdef inline int progress(group_t* g) noexcept nogil:
    """One turn: take requests, go on with large ones, poll. Returns how much there was to do."""
    cdef int n = 0
    cdef uint32_t i
    cdef req_t* r
    while n < TAKE:
        r = <req_t*>mpsc_pop(&g.q)
        if r == NULL:
            break
        start(g, r)                     # may give r back
        n += 1
    if g.backlog != NULL:
        n += backlog_turn(g)
    for i in range(g.nnics):
        if g.nic[i].dom != NULL:
            n += poll_nic(g, i)
    g.turns += 1
    if g.wheel.n and (g.turns & 63) == 0:
        timers(g)
    return n


# ---------------------------------------------------------------- sleeping and driving

cdef inline bint armed(group_t* g) noexcept nogil:
    """With the bell set: whether there is really nothing to do. Lock held."""
    cdef uint32_t i
    if mpsc_some(&g.q):
        return False
    for i in range(g.nnics):
        if g.nic[i].dom != NULL and g.nic[i].ops.arm(g.nic[i].dom):
            return False
    return True

cdef inline void sleep_on(group_t* g, uint32_t who, int64_t ns) noexcept nogil:
    """Sleeps until the bell, a descriptor or `ns` (negative: no end)."""
    cdef pollfd fds[MAX_NICS + 1]
    cdef uint64_t v
    cdef uint32_t i
    if g.tick and (ns < 0 or ns > 1000000):
        ns = 1000000
    if g.backlog != NULL and (ns < 0 or ns > 1000000):
        ns = 1000000                    # something waits for room that no bell announces
    if g.fences and (ns < 0 or ns > FENCE_NS):
        ns = FENCE_NS                   # a poll asks again, and so finds out that a silent peer is dead
    g.sleeps += 1
    if g.nfds == 0:
        if bell_wait(g.bell, who, who, ns) != 0 and ld_rlx32(g.bell) == who and mpsc_some(&g.q):
            g.missed += 1               # woke by the clock, and there was work: no bell rang for it
        return
    for i in range(g.nfds):
        fds[i].fd, fds[i].events, fds[i].revents = g.fds[i].fd, g.fds[i].events, 0
    if who == CALLER:
        fds[0].fd = g.cfd
    c_poll(fds, g.nfds, -1 if ns < 0 else <int>min((ns + 999999) // 1000000, <int64_t>0x7fffffff))
    if fds[0].revents:
        c_read(fds[0].fd, &v, 8)

cdef inline void caller_leaves(group_t* g) noexcept nogil:
    """The driver goes: from here on arrivals wake the worker. What is there already is handed to it."""
    if g.nfds and ld_rlx32(&g.park) == PARK_TIMED and g.backlog == NULL and not g.rearm:
        unlock(g)                       # the worker looks by itself within PARK_NS; arming descriptors costs system calls
        return
    fx_set_bell(g.bell, WORKER)
    if g.backlog == NULL and not g.rearm and armed(g):
        release(g)
        return
    g.rearm = 0
    st_rlx32(g.bell, 0)
    release(g)
    wake_worker(g)

cdef inline void worker_turns(group_t* g) noexcept nogil:
    """The worker's life after set-up."""
    cdef uint32_t idle = 0
    cdef int n
    cdef int64_t ns
    cdef uint64_t now, driven, known = 0
    while not ld_acq32(&g.stop):
        if ld_rlx32(&g.want):
            sched_yield()
        if not trylock(g):
            if not g.caller:
                sched_yield()
                continue
            xchg32(&g.park, PARK_TIMED if g.nfds else PARK_WAKE)
            if ld_rlx32(&g.lock) == 0:
                st_rlx32(&g.park, 0)
                continue
            if g.nfds:
                # As long as callers come and go it stays out of their way: every descriptor event would
                # wake it on their core. It is back within two PARK_NS of the last one.
                while True:
                    driven = ld_rlx64(&g.drives)
                    futex_wait(&g.park, PARK_TIMED, PARK_NS)
                    if ld_rlx32(&g.park) == 0 or ld_rlx64(&g.drives) == driven or ld_acq32(&g.stop):
                        break
            else:
                futex_wait(&g.park, PARK_WAKE, 100000000)
            st_rlx32(&g.park, 0)
            continue
        n = progress(g)
        if n:
            idle = 0
            release(g)
            continue
        idle += 1
        if g.busy:
            release(g)
            cpu_pause()
        elif not g.caller and idle < g.spin:
            release(g)
            cpu_pause()
        elif not g.caller and idle < g.spin + g.yields:
            release(g)
            sched_yield()
        else:
            now = now_ns()
            if g.wheel.n:
                timers(g)
            ns = <int64_t>timer_next(&g.wheel, now)
            if g.wheel.n == 0 and g.submitted != known:
                ns = LINGER_NS          # else every wait's deadline would be earlier than "never", and wake the worker
                known = g.submitted
            g.sleep_until = now + <uint64_t>ns
            fx_set_bell(g.bell, WORKER)
            if armed(g) and not ld_acq32(&g.stop):
                release(g)
                sleep_on(g, WORKER, -1 if ns == <int64_t>0x7fffffffffffffff else ns)
            else:
                st_rlx32(g.bell, 0)
                release(g)
            g.sleep_until = 0
            idle = 0

cdef inline bint posted(group_t* g) noexcept nogil:
    """Whether posts without completion are out."""
    cdef uint32_t i
    for i in range(g.nnics):
        if g.nic[i].nfree != g.nic[i].nwr:
            return True
    return False

cdef inline void drop_queue(group_t* g) noexcept nogil:
    cdef req_t* r
    while True:
        r = <req_t*>mpsc_pop(&g.q)
        if r == NULL:
            return
        start(g, r)

cdef inline void submit(group_t* g, req_t* r) noexcept nogil:
    """Hands a request over. Caller style: post here and now if nobody else drives. Else: queue, bell."""
    cdef uint32_t op = r.op
    r.extra |= X_SENT
    if g.caller and trylock(g):
        start(g, r)
        # a receive may let a message in that waits; what only polling completes needs somebody who polls
        if g.backlog != NULL or g.rearm or op == OP_RECV or (g.nfds == 0 and posted(g)):
            g.rearm = 0
            unlock(g)
            wake_worker(g)
        else:
            unlock(g)
        return
    mpsc_push(&g.q, &r.q)
    if g.caller:
        full_fence()
        if trylock(g):
            progress(g)
            if g.backlog != NULL or g.rearm or (g.nfds == 0 and posted(g)):
                g.rearm = 0
                unlock(g)
                wake_worker(g)
            else:
                unlock(g)
            return
    kick(g)
    full_fence()
    if ld_acq32(&g.over):               # the engine was closed meanwhile, and nobody looks at the queue any more
        lock_now(g)
        drop_queue(g)
        release(g)

cdef inline int drive(group_t* g, req_t* r, int64_t ns, uint64_t* end) noexcept nogil:
    """With the lock: turn until r has ended (1), or for about `ns` (0). `end` is 0 until the clock has been read: a short
    wait never reads it."""
    cdef uint32_t idle = 0, turn = 0
    cdef uint64_t now
    cdef int ended
    st_rlx32(g.bell, 0)
    st_rlx64(&g.drives, g.drives + 1)
    while True:
        ended = ld_acq32(&r.state) != PENDING
        if ended:
            break
        turn += 1
        if ld_rlx32(&g.want) or (turn & 0xffff) == 0:
            if turn > 1:
                break                   # somebody needs the lock, or it is time to look at the clock
        if progress(g):
            idle = 0
            continue
        idle += 1
        if idle < g.spin:
            cpu_pause()
        elif idle < g.spin + g.yields:
            sched_yield()
        else:
            if g.wheel.n:
                timers(g)
            now = now_ns()
            if end[0] == 0:
                end[0] = now + <uint64_t>ns
            if now >= end[0]:
                break
            fx_set_bell(g.bell, CALLER)
            if armed(g) and ld_acq32(&r.state) == PENDING:
                sleep_on(g, CALLER, min(<int64_t>(end[0] - now), <int64_t>NAP_NS))
            st_rlx32(g.bell, 0)
            idle = 0
    caller_leaves(g)
    return ld_acq32(&r.state) != PENDING

cdef inline int wait_slice(group_t* g, req_t* r, int64_t ns) noexcept nogil:
    """Waits for the end of r for at most some 50 ms, or `ns`; 1 when it has ended."""
    cdef uint32_t i
    cdef uint64_t end
    if ld_acq32(&r.state):
        return 1
    if g.caller:
        ns = min(ns, <int64_t>50000000)
        end = 0
        i = 0
        while True:
            if trylock(g):
                if drive(g, r, ns, &end):
                    return 1
                if end == 0:
                    end = now_ns() + <uint64_t>ns
                elif now_ns() >= end:
                    return 0
                while ld_rlx32(&g.want) and i < 1000:
                    sched_yield()
                    i += 1
                i = 0
                continue
            i += 1
            if i < 100:
                cpu_pause()
            else:
                xchg32(&r.waiters, 1)
                if not ld_acq32(&r.state):
                    futex_wait(&r.state, PENDING, 100000)
            if ld_acq32(&r.state):
                return 1
            if i >= 100:
                if end == 0:
                    end = now_ns() + <uint64_t>ns
                elif now_ns() >= end:
                    return 0
    for i in range(g.spin):
        if ld_acq32(&r.state):
            return 1
        cpu_pause()
    for i in range(g.yields):
        if ld_acq32(&r.state):
            return 1
        sched_yield()
    xchg32(&r.waiters, 1)
    if not ld_acq32(&r.state):
        futex_wait(&r.state, PENDING, min(ns, <int64_t>50000000))
    return ld_acq32(&r.state) != PENDING
