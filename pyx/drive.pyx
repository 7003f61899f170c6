"""fabricx._drive: calls a domain's table of C functions from Python, without an engine.

For the conformance suite of the fabrics (tests/fabrics). Whoever uses it holds the progress lock around each call, as an engine would.
"""
from collections import namedtuple

from libc.stdint cimport int32_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset
from fabric cimport *

#: one completion; `kind` is a C_ constant, `status` an FE_ one
Completion = namedtuple("Completion", "kind ctx len imm src count status vendor")
#: one write; an immediate of None carries none
Write = namedtuple("Write", "src len dst peer rkey imm ctx flags lkey", defaults=(None, 0, 0, 0))

NAMES = {
    "POST_QUEUED": POST_QUEUED, "POST_DONE": POST_DONE, "POST_FULL": POST_FULL,
    "F_IMM": F_IMM, "F_LANDED": F_LANDED, "F_BULK": F_BULK, "F_INLINE": F_INLINE,
    "C_DONE": C_DONE, "C_IMM": C_IMM, "C_RECV": C_RECV, "C_ERROR": C_ERROR, "C_PEER_LOST": C_PEER_LOST, "C_NIC_DOWN": C_NIC_DOWN,
    "FE_PEER_LOST": FE_PEER_LOST, "FE_REMOTE_KEY": FE_REMOTE_KEY, "FE_REMOTE_RANGE": FE_REMOTE_RANGE, "FE_LOCAL_KEY": FE_LOCAL_KEY,
    "FE_TOO_LONG": FE_TOO_LONG, "FE_NIC": FE_NIC, "FE_MAYBE": FE_MAYBE, "FE_CLOSED": FE_CLOSED, "FE_PROVIDER": FE_PROVIDER,
    "CAP_LANDED": CAP_LANDED, "CAP_SYNC": CAP_SYNC, "CAP_DEVICE": CAP_DEVICE, "NO_SRC": <uint32_t>NO_SRC,
}
globals().update(NAMES)

cdef enum:
    MOST = 256


cdef class Message:
    """A message to be posted, again and again until it is taken; `data` must stay as it is until then."""
    cdef send_t s
    cdef const unsigned char[::1] view

    def __cinit__(self, const unsigned char[::1] data, uint32_t peer, uint64_t ctx=0, uint64_t lkey=0):
        self.view = data
        memset(&self.s, 0, sizeof(send_t))
        self.s.buf = &data[0] if data.shape[0] else NULL
        self.s.len, self.s.peer, self.s.ctx, self.s.lkey = data.shape[0], peer, ctx, lkey


cdef class Pages:
    """A list of pages to one peer; `at` is the next one to be posted. Index arrays are uint32 or uint64, contiguous, or None."""
    cdef pages_t p
    cdef object keep

    def __cinit__(self, uint64_t src, uint64_t dst, uint64_t length, uint64_t count, uint32_t peer, uint64_t rkey, *,
                  sstride=None, dstride=None, si=None, di=None, imm=None, uint64_t ctx=0, uint64_t lkey=0, uint32_t flags=0):
        memset(&self.p, 0, sizeof(pages_t))
        self.keep = (si, di)
        self.p.src, self.p.dst, self.p.len, self.p.end = src, dst, length, count
        self.p.sstride = length if sstride is None else sstride
        self.p.dstride = length if dstride is None else dstride
        self.p.peer, self.p.rkey, self.p.lkey, self.p.ctx = peer, rkey, lkey, ctx
        self.p.flags = flags | (0 if imm is None else F_IMM)
        self.p.imm = imm or 0
        for name, a in (("si", si), ("di", di)):
            if a is None:
                continue
            if a.itemsize not in (4, 8) or a.dtype.kind != "u" or not a.flags.c_contiguous or len(a) < count:
                raise ValueError(f"{name} must be a contiguous array of {count} uint32 or uint64")
        if si is not None:
            self.p.si, self.p.swide = <const void*><uintptr_t>si.ctypes.data, si.itemsize == 8
        if di is not None:
            self.p.di, self.p.dwide = <const void*><uintptr_t>di.ctypes.data, di.itemsize == 8

    @property
    def at(self):
        return self.p.at

    @property
    def left(self):
        return self.p.end - self.p.at


cdef int fill(write_t* w, x) except -1:
    memset(w, 0, sizeof(write_t))
    w.src, w.len, w.dst, w.peer, w.rkey, w.ctx, w.lkey = x.src, x.len, x.dst, x.peer, x.rkey, x.ctx, x.lkey
    w.flags = x.flags | (0 if x.imm is None else F_IMM)
    w.imm = x.imm or 0
    return 0


cdef class Driver:
    """The table of a domain, by the addresses that `Domain.ops` and `Domain.dom` hold.

    Raises
    ------
    ValueError
        The table is of another version, or shorter than this one.
    """
    cdef fabric_ops_t* ops
    cdef void* dom

    def __init__(self, uint64_t ops, uint64_t dom):
        self.ops, self.dom = <fabric_ops_t*><uintptr_t>ops, <void*><uintptr_t>dom
        if self.ops == NULL or self.dom == NULL:
            raise ValueError("a domain has a table and a state; one of the addresses is 0")
        if self.ops.version != FABRIC_VERSION or self.ops.size < sizeof(fabric_ops_t):
            raise ValueError(f"a table of version {self.ops.version} and {self.ops.size} bytes; this is version {FABRIC_VERSION}")

    def post_write(self, write):
        """POST_ code, or minus an FE_ code."""
        cdef write_t w
        cdef int rc
        fill(&w, write)
        with nogil:
            rc = self.ops.post_write(self.dom, &w)
        return rc

    def post_many(self, writes):
        """The codes of those that were taken; fewer than were given when the queue is full."""
        cdef int n = len(writes), i, taken
        cdef write_t* w = <write_t*>calloc(max(n, 1), sizeof(write_t))
        if w == NULL:
            raise MemoryError
        try:
            for i in range(n):
                fill(&w[i], writes[i])
            with nogil:
                taken = self.ops.post_many(self.dom, w, n)
            return [w[i].rc for i in range(taken)]
        finally:
            free(w)

    def post_pages(self, Pages pages):
        """POST_ code, or minus an FE_ code; advances `pages.at`."""
        cdef int rc
        with nogil:
            rc = self.ops.post_pages(self.dom, &pages.p)
        return rc

    def post_send(self, Message message):
        cdef int rc
        with nogil:
            rc = self.ops.post_send(self.dom, &message.s)
        return rc

    def post_recv(self, uint64_t addr, uint64_t length, uint64_t ctx=0, uint64_t lkey=0):
        """The memory must stay until its completion."""
        cdef int rc
        with nogil:
            rc = self.ops.post_recv(self.dom, <void*><uintptr_t>addr, length, lkey, ctx)
        return rc

    def poll(self, int most=MOST):
        """Up to `most` completions."""
        cdef comp_t c[MOST]
        cdef int n, i
        if not 1 <= most <= MOST:
            raise ValueError(f"most is {most}; it must be within 1 .. {MOST}")
        with nogil:
            n = self.ops.poll(self.dom, c, most)
        return [Completion(c[i].kind, c[i].ctx, c[i].len, c[i].imm, c[i].src, c[i].count, c[i].status, c[i].vendor) for i in range(n)]

    def arm(self):
        """Whether there is something, so that nobody must sleep."""
        cdef int rc
        with nogil:
            rc = self.ops.arm(self.dom)
        return bool(rc)

    def recv_len(self, uint32_t peer):
        cdef uint64_t n
        with nogil:
            n = self.ops.recv_len(self.dom, peer)
        return n
