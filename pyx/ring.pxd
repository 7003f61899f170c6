"""Lock-free queues. `mpsc_t`: any number of submitters, one consumer (the holder of the progress lock).

Intrusive and unbounded: a push is one exchange, allocates nothing and cannot find the queue full. A submitter that is
preempted between its exchange and its link hides later nodes until it runs again; it loses none.
"""
from libc.stdint cimport int64_t, uint32_t, uint64_t
from atom cimport *

cdef struct qnode_t:
    qnode_t* next

cdef extern from *:
    """
    /* The lines of a request that a submitter has just written, all at once rather than one after another. */
    static inline void fx_fetch(const void *p) {
        const char *c = (const char *)p;
        for (int i = 64; i < 640; i += 64) __builtin_prefetch(c + i, 1);
    }
    """
    void fetch "fx_fetch"(void*) noexcept nogil

cdef struct mpsc_t:
    qnode_t* head           # last pushed: submitters exchange it
    char pad0[56]
    qnode_t* tail           # next to pop: consumer only
    qnode_t stub
    char pad1[48]

cdef inline void mpsc_init(mpsc_t* q) noexcept nogil:
    q.stub.next = NULL
    q.head = q.tail = &q.stub

cdef inline void mpsc_push(mpsc_t* q, qnode_t* n) noexcept nogil:
    cdef qnode_t* prev
    n.next = NULL
    prev = <qnode_t*>xchgp(<void**>&q.head, n)
    st_relp(<void**>&prev.next, n)

cdef inline qnode_t* mpsc_pop(mpsc_t* q) noexcept nogil:
    """The oldest node, or NULL when there is none or its submitter has not linked it yet."""
    cdef qnode_t* tail = q.tail
    cdef qnode_t* nxt = <qnode_t*>ld_acqp(<void**>&tail.next)
    if tail == &q.stub:
        if nxt == NULL:
            return NULL
        q.tail = nxt
        tail = nxt
        fetch(tail)
        nxt = <qnode_t*>ld_acqp(<void**>&tail.next)
    if nxt != NULL:
        q.tail = nxt
        return tail
    if tail != <qnode_t*>ld_acqp(<void**>&q.head):
        return NULL
    mpsc_push(q, &q.stub)
    nxt = <qnode_t*>ld_acqp(<void**>&tail.next)
    if nxt != NULL:
        q.tail = nxt
        return tail
    return NULL

cdef inline bint mpsc_some(mpsc_t* q) noexcept nogil:
    """Whether anything was pushed and not popped, linked or not."""
    return q.tail != &q.stub or <qnode_t*>ld_acqp(<void**>&q.head) != &q.stub

# -- completions for Python: a stack taken whole, so that one GIL acquisition serves a batch

cdef struct cnode_t:
    cnode_t* next
    void* self              # what the node is part of
    uint32_t kind           # CB_

cdef enum:
    CB_TRANSFER = 1         # self: req_t* whose Transfer has a Python callback
    CB_RECV = 2             # self: req_t* of a receive buffer with a message in it
    CB_EVENT = 3            # self: event_t*
    CB_WATCH = 4            # self: watch_t*

cdef struct cbq_t:
    cnode_t* head
    char pad0[56]
    uint32_t bell           # 1: the callback thread sleeps
    uint32_t stop
    uint64_t pushed

cdef inline void cbq_push(cbq_t* q, cnode_t* n) noexcept nogil:
    cdef cnode_t* old = <cnode_t*>ld_acqp(<void**>&q.head)
    while True:
        n.next = old
        if casp(<void**>&q.head, old, n):
            break
        old = <cnode_t*>ld_acqp(<void**>&q.head)
    ring_bell(&q.bell)

cdef inline cnode_t* cbq_take(cbq_t* q) noexcept nogil:
    """Everything pushed so far, oldest first."""
    cdef cnode_t* n = <cnode_t*>xchgp(<void**>&q.head, NULL)
    cdef cnode_t* out = NULL
    cdef cnode_t* nxt
    while n != NULL:
        nxt = n.next
        n.next = out
        out = n
        n = nxt
    return out

cdef inline cnode_t* cbq_wait(cbq_t* q, int64_t ns) noexcept nogil:
    """Like cbq_take, after sleeping at most `ns` (negative: no end) when there is nothing."""
    cdef cnode_t* n = cbq_take(q)
    if n != NULL or ns == 0:
        return n
    xchg32(&q.bell, 1)
    if ld_acqp(<void**>&q.head) == NULL and not ld_acq32(&q.stop):
        bell_wait(&q.bell, 1, 1, ns)
    st_rlx32(&q.bell, 0)
    return cbq_take(q)
