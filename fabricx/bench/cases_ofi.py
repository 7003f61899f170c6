"""The ofi fabric on loopback, against a bare C program on the same library and provider."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import ClassVar

import fabricx as fx

from .cases_local import ACK, IMM, Pair, ping_pong
from .harness import Measure, Side, Skip
from .programs import Program

MIB = 1 << 20
WINDOW = 16
SOURCE = Path(__file__).resolve().parents[2] / "bench" / "ref" / "ofi_pingpong.c"


def compile_bare(into: str) -> str:
    """Compiles the bare program into a directory; its path.

    Raises
    ------
    Skip
        without a compiler, libfabric's headers or the source (which is in the checkout, not in the package).
    """
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise Skip("the bare libfabric program needs a C compiler")
    if not SOURCE.exists():
        raise Skip(f"the bare libfabric program is not here: {SOURCE}")
    out = str(Path(into) / "ofi_pingpong")
    done = subprocess.run(
        [compiler, "-O2", "-o", out, str(SOURCE), "-ldl"], capture_output=True, text=True, timeout=60, check=False
    )
    if done.returncode:
        raise Skip(f"the bare libfabric program does not compile (Debian: libfabric-dev): {done.stderr.strip()[:200]}")
    return out


class OfiPair(Pair):
    """An ofi engine on each side, and a bare program on each side beside it. Both spin, so that no wake-up is measured."""

    fabric = "ofi"
    options: ClassVar[dict[str, object]] = {"progress": "caller", "config": fx.Config.from_env(spin=100_000)}
    size = WINDOW * MIB

    def __init__(self, side: Side) -> None:
        self.directory = tempfile.TemporaryDirectory(prefix="fabricx-bench-")
        program = compile_bare(self.directory.name)
        try:
            super().__init__(side)
        except fx.FabricUnavailable as e:
            raise Skip(str(e)) from None
        self.engine.submit_single_write(8, None, (self.handle, 0), (self.their, 0)).wait()
        library, provider, node = chosen(self.engine)
        self.note = f"{provider}, {library}"
        self.bare = Program([program, library, provider, node])
        there = side.swap(self.bare.words("ready"))
        self.bare.number("peer " + " ".join(there))
        self.role = side.rank

    def close(self) -> None:
        self.bare.close()
        super().close()
        self.directory.cleanup()


class OfiBandwidth(OfiPair):
    """16 writes with data in flight, until the target says that it has counted them all."""

    def measures(self) -> list[Measure]:
        return [
            Measure(
                "bandwidth",
                "ofi",
                "16 in flight, each with immediate, caller",
                "GB/s",
                lambda n=n: self.window(n),
                lambda n=n: self.bare.number(f"bw {self.role} {n} {self.count(n)} {WINDOW}"),
                size=n,
                reference="bare libfabric, C",
                bar=0.95,
                at_least=True,
                note=self.note,
            )
            for n in (64 << 10, MIB)
        ]

    @staticmethod
    def count(n: int) -> int:
        return 128 * MIB // n

    def window(self, n: int) -> float:
        """GB/s at side 0, which waits for the other's word."""
        count, e = self.count(n), self.engine
        t = time.perf_counter_ns()
        if self.side.first:
            submit, src, dst = e.submit_single_write, self.handle, self.their
            ack = e.expect_imm_count(ACK, 1)
            flying: deque[fx.Transfer] = deque()
            for i in range(count):
                at = i % WINDOW * n
                if len(flying) == WINDOW:
                    flying.popleft().wait()
                flying.append(submit(n, IMM, (src, at), (dst, at)))
            ack.wait()
            for x in flying:
                x.wait()
        else:
            e.expect_imm_count(IMM, count).wait()
            e.submit_single_write(8, ACK, (self.handle, 0), (self.their, 0)).wait()
        return n * count / (time.perf_counter_ns() - t)


class OfiPingPong(OfiPair):
    """8 bytes with immediate to and fro."""

    def measures(self) -> list[Measure]:
        return [
            Measure(
                "ping-pong",
                "ofi",
                "8 B half round trip, Python, caller",
                "us",
                lambda: ping_pong(self.engine, self.handle, self.their, self.side.first, 1_000),
                lambda: self.bare.number(f"pp {self.role} 1000") / 2e3,
                size=8,
                reference="bare libfabric, C",
                bar=1.3,
                note=self.note,
            )
        ]


def chosen(engine: fx.TransferEngine) -> tuple[str, str, str]:
    """(library, provider, node) that the engine's ofi fabric uses."""
    from ..fabrics import ofi

    library = ofi.library(engine.config)
    provider, _ = ofi.choose_provider(library, engine.config)
    return library.path, provider, engine.config.ofi_address or "127.0.0.1"


CASES = [OfiBandwidth, OfiPingPong]
