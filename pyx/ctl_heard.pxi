# Control messages that arrive, and the life of regions and imports; part of ofi.pyx and verbs.pyx.

cdef void heard(dom_t* d, head_t* h, uint64_t n) noexcept nogil:
    """One control message. Nothing in it is trusted; what does not fit is dropped and counted."""
    cdef uint32_t i
    d.arrivals += 1
    if n < sizeof(head_t) or h.magic != MAGIC or h.len > n - sizeof(head_t):
        d.garbage += 1
        return
    if h.type == T_HELLO:           # its NetAddr becomes a number: Python's work
        if d.htail - d.hhead < HELLOS:          # else it comes again
            memcpy(d.hello + (d.htail % HELLOS) * SLOT, h, sizeof(head_t) + h.len)
            st_rel64(&d.htail, d.htail + 1)
            ctl_signal(d.hello_fd)
        return
    i = h.to_idx
    if i >= d.npeers or h.target != d.incarnation or (h.version != WIRE_VERSION and h.type != T_REFUSED):
        d.garbage += 1
        return
    if h.type == T_REFUSED:         # by whoever lives at that address now: another incarnation, or of another version
        if d.peer[i].state == P_ASKED:
            d.peer[i].reason = <uint32_t>h.a
            st_rel32(&d.peer[i].state, P_REFUSED)
    elif d.peer[i].incarnation != h.session or d.peer[i].state == P_LOST:
        d.garbage += 1
    else:
        from_peer(d, i, h)

cdef void from_peer(dom_t* d, uint32_t i, head_t* h) noexcept nogil:
    """A message of a peer that is known and alive."""
    cdef peer_t* p = &d.peer[i]
    if h.type == T_WELCOME:
        if p.state == P_ASKED:
            p.theirs = h.from_idx
            p.number = <uint32_t>h.a
            st_rel32(&p.state, P_UP)
    elif h.type == T_IMPORT:
        p.theirs = h.from_idx
        import_asked(d, i, h)
    elif h.type == T_IMPORTED:
        if h.a == d.reply_id and not d.reply_done:
            d.reply_status = <uint32_t>h.b
            d.reply_key = h.c
            d.reply_addr = (<uint64_t*>(h + 1))[0] if h.len == 8 else 0
            st_rel32(&d.reply_done, 1)
    elif h.type == T_GONE:
        gone(d, i, h.b)
    elif h.type == T_GONE_ACK:
        let_go(d, i, h.b)
    elif h.type == T_RTS:
        p.theirs = h.from_idx
        asked(d, i, h.a, h.b)
    elif h.type == T_CTS:
        if p.tx == TX_ASKED and h.b == p.tx_seq:
            p.tx = TX_GRANTED
    elif h.type == T_NAK:
        if p.tx == TX_ASKED and h.b == p.tx_seq:
            p.tx = TX_TOO_LONG
            p.recv_len = h.a
    elif h.type == T_FRAG:
        fragment(d, i, h)
    elif h.type == T_UNRTS:
        p.theirs = h.from_idx
        taken_back(d, i, h.b)
    elif h.type == T_UNRTS_ACK:
        if p.tx == TX_TAKEN_BACK and h.b == p.tx_seq:
            p.tx = TX_VOID
    elif h.type == T_FENCE:
        p.theirs = h.from_idx
        p.fence_seen = h.b          # after all that was written before: fabrics that need fences keep order
        if not p.fence_due:
            p.fence_due = 1
            d.rack += 1
        confirm(d, i)
    elif h.type == T_FENCED:
        fenced(d, i, h.b, 0)
    elif h.type == T_BYE:
        lose(d, i)
    else:
        d.garbage += 1

# ---------------------------------------------------------------- regions, as their owner sees them

cdef pair_t* importer(dom_t* d, uint32_t slot, uint32_t peer) noexcept nogil:
    cdef uint32_t k = d.region[slot].first
    while k:
        if d.pair[k].peer == peer:
            return &d.pair[k]
        k = d.pair[k].next
    return NULL

cdef pair_t* add_importer(dom_t* d, uint32_t slot, uint32_t peer) noexcept nogil:
    """The note that a peer has imported a region, made if there is none; NULL when there is no room for more."""
    cdef pair_t* x = importer(d, slot, peer)
    cdef uint32_t k
    if x == NULL:
        k = d.pfree
        if k:
            d.pfree = d.pair[k].next
        elif d.pfresh < PAIRS:
            k = d.pfresh
            d.pfresh += 1
        else:
            return NULL
        x = &d.pair[k]
        x.peer = peer
        x.next = d.region[slot].first
        d.region[slot].first = k
    x.told = x.gone = 0
    return x

cdef void import_asked(dom_t* d, uint32_t i, head_t* h) noexcept nogil:
    """Answers whether a region is registered here, of that base and length. What has no answer now is asked again."""
    cdef uint32_t slot = <uint32_t>(h.b & (REGIONS - 1)), s
    cdef region_t* g = &d.region[slot]
    cdef head_t* a
    if not g.used or g.leaving or g.rkey != h.b:
        tell(d, i, T_IMPORTED, h.a, FE_REMOTE_KEY, 0)
        return
    if g.base != h.c or h.len != 8 or (<uint64_t*>(h + 1))[0] != g.len:
        tell(d, i, T_IMPORTED, h.a, FE_REMOTE_RANGE, 0)
        return
    if add_importer(d, slot, i) == NULL:
        tell(d, i, T_IMPORTED, h.a, FE_PROVIDER, 0)
        return
    a = message(d, i, T_IMPORTED, &s)
    if a == NULL:
        return
    a.a, a.b, a.c, a.len = h.a, 0, g.key, 8
    (<uint64_t*>(a + 1))[0] = g.addr
    post_message(d, s, i)

cdef void let_go(dom_t* d, uint32_t peer, uint64_t rkey) noexcept nogil:
    """A peer has no more writes to a region that goes: its last ones came before this word."""
    cdef uint32_t slot = <uint32_t>(rkey & (REGIONS - 1))
    cdef pair_t* x
    if d.region[slot].used and d.region[slot].rkey == rkey and d.region[slot].leaving:
        x = importer(d, slot, peer)
        if x != NULL:
            x.gone = 1

cdef uint32_t tell_gone(dom_t* d, uint64_t rkey, bint again) noexcept nogil:
    """Tells importers that a region goes, those that were not told yet or (`again`) have not answered; how many are
    left. Peers that are lost need not answer: nothing of them can arrive."""
    cdef uint32_t slot = <uint32_t>(rkey & (REGIONS - 1)), k, left = 0
    cdef pair_t* x
    d.region[slot].leaving = 1
    k = d.region[slot].first
    while k:
        x = &d.pair[k]
        if not x.gone and d.peer[x.peer].state != P_LOST:
            left += 1
            if (again or not x.told) and tell(d, x.peer, T_GONE, 0, rkey, 0):
                x.told = 1
        k = x.next
    return left

cdef void drop_importers(dom_t* d, uint32_t slot) noexcept nogil:
    cdef uint32_t k = d.region[slot].first, nxt
    while k:
        nxt = d.pair[k].next
        d.pair[k].next = d.pfree
        d.pfree = k
        k = nxt
    d.region[slot].first = 0

# ---------------------------------------------------------------- imports, as the writing side sees them

cdef uint64_t writes_out(dom_t* d, uint32_t peer, uint64_t rkey) noexcept nogil:
    cdef uint32_t i
    cdef uint64_t out = 0
    for i in range(1, d.nimp):
        if d.imp[i].peer == peer and d.imp[i].rkey == rkey:
            out += d.imp[i].out     # also of those that were released meanwhile
    return out

cdef void gone(dom_t* d, uint32_t peer, uint64_t rkey) noexcept nogil:
    """The owner takes a region back: refuse new posts; say so when none is out."""
    cdef uint32_t i
    if d.reply_rkey == rkey:
        d.reply_gone = 1
    for i in range(1, d.nimp):
        if d.imp[i].peer == peer and d.imp[i].rkey == rkey:
            d.imp[i].dead = 1
            d.imp[i].ack = d.imp[i].out != 0
    if writes_out(d, peer, rkey) == 0:
        tell(d, peer, T_GONE_ACK, 0, rkey, 0)

cdef inline void write_over(dom_t* d, uint32_t peer, uint32_t imp) noexcept nogil:
    writes_over(d, peer, imp, 1)

cdef void writes_over(dom_t* d, uint32_t peer, uint32_t imp, uint32_t n) noexcept nogil:
    """Writes have left the provider: the owner of their target may wait for that."""
    cdef imp_t* m = &d.imp[imp]
    d.peer[peer].out -= n
    d.writes -= n
    m.out -= n
    if m.ack and m.out == 0:
        m.ack = 0
        if writes_out(d, m.peer, m.rkey) == 0:
            tell(d, m.peer, T_GONE_ACK, 0, m.rkey, 0)

cdef extern from *:
    """
    #include <sys/eventfd.h>
    #include <unistd.h>
    static void ctl_signal(int fd) { uint64_t one = 1; ssize_t k = write(fd, &one, 8); (void)k; }
    """
    void ctl_signal(int) noexcept nogil
