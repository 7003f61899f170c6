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
    FD_SPIN = 4                 # empty turns before a worker yields on fabrics that sleep on descriptors
    SOURCES = 65536             # peers whose early arrivals are accounted for

NUMBERS = IMM_ALLOC             # explicit immediates: 0 .. NUMBERS - 1
STATES = ("pending", "done", "failed", "cancelled")

fx_watch_forks()


include "wake.pxi"
include "end.pxi"
include "count.pxi"
include "post.pxi"
include "drive.pxi"


# ---------------------------------------------------------------- arguments

cdef uint64_t u64(object v, str what) except? 0xfffffffffffffff1:
    """An unsigned 64-bit integer, or OutOfRange naming `what`."""
    if isinstance(v, float):
        raise TypeError(f"{what} must be an int, not float")
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
                    args = (e.kind, e.nic, e.peer, e.src, e.group, e.when)
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
    cdef readonly uint64_t born     # now_ns(): events from before are of an earlier connection

    def __cinit__(self, Group group, addr, uint32_t id):
        cdef int i
        self.p = <peer_t*>alloc_lines(sizeof(peer_t))
        if self.p == NULL:
            raise MemoryError
        self.group, self.addr, self.id = group, addr, id
        self.p.id = id
        self.born = now_ns()
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

    def inherit(self, PeerRef old not None):
        """An earlier connection to the same incarnation: tags that its writes took with them mean something there still."""
        cdef int i
        with self.group.lock():
            for i in range(8):
                self.p.tags[i] = old.p.tags[i]
                self.p.burnt += popcount(old.p.tags[i])

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


cdef rmr_t* graves = NULL       # touched with the GIL held


cdef void entomb(rmr_t* m):
    """Frees imported regions that no request points to any more, this one too if it can be."""
    global graves
    cdef rmr_t** at = &graves
    m.grave = graves
    graves = m
    while at[0] != NULL:
        m = at[0]
        if ld_acq32(&m.inflight) == 0:
            at[0] = m.grave
            free(m)
        else:
            at = &m.grave


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
        if self.m != NULL:
            entomb(self.m)

    @property
    def inflight(self):
        return ld_acq32(&self.m.inflight)

    def bury(self):
        """Who still holds it posts with keys that no fabric knows, and is refused. The progress lock is held."""
        cdef uint32_t k
        for k in range(self.m.npaths):
            self.m.path[k].key = <uint64_t>-1


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


include "transfer.pxi"
include "group.pxi"
include "submit.pxi"
include "probes.pxi"
