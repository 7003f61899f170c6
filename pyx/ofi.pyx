"""fabricx._ofi: the libfabric fabric. Built from 1.17 headers; it links nothing: the seven real symbols of libfabric come as
addresses (fabricx/fabrics/ofi.py opens the library), everything else are inlines over the tables of functions in its objects.

A domain is one FI_EP_RDM endpoint. Writes are fi_writemsg with remote CQ data; the data carries the immediate and, where it has
64 bits, the number that the TARGET gave the sender in the handshake. Handshake, messages and key look-ups are SENDs into a pool of
receives that is always posted, so nothing internal ever waits for the application. User messages are a rendezvous: ask (RTS), be
granted a posted receive (CTS), send fragments.
"""
import os

import numpy as np

from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcmp, memcpy, memset, strlen
from atom cimport *
from fabric cimport *

cdef extern from "ofi_api.h" nogil:
    ctypedef struct ofi_api:
        pass
    ctypedef struct ofi_nic:
        int has_fd
        int fd
        int data8, contexts2, virt_addr, prov_key, need_desc, mr_endpoint, landed, hmem
        uint64_t max_msg, inject
        uint64_t key_size
        uint32_t tx_depth
        char provider[64]
        char domain[128]
        char fabric[128]
        uint8_t addr[512]
        uint64_t addrlen
        char what[128]
    ctypedef struct ofi_comp:
        void* ctx
        uint64_t flags, data, len
        uint64_t src
        int err, prov
    int ofi_open(ofi_api*, ofi_nic*, const char* provider, const char* node, const char* domain, int skip, uint64_t cq_size, int hmem) noexcept
    void ofi_close(ofi_nic*) noexcept
    int ofi_reg(ofi_nic*, uint64_t addr, uint64_t len, uint64_t key, int iface, int device, int dmabuf_fd, uint64_t dmabuf_off, void** mr, void** desc, uint64_t* got) noexcept
    int ofi_dereg(void* mr) noexcept
    int ofi_av_insert(ofi_nic*, const void* addr, uint64_t* out) noexcept
    void ofi_av_remove(ofi_nic*, uint64_t) noexcept
    int ofi_write(ofi_nic*, const void* src, uint64_t n, void* desc, uint64_t peer, uint64_t dst, uint64_t key, uint64_t data, int imm, int landed, int more, void* ctx) noexcept
    int ofi_inject(ofi_nic*, const void* src, uint64_t n, uint64_t peer, uint64_t dst, uint64_t key, uint64_t data, int imm) noexcept
    int ofi_send(ofi_nic*, const void* buf, uint64_t n, void* desc, uint64_t peer, void* ctx) noexcept
    int ofi_recv(ofi_nic*, void* buf, uint64_t n, void* desc, void* ctx) noexcept
    int ofi_poll(ofi_nic*, ofi_comp*, int n) noexcept
    int ofi_trywait(ofi_nic*) noexcept
    const char* ofi_strerror(ofi_api*, int) noexcept
    uint32_t ofi_version(ofi_api*) noexcept
    ofi_api* ofi_api_new(void**) noexcept
    ofi_nic* ofi_nic_new() noexcept
    int ofi_list(ofi_api*, const char* provider, const char* node, char* out, uint64_t n) noexcept
    enum: OFI_REMOTE_DATA, OFI_RECV, OFI_SEND, OFI_WRITE

cdef enum:
    MAGIC = 0x66784f46
    WIRE_VERSION = 1
    SLOT = 16384                # bytes of a control message, header and all
    NSEND = 256
    NRECV = 256
    PEERS = 4096
    IMPORTS = 65536
    REGIONS = 65536
    RECVS = 65536
    COMPS = 16384
    HELLOS = 64

    T_HELLO = 1
    T_WELCOME = 2
    T_REFUSED = 3
    T_IMPORT = 4
    T_IMPORTED = 5
    T_GONE = 6
    T_GONE_ACK = 7
    T_RTS = 8
    T_CTS = 9
    T_NAK = 10
    T_FRAG = 11
    T_BYE = 12

    X_WRITE = 1
    X_CTRL = 2
    X_RECV = 3

    P_NEW = 0                   # states of a peer, as the sending side sees it
    P_ASKED = 1
    P_UP = 2
    P_LOST = 3
    P_REFUSED = 4

cdef struct head_t:             # of every control message; little endian hosts only, as all of libfabric's providers
    uint32_t magic
    uint16_t version, type
    uint64_t session, target    # incarnation of the sender, and of the one that is meant
    uint32_t to_idx, from_idx
    uint64_t a, b, c
    uint32_t len, pad

cdef struct xctx_t:
    char room[64]               # struct fi_context2, owned by the provider while the operation is out
    uint64_t user
    uint32_t kind, peer
    uint32_t slot, landed
    xctx_t* next

cdef struct peer_t:
    uint32_t used, state
    uint32_t theirs             # its index for us
    uint32_t src                # our number for it
    uint32_t number             # the number it gave us
    uint32_t reason, told
    uint64_t incarnation, fi
    uint32_t addrlen
    uint8_t addr[512]
    uint64_t out                # writes without completion
    # -- a message to it
    uint32_t tx                 # 0 idle, 1 asked, 2 granted, 3 too long
    uint64_t recv_len
    # -- a message from it
    uint32_t rx                 # 0 none, 1 waits for a receive, 2 has one
    uint64_t rx_total, rx_have, rx_ctx, rx_room
    void* rx_buf

cdef struct imp_t:
    uint64_t rkey, key, addr, len
    uint32_t peer, used, dead, ack
    uint64_t out

cdef struct region_t:
    uint64_t rkey, base, len, key
    uint32_t used, waiting

cdef struct pair_t:
    uint32_t slot, peer

cdef struct recv_t:
    void* buf
    uint64_t len, ctx

cdef struct dom_t:
    ofi_nic* nic
    uint64_t incarnation
    uint32_t down, closing
    xctx_t* x
    xctx_t* xfree
    uint32_t nx
    uint8_t* sbuf
    uint8_t* rbuf
    void* sdesc
    void* rdesc
    xctx_t* rctx
    uint32_t sfree[NSEND]
    uint32_t nsfree
    uint32_t outbox[NSEND]      # slots that found the provider's queue full
    uint64_t out_peer[NSEND]
    uint64_t ohead, otail
    uint32_t unposted[NRECV]    # receives that could not be posted again yet
    uint32_t nunposted
    peer_t* peer
    uint32_t npeers
    imp_t* imp
    uint32_t nimp
    region_t* region
    pair_t* pair
    uint32_t npairs
    recv_t* recv
    uint64_t rhead, rtail, longest
    uint32_t rwait              # peers that wait for a receive
    comp_t* comp
    uint64_t chead, ctail
    uint8_t* hello              # copies of hellos, for the fabric's thread
    uint64_t hhead, htail
    int hello_fd
    uint64_t reply_id, reply_key, reply_addr
    uint32_t reply_status, reply_done
    uint64_t* by_fi             # peer + 1 by AV index, where completions name the source by it
    uint64_t nposts

# ---------------------------------------------------------------- completions for the engine

cdef inline comp_t* comp(dom_t* d, uint32_t kind) noexcept nogil:
    cdef comp_t* c = &d.comp[d.ctail % COMPS]
    memset(c, 0, sizeof(comp_t))
    c.kind = kind
    c.src = NO_SRC
    d.ctail += 1
    return c

cdef void lose(dom_t* d, uint32_t i) noexcept nogil:
    """A peer is gone: its posts are refused from now on, what it was sending is dropped, and its end is told once."""
    cdef peer_t* p = &d.peer[i]
    cdef comp_t* c
    p.state = P_LOST
    if p.told:
        return
    p.told = 1
    if p.rx == 2:                   # the receive goes back to the pool
        d.rhead -= 1
        d.recv[d.rhead % RECVS].buf = p.rx_buf
        d.recv[d.rhead % RECVS].len = p.rx_room
        d.recv[d.rhead % RECVS].ctx = p.rx_ctx
    elif p.rx == 1:
        d.rwait -= 1
    p.rx = 0
    p.tx = 0
    c = comp(d, C_PEER_LOST)
    c.ctx = i
    c.src = p.src

cdef inline bint means_lost(int err) noexcept nogil:
    """errno values by which providers say that the other end is gone (facts: 104, 107, 125 on tcp; 113, 103 on efa)."""
    return err == 104 or err == 107 or err == 125 or err == 103 or err == 113 or err == 111 or err == 32 or err == 108 or err == 110

# ---------------------------------------------------------------- control messages

cdef inline head_t* slot_head(dom_t* d, uint32_t s) noexcept nogil:
    return <head_t*>(d.sbuf + <uint64_t>s * SLOT)

cdef inline xctx_t* xtake(dom_t* d) noexcept nogil:
    cdef xctx_t* x = d.xfree
    if x != NULL:
        d.xfree = x.next
    return x

cdef inline void xgive(dom_t* d, xctx_t* x) noexcept nogil:
    x.next = d.xfree
    d.xfree = x

cdef int ship(dom_t* d, uint32_t s, uint32_t peer) noexcept nogil:
    """Posts slot s; 0 when the provider has no room now, 1 when it is out (or lost with its peer)."""
    cdef head_t* h = slot_head(d, s)
    cdef xctx_t* x = xtake(d)
    cdef int rc
    if x == NULL:
        return 0
    x.kind = X_CTRL
    x.slot = s
    x.peer = peer
    rc = ofi_send(d.nic, h, sizeof(head_t) + h.len, d.sdesc, d.peer[peer].fi, x)
    if rc == 0:
        return 1
    xgive(d, x)
    if rc == -11 and d.peer[peer].state != P_LOST:       # FI_EAGAIN
        return 0
    d.sfree[d.nsfree] = s
    d.nsfree += 1
    if rc != -11 and means_lost(-rc):
        lose(d, peer)
    return 1

cdef void flush(dom_t* d) noexcept nogil:
    while d.ohead < d.otail:
        if not ship(d, d.outbox[d.ohead % NSEND], <uint32_t>d.out_peer[d.ohead % NSEND]):
            return
        d.ohead += 1

cdef head_t* message(dom_t* d, uint32_t peer, uint16_t kind, uint32_t* slot) noexcept nogil:
    """A free slot with its header filled in, or NULL."""
    cdef head_t* h
    cdef peer_t* p = &d.peer[peer]
    if d.nsfree == 0:
        return NULL
    d.nsfree -= 1
    slot[0] = d.sfree[d.nsfree]
    h = slot_head(d, slot[0])
    memset(h, 0, sizeof(head_t))
    h.magic = MAGIC
    h.version = WIRE_VERSION
    h.type = kind
    h.session = d.incarnation
    h.target = p.incarnation
    h.to_idx = p.theirs
    h.from_idx = peer
    return h

cdef void post_message(dom_t* d, uint32_t slot, uint32_t peer) noexcept nogil:
    if d.ohead < d.otail or not ship(d, slot, peer):
        d.outbox[d.otail % NSEND] = slot
        d.out_peer[d.otail % NSEND] = peer
        d.otail += 1

cdef int tell(dom_t* d, uint32_t peer, uint16_t kind, uint64_t a, uint64_t b, uint64_t c) noexcept nogil:
    cdef uint32_t s
    cdef head_t* h = message(d, peer, kind, &s)
    if h == NULL:
        return 0
    h.a, h.b, h.c = a, b, c
    post_message(d, s, peer)
    return 1

cdef void repost(dom_t* d, uint32_t r) noexcept nogil:
    cdef xctx_t* x = &d.rctx[r]
    x.kind = X_RECV
    x.slot = r
    if ofi_recv(d.nic, d.rbuf + <uint64_t>r * SLOT, SLOT, d.rdesc, x) != 0:
        d.unposted[d.nunposted] = r
        d.nunposted += 1

# ---------------------------------------------------------------- messages of the application

cdef bint take_recv(dom_t* d, peer_t* p) noexcept nogil:
    """The oldest posted receive that is long enough."""
    cdef uint64_t i
    cdef recv_t x
    for i in range(d.rhead, d.rtail):
        if d.recv[i % RECVS].len >= p.rx_total:
            x = d.recv[i % RECVS]
            while i > d.rhead:
                d.recv[i % RECVS] = d.recv[(i - 1) % RECVS]
                i -= 1
            d.rhead += 1
            p.rx_buf, p.rx_ctx, p.rx_room = x.buf, x.ctx, x.len
            return True
    return False

cdef void grant(dom_t* d, uint32_t i) noexcept nogil:
    cdef peer_t* p = &d.peer[i]
    if p.rx != 1 or d.nsfree == 0:
        return
    if d.longest and p.rx_total > d.longest:
        p.rx = 0
        d.rwait -= 1
        tell(d, i, T_NAK, d.longest, 0, 0)
    elif take_recv(d, p):
        p.rx = 2
        p.rx_have = 0
        d.rwait -= 1
        tell(d, i, T_CTS, 0, 0, 0)

cdef void grant_all(dom_t* d) noexcept nogil:
    cdef uint32_t i
    for i in range(d.npeers):
        if d.rwait == 0:
            return
        if d.peer[i].rx == 1:
            grant(d, i)

cdef void fragment(dom_t* d, peer_t* p, head_t* h) noexcept nogil:
    cdef comp_t* c
    if p.rx != 2 or h.a > p.rx_total or h.len > p.rx_total - h.a:
        return
    memcpy(<uint8_t*>p.rx_buf + h.a, <uint8_t*>h + sizeof(head_t), h.len)
    p.rx_have += h.len
    if p.rx_have >= p.rx_total:
        p.rx = 0
        c = comp(d, C_RECV)
        c.ctx = p.rx_ctx
        c.len = p.rx_total
        c.src = p.src

cdef void heard(dom_t* d, head_t* h, uint64_t n) noexcept nogil:
    """One control message. Nothing in it is trusted; what does not fit is dropped."""
    cdef peer_t* p
    cdef uint32_t i, s
    cdef region_t* g
    cdef uint64_t one = 1
    if n < sizeof(head_t) or h.magic != MAGIC or h.len > n - sizeof(head_t):
        return
    if h.type == T_HELLO:           # its NetAddr becomes a number: Python's work
        if d.htail - d.hhead < HELLOS:
            memcpy(d.hello + (d.htail % HELLOS) * SLOT, h, sizeof(head_t) + h.len)
            st_rel64(&d.htail, d.htail + 1)
            ofi_signal(d.hello_fd)
        return
    if h.version != WIRE_VERSION and h.type != T_REFUSED:
        return
    i = h.to_idx
    if i >= d.npeers or not d.peer[i].used or h.target != d.incarnation:
        return
    p = &d.peer[i]
    if p.incarnation != h.session and h.type != T_REFUSED:
        return
    if h.type == T_WELCOME:
        if p.state == P_ASKED:
            p.theirs = h.from_idx
            p.number = <uint32_t>h.a
            st_rel32(&p.state, P_UP)
    elif h.type == T_REFUSED:
        if p.state == P_ASKED:
            p.reason = <uint32_t>h.a
            st_rel32(&p.state, P_REFUSED)
    elif h.type == T_IMPORT:
        s = <uint32_t>(h.b & (REGIONS - 1))
        g = &d.region[s]
        p.theirs = h.from_idx
        if not g.used or g.waiting or g.rkey != h.b:
            tell(d, i, T_IMPORTED, h.a, FE_REMOTE_KEY, 0)
        elif g.base != h.c or h.len != 8 or (<uint64_t*>(h + 1))[0] != g.len:
            tell(d, i, T_IMPORTED, h.a, FE_REMOTE_RANGE, 0)
        elif d.npairs < REGIONS * 4:
            d.pair[d.npairs].slot, d.pair[d.npairs].peer = s, i
            d.npairs += 1
            imported(d, i, h.a, g)
    elif h.type == T_IMPORTED:
        if h.a == d.reply_id and not d.reply_done:
            d.reply_status = <uint32_t>h.b
            d.reply_key = h.c
            d.reply_addr = (<uint64_t*>(h + 1))[0] if h.len == 8 else 0
            st_rel32(&d.reply_done, 1)
    elif h.type == T_GONE:
        gone(d, i, h.b)
    elif h.type == T_GONE_ACK:
        s = <uint32_t>(h.b & (REGIONS - 1))
        if d.region[s].used and d.region[s].rkey == h.b and d.region[s].waiting > 1:
            d.region[s].waiting -= 1
    elif h.type == T_RTS:
        if p.rx == 0:
            p.theirs = h.from_idx
            p.rx = 1
            p.rx_total = h.a
            d.rwait += 1
            grant(d, i)
    elif h.type == T_CTS:
        if p.tx == 1:
            p.tx = 2
    elif h.type == T_NAK:
        if p.tx == 1:
            p.tx = 3
            p.recv_len = h.a
    elif h.type == T_FRAG:
        fragment(d, p, h)
    elif h.type == T_BYE:
        lose(d, i)

cdef void imported(dom_t* d, uint32_t peer, uint64_t id_, region_t* g) noexcept nogil:
    cdef uint32_t s
    cdef head_t* h = message(d, peer, T_IMPORTED, &s)
    if h == NULL:
        return                      # asked again by its deadline's retry
    h.a, h.b, h.c, h.len = id_, 0, g.key, 8
    (<uint64_t*>(h + 1))[0] = g.base if d.nic.virt_addr else 0
    post_message(d, s, peer)

cdef void gone(dom_t* d, uint32_t peer, uint64_t rkey) noexcept nogil:
    """The owner takes a region back: refuse new posts; say so when none is out."""
    cdef uint32_t i
    cdef uint64_t out = 0
    for i in range(1, d.nimp):
        if d.imp[i].used and d.imp[i].peer == peer and d.imp[i].rkey == rkey:
            d.imp[i].dead = 1
            out += d.imp[i].out
            if d.imp[i].out:
                d.imp[i].ack = 1
    if out == 0:
        tell(d, peer, T_GONE_ACK, 0, rkey, 0)

cdef void write_over(dom_t* d, xctx_t* x) noexcept nogil:
    """A write has left the provider: its import may be waited for."""
    cdef imp_t* m = &d.imp[x.slot]
    cdef uint32_t i
    cdef uint64_t out = 0
    d.peer[x.peer].out -= 1
    m.out -= 1
    if m.ack and m.out == 0:
        m.ack = 0
        for i in range(1, d.nimp):
            if d.imp[i].used and d.imp[i].peer == m.peer and d.imp[i].rkey == m.rkey:
                out += d.imp[i].out
        if out == 0:
            tell(d, m.peer, T_GONE_ACK, 0, m.rkey, 0)

cdef extern from *:
    """
    #include <sys/eventfd.h>
    #include <unistd.h>
    static void ofi_signal(int fd) { uint64_t one = 1; ssize_t k = write(fd, &one, 8); (void)k; }
    """
    void ofi_signal(int) noexcept nogil

# ---------------------------------------------------------------- the table

cdef inline int post1(dom_t* d, uint64_t src, uint64_t n, uint64_t off, uint64_t lkey, uint64_t rkey, uint64_t ctx, uint32_t peer,
                      uint32_t imm, uint32_t flags, int more, int inject) noexcept nogil:
    cdef peer_t* p
    cdef imp_t* m
    cdef xctx_t* x
    cdef int rc
    cdef uint64_t data
    if d.down:
        return -FE_NIC
    if peer >= d.npeers or d.peer[peer].state != P_UP:
        return -FE_PEER_LOST
    if rkey >= d.nimp or not d.imp[rkey].used:
        return -FE_REMOTE_KEY
    p = &d.peer[peer]
    m = &d.imp[rkey]
    if m.dead:
        return -FE_REMOTE_KEY
    if off > m.len or n > m.len - off:
        return -FE_REMOTE_RANGE
    data = imm
    if d.nic.data8:
        data |= <uint64_t>p.number << 32
    if inject and n and n <= d.nic.inject and not flags & F_LANDED and not d.nic.landed:
        # done means "source reusable" here, and that it is: landing is for F_LANDED, or for the immediate to tell
        rc = ofi_inject(d.nic, <void*>src, n, p.fi, m.addr + off, m.key, data, (flags & F_IMM) != 0)
        if rc == 0:
            d.nposts += 1
            return POST_DONE
        if rc == -11:
            return POST_FULL
        if means_lost(-rc):
            lose(d, peer)
            return -FE_PEER_LOST
        return -FE_PROVIDER
    x = xtake(d)
    if x == NULL:
        return POST_FULL
    x.kind = X_WRITE
    x.user = ctx
    x.peer = peer
    x.slot = <uint32_t>rkey
    rc = ofi_write(d.nic, <void*>src, n, <void*>lkey, p.fi, m.addr + off, m.key, data, (flags & F_IMM) != 0, (flags & F_LANDED) != 0, more, x)
    if rc == 0:
        p.out += 1
        m.out += 1
        d.nposts += 1
        return POST_QUEUED
    xgive(d, x)
    if rc == -11:
        return POST_FULL
    if means_lost(-rc):
        lose(d, peer)
        return -FE_PEER_LOST
    return -FE_PROVIDER

cdef int ofi_post_write(void* dom, write_t* w) noexcept nogil:
    return post1(<dom_t*>dom, w.src, w.len, w.dst, w.lkey, w.rkey, w.ctx, w.peer, w.imm, w.flags, 0, 1)

cdef int ofi_post_many(void* dom, write_t* w, int n) noexcept nogil:
    cdef int i
    for i in range(n):
        w[i].rc = post1(<dom_t*>dom, w[i].src, w[i].len, w[i].dst, w[i].lkey, w[i].rkey, w[i].ctx, w[i].peer, w[i].imm, w[i].flags, 0, 1)
        if w[i].rc == POST_FULL:
            return i
    return n

cdef inline uint64_t index_of(const void* a, uint32_t wide, uint64_t i) noexcept nogil:
    if a == NULL:
        return i
    return (<uint64_t*>a)[i] if wide else (<uint32_t*>a)[i]

cdef int ofi_post_pages(void* dom, pages_t* g) noexcept nogil:
    cdef uint64_t start = g.at
    cdef int rc
    while g.at < g.end:
        rc = post1(<dom_t*>dom, g.src + index_of(g.si, g.swide, g.at) * g.sstride, g.len, g.dst + index_of(g.di, g.dwide, g.at) * g.dstride,
                   g.lkey, g.rkey, g.ctx, g.peer, g.imm, g.flags, 0, 0)
        if rc == POST_FULL:
            return POST_QUEUED if g.at > start else POST_FULL
        if rc < 0:
            return rc
        g.at += 1
    return POST_QUEUED

cdef int ofi_post_send(void* dom, send_t* s) noexcept nogil:
    """A rendezvous: at 0 nothing was said; 1: asked; above: 1 + bytes out."""
    cdef dom_t* d = <dom_t*>dom
    cdef peer_t* p = &d.peer[s.peer]
    cdef head_t* h
    cdef uint32_t slot
    cdef uint64_t n
    if d.down:
        return -FE_NIC
    if s.peer >= d.npeers or p.state != P_UP:
        return -FE_PEER_LOST
    if s.at == 0:
        if p.tx != 0 or not tell(d, s.peer, T_RTS, s.len, 0, 0):
            return POST_FULL
        p.tx = 1
        s.at = 1
        return POST_FULL
    if p.tx == 3:
        p.tx = 0
        s.at = 0
        return -FE_TOO_LONG
    if p.tx != 2:
        return POST_FULL
    while True:
        h = message(d, s.peer, T_FRAG, &slot)
        if h == NULL:
            return POST_FULL
        n = min(<uint64_t>(SLOT - sizeof(head_t)), s.len - (s.at - 1))
        h.a = s.at - 1
        h.len = <uint32_t>n
        memcpy(h + 1, <const uint8_t*>s.buf + (s.at - 1), n)
        post_message(d, slot, s.peer)
        s.at += n
        if s.at - 1 >= s.len:
            break
    p.tx = 0
    return POST_DONE

cdef int ofi_post_recv(void* dom, void* buf, uint64_t n, uint64_t lkey, uint64_t ctx) noexcept nogil:
    cdef dom_t* d = <dom_t*>dom
    cdef recv_t* r
    if d.rtail - d.rhead >= RECVS - 1:
        return POST_FULL
    r = &d.recv[d.rtail % RECVS]
    r.buf, r.len, r.ctx = buf, n, ctx
    d.rtail += 1
    if n > d.longest:
        d.longest = n
    if d.rwait:
        grant_all(d)
    return POST_QUEUED

cdef int ofi_poll_all(void* dom, comp_t* out, int most) noexcept nogil:
    cdef dom_t* d = <dom_t*>dom
    cdef ofi_comp c[16]
    cdef xctx_t* x
    cdef comp_t* e
    cdef int i, k, n = 0
    if d.down:
        return 0
    if d.ohead < d.otail:
        flush(d)
    while d.nunposted:
        i = d.nunposted
        d.nunposted -= 1
        repost(d, d.unposted[d.nunposted])
        if d.nunposted == <uint32_t>i:
            break
    if d.rwait and d.nsfree:
        grant_all(d)
    if d.ctail - d.chead < COMPS // 2:
        k = ofi_poll(d.nic, c, 16)
        for i in range(k):
            x = <xctx_t*>c[i].ctx
            if c[i].err:
                failed(d, x, &c[i])
            elif c[i].flags & OFI_REMOTE_DATA:
                e = comp(d, C_IMM)
                e.imm = <uint32_t>c[i].data
                e.count = 1
                if d.nic.data8:
                    e.src = <uint32_t>(c[i].data >> 32)
                elif c[i].src < 65536 and d.by_fi[c[i].src]:
                    e.src = d.peer[d.by_fi[c[i].src] - 1].src
            elif x == NULL:
                continue
            elif x.kind == X_WRITE:
                e = comp(d, C_DONE)
                e.ctx = x.user
                e.count = 1
                write_over(d, x)
                xgive(d, x)
            elif x.kind == X_CTRL:
                d.sfree[d.nsfree] = x.slot
                d.nsfree += 1
                xgive(d, x)
            elif x.kind == X_RECV:
                heard(d, <head_t*>(d.rbuf + <uint64_t>x.slot * SLOT), c[i].len)
                repost(d, x.slot)
    while n < most and d.chead < d.ctail:
        out[n] = d.comp[d.chead % COMPS]
        d.chead += 1
        n += 1
    return n

cdef void failed(dom_t* d, xctx_t* x, ofi_comp* c) noexcept nogil:
    cdef comp_t* e
    if x == NULL:
        return
    if x.kind == X_RECV:
        if c.err != 125 or not d.closing:
            repost(d, x.slot)
        return
    if x.kind == X_CTRL:
        d.sfree[d.nsfree] = x.slot
        d.nsfree += 1
    else:
        e = comp(d, C_ERROR)
        e.ctx = x.user
        e.count = 1
        e.vendor = c.err
        if d.imp[x.slot].dead and c.err == 125:
            e.status = FE_REMOTE_KEY
        elif means_lost(c.err):
            e.status = FE_PEER_LOST
        elif c.err == 13 or c.err == 22:
            e.status = FE_REMOTE_KEY
        else:
            e.status = FE_PROVIDER
        write_over(d, x)
    if means_lost(c.err) and d.peer[x.peer].state in (P_UP, P_NEW):
        lose(d, x.peer)
    xgive(d, x)

cdef int ofi_arm(void* dom) noexcept nogil:
    cdef dom_t* d = <dom_t*>dom
    if d.down:
        return 0
    if d.chead < d.ctail or d.ohead < d.otail or d.nunposted:
        return 1
    return ofi_trywait(d.nic)

cdef uint64_t ofi_recv_len(void* dom, uint32_t peer) noexcept nogil:
    cdef dom_t* d = <dom_t*>dom
    return d.peer[peer].recv_len if peer < d.npeers else 0


cdef fabric_ops_t OPS
OPS.version = FABRIC_VERSION
OPS.size = sizeof(fabric_ops_t)
OPS.post_write = ofi_post_write
OPS.post_many = ofi_post_many
OPS.post_pages = ofi_post_pages
OPS.post_send = ofi_post_send
OPS.post_recv = ofi_post_recv
OPS.poll = ofi_poll_all
OPS.arm = ofi_arm
OPS.recv_len = ofi_recv_len

HEADER = sizeof(head_t)
REFUSALS = {1: "incarnation", 2: "version", 3: "full", 4: "garbage"}


# ---------------------------------------------------------------- Python

cdef class Api:
    """The seven real symbols of a libfabric, by address."""
    cdef ofi_api* a

    def __cinit__(self, symbols):
        cdef void* s[7]
        if len(symbols) != 7:
            raise ValueError("seven symbols are wanted")
        for i, v in enumerate(symbols):
            s[i] = <void*><uintptr_t>v
        self.a = ofi_api_new(s)
        if self.a == NULL:
            raise MemoryError

    def __dealloc__(self):
        free(self.a)

    @property
    def version(self):
        cdef uint32_t v = ofi_version(self.a)
        return v >> 16, v & 0xffff

    def strerror(self, int e):
        return ofi_strerror(self.a, e).decode(errors="replace")

    def list(self, str provider, str node):
        """[(provider, domain), ...], or the error code (negative)."""
        cdef char* buf = <char*>malloc(65536)
        cdef int rc
        if buf == NULL:
            raise MemoryError
        try:
            p, n = provider.encode(), node.encode()
            rc = ofi_list(self.a, p, n, buf, 65536)
            if rc:
                return rc
            return [tuple(line.split("\t")) for line in buf.decode(errors="replace").splitlines()]
        finally:
            free(buf)


cdef class OfiState:
    """The C state of one libfabric domain. Calls are made with the progress lock held, but for those that say otherwise."""
    cdef dom_t* d
    cdef object api
    cdef readonly int hello_fd

    def __cinit__(self, Api api, str provider, str node, str domain, int skip, uint64_t incarnation, int hello_fd, bint hmem=False):
        cdef dom_t* d = <dom_t*>alloc_lines(sizeof(dom_t))
        cdef uint32_t i
        cdef int rc
        self.d, self.api, self.hello_fd = d, api, hello_fd
        if d == NULL:
            raise MemoryError
        d.incarnation, d.hello_fd = incarnation, hello_fd
        d.nic = ofi_nic_new()
        if d.nic == NULL:
            raise MemoryError
        p, n, m = provider.encode(), node.encode(), domain.encode()
        rc = ofi_open(api.a, d.nic, p, n, m, skip, 8192, hmem)
        if rc:
            what = d.nic.what.decode(errors="replace")
            ofi_close(d.nic)
            raise OSError(-rc, f"{what}: {api.strerror(rc)}")
        d.nx = d.nic.tx_depth + NSEND
        d.x = <xctx_t*>alloc_lines(d.nx * sizeof(xctx_t))
        d.rctx = <xctx_t*>alloc_lines(NRECV * sizeof(xctx_t))
        d.sbuf = <uint8_t*>map_zeroed(NSEND * SLOT)
        d.rbuf = <uint8_t*>map_zeroed(NRECV * SLOT)
        d.peer = <peer_t*>map_zeroed(PEERS * sizeof(peer_t))
        d.imp = <imp_t*>map_zeroed(IMPORTS * sizeof(imp_t))
        d.region = <region_t*>map_zeroed(REGIONS * sizeof(region_t))
        d.pair = <pair_t*>map_zeroed(REGIONS * 4 * sizeof(pair_t))
        d.recv = <recv_t*>map_zeroed(RECVS * sizeof(recv_t))
        d.comp = <comp_t*>map_zeroed(COMPS * sizeof(comp_t))
        d.hello = <uint8_t*>map_zeroed(HELLOS * SLOT)
        d.by_fi = <uint64_t*>map_zeroed(65536 * 8)
        if d.x == NULL or d.rctx == NULL or d.sbuf == NULL or d.rbuf == NULL or d.peer == NULL or d.imp == NULL or d.region == NULL or \
                d.pair == NULL or d.recv == NULL or d.comp == NULL or d.hello == NULL or d.by_fi == NULL:
            raise MemoryError
        d.nimp = 1
        d.rhead = d.rtail = RECVS          # room to give receives back at the head
        for i in range(d.nx):
            xgive(d, &d.x[i])
        for i in range(NSEND):
            d.sfree[i] = i
        d.nsfree = NSEND

    def start(self):
        """Posts the internal receives; registers their memory where the provider wants it."""
        cdef uint64_t key
        cdef void* mr
        cdef uint32_t i
        if self.d.nic.need_desc:
            for which in (0, 1):
                rc = ofi_reg(self.d.nic, <uint64_t>(self.d.rbuf if which else self.d.sbuf), NRECV * SLOT, 1 + which, 0, 0, -1, 0, &mr,
                             &self.d.rdesc if which else &self.d.sdesc, &key)
                if rc:
                    raise OSError(-rc, f"fi_mr_reg of internal buffers: {self.api.strerror(rc)}")
        for i in range(NRECV):
            repost(self.d, i)

    def __dealloc__(self):
        cdef dom_t* d = self.d
        if d == NULL:
            return
        if d.nic != NULL and d.nic.addrlen:
            ofi_close(d.nic)
        free(d.nic)
        free(d.x)
        free(d.rctx)
        unmap(d.sbuf, NSEND * SLOT)
        unmap(d.rbuf, NRECV * SLOT)
        unmap(d.peer, PEERS * sizeof(peer_t))
        unmap(d.imp, IMPORTS * sizeof(imp_t))
        unmap(d.region, REGIONS * sizeof(region_t))
        unmap(d.pair, REGIONS * 4 * sizeof(pair_t))
        unmap(d.recv, RECVS * sizeof(recv_t))
        unmap(d.comp, COMPS * sizeof(comp_t))
        unmap(d.hello, HELLOS * SLOT)
        unmap(d.by_fi, 65536 * 8)
        free(d)

    @property
    def dom(self):
        return <uintptr_t>self.d

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

    def closing(self):
        self.d.closing = 1

    def shut(self):
        """Closes the endpoint; polls and posts do nothing afterwards."""
        self.d.down = 1
        if self.d.nic.addrlen:
            ofi_close(self.d.nic)

    # -- regions

    def add_region(self, uint32_t slot, uint64_t rkey, uint64_t addr, uint64_t length, uint64_t key, int iface, int device, int dmabuf_fd, uint64_t dmabuf_off):
        """(mr, desc) of a new registration; OSError."""
        cdef void* mr = NULL
        cdef void* desc = NULL
        cdef uint64_t got = 0
        cdef region_t* g = &self.d.region[slot]
        cdef int rc = ofi_reg(self.d.nic, addr, length, key, iface, device, dmabuf_fd, dmabuf_off, &mr, &desc, &got)
        if rc:
            raise OSError(-rc, f"{length} bytes at {addr:#x} cannot be registered: {self.api.strerror(rc)}")
        g.rkey, g.base, g.len, g.key, g.used, g.waiting = rkey, addr, length, got, 1, 0
        return <uintptr_t>mr, <uintptr_t>desc

    def gone(self, uint64_t rkey):
        """Tells the importers of a region that it goes; how many have to answer."""
        cdef uint32_t s = rkey & (REGIONS - 1), i = 0, n = 0
        cdef region_t* g = &self.d.region[s]
        g.waiting = 1
        while i < self.d.npairs:
            if self.d.pair[i].slot == s:
                if self.d.peer[self.d.pair[i].peer].state != P_LOST and tell(self.d, self.d.pair[i].peer, T_GONE, 0, rkey, 0):
                    g.waiting += 1
            i += 1
        return g.waiting - 1

    def waiting(self, uint64_t rkey):
        """Importers that have not answered; lost ones count as having answered."""
        cdef uint32_t s = rkey & (REGIONS - 1), i
        cdef uint32_t alive = 0
        for i in range(self.d.npairs):
            if self.d.pair[i].slot == s and self.d.peer[self.d.pair[i].peer].state != P_LOST:
                alive += 1
        return min(alive, self.d.region[s].waiting - 1)

    def keep_region(self, uint64_t rkey):
        self.d.region[rkey & (REGIONS - 1)].waiting = 0

    def drop_region(self, uint64_t rkey, uint64_t mr):
        cdef uint32_t s = rkey & (REGIONS - 1), i = 0
        self.d.region[s].used = 0
        while i < self.d.npairs:
            if self.d.pair[i].slot == s:
                self.d.npairs -= 1
                self.d.pair[i] = self.d.pair[self.d.npairs]
            else:
                i += 1
        return ofi_dereg(<void*><uintptr_t>mr)

    # -- peers

    cdef int find(self, bytes addr, uint64_t incarnation):
        cdef uint32_t i
        cdef peer_t* p
        for i in range(self.d.npeers):
            p = &self.d.peer[i]
            if p.used and p.state != P_LOST and p.incarnation == incarnation and p.addrlen == len(addr) and memcmp(p.addr, <const char*>addr, p.addrlen) == 0:
                return i
        return -1

    def peer(self, bytes addr, uint64_t incarnation, uint32_t src):
        """The index of a peer, made if new; None when there is no room; OSError when the provider refuses the address."""
        cdef int i = self.find(addr, incarnation)
        cdef peer_t* p
        cdef uint64_t fi = 0
        cdef int rc
        if i >= 0:
            return i
        if self.d.npeers == PEERS or len(addr) > 512:
            return None
        rc = ofi_av_insert(self.d.nic, <const char*>addr, &fi)
        if rc:
            raise OSError(-rc, f"fi_av_insert: {self.api.strerror(rc)}")
        p = &self.d.peer[self.d.npeers]
        memset(p, 0, sizeof(peer_t))
        p.incarnation, p.fi, p.src, p.addrlen = incarnation, fi, src, len(addr)
        memcpy(p.addr, <const char*>addr, len(addr))
        if fi < 65536:
            self.d.by_fi[fi] = self.d.npeers + 1
        p.used = 1
        self.d.npeers += 1
        return self.d.npeers - 1

    def hello(self, uint32_t i, bytes body):
        """Says hello (again); whether it could be put out."""
        cdef uint32_t s
        cdef head_t* h
        cdef peer_t* p = &self.d.peer[i]
        if p.state == P_NEW:
            p.state = P_ASKED
        if p.state != P_ASKED or len(body) > SLOT - sizeof(head_t):
            return False
        h = message(self.d, i, T_HELLO, &s)
        if h == NULL:
            return False
        h.len = len(body)
        memcpy(h + 1, <const char*>body, len(body))
        post_message(self.d, s, i)
        return True

    def state(self, uint32_t i):
        """Needs no lock: "new", "asked", "up", "lost" or "refused", and why."""
        cdef uint32_t s = ld_acq32(&self.d.peer[i].state)
        return ("new", "asked", "up", "lost", "refused")[s], self.d.peer[i].reason

    def lose(self, uint32_t i, bint tell_it):
        if not tell_it:
            self.d.peer[i].told = 1
            if self.d.peer[i].rx == 1:
                self.d.rwait -= 1
            self.d.peer[i].rx = self.d.peer[i].tx = 0
            self.d.peer[i].state = P_LOST
        else:
            lose(self.d, i)

    def reset(self, uint32_t i):
        """After a refusal: a later attempt asks anew."""
        self.d.peer[i].state = P_NEW

    def bye(self, uint32_t i):
        if self.d.peer[i].used and (self.d.peer[i].state == P_UP or self.d.peer[i].theirs or self.d.peer[i].src != NO_SRC) and self.d.peer[i].state != P_LOST:
            tell(self.d, i, T_BYE, 0, 0, 0)

    def unsent(self):
        return self.d.otail - self.d.ohead + NSEND - self.d.nsfree

    def next_hello(self):
        """(from_idx, session, target, version, body) of the oldest hello that was heard, or None."""
        cdef head_t* h
        if self.d.hhead == ld_acq64(&self.d.htail):
            return None
        h = <head_t*>(self.d.hello + (self.d.hhead % HELLOS) * SLOT)
        out = (h.from_idx, h.session, h.target, h.version, bytes((<uint8_t*>(h + 1))[:h.len]))
        self.d.hhead += 1
        return out

    def welcome(self, uint32_t i, uint32_t theirs, uint32_t src):
        cdef uint32_t s
        cdef head_t* h
        self.d.peer[i].theirs, self.d.peer[i].src = theirs, src
        return tell(self.d, i, T_WELCOME, src, 0, 0) == 1

    def refuse(self, uint32_t i, uint32_t theirs, uint64_t reason):
        self.d.peer[i].theirs = theirs
        return tell(self.d, i, T_REFUSED, reason, 0, 0) == 1

    def peers(self):
        return [dict(index=i, state=self.state(i)[0], alive=self.d.peer[i].state != P_LOST, src=self.d.peer[i].src, outstanding=self.d.peer[i].out)
                for i in range(self.d.npeers) if self.d.peer[i].used]

    # -- imports

    def ask_import(self, uint32_t peer, uint64_t id_, uint64_t rkey, uint64_t base, uint64_t length):
        cdef uint32_t s
        cdef head_t* h
        self.d.reply_id, self.d.reply_done = id_, 0
        h = message(self.d, peer, T_IMPORT, &s)
        if h == NULL:
            return False
        h.a, h.b, h.c, h.len = id_, rkey, base, 8
        (<uint64_t*>(h + 1))[0] = length
        post_message(self.d, s, peer)
        return True

    def reply(self):
        """Needs no lock: (status, key, address) when the answer is there."""
        if not ld_acq32(&self.d.reply_done):
            return None
        return self.d.reply_status, self.d.reply_key, self.d.reply_addr

    def add_import(self, uint32_t peer, uint64_t rkey, uint64_t key, uint64_t addr, uint64_t length):
        cdef uint32_t i
        for i in range(1, IMPORTS):
            if not self.d.imp[i].used and self.d.imp[i].out == 0:
                self.d.imp[i].rkey, self.d.imp[i].key, self.d.imp[i].addr, self.d.imp[i].len = rkey, key, addr, length
                self.d.imp[i].peer, self.d.imp[i].dead, self.d.imp[i].ack = peer, 0, 0
                self.d.imp[i].used = 1
                if i >= self.d.nimp:
                    self.d.nimp = i + 1
                return i
        return None

    def drop_import(self, uint32_t i):
        self.d.imp[i].used = 0


def close_mr(uint64_t mr):
    """Closes a registration of a domain that closes itself."""
    return ofi_dereg(<void*><uintptr_t>mr)


def poll_once(uint64_t dom):
    """One poll whose completions nobody wants; the engine has stopped."""
    cdef comp_t c[16]
    return ofi_poll_all(<void*><uintptr_t>dom, c, 16)
