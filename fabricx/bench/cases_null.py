"""The engine alone, on a fabric that does nothing: enqueue, pick-up, posting, page lists, callbacks, asyncio."""

from __future__ import annotations

import asyncio
import gc
import os
import statistics
import sys
import threading
import time
import tracemalloc

import numpy as np

import fabricx as fx

from .. import _ref, _worker
from .harness import Case, Measure, Side, Skip

MIB = 1 << 20
#: spins for ever: an awake worker on a free core
AWAKE = {"polling": "busy"}


def null_engine(side: Side, core: int, **options: object) -> fx.TransferEngine:
    """An engine on null NICs whose threads run on `core`; this thread goes back to its own. A new thread inherits the
    cores of the one that starts it, and on two cores the engine pins nothing itself."""
    os.sched_setaffinity(0, {core})
    try:
        return fx.TransferEngine("null", **options)
    finally:
        os.sched_setaffinity(0, {side.core})


def far(number: int, size: int = 1 << 44) -> fx.MrDesc:
    """A region of a peer that is nowhere: the null fabric reaches everybody."""
    owner = fx.NetAddr(
        fabric="null", incarnation=number + 1, device="cpu:0", host="nowhere", pid=number + 1, nics=(b"null0",)
    )
    return fx.MrDesc(owner=owner, base=1 << 40, length=size, rkeys=(number + 1,), device="cpu", name=f"far {number}")


def huge(engine: fx.TransferEngine, size: int = 1 << 34) -> fx.MrHandle:
    """A source of addresses that nobody reads: the null fabric registers anything."""
    return engine.reg_mr(1 << 40, size, name="nowhere")[0]


class Enqueue(Case):
    """What a submit costs its caller, a worker that is awake on the other core taking it."""

    sides = 1
    N = 20_000

    def __init__(self, side: Side) -> None:
        super().__init__(side)
        self.engine = null_engine(side, side.other_core, **AWAKE)
        self.inline = null_engine(side, side.other_core, progress="caller")
        self.desc = far(0)
        self.handle = huge(self.engine)
        self.handle_inline, self.desc_inline = huge(self.inline), far(0)

    def measures(self) -> list[Measure]:
        def one(metric: str, ours, bar: float) -> Measure:
            return Measure("enqueue", "null", metric, "us", ours, bar=bar, size=256)

        return [
            one(
                "nogil, 20,000 in a row to an awake worker",
                lambda: _worker.enqueue_nogil(self.engine, self.handle, self.desc, self.N) / 1e3,
                0.12,
            ),
            one(
                "Python with a Transfer, 20,000 in a row to an awake worker",
                lambda: self.python(self.engine, self.handle, self.desc),
                0.3,
            ),
            one(
                "Python with a Transfer, 20,000 in a row posted inline (caller)",
                lambda: self.python(self.inline, self.handle_inline, self.desc_inline),
                0.3,
            ),
        ]

    def python(self, engine: fx.TransferEngine, handle: fx.MrHandle, desc: fx.MrDesc) -> float:
        submit, src, dst = engine.submit_single_write, (handle, 0), (desc, 0)
        n = self.N
        t = time.perf_counter_ns()
        for _ in range(n - 1):
            submit(256, 7, src, dst)
        last = submit(256, 7, src, dst)
        t = time.perf_counter_ns() - t
        last.wait(30)
        return t / n / 1e3

    def close(self) -> None:
        self.engine.close()
        self.inline.close()


class PickUp(Case):
    """From submit to the worker's hands, and from there to the first post."""

    sides = 1
    N, GAP_NS = 5_000, 2_000

    def __init__(self, side: Side) -> None:
        super().__init__(side)
        if side.core == side.other_core:
            raise Skip("a worker awake on a free core needs a second core")
        self.ns = 1e9 / _ref.tsc_hz(0.1)
        self.engine: fx.TransferEngine | None = None
        self.worst: list[float] = []

    def measures(self) -> list[Measure]:
        def one(case: str, metric: str, column: int, bar: float) -> Measure:
            return Measure(case, "null", metric, "us", lambda: self.column(column), bar=bar, size=256, note=self.tail)

        return [
            one("enqueue", "nogil, one at a time, p50", 0, 0.12),
            one("pick-up", "submit to picked up, p50", 1, 0.3),
            one("prepare", "picked up to posted, p50", 2, 0.1),
            Measure("machine", "null", "a bare flag between the same two cores, one way", "us", self.hop),
        ]

    def hop(self) -> float:
        """What no hand-over between two cores can beat; on shared machines it changes by the hour."""
        words = np.zeros(64, np.uint32)
        a, b, n = words.ctypes.data, words.ctypes.data + 128, 1_000

        runs: list[float] = []

        def answer() -> None:
            os.sched_setaffinity(0, {self.side.other_core})
            for _ in range(20):
                _ref.flag_pingpong(b, a, n, False)

        self.quiet()
        thread = threading.Thread(target=answer)
        thread.start()
        for _ in range(20):
            runs.append(_ref.flag_pingpong(a, b, n, True))
        thread.join()
        return statistics.median(runs) / 2e3

    def column(self, i: int) -> float:
        if self.engine is None:
            self.engine = null_engine(self.side, self.side.other_core, **AWAKE)
            self.handle, self.desc = huge(self.engine), far(0)
        o = _worker.pickup(self.engine, self.handle, self.desc, self.N, self.GAP_NS)[:, i] * self.ns / 1e3
        self.worst.append(float(np.percentile(o, 99)))
        return float(np.median(o))

    def tail(self) -> str:
        p99 = statistics.median(self.worst)
        self.worst.clear()
        return f"p99 {p99:.3f} us; a bare flag took {self.hop():.3f} us from core to core"

    def quiet(self) -> None:
        """Closes the engine, whose worker would share the other core with whatever else is measured there."""
        if self.engine is not None:
            self.engine.close()
            self.engine = None

    def close(self) -> None:
        self.quiet()


class Pages(Case):
    """Page lists: how many pages a worker posts, and what a million of them cost the rest of the process."""

    sides = 1
    N = 1_000_000

    def __init__(self, side: Side) -> None:
        super().__init__(side)
        self.engine = null_engine(side, side.core, progress="caller")
        self.thread = null_engine(side, side.other_core, **AWAKE)
        rng = np.random.default_rng(1)
        self.src = rng.permutation(self.N).astype(np.uint32)
        self.dst = rng.permutation(self.N).astype(np.uint32)
        self.to = {self.engine: (huge(self.engine), far(0)), self.thread: (huge(self.thread), far(0))}
        self.posted = 0

    def submit(self, engine: fx.TransferEngine, n: int = N) -> fx.Transfer:
        handle, desc = self.to[engine]
        src, dst = self.src[:n], self.dst[:n]
        return engine.submit_paged_writes(
            1024, 3, (handle, fx.Pages(src, stride=1024)), (desc, fx.Pages(dst, stride=1024))
        )

    def measures(self) -> list[Measure]:
        def one(metric: str, unit: str, ours, bar: float | None, **k: object) -> Measure:
            return Measure("pages", "null", metric, unit, ours, bar=bar, size=1024, **k)

        return [
            one("posting by the worker, one request of a million", "M pages/s", self.worker_rate, 25, at_least=True),
            one(
                "posting by the caller, one request of a million, checked",
                "M pages/s",
                lambda: self.rate(self.engine),
                25,
                at_least=True,
            ),
            one("Python bytes beyond the arrays, a million pages", "bytes", self.traced, 65536, most=3),
            one("Python objects beyond the arrays, a million pages", "objects", self.objects, 16, most=3),
            one("resident memory after 10 requests of a million", "MB", self.resident, 1.0, most=3),
            one("longest gap of another thread's 1 ms ticker (caller)", "ms", lambda: self.gap(self.engine), 5.0),
            one("longest gap of another thread's 1 ms ticker (thread)", "ms", lambda: self.gap(self.thread), 5.0),
        ]

    def rate(self, engine: fx.TransferEngine) -> float:
        t = time.perf_counter_ns()
        self.submit(engine).wait(30)
        return self.N * 1e3 / (time.perf_counter_ns() - t)

    def worker_rate(self) -> float:
        """The worker's part alone: a prepared list, checked before, from submit to the end."""
        handle, desc = self.to[self.thread]
        p = self.thread.prepare(
            1024, (handle, fx.Pages(self.src, stride=1024)), (desc, fx.Pages(self.dst, stride=1024))
        )
        t = time.perf_counter_ns()
        self.thread.submit_prepared(p, 3).wait(30)
        return self.N * 1e3 / (time.perf_counter_ns() - t)

    def traced(self) -> float:
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            t = self.submit(self.engine)
            used = tracemalloc.get_traced_memory()[0] - before
            t.wait(30)
            return float(max(0, used))
        finally:
            tracemalloc.stop()

    def objects(self) -> float:
        gc.collect()
        before = sys.getallocatedblocks()
        t = self.submit(self.engine)
        more = sys.getallocatedblocks() - before
        t.wait(30)
        return float(max(0, more))

    def resident(self) -> float:
        before = resident()
        for _ in range(10):
            self.submit(self.engine).wait(30)
        return max(0.0, (resident() - before) / 1e6)

    def gap(self, engine: fx.TransferEngine) -> float:
        """A thread on the other core that wants the GIL every millisecond: its longest wait beyond that, in ms."""
        worst, stop, started = [0], threading.Event(), threading.Event()

        def tick() -> None:
            os.sched_setaffinity(0, {self.side.other_core if engine is self.engine else self.side.core})
            last = time.perf_counter_ns()
            while not stop.is_set():
                time.sleep(0.001)
                now = time.perf_counter_ns()
                worst[0] = max(worst[0], now - last - 1_000_000)
                last = now
                started.set()

        thread = threading.Thread(target=tick)
        thread.start()
        started.wait(5)
        worst[0] = 0
        self.submit(engine).wait(30)
        time.sleep(0.003)
        stop.set()
        thread.join()
        return worst[0] / 1e6

    def close(self) -> None:
        self.engine.close()
        self.thread.close()


def resident() -> int:
    """Bytes of this process in memory."""
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Scatter(Case):
    """A slice to each of 56 peers: posting alone, and the whole call from Python."""

    sides = 1
    PEERS = 56

    def __init__(self, side: Side) -> None:
        super().__init__(side)
        self.engine = null_engine(side, side.core, progress="caller")
        self.handle = huge(self.engine)
        self.descs = [far(i) for i in range(self.PEERS)]
        self.group = self.engine.add_peer_group([d.owner for d in self.descs])
        self.dsts = [fx.ScatterDst(7168, i * 7168, d, 0) for i, d in enumerate(self.descs)]

    def measures(self) -> list[Measure]:
        return [
            Measure("scatter", "null", "posting to 56 peers", "us", self.posting, bar=2.5, size=7168),
            Measure("scatter", "null", "the whole call from Python, 56 peers", "us", self.call, size=7168),
            Measure("barrier", "null", "the whole call from Python, 56 peers", "us", self.barrier),
        ]

    def posting(self) -> float:
        return float(np.median(_worker.scatter_nogil(self.engine, self.handle, self.descs, 7168, 500))) / 1e3

    def call(self) -> float:
        t = time.perf_counter_ns()
        for _ in range(200):
            self.engine.submit_scatter(self.group, 5, self.handle, self.dsts)
        return (time.perf_counter_ns() - t) / 200e3

    def barrier(self) -> float:
        t = time.perf_counter_ns()
        for _ in range(200):
            self.engine.submit_barrier(self.group, 5, self.descs)
        return (time.perf_counter_ns() - t) / 200e3

    def close(self) -> None:
        self.engine.close()


class Immediates(Case):
    """Counting arrivals: writes with immediate that the null NIC hands back to its own domain."""

    sides = 1
    N = 100_000

    def __init__(self, side: Side) -> None:
        super().__init__(side)
        self.engine = null_engine(side, side.core, progress="caller", nics=["null0:loopback"])
        self.handle, self.desc = huge(self.engine), far(0)
        self.indices = np.zeros(self.N, np.uint32)

    def measures(self) -> list[Measure]:
        return [
            Measure("immediates", "null", "expect, write and count one, Python", "us", self.one_by_one, size=8),
            Measure("immediates", "null", "post and count pages", "M/s", self.batch, size=8),
        ]

    def one_by_one(self) -> float:
        submit, expect, src, dst = (
            self.engine.submit_single_write,
            self.engine.expect_imm_count,
            (self.handle, 0),
            (self.desc, 0),
        )
        t = time.perf_counter_ns()
        for _ in range(5_000):
            x = expect(5, 1)
            submit(8, 5, src, dst)
            x.wait()
        return (time.perf_counter_ns() - t) / 5e6

    def batch(self) -> float:
        src = (self.handle, fx.Pages(self.indices, stride=8))
        dst = (self.desc, fx.Pages(None, stride=8, count=self.N))
        t = time.perf_counter_ns()
        x = self.engine.expect_imm_count(6, self.N)
        self.engine.submit_paged_writes(8, 6, src, dst)
        x.wait(30)
        return self.N * 1e3 / (time.perf_counter_ns() - t)

    def close(self) -> None:
        self.engine.close()


class Callbacks(Case):
    """The end of a transfer told to Python, to native code and to asyncio."""

    sides = 1
    N = 2_000

    def __init__(self, side: Side) -> None:
        super().__init__(side)
        self.engine = null_engine(side, side.other_core, **AWAKE)
        self.inline = null_engine(side, side.core, progress="caller")
        self.native, self.words = native_counter()

    def measures(self) -> list[Measure]:
        def one(metric: str, ours, bar: float | None, **k: object) -> Measure:
            return Measure("callbacks", "null", metric, "us", ours, bar=bar, **k)

        out = [one("Python, batched, beyond a plain call", self.python, 0.1)]
        if self.native is not None:
            out.append(one("native, beyond the request", self.native_calls, 0.02, note=self.words))
        return [
            *out,
            one("asyncio, 2,000 awaited at once", lambda: self.aio(2_000, 1), 3.0),
            one("asyncio, one awaited", lambda: self.aio(1, 500), 25.0),
        ]

    def python(self) -> float:
        """From the first callback to the last of requests that end in one go, less what plain calls take; the callback
        thread takes all that are there in one batch."""
        n, stamps = self.N, []
        add, clock = stamps.append, time.perf_counter_ns

        def cb(_: object) -> None:
            add(clock())

        gate = threading.Event()
        self.engine_nop(lambda _: gate.wait(10))  # holds the callback thread until all are there
        last = [self.engine_nop(cb) for _ in range(n)][-1]
        while not last.done():
            time.sleep(0)
        gate.set()
        end = time.monotonic() + 30
        while len(stamps) < n:
            if time.monotonic() > end:
                raise fx.TransferTimeout(f"{len(stamps)} of {n} callbacks came")
            time.sleep(0.0005)
        took = (stamps[-1] - stamps[0]) / (n - 1)
        plain: list[int] = []
        add = plain.append
        for _ in range(n):
            cb(None)
        return max(0.0, took - (plain[-1] - plain[0]) / (n - 1)) / 1e3

    def engine_nop(self, cb) -> fx.Transfer:
        return _worker.nop(self.engine, cb)

    def native_calls(self) -> float:
        return _worker.native_nogil(self.inline, self.native, 100_000) / 1e3

    def aio(self, n: int, rounds: int) -> float:
        """Submit to resumed, a completion, in us."""

        async def run() -> float:
            nop, engine = _worker.nop, self.engine
            t = time.perf_counter_ns()
            for _ in range(rounds):
                for x in [nop(engine) for _ in range(n)]:
                    await x
            return (time.perf_counter_ns() - t) / rounds / n / 1e3

        return asyncio.run(run())

    def close(self) -> None:
        self.engine.close()
        self.inline.close()


def native_counter() -> tuple[fx.NativeCallback | None, str]:
    """A native function that does nothing, from numba where it is there, else the C library's abs()-like no-op."""
    try:
        from numba import cfunc
    except ImportError:
        import ctypes

        sched_yield = ctypes.cast(ctypes.CDLL(None).labs, ctypes.c_void_p).value
        return fx.NativeCallback(sched_yield or 0, 1), "labs() of the C library, numba is not installed"

    @cfunc("void(uint64, int64)")
    def nothing(arg, status):
        pass

    cb = fx.NativeCallback(nothing.address, 0)
    _keep.append(nothing)
    return cb, "a numba.cfunc"


_keep: list[object] = []

CASES = [Enqueue, PickUp, Pages, Scatter, Immediates, Callbacks]
