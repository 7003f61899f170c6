"""A verbs domain without an engine: its table of C functions is called step by step, and nothing polls but the test."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import fabricx as fx
from fabricx import _drive
from fabricx.fabrics.base import GroupSpec, Memory
from fabricx.fabrics.verbs import VerbsFabric

SIZE = 1 << 20
_SECONDS = 20.0


class Bare:
    """One domain with a region of SIZE bytes; completions that nobody asked for yet are in `seen`."""

    def __init__(self, nic: str, **config: object) -> None:
        self.lock = threading.Lock()
        self.seen: list[Any] = []
        self.numbers: dict[bytes, int] = {}
        self.fabric = VerbsFabric()
        self.incarnation = secrets.randbits(64)
        spec = GroupSpec(
            device="cpu:0",
            nics=[nic],
            address=lambda: self.netaddr.to_bytes(),
            source_of=lambda b: self.numbers.setdefault(b, len(self.numbers)),
            lock=lambda: self.lock,
            kick=lambda: None,
            config=fx.Config(**config),  # type: ignore[arg-type]
            incarnation=self.incarnation,
        )
        self.domain = self.fabric.open(spec)[0]
        self.netaddr = fx.NetAddr("verbs", self.incarnation, "cpu:0", "host", 1, (self.domain.addr,))
        self.driver = _drive.Driver(self.domain.ops, self.domain.dom)
        self.memory = np.zeros(SIZE, np.uint8)
        self.address = self.memory.ctypes.data
        self.key = self.domain.reg(Memory(self.address, SIZE))

    def poll(self) -> list[Any]:
        """New completions, which are also kept."""
        with self.lock:
            new = self.driver.poll()
        self.seen += new
        return new

    def of(self, kind: int) -> list[Any]:
        return [c for c in self.seen if c.kind == kind]

    def to(self, other: Bare) -> Link:
        """Connects to another domain and imports its region."""
        peer = both(self, other, lambda: self.domain.connect(other.domain.addr, other.netaddr.to_bytes(), soon()))
        remote = both(
            self,
            other,
            lambda: self.domain.import_mr(peer, other.key.rkey, other.address, SIZE, time.monotonic() + 10),
        )
        qp = next(p for p in self.domain.pairs.values() if p.index == peer).data
        return Link(self, peer, remote.key, qp)

    def close(self) -> None:
        self.domain.close()
        self.fabric.close()


class Link:
    """A peer as a domain sees it, and its region."""

    def __init__(self, source: Bare, peer: int, rkey: int, qp: Any) -> None:
        self.source, self.peer, self.rkey, self.qp = source, peer, rkey, qp

    def write(self, n: int, imm: int | None = None, ctx: int = 0, at: int = 0, to: int = 0) -> int:
        s = self.source
        w = _drive.Write(s.address + at, n, to, self.peer, self.rkey, imm, ctx, 0, s.key.lkey)
        with s.lock:
            return s.driver.post_write(w)

    def many(self, writes: list[tuple[int, int | None, int]]) -> list[int]:
        """(bytes, immediate, ctx) of each."""
        s = self.source
        ws = [_drive.Write(s.address, n, 0, self.peer, self.rkey, imm, ctx, 0, s.key.lkey) for n, imm, ctx in writes]
        with s.lock:
            return s.driver.post_many(ws)

    def pages(self, n: int, count: int, imm: int | None = None, ctx: int = 0, si: Any = None, di: Any = None) -> Any:
        s = self.source
        p = _drive.Pages(s.address, 0, n, count, self.peer, self.rkey, si=si, di=di, imm=imm, ctx=ctx, lkey=s.key.lkey)
        with s.lock:
            self.rc = s.driver.post_pages(p)
        return p


def soon() -> float:
    """A deadline."""
    return time.monotonic() + 10


def both(a: Bare, b: Bare, what: Callable[[], Any]) -> Any:
    """Does what needs both sides to poll."""
    out: list[Any] = []

    def run() -> None:
        try:
            out.append(what())
        except Exception as e:
            out.append(e)

    t = threading.Thread(target=run)
    t.start()
    end = time.monotonic() + _SECONDS
    while t.is_alive():
        assert time.monotonic() < end, "neither an answer nor a time-out"
        a.poll()
        b.poll()
        t.join(0.0002)
    if isinstance(out[0], Exception):
        raise out[0]
    return out[0]


def settle(*domains: Bare) -> None:
    """Polls until there is nothing more to do."""
    idle = 0
    while idle < 3:
        idle = 0 if any(d.poll() for d in domains) else idle + 1
