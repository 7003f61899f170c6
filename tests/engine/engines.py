"""What the engine's tests share: pairs of engines in this process, and the variants of fabrics they run over."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable

import numpy as np
import pytest

import fabricx as fx

QUICK = fx.Config.from_env(timeout=10.0, connect_timeout=5.0)


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


def ofi_reason() -> str:
    """Why the ofi fabric cannot be tested here; empty when it can."""
    try:
        from fabricx.engine import fabric_class

        ok, why = fabric_class("ofi").available()
    except fx.FabricUnavailable as e:
        return f"ofi: {e}"
    return "" if ok else f"ofi: {why}"


#: ways a fabric can be used; the conformance suite (tests/fabrics) runs over all of them
VARIANTS: dict[str, dict[str, object]] = {
    "local-2nics": {"fabric": "local", "nics": 2},
    "local-4to2nics": {"fabric": "local", "a": {"nics": 4}, "b": {"nics": 2}},
    "local-chaos": {"fabric": "local", "nics": 2, "chaos": 5},
    "local-vm": {"fabric": "local", "config": {"local_reach": "vm"}},
    "local-bounce": {"fabric": "local", "config": {"local_reach": "bounce"}},
    "local-bounce-chaos": {"fabric": "local", "chaos": 6, "config": {"local_reach": "bounce"}},
    "local-busy": {"fabric": "local", "polling": "busy"},
    "ofi-2nics": {"fabric": "ofi", "nics": 2},
    "ofi-1to2nics": {"fabric": "ofi", "a": {"nics": 1}, "b": {"nics": 2}},
}
#: in a guest with Soft-RoCE devices (tests/vm) these instead: two ends on devices of their own, since a device's traffic to itself
#: takes no network
if os.environ.get("FABRICX_GUEST"):
    SLOW = {"timeout": 60.0, "connect_timeout": 30.0}
    VARIANTS = {
        "verbs": {"fabric": "verbs", "a": {"nics": ["rxe0"]}, "b": {"nics": ["rxe1"]}, "config": SLOW},
        "verbs-2nics": {"fabric": "verbs", "a": {"nics": ["rxe0", "rxe1"]}, "b": {"nics": ["rxe2", "rxe3"]}, "config": SLOW},
    }


def open_variant(name: str, make: Callable[..., Pair]) -> Pair:
    """A Pair of a variant, or a skip that says why."""
    options = dict(VARIANTS[name])
    if options["fabric"] == "ofi" and ofi_reason():
        pytest.skip(ofi_reason())
    if "config" in options:
        options["config"] = dataclasses.replace(QUICK, **options["config"])  # type: ignore[arg-type]
    if "chaos" in options:
        options["chaos"] = fx.Chaos(options["chaos"])  # type: ignore[arg-type]
    return make(**options)
