"""ImmCounter: the layout of the 32 bits, the table of counters and the matching of shards.

Only the holder of the group's progress lock touches a table. Open addressing with backward-shift deletion;
growing is the only allocation, and doubles.
"""
from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport calloc, free

cdef enum:
    IMM_BITS = 20               # number: explicit below IMM_ALLOC, from alloc_imm() with that bit set
    IMM_MASK = 0xfffff
    IMM_ALLOC = 0x80000
    IMM_INDEX_BITS = 14
    IMM_INDEX_MASK = 0x3fff
    IMM_GEN_MASK = 0x1f
    IMM_SHARD_SHIFT = 20        # log2 of the number of shards: 3 bits
    IMM_TAG_SHIFT = 23          # tag: 9 bits
    IMM_TAGS = 512

cdef struct slot_t:
    uint64_t key                # number; or source << 32 | word, for shards
    uint64_t count              # arrived and not yet consumed
    void* first                 # expectations (req_t*), oldest first
    void* last
    uint32_t used
    uint32_t early              # source + 1 whose early arrival made the slot; 0: expected or allocated

cdef struct table_t:
    slot_t* slot
    uint64_t mask, n
    slot_t* hit                 # one-entry cache: runs of one immediate are the rule

cdef inline uint64_t table_hash(uint64_t k) noexcept nogil:
    k = (k ^ (k >> 32)) * <uint64_t>0x9E3779B97F4A7C15
    return k >> 20

cdef inline int table_init(table_t* t, uint64_t n) noexcept nogil:
    t.slot = <slot_t*>calloc(n, sizeof(slot_t))
    t.mask = n - 1
    t.n = 0
    t.hit = t.slot
    return 0 if t.slot != NULL else -1

cdef inline slot_t* table_probe(table_t* t, uint64_t k) noexcept nogil:
    cdef uint64_t i = table_hash(k) & t.mask
    while t.slot[i].used and t.slot[i].key != k:
        i = (i + 1) & t.mask
    return &t.slot[i]

cdef inline int table_grow(table_t* t) noexcept nogil:
    cdef table_t n
    cdef uint64_t i
    if table_init(&n, (t.mask + 1) * 2) < 0:
        return -1
    for i in range(t.mask + 1):
        if t.slot[i].used:
            table_probe(&n, t.slot[i].key)[0] = t.slot[i]
    n.n = t.n
    free(t.slot)
    t[0] = n
    return 0

cdef inline slot_t* table_find(table_t* t, uint64_t k) noexcept nogil:
    """The slot of k, or NULL."""
    cdef slot_t* s = t.hit
    if s.used and s.key == k:
        return s
    s = table_probe(t, k)
    if not s.used:
        return NULL
    t.hit = s
    return s

cdef inline slot_t* table_get(table_t* t, uint64_t k) noexcept nogil:
    """The slot of k, made if new (count 0, nobody waiting); NULL when out of memory."""
    cdef slot_t* s = t.hit
    if s.used and s.key == k:
        return s
    s = table_probe(t, k)
    if not s.used:
        if (t.n + 1) * 2 > t.mask:
            if table_grow(t) < 0:
                return NULL
            s = table_probe(t, k)
        s.used = 1
        s.key = k
        s.count = 0
        s.first = s.last = NULL
        s.early = 0
        t.n += 1
    t.hit = s
    return s

cdef inline void table_remove(table_t* t, slot_t* s) noexcept nogil:
    """Takes a slot out; those after it move up, so that probing needs no tombstones."""
    cdef uint64_t hole = s - t.slot, i = hole, home
    while True:
        i = (i + 1) & t.mask
        if not t.slot[i].used:
            break
        home = table_hash(t.slot[i].key) & t.mask
        if ((i - home) & t.mask) >= ((i - hole) & t.mask):
            t.slot[hole] = t.slot[i]
            hole = i
    t.slot[hole].used = 0
    t.n -= 1
    t.hit = t.slot
