"""fabricx._watcher: a thread that polls 64-bit words and tells of changes.

A word is incremented by whoever can store to it: a GPU (mapped memory), a kernel, a CPU thread. Changes may coalesce.
"""
from libc.stdint cimport int64_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport free
from atom cimport *
from ring cimport *
from watch cimport watch_t

from . import errors

cdef enum:
    MOST = 4096             # words one thread watches
    SPIN = 2000             # idle rounds before it yields, and
    YIELD = 200             # ... before it naps, longer and longer
    NAP_MIN_NS = 20000
    NAP_MAX_NS = 500000


cdef struct watcher_t:
    watch_t* at[MOST]
    uint32_t n
    uint32_t lock
    uint32_t bell           # 1: asleep, nothing to watch
    uint32_t stop
    uint32_t busy           # never nap
    uint64_t rounds
    cbq_t* cbq
    pthread_t thread


cdef inline void grab(watcher_t* w) noexcept nogil:
    while xchg32(&w.lock, 1):
        sched_yield()

cdef inline void let_go(watcher_t* w) noexcept nogil:
    st_rel32(&w.lock, 0)

cdef inline void unref(watch_t* x) noexcept nogil:
    if fadd32(&x.refs, <uint32_t>-1) == 1:
        free(x)

cdef int look(watcher_t* w) noexcept nogil:
    """One round over all words; how many had changed."""
    cdef uint32_t i
    cdef watch_t* x
    cdef uint64_t v, old
    cdef int n = 0
    for i in range(w.n):
        x = w.at[i]
        v = ld_acq64(x.word)
        if v == x.seen:
            continue
        n += 1
        old = x.seen
        st_rel64(&x.seen, v)
        if x.native != NULL:
            x.native(x.native_arg, old, v)
        elif xchg32(&x.queued, 1) == 0:     # one node a word: later changes join it
            fadd32(&x.refs, 1)
            cbq_push(w.cbq, &x.node)
    return n

cdef void* watcher_main(void* arg) noexcept nogil:
    cdef watcher_t* w = <watcher_t*>arg
    cdef uint32_t idle = 0
    cdef int64_t nap = NAP_MIN_NS
    cdef int n
    while not ld_acq32(&w.stop):
        grab(w)
        n = look(w)
        let_go(w)
        w.rounds += 1
        if n:
            idle = 0
            nap = NAP_MIN_NS
            continue
        if w.n == 0:
            xchg32(&w.bell, 1)
            if ld_acq32(&w.n) == 0 and not ld_acq32(&w.stop):
                futex_wait(&w.bell, 1, -1)
            st_rlx32(&w.bell, 0)
            idle = 0
            continue
        idle += 1
        if w.busy or idle < SPIN:
            cpu_pause()
        elif idle < SPIN + YIELD:
            sched_yield()
        else:
            futex_wait(&w.bell, 0, nap)
            nap = min(nap * 2, <int64_t>NAP_MAX_NS)
    return NULL


cdef class WatchThread:
    """The watcher's thread of an engine; started with its first word."""
    cdef watcher_t* w
    cdef bint running
    cdef object cbq         # keeps the callback queue alive

    def __cinit__(self, cbq, bint busy=False):
        self.w = <watcher_t*>alloc_lines(sizeof(watcher_t))
        if self.w == NULL:
            raise MemoryError
        self.cbq = cbq
        self.w.cbq = <cbq_t*><uintptr_t>cbq.address
        self.w.busy = busy

    def __dealloc__(self):
        self.stop()
        free(self.w)

    def add(self, uint64_t word, uint64_t native=0, uint64_t native_arg=0):
        """Watches the 64-bit word at an address; returns the number that remove() and changed() take."""
        cdef watch_t* x
        cdef bint full
        if word & 7:
            raise errors.OutOfRange(f"a watched word must be aligned to 8 bytes, not at {word:#x}")
        x = <watch_t*>alloc_lines(sizeof(watch_t))
        if x == NULL:
            raise MemoryError
        x.word = <uint64_t*><uintptr_t>word
        x.seen = x.told = ld_acq64(x.word)
        x.refs = 2
        x.native = <void (*)(uint64_t, uint64_t, uint64_t) noexcept nogil><uintptr_t>native
        x.native_arg = native_arg
        x.node.kind = CB_WATCH
        x.node.self = x
        with nogil:
            grab(self.w)
            full = self.w.n == MOST
            if not full:
                self.w.at[self.w.n] = x
                st_rel32(&self.w.n, self.w.n + 1)
            let_go(self.w)
        if full:
            free(x)
            raise errors.OutOfRange(f"an engine watches at most {MOST} words")
        if not self.running:
            self.running = True
            pthread_create(&self.w.thread, NULL, watcher_main, self.w)
        elif xchg32(&self.w.bell, 0):
            futex_wake(&self.w.bell, 1)
        return <uintptr_t>x

    def remove(self, uint64_t number):
        """Stops watching; the word is not read after this returns."""
        cdef watch_t* x = <watch_t*><uintptr_t>number
        cdef uint32_t i
        cdef bint found = False
        with nogil:
            grab(self.w)
            for i in range(self.w.n):
                if self.w.at[i] == x:
                    self.w.at[i] = self.w.at[self.w.n - 1]
                    self.w.n -= 1
                    found = True
                    break
            x.freed = 1
            let_go(self.w)
        if found:
            unref(x)
        unref(x)

    @staticmethod
    def changed(uint64_t number):
        """(old, new) since the last call, or None; the callback thread calls it for a queued word."""
        cdef watch_t* x = <watch_t*><uintptr_t>number
        cdef uint64_t old = x.told, new
        xchg32(&x.queued, 0)                # before the value is read: a later change queues it again
        new = ld_acq64(&x.seen)
        x.told = new
        freed = x.freed
        unref(x)
        return None if freed or new == old else (old, new)

    def stop(self):
        if self.running:
            self.running = False
            with nogil:
                st_rel32(&self.w.stop, 1)
                xchg32(&self.w.bell, 0)
                futex_wake(&self.w.bell, 1)
                pthread_join(self.w.thread, NULL)

    def abandon(self):
        """In a forked child, where the thread does not exist."""
        self.running = False
