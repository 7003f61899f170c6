# Measurements that must not leave C, part of worker.pyx. `fabricx bench p2p` calls them; nothing else does.

cdef req_t* quick_write(group_t* g, MrHandle h, uint64_t soff, RemoteMr m, uint64_t doff, uint64_t n, uint32_t imm) noexcept nogil:
    cdef req_t* r = req_new(&g.pool_, OP_WRITE)
    if r == NULL:
        return NULL
    r.imm = imm
    r.flags = F_IMM
    r.deadline = coarse_ns() + <uint64_t>30000000000
    fadd32(&h.m.inflight, 1)
    fadd32(&m.m.inflight, 1)
    r.lmr = h.m
    r.rmr = m.m
    r.n = n
    r.src = h.m.addr + soff
    r.dst = doff
    return r

cdef req_t* quick_expect(group_t* g, uint32_t imm, uint64_t count) noexcept nogil:
    cdef req_t* r = req_new(&g.pool_, OP_EXPECT)
    if r == NULL:
        return NULL
    r.imm = imm
    r.n = count
    r.deadline = coarse_ns() + <uint64_t>30000000000
    return r

def pp_nogil(EngineBase engine not None, MrHandle src not None, uint64_t soff, desc, uint64_t doff, uint32_t imm, int n, bint first):
    """n ping-pongs of 8 bytes with immediate without leaving C; ns a round trip."""
    cdef Group group = src.group
    cdef group_t* g = group.g
    cdef RemoteMr m = engine.remote(desc, group)
    cdef req_t* r
    cdef req_t* w
    cdef int i, bad = 0
    cdef uint64_t t0, t1
    with nogil:
        t0 = now_ns()
        for i in range(n):
            r = quick_expect(g, imm, 1)
            submit(g, r)
            if first:
                w = quick_write(g, src, soff, m, doff, 8, imm)
                submit(g, w)
                req_drop(&g.pool_, w)
            while not wait_slice(g, r, 1000000000):
                if now_ns() - t0 > <uint64_t>60000000000:
                    bad = 1
                    break
            if r.state != DONE:
                bad = 1
            req_drop(&g.pool_, r)
            if bad:
                break
            if not first:
                w = quick_write(g, src, soff, m, doff, 8, imm)
                submit(g, w)
                req_drop(&g.pool_, w)
        t1 = now_ns()
    if bad:
        raise errors.TransferTimeout("ping-pong: no answer")
    return (t1 - t0) / <double>n

def enqueue_nogil(EngineBase engine not None, MrHandle src not None, desc, int n, uint64_t length=256):
    """ns to fill a write request and hand it to the worker, n of them; waits for all of them afterwards."""
    cdef Group group = src.group
    cdef group_t* g = group.g
    cdef RemoteMr m = engine.remote(desc, group)
    cdef req_t* w
    cdef req_t* last = NULL
    cdef int i
    cdef uint64_t t0, t1
    with nogil:
        t0 = now_ns()
        for i in range(n):
            w = quick_write(g, src, 0, m, 0, length, 7)
            if i == n - 1:
                last = w
            submit(g, w)
            if w != last:
                req_drop(&g.pool_, w)
        t1 = now_ns()
        while last != NULL and not wait_slice(g, last, 1000000000):
            if now_ns() - t1 > <uint64_t>30000000000:
                break
        if last != NULL:
            req_drop(&g.pool_, last)
    return (t1 - t0) / <double>n

def pickup(EngineBase engine not None, MrHandle src not None, desc, int n, uint64_t gap_ns, bint yields=False):
    """tsc ticks of n writes, `gap_ns` apart: rows of (enqueue, submit to picked up, picked up to posted)."""
    import numpy as np
    cdef Group group = src.group
    cdef group_t* g = group.g
    cdef RemoteMr m = engine.remote(desc, group)
    out = np.zeros((n, 3), np.uint64)
    cdef uint64_t[:, ::1] o = out
    cdef req_t* w
    cdef int i
    cdef uint64_t a, b, e
    with nogil:
        for i in range(n):
            g.t_post = 0
            w = quick_write(g, src, 0, m, 0, 256, 7)
            a = tsc()
            w.t0 = a
            w.extra = X_TIMED
            submit(g, w)
            b = tsc()
            e = now_ns() + <uint64_t>1000000000
            while ld_acq64(&g.t_post) < a and now_ns() < e:
                if yields:
                    sched_yield()
                else:
                    cpu_pause()
            req_drop(&g.pool_, w)
            o[i, 0] = b - a
            o[i, 1] = g.t_pick - a
            o[i, 2] = g.t_post - g.t_pick
            e = now_ns() + gap_ns
            while now_ns() < e:
                cpu_pause()
    return out

def scatter_nogil(EngineBase engine not None, MrHandle src not None, descs, uint64_t length, int n):
    """ns for the worker's part of a scatter to all of `descs` (posting, no queue), n times."""
    import numpy as np
    cdef Group group = src.group
    cdef group_t* g = group.g
    cdef list remotes = [engine.remote(d, group) for d in descs]
    cdef uint64_t k = len(remotes), i
    cdef req_t* r
    cdef target_t* t
    cdef int j
    out = np.zeros(n, np.float64)
    cdef double[::1] o = out
    cdef uint64_t t0
    for j in range(n):
        r = req_new(&g.pool_, OP_SCATTER)
        t = <target_t*>malloc(k * sizeof(target_t))
        for i in range(k):
            t[i].rmr = (<RemoteMr>remotes[i]).m
            t[i].src, t[i].len, t[i].off = src.m.addr, length, 0
            fadd32(&t[i].rmr.inflight, 1)
        r.target, r.n, r.lmr = t, k, src.m
        r.extra = X_REST
        fadd32(&src.m.inflight, 1)
        r.imm, r.flags = 7, F_IMM
        r.deadline = coarse_ns() + <uint64_t>30000000000
        with nogil:
            lock_now(g)
            t0 = now_ns()
            start(g, r)
            o[j] = now_ns() - t0
            unlock(g)
        req_drop(&g.pool_, r)
    return out

def native_nogil(EngineBase engine not None, NativeCallback cb not None, int n):
    """ns a completion with a native callback, submission and end in C, n of them (caller progress)."""
    cdef group_t* g = engine.first.g
    cdef req_t* r
    cdef int i
    cdef uint64_t t0, t1, plain
    with nogil:
        t0 = now_ns()
        for i in range(n):
            r = req_new(&g.pool_, OP_NOP)
            submit(g, r)
            req_drop(&g.pool_, r)
        plain = now_ns() - t0
        t0 = now_ns()
        for i in range(n):
            r = req_new(&g.pool_, OP_NOP)
            r.native = <void (*)(uint64_t, int64_t) noexcept nogil><uintptr_t>cb.address
            r.native_arg = cb.arg
            r.extra = X_REST
            submit(g, r)
            req_drop(&g.pool_, r)
        t1 = now_ns() - t0
    return max(0.0, (<double>t1 - <double>plain) / n)

def nop(EngineBase engine not None, on_done=None):
    """A request that ends as soon as it is taken: measures everything but posting."""
    cdef Transfer t
    engine.ready()
    t = engine.first.transfer(OP_NOP)
    t.r.deadline = coarse_ns() + <uint64_t>30000000000
    engine.attach(t, on_done)
    submit(engine.first.g, t.r)
    return t
