"""Requests: everything the worker knows of one submitted operation, and the memory they come from."""
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memset
from atom cimport *
from fabric cimport *

from ring cimport *

cdef enum:
    MAX_NICS = 16
    MAX_PATHS = 16
    NIC_ANY = 0xffffffff

    PENDING = 0             # states of a request; the futex word of its waiters
    DONE = 1
    FAILED = 2
    CANCELLED = 3

    OP_WRITE = 1
    OP_PAGES = 2
    OP_SCATTER = 3
    OP_SEND = 4
    OP_RECV = 5             # a receive buffer to be posted
    OP_EXPECT = 6
    OP_NOP = 7              # ends at once: for measurements and as a fence
    OP_FOLLOW = 8           # ends with another request
    OP_FENCE = 9            # was an OP_FOLLOW; ends when peers say that what was written has landed

    FOLLOW_END = 0          # ... when that one ends
    FOLLOW_QUIET = 1        # ... when nothing of it can land any more

cdef struct lmr_t:          # a registered local region
    uint64_t addr, size
    uint32_t dead
    uint64_t lkey[MAX_NICS]
    char pad0[64]           # what submitters and the driver both write lies apart from what the driver reads
    uint32_t inflight       # requests that use it
    char pad1[60]

cdef struct peer_t:         # a remote group
    uint32_t id             # index in the engine's list of peers
    uint32_t lost
    uint32_t burnt          # tags that failed writes took with them
    uint32_t sends          # messages in the backlog: later ones queue behind them
    void* half              # req_t*: the message of which fragments are out; none other may start before it is whole
    uint64_t stamp          # turn in which a message to it could not be posted
    uint32_t at_nic[MAX_NICS]   # the fabric's index of its first NIC, or NO_SRC
    uint64_t tags[8]        # a bit for each of IMM_TAGS
    char pad0[64]
    uint32_t inflight
    char pad1[60]

cdef struct path_t:         # one way to a remote region: a local NIC, and that NIC's view of a remote one
    uint32_t nic, peer
    uint64_t base, key

cdef struct rmr_t:          # an imported remote region
    peer_t* peer
    rmr_t* grave            # its Python object is gone, and requests still point here
    uint64_t size
    uint32_t npaths
    path_t path[MAX_PATHS]
    char pad0[64]
    uint32_t inflight
    char pad1[60]

cdef struct redo_t:         # part of a request that a failed NIC did not deliver
    redo_t* next
    uint64_t at, n

cdef struct target_t:       # one destination of a scatter or barrier
    rmr_t* rmr              # of a fence: NULL, src is the NIC and off its peer
    uint64_t src, len, off

cdef struct loopq_t:        # completions for one asyncio loop
    void* head              # req_t*, linked by lq_next
    int efd
    uint32_t refs

cdef enum:
    X_REST = 1              # a field of the last lines is set and has to be cleared
    X_TIMED = 2             # t0 is set
    X_SENT = 4              # handed over: the worker holds a reference

cdef struct req_t:          # by cache lines: a plain write touches the first three, and the submitter shares them with the worker
    # -- what is to be done
    qnode_t q               # first: a queue node is its request; links free ones too
    lmr_t* lmr
    rmr_t* rmr
    uint64_t n              # bytes, pages, targets, wanted count
    uint64_t src, dst       # absolute source, offset in the target
    uint32_t op
    uint32_t flags          # F_
    uint32_t imm
    uint32_t nic            # pinned to, or NIC_ANY
    # -- how it stands
    uint32_t state, waiters
    uint32_t refs           # one for the Transfer, one for the worker
    uint32_t extra          # X_
    int32_t status, vendor  # first error; FE_
    uint32_t quiet
    uint32_t started        # taken from the queue
    uint32_t cancelled      # before it was started
    uint32_t stopped        # an error or the end: no more of it is posted
    uint32_t listed         # in the backlog
    uint32_t t_slot         # 1 + slot of the timer wheel; 0: not in it
    uint64_t deadline       # now_ns() scale
    loopq_t* lq
    # -- how far it is
    uint64_t at, left       # next to post; posts without completion
    uint64_t part           # bytes posted of the shard or target being posted in chunks
    uint64_t shard_len      # bytes of a shard but the last
    target_t* target        # owned
    req_t* follow           # OP_FOLLOW requests waiting for this one, linked by `next`
    uint32_t shards, shard  # of a write; next one
    uint32_t path           # path of the shard being posted in chunks
    int32_t tag             # -1: none
    # -- pages
    uint64_t len            # of a page, or of a receive buffer
    uint64_t sstride, dstride
    const void* si
    const void* di
    uint32_t swide, dwide
    peer_t* peer            # of a message
    uint64_t t0             # tsc at submit, for measurements
    # -- how the end is told
    void (*native)(uint64_t, int64_t) noexcept nogil
    uint64_t native_arg
    uint64_t* counter       # [0] done, [1] failed
    void* cb                # PyObject*: the Transfer, owned, with a Python callback
    cnode_t cb_node
    uint32_t failed_at      # index of the target (scatter) that failed first
    char pad[4]
    # -- lists
    req_t* next             # backlog, expectations or followers
    req_t* prev             # backlog
    req_t* t_next
    req_t* t_prev
    void* lq_obj            # PyObject*: the Transfer, owned
    req_t* lq_next
    req_t* leader           # of an OP_FOLLOW
    redo_t* redo
    send_t send             # buf owned when op is OP_SEND

cdef struct pool_t:         # free requests
    uint32_t lock           # submitters; a spin lock of a few ns
    uint32_t made           # in existence
    req_t* head
    char pad0[48]
    req_t* returned         # a stack that droppers push to and submitters take whole
    char pad1[56]

cdef enum:
    POOL_KEEP = 8192

cdef inline req_t* req_new(pool_t* p, uint32_t op) noexcept nogil:
    """A request with refs 2, or NULL when out of memory. Fields beyond the first three lines are as alloc_lines left them, or as
    req_drop has cleared them: zero where it matters."""
    cdef req_t* r = NULL
    if xchg32(&p.lock, 1) == 0:
        r = p.head
        if r == NULL and ld_acqp(<void**>&p.returned) != NULL:
            r = <req_t*>xchgp(<void**>&p.returned, NULL)
        if r != NULL:
            p.head = <req_t*>r.q.next
        st_rel32(&p.lock, 0)
    if r == NULL:
        r = <req_t*>alloc_lines(sizeof(req_t))
        if r == NULL:
            return NULL
        fadd32(&p.made, 1)
    r.lmr = NULL
    r.rmr = NULL
    r.n = 0
    r.op = op
    r.flags = r.imm = 0
    r.nic = NIC_ANY
    r.state = PENDING
    r.waiters = 0
    r.refs = 2
    r.extra = 0
    r.status = r.vendor = 0
    r.quiet = r.started = r.cancelled = r.stopped = 0
    r.listed = r.t_slot = 0
    r.lq = NULL
    r.at = r.left = r.part = r.shard_len = 0
    r.shards = 1
    r.shard = 0
    r.tag = -1
    return r

cdef inline void req_clear(req_t* r) noexcept nogil:
    """Gives back what a request owns, and leaves its last lines as req_new expects them."""
    cdef redo_t* d
    if r.target != NULL:
        free(r.target)
    if r.op == OP_SEND and r.send.buf != NULL:
        free(<void*>r.send.buf)
    while r.redo != NULL:
        d = r.redo
        r.redo = d.next
        free(d)
    r.target = NULL
    r.peer = NULL
    r.native = NULL
    r.counter = NULL
    r.cb = NULL
    r.send.buf = NULL
    r.send.at = 0

cdef inline void req_drop(pool_t* p, req_t* r) noexcept nogil:
    """One reference less; the last one gives the request back."""
    cdef req_t* old
    if ld_acq32(&r.refs) != 1 and fadd32(&r.refs, <uint32_t>-1) != 1:
        return
    if r.extra & X_REST:
        req_clear(r)
    if ld_rlx32(&p.made) > POOL_KEEP:
        fadd32(&p.made, <uint32_t>-1)
        free(r)
        return
    while True:
        old = <req_t*>ld_acqp(<void**>&p.returned)
        r.q.next = <qnode_t*>old
        if casp(<void**>&p.returned, old, r):
            return

cdef inline void pool_free(pool_t* p) noexcept nogil:
    """Frees what is free; nobody uses the pool any more."""
    cdef req_t* r
    while p.head != NULL or p.returned != NULL:
        if p.head == NULL:
            p.head = p.returned
            p.returned = NULL
        r = p.head
        p.head = <req_t*>r.q.next
        free(r)

# -- tags of split writes, one set a peer

cdef inline int tag_take(peer_t* p) noexcept nogil:
    cdef int i, b
    for i in range(8):
        if ~p.tags[i]:
            b = ctz64(~p.tags[i])
            p.tags[i] |= <uint64_t>1 << b
            return i * 64 + b
    return -1

cdef inline void tag_give(peer_t* p, int tag) noexcept nogil:
    p.tags[tag >> 6] &= ~(<uint64_t>1 << (tag & 63))

cdef extern from *:
    """
    static inline int ctz64(uint64_t v) { return __builtin_ctzll(v); }
    static inline int popcount(uint64_t v) { return __builtin_popcountll(v); }
    """
    int popcount(uint64_t) noexcept nogil
    int ctz64(uint64_t) noexcept nogil

# -- timer wheel: 512 buckets of 2^23 ns (8.4 ms); a revolution is 4.3 s

cdef enum:
    WHEEL = 512
    TICK_SHIFT = 23

cdef struct wheel_t:
    req_t* slot[WHEEL]
    uint64_t tick           # last tick looked at
    uint64_t n

cdef inline void timer_add(wheel_t* w, req_t* r) noexcept nogil:
    # a deadline that has passed goes where timers() looks next, not a revolution later
    cdef uint32_t i = <uint32_t>(max(r.deadline >> TICK_SHIFT, w.tick) & (WHEEL - 1))
    r.t_prev = NULL
    r.t_next = w.slot[i]
    if r.t_next != NULL:
        r.t_next.t_prev = r
    w.slot[i] = r
    r.t_slot = i + 1
    w.n += 1

cdef inline void timer_del(wheel_t* w, req_t* r) noexcept nogil:
    if r.t_slot:
        if r.t_prev != NULL:
            r.t_prev.t_next = r.t_next
        else:
            w.slot[r.t_slot - 1] = r.t_next
        if r.t_next != NULL:
            r.t_next.t_prev = r.t_prev
        r.t_slot = 0
        w.n -= 1

cdef inline uint64_t timer_next(wheel_t* w, uint64_t now) noexcept nogil:
    """ns until a bucket with anything in it comes up; 2^63 - 1 when there is none."""
    cdef uint64_t t = now >> TICK_SHIFT, i
    if w.n == 0:
        return <uint64_t>0x7fffffffffffffff
    for i in range(WHEEL):
        if w.slot[(t + i) & (WHEEL - 1)] != NULL:
            return ((t + i + 1) << TICK_SHIFT) - now
    return <uint64_t>1 << 32
