# Domain groups as Python objects, part of worker.pyx: life, peers, counters and the words of errors.

cdef void* worker_main(void* arg) noexcept nogil:
    """Pins itself, then allocates: the memory of the loop is on its own NUMA node."""
    cdef group_t* g = <group_t*>arg
    cdef int ok = 1
    cdef uint32_t i, k
    cdef nic_t* d
    if g.core >= 0:
        pin_to(g.core)
    for i in range(g.nnics):
        d = &g.nic[i]
        d.wr = <wr_t*>alloc_lines(d.nwr * sizeof(wr_t))
        d.free_wr = <uint32_t*>alloc_lines(d.nwr * sizeof(uint32_t))
        if d.wr == NULL or d.free_wr == NULL:
            ok = 0
            break
        for k in range(d.nwr):
            d.free_wr[k] = d.nwr - 1 - k
        d.nfree = d.nwr
    if table_init(&g.imm, 256) < 0 or table_init(&g.shards, 64) < 0:
        ok = 0
    st_rel32(&g.ready, 1 if ok else 2)
    futex_wake(&g.ready, 1)
    if ok:
        worker_turns(g)
    return NULL


@cython.final
cdef class _Lock:
    """The group's progress lock as a context manager."""
    cdef Group group

    def __enter__(self):
        cdef group_t* g = self.group.g
        if not trylock(g):
            with nogil:
                lock_now(g)

    def __exit__(self, *_):
        cdef group_t* g = self.group.g
        with nogil:
            unlock(g)
            kick(g)


@cython.final
cdef class Group:
    """One domain group: the NICs of a device, the worker that drives them, its counters and requests."""
    cdef group_t* g
    cdef readonly object engine_ref         # weak reference to the engine
    cdef void* engine                       # the same, to compare with
    cdef readonly object device, domains, address
    cdef readonly uint32_t index
    cdef readonly bint lands, running
    cdef object cbq_, peers, nic_peers
    cdef list orphans                       # dropped transfers whose index arrays may still be read
    cdef uint32_t forks
    cdef uint64_t sweep_at

    def __cinit__(self, engine, uint32_t index, device, CallbackQueue cbq, *, bint caller, bint busy, uint32_t spin, uint32_t yields, int core,
                  uint64_t split_min, uint32_t max_early):
        import weakref
        cdef group_t* g = <group_t*>alloc_lines(sizeof(group_t))
        if g == NULL:
            raise MemoryError
        self.g = g
        mpsc_init(&g.q)
        g.index = index
        g.bell = &g.own_bell
        g.pool = &g.pool_
        g.cbq = cbq.q
        g.caller, g.busy, g.spin, g.yields, g.core = caller, busy, spin, yields, core
        g.split_min, g.max_early = split_min, max_early
        g.wheel.tick = now_ns() >> TICK_SHIFT
        g.efd = g.cfd = -1
        g.live = <uint8_t*>calloc(1 << IMM_INDEX_BITS, 1)
        g.early = <uint32_t*>map_zeroed(SOURCES * sizeof(uint32_t))
        if g.live == NULL or g.early == NULL:
            raise MemoryError
        g.nsrc = SOURCES
        self.engine_ref = weakref.ref(engine)
        self.engine = <void*>engine
        self.index, self.device, self.cbq_ = index, device, cbq
        self.orphans, self.peers, self.nic_peers = [], {}, {}
        self.forks = fx_forks
        self.domains = ()

    def __dealloc__(self):
        cdef int i
        cdef group_t* g = self.g
        if g == NULL:
            return
        for i in range(MAX_NICS):
            free(g.nic[i].wr)
            free(g.nic[i].free_wr)
            free(g.nic[i].peers)
        free(g.imm.slot)
        free(g.shards.slot)
        free(g.live)
        unmap(g.early, SOURCES * sizeof(uint32_t))
        if self.forks == fx_forks:
            if g.efd >= 0:
                c_close(g.efd)
            if g.cfd >= 0:
                c_close(g.cfd)
        pool_free(&g.pool_)
        free(g)

    # -- life

    def start(self, domains, address):
        """Takes the opened domains and starts the worker."""
        cdef group_t* g = self.g
        cdef nic_t* d
        cdef int i, n = len(domains)
        if not 1 <= n <= MAX_NICS:
            raise errors.OutOfRange(f"{n} NICs for {self.device}; a group takes 1 .. {MAX_NICS}")
        self.domains, self.address = tuple(domains), address
        self.lands = all(x.info.caps & CAP_LANDED for x in domains)
        g.nnics = n
        need_fd = False
        for i, x in enumerate(domains):
            d = &g.nic[i]
            d.ops = <fabric_ops_t*><uintptr_t>x.ops
            d.dom = <void*><uintptr_t>x.dom
            if d.ops.version != FABRIC_VERSION or d.ops.size != sizeof(fabric_ops_t):
                raise errors.FabricUnavailable(f"{x.info.name}: its extension was built for another version of the contract")
            d.caps, d.max_msg, d.chunk, d.run = x.info.caps, x.info.max_msg, max(1, x.info.chunk), max(1, x.info.run)
            d.nwr = max(64, min(65536, x.info.depth))
            d.up = 1
            if x.bell:
                g.bell = <uint32_t*><uintptr_t>x.bell
            elif x.wait_fd >= 0:
                need_fd = True
            elif not x.info.caps & CAP_SYNC:
                g.tick = 1
        if need_fd:
            g.efd, g.cfd = c_eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), c_eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)
            if g.efd < 0 or g.cfd < 0:
                raise OSError("eventfd failed: too many open files?")
            g.bell = &g.own_bell
            g.fds[0].fd, g.fds[0].events = g.efd, POLLIN
            g.nfds = 1
            if not g.caller and not g.busy:
                # an empty turn costs a system call here: give the core away early, it may be the one that is waited for
                g.spin = min(g.spin, <uint32_t>FD_SPIN)
            for x in domains:
                if x.wait_fd >= 0:
                    g.fds[g.nfds].fd, g.fds[g.nfds].events = x.wait_fd, POLLIN
                    g.nfds += 1
        with nogil:
            i = pthread_create(&g.thread, NULL, worker_main, g)
            if i == 0:
                while not ld_acq32(&g.ready):
                    futex_wait(&g.ready, 0, 100000000)
        if i:
            raise OSError(i, f"no thread for the worker of {self.device}")
        self.running = True
        if g.ready != 1:
            self.stop()
            raise MemoryError(f"no memory for the worker of {self.device}")

    def shut(self):
        """No new work; expectations end now. What is posted goes on."""
        cdef group_t* g = self.g
        cdef uint64_t i
        cdef slot_t* s
        with nogil:
            lock_now(g)
            progress(g)
            st_rel32(&g.closed, 1)
            fail_waiting(g)
            unlock(g)
            kick(g)

    @property
    def busy(self):
        """Requests posted or queued and not over."""
        return self.g.wheel.n + self.g.zombies + self.g.nbacklog + (1 if mpsc_some(&self.g.q) else 0)

    def stop(self):
        """Ends the worker, then everything that is left. Nothing drives the group afterwards."""
        cdef group_t* g = self.g
        cdef uint32_t i
        if not self.running:
            return
        self.running = False
        with nogil:
            xchg32(&g.stop, 1)
            wake_worker(g)
            pthread_join(g.thread, NULL)
            lock_now(g)
            st_rel32(&g.closed, 1)
            if g.ready == 1:
                for i in range(TAKE):
                    if not progress_queue(g):
                        break
                fail_waiting(g)
                fail_all(g, FE_CLOSED)
            for i in range(g.nnics):
                g.nic[i].dom = NULL
                g.nic[i].up = 0
            release(g)

    def settle(self):
        """After the domains are closed: nothing can land any more."""
        cdef group_t* g = self.g
        cdef uint32_t i, k
        cdef nic_t* d
        with nogil:
            lock_now(g)
            for i in range(g.nnics):
                d = &g.nic[i]
                for k in range(d.nwr):
                    if d.wr != NULL and d.wr[k].used:
                        complete(g, i, <uint64_t>k | <uint64_t>d.wr[k].gen << 32, d.wr[k].left, FE_CLOSED, 0)
            xchg32(&g.over, 1)
            progress_queue(g)
            release(g)
        self.orphans.clear()

    cdef int guard(self) except -1:
        """Refuses a group that a fork left behind."""
        if self.forks != fx_forks:
            raise errors.EngineClosed("this process is a forked child of the one that opened the engine; open an engine of its own")
        return 0

    def guard_fork(self):
        """EngineClosed in a forked child."""
        self.guard()

    def forked(self):
        return self.forks != fx_forks

    # -- what fabrics and the engine ask of it

    def lock(self):
        self.guard()                    # whoever held it at the fork is not here to give it back
        cdef _Lock x = _Lock.__new__(_Lock)
        x.group = self
        return x

    def kick(self):
        kick(self.g)

    cdef int set_peer(self, uint32_t nic, uint32_t index, PeerRef peer) except -1:
        cdef nic_t* d = &self.g.nic[nic]
        cdef uint32_t n = max(<uint32_t>16, d.npeers)
        cdef peer_t** a
        with self.lock():
            if index >= d.npeers:
                while n <= index:
                    n *= 2
                a = <peer_t**>realloc(d.peers, n * sizeof(peer_t*))
                if a == NULL:
                    raise MemoryError
                memset(a + d.npeers, 0, (n - d.npeers) * sizeof(peer_t*))
                d.peers = a
                d.npeers = n
            d.peers[index] = peer.p
        self.nic_peers[nic, index] = peer      # keeps it alive
        return 0

    def lose(self, PeerRef peer, uint32_t src):
        """A peer is gone: nothing new goes to it, half-arrived writes of it are forgotten."""
        with self.lock():
            peer.p.lost = 1
            if src != NO_SRC:
                forget_shards(self.g, src)

    def forget_source(self, uint32_t src, since):
        """Half-arrived split writes of a source that is gone, unless `since()` says that it has come back meanwhile."""
        with self.lock():
            if not since():
                forget_shards(self.g, src)

    def nic_up(self, uint32_t nic):
        return self.g.nic[nic].up != 0

    def outstanding(self, uint32_t nic):
        """{peer index: [ctx, ...]} of a NIC's posts that have no completion."""
        cdef nic_t* d = &self.g.nic[nic]
        cdef uint32_t k
        out = {}
        with self.lock():
            for k in range(d.nwr):
                if d.wr[k].used:
                    out.setdefault(d.wr[k].peer, []).append(<uint64_t>k | <uint64_t>d.wr[k].gen << 32)
        return out

    def recovered(self, uint32_t nic, ctxs, counts):
        """What recover() found out of a NIC's outstanding posts."""
        cdef uint64_t c
        cdef int64_t n
        with self.lock():
            for x, y in zip(ctxs, counts):
                c, n = x, y
                recovered(self.g, nic, c, n)

    def imm_set(self, uint32_t number, bint live):
        """Marks a number of alloc_imm as in use."""
        with self.lock():
            if live:
                self.g.live[number & IMM_INDEX_MASK] = ((number >> IMM_INDEX_BITS) & IMM_GEN_MASK) + 1
                if table_get(&self.g.imm, number) == NULL:
                    raise MemoryError
            else:
                imm_free(self.g, number)

    def imm_count(self, uint32_t number):
        cdef slot_t* s
        with self.lock():
            s = table_find(&self.g.imm, number)
            return 0 if s == NULL else s.count

    def stats(self):
        cdef group_t* g = self.g
        nics = []
        for i in range(g.nnics):
            d = &g.nic[i]
            nics.append(dict(name=self.domains[i].info.name, up=bool(d.up), posts=d.posts, bytes=d.bytes, outstanding_bytes=d.out_bytes,
                             completions=d.completions, queue_full=d.fulls, errors=d.errors, immediates=d.imms))
        return dict(device=self.device, turns=g.turns, sleeps=g.sleeps, wakeups=g.kicks, missed_wakeups=g.missed, submitted=g.submitted, ended=g.ended, failed=g.failed,
                    pending=g.wheel.n, zombies=g.zombies, backlog=g.nbacklog, stale=g.stale, refused=g.refused, immediates=g.imm.n,
                    half_arrived=g.shards.n, nics=nics)

    # -- transfers

    cdef Transfer transfer(self, uint32_t op):
        cdef Transfer t = Transfer.__new__(Transfer)
        cdef req_t* r = req_new(&self.g.pool_, op)
        if r == NULL:
            raise MemoryError
        t.group = self
        t.r = r
        t.op = op
        return t

    cdef Transfer follow(self, Transfer leader, uint32_t kind):
        cdef Transfer t = self.transfer(OP_FOLLOW)
        cdef group_t* g = self.g
        self.guard()
        t.src = leader
        t.r.imm = kind
        t.r.extra = X_SENT
        t.r.deadline = now_ns() + <uint64_t>LONGEST_S * 1000000000
        if kind == FOLLOW_QUIET and leader.via is not None:
            self.asks(t.r, leader.via if isinstance(leader.via, list) else [leader.via])
        with nogil:
            lock_now(g)
            t.r.started = 1
            follow(g, t.r, leader.r)
            unlock(g)
            if g.rearm or g.backlog != NULL:
                g.rearm = 0
                wake_worker(g)
        return t

    cdef int asks(self, req_t* r, list via) except -1:
        """Whom a follower has to ask whether all has landed: (NIC, peer) pairs in place of targets."""
        cdef RemoteMr m
        cdef uint32_t k
        cdef set pairs = set()
        for m in via:
            for k in range(m.m.npaths):
                pairs.add((m.m.path[k].nic, m.m.path[k].peer))
        r.extra |= X_REST
        r.target = <target_t*>malloc(max(<size_t>1, len(pairs)) * sizeof(target_t))
        if r.target == NULL:
            raise MemoryError
        for nic, peer in pairs:
            r.target[r.n].rmr, r.target[r.n].src, r.target[r.n].off = NULL, nic, peer
            r.n += 1
        return 0

    cdef bint cancel(self, Transfer t):
        cdef group_t* g = self.g
        cdef bint was
        if ld_acq32(&t.r.state) != PENDING or self.forks != fx_forks:
            return False
        with nogil:
            lock_now(g)
            was = t.r.state == PENDING and not t.r.cancelled
            if not t.r.started:
                t.r.cancelled = 1       # still in the queue: ends when it is taken
            elif was:
                fail(g, t.r, FE_CANCELLED, 0)
            unlock(g)
            kick(g)
        return was

    def withdraw(self, Transfer t not None, uint64_t longest):
        """Takes a receive buffer back that is posted or about to be; False: a message has it. `longest`: bytes of the longest
        buffer of other pools, 0: there is none."""
        cdef group_t* g = self.g
        cdef req_t* r = t.r
        cdef nic_t* d
        cdef bint mine = False
        with nogil:
            lock_now(g)
            progress_queue(g)
            if r.listed:
                backlog_del(g, r)
                mine = True
            elif r.part:
                d = &g.nic[r.part - 1]
                mine = d.dom == NULL or d.ops.cancel_recv(d.dom, <uint64_t>r, longest)
                if mine:
                    r.part = 0
            unlock(g)
            kick(g)
        return mine

    def longest_recv(self, uint64_t longest):
        """Tells the fabric the length of the longest buffer in use, posted or not."""
        cdef group_t* g = self.g
        cdef uint32_t i
        with nogil:
            lock_now(g)
            for i in range(g.nnics):
                if g.nic[i].dom != NULL:
                    g.nic[i].ops.cancel_recv(g.nic[i].dom, 0, longest)
            unlock(g)
            kick(g)

    def end_recv(self, Transfer t not None):
        """A receive buffer is not used any more."""
        cdef group_t* g = self.g
        with nogil:
            lock_now(g)
            finish(g, t.r, DONE)
            unlock(g)

    def fail_transfer(self, Transfer t, int status):
        """Ends a pending transfer with an FE_ code."""
        cdef group_t* g = self.g
        with nogil:
            lock_now(g)
            if t.r.started:
                fail(g, t.r, status, 0)
            else:
                t.r.cancelled = 1
            unlock(g)

    cdef int adopt(self, Transfer t) except -1:
        """Keeps index arrays of a dropped transfer until nothing reads them."""
        self.orphans.append(t)
        if <uint64_t>len(self.orphans) >= self.sweep_at:
            self.sweep()
            self.sweep_at = max(64, 2 * len(self.orphans))
        return 0

    cdef int sweep(self) except -1:
        self.orphans = [x for x in self.orphans if not ld_acq32(&(<Transfer>x).r.quiet)]
        return 0

    cdef object error(self, Transfer t):
        cdef req_t* r = t.r
        if t.op == OP_FOLLOW and t.src is not None:
            return self.error(t.src) if ld_acq32(&(<Transfer>t.src).r.state) > DONE else errors.from_status(r.status, self.describe(t), r.vendor)
        if r.status == FE_TOO_LONG:
            return errors.MessageTooLong(f"{self.describe(t)}: {r.send.len} bytes, and the peer's receive buffers have {r.dst}")
        what = self.describe(t)
        why = self.domains[0].explain(r.vendor) if r.vendor and self.domains else ""
        return errors.from_status(r.status, f"{what}: {why}" if why else what, r.vendor)

    cdef str describe(self, Transfer t):
        cdef req_t* r = t.r
        if t.op == OP_WRITE:
            return f"write of {r.n} bytes from {region(t.src)}+{r.src - (<MrHandle>t.src).m.addr} to {region(t.dst)}+{r.dst} at {owner(t.dst)}"
        if t.op == OP_PAGES:
            return f"{r.n} pages of {r.len} bytes from {region(t.src)} to {region(t.dst)} at {owner(t.dst)} ({r.at} posted)"
        if t.op == OP_SCATTER:
            dst = t.dst[r.failed_at] if r.failed_at < len(t.dst) else None
            return f"{'barrier' if t.src is None else 'scatter'} to {len(t.dst)} peers" + (
                f", no. {r.failed_at}, {region(dst)} at {owner(dst)}" if dst is not None and r.status else "")
        if t.op == OP_SEND:
            return f"message of {r.send.len} bytes to {t.dst}"
        if t.op == OP_EXPECT:
            return f"expected {r.n} of immediate {r.imm}"
        if t.op == OP_FOLLOW:
            return f"the end of {self.describe(t.src)}" if t.src is not None else "the end of a transfer"
        return "nothing"


cdef str region(o):
    if isinstance(o, MrHandle):
        return (<MrHandle>o).name or hex((<MrHandle>o).m.addr)
    return (getattr(o, "name", "") or hex(o.base)) if o is not None else "?"

cdef str owner(o):
    return str(getattr(o, "owner", "?"))


cdef void fail_waiting(group_t* g) noexcept nogil:
    """Ends every expectation: the engine closes."""
    cdef uint64_t i = 0
    cdef req_t* r
    while i <= g.imm.mask:
        r = <req_t*>g.imm.slot[i].first if g.imm.slot[i].used else NULL
        if r != NULL:
            fail(g, r, FE_CLOSED, 0)
        else:
            i += 1

cdef void fail_all(group_t* g, int32_t status) noexcept nogil:
    """Ends everything that has a deadline or stands in the backlog."""
    cdef int i
    while g.backlog != NULL:
        if g.backlog.op == OP_RECV:
            backlog_del(g, g.backlog)
        else:
            g.backlog.send.at = 0
            if g.backlog.state == PENDING:
                fail(g, g.backlog, status, 0)
            else:
                close_out(g, take_backlog(g))
    for i in range(WHEEL):
        while g.wheel.slot[i] != NULL:
            fail(g, g.wheel.slot[i], status, 0)

cdef inline req_t* take_backlog(group_t* g) noexcept nogil:
    cdef req_t* r = g.backlog
    backlog_del(g, r)
    return r

cdef int progress_queue(group_t* g) noexcept nogil:
    """Takes what is queued; in a closed group all of it fails."""
    cdef req_t* r
    cdef int n = 0
    while True:
        r = <req_t*>mpsc_pop(&g.q)
        if r == NULL:
            return n
        start(g, r)
        n += 1
