# Immediates: arrivals, expectations, shards; part of worker.pyx. Runs under the progress lock.

cdef inline void early_clear(group_t* g, slot_t* s) noexcept nogil:
    if s.early:
        if s.early - 1 < g.nsrc:
            g.early[s.early - 1] -= 1
        s.early = 0

cdef inline void settle(group_t* g, slot_t* s) noexcept nogil:
    """Ends the expectations that what has arrived satisfies, oldest first."""
    cdef req_t* r
    while s.first != NULL:
        r = <req_t*>s.first
        if s.count < r.n:
            return
        st_rel64(&s.count, s.count - r.n)
        s.first = r.next
        if r.next == NULL:
            s.last = NULL
        else:
            r.next.prev = NULL
        r.op = OP_NOP                   # no longer in the list
        finish(g, r, DONE)

cdef inline void tidy(group_t* g, slot_t* s) noexcept nogil:
    """Forgets an explicit number that nobody waits for, once there are many."""
    if s.count == 0 and s.first == NULL and g.imm.n > 4096 and not s.key & IMM_ALLOC:
        early_clear(g, s)
        table_remove(&g.imm, s)

cdef inline void expect(group_t* g, req_t* r) noexcept nogil:
    cdef slot_t* s
    if r.imm & IMM_ALLOC and g.live[r.imm & IMM_INDEX_MASK] != ((r.imm >> IMM_INDEX_BITS) & IMM_GEN_MASK) + 1:
        r.op = OP_NOP
        fail(g, r, FE_CANCELLED, 0)
        return
    s = table_get(&g.imm, r.imm)
    if s == NULL:
        r.op = OP_NOP
        fail(g, r, FE_PROVIDER, 12)     # ENOMEM
        return
    early_clear(g, s)
    if s.first == NULL and s.count >= r.n:
        st_rel64(&s.count, s.count - r.n)
        r.op = OP_NOP
        tidy(g, s)
        finish(g, r, DONE)
        return
    r.next = NULL
    r.prev = <req_t*>s.last
    if s.last != NULL:
        (<req_t*>s.last).next = r
    else:
        s.first = r
    s.last = r
    arm_timer(g, r)

cdef inline void expect_unlink(group_t* g, req_t* r) noexcept nogil:
    """Takes a waiting expectation out; those behind it may be satisfied now."""
    cdef slot_t* s = table_find(&g.imm, r.imm)
    r.op = OP_NOP
    if s == NULL:
        return
    if r.prev != NULL:
        r.prev.next = r.next
    else:
        s.first = r.next
    if r.next != NULL:
        r.next.prev = r.prev
    else:
        s.last = r.prev
    settle(g, s)

cdef inline void imm_free(group_t* g, uint32_t number) noexcept nogil:
    """Forgets a number: who waits for it is cancelled, what arrived is dropped."""
    cdef slot_t* s = table_find(&g.imm, number)
    cdef req_t* r
    if number & IMM_ALLOC:
        g.live[number & IMM_INDEX_MASK] = 0
    if s == NULL:
        return
    s.count = 0
    while s.first != NULL:
        r = <req_t*>s.first
        s.first = r.next
        if r.next != NULL:
            r.next.prev = NULL
        r.op = OP_NOP
        fail(g, r, FE_CANCELLED, 0)
        s = table_find(&g.imm, number)
        if s == NULL:
            return
    early_clear(g, s)
    table_remove(&g.imm, s)

cdef inline void arrive(group_t* g, uint32_t src, uint32_t word, uint64_t count) noexcept nogil:
    """`count` posts with this immediate have landed: make logical counts of them."""
    cdef uint32_t number = word & IMM_MASK
    cdef uint32_t shards = (word >> IMM_SHARD_SHIFT) & 7
    cdef uint64_t known, full
    cdef slot_t* s
    if shards:
        full = <uint64_t>1 << shards
        s = table_get(&g.shards, (<uint64_t>src << 32) | word)
        if s == NULL:
            g.refused += count
            return
        s.count += count
        if s.count < full:
            return
        count = 1
        s.count -= full
        if s.count == 0:
            table_remove(&g.shards, s)
    if number & IMM_ALLOC and g.live[number & IMM_INDEX_MASK] != ((number >> IMM_INDEX_BITS) & IMM_GEN_MASK) + 1:
        g.stale += count
        return
    known = g.imm.n
    s = table_get(&g.imm, number)
    if s == NULL:
        g.refused += count
        return
    if g.imm.n != known and not number & IMM_ALLOC and src < g.nsrc:
        if g.early[src] >= g.max_early:
            table_remove(&g.imm, s)
            if g.refused == 0:
                event(g, EV_EARLY, 0, 0, src)
            g.refused += count
            return
        g.early[src] += 1
        s.early = src + 1
    st_rel64(&s.count, s.count + count)
    if s.first != NULL:
        settle(g, s)
