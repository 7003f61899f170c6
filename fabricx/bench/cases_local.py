"""The local fabric between two processes: latency, bandwidth, first read, pages."""

from __future__ import annotations

import socket
import time
from collections import deque
from typing import ClassVar

import numpy as np

import fabricx as fx

from .. import _ref, _worker
from .harness import Case, Mapping, Measure, Side

MIB = 1 << 20
SLOTS = 16
IMM, ACK = 5, 6


class Pair(Case):
    """An engine on each side, with a region of `size` bytes each that the other writes into.

    Attributes
    ----------
    buffer, handle, desc : our own region.
    their : MrDesc of the other side's region.
    """

    fabric = "local"
    options: ClassVar[dict[str, object]] = {"progress": "caller"}
    size = 4096

    def __init__(self, side: Side) -> None:
        super().__init__(side)
        self.engine = fx.TransferEngine(self.fabric, **self.options)
        self.buffer = self.engine.alloc(self.size)
        self.handle, self.desc = self.engine.reg_mr(self.buffer)
        self.their = fx.MrDesc.from_bytes(side.swap_bytes(self.desc.to_bytes()))
        self.engine.connect(self.their.owner)
        side.sync()

    def close(self) -> None:
        self.engine.close()


def ping_pong(engine: fx.TransferEngine, handle: fx.MrHandle, their: fx.MrDesc, first: bool, n: int) -> float:
    """8 bytes with immediate to and fro, Python to Python with Transfers: us half a round trip."""
    expect, submit, src, dst = engine.expect_imm_count, engine.submit_single_write, (handle, 0), (their, 64)
    t = time.perf_counter_ns()
    if first:
        for _ in range(n):
            x = expect(IMM, 1)
            submit(8, IMM, src, dst)
            x.wait()
    else:
        for _ in range(n):
            expect(IMM, 1).wait()
            submit(8, IMM, src, dst)
    return (time.perf_counter_ns() - t) / n / 2e3


def socket_ping_pong(sock: socket.socket, first: bool, n: int) -> float:
    """8 bytes to and fro over a socket: us half a round trip."""
    view = memoryview(bytearray(8))
    send, recv = sock.sendall, sock.recv_into
    t = time.perf_counter_ns()
    if first:
        for _ in range(n):
            send(view)
            recv(view)
    else:
        for _ in range(n):
            recv(view)
            send(view)
    return (time.perf_counter_ns() - t) / n / 2e3


class PingPong(Pair):
    """8 bytes from Python, the waiting thread driving, against raw TCP sockets."""

    metric, bar, n = "8 B half round trip, Python, caller", 0.12, 10_000

    def __init__(self, side: Side) -> None:
        super().__init__(side)
        self.tcp = side.tcp_pair()

    def measures(self) -> list[Measure]:
        first = self.side.first
        return [
            Measure(
                "ping-pong",
                "local",
                self.metric,
                "us",
                lambda: ping_pong(self.engine, self.handle, self.their, first, self.n),
                lambda: socket_ping_pong(self.tcp, first, 1_000),
                size=8,
                reference="TCP socket, Python",
                bar=self.bar,
            )
        ]


class PingPongThread(PingPong):
    """The same with a worker thread that yields; it shares its process's core."""

    options: ClassVar[dict[str, object]] = {
        "progress": "thread",
        "polling": "adaptive",
        "config": fx.Config.from_env(spin=0, yields=1 << 30),
    }
    metric, bar, n = "8 B half round trip, Python, worker thread that yields", 0.8, 1_000


class PingPongNative(Pair):
    """8 bytes without leaving C, against a bare flag."""

    def __init__(self, side: Side) -> None:
        super().__init__(side)
        self.flags = side.shared(4096)

    def measures(self) -> list[Measure]:
        return [
            Measure(
                "ping-pong",
                "local",
                "8 B half round trip, nogil, caller",
                "us",
                self.engine_pp,
                self.flag_pp,
                size=8,
                reference="bare flag, C",
                bar=4.0,
            )
        ]

    def engine_pp(self) -> float:
        return _worker.pp_nogil(self.engine, self.handle, 0, self.their, 64, IMM, 20_000, self.side.first) / 2e3

    def flag_pp(self) -> float:
        a, b = self.flags.addr, self.flags.addr + 128
        if not self.side.first:
            a, b = b, a
        return _ref.flag_pingpong(a, b, 50_000, self.side.first) / 2e3


class Bandwidth(Pair):
    """16 writes in flight into memory that the peer maps, against memcpy into the same mapping."""

    size = SLOTS * 16 * MIB
    style = "caller"
    bars: ClassVar[dict[int, float | None]] = {64 << 10: 0.75, MIB: 1.2, 16 * MIB: 1.2}

    def __init__(self, side: Side) -> None:
        super().__init__(side)
        fd = side.swap_fd(self.buffer.fd)
        self.mapped = Mapping(fd, self.size)
        self.source = self.engine.alloc(self.size)
        self.source.array[:] = 7
        self.from_, _ = self.engine.reg_mr(self.source)
        if side.first:
            self.mapped.array[:] = 1  # touch every page

    def measures(self) -> list[Measure]:
        return [
            Measure(
                "bandwidth",
                "local",
                f"mapped, 16 in flight, {self.style}",
                "GB/s",
                lambda n=n: self.window(self.their, n),
                lambda n=n: self.memcpy(n),
                size=n,
                reference="memcpy, same mapping",
                bar=bar,
                at_least=True,
            )
            for n, bar in self.bars.items()
        ]

    @staticmethod
    def count(n: int) -> int:
        return max(SLOTS, 64 * MIB // n)

    def window(self, their: fx.MrDesc, n: int) -> float:
        """Keeps 16 Transfers in flight: GB/s."""
        if not self.side.first:
            return 0.0
        submit, src, count = self.engine.submit_single_write, self.from_, self.count(n)
        flying: deque[fx.Transfer] = deque()
        t = time.perf_counter_ns()
        for i in range(count):
            at = i % SLOTS * n
            if len(flying) == SLOTS:
                flying.popleft().wait()
            flying.append(submit(n, None, (src, at), (their, at)))
        for x in flying:
            x.wait()
        return n * count / (time.perf_counter_ns() - t)

    def memcpy(self, n: int) -> float:
        if not self.side.first:
            return 0.0
        return _ref.copy_slots(self.mapped.addr, self.source.addr, n, SLOTS, self.count(n))


class BandwidthThread(Bandwidth):
    """The same with a worker thread, which shares its process's core."""

    options: ClassVar[dict[str, object]] = {"progress": "thread", "polling": "adaptive"}
    style = "thread"
    bars: ClassVar[dict[int, float | None]] = {64 << 10: 0.55, MIB: None, 16 * MIB: None}


class BandwidthUnmapped(Bandwidth):
    """Memory that cannot be mapped: process_vm_writev, against memcpy into a mapping."""

    def __init__(self, side: Side) -> None:
        super().__init__(side)
        self.plain = np.zeros(self.size, np.uint8)
        self.plain[:] = 1
        self.plain_handle, desc = self.engine.reg_mr(self.plain)
        self.far = fx.MrDesc.from_bytes(side.swap_bytes(desc.to_bytes()))

    def measures(self) -> list[Measure]:
        return [
            Measure(
                "bandwidth",
                "local",
                "unmapped (process_vm_writev), 16 in flight, caller",
                "GB/s",
                lambda n=n: self.window(self.far, n),
                lambda n=n: self.memcpy(n),
                size=n,
                reference="memcpy into a mapping",
                bar=bar,
                at_least=True,
            )
            for n, bar in {64 << 10: None, MIB: 0.25, 16 * MIB: 0.25}.items()
        ]


class FirstRead(Bandwidth):
    """A write and the receiver's first read of all of it, against memcpy and the same read. Both receivers spin, so that no
    wake-up is measured."""

    options: ClassVar[dict[str, object]] = {"progress": "caller", "config": fx.Config.from_env(spin=1 << 28)}

    def __init__(self, side: Side) -> None:
        super().__init__(side)
        self.flags = side.shared(4096)
        self.turn = 0

    def measures(self) -> list[Measure]:
        return [
            Measure(
                "write + first read",
                "local",
                "mapped, one at a time, caller",
                "us",
                lambda n=n: self.ours(n),
                lambda n=n: self.ref(n),
                size=n,
                reference="memcpy, flag, read",
                bar=1.0,
                at_least=True,
                invert=True,
            )
            for n in (MIB, 16 * MIB)
        ]

    def ours(self, n: int) -> float:
        ack, count = self.flags.addr, max(4, 32 * MIB // n)
        t = time.perf_counter_ns()
        for i in range(count):
            self.turn += 1
            at = i % SLOTS * n
            if self.side.first:
                self.engine.submit_single_write(n, IMM, (self.from_, at), (self.their, at)).wait()
                _ref.flag_wait(ack, self.turn)
            else:
                self.engine.expect_imm_count(IMM, 1).wait()
                _ref.read_all(self.buffer.addr + at, n)
                _ref.flag_set(ack, self.turn)
        return (time.perf_counter_ns() - t) / count / 1e3

    def ref(self, n: int) -> float:
        ack, there, count = self.flags.addr, self.flags.addr + 128, max(4, 32 * MIB // n)
        t = time.perf_counter_ns()
        for i in range(count):
            self.turn += 1
            at = i % SLOTS * n
            if self.side.first:
                _ref.copy_then_flag(self.mapped.addr + at, self.source.addr + at, n, there, self.turn)
                _ref.flag_wait(ack, self.turn)
            else:
                _ref.flag_wait(there, self.turn)
                _ref.read_all(self.buffer.addr + at, n)
                _ref.flag_set(ack, self.turn)
        return (time.perf_counter_ns() - t) / count / 1e3


class PagePlan:
    """1,024 pages of 1 KiB at shuffled places of a pool of 8,192, the same on both sides."""

    PAGE, N, POOL = 1024, 1024, 8192

    def __init__(self) -> None:
        rng = np.random.default_rng(1)
        self.src, self.dst = (rng.permutation(self.POOL)[: self.N].astype(np.uint32) for _ in range(2))

    def expected(self, pool: np.ndarray) -> np.ndarray:
        """What the target looks like afterwards, as rows."""
        want = np.zeros((self.POOL, self.PAGE), np.uint8)
        want[self.dst] = pool.reshape(self.POOL, self.PAGE)[self.src]
        return want


class PagedWrites(Pair):
    """Shuffled pages in one request, with an answer when they have landed, against gather, Unix socket and scatter."""

    plan = PagePlan()
    size = plan.PAGE * plan.POOL
    rounds = 100

    def __init__(self, side: Side) -> None:
        super().__init__(side)
        p = self.plan
        self.source = self.engine.alloc(self.size)
        self.source.array[:] = np.arange(self.size) % 251
        self.from_, _ = self.engine.reg_mr(self.source)
        self.word, back = self.engine.reg_mr(self.engine.alloc(64))
        self.back = fx.MrDesc.from_bytes(side.swap_bytes(back.to_bytes()))
        self.plain = np.zeros(self.size, np.uint8)
        self.plain_handle, far = self.engine.reg_mr(self.plain)
        self.far = fx.MrDesc.from_bytes(side.swap_bytes(far.to_bytes()))
        self.mapped = Mapping(side.swap_fd(self.buffer.fd), self.size)
        self.unix = side.unix_pair()
        self.stage = np.empty((p.N, p.PAGE), np.uint8)
        self.take, self.put = p.src.astype(np.intp), p.dst.astype(np.intp)

    def measures(self) -> list[Measure]:
        def one(metric: str, ours, bar: float | None) -> Measure:
            return Measure(
                "pages",
                "local",
                metric,
                "M pages/s",
                ours,
                self.sockets,
                size=self.plan.PAGE,
                reference="gather, Unix socket, scatter",
                bar=bar,
                at_least=True,
            )

        floor = Measure(
            "pages",
            "local",
            "a bare loop of memcpy, nobody told",
            "M pages/s",
            self.floor,
            size=self.plan.PAGE,
            reference="",
        )
        return [
            one("1,024 shuffled, mapped, caller", lambda: self.ours(self.their), 3.5),
            one("1,024 shuffled, unmapped, caller", lambda: self.ours(self.far), None),
            floor,
        ]

    def rate(self, ns: int) -> float:
        return self.plan.N * self.rounds * 1e3 / ns

    def ours(self, their: fx.MrDesc) -> float:
        p, e = self.plan, self.engine
        src, dst = (self.from_, fx.Pages(p.src, stride=p.PAGE)), (their, fx.Pages(p.dst, stride=p.PAGE))
        t = time.perf_counter_ns()
        for _ in range(self.rounds):
            if self.side.first:
                x = e.expect_imm_count(ACK, 1)
                e.submit_paged_writes(p.PAGE, IMM, src, dst)
                x.wait()
            else:
                e.expect_imm_count(IMM, p.N).wait()
                e.submit_single_write(8, ACK, (self.word, 0), (self.back, 0))
        took = time.perf_counter_ns() - t
        if not self.side.first:
            landed = self.buffer.array if their is self.their else self.plain
            if not np.array_equal(landed.reshape(p.POOL, p.PAGE), p.expected(self.source.array)):
                raise AssertionError("the pages that landed are not those that were sent")
        return self.rate(took)

    def sockets(self) -> float:
        p, view, ack = self.plan, memoryview(self.stage).cast("B"), bytearray(1)
        rows = (self.source if self.side.first else self.buffer).array.reshape(p.POOL, p.PAGE)
        t = time.perf_counter_ns()
        for _ in range(self.rounds):
            if self.side.first:
                np.take(rows, self.take, axis=0, out=self.stage, mode="clip")
                self.unix.sendall(view)
                self.unix.recv_into(ack)
            else:
                got = 0
                while got < len(view):
                    n = self.unix.recv_into(view[got:])
                    if not n:
                        raise EOFError("the other side closed the socket")
                    got += n
                rows[self.put] = self.stage
                self.unix.sendall(ack)
        return self.rate(time.perf_counter_ns() - t)

    def floor(self) -> float:
        p = self.plan
        if not self.side.first:
            return 0.0
        ns = [_ref.copy_pages(self.mapped.addr, self.source.addr, p.src, p.dst, p.PAGE) for _ in range(self.rounds)]
        return 1e3 / float(np.median(ns))


CASES = [
    PingPong,
    PingPongThread,
    PingPongNative,
    Bandwidth,
    BandwidthThread,
    BandwidthUnmapped,
    FirstRead,
    PagedWrites,
]
