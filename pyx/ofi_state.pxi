# What Python sees of a domain; part of ofi.pyx.

cdef class OfiState(CtlState):
    """The C state of one libfabric domain."""
    cdef object api

    def __cinit__(self, Api api, str provider, str node, str domain, int skip, uint64_t incarnation, int hello_fd, bint hmem=False):
        cdef dom_t* d = self.d
        cdef int rc
        self.api, self.hello_fd = api, hello_fd
        d.incarnation, d.hello_fd = incarnation, hello_fd
        d.nic = ofi_nic_new()
        if d.nic == NULL:
            raise MemoryError
        p, n, m = provider.encode(), node.encode(), domain.encode()
        rc = ofi_open(api.a, d.nic, p, n, m, skip, CQ_SIZE, hmem)
        if rc:
            what = d.nic.what.decode(errors="replace")
            ofi_close(d.nic)
            raise OSError(-rc, f"{what}: {api.strerror(rc)}")
        self.allocate()

    cdef allocate(self):
        cdef dom_t* d = self.d
        d.own.x = <xctx_t*>map_zeroed(CONTEXTS * sizeof(xctx_t))
        d.own.rctx = <xctx_t*>map_zeroed(NRECV * sizeof(xctx_t))
        d.own.by_fi = <uint64_t*>map_zeroed(AV_MOST * sizeof(uint64_t))
        if d.own.x == NULL or d.own.rctx == NULL or d.own.by_fi == NULL:
            raise MemoryError

    def start(self):
        """Posts the internal receives; registers their memory where the provider wants it."""
        cdef uint32_t i
        if self.d.nic.need_desc:
            for which, rc in ((0, ofi_reg_internal(self.d.nic, 0, self.d.sbuf, NSEND * SLOT, &self.d.own.sdesc)),
                              (1, ofi_reg_internal(self.d.nic, 1, self.d.rbuf, NRECV * SLOT, &self.d.own.rdesc))):
                if rc:
                    raise OSError(-rc, f"fi_mr_reg of internal buffers: {self.api.strerror(rc)}")
        for i in range(<uint32_t>NRECV):
            repost(self.d, i)

    def __dealloc__(self):
        cdef dom_t* d = self.d
        if d == NULL:
            return
        if d.nic != NULL:
            ofi_close(d.nic)
        free(d.nic)
        unmap(d.own.x, CONTEXTS * sizeof(xctx_t))
        unmap(d.own.rctx, NRECV * sizeof(xctx_t))
        unmap(d.own.by_fi, AV_MOST * sizeof(uint64_t))
        self.give_back()

    @property
    def ops(self):
        return <uintptr_t>&OPS

    @property
    def addr(self):
        return bytes(self.d.nic.addr[:self.d.nic.addrlen])

    def info(self):
        n = self.d.nic
        return dict(provider=n.provider.decode(), domain=n.domain.decode(), fabric=n.fabric.decode(), max_msg=n.max_msg, inject=n.inject,
                    depth=n.tx_depth, fd=n.fd if n.has_fd else -1, landed=bool(n.landed), data8=bool(n.data8), virt_addr=bool(n.virt_addr),
                    prov_key=bool(n.prov_key), key_size=n.key_size, hmem=bool(n.hmem))

    def shut(self):
        """Closes the endpoint; polls and posts do nothing afterwards."""
        self.d.down = 1
        self.d.chead = self.d.ctail
        ofi_close(self.d.nic)

    # -- regions

    def add_region(self, uint32_t slot, uint64_t rkey, uint64_t addr, uint64_t length, uint64_t key, int iface, int device, int dmabuf_fd,
                   uint64_t dmabuf_off):
        """(mr, desc) of a new registration; OSError."""
        cdef void* mr = NULL
        cdef void* desc = NULL
        cdef uint64_t got = 0
        cdef int rc = ofi_reg(self.d.nic, addr, length, key, iface, device, dmabuf_fd, dmabuf_off, &mr, &desc, &got)
        if rc:
            raise OSError(-rc, f"{length} bytes at {addr:#x} cannot be registered: {self.api.strerror(rc)}")
        self.region(slot, rkey, addr, length, got, addr if self.d.nic.virt_addr else 0)
        return <uintptr_t>mr, <uintptr_t>desc

    def drop_region(self, uint64_t rkey, uint64_t mr):
        if self.d.down:
            return 0                    # closed with the domain
        self.no_region(rkey & (REGIONS - 1))
        return ofi_dereg(<void*><uintptr_t>mr)

    # -- peers

    def peer(self, bytes addr, uint64_t incarnation, uint32_t src):
        """The index of a peer, made if new; None when there is no room; OSError when the provider refuses the address."""
        cdef int i = self.find(addr, incarnation)
        cdef uint64_t fi = 0
        cdef int rc
        if i >= 0:
            return i
        if len(addr) > 512 or len(addr) != self.d.nic.addrlen:
            raise OSError(22, f"its address has {len(addr)} bytes, those of this provider {self.d.nic.addrlen}")
        rc = ofi_av_insert(self.d.nic, <const char*>addr, &fi)
        if rc:
            raise OSError(-rc, f"fi_av_insert: {self.api.strerror(rc)}")
        i = self.new_peer(addr, incarnation, src)
        if i < 0:
            return None
        self.d.peer[i].link.fi = fi
        if fi < AV_MOST:
            self.d.own.by_fi[fi] = i + 1
        return i

