"""Stress of the worker's lock-free parts: the worker's own rooms, included as they are, over a one-word fabric.

Nothing here judges by the clock. A wake-up is lost when a thread is found asleep in the kernel (FUTEX_WAKE says that it
woke one) although what it waits for was published and every bell for it has been rung; the clock only says when to
look. Deadlines end a run that hangs and make it `late`.
"""
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memset
from atom cimport *
from fabric cimport *
from group cimport *
from imm cimport *
from request cimport *
from ring cimport *

include "wake.pxi"
include "end.pxi"
include "count.pxi"
include "post.pxi"
include "drive.pxi"

cdef extern from *:
    """
    #ifndef PERTURB
    static uint64_t perturb_seed = 0, perturb_count = 0;
    #endif
    /* A thread may have its poll() watched: to time out although its bell was rung, with nothing left
       to read, counts. */
    static __thread uint64_t *watch_rung = 0, *watch_served = 0, *watch_slept = 0;
    static void watch_poll(uint64_t *rung, uint64_t *served, uint64_t *slept) {
        watch_rung = rung; watch_served = served; watch_slept = slept; }
    int __real_poll(struct pollfd *f, nfds_t n, int ms);
    int __wrap_poll(struct pollfd *f, nfds_t n, int ms) {                   /* linked with --wrap=poll */
        int rc = __real_poll(f, n, ms);
        if (rc == 0 && watch_rung && ld_acq64(watch_rung) > ld_acq64(watch_served) && __real_poll(f, 1, 0) == 0)
            ++*watch_slept;
        return rc;
    }
    """
    uint64_t perturb_seed, perturb_count
    void watch_poll(uint64_t*, uint64_t*, uint64_t*) noexcept nogil

cdef extern from "atom.h" nogil:
    int c_eventfd "eventfd"(unsigned int, int) noexcept
    int c_close "close"(int) noexcept
    enum: EFD_CLOEXEC, EFD_NONBLOCK, POLLIN

cdef enum:
    IMM = 7
    DEPTH = 64              # posts that the lane keeps outstanding
    LOOK = 2048             # pauses between two looks at a round that does not end
    FAR = 3600              # s: deadline of requests that must not time out


# ---------------------------------------------------------------- a fabric of one word

cdef struct lane_t:
    uint64_t posted         # by the peer, with a plain release store
    char pad0[56]
    uint64_t taken          # by the driver
    uint32_t restless       # arm() always finds something: the worker never sleeps
    uint32_t full           # posts find no room
    uint32_t nctx, posts
    uint64_t ctx[DEPTH]

cdef int lane_write(void* dom, write_t* w) noexcept nogil:
    cdef lane_t* l = <lane_t*>dom
    if ld_acq32(&l.full) or l.nctx == DEPTH:
        return POST_FULL
    l.posts += 1
    if l.posts & 1:
        return POST_DONE
    l.ctx[l.nctx] = w.ctx
    l.nctx += 1
    return POST_QUEUED

cdef int lane_poll(void* dom, comp_t* c, int most) noexcept nogil:
    cdef lane_t* l = <lane_t*>dom
    cdef uint64_t p = ld_acq64(&l.posted)
    cdef int n = 0
    if p != l.taken:
        c[0].kind, c[0].imm, c[0].src, c[0].count = C_IMM, IMM, 0, <uint32_t>(p - l.taken)
        st_rel64(&l.taken, p)
        n = 1
    while n < most and l.nctx:
        l.nctx -= 1
        c[n].kind, c[n].ctx, c[n].count, c[n].status = C_DONE, l.ctx[l.nctx], 1, 0
        n += 1
    return n

cdef int lane_arm(void* dom) noexcept nogil:
    cdef lane_t* l = <lane_t*>dom
    return l.restless or l.nctx != 0 or ld_acq64(&l.posted) != l.taken

cdef fabric_ops_t lane_ops
lane_ops.version, lane_ops.size = FABRIC_VERSION, sizeof(fabric_ops_t)
lane_ops.post_write, lane_ops.poll, lane_ops.arm = lane_write, lane_poll, lane_arm


# ---------------------------------------------------------------- a group and its worker

cdef void* turn_main(void* arg) noexcept nogil:
    cdef group_t* g = <group_t*>arg
    if g.core >= 0:
        pin_to(g.core)
    worker_turns(g)
    st_rel32(&g.ready, 2)
    return NULL

cdef class Rig:
    """A group over one lane; `start()` gives it a worker."""
    cdef group_t* g
    cdef lane_t* lane
    cdef lmr_t* lmr
    cdef rmr_t* rmr
    cdef bint running

    def __cinit__(self, bint caller=False, int core=-1, uint32_t spin=0, uint32_t yields=0):
        cdef group_t* g = <group_t*>alloc_lines(sizeof(group_t))
        cdef nic_t* d
        cdef uint32_t i
        self.g = g
        self.lane = <lane_t*>alloc_lines(sizeof(lane_t))
        self.lmr = <lmr_t*>alloc_lines(sizeof(lmr_t))
        self.rmr = <rmr_t*>alloc_lines(sizeof(rmr_t))
        self.rmr.peer = <peer_t*>alloc_lines(sizeof(peer_t))
        self.rmr.npaths = 1
        self.rmr.size = self.lmr.size = 8
        mpsc_init(&g.q)
        g.bell, g.pool = &g.own_bell, &g.pool_
        g.cbq = <cbq_t*>alloc_lines(sizeof(cbq_t))
        g.live = <uint8_t*>calloc(1 << IMM_INDEX_BITS, 1)
        g.caller, g.core, g.spin, g.yields = caller, core, spin, yields
        g.wheel.tick = now_ns() >> TICK_SHIFT
        g.efd = g.cfd = -1
        table_init(&g.imm, 256)
        table_init(&g.shards, 64)
        g.nnics = 1
        d = &g.nic[0]
        d.ops, d.dom, d.up, d.nwr, d.chunk = &lane_ops, self.lane, 1, DEPTH, 1 << 20
        d.wr = <wr_t*>alloc_lines(DEPTH * sizeof(wr_t))
        d.free_wr = <uint32_t*>alloc_lines(DEPTH * sizeof(uint32_t))
        for i in range(DEPTH):
            d.free_wr[i] = i
        d.nfree = DEPTH

    def sleep_on_descriptors(self):
        """As over a fabric that announces arrivals by a descriptor."""
        cdef group_t* g = self.g
        g.efd = c_eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)
        g.cfd = c_eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)
        if g.efd < 0 or g.cfd < 0:
            raise OSError("eventfd failed")
        g.fds[0].fd, g.fds[0].events = g.efd, POLLIN
        g.nfds = 1
        return self

    def start(self):
        if pthread_create(&self.g.thread, NULL, turn_main, self.g):
            raise OSError("no thread for the worker")
        self.running = True
        return self

    def stop(self):
        """Wakes until the worker has gone: with a fence missing one bell may not do."""
        if self.running:
            with nogil:
                xchg32(&self.g.stop, 1)
                while ld_acq32(&self.g.ready) != 2:
                    wake_worker(self.g)
                    sched_yield()
                pthread_join(self.g.thread, NULL)
            self.running = False

    def __dealloc__(self):
        cdef req_t* r
        self.stop()
        if self.g.efd >= 0:
            c_close(self.g.efd)
            c_close(self.g.cfd)
        pool_free(&self.g.pool_)
        free(self.g.nic[0].wr)
        free(self.g.nic[0].free_wr)
        free(self.g.imm.slot)
        free(self.g.shards.slot)
        free(self.g.live)
        free(self.g.cbq)
        free(self.rmr.peer)
        free(self.rmr)
        free(self.lmr)
        free(self.lane)
        free(self.g)


# ---------------------------------------------------------------- jobs, one thread each

cdef struct shared_t:
    uint64_t gate           # threads that have come to the barrier, all rounds together
    char pad0[56]
    uint64_t done           # [done, failed] of requests that count here
    uint64_t failed
    uint64_t calls          # of native callbacks
    char pad1[40]
    uint64_t sent, ack      # rounds of one side, and of the other
    uint64_t rung           # arrivals for which the bell was rung
    uint64_t quit

cdef struct job_t:
    group_t* g
    lane_t* lane
    lmr_t* lmr
    rmr_t* rmr
    shared_t* s
    void* extra
    int core, kind
    uint32_t id, threads
    uint64_t rounds, enough, window, end, x
    uint64_t ran, lost, late, aside     # what came of it

ctypedef void* (*job_f)(void*) noexcept nogil

cdef inline uint64_t draw(job_t* j) noexcept nogil:
    j.x ^= j.x << 13
    j.x ^= j.x >> 7
    j.x ^= j.x << 17
    return j.x >> 11

cdef inline void dither(job_t* j) noexcept nogil:
    """Up to `window` empty turns, so that two threads meet at every distance."""
    cdef uint64_t i, n = draw(j) % (j.window + 1)
    for i in range(n):
        compiler_fence()

cdef inline bint over(job_t* j) noexcept nogil:
    """The run was ended by another thread, or by its deadline: then it is late."""
    if ld_acq64(&j.s.quit):
        return True
    if now_ns() < j.end:
        return False
    j.late = 1
    return True

cdef inline bint meet(job_t* j, uint64_t round) noexcept nogil:
    """Barrier of all threads of a run; False when the deadline came first."""
    cdef uint64_t i = 0
    fadd64(&j.s.gate, 1)
    while ld_acq64(&j.s.gate) < round * j.threads:
        i += 1
        cpu_pause()
        if i % LOOK == 0:
            sched_yield()
            if over(j):
                return False
    return True

cdef inline req_t* ask(job_t* j, uint32_t op) noexcept nogil:
    """A request that tells its end by the shared pair of counters."""
    cdef req_t* r = req_new(j.g.pool, op)
    r.deadline = now_ns() + <uint64_t>FAR * 1000000000
    r.counter = &j.s.done
    r.extra = X_REST
    if op == OP_WRITE:
        fadd32(&j.lmr.inflight, 1)
        fadd32(&j.rmr.inflight, 1)
        r.lmr, r.rmr, r.n = j.lmr, j.rmr, 8
    return r

cdef dict run_jobs(Rig rig, list functions, list cores, uint64_t rounds, double seconds, uint64_t seed,
                   uint64_t window, void* extra=NULL, shared_t* s=NULL, int kind=0, uint64_t enough=<uint64_t>-1):
    """Runs functions (addresses of job_f) in threads; sums what they found."""
    cdef job_t jobs[16]
    cdef pthread_t threads[16]
    cdef shared_t own
    cdef int i, n = len(functions), made = 0
    if s == NULL:
        s = &own
    memset(s, 0, sizeof(shared_t))
    memset(jobs, 0, sizeof(jobs))
    for i in range(n):
        jobs[i].s, jobs[i].extra, jobs[i].kind = s, extra, kind
        if rig is not None:
            jobs[i].g, jobs[i].lane, jobs[i].lmr, jobs[i].rmr = rig.g, rig.lane, rig.lmr, rig.rmr
        jobs[i].core = cores[i % len(cores)] if cores else -1
        jobs[i].id, jobs[i].threads = i, n
        jobs[i].rounds, jobs[i].enough, jobs[i].window = rounds, enough, window
        jobs[i].end = now_ns() + <uint64_t>(seconds * 1e9)
        jobs[i].x = (seed * 1000003 + i + 1) * <uint64_t>0x9E3779B97F4A7C15 | 1
    for i in range(n):
        if pthread_create(&threads[i], NULL, <job_f><void*><uint64_t>functions[i], &jobs[i]):
            st_rel64(&s.quit, 1)
            break
        made += 1
    with nogil:
        for i in range(made):
            pthread_join(threads[i], NULL)
    if made < n:
        raise OSError("no thread for a job")
    return dict(rounds=jobs[0].ran, lost=sum([jobs[i].lost for i in range(n)]),
                late=any([jobs[i].late for i in range(n)]),
                aside=[jobs[i].aside for i in range(n)])

def perturb(uint64_t seed):
    """Disturbs schedules from here on (in the build for it); returns how many disturbances there were."""
    global perturb_seed
    perturb_seed = seed
    return perturb_count


include "litmus.pxi"
include "properties.pxi"
