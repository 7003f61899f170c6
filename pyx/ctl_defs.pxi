# Control messages, peers, regions and imports of fabrics whose NICs talk by messages; part of ofi.pyx and verbs.pyx.
#
# Which includes this after it has defined MAGIC, nic_t, link_t (what it keeps for a peer) and own_t (what it keeps of its own
# for a domain), and has for the rooms after it
#   bint ship(dom_t*, uint32_t slot, uint32_t peer)     posts a control message; False: no room now
# It calls heard() with each message that arrives, and write_over() when a write is over.

cdef enum:
    WIRE_VERSION = 1
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
    FENCES = 1024
    FENCE_AGAIN = 200000000     # ns without an answer after which fences are sent again

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
    T_UNRTS = 13                # the sender takes its message back
    T_UNRTS_ACK = 14
    T_FENCE = 15                # what was written before has it landed?
    T_FENCED = 16

    P_NEW = 0                   # states of a peer, as the sending side sees it
    P_ASKED = 1
    P_UP = 2
    P_LOST = 3
    P_REFUSED = 4

    TX_IDLE = 0                 # a message to a peer
    TX_ASKED = 1
    TX_GRANTED = 2
    TX_TOO_LONG = 3
    TX_TAKEN_BACK = 4           # and the peer has not confirmed that yet
    TX_VOID = 5

    RX_NONE = 0                 # a message from a peer
    RX_WAITS = 1                # for a receive
    RX_FILLING = 2

cdef struct head_t:             # of every control message; little endian hosts only
    uint32_t magic
    uint16_t version, type
    uint64_t session, target    # incarnation of the sender, and of the one that is meant
    uint32_t to_idx, from_idx
    uint64_t a, b, c
    uint32_t len, pad

cdef struct peer_t:
    uint32_t used, state
    uint32_t theirs             # its index for us
    uint32_t src                # our number for it
    uint32_t number             # the number it gave us
    uint32_t reason, told
    uint32_t passing            # only ever refused: its place may be given to another
    uint64_t incarnation
    link_t link
    uint32_t addrlen
    uint8_t addr[512]
    uint64_t out                # writes without completion
    # -- control messages to it
    uint32_t slots              # that wait or are out
    uint32_t ohead, otail       # slots that wait, 1 + number; 0: none
    uint32_t queued             # it is among d.queued
    uint32_t hello              # 1 + slot of a hello that is not out yet
    # -- a message to it
    uint32_t tx
    uint64_t recv_len
    uint64_t tx_seq             # its number
    # -- a message from it
    uint32_t rx, rx_more        # rx_more: it has asked for its next already
    uint64_t rx_seq             # the highest number that was asked for or taken back
    uint32_t rx_ack             # the taking back of that one is still to be confirmed
    uint32_t fence_due          # so is its fence
    uint64_t fence_seen         # the number of its last one
    uint64_t fences             # the number of our last one to it
    uint64_t rx_total, rx_have, rx_ctx, rx_room, rx_next
    void* rx_buf

cdef struct imp_t:
    uint64_t rkey, key, addr, len
    uint32_t peer, used, dead, ack
    uint64_t out

cdef struct region_t:
    uint64_t rkey, base, len, key
    uint64_t addr               # what peers add an offset to
    uint32_t used, leaving
    uint32_t first              # of its importers; 0: none

cdef struct pair_t:             # a peer that has imported a region
    uint32_t peer, next
    uint32_t told, gone         # told that the region goes; has answered

cdef struct recv_t:
    void* buf
    uint64_t len, ctx

cdef struct fence_t:
    uint64_t ctx, number
    uint32_t peer

cdef struct dom_t:
    nic_t* nic
    own_t own
    uint64_t incarnation
    uint32_t down, failed, closing
    uint8_t* sbuf
    uint8_t* rbuf
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
    uint32_t rack               # peers with an rx_ack or a fence_due
    fence_t* fence              # those that wait for their answer
    uint32_t nfences
    uint64_t fence_told         # when they were last sent
    uint32_t rfilling           # receives being filled
    comp_t* comp
    uint64_t chead, ctail
    uint8_t* hello              # copies of hellos, for the fabric's thread
    uint64_t hhead, htail
    int hello_fd
    uint64_t reply_id, reply_key, reply_addr, reply_rkey
    uint32_t reply_status, reply_done
    uint32_t reply_gone         # the region went while its import was being asked for
    uint64_t writes             # without completion
    uint64_t arrivals           # messages and immediates
    uint64_t nposts, garbage    # garbage: messages that were dropped

