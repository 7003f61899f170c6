"""What the engine itself costs, on a fabric that does nothing."""

from __future__ import annotations

import asyncio

import numpy as np

import fabricx as fx
from fabricx import _worker

from .common import Null, far


class Submit(Null):
    """One submit with a Transfer, from Python."""

    def time_single_write(self) -> None:
        self.engine.submit_single_write(256, 7, (self.handle, 0), (self.desc, 0))

    def time_single_write_and_wait(self) -> None:
        self.engine.submit_single_write(256, 7, (self.handle, 0), (self.desc, 0)).wait()

    def time_register_and_deregister(self) -> None:
        handle, _ = self.engine.reg_mr(1 << 40, 1 << 20)
        self.engine.dereg_mr(handle)


class Tracked(Null):
    """The same where a completion has to come back."""

    nics = ("null0:queued",)

    def time_single_write_and_wait(self) -> None:
        self.engine.submit_single_write(256, 7, (self.handle, 0), (self.desc, 0)).wait()


class Immediates(Null):
    """Counting arrivals that the null NIC hands back to its own domain."""

    nics = ("null0:loopback",)

    def setup(self, *_: object) -> None:
        super().setup()
        self.pages = fx.Pages(np.zeros(100_000, np.uint32), stride=8), fx.Pages(None, stride=8, count=100_000)

    def time_expect_write_wait(self) -> None:
        x = self.engine.expect_imm_count(5, 1)
        self.engine.submit_single_write(8, 5, (self.handle, 0), (self.desc, 0))
        x.wait()

    def time_100_000_of_one(self) -> None:
        x = self.engine.expect_imm_count(6, 100_000)
        self.engine.submit_paged_writes(8, 6, (self.handle, self.pages[0]), (self.desc, self.pages[1]))
        x.wait()

    def time_1_000_different(self) -> None:
        e = self.engine
        xs = [e.expect_imm_count(1000 + i, 1) for i in range(1000)]
        for i in range(1000):
            e.submit_single_write(8, 1000 + i, (self.handle, 0), (self.desc, 0))
        for x in xs:
            x.wait()

    def time_alloc_and_free(self) -> None:
        self.engine.free_imm(self.engine.alloc_imm())


class Paged(Null):
    """Page lists: checked, posted, prepared."""

    params = (1_024, 1_000_000)
    param_names = ("pages",)

    def setup(self, n: int) -> None:
        super().setup()
        rng = np.random.default_rng(1)
        src, dst = (fx.Pages(rng.permutation(n).astype(np.uint32), stride=1024) for _ in range(2))
        self.lists = (self.handle, src), (self.desc, dst)
        self.prepared = self.engine.prepare(1024, *self.lists)

    def time_paged_writes(self, n: int) -> None:
        self.engine.submit_paged_writes(1024, 3, *self.lists).wait()

    def time_prepared(self, n: int) -> None:
        self.engine.submit_prepared(self.prepared, 3).wait()

    def peakmem_paged_writes(self, n: int) -> None:
        self.engine.submit_paged_writes(1024, 3, *self.lists).wait()


class Scatter(Null):
    """A slice, or nothing but an immediate, to each peer."""

    params = (8, 56)
    param_names = ("peers",)

    def setup(self, n: int) -> None:
        super().setup()
        self.descs = [far(i) for i in range(n)]
        self.group = self.engine.add_peer_group([d.owner for d in self.descs])
        self.dsts = [fx.ScatterDst(7168, i * 7168, d, 0) for i, d in enumerate(self.descs)]
        self.engine.submit_scatter(self.group, 5, self.handle, self.dsts).wait()

    def time_scatter(self, n: int) -> None:
        self.engine.submit_scatter(self.group, 5, self.handle, self.dsts)

    def time_barrier(self, n: int) -> None:
        self.engine.submit_barrier(self.group, 5, self.descs)

    def track_posting_us(self, n: int) -> float:
        return float(np.median(_worker.scatter_nogil(self.engine, self.handle, self.descs, 7168, 300))) / 1e3

    track_posting_us.unit = "us"


class Ends(Null):
    """The end of a transfer, told in each of the ways there are."""

    def time_counter(self) -> None:
        counter = fx.Counter()
        self.engine.submit_single_write(256, 7, (self.handle, 0), (self.desc, 0), counter)

    def time_1_000_python_callbacks(self) -> None:
        left = [1000]
        done = _Once()

        def cb(_: object) -> None:
            left[0] -= 1
            if not left[0]:
                done.set()

        for _ in range(1000):
            _worker.nop(self.engine, cb)
        done.wait()

    def time_1_000_awaited(self) -> None:
        async def run() -> None:
            for t in [_worker.nop(self.engine) for _ in range(1000)]:
                await t

        asyncio.run(run())


class _Once:
    def __init__(self) -> None:
        import threading

        self._event = threading.Event()
        self.set = self._event.set

    def wait(self) -> None:
        if not self._event.wait(30):
            raise TimeoutError("the callbacks did not come within 30 s")


class Life:
    """An engine's beginning and end, and what it holds."""

    params = ("null", "local")
    param_names = ("fabric",)

    def time_open_and_close(self, fabric: str) -> None:
        fx.TransferEngine(fabric).close()

    def peakmem_open(self, fabric: str) -> None:
        fx.TransferEngine(fabric).close()
