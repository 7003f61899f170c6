"""Fixtures of the engine's tests: pairs of engines in this process, and engines in processes of their own."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

import fabricx as fx

QUICK = fx.Config(timeout=10.0, connect_timeout=5.0)


def until(what: Callable[[], object], seconds: float = 5.0) -> None:
    """Wait for a condition that another thread brings about."""
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.001)


class Pair:
    """Two engines, a region in each: `a` writes into `b`."""

    def __init__(self, size: int = 1 << 20, **options: object) -> None:
        options.setdefault("config", QUICK)
        a_options = {**options, **options.pop("a", {})}  # type: ignore[dict-item]
        b_options = {**options, **options.pop("b", {})}  # type: ignore[dict-item]
        for o in (a_options, b_options):
            o.pop("a", None), o.pop("b", None)
        self.a = fx.TransferEngine(a_options.pop("fabric", "local"), name="a", **a_options)
        try:
            self.b = fx.TransferEngine(b_options.pop("fabric", "local"), name="b", **b_options)
        except BaseException:
            self.a.close()
            raise
        self.src_buf, self.dst_buf = self.a.alloc(size), self.b.alloc(size)
        self.src, self.dst = self.src_buf.array, self.dst_buf.array
        self.src[:] = np.random.default_rng(7).integers(1, 256, size, dtype=np.uint8)
        self.handle, self.back = self.a.reg_mr(self.src_buf, name="source")
        self.target, self.desc = self.b.reg_mr(self.dst_buf, name="target")

    def write(self, n: int, imm: int | None = None, at: int = 0, to: int = 0, **k: object) -> fx.Transfer:
        return self.a.submit_single_write(n, imm, (self.handle, at), (self.desc, to), **k)

    def close(self) -> None:
        self.a.close()
        self.b.close()


@pytest.fixture
def pairs() -> Iterator[Callable[..., Pair]]:
    """Makes Pairs and closes them."""
    with contextlib.ExitStack() as stack:

        def make(**options: object) -> Pair:
            p = Pair(**options)  # type: ignore[arg-type]
            stack.callback(p.close)
            return p

        yield make


@pytest.fixture(params=["thread", "caller"])
def pair(request: pytest.FixtureRequest, pairs: Callable[..., Pair]) -> Pair:
    """A Pair on the local fabric, in both ways of progress."""
    return pairs(progress=request.param)
