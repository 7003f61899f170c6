"""fabricx._ofi: the libfabric fabric. Built from 1.17 headers; it links nothing: the seven real symbols of libfabric
come as addresses (fabricx/fabrics/ofi.py opens the library), everything else are inlines over the tables of functions
in its objects.

A domain is one FI_EP_RDM endpoint. Writes are fi_writemsg with remote CQ data; the data carries the immediate and,
where it has 64 bits, the number that the TARGET gave the sender in the handshake. Handshake, messages and key look-ups are
SENDs into a pool of receives that is always posted, so nothing internal ever waits for the application. User messages are
a rendezvous: ask (RTS), be granted a posted receive (CTS), send fragments.

Its rooms, all one extension since calls across modules do not inline:
  ofi_api.h      libfabric as it is used here
  ofi_wire.pxi   completions for the engine, control messages on their way out
  ofi_msg.pxi    messages of the application
  ofi_heard.pxi  control messages that arrive; regions and imports
  ofi_post.pxi   writes, completions, sleeping
  ofi_state.pxi  what Python sees of a domain
"""
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
    int ofi_open(ofi_api*, ofi_nic*, const char* provider, const char* node, const char* domain, int skip,
                 uint64_t cq_size, int hmem) noexcept
    void ofi_close(ofi_nic*) noexcept
    int ofi_reg(ofi_nic*, uint64_t addr, uint64_t len, uint64_t key, int iface, int device, int dmabuf_fd,
                uint64_t dmabuf_off, void** mr, void** desc, uint64_t* got) noexcept
    int ofi_reg_internal(ofi_nic*, int which, void* at, uint64_t len, void** desc) noexcept
    int ofi_dereg(void* mr) noexcept
    int ofi_av_insert(ofi_nic*, const void* addr, uint64_t* out) noexcept
    void ofi_av_remove(ofi_nic*, uint64_t) noexcept
    int ofi_write(ofi_nic*, const void* src, uint64_t n, void* desc, uint64_t peer, uint64_t dst, uint64_t key,
                  uint64_t data, int imm, int landed, void* ctx) noexcept
    int ofi_inject(ofi_nic*, const void* src, uint64_t n, uint64_t peer, uint64_t dst, uint64_t key, uint64_t data,
                   int imm) noexcept
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
    EAGAIN_ = -11               # FI_EAGAIN, as posts return it
    SLOT = 16384                # bytes of a control message, header and all
    NSEND = 256
    NRECV = 256
    PEER_SLOTS = 32             # control messages to one peer that may wait or be out
    FLUSH = 8                   # peers tried in a turn
    PEERS = 16384
    IMPORTS = 65536
    REGIONS = 65536
    PAIRS = 262144              # (region, importer)
    RECVS = 65536
    COMPS = 16384
    HELLOS = 64
    CQ_SIZE = 8192
    WRITES = 4096               # outstanding in all, and to one peer: a stopped one must not use up what all share
    PEER_WRITES = 512
    CONTEXTS = WRITES + NSEND   # a control message always finds one
    INJECTS = 128               # small writes without completion between two that have one
    AV_MOST = 65536

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

    TX_IDLE = 0                 # a message to a peer
    TX_ASKED = 1
    TX_GRANTED = 2
    TX_TOO_LONG = 3

    RX_NONE = 0                 # a message from a peer
    RX_WAITS = 1                # for a receive
    RX_FILLING = 2

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
    uint32_t slot, pad          # control: its slot; write: its import
    xctx_t* next

cdef struct peer_t:
    uint32_t used, state
    uint32_t theirs             # its index for us
    uint32_t src                # our number for it
    uint32_t number             # the number it gave us
    uint32_t reason, told
    uint32_t passing            # only ever refused: its place may be given to another
    uint64_t incarnation, fi
    uint32_t addrlen
    uint8_t addr[512]
    uint64_t out                # writes without completion
    uint32_t injected           # small writes since the last that has a completion
    # -- control messages to it
    uint32_t slots              # that wait or are out
    uint32_t ohead, otail       # slots that wait, 1 + number; 0: none
    uint32_t queued             # it is among d.queued
    uint32_t hello              # 1 + slot of a hello that is not out yet
    # -- a message to it
    uint32_t tx
    uint64_t recv_len
    # -- a message from it
    uint32_t rx, rx_more        # rx_more: it has asked for its next already
    uint64_t rx_total, rx_have, rx_ctx, rx_room, rx_next
    void* rx_buf

cdef struct imp_t:
    uint64_t rkey, key, addr, len
    uint32_t peer, used, dead, ack
    uint64_t out

cdef struct region_t:
    uint64_t rkey, base, len, key
    uint32_t used, leaving
    uint32_t first              # of its importers; 0: none

cdef struct pair_t:             # a peer that has imported a region
    uint32_t peer, next
    uint32_t told, gone         # told that the region goes; has answered

cdef struct recv_t:
    void* buf
    uint64_t len, ctx

cdef struct dom_t:
    ofi_nic* nic
    uint64_t incarnation
    uint32_t down, failed, closing
    xctx_t* x
    xctx_t* xfree
    uint32_t xfresh             # contexts from here on were never used
    uint8_t* sbuf
    uint8_t* rbuf
    void* sdesc
    void* rdesc
    xctx_t* rctx
    uint32_t sfree[NSEND]
    uint32_t snext[NSEND]       # the next slot that waits for the same peer, 1 + number
    uint32_t nsfree
    uint32_t* queued            # peers for which slots wait
    uint64_t qhead, qtail
    uint32_t unposted[NRECV]    # receives that could not be posted again yet
    uint32_t nunposted
    peer_t* peer
    uint32_t npeers
    imp_t* imp
    uint32_t nimp
    region_t* region
    pair_t* pair
    uint32_t pfree, pfresh
    recv_t* recv
    uint64_t rhead, rtail, longest
    uint32_t rwait              # peers that wait for a receive
    uint32_t rfilling           # receives being filled
    comp_t* comp
    uint64_t chead, ctail
    uint8_t* hello              # copies of hellos, for the fabric's thread
    uint64_t hhead, htail
    int hello_fd
    uint64_t reply_id, reply_key, reply_addr, reply_rkey
    uint32_t reply_status, reply_done
    uint32_t reply_gone         # the region went while its import was being asked for
    uint64_t* by_fi             # peer + 1 by AV index, where completions name the source by it
    uint64_t writes             # without completion
    uint64_t nposts, garbage    # garbage: messages that were dropped

include "ofi_wire.pxi"
include "ofi_msg.pxi"
include "ofi_heard.pxi"
include "ofi_post.pxi"

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


include "ofi_state.pxi"


def close_mr(uint64_t mr):
    """Closes a registration of a domain that closes itself."""
    return ofi_dereg(<void*><uintptr_t>mr)


def poll_once(uint64_t dom):
    """One poll whose completions nobody wants; the engine has stopped."""
    cdef comp_t c[16]
    return ofi_poll_all(<void*><uintptr_t>dom, c, 16)
