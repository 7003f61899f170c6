"""How a measurement is made: two processes, a core each, what is measured and its reference in turn, medians of pairs.

A case is a class (in cases_*.py) that is made on both sides, in fresh processes. Its measures have two arms, ours and the
reference; both sides run the same arm at the same time. A coordinator, which sleeps meanwhile, starts the sides, keeps the
time and makes rows of what side 0 reports. Messages are JSON with a length before it.
"""

from __future__ import annotations

import importlib
import logging
import mmap
import os
import socket
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from ..errors import FabricxError, ProtocolError, TransferTimeout

MAX_MESSAGE = 64 << 20
#: seconds for one step of a case: set-up, or one arm
STEP = 60.0
GONE = "the other side of a measurement ended"


class Skip(FabricxError):
    """A case that cannot be measured here; the message says why."""


class Row(msgspec.Struct, kw_only=True, omit_defaults=False):
    """One row of the result.

    Attributes
    ----------
    value : median of what was measured, in `unit`.
    reference, reference_value : what it is compared with ("bar": with the bar itself) and the median of that.
    ratio : median of the ratios of pairs, or value / bar; q1 and q3 are their quartiles.
    bar, holds : the ratio (or value) asked for, and whether it is met; None where nothing is asked.
    note : why it was skipped, or what else there is to say.
    """

    case: str
    fabric: str
    size: int = 0
    metric: str = ""
    value: float | None = None
    unit: str = ""
    reference: str = "bar"
    reference_value: float | None = None
    ratio: float | None = None
    q1: float | None = None
    q3: float | None = None
    bar: float | None = None
    at_least: bool = False
    holds: bool | None = None
    pairs: int = 0
    note: str = ""


@dataclass(slots=True)
class Measure:
    """One thing to measure: its arms are called on both sides; what side 0's return counts.

    Attributes
    ----------
    ours, ref : callables without arguments that give a value in `unit`; no `ref` compares with the bar itself.
    bar : of the ratio ours / ref, or of the value; `at_least` says on which side of it is good.
    invert : the ratio is ref / ours, for arms that are times where the bar speaks of speed.
    """

    case: str
    fabric: str
    metric: str
    unit: str
    ours: Callable[[], float]
    ref: Callable[[], float] | None = None
    size: int = 0
    reference: str = "bar"
    bar: float | None = None
    at_least: bool = False
    invert: bool = False
    note: Callable[[], str] | str = ""
    #: at most so many pairs, for what takes long and varies little
    most: int = 1 << 30

    def head(self) -> dict[str, Any]:
        """What the coordinator must know of it."""
        names = ("case", "fabric", "metric", "unit", "size", "reference", "bar", "at_least", "invert")
        return {n: getattr(self, n) for n in names}


class Case:
    """A case: made on every side, gives measures, is closed. `sides` is 1 or 2 processes."""

    sides = 2
    #: seconds for the whole case with 21 pairs
    limit = 300.0

    def __init__(self, side: Side) -> None:
        self.side = side

    def measures(self) -> list[Measure]:
        raise NotImplementedError

    def close(self) -> None:
        """Gives everything back."""


class Channel:
    """JSON messages over a socket, each with its length (32 bits, little-endian) before it."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    def put(self, message: Any) -> None:
        data = msgspec.json.encode(message)
        try:
            self.sock.sendall(struct.pack("<I", len(data)) + data)
        except (BrokenPipeError, ConnectionResetError):
            raise EOFError(GONE) from None

    def get(self, timeout: float = STEP) -> Any:
        """The next message. TransferTimeout, ProtocolError for a length that cannot be, EOFError when the other is gone."""
        end = time.monotonic() + timeout
        (n,) = struct.unpack("<I", self._exactly(4, end))
        if n > MAX_MESSAGE:
            raise ProtocolError(f"a message of {n} bytes; at most {MAX_MESSAGE} are possible")
        return msgspec.json.decode(self._exactly(n, end))

    def _exactly(self, n: int, end: float) -> bytes:
        out = bytearray()
        while len(out) < n:
            left = end - time.monotonic()
            if left <= 0:
                raise TransferTimeout("the other side of a measurement did not answer")
            self.sock.settimeout(left)
            try:
                got = self.sock.recv(n - len(out))
            except TimeoutError:
                continue
            except ConnectionResetError:
                got = b""
            if not got:
                raise EOFError(GONE)
            out += got
        self.sock.settimeout(None)
        return bytes(out)


class Side:
    """What a case sees of its process: which side it is, its core, and a channel to the other side.

    Attributes
    ----------
    rank : 0 or 1; side 0 reports.
    core : the core it is pinned to; `other_core` belongs to the other side, or to nobody in a case of one process.
    options : what the command line said.
    """

    def __init__(self, rank: int, cores: Sequence[int], peer: Channel | None, options: dict[str, Any]) -> None:
        self.rank, self.options = rank, options
        self.core, self.other_core = cores[rank % len(cores)], cores[(rank + 1) % len(cores)]
        self._peer = peer

    @property
    def first(self) -> bool:
        return self.rank == 0

    @property
    def peer(self) -> Channel:
        if self._peer is None:
            raise Skip("this case needs two processes")
        return self._peer

    def swap(self, value: Any) -> Any:
        """Gives `value` to the other side and returns its."""
        self.peer.put(value)
        return self.peer.get()

    def swap_bytes(self, value: bytes) -> bytes:
        return bytes.fromhex(self.swap(value.hex()))

    def sync(self) -> None:
        """Both sides are here; asleep in the kernel until then, so that the cores are free."""
        if self._peer is not None:
            self.swap(0)

    def swap_fd(self, fd: int) -> int:
        """Gives a descriptor to the other side and returns its."""
        socket.send_fds(self.peer.sock, [b"f"], [fd])
        self.peer.sock.settimeout(STEP)
        data, fds, _, _ = socket.recv_fds(self.peer.sock, 1, 1)
        self.peer.sock.settimeout(None)
        if data != b"f" or len(fds) != 1:
            raise ProtocolError("expected a descriptor")
        return fds[0]

    def unix_pair(self) -> socket.socket:
        """A stream socket to the other side."""
        if self.first:
            mine, theirs = socket.socketpair()
            os.close(self.swap_fd(theirs.fileno()))
            theirs.close()
            return mine
        with open(os.devnull) as nothing:
            return socket.socket(fileno=self.swap_fd(nothing.fileno()))

    def tcp_pair(self) -> socket.socket:
        """A TCP connection over loopback to the other side, without Nagle's delay."""
        if self.first:
            with socket.create_server(("127.0.0.1", 0)) as listener:
                self.swap(listener.getsockname()[1])
                listener.settimeout(STEP)
                sock = listener.accept()[0]
        else:
            sock = socket.create_connection(("127.0.0.1", self.swap(0)), STEP)
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock

    def shared(self, nbytes: int) -> Mapping:
        """Zeroed memory that both sides map."""
        fd = os.memfd_create("fabricx bench")
        os.ftruncate(fd, nbytes)
        theirs = self.swap_fd(fd)
        m = Mapping(fd if self.first else theirs, nbytes)
        os.close(fd)
        os.close(theirs)
        return m


class Mapping:
    """A file mapped into this process: `array` (uint8) and `addr`."""

    def __init__(self, fd: int, nbytes: int) -> None:
        self.array = np.frombuffer(mmap.mmap(fd, nbytes), np.uint8)
        self.addr = self.array.ctypes.data


# ---------------------------------------------------------------- in a side's process


def serve(spec: str, rank: int, cores: Sequence[int], up_fd: int, peer_fd: int, options: dict[str, Any]) -> None:
    """Runs one side of a case: `spec` is "package.module:Class"; reports go up `up_fd`."""
    up = Channel(socket.socket(fileno=up_fd))
    peer = Channel(socket.socket(fileno=peer_fd)) if peer_fd >= 0 else None
    case: Case | None = None
    logging.getLogger("fabricx").setLevel(logging.ERROR)  # that the other side leaves at the end is no news
    try:
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
        side = Side(rank, cores, peer, options)
        module, _, name = spec.partition(":")
        case = getattr(importlib.import_module(module), name)(side)
        for m in case.measures():
            _pairs(side, m, up, options)
        case.close()
        case = None
        up.put({"end": True})
    except Skip as e:
        _last_word(up, {"skip": str(e)})
    except EOFError as e:  # the other side says why
        _last_word(up, {"error": str(e)})
    except BaseException as e:
        if _last_word(up, {"error": f"{type(e).__name__}: {e}"}):
            raise
    finally:
        if case is not None:
            case.close()


def _last_word(up: Channel, message: dict[str, str]) -> bool:
    """Tells the coordinator why it ends here; whether it is still there to listen."""
    try:
        up.put(message)
    except EOFError:
        return False
    return True


def _pairs(side: Side, m: Measure, up: Channel, options: dict[str, Any]) -> None:
    """Measures one Measure: a warm-up, then pairs with the order of the arms changing."""
    arms = [("ours", m.ours)] + ([("ref", m.ref)] if m.ref is not None else [])
    out: dict[str, list[float]] = {"ours": [], "ref": []}
    for i in range(min(options["pairs"], m.most) + 1):
        for name, arm in arms if i % 2 else reversed(arms):
            side.sync()
            value = arm()
            if i:  # the first round warms up
                out[name].append(float(value))
    note = m.note() if callable(m.note) else m.note
    if side.first:
        up.put({"measure": m.head(), **out, "note": note})


# ---------------------------------------------------------------- in the coordinator


def row_of(report: dict[str, Any]) -> Row:
    """A row from the values of all pairs."""
    m, ours, ref = report["measure"], report["ours"], report["ref"]
    value = statistics.median(ours)
    if ref:
        ratios = [b / a if m["invert"] else a / b for a, b in zip(ours, ref, strict=True)]
        reference_value = statistics.median(ref)
    else:
        ratios = [a / m["bar"] for a in ours] if m["bar"] else []
        reference_value = None
    ratio = statistics.median(ratios) if ratios else None
    q1, q3 = quartiles(ratios) if ratios else (None, None)
    bar, holds = m["bar"], None
    if bar is not None:
        judged = ratio if ref else value
        holds = judged >= bar if m["at_least"] else judged <= bar
    names = ("case", "fabric", "size", "metric", "unit", "reference", "at_least")
    return Row(
        **{n: m[n] for n in names},
        value=value,
        reference_value=reference_value,
        ratio=ratio,
        q1=q1,
        q3=q3,
        bar=bar,
        holds=holds,
        pairs=len(ours),
        note=report["note"],
    )


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """First and third quartile, by linear interpolation; of one value, itself twice."""
    if len(values) == 1:
        return values[0], values[0]
    q = statistics.quantiles(values, n=4, method="inclusive")
    return q[0], q[2]


def cores() -> list[int]:
    """Two cores to pin to (one, twice, where there is no second)."""
    allowed = sorted(os.sched_getaffinity(0))
    return [allowed[0], allowed[1 % len(allowed)]]


def run_case(
    spec: str, fabric: str, sides: int, limit: float, options: dict[str, Any], tell: Callable[[Row], None]
) -> list[Row]:
    """Runs a case in fresh processes; rows as they come, also to `tell`. Never raises for what goes wrong inside: that is a row."""
    rows: list[Row] = []

    def add(row: Row) -> None:
        rows.append(row)
        tell(row)

    procs, ups = _start(spec, sides, options)
    end = time.monotonic() + limit
    finals: dict[int, dict[str, Any]] = {}
    grace = 0.0  # of sides that did not say that they are done; also on Ctrl-C
    try:
        while len(finals) < sides:
            i = min(set(range(sides)) - set(finals))
            late = 10.0 if finals else max(0.01, end - time.monotonic())  # when one is over, the other soon is
            try:
                message = ups[i].get(late)
            except (EOFError, TransferTimeout, ProtocolError) as e:
                message = {"gone": _cause(procs[i], e, limit)}
            if "measure" in message:
                add(row_of(message))
            else:
                finals[i] = message
        if not any("gone" in m for m in finals.values()):
            grace = 5.0
    finally:
        _stop(procs, ups, grace)
    note = _fault(finals)
    if note:
        add(Row(case=spec.partition(":")[2], fabric=fabric, note=note))
    return rows


def _cause(p: subprocess.Popen, e: Exception, limit: float) -> str:
    """Why a side says nothing any more."""
    if isinstance(e, EOFError):
        try:
            return f"ended with code {p.wait(5.0)}"
        except subprocess.TimeoutExpired:
            pass
    return f"no answer within {limit:.0f} s" if isinstance(e, TransferTimeout) else str(e)


def _fault(finals: dict[int, dict[str, Any]]) -> str:
    """One sentence of what the sides said at the end; empty when all went well. A side that only says that the other has
    gone knows nothing."""
    skips = sorted({m["skip"] for m in finals.values() if "skip" in m})
    if skips:
        return f"skipped: {'; '.join(skips)}"
    said = [(i, m.get("error") or m["gone"]) for i, m in sorted(finals.items()) if "error" in m or "gone" in m]
    known = [x for x in said if x[1] != GONE] or said
    return f"failed: {'; '.join(f'side {i}: {words}' for i, words in known)}" if known else ""


def _start(spec: str, sides: int, options: dict[str, Any]) -> tuple[list[subprocess.Popen], list[Channel]]:
    links = socket.socketpair() if sides == 2 else None
    procs, ups = [], []
    for rank in range(sides):
        mine, theirs = socket.socketpair()
        fds = [theirs.fileno()] + ([links[rank].fileno()] if links else [])
        args = {
            "spec": spec,
            "rank": rank,
            "cores": cores(),
            "up_fd": fds[0],
            "peer_fd": fds[1] if links else -1,
            "options": options,
        }
        command = [sys.executable, "-m", f"{__package__}.side", msgspec.json.encode(args).decode()]
        procs.append(subprocess.Popen(command, pass_fds=fds, stdin=subprocess.DEVNULL, env=_environment()))
        ups.append(Channel(mine))
        theirs.close()
    for s in links or ():
        s.close()
    return procs, ups


def _environment() -> dict[str, str]:
    """The sides find the same fabricx as we did, and no library starts threads of its own beside them."""
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def _stop(procs: list[subprocess.Popen], ups: list[Channel], grace: float) -> None:
    for up in ups:
        up.sock.close()
    for p in procs:
        try:
            p.wait(grace)
        except subprocess.TimeoutExpired:
            p.kill()
            p.wait(5.0)
