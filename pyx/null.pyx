"""fabricx._null: a NIC that does nothing, for measuring the engine alone.

It fills a 64-byte work request in a send queue for each post, as a ConnectX provider does, and rings a doorbell record;
then the write is done. On request it holds completions back until the next poll, refuses posts beyond a depth, and hands
immediates back to its own domain. docs/performance.md says what is measured with it.
"""
cimport cython
from libc.stdint cimport int32_t, uint8_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport free, realloc
from libc.string cimport memset
from atom cimport *
from fabric cimport *

cdef extern from *:
    """
    #define be32 __builtin_bswap32
    #define be64 __builtin_bswap64
    """
    uint32_t be32(uint32_t) noexcept nogil
    uint64_t be64(uint64_t) noexcept nogil

cdef enum:
    SQ = 1024               # work requests in the send queue; a power of two, as on ConnectX
    EVENTS = 4096           # completions and looped immediates that may be pending; a power of two
    OP_WRITE = 0x08         # opcodes of a ConnectX control segment
    OP_WRITE_IMM = 0x09
    OP_SEND = 0x0a

cdef struct wqe_t:          # control, remote address and data segments of 16 bytes each, padded to the 64 of a basic block
    uint32_t opmod_idx_opcode
    uint32_t qpn_ds
    uint32_t signature
    uint32_t imm
    uint64_t raddr
    uint32_t rkey
    uint32_t reserved
    uint32_t byte_count
    uint32_t lkey
    uint64_t addr
    uint64_t pad[2]

cdef struct peer_t:
    wqe_t template
    uint32_t src, alive

cdef struct event_t:        # `count` posts of ctx are over, or immediates of one source have arrived
    uint64_t ctx
    uint32_t kind, imm, src, count

cdef struct null_t:
    wqe_t* sq
    event_t* event
    peer_t* peer
    uint64_t posts          # ever accepted
    uint64_t head, tail     # of the events: next to fill, next to hand out
    uint64_t open           # accepted since the last poll, or (queued) not completed
    uint64_t depth          # of those at most
    uint32_t npeers, room
    uint32_t queued, loopback
    uint32_t doorbell
    uint32_t bell


cdef inline int refused(null_t* d, uint32_t peer) noexcept nogil:
    return peer >= d.npeers or not d.peer[peer].alive

cdef inline void request(null_t* d, uint32_t peer, uint32_t opcode, uint64_t src, uint64_t dst, uint64_t n, uint64_t lkey, uint64_t rkey,
                         uint32_t imm) noexcept nogil:
    """The next work request: the peer's template, and the fields that change."""
    cdef wqe_t* w = &d.sq[d.posts & (SQ - 1)]
    w[0] = d.peer[peer].template
    w.opmod_idx_opcode = be32(<uint32_t>(d.posts & 0xffff) << 8 | opcode)
    w.imm = be32(imm)
    w.raddr = be64(dst)
    w.rkey = be32(<uint32_t>rkey)
    w.byte_count = be32(<uint32_t>n)
    w.lkey = be32(<uint32_t>lkey)
    w.addr = be64(src)
    d.posts += 1

cdef inline void ring(null_t* d) noexcept nogil:
    st_rel32(&d.doorbell, <uint32_t>d.posts)

cdef inline uint64_t room(null_t* d) noexcept nogil:
    """Posts that may be accepted now. A call may add two events: one completion, one batch of immediates."""
    if d.open >= d.depth or d.head - d.tail + 2 > EVENTS:
        return 0
    return d.depth - d.open

cdef inline void note(null_t* d, uint32_t kind, uint64_t ctx, uint32_t src, uint32_t imm, uint32_t count) noexcept nogil:
    """Adds an event, or adds to the last one where that says the same."""
    cdef event_t* e
    if d.head != d.tail:
        e = &d.event[(d.head - 1) & (EVENTS - 1)]
        if e.kind == kind and e.ctx == ctx and e.src == src and e.imm == imm and e.count <= 0x7fffffff:
            e.count += count
            return
    e = &d.event[d.head & (EVENTS - 1)]
    e.kind, e.ctx, e.src, e.imm, e.count = kind, ctx, src, imm, count
    d.head += 1

cdef inline int accepted(null_t* d, uint32_t peer, uint64_t ctx, uint32_t imm, uint32_t flags, uint32_t count) noexcept nogil:
    """What follows from `count` posts having been accepted; POST_DONE or POST_QUEUED."""
    d.open += count
    if d.loopback and flags & F_IMM:
        note(d, C_IMM, 0, d.peer[peer].src, imm, count)
    if not d.queued:
        return POST_DONE
    note(d, C_DONE, ctx, NO_SRC, 0, count)
    return POST_QUEUED

cdef inline int take(null_t* d, write_t* w) noexcept nogil:
    if refused(d, w.peer):
        return -FE_PEER_LOST
    if not room(d):
        return POST_FULL
    request(d, w.peer, OP_WRITE_IMM if w.flags & F_IMM else OP_WRITE, w.src, w.dst, w.len, w.lkey, w.rkey, w.imm)
    return accepted(d, w.peer, w.ctx, w.imm, w.flags, 1)

cdef int post_write(void* dom, write_t* w) noexcept nogil:
    cdef null_t* d = <null_t*>dom
    cdef int rc = take(d, w)
    if rc == POST_DONE or rc == POST_QUEUED:
        ring(d)
    return rc

cdef int post_many(void* dom, write_t* w, int n) noexcept nogil:
    cdef null_t* d = <null_t*>dom
    cdef int i = 0
    while i < n:
        w[i].rc = take(d, &w[i])
        if w[i].rc == POST_FULL:
            break
        i += 1
    if i:
        ring(d)
    return i

cdef inline uint64_t place(const void* index, uint32_t wide, uint64_t i) noexcept nogil:
    if index == NULL:
        return i
    return (<const uint64_t*>index)[i] if wide else (<const uint32_t*>index)[i]

cdef int post_pages(void* dom, pages_t* p) noexcept nogil:
    cdef null_t* d = <null_t*>dom
    cdef uint64_t i, n
    cdef uint32_t opcode = OP_WRITE_IMM if p.flags & F_IMM else OP_WRITE
    if refused(d, p.peer):
        return -FE_PEER_LOST
    n = min(p.end - p.at, room(d), <uint64_t>0x40000000)
    if n == 0:
        return POST_FULL if p.end > p.at else POST_DONE
    for i in range(p.at, p.at + n):
        request(d, p.peer, opcode, p.src + place(p.si, p.swide, i) * p.sstride, p.dst + place(p.di, p.dwide, i) * p.dstride, p.len,
                p.lkey, p.rkey, p.imm)
    p.at += n
    ring(d)
    return accepted(d, p.peer, p.ctx, p.imm, p.flags, <uint32_t>n)

cdef int post_send(void* dom, send_t* s) noexcept nogil:
    """A message is taken and goes nowhere."""
    cdef null_t* d = <null_t*>dom
    if refused(d, s.peer):
        return -FE_PEER_LOST
    if not room(d):
        return POST_FULL
    request(d, s.peer, OP_SEND, <uint64_t><uintptr_t>s.buf, 0, s.len, s.lkey, 0, 0)
    ring(d)
    return accepted(d, s.peer, s.ctx, 0, 0, 1)

cdef int post_recv(void* dom, void* buf, uint64_t n, uint64_t lkey, uint64_t ctx) noexcept nogil:
    return POST_QUEUED      # nothing ever arrives

cdef int poll(void* dom, comp_t* out, int most) noexcept nogil:
    cdef null_t* d = <null_t*>dom
    cdef event_t* e
    cdef int n = 0
    if not d.queued:
        d.open = 0
    while n < most and d.tail != d.head:
        e = &d.event[d.tail & (EVENTS - 1)]
        memset(&out[n], 0, sizeof(comp_t))
        out[n].kind, out[n].ctx, out[n].src, out[n].imm, out[n].count = e.kind, e.ctx, e.src, e.imm, e.count
        if e.kind == C_DONE:
            d.open -= e.count
        d.tail += 1
        n += 1
    return n

cdef int arm(void* dom) noexcept nogil:
    cdef null_t* d = <null_t*>dom
    return d.head != d.tail or d.open >= d.depth

cdef uint64_t recv_len(void* dom, uint32_t peer) noexcept nogil:
    return 0

cdef int cancel_recv(void* dom, uint64_t ctx, uint64_t longest) noexcept nogil:
    return ctx != 0         # nothing ever arrives

cdef int cancel_send(void* dom, send_t* s) noexcept nogil:
    return s.at == 0        # messages are taken whole

cdef int fence(void* dom, uint32_t peer, uint64_t ctx) noexcept nogil:
    return POST_DONE

cdef fabric_ops_t ops
ops.version = FABRIC_VERSION
ops.size = sizeof(fabric_ops_t)
ops.post_write = post_write
ops.post_many = post_many
ops.post_pages = post_pages
ops.post_send = post_send
ops.post_recv = post_recv
ops.poll = poll
ops.arm = arm
ops.recv_len = recv_len
ops.cancel_recv = cancel_recv
ops.cancel_send = cancel_send
ops.fence = fence


@cython.final
cdef class Nic:
    """C state of one null domain.

    Parameters
    ----------
    depth : posts accepted between two polls, or outstanding with `queued`; 0 is no limit.
    queued : posts complete at the next poll instead of at once.
    loopback : writes with immediate arrive on this domain, from the source number of the peer they name.
    """
    cdef null_t d

    def __cinit__(self, uint64_t depth=0, bint queued=False, bint loopback=False):
        self.d.depth = depth if depth else <uint64_t>-1
        self.d.queued, self.d.loopback = queued, loopback
        self.d.sq = <wqe_t*>alloc_lines(SQ * sizeof(wqe_t))
        self.d.event = <event_t*>alloc_lines(EVENTS * sizeof(event_t))
        if self.d.sq == NULL or self.d.event == NULL:
            raise MemoryError

    def __dealloc__(self):
        free(self.d.sq)
        free(self.d.event)
        free(self.d.peer)

    @property
    def ops(self):
        return <uintptr_t>&ops

    @property
    def dom(self):
        return <uintptr_t>&self.d

    @property
    def bell(self):
        return <uintptr_t>&self.d.bell

    @property
    def posts(self):
        """Posts accepted so far."""
        return self.d.posts

    def add_peer(self, uint32_t src):
        """A new peer with this source number; its index. Progress lock held."""
        cdef uint32_t n = max(<uint32_t>16, self.d.room)
        cdef peer_t* a
        cdef peer_t* p
        if self.d.npeers == self.d.room:
            if self.d.room:
                n *= 2
            a = <peer_t*>realloc(self.d.peer, n * sizeof(peer_t))
            if a == NULL:
                raise MemoryError
            self.d.peer, self.d.room = a, n
        p = &self.d.peer[self.d.npeers]
        memset(p, 0, sizeof(peer_t))
        p.src, p.alive = src, 1
        p.template.qpn_ds = be32((self.d.npeers + 1) << 8 | 3)
        self.d.npeers += 1
        return self.d.npeers - 1

    def peer_alive(self, uint32_t peer, alive=None):
        """Whether a peer takes posts; sets it if given. Progress lock held for setting."""
        if peer >= self.d.npeers:
            raise IndexError(f"there are {self.d.npeers} peers, not {peer + 1}")
        if alive is not None:
            self.d.peer[peer].alive = bool(alive)
        return bool(self.d.peer[peer].alive)

    def work_request(self, uint64_t number):
        """The work request of post `number`, one of the last 1,024, as a dict of its fields in host order."""
        cdef wqe_t* w = &self.d.sq[number & (SQ - 1)]
        if number >= self.d.posts or number + SQ < self.d.posts:
            raise IndexError(f"post {number} is not one of the last {SQ} of {self.d.posts}")
        return dict(opcode=be32(w.opmod_idx_opcode) & 0xff, qpn=be32(w.qpn_ds) >> 8, imm=be32(w.imm), raddr=be64(w.raddr),
                    rkey=be32(w.rkey), length=be32(w.byte_count), lkey=be32(w.lkey), addr=be64(w.addr))
