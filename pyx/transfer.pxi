# Transfers and their way into asyncio, part of worker.pyx.

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
        self.loop = weakref.ref(loop)
        me = weakref.ref(self)

        def ready():
            q = me()
            if q is not None:
                (<LoopQueue>q).drain()
        loop.add_reader(self.q.efd, ready)

    def __dealloc__(self):
        if self.q.efd >= 0:
            c_close(self.q.efd)

    cdef void abandon(self):
        """Nobody awaits any more what has ended."""
        cdef req_t* r = <req_t*>xchgp(&self.q.head, NULL)
        cdef req_t* nxt
        cdef Transfer t
        while r != NULL:
            nxt = r.lq_next
            t = <Transfer>r.lq_obj
            r.lq_obj = NULL
            t.fut = None
            Py_DECREF(t)
            r = nxt

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
        sweep_loops()
        q = _loops[loop] = LoopQueue(loop)
        _queues.add(q)
    return q


_queues = None                          # alive ones: one whose loop is gone lives as long as a transfer awaited there


cdef int sweep_loops() except -1:
    """Lets go of transfers that have ended after the loop was closed in which they were awaited."""
    global _queues
    if _queues is None:
        import weakref
        _queues = weakref.WeakSet()
    for x in list(_queues):
        loop = (<LoopQueue>x).loop()
        if loop is None or loop.is_closed():
            (<LoopQueue>x).abandon()
    return 0


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
@cython.no_gc                           # a callback is let go when it has been called: no cycle outlives the end
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
    cdef object via                 # RemoteMr or a list of them, where completions do not mean landed
    cdef object __weakref__

    def __init__(self):
        raise TypeError("a Transfer is made by the engine's submit calls")

    def __dealloc__(self):
        if self.r == NULL:
            return
        if self.keep is not None and self.r.extra & X_SENT and ld_acq32(&self.r.state) != DONE and not ld_acq32(&self.r.quiet):
            self.group.adopt(self.orphan())     # index arrays are borrowed until nothing can read them
        if not self.r.extra & X_SENT:
            req_drop(&self.group.g.pool_, self.r)       # refused before it was handed over: the worker's share too
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
        """A Transfer that ends when the source is free and nothing of this one can land any more.

        Where completions do not mean landed (ofi over tcp) the targets are asked, which takes a round trip. A target that is
        lost cannot be asked: what its host had received by then may still land there.
        """
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
            xchgp(<void**>&self.r.lq, <void*>&q.q)
            if ld_acq32(&self.r.state) != PENDING and casp(<void**>&self.r.lq, <void*>&q.q, NULL):
                self.r.lq_obj = NULL
                self.resolve()          # ended in between, and nobody saw us
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
                    if self.fut is f or self.fut is None:
                        self.fut = mine         # takes the place of the one that was cancelled
                    else:
                        self.fut.add_done_callback(copy)
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
