"""One domain group's loop: take requests, go on with the large ones, poll, look at the timers.

Whoever holds `lock` drives: the worker thread, or a caller inside wait(). Everything in group_t but the queue,
the lock and the bells belongs to the driver. docs/design.md, "The worker", has the reasoning.
"""
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from atom cimport *
from fabric cimport *
from imm cimport *
from request cimport *
from ring cimport *

cdef enum:
    WORKER = 1              # values of the bell, and wake masks: who sleeps
    CALLER = 2
    PARK_WAKE = 1           # the worker failed the try-lock: wake it when the lock is given back
    PARK_TIMED = 2          # ... it looks again by itself within PARK_NS
    PARK_NS = 1000000
    NAP_NS = 20000000       # a sleeping caller comes up this often to look at signals
    TAKE = 64               # requests taken a turn
    POLL = 16               # completions taken a poll
    BATCH = 32              # targets of a scatter posted under one call
    PAGES_A_POST = 4096
    BULK = 1048576          # transfers of this size are marked F_BULK
    SHARD_MIN = 65536

    EV_PEER_LOST = 1        # kinds of event_t
    EV_NIC_DOWN = 2
    EV_EARLY = 3

cdef struct wr_t:           # an outstanding post, or a run of pages
    req_t* r
    uint64_t at, n          # which part of the request
    uint64_t unit           # bytes a post
    uint32_t left           # posts without completion
    uint32_t peer
    uint32_t gen
    uint32_t used

cdef struct nic_t:
    fabric_ops_t* ops
    void* dom
    uint32_t up, caps
    uint64_t max_msg, chunk
    uint64_t out_bytes      # posted, not completed
    uint64_t bytes          # posted in all
    wr_t* wr
    uint32_t* free_wr
    uint32_t nfree, nwr
    peer_t** peers          # by the fabric's index
    uint32_t npeers
    uint64_t posts, completions, fulls, errors, imms
    char pad[16]

cdef extern from "atom.h" nogil:
    struct pollfd:
        int fd
        short events, revents
    int c_poll "poll"(pollfd*, unsigned long, int) noexcept
    long c_read "read"(int, void*, size_t) noexcept
    long c_write "write"(int, const void*, size_t) noexcept

cdef struct event_t:
    cnode_t node
    uint32_t kind, nic, peer, src, group

cdef extern from *:
    """
    /* Number of forks this process is away from the one that loaded the extension. */
    static volatile uint32_t fx_forks = 0;
    static void fx_forked(void) { fx_forks++; }
    static void fx_watch_forks(void) { pthread_atfork(0, 0, fx_forked); }
    #ifdef FX_NO_FENCE_unlock
    #define fx_unlock_fence()
    #else
    #define fx_unlock_fence() full_fence()
    #endif
    #ifdef FX_NO_FENCE_sleep
    #define fx_set_bell(p, v) st_rlx32(p, v)
    #else
    #define fx_set_bell(p, v) xchg32(p, v)
    #endif
    """
    uint32_t fx_forks
    void fx_watch_forks() noexcept nogil
    void fx_unlock_fence() noexcept nogil
    void fx_set_bell(uint32_t*, uint32_t) noexcept nogil

cdef struct group_t:
    mpsc_t q
    uint32_t lock
    uint32_t want           # threads that need the lock for something short
    uint32_t park           # futex word of a worker that failed the try-lock
    char pad0[52]
    uint32_t own_bell
    char pad1[60]
    uint32_t* bell
    uint32_t stop, closed, caller, busy, spin, yields, ready, rearm
    int core
    uint32_t nnics
    nic_t nic[MAX_NICS]
    # -- counters of immediates
    table_t imm, shards
    uint8_t* live           # by index of alloc_imm numbers: generation + 1, or 0
    uint32_t* early         # by source: table entries its early arrivals made
    uint32_t nsrc, max_early
    # -- lists
    req_t* backlog
    req_t* backlog_end
    uint64_t nbacklog
    wheel_t wheel
    uint64_t zombies        # ended, not quiet
    uint64_t sleep_until    # of the sleeping worker; 0: awake
    cbq_t* cbq
    pool_t* pool
    pool_t pool_
    uint32_t index
    # -- sleeping on descriptors
    pollfd fds[MAX_NICS + 1]
    uint32_t nfds           # 0: sleep on the bell's futex
    uint32_t tick           # some NIC has neither bell nor descriptor: look every millisecond
    int efd
    # -- figures
    uint64_t turns, sleeps, submitted, ended, failed, stale, refused, batches
    uint64_t split_min, kicks
    uint64_t t_pick, t_post
    pthread_t thread

# ---------------------------------------------------------------- waking

cdef inline void kick(group_t* g) noexcept nogil:
    """Wakes whoever sleeps as this group's driver, after something was published."""
    cdef uint32_t who
    cdef uint64_t one = 1
    if g.nfds == 0:
        g.kicks += ring_bell(g.bell)
        return
    full_fence()
    if ld_rlx32(g.bell):
        who = xchg32(g.bell, 0)
        if who:
            c_write(g.efd, &one, 8)

cdef inline void wake_worker(group_t* g) noexcept nogil:
    """Wakes the worker whatever the bell says."""
    cdef uint64_t one = 1
    if g.nfds == 0:
        xchg32(g.bell, 0)
        bell_wake(g.bell, WORKER | CALLER)
    else:
        xchg32(g.bell, 0)
        c_write(g.efd, &one, 8)
    if xchg32(&g.park, 0):
        futex_wake(&g.park, 1)

cdef inline bint trylock(group_t* g) noexcept nogil:
    return ld_rlx32(&g.lock) == 0 and xchg32(&g.lock, 1) == 0

cdef inline void release(group_t* g) noexcept nogil:
    """Gives the lock back and wakes a worker that failed to get it."""
    st_rel32(&g.lock, 0)
    fx_unlock_fence()
    if ld_rlx32(&g.park) == PARK_WAKE and xchg32(&g.park, 0):
        futex_wake(&g.park, 1)

cdef inline void unlock(group_t* g) noexcept nogil:
    """Gives the lock back, then looks at the queue again: a submitter that failed the try-lock relies on it."""
    release(g)
    while mpsc_some(&g.q) and trylock(g):
        if progress(g) == 0:
            release(g)                  # a submitter is between exchange and link: it looks for itself
            return
        release(g)

cdef inline void lock_now(group_t* g) noexcept nogil:
    """Takes the lock for something short. Drivers give way while `want` is set."""
    cdef uint32_t i = 0
    fadd32(&g.want, 1)
    while not trylock(g):
        i += 1
        if i > 64:
            if (i & 63) == 0:
                kick(g)             # the driver may sleep with the lock in its hand
            sched_yield()
        else:
            cpu_pause()
    fadd32(&g.want, <uint32_t>-1)

# ---------------------------------------------------------------- the end of a request

cdef inline void backlog_add(group_t* g, req_t* r) noexcept nogil:
    r.next = NULL
    r.prev = g.backlog_end
    if g.backlog_end != NULL:
        g.backlog_end.next = r
    else:
        g.backlog = r
    g.backlog_end = r
    r.listed = 1
    g.nbacklog += 1
    if r.op == OP_SEND:
        r.peer.sends += 1

cdef inline void backlog_del(group_t* g, req_t* r) noexcept nogil:
    if not r.listed:
        return
    if r.prev != NULL:
        r.prev.next = r.next
    else:
        g.backlog = r.next
    if r.next != NULL:
        r.next.prev = r.prev
    else:
        g.backlog_end = r.prev
    r.listed = 0
    g.nbacklog -= 1
    if r.op == OP_SEND:
        r.peer.sends -= 1

cdef inline void arm_timer(group_t* g, req_t* r) noexcept nogil:
    if r.t_slot == 0:
        timer_add(&g.wheel, r)
        if r.deadline < g.sleep_until:
            g.rearm = 1

cdef inline void tell(group_t* g, req_t* r, uint32_t state) noexcept nogil:
    """Publishes the end of a request: native callback or counter, callback thread, waiters, event loop."""
    cdef void* old
    cdef uint64_t one = 1
    cdef loopq_t* lq
    if r.native != NULL:
        r.native(r.native_arg, r.status)
    if r.counter != NULL:
        fadd64(r.counter if state == DONE else r.counter + 1, 1)
    if r.cb != NULL:
        fadd32(&r.refs, 1)
        r.cb_node.kind = CB_TRANSFER
        r.cb_node.self = r
    xchg32(&r.state, state)             # full barrier: then look for waiters
    if r.cb != NULL:
        cbq_push(g.cbq, &r.cb_node)
    if ld_rlx32(&r.waiters):
        futex_wake(&r.state, 1 << 30)
    lq = <loopq_t*>xchgp(<void**>&r.lq, <void*>1)   # 1: closed, a late awaiter sees it is over
    if lq != NULL:
        while True:
            old = ld_acqp(&lq.head)
            r.lq_next = <req_t*>old
            if casp(&lq.head, old, r):
                break
        if old == NULL:                 # only the first of a batch rings the event loop
            c_write(lq.efd, &one, 8)

cdef inline void retire(group_t* g, req_t* r) noexcept nogil:
    """Nothing of the request can land any more: give back what it holds."""
    cdef uint64_t i
    cdef req_t* f
    cdef req_t* nxt
    if r.quiet:
        return
    if r.rmr != NULL:
        fadd32(&r.rmr.inflight, <uint32_t>-1)
        if r.tag >= 0:
            if r.state == DONE:
                tag_give(r.rmr.peer, r.tag)
            else:
                r.rmr.peer.burnt += 1
    elif r.target != NULL:
        for i in range(r.n):
            fadd32(&r.target[i].rmr.inflight, <uint32_t>-1)
    if r.peer != NULL:
        fadd32(&r.peer.inflight, <uint32_t>-1)
    if r.lmr != NULL:
        fadd32(&r.lmr.inflight, <uint32_t>-1)
    st_rel32(&r.quiet, 1)
    f = r.follow
    r.follow = NULL
    while f != NULL:
        nxt = f.next
        f.leader = NULL
        finish(g, f, DONE)
        f = nxt
    req_drop(g.pool, r)

cdef inline bint half_sent(req_t* r) noexcept nogil:
    """A message of which fragments are out: the rest must follow, whatever became of the request."""
    return r.op == OP_SEND and r.send.at != 0 and not r.peer.lost

cdef inline void finish(group_t* g, req_t* r, uint32_t state) noexcept nogil:
    """Ends a request once. Retires it too if nothing of it is outstanding."""
    cdef req_t* f
    cdef req_t** at
    if r.state == PENDING:
        timer_del(&g.wheel, r)
        if r.listed and not half_sent(r):
            backlog_del(g, r)
        r.stopped = 1
        g.ended += 1
        if state != DONE:
            g.failed += 1
        if r.left or r.listed:
            g.zombies += 1
        if r.follow != NULL:
            fadd32(&r.refs, 1)          # followers of the end are told after the state is out
            tell(g, r, state)
            at = &r.follow
            while at[0] != NULL:
                f = at[0]
                if f.imm == FOLLOW_END:
                    at[0] = f.next
                    f.leader = NULL
                    f.status = r.status
                    f.vendor = r.vendor
                    finish(g, f, state)
                else:
                    at = &f.next
            if r.left == 0 and not r.listed:
                retire(g, r)
            req_drop(g.pool, r)
            return
        tell(g, r, state)
    if r.left == 0 and not r.listed:
        retire(g, r)

cdef inline void fail(group_t* g, req_t* r, int32_t status, int32_t vendor) noexcept nogil:
    """Ends a request before its time, wherever it stands."""
    if r.state != PENDING:
        return
    if r.status == 0 or status == FE_CANCELLED or status == FE_TIMEOUT:
        r.status = status
        r.vendor = vendor
    if r.op == OP_EXPECT:
        expect_unlink(g, r)
    elif r.op == OP_FOLLOW and r.leader != NULL:
        follow_unlink(r)
    finish(g, r, CANCELLED if status == FE_CANCELLED else FAILED)

cdef inline void follow_unlink(req_t* r) noexcept nogil:
    cdef req_t** at = &r.leader.follow
    while at[0] != NULL:
        if at[0] == r:
            at[0] = r.next
            break
        at = &at[0].next
    r.leader = NULL

cdef inline void follow(group_t* g, req_t* f, req_t* leader) noexcept nogil:
    """`f` (OP_FOLLOW, f.imm says what of) ends with `leader`."""
    if f.imm == FOLLOW_END and leader.state != PENDING:
        f.status = leader.status
        f.vendor = leader.vendor
        finish(g, f, leader.state)
    elif f.imm == FOLLOW_QUIET and leader.quiet:
        finish(g, f, DONE)
    else:
        f.leader = leader
        f.next = leader.follow
        leader.follow = f
        arm_timer(g, f)

cdef inline void event(group_t* g, uint32_t kind, uint32_t nic, uint32_t peer, uint32_t src) noexcept nogil:
    """Something Python must know of. Only failures come here, so this may allocate."""
    cdef event_t* e = <event_t*>malloc(sizeof(event_t))
    if e == NULL:
        return
    e.kind = kind
    e.nic = nic
    e.peer = peer
    e.src = src
    e.group = g.index
    e.node.kind = CB_EVENT
    e.node.self = e
    cbq_push(g.cbq, &e.node)

# ---------------------------------------------------------------- immediates

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
    if s.last != NULL:
        (<req_t*>s.last).next = r
    else:
        s.first = r
    s.last = r
    arm_timer(g, r)

cdef inline void expect_unlink(group_t* g, req_t* r) noexcept nogil:
    """Takes a waiting expectation out; those behind it may be satisfied now."""
    cdef slot_t* s = table_find(&g.imm, r.imm)
    cdef req_t* p
    r.op = OP_NOP
    if s == NULL:
        return
    p = <req_t*>s.first
    if p == r:
        s.first = r.next
        if r.next == NULL:
            s.last = NULL
    else:
        while p != NULL and p.next != r:
            p = p.next
        if p == NULL:
            return
        p.next = r.next
        if r.next == NULL:
            s.last = p
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

# ---------------------------------------------------------------- NICs and paths

cdef inline void nic_down(group_t* g, uint32_t i) noexcept nogil:
    if g.nic[i].up:
        g.nic[i].up = 0
        event(g, EV_NIC_DOWN, i, 0, NO_SRC)

cdef inline uint64_t slot_ctx(nic_t* d, uint32_t back) noexcept nogil:
    """The ctx that the (back + 1)th next free work-request slot would have."""
    cdef uint32_t i = d.free_wr[d.nfree - 1 - back]
    return <uint64_t>i | <uint64_t>d.wr[i].gen << 32

cdef inline void slot_take(nic_t* d, uint32_t i, req_t* r, uint64_t at, uint64_t n, uint64_t unit, uint32_t left, uint32_t peer) noexcept nogil:
    cdef wr_t* w = &d.wr[i]
    w.r = r
    w.at = at
    w.n = n
    w.unit = unit
    w.left = left
    w.peer = peer
    w.used = 1
    r.left += left
    d.out_bytes += unit * left

cdef inline void slot_free(nic_t* d, uint32_t i) noexcept nogil:
    d.wr[i].used = 0
    d.wr[i].gen += 1
    d.free_wr[d.nfree] = i
    d.nfree += 1

cdef inline int pick(group_t* g, rmr_t* m, uint32_t nic) noexcept nogil:
    """The path whose NIC has the fewest bytes outstanding (then: has carried the fewest); -1: none is up."""
    cdef int best = -1
    cdef uint32_t k
    cdef nic_t* d
    cdef nic_t* b = NULL
    if m.npaths == 1 and nic == NIC_ANY:
        return 0 if g.nic[m.path[0].nic].up else -1
    for k in range(m.npaths):
        if nic != NIC_ANY and m.path[k].nic != nic:
            continue
        d = &g.nic[m.path[k].nic]
        if not d.up:
            continue
        if b == NULL or d.out_bytes < b.out_bytes or (d.out_bytes == b.out_bytes and d.bytes < b.bytes):
            best = k
            b = d
    return best

cdef inline int path_on(rmr_t* m, uint32_t nic) noexcept nogil:
    cdef uint32_t k
    for k in range(m.npaths):
        if m.path[k].nic == nic:
            return k
    return -1

# ---------------------------------------------------------------- posting. Each returns 1 when all is posted (or refused).

cdef inline void refuse(req_t* r, int32_t status) noexcept nogil:
    if r.status == 0:
        r.status = status
    r.stopped = 1

cdef inline uint32_t write_word(req_t* r) noexcept nogil:
    if r.tag >= 0:
        return r.imm | <uint32_t>ctz64(r.shards) << IMM_SHARD_SHIFT | <uint32_t>r.tag << IMM_TAG_SHIFT
    return r.imm

cdef inline void cut(group_t* g, req_t* r) noexcept nogil:
    """Into how many shards a write goes: over several NICs when it is large, more when a NIC cannot carry it whole."""
    cdef uint64_t want = 1, longest = <uint64_t>-1
    cdef uint32_t k
    for k in range(r.rmr.npaths):
        longest = min(longest, g.nic[r.rmr.path[k].nic].max_msg)
    if r.nic == NIC_ANY and r.rmr.npaths > 1 and r.n >= g.split_min:
        want = min(<uint64_t>r.rmr.npaths, max(<uint64_t>1, r.n // SHARD_MIN))
    if longest and r.n > longest:
        want = max(want, (r.n + longest - 1) // longest)
    r.shards = 1
    while r.shards < want and r.shards < 16:
        r.shards *= 2
    r.shard_len = r.n
    if r.shards > 1:
        r.shard_len = (r.n // r.shards + 63) & ~<uint64_t>63
        r.flags |= F_LANDED

cdef inline int post_shard(group_t* g, req_t* r, uint32_t i, uint64_t* part, int more) noexcept nogil:
    """Posts shard i from byte `part` on. 1: all of it; 0: try again; with `more` 0 one chunk at most."""
    cdef uint64_t off = <uint64_t>i * r.shard_len
    cdef uint64_t n = min(r.shard_len, r.n - off), piece
    cdef path_t* p
    cdef nic_t* d
    cdef write_t w
    cdef int k, rc
    if part[0] == 0 or not g.nic[r.rmr.path[r.path].nic].up:
        k = pick(g, r.rmr, r.nic)
        if k < 0:
            refuse(r, FE_NIC)
            return 1
        r.path = k
        part[0] = 0
    p = &r.rmr.path[r.path]
    d = &g.nic[p.nic]
    while True:
        if d.nfree == 0:
            return 0
        piece = n - part[0]
        if d.caps & CAP_SYNC and piece > d.chunk:
            piece = d.chunk
        w.src = r.src + off + part[0]
        w.len = piece
        w.dst = p.base + r.dst + off + part[0]
        w.lkey = r.lmr.lkey[p.nic]
        w.rkey = p.key
        w.ctx = slot_ctx(d, 0)
        w.peer = p.peer
        w.imm = write_word(r)
        w.flags = r.flags if part[0] + piece == n else r.flags & ~<uint32_t>F_IMM
        rc = d.ops.post_write(d.dom, &w)
        if rc == POST_DONE or rc == POST_QUEUED:
            d.posts += 1
            d.bytes += piece
            if rc == POST_QUEUED:
                d.nfree -= 1
                slot_take(d, <uint32_t>w.ctx, r, i, 1, piece, 1, p.peer)
            part[0] += piece
            if part[0] >= n:
                part[0] = 0
                return 1
            if not more:
                return 0
        elif rc == POST_FULL:
            d.fulls += 1
            return 0
        elif rc == -FE_NIC:
            nic_down(g, p.nic)
            part[0] = 0
            return 0
        else:
            d.errors += 1
            refuse(r, -rc)
            return 1

cdef inline int post_write(group_t* g, req_t* r) noexcept nogil:
    if r.shard == 0 and r.part == 0 and r.shard_len == 0:
        cut(g, r)
    if r.shards > 1 and r.flags & F_IMM and r.tag < 0:
        r.tag = tag_take(r.rmr.peer)
        if r.tag < 0:
            return 0
    while r.shard < r.shards:
        if not post_shard(g, r, r.shard, &r.part, 0):
            return 0
        if r.stopped:
            return 1
        r.shard += 1
    return 1

cdef inline int post_run(group_t* g, req_t* r, uint64_t* at, uint64_t end) noexcept nogil:
    """Posts pages [at, end) over one NIC as far as it takes them; advances `at`."""
    cdef int k = pick(g, r.rmr, r.nic), rc
    cdef path_t* p
    cdef nic_t* d
    cdef pages_t v
    cdef uint64_t most, took
    if k < 0:
        refuse(r, FE_NIC)
        return 1
    p = &r.rmr.path[k]
    d = &g.nic[p.nic]
    if d.nfree == 0:
        return 0
    if d.caps & CAP_SYNC:
        most = max(<uint64_t>1, d.chunk // r.len)
        most = min(most, <uint64_t>PAGES_A_POST)
    else:
        most = 256
    if r.rmr.npaths > 1:
        most = min(most, max(<uint64_t>16, (r.n + r.rmr.npaths - 1) // r.rmr.npaths))
    v.at = at[0]
    v.end = min(end, at[0] + most)
    v.src = r.src
    v.dst = p.base + r.dst
    v.sstride = r.sstride
    v.dstride = r.dstride
    v.len = r.len
    v.si = r.si
    v.di = r.di
    v.swide = r.swide
    v.dwide = r.dwide
    v.lkey = r.lmr.lkey[p.nic]
    v.rkey = p.key
    v.ctx = slot_ctx(d, 0)
    v.peer = p.peer
    v.imm = r.imm
    v.flags = r.flags
    rc = d.ops.post_pages(d.dom, &v)
    took = v.at - at[0]
    d.posts += took
    d.bytes += took * r.len
    if took and rc != POST_DONE and not (rc < 0 and d.caps & CAP_SYNC):
        d.nfree -= 1
        slot_take(d, <uint32_t>v.ctx, r, at[0], took, r.len, <uint32_t>took, p.peer)
    at[0] = v.at
    if rc == POST_FULL:
        d.fulls += 1
        return 0
    if rc == -FE_NIC:
        nic_down(g, p.nic)
        return 0
    if rc < 0:
        d.errors += 1
        refuse(r, -rc)
        return 1
    return 1

cdef inline int post_pages(group_t* g, req_t* r) noexcept nogil:
    cdef int i = 0
    cdef uint64_t was
    while r.at < r.n:
        was = r.at
        if not post_run(g, r, &r.at, r.n):
            return 0
        if r.stopped:
            return 1
        i += 1
        if r.at < r.n and (i >= 4 or g.nic[0].caps & CAP_SYNC or was == r.at):
            return 0                    # others get their turn
    return 1

cdef inline void target_failed(req_t* r, uint64_t i, int32_t status) noexcept nogil:
    if r.status == 0:
        r.status = status
        r.failed_at = <uint32_t>i

cdef inline int post_targets(group_t* g, req_t* r, uint64_t* at, uint64_t end) noexcept nogil:
    """Posts targets [at, end) of a scatter; those of a lost peer are refused, the others go on."""
    cdef write_t w[BATCH]
    cdef uint64_t which[BATCH]
    cdef target_t* t
    cdef nic_t* d
    cdef int k, n, taken, i
    cdef uint32_t nic, kept
    cdef uint64_t most, j, piece
    while at[0] < end:
        t = &r.target[at[0]]
        k = pick(g, t.rmr, r.nic)
        if k < 0 or t.rmr.peer.lost:
            target_failed(r, at[0], FE_PEER_LOST if t.rmr.peer.lost else FE_NIC)
            at[0] += 1
            r.part = 0
            continue
        nic = t.rmr.path[k].nic
        d = &g.nic[nic]
        most = min(<uint64_t>BATCH, end - at[0])
        if g.nnics > 1:
            most = min(most, max(<uint64_t>1, (r.n + g.nnics - 1) // g.nnics))
        most = min(most, <uint64_t>d.nfree)
        n = 0
        j = at[0]
        while j < end and n < <int>most:
            t = &r.target[j]
            if t.rmr.peer.lost:
                target_failed(r, j, FE_PEER_LOST)
                if n == 0:
                    at[0] = j + 1
                else:
                    break
                j += 1
                continue
            k = path_on(t.rmr, nic)
            if k < 0:
                break
            piece = t.len - r.part if n == 0 else t.len
            if d.caps & CAP_SYNC and piece > d.chunk:
                if n:
                    break
                piece = d.chunk
            w[n].src = t.src + (r.part if n == 0 else 0)
            w[n].len = piece
            w[n].dst = t.rmr.path[k].base + t.off + (r.part if n == 0 else 0)
            w[n].lkey = r.lmr.lkey[nic] if r.lmr != NULL else 0
            w[n].rkey = t.rmr.path[k].key
            w[n].ctx = slot_ctx(d, n)
            w[n].peer = t.rmr.path[k].peer
            w[n].imm = r.imm
            w[n].flags = r.flags | (F_BULK if t.len >= BULK else 0)
            which[n] = j
            if n == 0 and r.part + piece < t.len:
                w[0].flags &= ~<uint32_t>F_IMM
                n = 1
                break
            n += 1
            j += 1
        if n == 0:
            if most == 0:
                return 0
            continue
        taken = d.ops.post_many(d.dom, w, n)
        kept = 0
        for i in range(taken):
            t = &r.target[which[i]]
            if w[i].rc >= 0:
                d.posts += 1
                d.bytes += w[i].len
                if w[i].rc == POST_QUEUED:
                    kept += 1
                    slot_take(d, <uint32_t>w[i].ctx, r, which[i], 1, w[i].len, 1, w[i].peer)
            elif w[i].rc == -FE_NIC:
                nic_down(g, nic)
                taken = i
                break
            else:
                d.errors += 1
                target_failed(r, which[i], -w[i].rc)
        if kept:                        # compact: refused or finished ones give their slots back
            d.nfree -= n
            for i in range(n):
                if not d.wr[<uint32_t>w[i].ctx].used:
                    d.free_wr[d.nfree] = <uint32_t>w[i].ctx
                    d.nfree += 1
        if taken:
            if taken == 1 and r.part + w[0].len < r.target[which[0]].len and w[0].rc >= 0:
                r.part += w[0].len
                at[0] = which[0]
                return 0                # one chunk of a large slice a turn
            r.part = 0
            at[0] = which[taken - 1] + 1
        if taken < n:
            d.fulls += 1
            return 0
    return 1

cdef inline int post_send(group_t* g, req_t* r) noexcept nogil:
    cdef nic_t* d
    cdef uint32_t i, peer
    cdef int rc
    for i in range(g.nnics):
        if g.nic[i].up and r.peer.at_nic[i] != NO_SRC:
            break
    else:
        refuse(r, FE_NIC)
        return 1
    d = &g.nic[i]
    peer = r.peer.at_nic[i]
    if d.nfree == 0:
        return 0
    r.send.peer = peer
    r.send.ctx = slot_ctx(d, 0)
    rc = d.ops.post_send(d.dom, &r.send)
    if rc == POST_DONE or rc == POST_QUEUED:
        d.posts += 1
        d.bytes += r.send.len
        if rc == POST_QUEUED:
            d.nfree -= 1
            slot_take(d, <uint32_t>r.send.ctx, r, 0, 1, r.send.len, 1, peer)
        return 1
    if rc == POST_FULL:
        d.fulls += 1
        return 0
    if rc == -FE_NIC:
        nic_down(g, i)
        r.send.at = 0
        return 0
    if rc == -FE_TOO_LONG:
        r.dst = d.ops.recv_len(d.dom, peer)      # for the message of the exception
    refuse(r, -rc)
    return 1

cdef inline int post_recv(group_t* g, req_t* r) noexcept nogil:
    cdef nic_t* d
    cdef uint32_t i
    for i in range(g.nnics):
        if g.nic[i].up:
            break
    else:
        return 1
    d = &g.nic[i]
    return d.ops.post_recv(d.dom, <void*>r.src, r.len, r.lmr.lkey[i], <uint64_t>r) != POST_FULL

cdef inline int post_redo(group_t* g, req_t* r) noexcept nogil:
    """What a failed NIC left undone goes over the others."""
    cdef redo_t* d
    cdef uint64_t part
    while r.redo != NULL and not r.stopped:
        d = r.redo
        if r.op == OP_WRITE:
            part = 0
            if not post_shard(g, r, <uint32_t>d.at, &part, 1):
                return 0
        elif r.op == OP_PAGES:
            part = d.at + d.n
            if not post_run(g, r, &d.at, part):
                d.n = part - d.at
                return 0
            d.n = part - d.at
            if d.n and not r.stopped:
                continue
        elif r.op == OP_SCATTER:
            part = d.at + d.n
            if not post_targets(g, r, &d.at, part):
                d.n = part - d.at
                return 0
        elif r.op == OP_SEND:
            if not post_send(g, r):
                return 0
        r.redo = d.next
        free(d)
    return 1

cdef inline int post(group_t* g, req_t* r) noexcept nogil:
    """Posts what can be posted of a request now; 1 when nothing is left to post."""
    if r.redo != NULL and not post_redo(g, r):
        return 0
    if r.stopped and not half_sent(r):
        return 1
    if r.op == OP_WRITE:
        if r.rmr.peer.lost:
            refuse(r, FE_PEER_LOST)
            return 1
        return post_write(g, r)
    if r.op == OP_PAGES:
        if r.rmr.peer.lost:
            refuse(r, FE_PEER_LOST)
            return 1
        return post_pages(g, r)
    if r.op == OP_SCATTER:
        return post_targets(g, r, &r.at, r.n)
    if r.op == OP_SEND:
        if r.peer.lost:
            refuse(r, FE_PEER_LOST)
            return 1
        return post_send(g, r)
    if r.op == OP_RECV:
        return post_recv(g, r)
    return 1

cdef inline void close_out(group_t* g, req_t* r) noexcept nogil:
    """Everything is posted: end the request if nothing is outstanding, else let its completions do it."""
    if r.op == OP_RECV:
        return
    if r.state != PENDING:
        if r.left == 0:
            g.zombies -= 1
            retire(g, r)
    elif r.left == 0:
        finish(g, r, DONE if r.status == 0 else FAILED)
    else:
        arm_timer(g, r)

cdef inline void start(group_t* g, req_t* r) noexcept nogil:
    """First look at a request: post its first write at once."""
    if r.t0:
        g.t_pick = tsc()
    g.submitted += 1
    r.started = 1
    if r.cancelled:
        r.op = OP_NOP if r.op == OP_EXPECT else r.op
        fail(g, r, FE_CANCELLED, 0)
    elif g.closed:
        if r.op == OP_RECV:
            return
        r.op = OP_NOP if r.op == OP_EXPECT else r.op
        fail(g, r, FE_CLOSED, 0)
    elif r.op == OP_EXPECT:
        expect(g, r)
    elif r.op == OP_NOP:
        finish(g, r, DONE)
    elif r.op == OP_SEND and r.peer.sends:
        backlog_add(g, r)
        arm_timer(g, r)
    elif post(g, r):
        close_out(g, r)
    else:
        backlog_add(g, r)
        if r.op != OP_RECV:
            arm_timer(g, r)

cdef inline int backlog_turn(group_t* g) noexcept nogil:
    """Goes on with requests too large for one turn, each a piece, in turn."""
    cdef req_t* r = g.backlog
    cdef req_t* nxt
    cdef uint64_t i, n = min(g.nbacklog, <uint64_t>16)
    cdef int worked = 0
    cdef uint64_t at, part
    cdef uint32_t shard
    for i in range(n):
        r = g.backlog
        if r == NULL:
            break
        backlog_del(g, r)
        if r.op == OP_SEND and r.peer.stamp == g.turns + 1:
            backlog_add(g, r)
            continue
        at = r.at
        part = r.part
        shard = r.shard
        if post(g, r):
            worked = 1
            close_out(g, r)
        else:
            if r.at != at or r.part != part or r.shard != shard:
                worked = 1
            if r.op == OP_SEND:
                r.peer.stamp = g.turns + 1
            backlog_add(g, r)
    return worked

# ---------------------------------------------------------------- completions

cdef inline void complete(group_t* g, uint32_t nic, uint64_t ctx, uint32_t count, int32_t status, int32_t vendor) noexcept nogil:
    """`count` posts of slot `ctx` are over."""
    cdef nic_t* d = &g.nic[nic]
    cdef uint32_t i = <uint32_t>ctx
    cdef wr_t* w
    cdef req_t* r
    if i >= d.nwr:
        return
    w = &d.wr[i]
    if not w.used or w.gen != <uint32_t>(ctx >> 32):
        return                          # of a slot that recover() has settled already
    r = w.r
    count = min(count, w.left)
    d.out_bytes -= w.unit * count
    d.completions += count
    w.left -= count
    if status:
        d.errors += 1
        if r.op == OP_SCATTER:
            target_failed(r, w.at, status)
        else:
            refuse(r, status)
        r.vendor = vendor
    if w.left == 0:
        slot_free(d, i)
    settle_posts(g, r, count)

cdef inline void settle_posts(group_t* g, req_t* r, uint64_t count) noexcept nogil:
    """`count` posts of a request are over: end it when they were the last."""
    r.left -= count
    if r.left:
        return
    if r.state != PENDING:
        if not r.listed:
            g.zombies -= 1
            retire(g, r)
    elif not r.listed and r.redo == NULL:
        finish(g, r, DONE if r.status == 0 else FAILED)
    elif r.stopped:
        finish(g, r, FAILED)

cdef inline void recovered(group_t* g, uint32_t nic, uint64_t ctx, int64_t counted) noexcept nogil:
    """What became of an outstanding post of a failed NIC, its lane being closed: `counted` of it were counted at the
    target (-1: nobody can tell). The rest goes over other NICs. Sending bytes again that carry no count does no harm."""
    cdef nic_t* d = &g.nic[nic]
    cdef wr_t* w = &d.wr[<uint32_t>ctx]
    cdef req_t* r
    cdef redo_t* redo
    cdef uint32_t left
    cdef uint64_t done
    if not w.used or w.gen != <uint32_t>(ctx >> 32):
        return
    r = w.r
    left = w.left
    if counted < left and counted and r.op != OP_SEND and not r.flags & F_IMM:
        counted = 0
    elif left != w.n and counted != <int64_t>left:
        counted = -1                    # some were completed, and which ones is not known
    if counted < 0 or counted >= <int64_t>left or r.state != PENDING or r.stopped:
        complete(g, nic, ctx, left, FE_MAYBE if counted < 0 else 0, 0)
        return
    redo = <redo_t*>malloc(sizeof(redo_t))
    if redo == NULL:
        complete(g, nic, ctx, left, FE_NIC, 0)
        return
    done = <uint64_t>counted
    if r.op == OP_PAGES and not r.flags & F_IMM:
        done = 0
    redo.at = w.at + done
    redo.n = w.n - done
    redo.next = r.redo
    r.redo = redo
    r.send.at = 0
    d.out_bytes -= w.unit * left
    r.left -= left
    slot_free(d, <uint32_t>ctx)
    if not r.listed:
        backlog_add(g, r)

cdef inline void forget_shards(group_t* g, uint32_t src) noexcept nogil:
    """Half-arrived split writes of a source that is gone."""
    cdef uint64_t i = 0
    while i <= g.shards.mask:
        if g.shards.slot[i].used and <uint32_t>(g.shards.slot[i].key >> 32) == src:
            table_remove(&g.shards, &g.shards.slot[i])
        else:
            i += 1

cdef inline void peer_lost(group_t* g, uint32_t nic, uint64_t index, uint32_t src) noexcept nogil:
    cdef nic_t* d = &g.nic[nic]
    cdef peer_t* p = NULL
    if index < d.npeers:
        p = d.peers[index]
    if p != NULL:
        if p.lost:
            return
        p.lost = 1
    event(g, EV_PEER_LOST, nic, p.id if p != NULL else NO_SRC, src)

cdef inline int poll_nic(group_t* g, uint32_t i) noexcept nogil:
    cdef comp_t c[POLL]
    cdef nic_t* d = &g.nic[i]
    cdef int n = d.ops.poll(d.dom, c, POLL), k
    cdef req_t* r
    for k in range(n):
        if c[k].kind == C_IMM:
            d.imms += c[k].count
            arrive(g, c[k].src, c[k].imm, c[k].count)
        elif c[k].kind == C_DONE:
            complete(g, i, c[k].ctx, c[k].count, 0, 0)
        elif c[k].kind == C_ERROR:
            complete(g, i, c[k].ctx, c[k].count, c[k].status, c[k].vendor)
        elif c[k].kind == C_RECV:
            r = <req_t*>c[k].ctx
            r.n = c[k].len
            r.imm = c[k].src
            r.cb_node.kind = CB_RECV
            r.cb_node.self = r
            cbq_push(g.cbq, &r.cb_node)
        elif c[k].kind == C_PEER_LOST:
            peer_lost(g, i, c[k].ctx, c[k].src)
        elif c[k].kind == C_NIC_DOWN:
            nic_down(g, i)
    return n

cdef inline void timers(group_t* g) noexcept nogil:
    """Ends requests whose deadline has passed."""
    cdef uint64_t now = now_ns(), t = now >> TICK_SHIFT, i
    cdef req_t* r
    cdef req_t* nxt
    if t - g.wheel.tick >= WHEEL:
        g.wheel.tick = t - WHEEL + 1
    i = g.wheel.tick
    while i <= t:
        r = g.wheel.slot[i & (WHEEL - 1)]
        while r != NULL:
            nxt = r.t_next
            if r.deadline <= now:
                fail(g, r, FE_TIMEOUT, 0)
                nxt = g.wheel.slot[i & (WHEEL - 1)]     # failing one may have ended others
            r = nxt
        i += 1
    g.wheel.tick = t

cdef inline int progress(group_t* g) noexcept nogil:
    """One turn: take requests, go on with large ones, poll. Returns how much there was to do."""
    cdef int n = 0
    cdef uint32_t i
    cdef uint64_t t0
    cdef req_t* r
    while n < TAKE:
        r = <req_t*>mpsc_pop(&g.q)
        if r == NULL:
            break
        t0 = r.t0
        start(g, r)                     # may give r back
        if t0:
            g.t_post = tsc()
        n += 1
    if g.backlog != NULL:
        n += backlog_turn(g)
    for i in range(g.nnics):
        if g.nic[i].dom != NULL:
            n += poll_nic(g, i)
    g.turns += 1
    if g.wheel.n and (g.turns & 63) == 0:
        timers(g)
    return n

# ---------------------------------------------------------------- sleeping and driving

cdef inline bint armed(group_t* g) noexcept nogil:
    """With the bell set: whether there is really nothing to do. Lock held."""
    cdef uint32_t i
    if mpsc_some(&g.q):
        return False
    for i in range(g.nnics):
        if g.nic[i].dom != NULL and g.nic[i].ops.arm(g.nic[i].dom):
            return False
    return True

cdef inline void sleep_on(group_t* g, uint32_t who, int64_t ns) noexcept nogil:
    """Sleeps until the bell, a descriptor or `ns` (negative: no end)."""
    cdef uint64_t v
    cdef uint32_t i
    if g.tick and (ns < 0 or ns > 1000000):
        ns = 1000000
    if g.backlog != NULL and (ns < 0 or ns > 1000000):
        ns = 1000000                    # something waits for room that no bell announces
    g.sleeps += 1
    if g.nfds == 0:
        bell_wait(g.bell, who, who, ns)
        return
    for i in range(g.nfds):
        g.fds[i].revents = 0
    c_poll(g.fds, g.nfds, -1 if ns < 0 else <int>((ns + 999999) // 1000000))
    if g.fds[0].revents:
        c_read(g.efd, &v, 8)

cdef inline void caller_leaves(group_t* g) noexcept nogil:
    """The driver goes: from here on arrivals wake the worker. What is there already is handed to it."""
    fx_set_bell(g.bell, WORKER)
    if g.backlog == NULL and not g.rearm and armed(g):
        release(g)
        return
    g.rearm = 0
    st_rlx32(g.bell, 0)
    release(g)
    wake_worker(g)

cdef inline void worker_turns(group_t* g) noexcept nogil:
    """The worker's life after set-up."""
    cdef uint32_t idle = 0
    cdef int n
    cdef int64_t ns
    cdef uint64_t now
    while not ld_acq32(&g.stop):
        if ld_rlx32(&g.want):
            sched_yield()
        if not trylock(g):
            if not g.caller:
                sched_yield()
                continue
            xchg32(&g.park, PARK_TIMED if g.nfds else PARK_WAKE)
            if ld_rlx32(&g.lock) == 0:
                st_rlx32(&g.park, 0)
                continue
            futex_wait(&g.park, PARK_TIMED if g.nfds else PARK_WAKE, PARK_NS if g.nfds else 100000000)
            st_rlx32(&g.park, 0)
            continue
        n = progress(g)
        if n:
            idle = 0
            release(g)
            continue
        idle += 1
        if g.busy:
            release(g)
            cpu_pause()
        elif not g.caller and idle < g.spin:
            release(g)
            cpu_pause()
        elif not g.caller and idle < g.spin + g.yields:
            release(g)
            sched_yield()
        else:
            now = now_ns()
            if g.wheel.n:
                timers(g)
            ns = <int64_t>timer_next(&g.wheel, now)
            g.sleep_until = now + <uint64_t>ns
            fx_set_bell(g.bell, WORKER)
            if armed(g) and not ld_acq32(&g.stop):
                release(g)
                sleep_on(g, WORKER, -1 if g.wheel.n == 0 else ns)
            else:
                st_rlx32(g.bell, 0)
                release(g)
            g.sleep_until = 0
            idle = 0

cdef inline void submit(group_t* g, req_t* r) noexcept nogil:
    """Hands a request over. Caller style: post here and now if nobody else drives. Else: queue, bell."""
    cdef uint64_t t0 = r.t0
    if g.caller and trylock(g):
        start(g, r)
        if t0:
            g.t_post = tsc()
        if g.backlog != NULL or g.rearm:
            g.rearm = 0
            unlock(g)
            wake_worker(g)
        else:
            unlock(g)
        return
    mpsc_push(&g.q, &r.q)
    if g.caller:
        full_fence()
        if trylock(g):
            progress(g)
            unlock(g)
            return
    kick(g)

cdef inline int drive(group_t* g, req_t* r) noexcept nogil:
    """With the lock: turn until r has ended (1), or for some 60 ms of naps (0)."""
    cdef uint32_t idle = 0, naps = 0, turn = 0
    cdef int ended
    st_rlx32(g.bell, 0)
    while True:
        ended = ld_acq32(&r.state) != PENDING
        if ended:
            break
        turn += 1
        if ld_rlx32(&g.want) or (turn & 0xffff) == 0:
            if turn > 1:
                break                   # somebody needs the lock, or it is time to look at the clock
        if progress(g):
            idle = 0
            continue
        idle += 1
        if idle < g.spin:
            cpu_pause()
        elif idle < g.spin + g.yields:
            sched_yield()
        else:
            if g.wheel.n:
                timers(g)
            fx_set_bell(g.bell, CALLER)
            if armed(g) and ld_acq32(&r.state) == PENDING:
                sleep_on(g, CALLER, NAP_NS)
                naps += 1
            st_rlx32(g.bell, 0)
            idle = 0
            if naps > 2:
                break
    caller_leaves(g)
    return ld_acq32(&r.state) != PENDING

cdef inline int wait_slice(group_t* g, req_t* r, int64_t ns) noexcept nogil:
    """Waits for the end of r for at most some 50 ms, or `ns`; 1 when it has ended."""
    cdef uint32_t i
    cdef uint64_t end
    if ld_acq32(&r.state):
        return 1
    if g.caller:
        end = now_ns() + <uint64_t>min(ns, <int64_t>50000000)
        i = 0
        while True:
            if trylock(g):
                if drive(g, r):
                    return 1
                if now_ns() >= end:
                    return 0
                while ld_rlx32(&g.want) and i < 1000:
                    sched_yield()
                    i += 1
                i = 0
                continue
            i += 1
            if i < 100:
                cpu_pause()
            else:
                xchg32(&r.waiters, 1)
                if not ld_acq32(&r.state):
                    futex_wait(&r.state, PENDING, 100000)
            if ld_acq32(&r.state):
                return 1
            if i >= 100 and now_ns() >= end:
                return 0
    for i in range(g.spin):
        if ld_acq32(&r.state):
            return 1
        cpu_pause()
    for i in range(g.yields):
        if ld_acq32(&r.state):
            return 1
        sched_yield()
    xchg32(&r.waiters, 1)
    if not ld_acq32(&r.state):
        futex_wait(&r.state, PENDING, min(ns, <int64_t>50000000))
    return ld_acq32(&r.state) != PENDING
