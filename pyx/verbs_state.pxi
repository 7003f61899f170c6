# What Python sees of a domain; part of verbs.pyx.

cdef void* inside(obj, str what) except NULL:
    """The C object in a pyverbs one. Its layout is private to pyverbs, so a look is taken first whether it can be that."""
    cdef void* p
    if type(obj).__basicsize__ < 48 or not type(obj).__module__.startswith("pyverbs."):
        raise ImportError(f"this pyverbs is not laid out as expected: its {what} has {type(obj).__basicsize__} bytes")
    p = vb_inside(<void*>obj)
    if p == NULL or <uintptr_t>p & 7:
        raise ImportError(f"this pyverbs is not laid out as expected: no pointer in its {what}")
    return p


cdef class VerbsState(CtlState):
    """The C state of one verbs domain: a port of a device.

    Parameters
    ----------
    incarnation, hello_fd : as for all control fabrics.
    qp : a pyverbs QP of this device, to check the layout of pyverbs' objects with.
    scq, rcq, srq, isrq : pyverbs objects: queues of completions of sends and of receives; shared receive queues for messages and
        for immediates.
    channel : descriptor of the completion channel, not blocking.
    inl : bytes that can be sent inline. chain : work requests under one doorbell.
    limit, peer_limit : data work requests outstanding, in all and to one peer.
    imms : empty receives to keep posted.
    """
    cdef object keep

    def __cinit__(self, uint64_t incarnation, int hello_fd, qp, scq, rcq, srq, isrq, int channel, uint32_t inl, uint32_t chain,
                  uint32_t limit, uint32_t peer_limit, uint32_t imms):
        cdef dom_t* d = self.d
        cdef ibv_qp* q = <ibv_qp*>inside(qp, "QP")
        self.hello_fd = hello_fd
        if vb_qp_num(q) != qp.qp_num:
            raise ImportError("this pyverbs is not laid out as expected: another number in its QP")
        d.incarnation, d.hello_fd = incarnation, hello_fd
        d.own.scq, d.own.rcq = <ibv_cq*>inside(scq, "CQ"), <ibv_cq*>inside(rcq, "CQ")
        d.own.srq, d.own.isrq = <ibv_srq*>inside(srq, "SRQ"), <ibv_srq*>inside(isrq, "SRQ")
        for c in (<uintptr_t>vb_cq_context(d.own.scq), <uintptr_t>vb_cq_context(d.own.rcq), <uintptr_t>vb_srq_context(d.own.srq),
                  <uintptr_t>vb_srq_context(d.own.isrq)):
            if c != <uintptr_t>vb_qp_context(q):
                raise ImportError("this pyverbs is not laid out as expected: a queue of another device")
        self.keep = (scq, rcq, srq, isrq)
        if not 1 <= chain <= VB_CHAIN:
            raise ValueError(f"chain is {chain}; it must be within 1 .. {VB_CHAIN}")
        d.own.channel, d.own.inl, d.own.chain = channel, inl, chain
        d.own.limit, d.own.peer_limit, d.own.imms = min(limit, <uint32_t>WRITES), min(peer_limit, <uint32_t>PEER_WRITES), imms
        vb_prepare(&d.own.t)
        d.own.by_qpn = <uint32_t*>map_zeroed(<uint64_t>QPNS * sizeof(uint32_t))
        if d.own.by_qpn == NULL:
            raise MemoryError

    def buffers(self):
        """((address, bytes) of the buffers that control messages go out from, and come into)."""
        return (<uintptr_t>self.d.sbuf, <uint64_t>NSEND * SLOT), (<uintptr_t>self.d.rbuf, <uint64_t>NRECV * SLOT)

    def start(self, uint32_t slkey, uint32_t rlkey):
        """Posts the receives; the buffers are registered by now."""
        cdef uint32_t i
        self.d.own.slkey, self.d.own.rlkey = slkey, rlkey
        for i in range(<uint32_t>NRECV):
            repost(self.d, i)
        refill(self.d)
        if self.d.nunposted or self.d.own.imms_posted == 0:
            raise OSError(12, "ibv_post_srq_recv refuses receives")

    def __dealloc__(self):
        cdef dom_t* d = self.d
        cdef uint32_t i
        if d == NULL:
            return
        for i in range(d.npeers):
            free(d.peer[i].link.ring)
        unmap(d.own.by_qpn, <uint64_t>QPNS * sizeof(uint32_t))
        self.give_back()

    @property
    def ops(self):
        return <uintptr_t>&OPS

    def figures(self):
        """For hang dumps and tests."""
        return dict(imms_posted=self.d.own.imms_posted, imms=self.d.own.imms, low=self.d.own.low, doorbells=self.d.own.doorbells,
                    posts=self.d.nposts, writes=self.d.writes)

    def reap(self):
        """Takes in what has arrived, for the engine to see at its next poll, and posts the receives again."""
        while not self.d.down and not self.d.failed and progress(self.d) and self.d.ctail - self.d.chead < COMPS // 2:
            pass

    def ran_low(self):
        """The device has few empty receives left: those whose completions wait are posted again. How often it was so."""
        self.d.own.low += 1
        self.reap()
        return self.d.own.low

    def shut(self):
        """Polls and posts do nothing afterwards."""
        self.d.down = 1
        self.d.chead = self.d.ctail

    def nic_down(self):
        """The device or its port is gone."""
        nic_failed(self.d)

    # -- regions

    def add_region(self, uint32_t slot, uint64_t rkey, uint64_t addr, uint64_t length, uint32_t nic_rkey):
        self.region(slot, rkey, addr, length, nic_rkey, addr)

    def drop_region(self, uint64_t rkey):
        self.no_region(rkey & (REGIONS - 1))

    # -- peers

    def peer(self, bytes addr, uint64_t incarnation, uint32_t src):
        """The index of a peer, made if new; None when there is no room."""
        cdef int i = self.find(addr, incarnation)
        if i >= 0:
            return i
        if len(addr) > 512:
            raise OSError(22, f"its address has {len(addr)} bytes")
        i = self.new_peer(addr, incarnation, src)
        return None if i < 0 else i

    cdef int place(self):
        """As in all control fabrics, but for places whose queue pairs are not cleared away yet."""
        cdef uint32_t i
        for i in range(self.d.npeers):
            if self.d.peer[i].passing and self.d.peer[i].slots == 0 and self.d.peer[i].state == P_NEW and \
                    self.d.peer[i].link.ctl == NULL:
                free(self.d.peer[i].link.ring)
                return i
        if self.d.npeers == PEERS:
            return -1
        self.d.npeers += 1
        return self.d.npeers - 1

    def attach(self, uint32_t i, ctl, data):
        """Gives a peer its connected queue pairs (pyverbs QPs)."""
        cdef peer_t* p = &self.d.peer[i]
        if p.link.ring == NULL:
            p.link.ring = <posted_t*>calloc(RING, sizeof(posted_t))
            if p.link.ring == NULL:
                raise MemoryError
        p.link.head = p.link.tail = 0
        p.link.broken = p.link.failed = p.link.sends = 0
        p.link.data, p.link.ctl = <ibv_qp*>inside(data, "QP"), <ibv_qp*>inside(ctl, "QP")
        p.link.data_qpn, p.link.ctl_qpn = vb_qp_num(p.link.data), vb_qp_num(p.link.ctl)
        self.d.own.by_qpn[p.link.data_qpn & (QPNS - 1)] = i + 1

    def attached(self, uint32_t i):
        return self.d.peer[i].link.ctl != NULL

    def idle(self, uint32_t i):
        """Whether nothing is posted on the queue pairs of a peer that is lost, so that they can be destroyed."""
        cdef peer_t* p = &self.d.peer[i]
        return p.state == P_LOST and p.link.head == p.link.tail and p.link.sends == 0

    def detach(self, uint32_t i):
        """Its queue pairs are about to be destroyed."""
        cdef peer_t* p = &self.d.peer[i]
        if p.link.data != NULL:
            self.d.own.by_qpn[p.link.data_qpn & (QPNS - 1)] = 0
        p.link.data = p.link.ctl = NULL

    def lose_one(self, uint32_t i):
        if self.d.peer[i].state != P_LOST:
            lose(self.d, i)
