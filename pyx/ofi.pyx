"""fabricx._ofi: the libfabric fabric. Built from 1.17 headers; it links nothing: the seven real symbols of libfabric
come as addresses (fabricx/fabrics/ofi.py opens the library), everything else are inlines over the tables of functions
in its objects.

A domain is one FI_EP_RDM endpoint. Writes are fi_writemsg with remote CQ data; the data carries the immediate and,
where it has 64 bits, the number that the TARGET gave the sender in the handshake. Handshake, messages and key look-ups are
SENDs into a pool of receives that is always posted, so nothing internal ever waits for the application. User messages are
a rendezvous: ask (RTS), be granted a posted receive (CTS), send fragments.

Its rooms, all one extension since calls across modules do not inline:
  ofi_api.h      libfabric as it is used here
  ctl_defs.pxi   peers, regions, imports (the rooms ctl_* are shared with verbs.pyx)
  ctl_wire.pxi   completions for the engine, control messages on their way out
  ctl_msg.pxi    messages of the application
  ctl_heard.pxi  control messages that arrive; regions and imports
  ctl_state.pxi  what Python sees of all that
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

ctypedef ofi_nic nic_t

cdef enum:
    MAGIC = 0x66784f46
    EAGAIN_ = -11               # FI_EAGAIN, as posts return it
    CQ_SIZE = 8192
    WRITES = 4096               # outstanding in all, and to one peer: a stopped one must not use up what all share
    PEER_WRITES = 512
    CONTEXTS = WRITES + 256     # a control message always finds one
    INJECTS = 128               # small writes without completion between two that have one
    AV_MOST = 65536

    X_WRITE = 1
    X_CTRL = 2
    X_RECV = 3

cdef struct xctx_t:
    char room[64]               # struct fi_context2, owned by the provider while the operation is out
    uint64_t user
    uint32_t kind, peer
    uint32_t slot, pad          # control: its slot; write: its import
    xctx_t* next

cdef struct link_t:             # to a peer
    uint64_t fi
    uint32_t injected           # small writes since the last that has a completion

cdef struct own_t:              # of a domain
    xctx_t* x
    xctx_t* xfree
    uint32_t xfresh             # contexts from here on were never used
    xctx_t* rctx
    void* sdesc
    void* rdesc
    uint64_t* by_fi             # peer + 1 by AV index, where completions name the source by it

include "ctl_defs.pxi"
include "ctl_wire.pxi"
include "ctl_msg.pxi"
include "ctl_heard.pxi"
include "ofi_post.pxi"

cdef fabric_ops_t OPS
OPS.version = FABRIC_VERSION
OPS.size = sizeof(fabric_ops_t)
OPS.post_write = ofi_post_write
OPS.post_many = ofi_post_many
OPS.post_pages = ofi_post_pages
OPS.post_send = ctl_post_send
OPS.post_recv = ctl_post_recv
OPS.poll = ofi_poll_all
OPS.arm = ofi_arm
OPS.recv_len = ctl_recv_len
OPS.cancel_recv = ctl_cancel_recv
OPS.cancel_send = ctl_cancel_send
OPS.fence = ctl_fence



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


include "ctl_state.pxi"
include "ofi_state.pxi"


def close_mr(uint64_t mr):
    """Closes a registration of a domain that closes itself."""
    return ofi_dereg(<void*><uintptr_t>mr)


def poll_once(uint64_t dom):
    """One poll whose completions nobody wants; the engine has stopped."""
    cdef comp_t c[16]
    return ofi_poll_all(<void*><uintptr_t>dom, c, 16)
