# The end of a request, once, and what is told to whom; part of worker.pyx.

cdef inline void backlog_add(group_t* g, req_t* r) noexcept nogil:
    r.next = NULL
    r.prev = g.backlog_end
    if g.backlog_end != NULL:
        g.backlog_end.next = r
    else:
        g.backlog = r
    g.backlog_end = r
    r.listed = 1
    g.nbacklog += 1
    if r.op == OP_SEND:
        r.peer.sends += 1

cdef inline void backlog_del(group_t* g, req_t* r) noexcept nogil:
    if not r.listed:
        return
    if r.prev != NULL:
        r.prev.next = r.next
    else:
        g.backlog = r.next
    if r.next != NULL:
        r.next.prev = r.prev
    else:
        g.backlog_end = r.prev
    r.listed = 0
    g.nbacklog -= 1
    if r.op == OP_SEND:
        r.peer.sends -= 1

cdef inline void arm_timer(group_t* g, req_t* r) noexcept nogil:
    if r.t_slot == 0:
        timer_add(&g.wheel, r)
        if r.deadline < g.sleep_until:
            g.rearm = 1

cdef inline void tell(group_t* g, req_t* r, uint32_t state) noexcept nogil:
    """Publishes the end of a request: native callback or counter, callback thread, waiters, event loop."""
    cdef void* old
    cdef uint64_t one = 1
    cdef loopq_t* lq
    cdef int efd
    cdef bint cb = False
    if r.extra & X_REST:
        if r.native != NULL:
            r.native(r.native_arg, r.status)
        if r.counter != NULL:
            fadd64(r.counter if state == DONE else r.counter + 1, 1)
        cb = r.cb != NULL
    if cb:
        fadd32(&r.refs, 1)
        r.cb_node.kind = CB_TRANSFER
        r.cb_node.self = r
    xchg32(&r.state, state)             # full barrier: then look for waiters
    if cb:
        cbq_push(g.cbq, &r.cb_node)
    if ld_rlx32(&r.waiters):
        futex_wake(&r.state, 1 << 30)
    # An awaiter registers, then looks at the state; the state is out before we look: one of the two sees the other.
    lq = <loopq_t*>ld_acqp(<void**>&r.lq)
    if lq != NULL and casp(<void**>&r.lq, lq, NULL):
        efd = lq.efd                    # once the request is in its queue, the loop may finish and go
        while True:
            old = ld_acqp(&lq.head)
            r.lq_next = <req_t*>old
            if casp(&lq.head, old, r):
                break
        if old == NULL:                 # only the first of a batch rings the event loop
            c_write(efd, &one, 8)

cdef inline void retire(group_t* g, req_t* r) noexcept nogil:
    """Nothing of the request can land any more: give back what it holds."""
    cdef uint64_t i
    cdef req_t* f
    cdef req_t* nxt
    if r.quiet:
        return
    if r.rmr != NULL:
        if r.tag >= 0:
            if r.state == DONE:
                tag_give(r.rmr.peer, r.tag)
            else:
                r.rmr.peer.burnt += 1
        fadd32(&r.rmr.inflight, <uint32_t>-1)       # it may be freed from here on
    elif r.target != NULL and r.op == OP_SCATTER:
        for i in range(r.n):
            fadd32(&r.target[i].rmr.inflight, <uint32_t>-1)
    if r.op == OP_SEND and r.peer != NULL:
        fadd32(&r.peer.inflight, <uint32_t>-1)
    if r.lmr != NULL:
        fadd32(&r.lmr.inflight, <uint32_t>-1)
    st_rel32(&r.quiet, 1)
    f = r.follow
    r.follow = NULL
    while f != NULL:
        nxt = f.next
        f.leader = NULL
        quiet(g, f)
        f = nxt
    req_drop(g.pool, r)

cdef inline bint half_sent(req_t* r) noexcept nogil:
    """A message of which fragments are out: the rest must follow, whatever became of the request."""
    return r.op == OP_SEND and r.send.at != 0 and not r.peer.lost

cdef inline void quiet(group_t* g, req_t* f) noexcept nogil:
    """A follower's leader is quiet: that is all, or peers have to say that it has landed."""
    if f.n and not g.closed:
        f.op = OP_FENCE
        backlog_add(g, f)
        arm_timer(g, f)
    else:
        finish(g, f, DONE)

cdef inline void finish(group_t* g, req_t* r, uint32_t state) noexcept nogil:
    """Ends a request once. Retires it too if nothing of it is outstanding."""
    cdef req_t* f
    cdef req_t** at
    if r.state == PENDING:
        timer_del(&g.wheel, r)
        if r.listed and not half_sent(r):
            backlog_del(g, r)
            if r.op == OP_SEND and r.peer.half == <void*>r:
                r.peer.half = NULL
        r.stopped = 1
        g.ended += 1
        if state != DONE:
            g.failed += 1
        if r.left or r.listed:
            g.zombies += 1
        if r.follow != NULL:
            fadd32(&r.refs, 1)          # followers of the end are told after the state is out
            tell(g, r, state)
            at = &r.follow
            while at[0] != NULL:
                f = at[0]
                if f.imm == FOLLOW_END:
                    at[0] = f.next
                    f.leader = NULL
                    f.status = r.status
                    f.vendor = r.vendor
                    finish(g, f, state)
                else:
                    at = &f.next
            if r.left == 0 and not r.listed:
                retire(g, r)
            req_drop(g.pool, r)
            return
        tell(g, r, state)
    if r.left == 0 and not r.listed:
        retire(g, r)

cdef inline void fail(group_t* g, req_t* r, int32_t status, int32_t vendor) noexcept nogil:
    """Ends a request before its time, wherever it stands."""
    if r.state != PENDING:
        return
    if r.status == 0 or status == FE_CANCELLED or status == FE_TIMEOUT:
        r.status = status
        r.vendor = vendor
    if r.op == OP_EXPECT:
        expect_unlink(g, r)
    elif r.op == OP_FOLLOW and r.leader != NULL:
        follow_unlink(r)
    finish(g, r, CANCELLED if status == FE_CANCELLED else FAILED)

cdef inline void follow_unlink(req_t* r) noexcept nogil:
    cdef req_t** at = &r.leader.follow
    while at[0] != NULL:
        if at[0] == r:
            at[0] = r.next
            break
        at = &at[0].next
    r.leader = NULL

cdef inline void follow(group_t* g, req_t* f, req_t* leader) noexcept nogil:
    """`f` (OP_FOLLOW, f.imm says what of) ends with `leader`."""
    if f.imm == FOLLOW_END and leader.state != PENDING:
        f.status = leader.status
        f.vendor = leader.vendor
        finish(g, f, leader.state)
    elif f.imm == FOLLOW_QUIET and leader.quiet:
        quiet(g, f)
    else:
        f.leader = leader
        f.next = leader.follow
        leader.follow = f
        arm_timer(g, f)

cdef inline void event(group_t* g, uint32_t kind, uint32_t nic, uint32_t peer, uint32_t src) noexcept nogil:
    """Something Python must know of. Only failures come here, so this may allocate."""
    cdef event_t* e = <event_t*>malloc(sizeof(event_t))
    if e == NULL:
        return
    e.kind = kind
    e.nic = nic
    e.peer = peer
    e.src = src
    e.group = g.index
    e.when = now_ns()
    e.node.kind = CB_EVENT
    e.node.self = e
    cbq_push(g.cbq, &e.node)
