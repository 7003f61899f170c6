# The engine's hot calls, part of worker.pyx: arguments are checked, a request is filled, the group takes it.

cdef class EngineBase:
    """The quick half of TransferEngine: every call here checks its arguments whole before anything is posted."""
    cdef Group first                # the group of the first device
    cdef readonly list groups
    cdef int64_t timeout_ns
    cdef bint closed_
    cdef object __weakref__

    @cython.final
    cdef int ready(self) except -1:
        if self.closed_:
            raise errors.EngineClosed("the engine is closed")
        if self.first.forks != fx_forks:
            self.first.guard()
        return 0

    @cython.final
    cdef MrHandle handle(self, obj, str what):
        if not isinstance(obj, MrHandle):
            raise TypeError(f"{what} must be an MrHandle, as reg_mr returns it, not {type(obj).__name__}")
        return <MrHandle>obj

    @cython.final
    cdef RemoteMr remote(self, desc, Group group):
        """What a MrDesc is to `group`; resolved on first use."""
        cdef RemoteMr m
        try:
            x = desc._remote
        except AttributeError:
            raise TypeError(f"the target must be an MrDesc, not {type(desc).__name__}") from None
        if x is not None:
            m = <RemoteMr?>x
            if m.group is group and not m.m.peer.lost:
                return m                # a lost one may have been connected again
        return <RemoteMr?>self._resolve(desc, group)

    @cython.final
    cdef int attach(self, Transfer t, on_done) except -1:
        cdef req_t* r = t.r
        if on_done is None:
            return 0
        r.extra |= X_REST
        if isinstance(on_done, NativeCallback):
            r.native = <void (*)(uint64_t, int64_t) noexcept nogil><uintptr_t>(<NativeCallback>on_done).address
            r.native_arg = (<NativeCallback>on_done).arg
            t.cb = on_done
        elif isinstance(on_done, Counter):
            r.counter = (<Counter>on_done).word
            t.cb = on_done
        elif callable(on_done):
            t.cb = on_done
            Py_INCREF(t)
            r.cb = <void*>t
        else:
            raise TypeError(f"on_done must be callable, a NativeCallback or a Counter, not {type(on_done).__name__}")
        if t.cb is not None and r.cb == NULL:
            self.keep_callback(t)
        return 0

    @cython.final
    cdef int keep_callback(self, Transfer t) except -1:
        # The worker holds only C pointers: what they point to lives as long as the request.
        t.keep = t.cb if t.keep is None else (t.keep, t.cb)
        return 0

    @cython.final
    cdef int hold(self, MrHandle h, RemoteMr m) except -1:
        """Counts a transfer on both regions; refuses those that are being taken down."""
        fadd32(&h.m.inflight, 1)
        if ld_acq32(&h.m.dead):
            fadd32(&h.m.inflight, <uint32_t>-1)
            raise errors.UnregisteredLocal(f"{region(h)} ({h.m.size} bytes at {h.m.addr:#x}) is not registered any more")
        if m is not None:
            fadd32(&m.m.inflight, 1)
        return 0

    @cython.final
    cdef int unhold(self, MrHandle h, RemoteMr m) except -1:
        fadd32(&h.m.inflight, <uint32_t>-1)
        if m is not None:
            fadd32(&m.m.inflight, <uint32_t>-1)
        return 0

    @cython.final
    cdef int check_src(self, MrHandle h, uint64_t off, uint64_t n) except -1:
        if h.group.engine != <void*>self:
            raise errors.UnregisteredLocal(f"{region(h)} is registered with another engine")
        if off > h.m.size or n > h.m.size - off:
            raise errors.OutOfRange(f"source {region(h)}: bytes {off} .. {off + n} of {h.m.size}")
        return 0

    @cython.final
    cdef int check_dst(self, desc, RemoteMr m, uint64_t off, uint64_t n) except -1:
        if off > m.m.size or n > m.m.size - off:
            raise errors.OutOfRange(f"target {region(desc)} at {owner(desc)}: bytes {off} .. {off + n} of {m.m.size}")
        return 0

    @cython.final
    cdef int check_nic(self, Group g, req_t* r, nic) except -1:
        cdef uint64_t i
        if nic is None:
            return 0
        i = u64(nic, "nic")
        if i >= g.g.nnics:
            raise errors.OutOfRange(f"nic is {i}; {g.device} has NICs 0 .. {g.g.nnics - 1}")
        r.nic = <uint32_t>i
        return 0

    def submit_single_write(self, length, imm, src, dst, on_done=None, *, timeout=None, nic=None, bint landed=False):
        """One contiguous write; with several NICs a large one is split over them and still counts once.

        Parameters
        ----------
        length : int
            Bytes; 0 is legal.
        imm : int or None
            Immediate to be counted at the target.
        src : (MrHandle, int)
            Region and offset in bytes.
        dst : (MrDesc, int)
            Region of the peer and offset in bytes.
        on_done : callable taking the Transfer, NativeCallback or Counter, optional
            The source may be reused.
        timeout : float, optional
            Seconds; the default is the engine's.
        nic : int, optional
            Pins the write to one local NIC.
        landed : bool
            Completion means landed at the target, whatever that costs.

        Returns
        -------
        Transfer

        Raises
        ------
        OutOfRange, UnregisteredLocal, PeerLostError, TransferTimeout, EngineClosed
        """
        cdef MrHandle h
        cdef RemoteMr m
        cdef Transfer t
        cdef req_t* r
        cdef group_t* g
        cdef uint64_t n = u64(length, "length"), soff, doff
        self.ready()
        handle, so = src
        desc, do = dst
        soff = u64(so, "source offset")
        doff = u64(do, "target offset")
        h = self.handle(handle, "the source")
        self.check_src(h, soff, n)
        m = self.remote(desc, h.group)
        self.check_dst(desc, m, doff, n)
        if m.self_base and n and h.m.addr + soff < m.self_base + doff + n and m.self_base + doff < h.m.addr + soff + n:
            raise errors.OutOfRange(f"source {region(h)}+{soff} and target {region(desc)}+{doff} overlap within {n} bytes")
        t = h.group.transfer(OP_WRITE)
        r = t.r
        if imm is not None:
            r.imm = imm_of(imm)
            r.flags = F_IMM
        if landed:
            r.flags |= F_LANDED
        if n >= BULK:
            r.flags |= F_BULK
        self.check_nic(h.group, r, nic)
        r.deadline = coarse_ns() + <uint64_t>span_ns(timeout, self.timeout_ns)
        t.src = h
        t.dst = desc
        if not landed and not h.group.lands:
            t.via = m
        self.hold(h, m)
        if on_done is not None:
            try:
                self.attach(t, on_done)
            except BaseException:
                self.unhold(h, m)
                raise
        r.lmr = h.m
        r.rmr = m.m
        r.n = n
        r.src = h.m.addr + soff
        r.dst = doff
        g = h.group.g
        if n <= INLINE_GIL:
            submit(g, r)
        else:
            with nogil:
                submit(g, r)
        return t

    # -- pages

    @cython.final
    cdef PreparedPages pages(self, page_len, src, dst):
        """Checks a pair of page lists whole."""
        cdef PreparedPages p = PreparedPages.__new__(PreparedPages)
        cdef uint64_t n = u64(page_len, "page_len"), ns, nd, soff
        cdef MrHandle h
        cdef RemoteMr m
        handle, sp = src
        desc, dp = dst
        h = self.handle(handle, "the source")
        if n == 0:
            raise errors.OutOfRange("page_len is 0; pages have at least 1 byte")
        self.check_src(h, 0, 0)
        m = self.remote(desc, h.group)
        ns = self.page_side(sp, &p.p.si, &p.p.swide, &p.p.sstride)
        nd = self.page_side(dp, &p.p.di, &p.p.dwide, &p.p.dstride)
        if ns != nd:
            raise errors.PageListError(f"{ns} source pages of {region(h)} and {nd} target pages of {region(desc)} at {owner(desc)}")
        soff = u64(sp.offset, "source offset")
        p.dst_off = u64(dp.offset, "target offset")
        self.check_pages("source", region(h), p.p.si, ns, p.p.swide, p.p.sstride, soff, n, h.m.size)
        self.check_pages("target", f"{region(desc)} at {owner(desc)}", p.p.di, ns, p.p.dwide, p.p.dstride, p.dst_off, n, m.m.size)
        if ns > 1 and p.p.dstride < n and p.p.dstride:
            raise errors.PageListError(f"target pages of {n} bytes overlap: their stride is {p.p.dstride}")
        p.src, p.dst, p.desc = h, m, desc
        p.keep = (sp.indices, dp.indices)
        p.p.end, p.p.len, p.p.src = ns, n, h.m.addr + soff
        return p

    @cython.final
    cdef uint64_t page_side(self, pages, const void** idx, uint32_t* wide, uint64_t* stride) except? 0xfffffffffffffff1:
        cdef Py_buffer b
        cdef uint64_t n
        a = pages.indices
        stride[0] = u64(pages.stride, "stride")
        if a is None:
            idx[0] = NULL
            wide[0] = 0
            return u64(pages.count, "count")
        PyObject_GetBuffer(a, &b, PyBUF_SIMPLE)
        if b.itemsize != 4 and b.itemsize != 8:
            PyBuffer_Release(&b)
            raise errors.PageListError(f"page indices of {b.itemsize} bytes; want uint32 or uint64")
        idx[0] = b.buf
        wide[0] = b.itemsize == 8
        n = <uint64_t>b.len // <uint64_t>b.itemsize
        PyBuffer_Release(&b)
        return n

    @cython.final
    cdef int check_pages(self, str side, str name, const void* idx, uint64_t n, uint32_t wide, uint64_t stride, uint64_t off,
                         uint64_t length, uint64_t size) except -1:
        """Every page within its region, or PageListError naming the first that is not."""
        cdef uint64_t top = 0, i, most
        cdef uint32_t top4 = 0
        cdef const uint32_t* a4 = <const uint32_t*>idx
        cdef const uint64_t* a8 = <const uint64_t*>idx
        if n == 0:
            return 0
        if length <= size and off <= size - length:
            most = (size - length - off) // stride if stride else <uint64_t>-1
            with nogil:
                if idx == NULL:
                    top = n - 1
                elif wide:
                    for i in range(n):
                        top = max(top, a8[i])
                else:
                    for i in range(n):
                        top4 = max(top4, a4[i])
                    top = top4
            if top <= most:
                return 0
            i = 0
            if idx == NULL:
                i = most + 1
                top = i
            else:
                while (a8[i] if wide else a4[i]) <= most:
                    i += 1
                top = a8[i] if wide else a4[i]
        else:
            i = 0
            top = (0 if idx == NULL else a8[0] if wide else a4[0])
        raise errors.PageListError(f"{side} page {i} (index {top}) of {name}: bytes {off + top * stride} .. "
                                   f"{off + top * stride + length} of {size}")

    @cython.final
    cdef Transfer submit_pages(self, PreparedPages p, imm, on_done, timeout, nic, bint landed):
        cdef Transfer t = p.src.group.transfer(OP_PAGES)
        if p.src.group.orphans and <uint64_t>len(p.src.group.orphans) < 64:
            p.src.group.sweep()
        cdef req_t* r = t.r
        cdef group_t* g = p.src.group.g
        if imm is not None:
            r.imm = imm_of(imm)
            r.flags = F_IMM
        if landed:
            r.flags |= F_LANDED
        if p.p.len >= BULK:
            r.flags |= F_BULK
        self.check_nic(p.src.group, r, nic)
        r.deadline = coarse_ns() + <uint64_t>span_ns(timeout, self.timeout_ns)
        t.src, t.dst, t.keep = p.src, p.desc, p.keep
        if not landed and not p.src.group.lands:
            t.via = p.dst
        self.hold(p.src, p.dst)
        try:
            self.attach(t, on_done)
        except BaseException:
            t.keep = None
            self.unhold(p.src, p.dst)
            raise
        r.lmr = p.src.m
        r.rmr = p.dst.m
        r.n = p.p.end
        r.src = p.p.src
        r.dst = p.dst_off
        r.len = p.p.len
        r.si, r.di, r.swide, r.dwide = p.p.si, p.p.di, p.p.swide, p.p.dwide
        r.sstride, r.dstride = p.p.sstride, p.p.dstride
        with nogil:                     # a worker woken here may take this core
            submit(g, r)
        return t

    def submit_paged_writes(self, page_len, imm, src, dst, on_done=None, *, timeout=None, nic=None, bint landed=False):
        """Page i goes from src.offset + src.indices[i] * src.stride to dst.offset + dst.indices[i] * dst.stride.

        Parameters
        ----------
        page_len : int
            Bytes of a page.
        imm : int or None
            Counted once for each page at the target.
        src : (MrHandle, Pages)
        dst : (MrDesc, Pages)
            As many pages. Index arrays (uint32 or uint64) are borrowed, not copied, until the Transfer is quiet.
        on_done, timeout, nic, landed
            As in submit_single_write.

        Raises
        ------
        PageListError
            lists of different lengths, or a page out of range; it names the page. Nothing was posted.
        """
        self.ready()
        return self.submit_pages(self.pages(page_len, src, dst), imm, on_done, timeout, nic, landed)

    def prepare(self, page_len, src, dst):
        """A checked, resolved page list, to be submitted again and again by submit_prepared()."""
        self.ready()
        return self.pages(page_len, src, dst)

    def submit_prepared(self, PreparedPages prepared not None, imm, on_done=None, *, timeout=None, nic=None, bint landed=False):
        """Submits what prepare() made; the index arrays must not have changed."""
        self.ready()
        if prepared.src.group.engine != <void*>self:
            raise errors.UnregisteredLocal("these pages were prepared by another engine")
        return self.submit_pages(prepared, imm, on_done, timeout, nic, landed)

    # -- scatter and barrier

    @cython.final
    cdef Transfer scatter(self, MrHandle h, group, imm, list dsts, on_done, timeout, nic, bint landed, bint barrier):
        cdef Group local = h.group
        cdef Transfer t = local.transfer(OP_SCATTER)
        cdef req_t* r = t.r
        cdef uint64_t i, n = len(dsts), so, do, length, held = 0
        cdef RemoteMr m
        cdef list descs = [], via = None if landed or local.lands else []
        cdef group_t* g = local.g
        if imm is not None:
            r.imm = imm_of(imm)
            r.flags = F_IMM
        if landed:
            r.flags |= F_LANDED
        if group is not None:
            group._usable()
        self.check_nic(local, r, nic)
        r.deadline = coarse_ns() + <uint64_t>span_ns(timeout, self.timeout_ns)
        r.target = <target_t*>malloc(max(<uint64_t>1, n) * sizeof(target_t))
        r.extra |= X_REST
        if r.target == NULL:
            raise MemoryError
        for i in range(n):
            if barrier:
                desc, length, so, do = dsts[i], 0, 0, 0
            else:
                length_, so_, desc, do_ = dsts[i]
                length, so, do = u64(length_, "length"), u64(so_, "source offset"), u64(do_, "target offset")
                self.check_src(h, so, length)
            if group is not None:
                group._check(desc)
            m = self.remote(desc, local)
            self.check_dst(desc, m, do, length)
            if length > g.nic[0].max_msg:
                raise errors.OutOfRange(f"slice {i} of a scatter has {length} bytes; {local.device} carries {g.nic[0].max_msg} in one write")
            r.target[i].rmr = m.m
            r.target[i].src = h.m.addr + so
            r.target[i].len = length
            r.target[i].off = do
            descs.append(desc)
            if via is not None:
                via.append(m)
        t.via = via
        t.src, t.dst = (None if barrier else h), descs
        self.hold(h, None)
        try:
            self.attach(t, on_done)
        except BaseException:
            self.unhold(h, None)
            raise
        for i in range(n):
            fadd32(&r.target[i].rmr.inflight, 1)
        r.lmr = h.m
        r.n = n
        with nogil:
            submit(g, r)
        return t

    def submit_scatter(self, group, imm, src, dsts, on_done=None, *, timeout=None, nic=None, bint landed=False):
        """A slice of `src` to each peer, one write a peer.

        Parameters
        ----------
        group : PeerGroup or None
            With a group, every target must belong to it (UnknownPeer otherwise).
        imm : int or None
            Counted once at each target.
        src : MrHandle
        dsts : sequence of ScatterDst(length, src_offset, desc, dst_offset)
        on_done, timeout, nic, landed
            As in submit_single_write. Targets of a lost peer fail the Transfer with PeerLostError; the others are written.
        """
        self.ready()
        return self.scatter(self.handle(src, "the source"), group, imm, list(dsts), on_done, timeout, nic, landed, False)

    def submit_barrier(self, group, imm, descs, on_done=None, *, timeout=None, nic=None):
        """An immediate without payload to the owner of each MrDesc."""
        self.ready()
        if imm is None:
            raise errors.OutOfRange("a barrier needs an immediate")
        return self.scatter(<MrHandle?>self._scratch(), group, imm, list(descs), on_done, timeout, nic, False, True)

    # -- messages

    def submit_send(self, addr, msg, cb=None, *, timeout=None):
        """A two-sided message to the group `addr`; the bytes are copied before this returns. Messages go over the first NIC.

        Parameters
        ----------
        addr : NetAddr
        msg : bytes-like, C-contiguous
        cb : as on_done of submit_single_write
        timeout : seconds; a peer without a free receive buffer holds the message back until then

        Raises
        ------
        MessageTooLong
            from the Transfer, when the peer's receive buffers are smaller; it names both sizes.
        """
        cdef Py_buffer b
        cdef Transfer t
        cdef req_t* r
        cdef PeerRef p
        self.ready()
        p = <PeerRef?>self._peer(addr, self.first)
        t = self.first.transfer(OP_SEND)
        r = t.r
        r.deadline = coarse_ns() + <uint64_t>span_ns(timeout, self.timeout_ns)
        PyObject_GetBuffer(msg, &b, PyBUF_SIMPLE)
        try:
            r.extra |= X_REST
            r.send.buf = malloc(max(<size_t>1, <size_t>b.len))
            if r.send.buf == NULL:
                raise MemoryError
            if b.len > INLINE_GIL:
                with nogil:
                    memcpy(<void*>r.send.buf, b.buf, b.len)
            else:
                memcpy(<void*>r.send.buf, b.buf, b.len)
            r.send.len = b.len
        finally:
            PyBuffer_Release(&b)
        r.send.lkey = 0
        r.send.flags = 0
        r.dst = 0
        t.dst = addr
        self.attach(t, cb)
        fadd32(&p.p.inflight, 1)
        r.peer = p.p
        t.src = p
        submit(self.first.g, r)
        return t

    def _post_recv(self, MrHandle h, uint64_t offset, uint64_t length, uint64_t pool, uint64_t index):
        """A receive buffer for the callback thread's engine._received(pool, index, len, src)."""
        cdef Transfer t = h.group.transfer(OP_RECV)
        cdef req_t* r = t.r
        fadd32(&h.m.inflight, 1)
        r.lmr = h.m
        r.src, r.len = h.m.addr + offset, length
        r.native_arg, r.dst = pool, index
        t.src = h
        submit(h.group.g, r)
        return t

    def _repost_recv(self, Transfer t not None):
        t.r.started = 0
        submit(t.group.g, t.r)

    # -- immediates

    def expect_imm_count(self, imm, count, cb=None, *, timeout=None, peers=None, device=None):
        """A Transfer that ends once `count` writes carrying `imm` have landed here.

        Counts are logical: one for each single write, page, and target of a scatter or barrier, however many NICs carried it.
        What arrived before counts too; a surplus carries over to the next expectation.

        Parameters
        ----------
        imm : int
            0 .. 524287, or a number of alloc_imm().
        count : int
        cb : as on_done of submit_single_write; it may call expect_imm_count again
        timeout : seconds
        peers : NetAddrs, optional
            Fail with PeerLostError as soon as one of them is lost.
        device : str, optional
            The device whose group counts; the first by default.
        """
        cdef Transfer t
        cdef req_t* r
        cdef Group g = self.first
        self.ready()
        if device is not None:
            g = <Group?>self._group(device)
        t = g.transfer(OP_EXPECT)
        r = t.r
        r.imm = imm_of(imm)
        if r.imm & IMM_ALLOC and g.g.live[r.imm & IMM_INDEX_MASK] != ((r.imm >> IMM_INDEX_BITS) & IMM_GEN_MASK) + 1:
            raise errors.OutOfRange(f"immediate {r.imm} is not allocated here; explicit immediates are within 0 .. {IMM_ALLOC - 1}")
        r.n = u64(count, "count")
        r.deadline = coarse_ns() + <uint64_t>span_ns(timeout, self.timeout_ns)
        if peers is not None:
            self._watch_peers(t, peers)
        if cb is not None:
            self.attach(t, cb)
        submit(g.g, r)
        return t

    def _fail(self, Transfer t not None, int status):
        t.group.fail_transfer(t, status)

    def _init_base(self, groups, double timeout):
        self.groups = list(groups)
        self.first = <Group?>self.groups[0]
        self.timeout_ns = <int64_t>(timeout * 1e9)

    def _shut_base(self):
        self.closed_ = True

    @property
    def closed(self):
        """Whether close() has been called."""
        return self.closed_
