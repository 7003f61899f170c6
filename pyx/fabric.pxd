"""The contract of a fabric: a C table of functions on a domain (one NIC), and the structs they share.

Semantics every fabric keeps: reliable, unordered, the payload of a write is in place before its own
immediate can be seen. All functions are called with the group's progress lock held, never concurrently
for domains of one group; none blocks, none takes the GIL, none allocates for a request.
docs/design.md, "The fabric contract", is the long form.
"""
from libc.stdint cimport int32_t, uint32_t, uint64_t

cdef enum:
    # -- what a post returns (negative: refused, minus one of the FE_ codes; nothing was posted)
    POST_QUEUED = 0        # a completion (C_DONE or C_ERROR) with this ctx will follow
    POST_DONE = 1          # already complete: no completion follows. The source is reusable; landed too if caps or F_LANDED say so
    POST_FULL = 2          # not accepted, try again later; never an error

    # -- flags of a write
    F_IMM = 1              # carries an immediate
    F_LANDED = 2           # its C_DONE must mean "landed at the target", whatever that costs
    F_BULK = 4             # part of a large transfer (>= 1 MiB): the target's cache will not hold it
    F_INLINE = 8           # hint: small enough for the device's inline size

    # -- kinds of completion
    C_DONE = 1             # `count` posts of `ctx` are over: sources reusable (landed if caps say so, or F_LANDED)
    C_IMM = 2              # `count` writes with immediate `imm` from `src` have landed here
    C_RECV = 3             # a message of `len` bytes from `src` is in the receive buffer `ctx`
    C_ERROR = 4            # `count` posts of `ctx` failed with `status` (FE_); `vendor` is the raw code
    C_PEER_LOST = 5        # the peer with index `ctx` is gone (`src`: its source number, or NO_SRC)
    C_NIC_DOWN = 6         # this domain is gone: outstanding posts get no completion, ask recover()
    C_DROPPED = 7          # a message of `len` bytes from `src` had no receive left that could take it

    # -- error codes, as positive numbers; see fabricx/errors.py for what they become
    FE_PEER_LOST = 1       # the peer died, was removed or cut the connection
    FE_REMOTE_KEY = 2      # the target region is not registered (any more) at the peer
    FE_REMOTE_RANGE = 3    # outside the target region
    FE_LOCAL_KEY = 4       # the source is not registered with this domain
    FE_TOO_LONG = 5        # message larger than the peer's receive buffers
    FE_NIC = 6             # the local NIC failed
    FE_MAYBE = 7           # nobody can tell whether it was delivered
    FE_CANCELLED = 8
    FE_TIMEOUT = 9
    FE_CLOSED = 10
    FE_PROVIDER = 11       # anything else; `vendor` says what
    FE_EARLY = 12          # a peer has more early immediates or unknown numbers than is allowed

    # -- capabilities of a domain
    CAP_LANDED = 1         # a local completion means landed
    CAP_SYNC = 2           # posts are carried out by the posting thread: post in chunks
    CAP_DEVICE = 4         # can reach device memory

cdef enum:
    NO_SRC = 0xffffffff

cdef struct comp_t:
    uint64_t ctx
    uint64_t len
    uint32_t kind
    uint32_t imm
    uint32_t src            # source number the engine gave for that peer (see Domain.source_of)
    uint32_t count
    int32_t status
    int32_t vendor

cdef struct write_t:        # one write; the first fields are what changes between posts of a template
    uint64_t src            # local virtual address
    uint64_t len            # 0 is legal with F_IMM
    uint64_t dst            # address at the target, from import_mr's base + offset
    uint64_t lkey           # reg()'s lkey
    uint64_t rkey           # import_mr()'s key
    uint64_t ctx
    uint32_t peer           # connect()'s index
    uint32_t imm
    uint32_t flags
    int32_t rc              # set by post_many: POST_QUEUED, POST_DONE or minus FE_

cdef struct pages_t:        # pages at .. end of a list are to be posted to one peer
    uint64_t at, end        # next page, one past the last; post_pages advances `at`
    uint64_t src, dst       # addresses of page index 0
    uint64_t sstride, dstride, len
    const void* si          # index arrays, uint32 or uint64; NULL: page i is index i
    const void* di
    uint64_t lkey, rkey
    uint64_t ctx
    uint32_t swide, dwide   # 1: that array is uint64
    uint32_t peer, imm, flags

cdef struct send_t:         # a message; a fabric that fragments keeps its place in `at`
    const void* buf
    uint64_t len, lkey, ctx
    uint64_t at             # 0 at first; owned by the fabric until it returns other than POST_FULL
    uint32_t peer, flags

cdef struct fabric_ops_t:
    uint32_t version        # FABRIC_VERSION
    uint32_t size           # sizeof(fabric_ops_t)
    int (*post_write)(void* dom, write_t* w) noexcept nogil
    # Several writes, chained where the fabric can. Sets rc of each; returns how many were taken
    # (accepted or refused); fewer than n means that the queue is full.
    int (*post_many)(void* dom, write_t* w, int n) noexcept nogil
    # Pages [at, end). Advances `at` by those accepted. POST_DONE: all of those are done.
    # POST_QUEUED: each of those (end - at of them) will be covered by C_DONE/C_ERROR counts with ctx.
    # POST_FULL: none accepted. Negative: the page at `at` was refused, those before it are queued.
    int (*post_pages)(void* dom, pages_t* p) noexcept nogil
    int (*post_send)(void* dom, send_t* s) noexcept nogil
    int (*post_recv)(void* dom, void* buf, uint64_t len, uint64_t lkey, uint64_t ctx) noexcept nogil
    int (*poll)(void* dom, comp_t* out, int most) noexcept nogil
    # Called after the bell was set and before sleeping: nonzero means "there is something, do not sleep".
    int (*arm)(void* dom) noexcept nogil
    # The receive length of a peer, after FE_TOO_LONG (for the message); 0 unknown.
    uint64_t (*recv_len)(void* dom, uint32_t peer) noexcept nogil
    # Takes a posted receive back. 1: nothing lands in it any more, and no completion follows; 0: a message has it (C_RECV
    # follows or was given), or it was never posted. `longest`, which counts in both cases: length of the
    # longest receive that stays in use, also if it is not posted just now; 0: none.
    int (*cancel_recv)(void* dom, uint64_t ctx, uint64_t longest) noexcept nogil
    # Takes a message back of which post_send left `at` above 0. 1: nothing of it will be delivered; 0: not (yet) possible:
    # ask again, or go on with post_send.
    int (*cancel_send)(void* dom, send_t* s) noexcept nogil
    # Asks a peer to confirm that what was completed to it before has landed. POST_QUEUED: C_DONE or C_ERROR with ctx follows;
    # POST_DONE: it has, completions say so; POST_FULL; negative: nobody to ask.
    int (*fence)(void* dom, uint32_t peer, uint64_t ctx) noexcept nogil

cdef enum:
    FABRIC_VERSION = 2
