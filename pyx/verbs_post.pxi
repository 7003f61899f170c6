# Writes, completions, sleeping; part of verbs.pyx.
#
# wr_id: kind in bits 61..63, peer in 32..47, then for data the place in the peer's ring (bits 8..31) and the place in the chain
# (0..7), for messages the slot.

cdef inline uint64_t wr_id(uint32_t kind, uint32_t peer, uint32_t place, uint32_t i) noexcept nogil:
    return <uint64_t>kind << 61 | <uint64_t>peer << 32 | <uint64_t>place << 8 | i

cdef bint ship(dom_t* d, uint32_t s, uint32_t peer) noexcept nogil:
    """Posts slot s; False when it cannot go now: the queue pairs are not connected yet. True: out, or dropped with its peer."""
    cdef head_t* h = slot_head(d, s)
    cdef peer_t* p = &d.peer[peer]
    if p.link.ctl == NULL and p.state != P_LOST:
        return False
    if p.link.ctl == NULL or p.link.broken or \
            vb_send(p.link.ctl, wr_id(K_SEND, peer, s, 0), h, <uint32_t>(sizeof(head_t) + h.len), d.own.slkey, d.own.inl):
        sgive(d, s, peer)
        if p.state != P_LOST:
            lose(d, peer)
        return True
    p.link.sends += 1
    return True

cdef inline int check_write(dom_t* d, write_t* w) noexcept nogil:
    cdef imp_t* m
    if d.down or d.failed:
        return -FE_NIC
    if w.peer >= d.npeers or d.peer[w.peer].state != P_UP or d.peer[w.peer].link.broken:
        return -FE_PEER_LOST
    if w.rkey >= d.nimp:
        return -FE_REMOTE_KEY
    m = &d.imp[w.rkey]
    if not m.used or m.dead or m.peer != w.peer:
        return -FE_REMOTE_KEY
    if w.dst > m.len or w.len > m.len - w.dst:
        return -FE_REMOTE_RANGE
    return 0

cdef inline uint32_t space(dom_t* d, peer_t* p) noexcept nogil:
    """Work requests that may be posted to a peer now; every one has room for its completion, come what may."""
    if p.link.tail - p.link.head >= RING or p.out >= d.own.peer_limit or d.writes >= d.own.limit:
        return 0
    return <uint32_t>min(d.own.peer_limit - p.out, d.own.limit - d.writes)

cdef inline int ring_bell_(dom_t* d, uint32_t peer, uint64_t ctx, uint32_t imp, int n) noexcept nogil:
    """The first n templates go to a peer as one entry of its ring."""
    cdef peer_t* p = &d.peer[peer]
    cdef posted_t* e = &p.link.ring[p.link.tail % RING]
    e.ctx, e.imp, e.count, e.over = ctx, imp, n, 0
    d.own.doorbells += 1
    if vb_ring(p.link.data, &d.own.t, n):
        lose(d, peer)
        return -FE_PEER_LOST
    p.link.tail += 1
    p.out += n
    d.imp[imp].out += n
    d.writes += n
    d.nposts += n
    return POST_QUEUED

cdef inline bint inl(dom_t* d, uint64_t n, uint64_t lkey) noexcept nogil:
    """Whether a write goes inline: the CPU copies it then, which it cannot from a GPU's memory."""
    return n != 0 and n <= d.own.inl and not lkey & NOT_BY_CPU

cdef int verbs_post_write(void* dom, write_t* w) noexcept nogil:
    cdef dom_t* d = <dom_t*>dom
    cdef peer_t* p
    cdef imp_t* m
    cdef int rc = check_write(d, w)
    if rc:
        return rc
    p, m = &d.peer[w.peer], &d.imp[w.rkey]
    if not space(d, p):
        return POST_FULL
    vb_fill(&d.own.t, 0, wr_id(K_DATA, w.peer, <uint32_t>(p.link.tail % RING), 0), w.src, <uint32_t>w.len, <uint32_t>w.lkey,
            m.addr + w.dst, <uint32_t>m.key, w.imm, (w.flags & F_IMM) != 0, inl(d, w.len, w.lkey))
    return ring_bell_(d, w.peer, w.ctx, <uint32_t>w.rkey, 1)

cdef int verbs_post_many(void* dom, write_t* w, int n) noexcept nogil:
    """Targets of a scatter. Neighbours to one peer go under one doorbell: each has its own place in the ring, since it has its
    own ctx, and the completion of the last ends them all."""
    cdef dom_t* d = <dom_t*>dom
    cdef peer_t* p
    cdef imp_t* m
    cdef int at = 0, k, rc
    cdef uint32_t room, slot
    while at < n:
        rc = check_write(d, &w[at])
        if rc:
            w[at].rc = rc
            at += 1
            continue
        p = &d.peer[w[at].peer]
        room = min(space(d, p), <uint32_t>(RING - (p.link.tail - p.link.head)), d.own.chain)
        if not room:
            w[at].rc = POST_FULL
            return at
        k = 0
        while at + k < n and <uint32_t>k < room and w[at + k].peer == w[at].peer and (k == 0 or check_write(d, &w[at + k]) == 0):
            m = &d.imp[w[at + k].rkey]
            slot = <uint32_t>((p.link.tail + k) % RING)
            vb_fill(&d.own.t, k, wr_id(K_DATA, w[at].peer, slot, 0), w[at + k].src, <uint32_t>w[at + k].len,
                    <uint32_t>w[at + k].lkey, m.addr + w[at + k].dst, <uint32_t>m.key, w[at + k].imm,
                    (w[at + k].flags & F_IMM) != 0, inl(d, w[at + k].len, w[at + k].lkey))
            k += 1
        rc = ring_each(d, &w[at], k)
        if rc:
            w[at].rc = rc
            at += 1
        else:
            at += k
    return n

cdef int ring_each(dom_t* d, write_t* w, int n) noexcept nogil:
    """The first n templates go to a peer under one doorbell, each as an entry of its own."""
    cdef peer_t* p = &d.peer[w.peer]
    cdef posted_t* e
    cdef int i
    d.own.doorbells += 1
    if vb_ring(p.link.data, &d.own.t, n):
        lose(d, w.peer)
        return -FE_PEER_LOST
    for i in range(n):
        e = &p.link.ring[p.link.tail % RING]
        e.ctx, e.imp, e.count, e.over = w[i].ctx, <uint32_t>w[i].rkey, 1, 0
        p.link.tail += 1
        d.imp[e.imp].out += 1
        w[i].rc = POST_QUEUED
    p.out += n
    d.writes += n
    d.nposts += n
    return 0

cdef inline uint64_t index_of(const void* a, uint32_t wide, uint64_t i) noexcept nogil:
    if a == NULL:
        return i
    return (<uint64_t*>a)[i] if wide else (<uint32_t*>a)[i]

cdef int verbs_post_pages(void* dom, pages_t* g) noexcept nogil:
    """Chains of pages, each under one doorbell with one completion."""
    cdef dom_t* d = <dom_t*>dom
    cdef uint64_t start = g.at, at, src, dst
    cdef peer_t* p
    cdef imp_t* m
    cdef write_t w
    cdef uint32_t n, k
    cdef int rc
    w.peer, w.rkey, w.len, w.dst = g.peer, g.rkey, g.len, 0
    rc = check_write(d, &w)
    if rc:
        return rc
    p, m = &d.peer[g.peer], &d.imp[g.rkey]
    while g.at < g.end:
        n = <uint32_t>min(<uint64_t>min(space(d, p), d.own.chain), g.end - g.at)
        if n == 0:
            return POST_QUEUED if g.at > start else POST_FULL
        at = g.at
        for k in range(n):
            src = g.src + index_of(g.si, g.swide, at + k) * g.sstride
            dst = g.dst + index_of(g.di, g.dwide, at + k) * g.dstride
            if dst > m.len or g.len > m.len - dst:
                if k == 0:
                    return -FE_REMOTE_RANGE
                n = k                   # those before it first
                break
            vb_fill(&d.own.t, k, wr_id(K_DATA, g.peer, <uint32_t>(p.link.tail % RING), k), src, <uint32_t>g.len, <uint32_t>g.lkey,
                    m.addr + dst, <uint32_t>m.key, g.imm, (g.flags & F_IMM) != 0, inl(d, g.len, g.lkey))
        rc = ring_bell_(d, g.peer, g.ctx, <uint32_t>g.rkey, n)
        if rc < 0:
            return rc
        g.at += n
    return POST_QUEUED

# ---------------------------------------------------------------- receives

cdef void repost(dom_t* d, uint32_t r) noexcept nogil:
    if vb_recv(d.own.srq, wr_id(K_RECV, 0, r, 0), d.rbuf + <uint64_t>r * SLOT, SLOT, d.own.rlkey):
        d.unposted[d.nunposted] = r
        d.nunposted += 1

cdef void refill(dom_t* d) noexcept nogil:
    """Keeps the empty receives up, a batch at a time. The device says when it runs low of them, which no count here can: what
    it has used is known only when it is polled."""
    cdef int taken
    while d.own.imms_posted + BATCH <= d.own.imms:
        taken = vb_recv_empty(d.own.isrq, &d.own.t, wr_id(K_IMM, 0, 0, 0), BATCH)
        d.own.imms_posted += <uint32_t>taken
        if taken < BATCH:
            return

# ---------------------------------------------------------------- completions

cdef int32_t status_of(int status) noexcept nogil:
    """FE_ of a work completion's status; the exception's text has the status itself."""
    if status == IBV_WC_REM_ACCESS_ERR or status == IBV_WC_REM_INV_REQ_ERR:
        return FE_REMOTE_KEY
    if status == IBV_WC_LOC_PROT_ERR or status == IBV_WC_LOC_LEN_ERR:
        return FE_LOCAL_KEY
    if status == IBV_WC_RETRY_EXC_ERR or status == IBV_WC_WR_FLUSH_ERR or status == IBV_WC_RNR_RETRY_EXC_ERR or \
            status == IBV_WC_REM_ABORT_ERR or status == IBV_WC_RESP_TIMEOUT_ERR:
        return FE_PEER_LOST
    return FE_PROVIDER

cdef void chain_over(dom_t* d, posted_t* e, uint32_t peer, uint32_t good, int status) noexcept nogil:
    """A chain has ended: `good` of its work requests were carried out, the rest failed. Told once."""
    cdef comp_t* c
    cdef uint32_t k, imp = e.imp, count = e.count
    e.over = 1
    if good:
        c = comp(d, C_DONE)
        c.ctx, c.count = e.ctx, good
    if good < count:
        c = comp(d, C_ERROR)
        c.ctx, c.count, c.status, c.vendor = e.ctx, count - good, status_of(status), status
    for k in range(count):
        write_over(d, peer, imp)

cdef void data_over(dom_t* d, vb_comp* c) noexcept nogil:
    """Work requests of a queue pair end in their order: what stands before this one in the ring is done too."""
    cdef uint32_t i = <uint32_t>(c.id >> 32) & 0xffff, place = <uint32_t>(c.id >> 8) & 0xffffff
    cdef peer_t* p = &d.peer[i]
    cdef posted_t* e
    cdef bint here = False
    if place >= RING or p.link.ring == NULL:
        return
    while p.link.head < p.link.tail and not here:
        e = &p.link.ring[p.link.head % RING]
        here = p.link.head % RING == place
        if here and c.status != IBV_WC_SUCCESS:
            if not e.over:              # the first of the chain that failed; those after it are flushed, and say nothing new
                chain_over(d, e, i, min(<uint32_t>(c.id & 0xff), e.count), c.status)
            if (c.id & 0xff) + 1 < e.count:
                break                   # its last comes yet
        elif not e.over:
            chain_over(d, e, i, e.count, 0)
        p.link.head += 1
    if c.status != IBV_WC_SUCCESS:
        broke(d, i)

cdef void broke(dom_t* d, uint32_t i) noexcept nogil:
    """A queue pair is in its error state: what is posted comes back flushed, each once."""
    d.peer[i].link.broken = 1
    if d.peer[i].state != P_LOST:
        lose(d, i)

cdef inline void one_sent(dom_t* d, vb_comp* c) noexcept nogil:
    cdef uint32_t kind = <uint32_t>(c.id >> 61), i = <uint32_t>(c.id >> 32) & 0xffff
    if kind == K_DATA:
        data_over(d, c)
    elif kind == K_SEND:
        d.peer[i].link.sends -= 1
        sgive(d, <uint32_t>(c.id >> 8) & 0xffffff, i)
        if c.status != IBV_WC_SUCCESS:
            broke(d, i)

cdef inline void one_received(dom_t* d, vb_comp* c) noexcept nogil:
    cdef uint32_t kind = <uint32_t>(c.id >> 61), slot, who
    cdef comp_t* e
    if kind == K_IMM:
        d.own.imms_posted -= 1
        if c.status == IBV_WC_SUCCESS and c.has_imm:
            d.arrivals += 1
            who = d.own.by_qpn[c.qpn & (QPNS - 1)]
            e = comp(d, C_IMM)
            e.imm, e.count = c.imm, 1
            if who:
                e.src = d.peer[who - 1].src
        return
    if kind == K_RECV:
        slot = <uint32_t>(c.id >> 8) & 0xffffff
        if c.status == IBV_WC_SUCCESS:
            heard(d, <head_t*>(d.rbuf + <uint64_t>slot * SLOT), c.len)
        repost(d, slot)

cdef inline bint progress(dom_t* d) noexcept nogil:
    """One turn; whether a queue may have more than was taken from it."""
    cdef vb_comp c[16]
    cdef uint32_t left
    cdef bint more = False
    cdef int i, k
    if d.qhead < d.qtail:
        flush(d)
    while d.nunposted:
        left = d.nunposted
        d.nunposted -= 1
        repost(d, d.unposted[d.nunposted])
        if d.nunposted == left:
            break
    if d.nfences:
        fence_again(d)
    if d.nsfree:
        if d.rack:
            confirm_all(d)
        if d.rwait:
            grant_all(d)
    if d.ctail - d.chead < COMPS // 2:
        k = vb_poll(d.own.scq, c, 16)
        if k < 0:
            nic_failed(d)
        for i in range(k):
            one_sent(d, &c[i])
        more = k == 16
        k = vb_poll(d.own.rcq, c, 16)
        if k < 0:
            nic_failed(d)
        for i in range(k):
            one_received(d, &c[i])
        more = more or k == 16
        if d.own.imms_posted + BATCH <= d.own.imms:
            refill(d)
    return more

cdef int verbs_poll(void* dom, comp_t* out, int most) noexcept nogil:
    cdef dom_t* d = <dom_t*>dom
    cdef int n = 0
    if not d.down and not d.failed:
        progress(d)
    while n < most and d.chead < d.ctail:
        out[n] = d.comp[d.chead % COMPS]
        d.chead += 1
        n += 1
    return n

cdef int verbs_arm(void* dom) noexcept nogil:
    cdef dom_t* d = <dom_t*>dom
    cdef uint64_t before
    if d.down:
        return 0
    if d.chead < d.ctail or d.nunposted:
        return 1
    if d.failed:
        return 0
    vb_drain(d.own.channel)
    if vb_notify(d.own.scq) or vb_notify(d.own.rcq):
        return 1
    before = d.arrivals
    while progress(d):                  # what came before the request to be told does not ring
        if d.chead < d.ctail or d.arrivals != before:
            return 1
    return d.chead < d.ctail or d.arrivals != before
