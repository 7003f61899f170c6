# What Python sees of peers, regions and imports; part of ofi.pyx and verbs.pyx.

cdef class CtlState:
    """What all domains that talk by control messages have. Calls are made with the progress lock held, but for those that
    say otherwise."""
    cdef dom_t* d
    cdef readonly int hello_fd

    def __cinit__(self, *args, **kw):
        cdef dom_t* d = <dom_t*>alloc_lines(sizeof(dom_t))
        cdef uint32_t i
        self.d = d
        if d == NULL:
            raise MemoryError
        d.sbuf = <uint8_t*>map_zeroed(NSEND * SLOT)
        d.rbuf = <uint8_t*>map_zeroed(NRECV * SLOT)
        d.queued = <uint32_t*>map_zeroed(PEERS * sizeof(uint32_t))
        d.peer = <peer_t*>map_zeroed(PEERS * sizeof(peer_t))
        d.imp = <imp_t*>map_zeroed(IMPORTS * sizeof(imp_t))
        d.region = <region_t*>map_zeroed(REGIONS * sizeof(region_t))
        d.pair = <pair_t*>map_zeroed(PAIRS * sizeof(pair_t))
        d.recv = <recv_t*>map_zeroed(RECVS * sizeof(recv_t))
        d.comp = <comp_t*>map_zeroed(COMPS * sizeof(comp_t))
        d.hello = <uint8_t*>map_zeroed(HELLOS * SLOT)
        d.fence = <fence_t*>map_zeroed(FENCES * sizeof(fence_t))
        if d.sbuf == NULL or d.rbuf == NULL or d.queued == NULL or d.peer == NULL or d.imp == NULL or d.region == NULL or \
                d.pair == NULL or d.recv == NULL or d.comp == NULL or d.hello == NULL or d.fence == NULL:
            raise MemoryError
        d.nimp = d.pfresh = 1
        d.rhead = d.rtail = RECVS          # room to give receives back at the head
        for i in range(<uint32_t>NSEND):
            d.sfree[i] = i
        d.nsfree = NSEND

    cdef void give_back(self):
        """Frees what is shared; the last thing that a subclass does."""
        cdef dom_t* d = self.d
        unmap(d.sbuf, NSEND * SLOT)
        unmap(d.rbuf, NRECV * SLOT)
        unmap(d.queued, PEERS * sizeof(uint32_t))
        unmap(d.peer, PEERS * sizeof(peer_t))
        unmap(d.imp, IMPORTS * sizeof(imp_t))
        unmap(d.region, REGIONS * sizeof(region_t))
        unmap(d.pair, PAIRS * sizeof(pair_t))
        unmap(d.recv, RECVS * sizeof(recv_t))
        unmap(d.comp, COMPS * sizeof(comp_t))
        unmap(d.hello, HELLOS * SLOT)
        unmap(d.fence, FENCES * sizeof(fence_t))
        free(d)
        self.d = NULL

    @property
    def dom(self):
        return <uintptr_t>self.d

    def counts(self):
        """For hang dumps and tests."""
        return dict(posts=self.d.nposts, writes=self.d.writes, slots=NSEND - self.d.nsfree, garbage=self.d.garbage,
                    queued=self.d.qtail - self.d.qhead, receives=self.d.rtail - self.d.rhead)

    def closing(self):
        self.d.closing = 1

    # -- regions

    cdef void region(self, uint32_t slot, uint64_t rkey, uint64_t base, uint64_t length, uint64_t key, uint64_t addr):
        """Makes a registration known to peers: they write to `addr` + offset with `key`."""
        cdef region_t* g = &self.d.region[slot]
        g.rkey, g.base, g.len, g.key, g.addr, g.used, g.leaving, g.first = rkey, base, length, key, addr, 1, 0, 0

    def hide_region(self, uint32_t slot):
        """A source only: no peer may import it."""
        self.d.region[slot].used = 0

    cdef void no_region(self, uint32_t slot):
        drop_importers(self.d, slot)
        self.d.region[slot].used = 0

    def gone(self, uint64_t rkey, bint again):
        """Tells the importers of a region that it goes, with `again` also those that have not answered; how many have to."""
        return tell_gone(self.d, rkey, again)

    def keep_region(self, uint64_t rkey):
        """It stays after all; the next attempt tells all importers anew."""
        cdef uint32_t k = self.d.region[rkey & (REGIONS - 1)].first
        self.d.region[rkey & (REGIONS - 1)].leaving = 0
        while k:
            self.d.pair[k].told = self.d.pair[k].gone = 0
            k = self.d.pair[k].next

    # -- peers

    cdef int find(self, bytes addr, uint64_t incarnation):
        cdef uint32_t i
        cdef peer_t* p
        for i in range(self.d.npeers):
            p = &self.d.peer[i]
            if p.used and p.state != P_LOST and p.incarnation == incarnation and p.addrlen == <uint32_t>len(addr) and \
                    memcmp(p.addr, <const char*>addr, p.addrlen) == 0:
                return i
        return -1

    cdef int place(self):
        """Where a new peer goes: for the first time, or where one was that was only ever refused; -1: nowhere."""
        cdef uint32_t i
        for i in range(self.d.npeers):
            if self.d.peer[i].passing and self.d.peer[i].slots == 0 and self.d.peer[i].state == P_NEW:
                return i
        if self.d.npeers == PEERS:
            return -1
        self.d.npeers += 1
        return self.d.npeers - 1

    cdef int new_peer(self, bytes addr, uint64_t incarnation, uint32_t src):
        """The index of a place filled in for a peer; -1 when there is no room."""
        cdef int i = self.place()
        if i >= 0:
            self.fill_peer(i, addr, incarnation, src)
        return i

    cdef void fill_peer(self, int i, bytes addr, uint64_t incarnation, uint32_t src):
        cdef peer_t* p = &self.d.peer[i]
        memset(p, 0, sizeof(peer_t))
        p.incarnation, p.src, p.addrlen = incarnation, src, <uint32_t>len(addr)
        memcpy(p.addr, <const char*>addr, len(addr))
        p.tx_seq = now_ns()             # above all that it was sent before, if it is met again
        p.used = 1

    def hello(self, uint32_t i, bytes body):
        """Says hello, unless the one before has not even left; whether one is on its way."""
        cdef uint32_t s
        cdef head_t* h
        cdef peer_t* p = &self.d.peer[i]
        p.passing = 0
        if p.state == P_NEW:
            p.state = P_ASKED
        if p.state != P_ASKED or len(body) > <Py_ssize_t>(SLOT - sizeof(head_t)):
            return False
        if p.hello:
            return True
        h = message(self.d, i, T_HELLO, &s)
        if h == NULL:
            return False
        h.len = <uint32_t>len(body)
        memcpy(h + 1, <const char*>body, len(body))
        p.hello = s + 1
        post_message(self.d, s, i)
        return True

    def give_up(self, uint32_t i):
        """Nobody waits for this peer any more: what has not left for it is dropped."""
        if self.d.peer[i].state != P_UP:
            drain(self.d, i)

    def state(self, uint32_t i):
        """Needs no lock: "new", "asked", "up", "lost" or "refused", and why."""
        cdef uint32_t s = ld_acq32(&self.d.peer[i].state)
        return ("new", "asked", "up", "lost", "refused")[s], self.d.peer[i].reason

    def forget(self, uint32_t i):
        """The engine wants no more of a peer, and need not be told of its end."""
        cdef peer_t* p = &self.d.peer[i]
        if p.used and p.state != P_LOST:
            if p.state == P_UP or p.theirs or p.src != NO_SRC:
                tell(self.d, i, T_BYE, 0, 0, 0)
            if not p.told:
                forget_messages(self.d, p)
                fenced(self.d, i, <uint64_t>-1, FE_PEER_LOST)
            p.told = 1
            st_rel32(&p.state, P_LOST)

    @property
    def arrivals(self):
        """Messages and immediates that have arrived. Needs no lock."""
        return self.d.arrivals

    def lost(self, uint64_t incarnation):
        """The process of that incarnation is gone."""
        cdef uint32_t i
        for i in range(self.d.npeers):
            if self.d.peer[i].used and self.d.peer[i].incarnation == incarnation and self.d.peer[i].state != P_LOST:
                lose(self.d, i)

    def reset(self, uint32_t i):
        """After a refusal: a later attempt asks anew."""
        if self.d.peer[i].state == P_REFUSED:
            self.d.peer[i].state = P_NEW

    def bye(self, uint32_t i):
        if self.d.peer[i].used:
            tell(self.d, i, T_BYE, 0, 0, 0)

    def unsent(self):
        return NSEND - self.d.nsfree

    def next_hello(self):
        """(from_idx, session, target, version, body) of the oldest hello that was heard, or None."""
        cdef head_t* h
        if self.d.hhead == ld_acq64(&self.d.htail):
            return None
        h = <head_t*>(self.d.hello + (self.d.hhead % HELLOS) * SLOT)
        out = (h.from_idx, h.session, h.target, h.version, bytes((<uint8_t*>(h + 1))[:h.len]))
        self.d.hhead += 1
        return out

    def welcome(self, uint32_t i, uint32_t theirs, uint32_t src):
        """Answers a hello with the number that its writes are to carry."""
        self.d.peer[i].passing = 0
        self.d.peer[i].theirs, self.d.peer[i].src = theirs, src
        return tell(self.d, i, T_WELCOME, src, 0, 0)

    def refuse(self, uint32_t i, uint32_t theirs, uint64_t reason):
        """Answers a hello with a refusal. If nobody here knows that peer either, its place is free again once that is out."""
        if self.d.peer[i].state == P_NEW and self.d.peer[i].theirs == 0:
            self.d.peer[i].passing = 1
        self.d.peer[i].theirs = theirs
        return tell(self.d, i, T_REFUSED, reason, 0, 0)

    def peers(self):
        return [dict(index=i, state=self.state(i)[0], alive=self.d.peer[i].state != P_LOST, src=self.d.peer[i].src,
                     outstanding=self.d.peer[i].out)
                for i in range(self.d.npeers) if self.d.peer[i].used and not self.d.peer[i].passing]

    # -- imports

    def ask_import(self, uint32_t peer, uint64_t id_, uint64_t rkey, uint64_t base, uint64_t length):
        cdef uint32_t s
        cdef head_t* h
        if self.d.reply_id != id_:
            self.d.reply_rkey, self.d.reply_gone = rkey, 0
        self.d.reply_id, self.d.reply_done = id_, 0
        h = message(self.d, peer, T_IMPORT, &s)
        if h == NULL:
            return False
        h.a, h.b, h.c, h.len = id_, rkey, base, 8
        (<uint64_t*>(h + 1))[0] = length
        post_message(self.d, s, peer)
        return True

    def reply(self):
        """Needs no lock: (status, key, address) when the answer is there."""
        if not ld_acq32(&self.d.reply_done):
            return None
        return self.d.reply_status, self.d.reply_key, self.d.reply_addr

    def add_import(self, uint32_t peer, uint64_t rkey, uint64_t key, uint64_t addr, uint64_t length):
        """What posts name as rkey; None when there is no room. A region that went since it was asked for is dead from the start."""
        cdef uint32_t i
        for i in range(1, <uint32_t>IMPORTS):
            if not self.d.imp[i].used and self.d.imp[i].out == 0:
                self.d.imp[i].rkey, self.d.imp[i].key, self.d.imp[i].addr, self.d.imp[i].len = rkey, key, addr, length
                self.d.imp[i].peer, self.d.imp[i].ack = peer, 0
                self.d.imp[i].dead = self.d.reply_rkey == rkey and self.d.reply_gone
                self.d.imp[i].used = 1
                if i >= self.d.nimp:
                    self.d.nimp = i + 1
                return i
        return None

    def import_gone(self, uint32_t i):
        """Whether the owner has taken the region back, or is gone itself."""
        return self.d.imp[i].dead != 0 or self.d.peer[self.d.imp[i].peer].state == P_LOST

    def drop_import(self, uint32_t i):
        self.d.imp[i].used = 0
