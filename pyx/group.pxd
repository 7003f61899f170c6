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
    LINGER_NS = 1000000000  # a worker without timers sleeps this long first, then without end
    TAGS_LEFT = 64          # with no more tags than this that may ever be free again, split writes do not wait for one
    FENCE_NS = 200000000    # while a peer is being asked, a worker sleeps no longer than this
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
    EV_DROPPED = 4          # `peer`: bytes of the message

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
    uint64_t max_msg, chunk, run
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
    uint64_t when           # now_ns()

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
    uint64_t fences         # posted, not answered
    uint32_t over           # nobody drives it any more: who submits ends that itself
    uint64_t sleep_until    # of the sleeping worker; 0: awake
    cbq_t* cbq
    pool_t* pool
    pool_t pool_
    uint32_t index
    # -- sleeping on descriptors
    pollfd fds[MAX_NICS + 1]
    uint32_t nfds           # 0: sleep on the bell's futex
    uint32_t tick           # some NIC has neither bell nor descriptor: look every millisecond
    int efd, cfd            # the worker's, and a sleeping caller's
    # -- figures
    uint64_t turns, sleeps, submitted, ended, failed, stale, refused, missed
    uint64_t split_min, kicks, drives
    uint64_t t_pick, t_post
    pthread_t thread
