# Writes, completions, sleeping; part of verbs.pyx.
#
# wr_id: kind in bits 61..63, peer in 32..47; bits 0..31 for data the place under the doorbell, for messages the slot. Which doorbell
# it was needs no bits: the completions of a reliable queue pair come in the order of its work requests, so it is the oldest.

cdef inline uint64_t wr_id(uint32_t kind, uint32_t peer, uint32_t i) noexcept nogil:
    return <uint64_t>kind << 61 | <uint64_t>peer << 32 | i

cdef bint ship(dom_t* d, uint32_t s, uint32_t peer) noexcept nogil:
    """Posts slot s; False when it cannot go now: the queue pairs are not connected yet. True: out, or dropped with its peer."""
    cdef head_t* h = slot_head(d, s)
    cdef peer_t* p = &d.peer[peer]
    if p.link.ctl == NULL and p.state != P_LOST:
        return False
    if p.link.ctl == NULL or p.link.broken or \
            vb_send(p.link.ctl, wr_id(K_SEND, peer, s), h, <uint32_t>(sizeof(head_t) + h.len), d.own.slkey, d.own.inl):
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

cdef inline bint inl(dom_t* d, uint64_t n, uint64_t lkey) noexcept nogil:
    """Whether a write goes inline: the CPU copies it then, which it cannot from a GPU's memory."""
    return n != 0 and n <= d.own.inl and not lkey & NOT_BY_CPU

cdef inline void fill(dom_t* d, int k, write_t* w) noexcept nogil:
    """Template k becomes a write."""
    cdef imp_t* m = &d.imp[w.rkey]
    vb_fill(&d.own.t, k, wr_id(K_DATA, w.peer, k), w.src, <uint32_t>w.len, <uint32_t>w.lkey, m.addr + w.dst, <uint32_t>m.key,
            w.imm, (w.flags & F_IMM) != 0, inl(d, w.len, w.lkey))

cdef inline void note(peer_t* p, uint64_t ctx, uint32_t imp, uint32_t count, uint32_t first, bint last, uint32_t times) noexcept nogil:
    """An entry of a peer's ring."""
    cdef posted_t* e = &p.link.ring[p.link.tail % RING]
    e.ctx, e.imp, e.count, e.first, e.last, e.left, e.over = ctx, imp, count, first, last, times, 0
    p.link.tail += 1

cdef inline void count_out(dom_t* d, peer_t* p, uint32_t n) noexcept nogil:
    p.out += n
    d.writes += n
    d.nposts += n

cdef int verbs_post_write(void* dom, write_t* w) noexcept nogil:
    return POST_FULL if verbs_post_many(dom, w, 1) == 0 else w.rc

cdef int verbs_post_many(void* dom, write_t* w, int n) noexcept nogil:
    """Neighbours to one peer go under one doorbell. Each is an entry of its own, since it has its own ctx, and the completion
    of the last ends them all."""
    cdef dom_t* d = <dom_t*>dom
    cdef int at = 0, k, rc
    cdef uint32_t room
    while at < n:
        w[at].rc = check_write(d, &w[at])
        if w[at].rc:
            at += 1
            continue
        room = min(space(d, &d.peer[w[at].peer]), d.own.chain)
        if not room:
            w[at].rc = POST_FULL
            return at
        k = 0
        while at + k < n and <uint32_t>k < room and w[at + k].peer == w[at].peer and (k == 0 or check_write(d, &w[at + k]) == 0):
            fill(d, k, &w[at + k])
            k += 1
        rc = ring_each(d, &w[at], k)
        if rc:
            w[at].rc = rc
            at += 1
        else:
            at += k
    return n

cdef int ring_each(dom_t* d, write_t* w, int n) noexcept nogil:
    """The first n templates go out, each as an entry of its own."""
    cdef peer_t* p = &d.peer[w.peer]
    cdef int i
    d.own.doorbells += 1
    if vb_ring(p.link.data, &d.own.t, n):
        broke(d, w.peer)
        return -FE_PEER_LOST
    for i in range(n):
        note(p, w[i].ctx, <uint32_t>w[i].rkey, 1, i, i == n - 1, 1)
        d.imp[w[i].rkey].out += 1
        w[i].rc = POST_QUEUED
    count_out(d, p, n)
    return 0

cdef inline int kind_of(const void* a, uint32_t wide) noexcept nogil:
    return 0 if a == NULL else 2 if wide else 1

cdef int verbs_post_pages(void* dom, pages_t* g) noexcept nogil:
    """Chains of pages, each under one doorbell with one completion."""
    cdef dom_t* d = <dom_t*>dom
    cdef vb_pages* t = &d.own.pages
    cdef peer_t* p
    cdef imp_t* m
    cdef write_t w
    cdef uint32_t n, room, bells
    cdef int rc
    w.peer, w.rkey, w.len, w.dst = g.peer, g.rkey, g.len, 0
    rc = check_write(d, &w)
    if rc:
        return rc
    p, m = &d.peer[g.peer], &d.imp[g.rkey]
    room = <uint32_t>min(<uint64_t>space(d, p), g.end - g.at)
    if room == 0:
        return POST_FULL
    vb_pages_begin(t, d.own.chain, wr_id(K_DATA, g.peer, 0), <uint32_t>g.len, <uint32_t>g.lkey, <uint32_t>m.key, g.imm,
                   (g.flags & F_IMM) != 0, inl(d, g.len, g.lkey))
    t.src, t.sstride, t.base, t.dst, t.dstride, t.top = g.src, g.sstride, m.addr, g.dst, g.dstride, m.len - g.len
    t.si, t.di, t.kinds = g.si, g.di, 3 * kind_of(g.si, g.swide) + kind_of(g.di, g.dwide)
    n = vb_pages_post(p.link.data, t, g.at, room)
    bells = (n - t.rest) // d.own.chain
    if bells:
        note(p, g.ctx, <uint32_t>g.rkey, d.own.chain, 0, True, bells)
    if t.rest:
        note(p, g.ctx, <uint32_t>g.rkey, t.rest, 0, True, 1)
    d.own.doorbells += bells + (t.rest != 0)
    m.out += n
    count_out(d, p, n)
    g.at += n
    if t.stop == 2:
        broke(d, g.peer)
        return -FE_PEER_LOST
    return -FE_REMOTE_RANGE if t.stop else POST_QUEUED

# ---------------------------------------------------------------- receives

cdef void repost(dom_t* d, uint32_t r) noexcept nogil:
    if vb_recv(d.own.srq, wr_id(K_RECV, 0, r), d.rbuf + <uint64_t>r * SLOT, SLOT, d.own.rlkey):
        d.unposted[d.nunposted] = r
        d.nunposted += 1

cdef void refill(dom_t* d) noexcept nogil:
    """Keeps the empty receives up, a batch at a time. The device says when it runs low of them, which no count here can: what
    it has used is known only when it is polled."""
    cdef int taken
    while d.own.imms_posted + BATCH <= d.own.imms:
        taken = vb_recv_empty(d.own.isrq, &d.own.t, wr_id(K_IMM, 0, 0), BATCH)
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

cdef void over(dom_t* d, posted_t* e, uint32_t peer, uint32_t good, uint32_t bad, int status) noexcept nogil:
    """Work requests of an entry have ended, each told once: `good` were carried out, `bad` failed."""
    cdef comp_t* c = &d.comp[(d.ctail - 1) % COMPS]
    if good and d.ctail > d.chead and c.kind == C_DONE and c.ctx == e.ctx:
        c.count += good                 # with what was just told of the same ctx
    elif good:
        c = comp(d, C_DONE)
        c.ctx, c.count = e.ctx, good
    if bad:
        c = comp(d, C_ERROR)
        c.ctx, c.count, c.status, c.vendor = e.ctx, bad, status_of(status), status
    writes_over(d, peer, e.imp, good + bad)

cdef inline void bell_over(peer_t* p, posted_t* e, uint32_t n) noexcept nogil:
    e.over = 0
    e.left -= n
    if e.left == 0:
        p.link.head += 1

cdef void data_done(dom_t* d, uint32_t i, uint32_t bells) noexcept nogil:
    """All that stood under the oldest doorbells is carried out."""
    cdef peer_t* p = &d.peer[i]
    cdef posted_t* e
    cdef uint32_t n
    while bells and p.link.head < p.link.tail:
        e = &p.link.ring[p.link.head % RING]
        n = min(bells, e.left)
        over(d, e, i, n * e.count, 0, 0)
        if e.last:
            bells -= n
        bell_over(p, e, n)

cdef void data_failed(dom_t* d, uint32_t i, uint32_t k, int status) noexcept nogil:
    """Work request k under the oldest doorbell failed, or was flushed after that. Those before it were carried out, but for
    flushed ones that were never told of, which the first failure of the queue pair stands before."""
    cdef peer_t* p = &d.peer[i]
    cdef posted_t* e
    cdef uint32_t good
    while p.link.head < p.link.tail:
        e = &p.link.ring[p.link.head % RING]
        good = 0 if p.link.failed else min(e.count, k - min(k, e.first))
        if not e.over:
            over(d, e, i, good, e.count - good, status)
            e.over = 1
        if k < e.first + e.count:
            if k + 1 == e.first + e.count:
                bell_over(p, e, 1)      # its last
            break
        bell_over(p, e, 1)
    p.link.failed = 1
    broke(d, i)

cdef void broke(dom_t* d, uint32_t i) noexcept nogil:
    """A queue pair is in its error state: what is posted comes back flushed, each once."""
    d.peer[i].link.broken = 1
    if d.peer[i].state != P_LOST:
        lose(d, i)

cdef inline void some_sent(dom_t* d, ibv_wc* c, int n) noexcept nogil:
    """Completions of sends. Those of full chains to one peer are all alike, and are counted before they are told."""
    cdef int k = 0, same
    cdef uint32_t kind, i
    while k < n:
        kind, i = <uint32_t>(c[k].wr_id >> 61), <uint32_t>(c[k].wr_id >> 32) & 0xffff
        same = 1
        if kind == K_DATA and c[k].status == IBV_WC_SUCCESS:
            same = vb_alike(&c[k], &c[n])
            data_done(d, i, same)
        elif kind == K_DATA:
            data_failed(d, i, <uint32_t>c[k].wr_id, c[k].status)
        elif kind == K_SEND:
            d.peer[i].link.sends -= 1
            sgive(d, <uint32_t>c[k].wr_id, i)
            if c[k].status != IBV_WC_SUCCESS:
                broke(d, i)
        k += same

cdef inline void one_received(dom_t* d, ibv_wc* c) noexcept nogil:
    cdef uint32_t kind = <uint32_t>(c.wr_id >> 61), who
    cdef comp_t* e
    if kind == K_IMM:
        d.own.imms_posted -= 1
        if c.status == IBV_WC_SUCCESS and c.wc_flags & IBV_WC_WITH_IMM:
            d.arrivals += 1
            who = d.own.by_qpn[c.qp_num & (QPNS - 1)]
            e = comp(d, C_IMM)
            e.imm, e.count = vb_imm(c), 1
            if who:
                e.src = d.peer[who - 1].src
    elif kind == K_RECV:
        if c.status == IBV_WC_SUCCESS:
            heard(d, <head_t*>(d.rbuf + <uint64_t><uint32_t>c.wr_id * SLOT), c.byte_len)
        repost(d, <uint32_t>c.wr_id)

cdef inline bint progress(dom_t* d) noexcept nogil:
    """One turn; whether a queue may have more than was taken from it."""
    cdef ibv_wc c[VB_POLL]
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
        k = vb_poll(d.own.scq, c)
        if k < 0:
            nic_failed(d)
        some_sent(d, c, k)
        more = k == VB_POLL
        k = vb_poll(d.own.rcq, c)
        if k < 0:
            nic_failed(d)
        for i in range(k):
            one_received(d, &c[i])
        more = more or k == VB_POLL
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
