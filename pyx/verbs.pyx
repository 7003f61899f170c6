"""fabricx._verbs: the RDMA verbs fabric. Set-up is pyverbs' (fabricx/fabrics/verbs.py); posting and polling are here, on
the C objects inside pyverbs'. Nothing is linked: what is called are inlines over the provider's table.

Two reliable queue pairs a peer NIC: control messages (SEND, into SRQ A) and data (WRITE, WRITE_WITH_IMM; immediates
take empty receives from SRQ B), so that neither can take the other's receives. Its rooms:
  verbs_api.h      libibverbs as it is used here
  ctl_*.pxi        the control protocol, shared with ofi.pyx
  verbs_post.pxi   writes, completions, sleeping
  verbs_state.pxi  what Python sees of a domain
"""
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcmp, memcpy, memset
from atom cimport *
from fabric cimport *

cdef extern from "verbs_api.h" nogil:
    ctypedef struct vb_templates:
        pass
    ctypedef struct vb_pages:
        uint64_t src, sstride, base, dst, dstride, top
        const void* si
        const void* di
        int kinds, stop, rest
    ctypedef struct ibv_wc "struct ibv_wc":
        uint64_t wr_id
        int status
        uint32_t vendor_err, byte_len, qp_num
        unsigned int wc_flags
    ctypedef struct ibv_qp "struct ibv_qp":
        pass
    ctypedef struct ibv_cq "struct ibv_cq":
        pass
    ctypedef struct ibv_srq "struct ibv_srq":
        pass
    void vb_prepare(vb_templates*) noexcept
    void vb_fill(vb_templates*, int i, uint64_t id, uint64_t src, uint32_t len, uint32_t lkey, uint64_t dst, uint32_t rkey,
                 uint32_t imm, int has_imm, int inl) noexcept
    int vb_ring(ibv_qp*, vb_templates*, int n) noexcept
    int vb_send(ibv_qp*, uint64_t id, void* buf, uint32_t len, uint32_t lkey, uint32_t inl) noexcept
    int vb_recv(ibv_srq*, uint64_t id, void* buf, uint32_t len, uint32_t lkey) noexcept
    int vb_recv_empty(ibv_srq*, vb_templates*, uint64_t id, int n) noexcept
    void vb_pages_begin(vb_pages*, int chain, uint64_t id, uint32_t len, uint32_t lkey, uint32_t rkey, uint32_t imm, int has_imm,
                        int inl) noexcept
    uint32_t vb_pages_post(ibv_qp*, vb_pages*, uint64_t at, uint32_t n) noexcept
    int vb_poll(ibv_cq*, ibv_wc*) noexcept
    int vb_alike(const ibv_wc*, const ibv_wc* end) noexcept
    uint32_t vb_imm(const ibv_wc*) noexcept
    void vb_drain(int fd) noexcept
    int vb_notify(ibv_cq*) noexcept
    uint32_t vb_qp_num(ibv_qp*) noexcept
    void* vb_qp_context(ibv_qp*) noexcept
    void* vb_qp_pd(ibv_qp*) noexcept
    void* vb_cq_context(ibv_cq*) noexcept
    int vb_cq_size(ibv_cq*) noexcept
    void* vb_srq_context(ibv_srq*) noexcept
    int vb_async_fd(void* context) noexcept
    int vb_channel_fd(void*) noexcept
    void* vb_inside(void*) noexcept
    enum: VB_CHAIN, VB_POLL
    enum: IBV_WC_WITH_IMM
    enum: IBV_WC_SUCCESS, IBV_WC_LOC_LEN_ERR, IBV_WC_LOC_QP_OP_ERR, IBV_WC_LOC_PROT_ERR, IBV_WC_WR_FLUSH_ERR
    enum: IBV_WC_REM_INV_REQ_ERR, IBV_WC_REM_ACCESS_ERR, IBV_WC_REM_OP_ERR, IBV_WC_RETRY_EXC_ERR
    enum: IBV_WC_RNR_RETRY_EXC_ERR, IBV_WC_REM_ABORT_ERR, IBV_WC_FATAL_ERR, IBV_WC_RESP_TIMEOUT_ERR

ctypedef void nic_t

cdef enum:
    MAGIC = 0x66785642
    WRITES = 4096               # data work requests outstanding in all, and to one peer
    PEER_WRITES = 512
    RING = 512                  # entries of a peer's ring: at most one a work request
    IMMS = 4096                 # empty receives kept posted, if the device has room
    BATCH = 64                  # they are posted in batches
    QPNS = 1 << 24

    K_DATA = 1                  # kinds of work requests: the top bits of wr_id
    K_SEND = 2
    K_RECV = 3
    K_IMM = 4

cdef enum:
    NOT_BY_CPU = 0x100000000    # in a local key, above the NIC's 32 bits: memory that the CPU cannot read

cdef struct posted_t:           # work requests of one ctx, under one doorbell or several alike
    uint64_t ctx
    uint32_t imp
    uint32_t left               # doorbells that are not over
    uint32_t count              # work requests under each
    uint32_t first              # their place under it
    uint16_t last               # they are its last: a completion follows
    uint16_t over               # those under the oldest were told already

cdef struct link_t:             # to a peer
    ibv_qp* data
    ibv_qp* ctl
    uint32_t data_qpn, ctl_qpn
    uint32_t broken             # a completion with an error came: the queue pairs are of no use any more
    uint32_t failed             # and so has the data queue pair itself
    uint32_t sends              # control messages out
    posted_t* ring
    uint64_t head, tail

cdef struct own_t:              # of a domain
    vb_templates t
    vb_pages pages
    ibv_cq* scq
    ibv_cq* rcq
    ibv_srq* srq
    ibv_srq* isrq
    int channel
    uint32_t slkey, rlkey       # of the control buffers
    uint32_t inl, chain
    uint32_t limit              # data work requests outstanding in all
    uint32_t peer_limit
    uint32_t imms               # empty receives wanted
    uint32_t imms_posted
    uint32_t low                # times that the device ran low of them
    uint64_t doorbells
    uint32_t* by_qpn            # peer + 1 by queue pair number

include "ctl_defs.pxi"
include "ctl_wire.pxi"
include "ctl_msg.pxi"
include "ctl_heard.pxi"
include "verbs_post.pxi"

cdef fabric_ops_t OPS
OPS.version = FABRIC_VERSION
OPS.size = sizeof(fabric_ops_t)
OPS.post_write = verbs_post_write
OPS.post_many = verbs_post_many
OPS.post_pages = verbs_post_pages
OPS.post_send = ctl_post_send
OPS.post_recv = ctl_post_recv
OPS.poll = verbs_poll
OPS.arm = verbs_arm
OPS.recv_len = ctl_recv_len
OPS.cancel_recv = ctl_cancel_recv
OPS.cancel_send = ctl_cancel_send
OPS.fence = ctl_fence

N_SEND = NSEND
N_RECV = NRECV
N_WRITES = WRITES
N_PEER_WRITES = PEER_WRITES
N_IMMS = IMMS
LKEY_NOT_BY_CPU = <uint64_t>NOT_BY_CPU
N_PEER_SLOTS = PEER_SLOTS
CHAIN_MOST = VB_CHAIN

include "ctl_state.pxi"
include "verbs_state.pxi"


def poll_once(uint64_t dom):
    """One poll whose completions nobody wants; the engine has stopped."""
    cdef comp_t c[16]
    return verbs_poll(<void*><uintptr_t>dom, c, 16)


def channel_fd(channel):
    """The descriptor of a completion channel (a pyverbs CompChannel)."""
    return vb_channel_fd(inside(channel, "CompChannel"))


def drain_channel(int fd):
    """Takes and acknowledges the events of a completion channel."""
    vb_drain(fd)


def pd_address(qp):
    """The C object of the protection domain of a pyverbs QP."""
    return <uintptr_t>vb_qp_pd(<ibv_qp*>vb_inside(<void*>qp))


def async_fd(qp):
    """The descriptor of a device's asynchronous events, by one of its queue pairs (a pyverbs QP)."""
    return vb_async_fd(vb_qp_context(<ibv_qp*>vb_inside(<void*>qp)))
