# Messages of the application: a rendezvous, so that nobody sends what has no receive; part of ofi.pyx and verbs.pyx.

cdef void drop_message(dom_t* d, peer_t* p) noexcept nogil:
    """A message from a peer that will not come: the receive that it has goes back to the head of the pool."""
    if p.rx == RX_FILLING:
        d.rfilling -= 1
        d.rhead -= 1
        d.recv[d.rhead % RECVS].buf = p.rx_buf
        d.recv[d.rhead % RECVS].len = p.rx_room
        d.recv[d.rhead % RECVS].ctx = p.rx_ctx
    elif p.rx == RX_WAITS:
        d.rwait -= 1
    p.rx = RX_NONE

cdef void forget_messages(dom_t* d, peer_t* p) noexcept nogil:
    """The peer is gone."""
    drop_message(d, p)
    d.rack -= p.rx_ack + p.fence_due
    p.rx_ack = p.fence_due = 0
    p.tx = TX_IDLE
    p.rx_more = 0

cdef void asked(dom_t* d, uint32_t i, uint64_t total, uint64_t seq) noexcept nogil:
    """A peer has a message of so many bytes. Where the provider keeps no order it may ask for its next before the last
    fragment of this one is here; and a message may be taken back before it was asked for."""
    cdef peer_t* p = &d.peer[i]
    if seq <= p.rx_seq:
        return
    p.rx_seq = seq
    if p.rx == RX_FILLING:
        p.rx_more, p.rx_next = 1, total
    elif p.rx == RX_NONE:
        p.rx = RX_WAITS
        p.rx_total = total
        d.rwait += 1
        grant(d, i)

cdef void taken_back(dom_t* d, uint32_t i, uint64_t seq) noexcept nogil:
    """A peer takes a message back of which it has sent no fragment yet."""
    cdef peer_t* p = &d.peer[i]
    if seq < p.rx_seq:
        return
    if seq > p.rx_seq:              # it comes later, and is dropped then
        p.rx_seq = seq
    elif p.rx_more:
        p.rx_more = 0
    elif p.rx == RX_WAITS or p.rx == RX_FILLING and p.rx_have == 0:
        drop_message(d, p)
    if not p.rx_ack:
        p.rx_ack = 1
        d.rack += 1
    confirm(d, i)
    if d.rwait:
        grant_all(d)

cdef void confirm(dom_t* d, uint32_t i) noexcept nogil:
    cdef peer_t* p = &d.peer[i]
    if p.rx_ack and tell(d, i, T_UNRTS_ACK, 0, p.rx_seq, 0) and p.rx_ack:   # telling it may lose it
        p.rx_ack = 0
        d.rack -= 1
    if p.fence_due and tell(d, i, T_FENCED, 0, p.fence_seen, 0) and p.fence_due:
        p.fence_due = 0
        d.rack -= 1

cdef void confirm_all(dom_t* d) noexcept nogil:
    cdef uint32_t i
    for i in range(d.npeers):
        if d.rack == 0:
            return
        confirm(d, i)

cdef int ctl_fence(void* dom, uint32_t peer, uint64_t ctx) noexcept nogil:
    cdef dom_t* d = <dom_t*>dom
    cdef peer_t* p
    if d.down or d.failed:
        return -FE_NIC
    if peer >= d.npeers or d.peer[peer].state != P_UP:
        return -FE_PEER_LOST
    p = &d.peer[peer]
    if d.nfences == FENCES or not tell(d, peer, T_FENCE, 0, p.fences + 1, 0):
        return POST_FULL
    if p.state != P_UP:             # lost by that very message
        return -FE_PEER_LOST
    p.fences += 1
    d.fence[d.nfences].ctx, d.fence[d.nfences].number, d.fence[d.nfences].peer = ctx, p.fences, peer
    if d.nfences == 0:
        d.fence_told = now_ns()
    d.nfences += 1
    return POST_QUEUED

cdef void fence_again(dom_t* d) noexcept nogil:
    """Asks again whom we wait for: some providers notice the death of a peer only when something is sent to it."""
    cdef uint32_t k = 0, left
    cdef uint64_t now = now_ns()
    if now - d.fence_told < FENCE_AGAIN:
        return
    d.fence_told = now
    while k < d.nfences:
        left = d.nfences
        if d.fence[k].number == d.peer[d.fence[k].peer].fences:    # once a peer: for its last one
            tell(d, d.fence[k].peer, T_FENCE, 0, d.fence[k].number, 0)
        if d.nfences == left:           # else the peer was lost by that, and others have moved
            k += 1

cdef void fenced(dom_t* d, uint32_t peer, uint64_t number, int32_t status) noexcept nogil:
    """The fences of a peer up to `number` are answered."""
    cdef uint32_t k = 0
    cdef comp_t* c
    while k < d.nfences:
        if d.fence[k].peer != peer or d.fence[k].number > number:
            k += 1
            continue
        c = comp(d, C_ERROR if status else C_DONE)
        c.ctx, c.count, c.status = d.fence[k].ctx, 1, status
        d.nfences -= 1
        d.fence[k] = d.fence[d.nfences]

cdef bint take_recv(dom_t* d, peer_t* p) noexcept nogil:
    """The oldest posted receive that is long enough."""
    cdef uint64_t i
    cdef recv_t x
    for i in range(d.rhead, d.rtail):
        if d.recv[i % RECVS].len >= p.rx_total:
            x = d.recv[i % RECVS]
            while i > d.rhead:
                d.recv[i % RECVS] = d.recv[(i - 1) % RECVS]
                i -= 1
            d.rhead += 1
            p.rx_buf, p.rx_ctx, p.rx_room = x.buf, x.ctx, x.len
            return True
    return False

cdef void grant(dom_t* d, uint32_t i) noexcept nogil:
    cdef peer_t* p = &d.peer[i]
    if p.rx != RX_WAITS or d.nsfree == 0 or p.slots >= PEER_SLOTS:
        return
    if d.longest and p.rx_total > d.longest:
        p.rx = RX_NONE
        d.rwait -= 1
        tell(d, i, T_NAK, d.longest, p.rx_seq, 0)
    elif take_recv(d, p):
        p.rx = RX_FILLING
        p.rx_have = 0
        d.rfilling += 1
        d.rwait -= 1
        tell(d, i, T_CTS, 0, p.rx_seq, 0)

cdef void grant_all(dom_t* d) noexcept nogil:
    cdef uint32_t i
    for i in range(d.npeers):
        if d.rwait == 0:
            return
        if d.peer[i].rx == RX_WAITS:
            grant(d, i)

cdef void fragment(dom_t* d, uint32_t i, head_t* h) noexcept nogil:
    """A part of a message, in any order; a message is there when all of its bytes are."""
    cdef peer_t* p = &d.peer[i]
    cdef comp_t* c
    if p.rx != RX_FILLING or h.a > p.rx_total or h.len > p.rx_total - h.a:
        return
    memcpy(<uint8_t*>p.rx_buf + h.a, <uint8_t*>h + sizeof(head_t), h.len)
    p.rx_have += h.len
    if p.rx_have < p.rx_total:
        return
    p.rx = RX_NONE
    d.rfilling -= 1
    c = comp(d, C_RECV)
    c.ctx = p.rx_ctx
    c.len = p.rx_total
    c.src = p.src
    if p.rx_more:
        p.rx_more = 0
        p.rx = RX_WAITS
        p.rx_total = p.rx_next
        d.rwait += 1
        grant(d, i)

cdef int ctl_post_send(void* dom, send_t* s) noexcept nogil:
    """`at` 0: nothing was said; 1: asked; above: 1 + bytes out."""
    cdef dom_t* d = <dom_t*>dom
    cdef peer_t* p
    cdef head_t* h
    cdef uint32_t slot
    cdef uint64_t n
    if d.down or d.failed:
        return -FE_NIC
    if s.peer >= d.npeers or d.peer[s.peer].state != P_UP:
        return -FE_PEER_LOST
    p = &d.peer[s.peer]
    if s.at == 0:
        if p.tx != TX_IDLE or not tell(d, s.peer, T_RTS, s.len, p.tx_seq + 1, 0):
            return POST_FULL
        p.tx_seq += 1
        if p.state != P_UP:         # lost by that very message
            return -FE_PEER_LOST
        p.tx = TX_ASKED
        s.at = 1
        return POST_FULL
    if p.tx == TX_TOO_LONG:
        p.tx = TX_IDLE
        s.at = 0
        return -FE_TOO_LONG
    if p.tx != TX_GRANTED:
        return POST_FULL
    while True:
        h = message(d, s.peer, T_FRAG, &slot)
        if h == NULL:
            return POST_FULL if p.state == P_UP else -FE_PEER_LOST
        n = min(<uint64_t>(SLOT - sizeof(head_t)), s.len - (s.at - 1))
        h.a = s.at - 1
        h.len = <uint32_t>n
        memcpy(h + 1, <const uint8_t*>s.buf + (s.at - 1), n)
        post_message(d, slot, s.peer)
        s.at += n
        if s.at - 1 >= s.len:
            break
    p.tx = TX_IDLE
    return POST_DONE

cdef int ctl_post_recv(void* dom, void* buf, uint64_t n, uint64_t lkey, uint64_t ctx) noexcept nogil:
    cdef dom_t* d = <dom_t*>dom
    cdef recv_t* r
    if d.rtail - d.rhead + d.rfilling >= RECVS - 1:      # those being filled may have to come back
        return POST_FULL
    r = &d.recv[d.rtail % RECVS]
    r.buf, r.len, r.ctx = buf, n, ctx
    d.rtail += 1
    if n > d.longest:
        d.longest = n
    if d.rwait:
        grant_all(d)
    return POST_QUEUED

cdef int ctl_cancel_recv(void* dom, uint64_t ctx, uint64_t longest) noexcept nogil:
    cdef dom_t* d = <dom_t*>dom
    cdef uint64_t i = d.rhead
    cdef int found
    while i < d.rtail and d.recv[i % RECVS].ctx != ctx:
        i += 1
    found = i < d.rtail
    if found:
        while i > d.rhead:
            d.recv[i % RECVS] = d.recv[(i - 1) % RECVS]
            i -= 1
        d.rhead += 1
    d.longest = longest
    if d.rwait:                     # who waits with one that is too long now is told so
        grant_all(d)
    return found

cdef int ctl_cancel_send(void* dom, send_t* s) noexcept nogil:
    cdef dom_t* d = <dom_t*>dom
    cdef peer_t* p
    if s.at > 1:
        return 0                    # fragments are out
    if s.at == 1 and not d.down and not d.failed and s.peer < d.npeers and d.peer[s.peer].state == P_UP:
        p = &d.peer[s.peer]
        if (p.tx == TX_ASKED or p.tx == TX_GRANTED) and tell(d, s.peer, T_UNRTS, 0, p.tx_seq, 0):
            p.tx = TX_TAKEN_BACK
        if p.tx != TX_VOID and p.tx != TX_TOO_LONG and p.state == P_UP:
            return 0
        p.tx = TX_IDLE
    s.at = 0
    return 1

cdef uint64_t ctl_recv_len(void* dom, uint32_t peer) noexcept nogil:
    cdef dom_t* d = <dom_t*>dom
    return d.peer[peer].recv_len if peer < d.npeers else 0
