"""fabricx._worker: domain groups, transfers and the engine's hot calls.

`EngineBase` holds the calls that must be quick; fabricx/engine.py derives TransferEngine from it and adds the
control path (opening fabrics, resolving peers, failures). The loop itself is group.pxd.
"""
import logging

cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.exc cimport PyErr_CheckSignals
from cpython.object cimport PyObject
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memcpy, memset
from atom cimport *
from fabric cimport *
from group cimport *
from imm cimport *
from request cimport *
from ring cimport *
from watch cimport watch_t

from . import errors

log = logging.getLogger("fabricx")

cdef extern from "atom.h" nogil:
    int c_eventfd "eventfd"(unsigned int, int) noexcept
    int c_close "close"(int) noexcept
    enum: EFD_CLOEXEC, EFD_NONBLOCK, POLLIN

cdef enum:
    INLINE_GIL = 16384          # bytes up to which a copy is made with the GIL held
    LONGEST_S = 1000000         # longest timeout, in seconds
    SOURCES = 65536             # peers whose early arrivals are accounted for

NUMBERS = IMM_ALLOC             # explicit immediates: 0 .. NUMBERS - 1
STATES = ("pending", "done", "failed", "cancelled")

fx_watch_forks()


# ---------------------------------------------------------------- arguments

cdef uint64_t u64(object v, str what) except? 0xfffffffffffffff1:
    """An unsigned 64-bit integer, or OutOfRange naming `what`."""
    try:
        return <uint64_t>v
    except OverflowError:
        raise errors.OutOfRange(f"{what} is {v}; it must be within 0 .. 2**64 - 1") from None
    except TypeError:
        raise TypeError(f"{what} must be an int, not {type(v).__name__}") from None

cdef int64_t span_ns(object timeout, int64_t default) except -1:
    """A timeout in seconds as nanoseconds; None is the default."""
    cdef double s
    if timeout is None:
        return default
    s = timeout
    if not s >= 0:
        raise errors.OutOfRange(f"timeout is {timeout!r}; it must be at least 0 seconds")
    return <int64_t>(min(s, <double>LONGEST_S) * 1e9)

cdef uint32_t imm_of(object imm) except? 0xffffffff:
    cdef uint64_t v = u64(imm, "imm")
    if v > IMM_MASK:
        raise errors.OutOfRange(f"imm is {v}; explicit immediates are within 0 .. {IMM_ALLOC - 1}, "
                                f"those of alloc_imm() within {IMM_ALLOC} .. {IMM_MASK}")
    return <uint32_t>v


# ---------------------------------------------------------------- small public classes

@cython.final
cdef class NativeCallback:
    """A C function as on_done: ``void f(uint64_t arg, int64_t status)``, called by the worker without the GIL.

    Parameters
    ----------
    address : int
        Address of the function, e.g. ``numba.cfunc(...).address``. `status` is 0, or an error code
        of fabricx.errors.from_status.
    arg : int
        First argument.
    keep : object
        Whatever must stay alive while the callback may be called.
    """
    cdef uint64_t address, arg
    cdef object keep

    def __init__(self, address, arg=0, keep=None):
        self.address = u64(address, "address")
        self.arg = u64(arg, "arg")
        if self.address == 0:
            raise errors.OutOfRange("address is 0")
        self.keep = keep

    @property
    def target(self):
        """(address, arg)"""
        return self.address, self.arg


@cython.final
cdef class Counter:
    """Two 64-bit words in memory as on_done: `done` and `failed`, incremented with release order.

    `addr` is the address of the pair, for native code that polls it.
    """
    cdef uint64_t* word

    def __cinit__(self):
        self.word = <uint64_t*>alloc_lines(64)
        if self.word == NULL:
            raise MemoryError

    def __dealloc__(self):
        free(self.word)

    @property
    def addr(self):
        return <uintptr_t>self.word

    @property
    def done(self):
        return ld_acq64(self.word)

    @property
    def failed(self):
        return ld_acq64(self.word + 1)

    def __repr__(self):
        return f"Counter(done={self.done}, failed={self.failed})"


@cython.final
cdef class CallbackQueue:
    """Completions for Python, shared by an engine's groups and watchers."""
    cdef cbq_t* q

    def __cinit__(self):
        self.q = <cbq_t*>alloc_lines(sizeof(cbq_t))
        if self.q == NULL:
            raise MemoryError

    def __dealloc__(self):
        free(self.q)

    @property
    def address(self):
        return <uintptr_t>self.q

    def stop(self):
        st_rel32(&self.q.stop, 1)
        xchg32(&self.q.bell, 0)
        bell_wake(&self.q.bell, 1)

    def run(self, engine):
        """The callback thread: one GIL acquisition serves a batch. Returns after stop()."""
        cdef cnode_t* n
        while True:
            with nogil:
                n = cbq_wait(self.q, 1000000000)
            if n != NULL:
                self.deliver(n, engine)
            elif ld_acq32(&self.q.stop):
                return

    def drain(self, engine):
        """Deliver what is there; returns how many."""
        cdef cnode_t* n
        with nogil:
            n = cbq_take(self.q)
        return self.deliver(n, engine)

    cdef int deliver(self, cnode_t* n, engine) except -1:
        cdef cnode_t* nxt
        cdef req_t* r
        cdef Transfer t
        cdef event_t* e
        cdef int count = 0
        while n != NULL:
            nxt = n.next
            count += 1
            try:
                if n.kind == CB_TRANSFER:
                    r = <req_t*>n.self
                    t = <Transfer>r.cb
                    Py_DECREF(t)
                    r.cb = NULL
                    req_drop(&t.group.g.pool_, r)
                    cb = t.cb
                    t.cb = None
                    cb(t)
                elif n.kind == CB_RECV:
                    r = <req_t*>n.self
                    engine._received(r.native_arg, r.dst, r.n, r.imm)
                elif n.kind == CB_EVENT:
                    e = <event_t*>n.self
                    args = (e.kind, e.nic, e.peer, e.src, e.group)
                    free(e)
                    engine._event(*args)
                elif n.kind == CB_WATCH:
                    engine._watched(<uintptr_t>n.self)
            except BaseException as ex:
                engine._callback_failed(ex)
            n = nxt
        return count


# ---------------------------------------------------------------- handles

@cython.final
cdef class PeerRef:
    """A remote domain group as one local group knows it."""
    cdef peer_t* p
    cdef readonly Group group
    cdef readonly object addr       # NetAddr
    cdef readonly uint32_t id

    def __cinit__(self, Group group, addr, uint32_t id):
        cdef int i
        self.p = <peer_t*>alloc_lines(sizeof(peer_t))
        if self.p == NULL:
            raise MemoryError
        self.group, self.addr, self.id = group, addr, id
        self.p.id = id
        for i in range(MAX_NICS):
            self.p.at_nic[i] = NO_SRC

    def __dealloc__(self):
        free(self.p)

    @property
    def lost(self):
        return ld_acq32(&self.p.lost) != 0

    @property
    def inflight(self):
        return ld_acq32(&self.p.inflight)

    def mark_lost(self):
        st_rel32(&self.p.lost, 1)

    def attach(self, uint32_t nic, uint32_t index, bint first):
        """The fabric's `index` of this peer at a local NIC; `first`: it is the peer's first NIC."""
        if first:
            self.p.at_nic[nic] = index
        self.group.set_peer(nic, index, self)


@cython.final
cdef class MrHandle:
    """Registered memory of this process: source of writes, target of others' writes.

    Attributes: `addr`, `nbytes`, `name`, `device`.
    """
    cdef lmr_t* m
    cdef readonly Group group
    cdef readonly object memory, keys, name, desc
    cdef object __weakref__

    def __cinit__(self, Group group, memory, keys, name):
        cdef int i
        self.m = <lmr_t*>alloc_lines(sizeof(lmr_t))
        if self.m == NULL:
            raise MemoryError
        self.m.addr = memory.addr
        self.m.size = memory.length
        for i, k in enumerate(keys):
            self.m.lkey[i] = k.lkey
        self.group, self.memory, self.keys, self.name = group, memory, keys, name

    def __dealloc__(self):
        free(self.m)

    @property
    def addr(self):
        return self.m.addr

    @property
    def nbytes(self):
        return self.m.size

    @property
    def device(self):
        return self.memory.device

    @property
    def inflight(self):
        """Transfers that use it."""
        return ld_acq32(&self.m.inflight)

    @property
    def registered(self):
        return not ld_acq32(&self.m.dead)

    def set_desc(self, desc):
        self.desc = desc

    def bury(self, bint dead=True):
        """No new transfer may use it (or again)."""
        xchg32(&self.m.dead, dead)

    def __repr__(self):
        return f"MrHandle({self.name or hex(self.m.addr)}, {self.m.size} bytes)"


@cython.final
cdef class RemoteMr:
    """An imported MrDesc: one path for each pair of NICs."""
    cdef rmr_t* m
    cdef readonly Group group
    cdef readonly PeerRef peer
    cdef readonly object keys
    cdef uint64_t self_base         # base address when the target is this very process, else 0

    def __cinit__(self, Group group, PeerRef peer, uint64_t size, paths, keys, uint64_t self_base):
        cdef int i = 0
        self.m = <rmr_t*>alloc_lines(sizeof(rmr_t))
        if self.m == NULL:
            raise MemoryError
        self.group, self.peer, self.keys, self.self_base = group, peer, keys, self_base
        self.m.peer = peer.p
        self.m.size = size
        for nic, index, base, key in paths:
            self.m.path[i].nic = nic
            self.m.path[i].peer = index
            self.m.path[i].base = base
            self.m.path[i].key = key
            i += 1
        self.m.npaths = i

    def __dealloc__(self):
        free(self.m)

    @property
    def inflight(self):
        return ld_acq32(&self.m.inflight)


@cython.final
cdef class PreparedPages:
    """A checked, resolved page list: made by TransferEngine.prepare(), submitted again and again."""
    cdef MrHandle src
    cdef RemoteMr dst
    cdef object desc, keep
    cdef pages_t p
    cdef uint64_t dst_off

    @property
    def count(self):
        """Pages, and so the logical count that each submission adds to its immediate."""
        return self.p.end


# ---------------------------------------------------------------- transfers

cdef class LoopQueue:
    """Completions for one asyncio loop: a batch costs the loop one wake-up."""
    cdef loopq_t q
    cdef object loop, __weakref__

    def __cinit__(self, loop):
        self.q.efd = c_eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)
        if self.q.efd < 0:
            raise OSError("eventfd failed: too many open files?")

    def __init__(self, loop):
        import weakref
        me = weakref.ref(self)

        def ready():
            q = me()
            if q is not None:
                (<LoopQueue>q).drain()
        loop.add_reader(self.q.efd, ready)

    def __dealloc__(self):
        if self.q.efd >= 0:
            c_close(self.q.efd)

    cdef void drain(self):
        cdef uint64_t v
        cdef req_t* r
        cdef req_t* nxt
        cdef req_t* out = NULL
        cdef Transfer t
        c_read(self.q.efd, &v, 8)
        r = <req_t*>xchgp(&self.q.head, NULL)
        while r != NULL:                # oldest first
            nxt = r.lq_next
            r.lq_next = out
            out = r
            r = nxt
        while out != NULL:
            nxt = out.lq_next
            t = <Transfer>out.lq_obj
            out.lq_obj = NULL
            t.resolve()
            Py_DECREF(t)
            out = nxt


_loops = None


cdef LoopQueue loop_queue(loop):
    global _loops
    if _loops is None:
        import weakref
        _loops = weakref.WeakKeyDictionary()
    q = _loops.get(loop)
    if q is None:
        q = _loops[loop] = LoopQueue(loop)
    return q


@cython.final
cdef class _Over:
    """An awaitable iterator that is over already."""
    cdef object error

    def __iter__(self):
        return self

    def __next__(self):
        if self.error is not None:
            raise self.error
        raise StopIteration


@cython.final
@cython.no_gc_clear                     # __dealloc__ needs the attributes
@cython.freelist(1024)
cdef class Transfer:
    """One submitted operation. Ends once: done, failed or cancelled.

    "Done" means that the source may be reused (or that the expected count has arrived). Awaitable from any asyncio loop;
    cancelling the awaiting task leaves the transfer alone.
    """
    cdef req_t* r
    cdef Group group
    cdef uint32_t op
    cdef object src, dst, keep, cb, fut, owner
    cdef object __weakref__

    def __dealloc__(self):
        if self.r == NULL:
            return
        if self.keep is not None and not ld_acq32(&self.r.quiet):
            self.group.adopt(self.orphan())     # index arrays are borrowed until nothing can read them
        req_drop(&self.group.g.pool_, self.r)

    cdef Transfer orphan(self):
        cdef Transfer t = Transfer.__new__(Transfer)
        t.group, t.op, t.keep = self.group, self.op, None
        t.r = self.r
        t.src = self.keep
        fadd32(&self.r.refs, 1)
        return t

    def done(self):
        """Whether it has ended, in whatever way."""
        return ld_acq32(&self.r.state) != PENDING

    @property
    def status(self):
        """"pending", "done", "failed" or "cancelled"."""
        return STATES[ld_acq32(&self.r.state)]

    def exception(self):
        """What it ended with, or None while it is pending or when it is done."""
        cdef uint32_t s = ld_acq32(&self.r.state)
        if s == PENDING or s == DONE:
            return None
        return self.group.error(self)

    def wait(self, timeout=None):
        """Wait for the end; raise what it failed with.

        Parameters
        ----------
        timeout : seconds, or None: until the transfer's own deadline.

        Raises
        ------
        TransferTimeout
            when `timeout` passes first; the transfer goes on.
        """
        cdef uint32_t s = ld_acq32(&self.r.state)
        if s == DONE:
            return
        if s == PENDING:
            self.group.guard()
            self.wait_for(timeout)
            s = ld_acq32(&self.r.state)
        if s != DONE:
            raise self.group.error(self)

    cdef int wait_for(self, timeout) except -1:
        cdef int64_t ns = span_ns(timeout, <int64_t>LONGEST_S * 1000000000)
        cdef int ended
        cdef uint64_t end = 0, now
        cdef group_t* g = self.group.g
        cdef req_t* r = self.r
        while True:
            with nogil:
                ended = wait_slice(g, r, ns)
            if ended:
                return 0
            PyErr_CheckSignals()
            now = now_ns()
            if end == 0:
                end = now + <uint64_t>ns
                if ns <= 50000000 and timeout is not None:
                    end = now           # the slice was all there was
            if now >= end:
                if ld_acq32(&r.state) != PENDING:
                    return 0
                raise errors.TransferTimeout(f"{self.group.describe(self)}: still in flight after {timeout} s")
            ns = <int64_t>(end - now)

    def cancel(self):
        """End it as cancelled. What has been posted already may still land: see quiesced().

        Returns whether it was still pending.
        """
        return self.group.cancel(self)

    def quiesced(self):
        """A Transfer that ends when nothing of this one can still land and its source is free."""
        return self.group.follow(self, FOLLOW_QUIET)

    def landed(self):
        """A Transfer that ends when this one has landed at its target.

        Raises
        ------
        ValueError
            when the fabric's completions do not mean "landed" and it was not submitted with ``landed=True``.
        """
        if not self.group.lands and not self.r.flags & F_LANDED:
            raise ValueError(f"{self.group.describe(self)}: on this fabric a completion does not mean landed; "
                             "submit with landed=True, or count an immediate at the target")
        return self.group.follow(self, FOLLOW_END)

    def __await__(self):
        cdef _Over o
        cdef LoopQueue q
        cdef uint32_t s = ld_acq32(&self.r.state)
        if s != PENDING:
            o = _Over.__new__(_Over)
            o.error = None if s == DONE else self.group.error(self)
            return o
        self.group.guard()
        loop = running_loop()
        q = loop_queue(loop)
        if self.owner is not None and self.owner is not q:
            return self.group.follow(self, FOLLOW_END).__await__()     # another loop waits already
        if self.fut is not None and not self.fut.done():
            return self.fut_again(loop).__await__()
        self.fut = fut = loop.create_future()
        if self.owner is None:
            self.owner = q
            Py_INCREF(self)
            self.r.lq_obj = <void*>self
            if not casp(<void**>&self.r.lq, NULL, <void*>&q.q):
                self.r.lq_obj = NULL
                self.resolve()          # ended in between
                Py_DECREF(self)
        elif ld_acq32(&self.r.state) != PENDING:
            self.resolve()
        return fut.__await__()

    cdef object fut_again(self, loop):
        """A second awaiter in the same loop: cancelling one must not cancel the other."""
        mine = loop.create_future()
        first = self.fut

        def copy(f):
            if mine.done():
                return
            if f.cancelled():
                error = self.exception()
                if not self.done():
                    mine.cancel()
                elif error is not None:
                    mine.set_exception(error)
                else:
                    mine.set_result(None)
            elif f.exception() is not None:
                mine.set_exception(f.exception())
            else:
                mine.set_result(None)
        first.add_done_callback(copy)
        return mine

    cdef void resolve(self):
        fut = self.fut
        self.fut = None
        if fut is None or fut.done():
            return
        if ld_acq32(&self.r.state) == DONE:
            fut.set_result(None)
        else:
            fut.set_exception(self.group.error(self))

    def __repr__(self):
        return f"<Transfer {self.group.describe(self)}: {self.status}>"


_running_loop = None


cdef object running_loop():
    global _running_loop
    if _running_loop is None:
        import asyncio
        _running_loop = asyncio.get_running_loop
    return _running_loop()


# ---------------------------------------------------------------- groups

cdef void* worker_main(void* arg) noexcept nogil:
    """Pins itself, then allocates: the memory of the loop is on its own NUMA node."""
    cdef group_t* g = <group_t*>arg
    cdef int ok = 1
    cdef uint32_t i, k
    cdef nic_t* d
    if g.core >= 0:
        pin_to(g.core)
    for i in range(g.nnics):
        d = &g.nic[i]
        d.wr = <wr_t*>alloc_lines(d.nwr * sizeof(wr_t))
        d.free_wr = <uint32_t*>alloc_lines(d.nwr * sizeof(uint32_t))
        if d.wr == NULL or d.free_wr == NULL:
            ok = 0
            break
        for k in range(d.nwr):
            d.free_wr[k] = d.nwr - 1 - k
        d.nfree = d.nwr
    if table_init(&g.imm, 256) < 0 or table_init(&g.shards, 64) < 0:
        ok = 0
    st_rel32(&g.ready, 1 if ok else 2)
    futex_wake(&g.ready, 1)
    if ok:
        worker_turns(g)
    return NULL


@cython.final
cdef class _Lock:
    """The group's progress lock as a context manager."""
    cdef Group group

    def __enter__(self):
        cdef group_t* g = self.group.g
        if not trylock(g):
            with nogil:
                lock_now(g)

    def __exit__(self, *_):
        cdef group_t* g = self.group.g
        with nogil:
            unlock(g)
            kick(g)


cdef class Group:
    """One domain group: the NICs of a device, the worker that drives them, its counters and requests."""
    cdef group_t* g
    cdef readonly object engine_ref         # weak reference to the engine
    cdef readonly object device, domains, address
    cdef readonly uint32_t index
    cdef readonly bint lands, running
    cdef object cbq_, orphans, peers, nic_peers
    cdef uint32_t forks

    def __cinit__(self, engine, uint32_t index, device, CallbackQueue cbq, *, bint caller, bint busy, uint32_t spin, uint32_t yields, int core,
                  uint64_t split_min, uint32_t max_early):
        import weakref
        cdef group_t* g = <group_t*>alloc_lines(sizeof(group_t))
        if g == NULL:
            raise MemoryError
        self.g = g
        mpsc_init(&g.q)
        g.index = index
        g.bell = &g.own_bell
        g.pool = &g.pool_
        g.cbq = cbq.q
        g.caller, g.busy, g.spin, g.yields, g.core = caller, busy, spin, yields, core
        g.split_min, g.max_early = split_min, max_early
        g.wheel.tick = now_ns() >> TICK_SHIFT
        g.efd = -1
        g.live = <uint8_t*>calloc(1 << IMM_INDEX_BITS, 1)
        g.early = <uint32_t*>calloc(SOURCES, sizeof(uint32_t))     # pages of it are touched as sources appear
        if g.live == NULL or g.early == NULL:
            raise MemoryError
        g.nsrc = SOURCES
        self.engine_ref = weakref.ref(engine)
        self.index, self.device, self.cbq_ = index, device, cbq
        self.orphans, self.peers, self.nic_peers = [], {}, {}
        self.forks = fx_forks
        self.domains = ()

    def __dealloc__(self):
        cdef req_t* r
        cdef int i
        cdef group_t* g = self.g
        if g == NULL:
            return
        for i in range(MAX_NICS):
            free(g.nic[i].wr)
            free(g.nic[i].free_wr)
            free(g.nic[i].peers)
        free(g.imm.slot)
        free(g.shards.slot)
        free(g.live)
        free(g.early)
        if g.efd >= 0 and self.forks == fx_forks:
            c_close(g.efd)
        while g.pool_.head != NULL:
            r = g.pool_.head
            g.pool_.head = r.pool_next
            free(r)
        free(g)

    # -- life

    def start(self, domains, address):
        """Takes the opened domains and starts the worker."""
        cdef group_t* g = self.g
        cdef nic_t* d
        cdef int i, n = len(domains)
        if not 1 <= n <= MAX_NICS:
            raise errors.OutOfRange(f"{n} NICs for {self.device}; a group takes 1 .. {MAX_NICS}")
        self.domains, self.address = tuple(domains), address
        self.lands = all(x.info.caps & CAP_LANDED for x in domains)
        g.nnics = n
        need_fd = False
        for i, x in enumerate(domains):
            d = &g.nic[i]
            d.ops = <fabric_ops_t*><uintptr_t>x.ops
            d.dom = <void*><uintptr_t>x.dom
            if d.ops.version != FABRIC_VERSION or d.ops.size != sizeof(fabric_ops_t):
                raise errors.FabricUnavailable(f"{x.info.name}: its extension was built for another version of the contract")
            d.caps, d.max_msg, d.chunk = x.info.caps, x.info.max_msg, max(1, x.info.chunk)
            d.nwr = max(64, min(65536, x.info.depth))
            d.up = 1
            if x.bell:
                g.bell = <uint32_t*><uintptr_t>x.bell
            elif x.wait_fd >= 0:
                need_fd = True
            elif not x.info.caps & CAP_SYNC:
                g.tick = 1
        if need_fd:
            g.efd = c_eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)
            if g.efd < 0:
                raise OSError("eventfd failed: too many open files?")
            g.bell = &g.own_bell
            g.fds[0].fd, g.fds[0].events = g.efd, POLLIN
            g.nfds = 1
            for x in domains:
                if x.wait_fd >= 0:
                    g.fds[g.nfds].fd, g.fds[g.nfds].events = x.wait_fd, POLLIN
                    g.nfds += 1
        with nogil:
            i = pthread_create(&g.thread, NULL, worker_main, g)
            if i == 0:
                while not ld_acq32(&g.ready):
                    futex_wait(&g.ready, 0, 100000000)
        if i:
            raise OSError(i, f"no thread for the worker of {self.device}")
        self.running = True
        if g.ready != 1:
            self.stop()
            raise MemoryError(f"no memory for the worker of {self.device}")

    def shut(self):
        """No new work; expectations end now. What is posted goes on."""
        cdef group_t* g = self.g
        cdef uint64_t i
        cdef slot_t* s
        with nogil:
            lock_now(g)
            progress(g)
            st_rel32(&g.closed, 1)
            fail_waiting(g)
            unlock(g)
            kick(g)

    @property
    def busy(self):
        """Requests posted or queued and not over."""
        return self.g.wheel.n + self.g.zombies + self.g.nbacklog + (1 if mpsc_some(&self.g.q) else 0)

    def stop(self):
        """Ends the worker, then everything that is left. Nothing drives the group afterwards."""
        cdef group_t* g = self.g
        cdef uint32_t i
        if not self.running:
            return
        self.running = False
        with nogil:
            xchg32(&g.stop, 1)
            wake_worker(g)
            pthread_join(g.thread, NULL)
            lock_now(g)
            st_rel32(&g.closed, 1)
            if g.ready == 1:
                for i in range(TAKE):
                    if not progress_queue(g):
                        break
                fail_waiting(g)
                fail_all(g, FE_CLOSED)
            for i in range(g.nnics):
                g.nic[i].dom = NULL
                g.nic[i].up = 0
            release(g)

    def settle(self):
        """After the domains are closed: nothing can land any more."""
        cdef group_t* g = self.g
        cdef uint32_t i, k
        cdef nic_t* d
        with nogil:
            lock_now(g)
            for i in range(g.nnics):
                d = &g.nic[i]
                for k in range(d.nwr):
                    if d.wr != NULL and d.wr[k].used:
                        complete(g, i, <uint64_t>k | <uint64_t>d.wr[k].gen << 32, d.wr[k].left, FE_CLOSED, 0)
            progress_queue(g)
            release(g)
        self.orphans.clear()

    cdef int guard(self) except -1:
        """Refuses a group that a fork left behind."""
        if self.forks != fx_forks:
            raise errors.EngineClosed("this process is a forked child of the one that opened the engine; open an engine of its own")
        return 0

    def forked(self):
        return self.forks != fx_forks

    # -- what fabrics and the engine ask of it

    def lock(self):
        cdef _Lock x = _Lock.__new__(_Lock)
        x.group = self
        return x

    def kick(self):
        kick(self.g)

    cdef int set_peer(self, uint32_t nic, uint32_t index, PeerRef peer) except -1:
        cdef nic_t* d = &self.g.nic[nic]
        cdef uint32_t n = max(<uint32_t>16, d.npeers)
        cdef peer_t** a
        with self.lock():
            if index >= d.npeers:
                while n <= index:
                    n *= 2
                a = <peer_t**>realloc(d.peers, n * sizeof(peer_t*))
                if a == NULL:
                    raise MemoryError
                memset(a + d.npeers, 0, (n - d.npeers) * sizeof(peer_t*))
                d.peers = a
                d.npeers = n
            d.peers[index] = peer.p
        self.nic_peers[nic, index] = peer      # keeps it alive
        return 0

    def lose(self, PeerRef peer, uint32_t src):
        """A peer is gone: nothing new goes to it, half-arrived writes of it are forgotten."""
        with self.lock():
            peer.p.lost = 1
            if src != NO_SRC:
                forget_shards(self.g, src)

    def forget_source(self, uint32_t src):
        with self.lock():
            forget_shards(self.g, src)

    def nic_up(self, uint32_t nic):
        return self.g.nic[nic].up != 0

    def outstanding(self, uint32_t nic):
        """{peer index: [ctx, ...]} of a NIC's posts that have no completion."""
        cdef nic_t* d = &self.g.nic[nic]
        cdef uint32_t k
        out = {}
        with self.lock():
            for k in range(d.nwr):
                if d.wr[k].used:
                    out.setdefault(d.wr[k].peer, []).append(<uint64_t>k | <uint64_t>d.wr[k].gen << 32)
        return out

    def recovered(self, uint32_t nic, ctxs, counts):
        """What recover() found out of a NIC's outstanding posts."""
        cdef uint64_t c
        cdef int64_t n
        with self.lock():
            for x, y in zip(ctxs, counts):
                c, n = x, y
                recovered(self.g, nic, c, n)

    def imm_set(self, uint32_t number, bint live):
        """Marks a number of alloc_imm as in use."""
        with self.lock():
            if live:
                self.g.live[number & IMM_INDEX_MASK] = ((number >> IMM_INDEX_BITS) & IMM_GEN_MASK) + 1
                if table_get(&self.g.imm, number) == NULL:
                    raise MemoryError
            else:
                imm_free(self.g, number)

    def imm_count(self, uint32_t number):
        cdef slot_t* s
        with self.lock():
            s = table_find(&self.g.imm, number)
            return 0 if s == NULL else s.count

    def stats(self):
        cdef group_t* g = self.g
        nics = []
        for i in range(g.nnics):
            d = &g.nic[i]
            nics.append(dict(name=self.domains[i].info.name, up=bool(d.up), posts=d.posts, bytes=d.bytes, outstanding_bytes=d.out_bytes,
                             completions=d.completions, queue_full=d.fulls, errors=d.errors, immediates=d.imms))
        return dict(device=self.device, turns=g.turns, sleeps=g.sleeps, wakeups=g.kicks, submitted=g.submitted, ended=g.ended, failed=g.failed,
                    pending=g.wheel.n, zombies=g.zombies, backlog=g.nbacklog, stale=g.stale, refused=g.refused, immediates=g.imm.n,
                    half_arrived=g.shards.n, nics=nics)

    # -- transfers

    cdef Transfer transfer(self, uint32_t op):
        cdef Transfer t = Transfer.__new__(Transfer)
        cdef req_t* r = req_new(&self.g.pool_, op)
        if r == NULL:
            raise MemoryError
        t.group = self
        t.r = r
        t.op = op
        return t

    cdef Transfer follow(self, Transfer leader, uint32_t kind):
        cdef Transfer t = self.transfer(OP_FOLLOW)
        cdef group_t* g = self.g
        t.src = leader
        t.r.imm = kind
        t.r.deadline = now_ns() + <uint64_t>LONGEST_S * 1000000000
        with nogil:
            lock_now(g)
            t.r.started = 1
            follow(g, t.r, leader.r)
            unlock(g)
            if g.rearm:
                g.rearm = 0
                wake_worker(g)
        return t

    cdef bint cancel(self, Transfer t):
        cdef group_t* g = self.g
        cdef bint was
        if ld_acq32(&t.r.state) != PENDING or self.forks != fx_forks:
            return False
        with nogil:
            lock_now(g)
            was = t.r.state == PENDING and not t.r.cancelled
            if not t.r.started:
                t.r.cancelled = 1       # still in the queue: ends when it is taken
            elif was:
                fail(g, t.r, FE_CANCELLED, 0)
            unlock(g)
            kick(g)
        return was

    def fail_transfer(self, Transfer t, int status):
        """Ends a pending transfer with an FE_ code."""
        cdef group_t* g = self.g
        with nogil:
            lock_now(g)
            if t.r.started:
                fail(g, t.r, status, 0)
            else:
                t.r.cancelled = 1
            unlock(g)

    cdef int adopt(self, Transfer t) except -1:
        """Keeps index arrays of a dropped transfer until nothing reads them."""
        self.orphans = [x for x in self.orphans if not ld_acq32(&(<Transfer>x).r.quiet)]
        self.orphans.append(t)
        return 0

    cdef object error(self, Transfer t):
        cdef req_t* r = t.r
        if t.op == OP_FOLLOW and t.src is not None:
            return self.error(t.src) if ld_acq32(&(<Transfer>t.src).r.state) > DONE else errors.from_status(r.status, self.describe(t), r.vendor)
        if r.status == FE_TOO_LONG:
            return errors.MessageTooLong(f"{self.describe(t)}: {r.send.len} bytes, and the peer's receive buffers have {r.dst}")
        return errors.from_status(r.status, self.describe(t), r.vendor)

    cdef str describe(self, Transfer t):
        cdef req_t* r = t.r
        if t.op == OP_WRITE:
            return f"write of {r.n} bytes from {region(t.src)}+{r.src - (<MrHandle>t.src).m.addr} to {region(t.dst)}+{r.dst} at {owner(t.dst)}"
        if t.op == OP_PAGES:
            return f"{r.n} pages of {r.len} bytes from {region(t.src)} to {region(t.dst)} at {owner(t.dst)} ({r.at} posted)"
        if t.op == OP_SCATTER:
            dst = t.dst[r.failed_at] if r.failed_at < len(t.dst) else None
            return f"{'barrier' if t.src is None else 'scatter'} to {len(t.dst)} peers" + (
                f", no. {r.failed_at}, {region(dst)} at {owner(dst)}" if dst is not None and r.status else "")
        if t.op == OP_SEND:
            return f"message of {r.send.len} bytes to {t.dst}"
        if t.op == OP_EXPECT:
            return f"expected {r.n} of immediate {r.imm}"
        if t.op == OP_FOLLOW:
            return f"the end of {self.describe(t.src)}" if t.src is not None else "the end of a transfer"
        return "nothing"


cdef str region(o):
    if isinstance(o, MrHandle):
        return (<MrHandle>o).name or hex((<MrHandle>o).m.addr)
    return (getattr(o, "name", "") or hex(o.base)) if o is not None else "?"

cdef str owner(o):
    return str(getattr(o, "owner", "?"))


cdef void fail_waiting(group_t* g) noexcept nogil:
    """Ends every expectation: the engine closes."""
    cdef uint64_t i = 0
    cdef req_t* r
    while i <= g.imm.mask:
        r = <req_t*>g.imm.slot[i].first if g.imm.slot[i].used else NULL
        if r != NULL:
            fail(g, r, FE_CLOSED, 0)
        else:
            i += 1

cdef void fail_all(group_t* g, int32_t status) noexcept nogil:
    """Ends everything that has a deadline or stands in the backlog."""
    cdef int i
    while g.backlog != NULL:
        if g.backlog.op == OP_RECV:
            backlog_del(g, g.backlog)
        else:
            g.backlog.send.at = 0
            if g.backlog.state == PENDING:
                fail(g, g.backlog, status, 0)
            else:
                close_out(g, take_backlog(g))
    for i in range(WHEEL):
        while g.wheel.slot[i] != NULL:
            fail(g, g.wheel.slot[i], status, 0)

cdef inline req_t* take_backlog(group_t* g) noexcept nogil:
    cdef req_t* r = g.backlog
    backlog_del(g, r)
    return r

cdef int progress_queue(group_t* g) noexcept nogil:
    """Takes what is queued; in a closed group all of it fails."""
    cdef req_t* r
    cdef int n = 0
    while True:
        r = <req_t*>mpsc_pop(&g.q)
        if r == NULL:
            return n
        start(g, r)
        n += 1


include "submit.pxi"
include "probes.pxi"
