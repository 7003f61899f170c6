"""fabricx._local: the local fabric. Peers are processes of this host (or this one); a write is a copy made by its sender,
straight into the target's memory, and an entry in a lane of the target's inbox. The target's CPU takes no part in landing data.

The door: a sender marks its lane busy, looks whether the lane is open and the region registered, copies, publishes, and clears
the mark. Whoever closes a lane or takes a region away does so first and then waits for busy senders (two full fences, as in Dekker's
algorithm), so that nothing lands afterwards, even from a process that was stopped in between.
"""
import os

import numpy as np

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset
from atom cimport *
from fabric cimport *
from lane cimport *

cdef extern from *:
    """
    #include <errno.h>
    #include <signal.h>
    #include <sys/uio.h>
    static int fx_vm_write(int pid, const struct iovec *l, const struct iovec *r, int n, uint64_t want) {
        /* partial writes happen at page faults and at 2 GiB: the caller goes on from `want` */
        ssize_t k = process_vm_writev(pid, l, n, r, n, 0);
        if (k < 0) return -errno;
        return (uint64_t)k == want ? 0 : 1;
    }
    static int64_t fx_vm_write1(int pid, const void *src, uint64_t dst, uint64_t n) {
        uint64_t done = 0;
        while (done < n) {
            uint64_t part = n - done > (1ull << 30) ? (1ull << 30) : n - done;
            struct iovec l = { (char *)src + done, part }, r = { (void *)(uintptr_t)(dst + done), part };
            ssize_t k = process_vm_writev(pid, &l, 1, &r, 1, 0);
            if (k <= 0) return k < 0 ? -errno : -EFAULT;
            done += k;
        }
        return 0;
    }
    static int64_t fx_vm_read(int pid, void *dst, uint64_t src, uint64_t n) {
        struct iovec l = { dst, n }, r = { (void *)(uintptr_t)src, n };
        ssize_t k = process_vm_readv(pid, &l, 1, &r, 1, 0);
        return k < 0 ? -errno : k;
    }
    static int fx_gone(int pidfd) {                 /* a pidfd turns readable when the process ends */
        struct pollfd p = { pidfd, POLLIN, 0 };
        return pidfd >= 0 && poll(&p, 1, 0) == 1;
    }
    static int ctz_64(uint64_t v) { return __builtin_ctzll(v); }
    static void fx_die(int stop) { raise(stop ? SIGSTOP : SIGKILL); }
    """
    int fx_vm_write(int, iovec*, iovec*, int, uint64_t) noexcept nogil
    int64_t fx_vm_write1(int, const void*, uint64_t, uint64_t) noexcept nogil
    int64_t fx_vm_read(int, void*, uint64_t, uint64_t) noexcept nogil
    int fx_pid "getpid" () noexcept nogil
    int fx_gone(int) noexcept nogil
    int ctz_64(uint64_t) noexcept nogil
    void fx_die(int) noexcept nogil
    enum: ESRCH, EPERM, EFAULT, ENOSYS

cdef enum:
    EVENTS = 1024
    COMPS = 8192
    PEERS = 1024
    IMPORTS = 65536
    IMPORT_BITS = 16
    RECVS = 65536
    CHUNK = 262144

    FP_BEFORE_COPY = 1          # failpoints; names in fabricx/fabrics/local.py
    FP_AFTER_COPY = 2
    FP_PUBLISHED = 3
    FP_MID_MESSAGE = 4

cdef struct dom_t:
    inbox_t* box                # mine
    uint32_t nic, down
    uint64_t waiting[LANE_WORDS]    # lanes taken from the summary, not drained
    uint64_t stalled[LANE_WORDS]    # lanes whose message waits for a receive
    rx_t* rx                    # shared by the group's domains, by lane
    region_t* region            # shared, by slot
    tx_t* peer
    uint32_t npeers, nbounce    # bounced posts without completion
    imp_t* imp
    recv_t* recv                # ring of posted receives
    uint64_t recv_head, recv_tail
    uint64_t receiving          # receives that are being filled
    uint64_t dropped            # messages that were longer than the receives left
    comp_t* comp                # completions to be polled
    uint64_t comp_head, comp_tail
    chaos_t* chaos
    uint64_t posts              # for Chaos
    uint64_t fail_at            # clock at which it fails; 0: not
    uint32_t fp, fp_left, fp_stop
    uint64_t probe              # peers read it to see whether they may


cdef inline void fail_here(dom_t* d, uint32_t point) noexcept nogil:
    if d.fp == point:
        if d.fp_left > 1:
            d.fp_left -= 1
        else:
            d.fp = 0
            fx_die(d.fp_stop)

# ---------------------------------------------------------------- sending

cdef inline bint room(tx_t* p, uint64_t n) noexcept nogil:
    if p.tail + n - p.head_seen > ENTRIES:
        p.head_seen = ld_acq64(&p.lane.head)
    return p.tail + n - p.head_seen <= ENTRIES

cdef inline entry_t* entry(tx_t* p) noexcept nogil:
    return &p.lane.e[p.tail % ENTRIES]

cdef inline void publish(tx_t* p) noexcept nogil:
    """What was put into entry() becomes visible: payload and fields before the lap."""
    st_rel32(&entry(p).lap, <uint32_t>(p.tail // ENTRIES + 1))
    p.tail += 1

cdef inline void announce(tx_t* p) noexcept nogil:
    """Tells the receiver that this lane has something; the locked OR is the full fence that its bell needs."""
    for64(p.word, p.bit)
    if ld_rlx32(&p.box.bell):
        ring_bell(&p.box.bell)

cdef inline int enter(dom_t* d, tx_t* p, imp_t* m) noexcept nogil:
    """Through the door, or why not."""
    p.busy += 1
    xchg32(&p.lane.busy, p.busy)
    if ld_acq32(&p.lane.closed):
        leave(p)
        return -FE_PEER_LOST
    if ld_acq64(&p.box.rkey[m.rkey & (REGIONS - 1)]) != m.rkey:
        leave(p)
        return -FE_REMOTE_KEY
    return 0

cdef inline void leave(tx_t* p) noexcept nogil:
    p.busy += 1
    st_rel32(&p.lane.busy, p.busy)

cdef int vm_status(tx_t* p, int64_t e, const void* src, uint64_t n) noexcept nogil:
    """What process_vm_writev's error means; EFAULT may be ours: the source may be unmapped."""
    cdef uint64_t at = <uint64_t>src, last = at + n - 1
    cdef uint8_t byte
    if e == -ESRCH or fx_gone(p.pidfd):
        return -FE_PEER_LOST
    if e != -EFAULT:
        return -FE_PROVIDER
    while True:
        if fx_vm_read(fx_pid(), &byte, at, 1) != 1:
            return -FE_LOCAL_KEY
        if at == last:
            return -FE_REMOTE_KEY   # its owner unmapped it
        at = min((at | 4095) + 1, last)

cdef inline int copy_to(tx_t* p, imp_t* m, uint64_t off, const void* src, uint64_t n, uint32_t flags) noexcept nogil:
    cdef int64_t e
    if m.mode == M_MAP:
        if flags & F_BULK:
            copy_nt(<void*>(m.addr + off), src, n)
        else:
            copy_small(<void*>(m.addr + off), src, n)
        return 0
    if fx_gone(p.pidfd):            # its number may be another process's by now
        return -FE_PEER_LOST
    e = fx_vm_write1(p.pid, src, m.addr + off, n)
    if e < 0 or fx_gone(p.pidfd):
        return vm_status(p, e, src, n)
    return 0

cdef int bounce(dom_t* d, tx_t* p, imp_t* m, uint64_t off, uint64_t src, uint64_t n) noexcept nogil:
    """Payload through the ring; 1: all of it is in, 0: no room. A piece larger than the ring goes on where it stopped."""
    cdef uint64_t free_, k, pos, at = 0
    cdef entry_t* e
    if n > BOUNCE_BYTES and p.big_src == src and p.big_off == off:
        at = p.big_at
    while at < n:
        if not room(p, 2):
            break
        free_ = BOUNCE_BYTES - (p.bounce_tail - ld_acq64(&p.lane.bounce_head))
        if n <= BOUNCE_BYTES and free_ < n - at:
            break
        pos = p.bounce_tail % BOUNCE_BYTES
        k = min(min(free_, n - at), <uint64_t>BOUNCE_BYTES - pos)
        if k == 0:
            break
        memcpy(&p.lane.bounce[pos], <void*>(src + at), k)
        p.bounce_tail += k
        e = entry(p)
        e.kind = E_BOUNCE
        e.imm = <uint32_t>(m.rkey & (REGIONS - 1))
        e.off = off + at
        e.pos = <uint32_t>pos
        e.len = <uint32_t>k
        publish(p)
        at += k
    if at < n:
        if n > BOUNCE_BYTES:
            p.big_src, p.big_off, p.big_at = src, off, at
        if at:
            announce(p)
        return 0
    p.big_src = 0
    return 1

cdef inline void put_imm(tx_t* p, uint32_t imm, uint32_t count) noexcept nogil:
    cdef entry_t* e = entry(p)
    e.kind = E_IMM
    e.imm = imm
    e.count = count
    publish(p)
    announce(p)

cdef inline int pend(dom_t* d, tx_t* p, uint64_t ctx, uint32_t count) noexcept nogil:
    """A bounced post is done when the receiver has passed it."""
    cdef pend_t* x = &p.pend[p.pend_tail % PENDS]
    x.ctx = ctx
    x.pos = p.tail
    x.count = count
    p.pend_tail += 1
    d.nbounce += 1
    return POST_QUEUED

cdef int put(dom_t* d, write_t* w) noexcept nogil:
    """Carries out one write."""
    cdef tx_t* p = &d.peer[w.peer]
    cdef imp_t* m
    cdef int rc
    if w.peer >= d.npeers or p.dead:
        return -FE_PEER_LOST
    m = &d.imp[w.rkey & (IMPORTS - 1)]
    if m.mode == M_NONE or m.gen != w.rkey >> IMPORT_BITS:
        return -FE_REMOTE_KEY
    if w.dst > m.len or w.len > m.len - w.dst:
        return -FE_REMOTE_RANGE
    if not room(p, 1):
        return POST_FULL
    if m.mode == M_BOUNCE and (p.pend_tail - p.pend_head >= PENDS):
        return POST_FULL
    rc = enter(d, p, m)
    if rc < 0:
        return rc
    if w.len:
        fail_here(d, FP_BEFORE_COPY)
        if m.mode == M_BOUNCE:
            if not bounce(d, p, m, w.dst, w.src, w.len):
                leave(p)
                return POST_FULL
        else:
            rc = copy_to(p, m, w.dst, <void*>w.src, w.len, w.flags)
            if rc < 0:
                leave(p)
                return rc
    fail_here(d, FP_AFTER_COPY)
    if w.flags & F_IMM:
        put_imm(p, w.imm, 1)
    elif m.mode == M_BOUNCE:
        announce(p)
    leave(p)
    fail_here(d, FP_PUBLISHED)
    if m.mode == M_BOUNCE and w.len:
        return pend(d, p, w.ctx, 1)
    return POST_DONE

cdef inline uint64_t index_of(const void* a, uint32_t wide, uint64_t i) noexcept nogil:
    if a == NULL:
        return i
    return (<uint64_t*>a)[i] if wide else (<uint32_t*>a)[i]

cdef int pages_map(pages_t* g, uint64_t addr) noexcept nogil:
    cdef uint64_t i, n = g.len
    if g.si != NULL and g.di != NULL and not g.swide and not g.dwide:       # the usual case, without branches a page
        for i in range(g.at, g.end):
            memcpy(<void*>(addr + g.dst + (<uint32_t*>g.di)[i] * g.dstride), <void*>(g.src + (<uint32_t*>g.si)[i] * g.sstride), n)
    else:
        for i in range(g.at, g.end):
            memcpy(<void*>(addr + g.dst + index_of(g.di, g.dwide, i) * g.dstride),
                   <void*>(g.src + index_of(g.si, g.swide, i) * g.sstride), n)
    return 0

cdef int pages_vm(tx_t* p, imp_t* m, pages_t* g) noexcept nogil:
    """Pages by process_vm_writev, up to VM_BATCH pairs a call."""
    cdef iovec l[VM_BATCH]
    cdef iovec r[VM_BATCH]
    cdef uint64_t i = g.at, j
    cdef int k, e
    cdef int64_t x
    if fx_gone(p.pidfd):
        return -FE_PEER_LOST
    while i < g.end:
        k = 0
        j = i
        while j < g.end and k < VM_BATCH:
            l[k].iov_base = <void*>(g.src + index_of(g.si, g.swide, j) * g.sstride)
            r[k].iov_base = <void*>(m.addr + g.dst + index_of(g.di, g.dwide, j) * g.dstride)
            l[k].iov_len = r[k].iov_len = g.len
            k += 1
            j += 1
        e = fx_vm_write(p.pid, l, r, k, g.len * <uint64_t>k)
        if e == 1:                  # stopped half way: page by page
            while i < j:
                x = fx_vm_write1(p.pid, <void*>(g.src + index_of(g.si, g.swide, i) * g.sstride),
                                 m.addr + g.dst + index_of(g.di, g.dwide, i) * g.dstride, g.len)
                if x < 0:
                    return vm_status(p, x, <void*>(g.src + index_of(g.si, g.swide, i) * g.sstride), g.len)
                i += 1
        elif e < 0:
            return vm_status(p, e, l[0].iov_base, l[0].iov_len)
        i = j
    return -FE_PEER_LOST if fx_gone(p.pidfd) else 0

cdef int put_pages(dom_t* d, pages_t* g) noexcept nogil:
    """Carries out pages [at, end): ONE entry carries the count of them all."""
    cdef tx_t* p = &d.peer[g.peer]
    cdef imp_t* m
    cdef uint64_t n = g.end - g.at, start = g.at
    cdef int rc
    if g.peer >= d.npeers or p.dead:
        return -FE_PEER_LOST
    m = &d.imp[g.rkey & (IMPORTS - 1)]
    if m.mode == M_NONE or m.gen != g.rkey >> IMPORT_BITS:
        return -FE_REMOTE_KEY
    if not room(p, 1):
        return POST_FULL
    rc = enter(d, p, m)
    if rc < 0:
        return rc
    fail_here(d, FP_BEFORE_COPY)
    if m.mode == M_MAP:
        pages_map(g, m.addr)
        g.at = g.end
    elif m.mode == M_VM:
        rc = pages_vm(p, m, g)
        if rc < 0:
            leave(p)
            return rc
        g.at = g.end
    else:
        if p.pend_tail - p.pend_head >= PENDS:
            leave(p)
            return POST_FULL
        while g.at < g.end and room(p, 3):
            if not bounce(d, p, m, g.dst + index_of(g.di, g.dwide, g.at) * g.dstride, g.src + index_of(g.si, g.swide, g.at) * g.sstride, g.len):
                break
            g.at += 1
        if g.at == start:
            leave(p)
            return POST_FULL
        n = g.at - start
    fail_here(d, FP_AFTER_COPY)
    if g.flags & F_IMM:
        put_imm(p, g.imm, <uint32_t>n)
    elif m.mode == M_BOUNCE:
        announce(p)
    leave(p)
    fail_here(d, FP_PUBLISHED)
    if m.mode == M_BOUNCE:
        return pend(d, p, g.ctx, <uint32_t>n)
    return POST_DONE

cdef int local_send(void* dom, send_t* s) noexcept nogil:
    """A message as a stream: 16 bytes of header, then its bytes, as far as the ring has room; `at` counts both."""
    cdef dom_t* d = <dom_t*>dom
    cdef tx_t* p = &d.peer[s.peer]
    cdef uint64_t head[2]
    cdef uint64_t free_, k, pos, tail
    cdef const uint8_t* from_
    if d.down:
        return -FE_NIC
    if s.peer >= d.npeers or p.dead or ld_acq32(&p.lane.closed):
        return -FE_PEER_LOST
    if s.at == 0:
        if ld_acq32(&p.box.recv_free[p.nic]) == 0 and ld_acq64(&p.box.recv_len[p.nic]) == 0:
            return POST_FULL
        if s.len > ld_acq64(&p.box.recv_len[p.nic]):
            return -FE_TOO_LONG
        if ld_acq32(&p.box.recv_free[p.nic]) == 0:
            return POST_FULL
    head[0] = s.len
    head[1] = INBOX_MAGIC
    tail = p.msg_tail
    while s.at < 16 + s.len:
        free_ = MSG_BYTES - (tail - ld_acq64(&p.lane.msg_head))
        if s.at == 0 and free_ < 16:
            break
        pos = tail % MSG_BYTES
        if s.at < 16:
            from_ = <uint8_t*>head + s.at
            k = 16 - s.at
        else:
            from_ = <const uint8_t*>s.buf + (s.at - 16)
            k = 16 + s.len - s.at
        k = min(min(k, free_), <uint64_t>MSG_BYTES - pos)
        if k == 0:
            break
        memcpy(&p.lane.msg[pos], from_, k)
        tail += k
        s.at += k
    if tail != p.msg_tail:
        p.msg_tail = tail
        fail_here(d, FP_MID_MESSAGE)
        st_rel64(&p.lane.msg_tail, tail)
        announce(p)
    return POST_DONE if s.at == 16 + s.len else POST_FULL

# ---------------------------------------------------------------- Chaos

cdef inline uint64_t mix(uint64_t x) noexcept nogil:
    """splitmix64's finalizer: a decision is a function of (seed, peer, sequence number) and of nothing else."""
    x += <uint64_t>0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * <uint64_t>0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * <uint64_t>0x94D049BB133111EB
    return x ^ (x >> 31)

cdef inline uint64_t draw(chaos_t* c, uint32_t peer, uint64_t seq, uint32_t what) noexcept nogil:
    return mix(mix(mix(c.seed ^ what) ^ peer) ^ seq)

cdef inline double unit(uint64_t x) noexcept nogil:
    return <double>(x >> 11) * (1.0 / 9007199254740992.0)

cdef held_t* hold(dom_t* d, uint32_t peer, uint64_t ctx, uint32_t count) noexcept nogil:
    """A free place, with the time at which what is put there will be carried out; NULL when all are taken."""
    cdef chaos_t* c = d.chaos
    cdef uint32_t i, at
    cdef held_t* h
    cdef tx_t* p = &d.peer[peer]
    cdef uint64_t x
    if c.nheld == HELD:
        return NULL
    at = <uint32_t>(c.number % HELD)
    while c.held[at].state != H_FREE:
        at = (at + 1) % HELD
    h = &c.held[at]
    h.state = H_HELD
    h.dom = d
    h.peer = peer
    h.ctx = ctx
    h.count = count
    h.number = c.number
    h.silent = 0
    c.number += 1
    c.nheld += 1
    x = draw(c, peer * NICS + d.nic, p.seq, 1)
    p.seq += 1
    h.due = c.clock + 1
    if unit(x) < c.reorder:
        h.due += mix(x) % c.max_delay
    d.posts += 1
    if c.fail_nic == <int32_t>d.nic and d.posts == c.fail_after and d.fail_at == 0:
        d.fail_at = c.clock + 1 + draw(c, peer, p.seq, 2) % c.max_delay
    return h

cdef inline void complete_later(dom_t* d, uint64_t ctx, uint32_t count, int32_t status) noexcept nogil:
    cdef comp_t* c
    if d.comp_tail - d.comp_head >= COMPS:
        return                      # cannot be: no more than HELD posts and PENDS bounces are out
    c = &d.comp[d.comp_tail % COMPS]
    memset(c, 0, sizeof(comp_t))
    c.kind = C_ERROR if status else C_DONE
    c.ctx = ctx
    c.count = count
    c.status = status
    d.comp_tail += 1

cdef void let_go(chaos_t* c, held_t* h) noexcept nogil:
    h.state = H_FREE
    c.nheld -= 1

cdef int carry_out(chaos_t* c, held_t* h, bint at_once) noexcept nogil:
    """Carries out a held post; 0 when the lane has no room yet."""
    cdef dom_t* d = <dom_t*>h.dom
    cdef int rc
    cdef uint64_t x
    if h.kind == K_WRITE:
        rc = put(d, &h.w)
    else:
        rc = put_pages(d, &h.p)
        if rc >= 0 and rc != POST_FULL and h.p.at < h.p.end:    # bounced in part
            if rc == POST_DONE:
                complete_later(d, h.ctx, <uint32_t>(h.p.end - h.p.at), 0)
            h.count = <uint32_t>(h.p.end - h.p.at)
            return 0
    if rc == POST_FULL:
        return 0
    if rc == POST_QUEUED:           # bounced: its completion comes from there
        let_go(c, h)
        return 1
    if rc < 0:
        complete_later(d, h.ctx, h.count, -rc)
        let_go(c, h)
        return 1
    if at_once:
        complete_later(d, h.ctx, h.count, 0)
        let_go(c, h)
        return 1
    x = draw(c, h.peer, h.number, 3)
    h.state = H_RUN
    h.due = c.clock + 1 + x % c.max_delay
    if d.fail_at and unit(mix(x)) < c.drop:
        h.silent = 1                # the NIC fails before this completion gets out
    return 1

cdef int in_order(chaos_t* c) noexcept nogil:
    """Exhaustive tests: when as many are held as `order` is long, they are carried out in that order."""
    cdef held_t* by[HELD]
    cdef uint32_t n = 0, i, j
    cdef held_t* h
    for i in range(HELD):
        if c.held[i].state == H_HELD:
            by[n] = &c.held[i]
            n += 1
    if n < c.norder:
        return 0
    for i in range(1, n):           # oldest first
        h = by[i]
        j = i
        while j > 0 and by[j - 1].number > h.number:
            by[j] = by[j - 1]
            j -= 1
        by[j] = h
    for i in range(c.norder):
        while not carry_out(c, by[c.order[i]], True):
            return 1
    return 1

cdef void chaos_turn(dom_t* d) noexcept nogil:
    """A tick: what is due is carried out, earliest first; what has been carried out completes; a NIC may fail."""
    cdef chaos_t* c = d.chaos
    cdef held_t* h
    cdef held_t* first
    cdef uint32_t i
    c.clock = c.clock + 1 if c.virtual_ else now_ns() // 1000
    if d.fail_at and not d.down and c.clock >= d.fail_at:
        nic_fails(d)
    if c.nheld == 0:
        return
    if c.norder:
        in_order(c)
        return
    while True:
        first = NULL
        for i in range(HELD):
            h = &c.held[i]
            if h.state == H_HELD and h.due <= c.clock and (first == NULL or h.due < first.due or (h.due == first.due and mix(h.number) < mix(first.number))):
                first = h
        if first == NULL or not carry_out(c, first, False):
            break
    for i in range(HELD):
        h = &c.held[i]
        if h.state == H_RUN and h.dom == d and h.due <= c.clock and not h.silent:
            complete_later(d, h.ctx, h.count, 0)
            let_go(c, h)

cdef void nic_fails(dom_t* d) noexcept nogil:
    cdef comp_t* e = &d.comp[d.comp_tail % COMPS]
    cdef chaos_t* c = d.chaos
    cdef uint32_t i
    d.down = 1
    memset(e, 0, sizeof(comp_t))
    e.kind = C_NIC_DOWN
    d.comp_tail += 1
    for i in range(HELD):
        if c.held[i].dom == d and c.held[i].state == H_HELD:
            c.held[i].state = H_LOST

# ---------------------------------------------------------------- the table

cdef int local_write(void* dom, write_t* w) noexcept nogil:
    cdef dom_t* d = <dom_t*>dom
    cdef held_t* h
    if d.down:
        return -FE_NIC
    if d.chaos == NULL:
        return put(d, w)
    if w.peer >= d.npeers or d.peer[w.peer].dead:
        return -FE_PEER_LOST
    h = hold(d, w.peer, w.ctx, 1)
    if h == NULL:
        return POST_FULL
    h.kind = K_WRITE
    h.w = w[0]
    return POST_QUEUED

cdef int local_many(void* dom, write_t* w, int n) noexcept nogil:
    cdef int i
    for i in range(n):
        w[i].rc = local_write(dom, &w[i])
        if w[i].rc == POST_FULL:
            return i
    return n

cdef int local_pages(void* dom, pages_t* g) noexcept nogil:
    cdef dom_t* d = <dom_t*>dom
    cdef held_t* h
    if d.down:
        return -FE_NIC
    if d.chaos == NULL:
        return put_pages(d, g)
    if g.peer >= d.npeers or d.peer[g.peer].dead:
        return -FE_PEER_LOST
    h = hold(d, g.peer, g.ctx, <uint32_t>(g.end - g.at))
    if h == NULL:
        return POST_FULL
    h.kind = K_PAGES
    h.p = g[0]
    g.at = g.end
    return POST_QUEUED

cdef int local_recv(void* dom, void* buf, uint64_t n, uint64_t lkey, uint64_t ctx) noexcept nogil:
    cdef dom_t* d = <dom_t*>dom
    cdef recv_t* r
    cdef int i
    if d.recv_tail - d.recv_head + d.receiving >= RECVS:     # those being filled may have to come back
        return POST_FULL
    r = &d.recv[d.recv_tail % RECVS]
    r.buf = buf
    r.len = n
    r.ctx = ctx
    d.recv_tail += 1
    if n > d.box.recv_len[d.nic]:
        st_rel64(&d.box.recv_len[d.nic], n)
    fadd32(&d.box.recv_free[d.nic], 1)
    for i in range(LANE_WORDS):     # a message may wait for it
        d.waiting[i] |= d.stalled[i]
        d.stalled[i] = 0
    return POST_QUEUED

cdef int local_cancel_recv(void* dom, uint64_t ctx, uint64_t longest) noexcept nogil:
    cdef dom_t* d = <dom_t*>dom
    cdef uint64_t i = d.recv_head
    cdef uint32_t w
    cdef int found
    while i < d.recv_tail and d.recv[i % RECVS].ctx != ctx:
        i += 1
    found = i < d.recv_tail
    if found:
        while i > d.recv_head:
            d.recv[i % RECVS] = d.recv[(i - 1) % RECVS]
            i -= 1
        d.recv_head += 1
        fadd32(&d.box.recv_free[d.nic], <uint32_t>-1)
    st_rel64(&d.box.recv_len[d.nic], longest)
    for w in range(LANE_WORDS):     # a message that waits may be too long for what is left
        d.waiting[w] |= d.stalled[w]
        d.stalled[w] = 0
    return found

cdef int local_cancel_send(void* dom, send_t* s) noexcept nogil:
    return s.at == 0                # a stream: what was begun is sent to its end

cdef int local_fence(void* dom, uint32_t peer, uint64_t ctx) noexcept nogil:
    return POST_DONE                # completions mean landed

cdef bint take_recv(dom_t* d, uint64_t n, rx_t* r) noexcept nogil:
    """The oldest posted receive of at least n bytes."""
    cdef uint64_t i
    cdef recv_t x
    for i in range(d.recv_head, d.recv_tail):
        if d.recv[i % RECVS].len >= n:
            x = d.recv[i % RECVS]
            while i > d.recv_head:
                d.recv[i % RECVS] = d.recv[(i - 1) % RECVS]
                i -= 1
            d.recv_head += 1
            fadd32(&d.box.recv_free[d.nic], <uint32_t>-1)
            r.buf = x.buf
            r.room = x.len
            r.ctx = x.ctx
            d.receiving += 1
            return True
    return False

cdef inline void ring_copy(void* to, uint8_t* ring, uint64_t pos, uint64_t n) noexcept nogil:
    cdef uint64_t p = pos % MSG_BYTES, k = min(n, <uint64_t>MSG_BYTES - p)
    memcpy(to, ring + p, k)
    if n > k:
        memcpy(<uint8_t*>to + k, ring, n - k)

cdef int take_message(dom_t* d, uint32_t i, rx_t* r, lane_t* l, comp_t* out) noexcept nogil:
    """1: a message is complete; 0: nothing more to be had; -1: it waits for a receive. One that was begun when there were longer
    receives than there are now is dropped."""
    cdef uint64_t tail = ld_acq64(&l.msg_tail), n, longest = d.box.recv_len[d.nic]
    cdef uint64_t head[2]
    if tail - r.msg_head > MSG_BYTES:
        r.dying = 1                 # no sender of ours writes that
        return 0
    if not r.got_head:
        if tail - r.msg_head < 16:
            return 0
        ring_copy(head, l.msg, r.msg_head, 16)
        if head[1] != INBOX_MAGIC:
            r.dying = 1
            return 0
        if longest and head[0] > longest:
            r.buf = NULL
            d.dropped += 1
        elif not take_recv(d, head[0], r):
            return -1
        r.msg_head += 16
        r.total = head[0]
        r.have = 0
        r.got_head = 1
    n = min(tail - r.msg_head, r.total - r.have)
    if n:
        if r.buf != NULL:
            ring_copy(<uint8_t*>r.buf + r.have, l.msg, r.msg_head, n)
        r.msg_head += n
        r.have += n
    st_rel64(&l.msg_head, r.msg_head)
    if r.have < r.total:
        return 0
    r.got_head = 0
    if r.buf == NULL:
        memset(out, 0, sizeof(comp_t))
        out.kind, out.len, out.src = C_DROPPED, r.total, r.src
        return 1
    d.receiving -= 1
    memset(out, 0, sizeof(comp_t))
    out.kind = C_RECV
    out.ctx = r.ctx
    out.len = r.total
    out.src = r.src
    return 1

cdef int take_lane(dom_t* d, uint32_t i, comp_t* out, int most, bint* empty) noexcept nogil:
    """Completions from lane i; `empty` when there is nothing left in it."""
    cdef rx_t* r = &d.rx[i]
    cdef lane_t* l = &d.box.lane[i]
    cdef entry_t* e
    cdef region_t* g
    cdef uint64_t h = r.head
    cdef int n = 0, rc
    cdef bint bounced = False
    empty[0] = False
    if not r.used:
        empty[0] = True
        return 0
    while n < most:
        e = &l.e[h % ENTRIES]
        if ld_acq32(&e.lap) != <uint32_t>(h // ENTRIES + 1):
            break
        if e.kind == E_IMM:
            out[n].kind = C_IMM
            out[n].imm = e.imm
            out[n].count = e.count
            out[n].src = r.src
            n += 1
        elif e.kind == E_BOUNCE:
            g = &d.region[e.imm & (REGIONS - 1)]
            if e.pos <= BOUNCE_BYTES and e.len <= BOUNCE_BYTES - e.pos and e.off <= g.len and e.len <= g.len - e.off:
                memcpy(<void*>(g.addr + e.off), &l.bounce[e.pos], e.len)
            st_rel64(&l.bounce_head, l.bounce_head + e.len)
            bounced = True
        h += 1
    r.head = h
    if bounced or h - r.told >= ENTRIES // 4:
        r.told = h
        st_rel64(&l.head, h)
    while n < most:
        rc = take_message(d, i, r, l, &out[n])
        if rc == 0:
            break
        if rc < 0:
            d.stalled[i >> 6] |= <uint64_t>1 << (i & 63)
            break
        n += 1
    if n < most:
        empty[0] = ld_acq32(&l.e[h % ENTRIES].lap) != <uint32_t>(h // ENTRIES + 1)
    return n

cdef inline int report_dead(dom_t* d, uint32_t i, comp_t* out) noexcept nogil:
    """A drained lane of a dead sender becomes free, and its end is told once. The receive of a message that it did not finish
    goes back to the head of the ring."""
    cdef rx_t* r = &d.rx[i]
    if r.got_head and r.buf != NULL:
        d.recv_head -= 1
        d.recv[d.recv_head % RECVS].buf = r.buf
        d.recv[d.recv_head % RECVS].len = r.room
        d.recv[d.recv_head % RECVS].ctx = r.ctx
        d.receiving -= 1
        fadd32(&d.box.recv_free[d.nic], 1)
    r.got_head = 0
    memset(out, 0, sizeof(comp_t))
    out.kind = C_PEER_LOST
    out.ctx = <uint64_t>-1
    out.src = r.src
    r.used = 0
    return 1

cdef int local_poll(void* dom, comp_t* out, int most) noexcept nogil:
    cdef dom_t* d = <dom_t*>dom
    cdef int n = 0, k
    cdef uint32_t w, i
    cdef uint64_t bits
    cdef bint empty = False
    cdef uint64_t* s = d.box.summary[d.nic]
    if d.chaos != NULL:
        chaos_turn(d)
    if d.nbounce:
        bounced_done(d)
    while n < most and d.comp_head < d.comp_tail:
        out[n] = d.comp[d.comp_head % COMPS]
        d.comp_head += 1
        n += 1
    for w in range(LANE_WORDS):
        if ld_rlx64(&s[w]):
            d.waiting[w] |= xchg64(&s[w], 0)
        bits = d.waiting[w]
        while bits and n < most:
            i = w * 64 + ctz_64(bits)
            bits &= bits - 1
            k = take_lane(d, i, out + n, most - n, &empty)
            n += k
            if empty:
                d.waiting[w] &= ~(<uint64_t>1 << (i & 63))
                if d.rx[i].used and d.rx[i].dying:
                    if n < most:
                        n += report_dead(d, i, out + n)
                    else:
                        d.waiting[w] |= <uint64_t>1 << (i & 63)
    return n

cdef void bounced_done(dom_t* d) noexcept nogil:
    cdef uint32_t i
    cdef tx_t* p
    cdef uint64_t head
    for i in range(d.npeers):
        p = &d.peer[i]
        if not p.used or p.pend == NULL or p.pend_head == p.pend_tail:
            continue
        head = ld_acq64(&p.lane.head)
        while p.pend_head < p.pend_tail and (p.dead or p.pend[p.pend_head % PENDS].pos <= head):
            complete_later(d, p.pend[p.pend_head % PENDS].ctx, p.pend[p.pend_head % PENDS].count,
                           0 if p.pend[p.pend_head % PENDS].pos <= head else FE_PEER_LOST)
            p.pend_head += 1
            d.nbounce -= 1

cdef int local_arm(void* dom) noexcept nogil:
    cdef dom_t* d = <dom_t*>dom
    cdef uint32_t w
    cdef uint64_t* s = d.box.summary[d.nic]
    if d.comp_head < d.comp_tail or d.nbounce:
        return 1
    if d.chaos != NULL and (d.chaos.nheld and not d.chaos.norder or d.fail_at and not d.down):
        return 1
    for w in range(LANE_WORDS):
        if ld_acq64(&s[w]) or d.waiting[w]:
            return 1
    return 0

cdef uint64_t local_recv_len(void* dom, uint32_t peer) noexcept nogil:
    cdef dom_t* d = <dom_t*>dom
    if peer >= d.npeers or not d.peer[peer].used or d.peer[peer].dead:
        return 0
    return ld_acq64(&d.peer[peer].box.recv_len[d.peer[peer].nic])


cdef fabric_ops_t OPS
OPS.version = FABRIC_VERSION
OPS.size = sizeof(fabric_ops_t)
OPS.post_write = local_write
OPS.post_many = local_many
OPS.post_pages = local_pages
OPS.post_send = local_send
OPS.post_recv = local_recv
OPS.poll = local_poll
OPS.arm = local_arm
OPS.recv_len = local_recv_len
OPS.cancel_recv = local_cancel_recv
OPS.cancel_send = local_cancel_send
OPS.fence = local_fence

INBOX_SIZE = sizeof(inbox_t)
N_REGIONS = REGIONS
N_LANES = LANES
MODES = {"map": M_MAP, "vm": M_VM, "bounce": M_BOUNCE}
POINTS = {"local.before_copy": FP_BEFORE_COPY, "local.after_copy_before_publish": FP_AFTER_COPY,
          "local.after_publish": FP_PUBLISHED, "local.mid_message": FP_MID_MESSAGE}


def may_read(int pid, uint64_t addr, uint64_t want):
    """Whether process_vm_readv (and so process_vm_writev) of another process is allowed here."""
    cdef uint64_t got = 0
    return fx_vm_read(pid, &got, addr, 8) == 8 and got == want


# ---------------------------------------------------------------- Python

cdef class Inbox:
    """A group's inbox and what its domains share. Calls are made with the progress lock held, but for those that say otherwise."""
    cdef inbox_t* box
    cdef rx_t* rx
    cdef region_t* region
    cdef object view

    def __cinit__(self, view, uint64_t incarnation):
        self.view = np.frombuffer(view, np.uint8)
        self.box = <inbox_t*><uintptr_t>self.view.ctypes.data
        self.rx = <rx_t*>calloc(LANES, sizeof(rx_t))
        self.region = <region_t*>map_zeroed(REGIONS * sizeof(region_t))
        if self.rx == NULL or self.region == NULL:
            raise MemoryError
        self.box.magic, self.box.version, self.box.incarnation = INBOX_MAGIC, INBOX_VERSION, incarnation

    def __dealloc__(self):
        free(self.rx)
        unmap(self.region, REGIONS * sizeof(region_t))

    @property
    def bell(self):
        return <uintptr_t>&self.box.bell

    def open_lane(self, uint32_t nic, uint32_t src):
        """(lane, first entry) for a new sender, or None when all are taken."""
        cdef uint32_t i
        cdef lane_t* l
        cdef rx_t* r
        for i in range(LANES):
            r = &self.rx[i]
            if r.used:
                continue
            l = &self.box.lane[i]
            r.nic, r.src, r.dying, r.got_head, r.msg_head = nic, src, 0, 0, 0
            st_rel64(&l.head, r.head)
            r.told = r.head
            l.msg_head = l.msg_tail = l.bounce_head = 0
            l.busy = 0
            st_rel32(&l.closed, 0)
            r.used = 1
            return i, r.head
        return None

    def end_lane(self, uint32_t i):
        """The sender is gone: the lane is drained, reported and freed by the next polls."""
        if self.rx[i].used:
            self.rx[i].dying = 1
            for64(&self.box.summary[self.rx[i].nic][i >> 6], <uint64_t>1 << (i & 63))

    def shut_lane(self, uint32_t i):
        """Closes the door. Needs no lock."""
        xchg32(&self.box.lane[i].closed, 1)

    def busy(self, uint32_t i):
        """The sender's mark if it is in the middle of a write, else 0. Needs no lock."""
        cdef uint32_t b
        full_fence()
        b = ld_acq32(&self.box.lane[i].busy)
        return b if b & 1 else 0

    def drained(self, uint32_t i):
        """Whether everything published in a lane was polled. Needs no lock."""
        cdef uint64_t h = ld_acq64(&self.rx[i].head)
        return not self.rx[i].used or ld_acq32(&self.box.lane[i].e[h % ENTRIES].lap) != <uint32_t>(h // ENTRIES + 1)

    def lanes(self):
        return [i for i in range(LANES) if self.rx[i].used]

    def set_region(self, uint64_t rkey, uint64_t addr, uint64_t length):
        cdef uint32_t s = rkey & (REGIONS - 1)
        self.region[s].addr, self.region[s].len = addr, length
        st_rel64(&self.box.rkey[s], rkey)

    def clear_region(self, uint64_t rkey):
        """Needs no lock."""
        xchg64(&self.box.rkey[rkey & (REGIONS - 1)], 0)

    def wipe_region(self, uint64_t rkey):
        cdef uint32_t s = rkey & (REGIONS - 1)
        self.region[s].len = 0

    def restore_region(self, uint64_t rkey):
        xchg64(&self.box.rkey[rkey & (REGIONS - 1)], rkey)


cdef class LocalState:
    """The C state of a local domain. Calls are made with the progress lock held."""
    cdef dom_t* d
    cdef object inbox, keep

    def __cinit__(self, Inbox inbox, uint32_t nic, ChaosState chaos=None, str failpoint=""):
        cdef dom_t* d = <dom_t*>alloc_lines(sizeof(dom_t))
        self.d = d
        self.inbox, self.keep = inbox, chaos
        if d == NULL:
            raise MemoryError
        d.box, d.rx, d.region, d.nic = inbox.box, inbox.rx, inbox.region, nic
        d.peer = <tx_t*>map_zeroed(PEERS * sizeof(tx_t))
        d.imp = <imp_t*>map_zeroed(IMPORTS * sizeof(imp_t))
        d.recv = <recv_t*>map_zeroed(RECVS * sizeof(recv_t))
        d.comp = <comp_t*>map_zeroed(COMPS * sizeof(comp_t))
        if d.peer == NULL or d.imp == NULL or d.recv == NULL or d.comp == NULL:
            raise MemoryError
        if chaos is not None:
            d.chaos = chaos.c
        d.probe = 0
        name, _, n = failpoint.removeprefix("stop=").partition(":")
        if name in POINTS:
            d.fp, d.fp_left, d.fp_stop = POINTS[name], int(n or 1), failpoint.startswith("stop=")

    def __dealloc__(self):
        cdef uint32_t i
        if self.d == NULL:
            return
        if self.d.peer != NULL:
            for i in range(self.d.npeers):
                unmap(self.d.peer[i].pend, PENDS * sizeof(pend_t))
        unmap(self.d.peer, PEERS * sizeof(tx_t))
        unmap(self.d.imp, IMPORTS * sizeof(imp_t))
        unmap(self.d.recv, RECVS * sizeof(recv_t))
        unmap(self.d.comp, COMPS * sizeof(comp_t))
        free(self.d)

    @property
    def dom(self):
        return <uintptr_t>self.d

    @property
    def ops(self):
        return <uintptr_t>&OPS

    @property
    def probe_addr(self):
        return <uintptr_t>&self.d.probe

    def set_probe(self, uint64_t v):
        self.d.probe = v

    def add_peer(self, view, uint32_t lane, uint64_t head, uint32_t nic, int pid, int pidfd, uint32_t src, bint vm):
        """The index of a new peer whose inbox is mapped at `view`."""
        cdef uint32_t i
        cdef tx_t* p
        i = self.d.npeers
        if i >= PEERS // 2:             # old places only when there are many: late posts to a dead peer find it dead
            for i in range(PEERS):
                p = &self.d.peer[i]
                if not p.used or p.dead and (p.pend == NULL or p.pend_head == p.pend_tail) and \
                        (self.d.chaos == NULL or self.d.chaos.nheld == 0):
                    break
            else:
                return None
        p = &self.d.peer[i]
        unmap(p.pend, PENDS * sizeof(pend_t))
        memset(p, 0, sizeof(tx_t))
        p.pend = <pend_t*>map_zeroed(PENDS * sizeof(pend_t))
        if p.pend == NULL:
            raise MemoryError
        p.box = <inbox_t*><uintptr_t>np.frombuffer(view, np.uint8).ctypes.data
        p.lane = &p.box.lane[lane]
        p.word, p.bit = &p.box.summary[nic][lane >> 6], <uint64_t>1 << (lane & 63)
        p.tail = p.head_seen = head
        p.nic, p.pid, p.pidfd, p.src, p.vm, p.used = nic, pid, pidfd, src, vm, 1
        if i >= self.d.npeers:
            self.d.npeers = i + 1
        return i

    def check_box(self, view, uint64_t incarnation):
        cdef inbox_t* b = <inbox_t*><uintptr_t>np.frombuffer(view, np.uint8).ctypes.data
        return b.magic == INBOX_MAGIC and b.version == INBOX_VERSION and b.incarnation == incarnation

    def kill_peer(self, uint32_t i, bint tell):
        """Posts to it fail from now on; `tell` reports C_PEER_LOST. Held and bounced posts end as lost."""
        cdef tx_t* p = &self.d.peer[i]
        cdef comp_t* c
        if not p.used or p.dead:
            return
        p.dead = 1
        if tell and self.d.comp_tail - self.d.comp_head < COMPS:
            bounced_done(self.d)
            c = &self.d.comp[self.d.comp_tail % COMPS]
            memset(c, 0, sizeof(comp_t))
            c.kind, c.ctx, c.src = C_PEER_LOST, i, p.src
            self.d.comp_tail += 1

    def drop_peer(self, uint32_t i):
        """After kill_peer: its mapping may go; the number stays taken until its posts are over."""
        self.d.peer[i].dead = 1
        bounced_done(self.d)

    def lane_of(self, uint32_t i):
        return self.d.peer[i].lane - self.d.peer[i].box.lane

    def add_import(self, uint64_t rkey, uint64_t addr, uint64_t length, str mode, uint32_t peer):
        cdef uint32_t i
        for i in range(1, IMPORTS):
            if self.d.imp[i].mode == M_NONE:
                self.d.imp[i].rkey, self.d.imp[i].addr, self.d.imp[i].len, self.d.imp[i].peer = rkey, addr, length, peer
                self.d.imp[i].mode = MODES[mode]
                return i | self.d.imp[i].gen << IMPORT_BITS
        return None

    def drop_import(self, uint64_t key):
        """Posts with this key are refused from now on, also those that Chaos holds."""
        cdef imp_t* m = &self.d.imp[key & (IMPORTS - 1)]
        if m.gen == key >> IMPORT_BITS:
            m.mode = M_NONE
            m.gen += 1

    def import_gone(self, uint64_t key):
        """Whether the owner has taken the region back, or is gone itself."""
        cdef imp_t* m = &self.d.imp[key & (IMPORTS - 1)]
        cdef tx_t* p = &self.d.peer[m.peer]
        if m.gen != key >> IMPORT_BITS or m.mode == M_NONE or p.dead or ld_acq32(&p.lane.closed):
            return True
        return ld_acq64(&p.box.rkey[m.rkey & (REGIONS - 1)]) != m.rkey

    def recovered(self, uint32_t peer, uint64_t[::1] ctxs):
        """After the NIC failed and its lane was closed: posts of each ctx that landed. Their places become free."""
        cdef chaos_t* c = self.d.chaos
        cdef uint32_t i, k
        out = np.zeros(ctxs.shape[0], np.int64)
        cdef int64_t[::1] o = out
        if c == NULL:
            out[:] = -1
            return out
        for k in range(ctxs.shape[0]):
            for i in range(HELD):
                if c.held[i].dom == self.d and c.held[i].state != H_FREE and c.held[i].ctx == ctxs[k]:
                    if c.held[i].state == H_RUN:
                        o[k] += c.held[i].count
                    let_go(c, &c.held[i])
        return out

    def peers(self):
        cdef tx_t* p
        out = []
        for i in range(self.d.npeers):
            p = &self.d.peer[i]
            if p.used:
                out.append(dict(index=i, pid=p.pid, src=p.src, alive=not p.dead, published=p.tail, taken=p.lane.head if not p.dead else p.head_seen))
        return out

    @property
    def down(self):
        return self.d.down != 0


cdef class ChaosState:
    """The held writes of a group, and its virtual clock."""
    cdef chaos_t* c

    def __cinit__(self, uint64_t seed, double reorder, uint64_t max_delay, double drop, int fail_nic, uint64_t fail_after, bint virtual_clock, order):
        cdef chaos_t* c = <chaos_t*>alloc_lines(sizeof(chaos_t))
        self.c = c
        if c == NULL:
            raise MemoryError
        c.seed, c.reorder, c.max_delay, c.drop = seed, reorder, max(<uint64_t>1, max_delay), drop
        c.fail_nic, c.fail_after, c.virtual_ = fail_nic, fail_after, virtual_clock
        if order:
            c.norder = len(order)
            c.order = <uint32_t*>calloc(c.norder, sizeof(uint32_t))
            if c.order == NULL:
                raise MemoryError
            for i, x in enumerate(order):
                c.order[i] = x

    def __dealloc__(self):
        if self.c != NULL:
            free(self.c.order)
            free(self.c)
