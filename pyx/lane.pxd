"""The inbox of a local group: a sealed memfd that its senders map.

One single-producer lane a sender. Entries carry a lap tag that the receiver never clears, so each side writes only its own lines;
a sender that dies between filling and tagging an entry has published nothing.
"""
from libc.stdint cimport int32_t, uint8_t, uint32_t, uint64_t
from fabric cimport comp_t, pages_t, write_t

cdef enum:
    INBOX_MAGIC = 0x66785831
    INBOX_VERSION = 1
    LANES = 256
    LANE_WORDS = 4              # of the summary, a bit a lane
    NICS = 16
    ENTRIES = 4096              # immediates in flight from one sender
    REGIONS = 65536             # registrations of a group at a time
    MSG_BYTES = 262144          # messages in flight from one sender
    BOUNCE_BYTES = 524288       # payload in flight from a sender that cannot write here itself

    E_IMM = 1                   # `count` writes with immediate `imm` have landed
    E_BOUNCE = 2                # `len` bytes at position `pos` of the bounce ring belong to region slot `imm`, offset `off`

cdef struct entry_t:            # 32 bytes
    uint32_t lap, kind
    uint32_t imm, count
    uint64_t off
    uint32_t pos, len

cdef struct lane_t:
    # -- written by the receiver
    uint64_t head               # entries taken
    uint64_t msg_head           # bytes taken of the message ring
    uint64_t bounce_head
    uint32_t closed             # the door: nothing more is taken
    char pad0[36]
    # -- written by the sender
    uint32_t busy               # odd: in the middle of a write
    char pad1[4]
    uint64_t msg_tail
    char pad2[48]
    entry_t e[ENTRIES]
    uint8_t msg[MSG_BYTES]
    uint8_t bounce[BOUNCE_BYTES]

cdef struct inbox_t:
    uint32_t magic, version
    uint64_t incarnation
    char pad0[48]
    uint32_t bell               # of the group's driver
    char pad1[60]
    uint64_t recv_len[NICS]     # longest receive buffer posted on a NIC so far
    uint32_t recv_free[NICS]    # buffers posted and not taken
    uint64_t summary[NICS][8]   # lanes with something new; LANE_WORDS of each are used
    uint64_t rkey[REGIONS]      # 0: not registered
    lane_t lane[LANES]

# -- what only one side knows

cdef struct rx_t:               # a lane as its receiver sees it
    uint64_t head, told
    uint64_t msg_head
    uint32_t used, nic, src
    uint32_t dying              # the sender is gone: drain, then report
    uint32_t got_head           # a message header has been read:
    void* buf                   # ... the receive it goes to, or NULL
    uint64_t ctx, room, total, have

cdef struct pend_t:             # a bounced post: done when the receiver has passed `pos`
    uint64_t ctx, pos
    uint32_t count

cdef enum:
    PENDS = 4096
    VM_BATCH = 512

cdef struct tx_t:               # a lane as its sender sees it
    inbox_t* box
    lane_t* lane
    uint64_t* word              # of the summary
    uint64_t bit
    uint64_t tail, head_seen
    uint64_t msg_tail
    uint64_t bounce_tail
    uint32_t busy, nic
    uint32_t used, dead
    uint32_t src                # source number, for C_PEER_LOST
    uint32_t vm                 # process_vm_writev works
    int pid, pidfd
    uint64_t seq                # posts, for Chaos
    # -- bounced posts without completion
    pend_t* pend
    uint64_t pend_head, pend_tail
    uint64_t big_src, big_off, big_at   # a page larger than the ring, half way

cdef enum:
    M_NONE = 0
    M_MAP = 1                   # memcpy to `addr` + offset
    M_VM = 2                    # process_vm_writev to `addr` + offset at the peer
    M_BOUNCE = 3

cdef struct imp_t:              # an imported region
    uint64_t rkey, addr, len
    uint32_t mode, peer
    uint64_t gen                # part of the key: a place used again must not serve an old write

cdef struct region_t:           # a registered one, for bounced payload
    uint64_t addr, len

cdef struct recv_t:
    void* buf
    uint64_t len, ctx

# -- Chaos, one for a group

cdef enum:
    H_FREE = 0
    H_HELD = 1                  # not carried out
    H_RUN = 2                   # landed, no completion yet
    H_LOST = 3                  # its NIC failed before it was carried out
    HELD = 1024

    K_WRITE = 1
    K_PAGES = 2

cdef struct held_t:
    uint32_t state, kind
    void* dom
    uint64_t due, ctx, number
    uint32_t peer, count        # count: posts it stands for
    uint32_t silent             # its completion is lost
    write_t w
    pages_t p

cdef struct chaos_t:
    uint64_t seed, clock, number
    double reorder, drop
    uint64_t max_delay
    int32_t fail_nic
    uint64_t fail_after
    uint32_t virtual_
    uint32_t norder
    uint32_t* order
    uint32_t nheld
    held_t held[HELD]
