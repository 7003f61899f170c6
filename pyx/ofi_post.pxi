# Writes, completions, sleeping; part of ofi.pyx.

# ---------------------------------------------------------------- what the control messages of ctl_*.pxi stand on

cdef inline bint means_lost(int err) noexcept nogil:
    """errno values by which providers say that the other end is gone (104, 107, 125 on tcp; 113, 103 on efa)."""
    return err in (104, 107, 125, 103, 113, 111, 32, 108, 110)

cdef inline xctx_t* xtake(dom_t* d) noexcept nogil:
    """A context. Those never used yet are taken last, so that memory is touched only as far as it is needed."""
    cdef xctx_t* x = d.own.xfree
    if x != NULL:
        d.own.xfree = x.next
    elif d.own.xfresh < CONTEXTS:
        x = &d.own.x[d.own.xfresh]
        d.own.xfresh += 1
    return x

cdef inline void xgive(dom_t* d, xctx_t* x) noexcept nogil:
    x.next = d.own.xfree
    d.own.xfree = x

cdef bint ship(dom_t* d, uint32_t s, uint32_t peer) noexcept nogil:
    """Posts slot s; False when the provider has no room for it now. True: out, or dropped with its peer."""
    cdef head_t* h = slot_head(d, s)
    cdef xctx_t* x = xtake(d)
    cdef int rc
    if x == NULL:
        return False
    x.kind = X_CTRL
    x.slot = s
    x.peer = peer
    rc = ofi_send(d.nic, h, sizeof(head_t) + h.len, d.own.sdesc, d.peer[peer].link.fi, x)
    if rc == 0:
        return True
    xgive(d, x)
    if rc == EAGAIN_ and d.peer[peer].state != P_LOST:
        return False
    sgive(d, s, peer)
    if rc != EAGAIN_ and means_lost(-rc):
        lose(d, peer)
    return True

cdef void repost(dom_t* d, uint32_t r) noexcept nogil:
    cdef xctx_t* x = &d.own.rctx[r]
    x.kind = X_RECV
    x.slot = r
    if ofi_recv(d.nic, d.rbuf + <uint64_t>r * SLOT, SLOT, d.own.rdesc, x) != 0:
        d.unposted[d.nunposted] = r
        d.nunposted += 1

# ---------------------------------------------------------------- writes

cdef inline int post1(dom_t* d, write_t* w, bint inject) noexcept nogil:
    """One write. FI_MORE is not asked for: tcp ignores it, and efa leaves what came before in its queue, the doorbell
    not rung, when the last post of a batch is refused."""
    cdef peer_t* p
    cdef imp_t* m
    cdef xctx_t* x
    cdef int rc
    cdef uint64_t data
    if d.down or d.failed:
        return -FE_NIC
    if w.peer >= d.npeers or d.peer[w.peer].state != P_UP:
        return -FE_PEER_LOST
    if w.rkey >= d.nimp:
        return -FE_REMOTE_KEY
    p = &d.peer[w.peer]
    m = &d.imp[w.rkey]
    if not m.used or m.dead or m.peer != w.peer:
        return -FE_REMOTE_KEY
    if w.dst > m.len or w.len > m.len - w.dst:
        return -FE_REMOTE_RANGE
    data = w.imm
    if d.nic.data8:
        data |= <uint64_t>p.number << 32
    # Small ones are copied at once and done, which means "source reusable" on these providers. Now and then one goes
    # the long way, whose completion is counted, so that a peer which takes nothing can hold only so many.
    if inject and w.len and w.len <= d.nic.inject and p.link.injected < INJECTS and not w.flags & F_LANDED and \
            not d.nic.landed:
        rc = ofi_inject(d.nic, <void*>w.src, w.len, p.link.fi, m.addr + w.dst, m.key, data, (w.flags & F_IMM) != 0)
        if rc == 0:
            p.link.injected += 1
            d.nposts += 1
            return POST_DONE
        return refused(d, w.peer, rc)
    if p.out >= PEER_WRITES or d.writes >= WRITES:
        return POST_FULL
    x = xtake(d)
    if x == NULL:
        return POST_FULL
    x.kind = X_WRITE
    x.user = w.ctx
    x.peer = w.peer
    x.slot = <uint32_t>w.rkey
    rc = ofi_write(d.nic, <void*>w.src, w.len, <void*>w.lkey, p.link.fi, m.addr + w.dst, m.key, data, (w.flags & F_IMM) != 0,
                   (w.flags & F_LANDED) != 0, x)
    if rc == 0:
        p.out += 1
        p.link.injected = 0
        m.out += 1
        d.writes += 1
        d.nposts += 1
        return POST_QUEUED
    xgive(d, x)
    return refused(d, w.peer, rc)

cdef int refused(dom_t* d, uint32_t peer, int rc) noexcept nogil:
    """What a post that the provider did not take returns."""
    if rc == EAGAIN_:
        return POST_FULL
    if means_lost(-rc):
        lose(d, peer)
        return -FE_PEER_LOST
    return -FE_PROVIDER

cdef int ofi_post_write(void* dom, write_t* w) noexcept nogil:
    return post1(<dom_t*>dom, w, True)

cdef int ofi_post_many(void* dom, write_t* w, int n) noexcept nogil:
    cdef int i
    for i in range(n):
        w[i].rc = post1(<dom_t*>dom, &w[i], True)
        if w[i].rc == POST_FULL:
            return i
    return n

cdef inline uint64_t index_of(const void* a, uint32_t wide, uint64_t i) noexcept nogil:
    if a == NULL:
        return i
    return (<uint64_t*>a)[i] if wide else (<uint32_t*>a)[i]

cdef int ofi_post_pages(void* dom, pages_t* g) noexcept nogil:
    """The template is filled once; a page changes two addresses. Each page has a completion, so none is injected."""
    cdef uint64_t start = g.at
    cdef int rc
    cdef write_t w
    w.len, w.lkey, w.rkey, w.ctx, w.peer, w.imm, w.flags = g.len, g.lkey, g.rkey, g.ctx, g.peer, g.imm, g.flags
    while g.at < g.end:
        w.src = g.src + index_of(g.si, g.swide, g.at) * g.sstride
        w.dst = g.dst + index_of(g.di, g.dwide, g.at) * g.dstride
        rc = post1(<dom_t*>dom, &w, False)
        if rc == POST_FULL:
            return POST_QUEUED if g.at > start else POST_FULL
        if rc < 0:
            return rc
        g.at += 1
    return POST_QUEUED

# ---------------------------------------------------------------- completions

cdef void failed(dom_t* d, xctx_t* x, ofi_comp* c) noexcept nogil:
    """A completion with an error; it is told once and nothing is tried again."""
    cdef comp_t* e
    cdef bint lost = means_lost(c.err)
    if x == NULL:
        return
    if x.kind == X_RECV:
        if c.err != 125 or not d.closing:
            repost(d, x.slot)
        return
    if x.kind == X_CTRL:
        sgive(d, x.slot, x.peer)
    else:
        if d.imp[x.slot].dead and c.err == 125:         # ECANCELED: the target does not know the key any more
            lost = False
        e = comp(d, C_ERROR)
        e.ctx = x.user
        e.count = 1
        e.vendor = c.err
        if lost:
            e.status = FE_PEER_LOST
        elif d.imp[x.slot].dead or c.err in (13, 22):
            e.status = FE_REMOTE_KEY
        else:
            e.status = FE_PROVIDER
        write_over(d, x.peer, x.slot)
    if lost and d.peer[x.peer].state != P_LOST:
        lose(d, x.peer)
    xgive(d, x)

cdef inline void one_over(dom_t* d, ofi_comp* c) noexcept nogil:
    cdef xctx_t* x = <xctx_t*>c.ctx
    cdef comp_t* e
    if c.err:
        failed(d, x, c)
    elif c.flags & OFI_REMOTE_DATA:
        d.arrivals += 1
        e = comp(d, C_IMM)
        e.imm = <uint32_t>c.data
        e.count = 1
        if d.nic.data8:
            e.src = <uint32_t>(c.data >> 32)
        elif c.src < AV_MOST and d.own.by_fi[c.src]:
            e.src = d.peer[d.own.by_fi[c.src] - 1].src
    elif x == NULL:
        return
    elif x.kind == X_WRITE:
        e = comp(d, C_DONE)
        e.ctx = x.user
        e.count = 1
        write_over(d, x.peer, x.slot)
        xgive(d, x)
    elif x.kind == X_CTRL:
        sgive(d, x.slot, x.peer)
        xgive(d, x)
    elif x.kind == X_RECV:
        heard(d, <head_t*>(d.rbuf + <uint64_t>x.slot * SLOT), c.len)
        repost(d, x.slot)

cdef inline void progress(dom_t* d) noexcept nogil:
    cdef ofi_comp c[16]
    cdef uint32_t left
    cdef int i, k
    if d.qhead < d.qtail:
        flush(d)
    while d.nunposted:
        left = d.nunposted
        d.nunposted -= 1
        repost(d, d.unposted[d.nunposted])
        if d.nunposted == left:     # no room for it
            break
    if d.nfences:
        fence_again(d)
    if d.nsfree:
        if d.rack:
            confirm_all(d)
        if d.rwait:
            grant_all(d)
    if d.ctail - d.chead < COMPS // 2:
        k = ofi_poll(d.nic, c, 16)
        if k < 0:
            nic_failed(d)
        for i in range(k):
            one_over(d, &c[i])

cdef int ofi_poll_all(void* dom, comp_t* out, int most) noexcept nogil:
    cdef dom_t* d = <dom_t*>dom
    cdef int n = 0
    if not d.down and not d.failed:
        progress(d)
    while n < most and d.chead < d.ctail:
        out[n] = d.comp[d.chead % COMPS]
        d.chead += 1
        n += 1
    return n

cdef int ofi_arm(void* dom) noexcept nogil:
    cdef dom_t* d = <dom_t*>dom
    if d.down:
        return 0
    if d.chead < d.ctail or d.qhead < d.qtail or d.nunposted:
        return 1
    return 0 if d.failed else ofi_trywait(d.nic)
