# Completions for the engine, the end of a peer, control messages on their way out; part of ofi.pyx and verbs.pyx.

cdef inline comp_t* comp(dom_t* d, uint32_t kind) noexcept nogil:
    cdef comp_t* c = &d.comp[d.ctail % COMPS]
    memset(c, 0, sizeof(comp_t))
    c.kind = kind
    c.src = NO_SRC
    d.ctail += 1
    return c

cdef void lose(dom_t* d, uint32_t i) noexcept nogil:
    """A peer is gone: its posts are refused from now on, what it was sending is dropped, and its end is told once."""
    cdef peer_t* p = &d.peer[i]
    cdef comp_t* c
    st_rel32(&p.state, P_LOST)
    drain(d, i)
    if p.told:
        return
    p.told = 1
    forget_messages(d, p)
    fenced(d, i, <uint64_t>-1, FE_PEER_LOST)
    c = comp(d, C_PEER_LOST)
    c.ctx = i
    c.src = p.src
    ctl_signal(d.hello_fd)          # the fabric's thread may have something to clear away

cdef void nic_failed(dom_t* d) noexcept nogil:
    """The completion queue itself fails: nothing of this domain can be told any more."""
    cdef uint32_t i
    if not d.failed:
        d.failed = 1
        for i in range(d.npeers):   # receives that were being filled can be had back
            forget_messages(d, &d.peer[i])
        comp(d, C_NIC_DOWN)

# ---------------------------------------------------------------- slots

cdef inline head_t* slot_head(dom_t* d, uint32_t s) noexcept nogil:
    return <head_t*>(d.sbuf + <uint64_t>s * SLOT)

cdef inline void sgive(dom_t* d, uint32_t s, uint32_t peer) noexcept nogil:
    cdef peer_t* p = &d.peer[peer]
    p.slots -= 1
    if p.hello == s + 1:
        p.hello = 0
    d.sfree[d.nsfree] = s
    d.nsfree += 1

cdef void drain(dom_t* d, uint32_t i) noexcept nogil:
    """Drops what still waits to go to a peer."""
    cdef peer_t* p = &d.peer[i]
    cdef uint32_t s
    while p.ohead:
        s = p.ohead - 1
        p.ohead = d.snext[s]
        sgive(d, s, i)

# ---------------------------------------------------------------- control messages on their way out
# Each peer has a queue of its own: one that takes nothing (unreachable, stopped) holds up nobody else. The share of
# slots that a peer may have is bounded for the same reason, and fragments of messages leave room for what is internal.

cdef bint push_out(dom_t* d, uint32_t i) noexcept nogil:
    """What waits to go to a peer, in its order; whether all of it is gone."""
    cdef peer_t* p = &d.peer[i]
    cdef uint32_t s
    while p.ohead:
        s = p.ohead - 1
        p.ohead = d.snext[s]        # off the queue first: losing the peer would drop it a second time
        if not ship(d, s, i):
            d.snext[s] = p.ohead
            p.ohead = s + 1
            if d.snext[s] == 0:
                p.otail = s + 1
            return False
    return True

cdef void flush(dom_t* d) noexcept nogil:
    """Tries a few of the peers for which messages wait, in turn."""
    cdef uint32_t n = <uint32_t>min(<uint64_t>FLUSH, d.qtail - d.qhead)
    cdef uint32_t i
    while n:
        n -= 1
        i = d.queued[d.qhead % PEERS]
        d.qhead += 1
        if push_out(d, i):
            d.peer[i].queued = 0
        else:
            d.queued[d.qtail % PEERS] = i
            d.qtail += 1

cdef head_t* message(dom_t* d, uint32_t peer, uint16_t kind, uint32_t* slot) noexcept nogil:
    """A slot with its header filled in, or NULL: none is free, or the peer has its share of them."""
    cdef head_t* h
    cdef peer_t* p = &d.peer[peer]
    if p.state == P_LOST or d.nsfree == 0 or p.slots >= PEER_SLOTS:
        return NULL
    if kind == T_FRAG and (d.nsfree <= NSEND // 2 or p.slots >= PEER_SLOTS // 2):
        return NULL
    d.nsfree -= 1
    slot[0] = d.sfree[d.nsfree]
    p.slots += 1
    h = slot_head(d, slot[0])
    memset(h, 0, sizeof(head_t))
    h.magic = MAGIC
    h.version = WIRE_VERSION
    h.type = kind
    h.session = d.incarnation
    h.target = p.incarnation
    h.to_idx = p.theirs
    h.from_idx = peer
    return h

cdef void post_message(dom_t* d, uint32_t slot, uint32_t peer) noexcept nogil:
    cdef peer_t* p = &d.peer[peer]
    if p.ohead == 0 and ship(d, slot, peer):
        return
    d.snext[slot] = 0
    if p.ohead:
        d.snext[p.otail - 1] = slot + 1
    else:
        p.ohead = slot + 1
    p.otail = slot + 1
    if not p.queued:
        p.queued = 1
        d.queued[d.qtail % PEERS] = peer
        d.qtail += 1

cdef bint tell(dom_t* d, uint32_t peer, uint16_t kind, uint64_t a, uint64_t b, uint64_t c) noexcept nogil:
    cdef uint32_t s
    cdef head_t* h = message(d, peer, kind, &s)
    if h == NULL:
        return False
    h.a, h.b, h.c = a, b, c
    post_message(d, s, peer)
    return True
