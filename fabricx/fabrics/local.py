"""The local fabric, control path: inboxes, handshakes over abstract Unix sockets, imported regions, deaths seen by pidfd.

One daemon thread a fabric answers peers; it never touches memory that peers write. The hot path is pyx/local.pyx.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import secrets
import select
import selectors
import signal
import socket
import struct
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from .. import _local, errors
from .base import CAP_LANDED, CAP_SYNC, Domain, DomainInfo, Fabric, GroupSpec, LocalKey, Memory, RemoteKey

log = logging.getLogger("fabricx")

_HEAD = struct.Struct("<4sHI")  # magic, version, number of the question, which its answer repeats
_MAGIC, _VERSION = b"fxLO", 2
_PACKET = 65536
_SEALS = 1 | 2 | 4  # seal, shrink, grow
_F_ADD_SEALS, _F_GET_SEALS, _SEAL_SHRINK = 1033, 1034, 2
_SLOT_BITS = 16
_CHUNK = 262_144

#: named places at which a test may have this process killed: FABRICX_FAILPOINT="name[:n]"
FAILPOINTS = {
    "local.before_copy": "a write is marked busy, nothing is copied",
    "local.after_copy_before_publish": "the payload is in place, its immediate is not published",
    "local.after_publish": "the immediate is published",
    "local.mid_message": "part of a message is in the ring, its tail is not moved",
    "local.hello_sent": "the hello is out, the answer not read",
    "local.import_sent": "a region was asked for, the answer not read",
    "local.closing": "the domain has begun to close",
}


@dataclass(frozen=True, slots=True)
class Chaos:
    """Disorder on purpose: writes are held back, carried out in another order and completed at another time.

    Parameters
    ----------
    seed : every decision is a function of (seed, peer, sequence number).
    reorder : share of the writes that are delayed.
    max_delay : longest delay, in polls of the NIC (virtual clock) or microseconds.
    drop_completion : share of the completions that get lost while a NIC is failing.
    fail_nic : index of the NIC that fails, or (index, number of the post at which it begins to).
    virtual_clock : a tick is a poll, so that a run in one process replays exactly; else real time.
    order : for exhaustive tests: whenever this many writes are held, they are carried out in this permutation.
    """

    seed: int = 0
    reorder: float = 1.0
    max_delay: int = 16
    drop_completion: float = 0.0
    fail_nic: int | tuple[int, int] | None = None
    virtual_clock: bool = True
    order: Sequence[int] | None = None

    def __post_init__(self) -> None:
        if self.order is not None and sorted(self.order) != list(range(len(self.order))):
            raise errors.OutOfRange(f"order is {list(self.order)}; it must be a permutation of 0 .. n - 1")
        for name in ("reorder", "drop_completion"):
            if not 0 <= getattr(self, name) <= 1:
                raise errors.OutOfRange(f"{name} is {getattr(self, name)}; it must be within 0 .. 1")
        if not 0 < self.max_delay < 1 << 40:
            raise errors.OutOfRange(f"max_delay is {self.max_delay}; it must be above 0")


# ---------------------------------------------------------------- messages


class Hello(msgspec.Struct, tag="hello"):
    incarnation: int  # of the target that is meant
    nic: int
    netaddr: bytes  # of the sender
    auth: bytes = b""  # reserved


class Welcome(msgspec.Struct, tag="welcome"):
    lane: int
    head: int
    pid: int
    probe_addr: int
    probe: int


class Import(msgspec.Struct, tag="import"):
    rkey: int


class Region(msgspec.Struct, tag="region"):
    addr: int
    length: int
    offset: int  # in the descriptor that comes with it
    mapped: bool


class Close(msgspec.Struct, tag="close"):
    """Shut the lane of this connection, and say when what was published has been counted."""


class Closed(msgspec.Struct, tag="closed"):
    drained: bool


class Gone(msgspec.Struct, tag="gone"):
    rkey: int


class Bye(msgspec.Struct, tag="bye"):
    pass


class Refused(msgspec.Struct, tag="refused"):
    why: str
    text: str


_Message = Hello | Welcome | Import | Region | Close | Closed | Gone | Bye | Refused
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Message).decode

_WHY: dict[str, type[errors.FabricxError]] = {
    "incarnation": errors.PeerLostError,
    "nic": errors.UnknownPeer,
    "lanes": errors.ProviderError,
    "rkey": errors.UnregisteredRemote,
    "closing": errors.PeerLostError,
    "protocol": errors.ProtocolError,
}


def _pack(m: _Message, number: int) -> bytes:
    return _HEAD.pack(_MAGIC, _VERSION, number) + _encode(m)


def _unpack(data: bytes) -> tuple[Any, int]:
    if len(data) < _HEAD.size:
        raise errors.ProtocolError(f"a packet of {len(data)} bytes")
    magic, version, number = _HEAD.unpack_from(data)
    if magic != _MAGIC:
        raise errors.ProtocolError(f"a packet that starts with {magic!r}")
    if version != _VERSION:
        raise errors.ProtocolError(f"the peer speaks version {version} of the local fabric; this fabricx speaks {_VERSION}")
    try:
        return _decode(data[_HEAD.size :]), number
    except (msgspec.DecodeError, msgspec.ValidationError) as e:
        raise errors.ProtocolError(f"a packet that makes no sense: {e}") from None


class _Conn:
    """A control connection: to a NIC that we write to (`out`), or from a sender that writes to us."""

    def __init__(self, sock: socket.socket, out: bool) -> None:
        self.sock, self.out = sock, out
        self.domain: LocalDomain | None = None
        self.peer = -1  # out: index of the peer
        self.lane = -1  # in: its lane
        self.imports: dict[int, list[int]] = {}  # out: rkey -> import keys; in: rkeys given -> []
        self.views: dict[int, list[mmap.mmap]] = {}  # out: mappings of regions, by rkey
        self.answers: list[tuple[Any, list[int]]] = []
        self.answered = threading.Condition()
        self.asking = threading.Lock()
        self.asked = 0  # number of the last question
        self.waiting = 0  # of the one that is waited for; an answer to another comes too late
        self.serving = 0  # of the one that is being answered
        self.pid = 0
        self.pidfd = -1
        self.who = ""
        self.dead = False
        self.closing = False

    def send(self, m: _Message, fds: Sequence[int] = (), number: int = 0) -> None:
        socket.send_fds(self.sock, [_pack(m, number)], list(fds))

    def reply(self, m: _Message, fds: Sequence[int] = (), number: int | None = None) -> None:
        """Answers the question that is being served."""
        self.send(m, fds, self.serving if number is None else number)

    def ask(self, m: _Message, deadline: float, what: str, failpoint: str = "") -> tuple[Any, list[int]]:
        """One request and its answer, which the fabric's thread reads."""
        with self.asking:
            with self.answered:
                self.asked = self.asked % 0xFFFFFFFF + 1
                self.waiting = self.asked
            try:
                try:
                    self.send(m, (), self.waiting)
                except OSError as e:
                    raise errors.PeerLostError(f"{what}: {self.who} does not answer: {e.strerror}") from e
                _die_at(failpoint)
                with self.answered:
                    while not self.answers and not self.dead:
                        left = deadline - time.monotonic()
                        if left <= 0:
                            raise errors.TransferTimeout(f"{what}: {self.who} did not answer in time")
                        self.answered.wait(left)
                    if not self.answers:
                        raise errors.PeerLostError(f"{what}: {self.who} is gone")
                    answer, fds = self.answers.pop(0)
            finally:
                with self.answered:
                    self.waiting = 0
                    late, self.answers = self.answers, []
                for _, left_over in late:
                    for fd in left_over:
                        os.close(fd)
        if isinstance(answer, Refused):
            for fd in fds:
                os.close(fd)
            raise _WHY.get(answer.why, errors.ProtocolError)(f"{what}: {self.who}: {answer.text}")
        return answer, fds


def _die_at(name: str) -> None:
    wanted = os.environ.get("FABRICX_FAILPOINT", "")
    if wanted and wanted.removeprefix("stop=").partition(":")[0] == name:
        os.kill(os.getpid(), signal.SIGSTOP if wanted.startswith("stop=") else signal.SIGKILL)


class _Group:
    """What the NICs of one device share: inbox, listening socket, registrations."""

    def __init__(self, fabric: LocalFabric, spec: GroupSpec) -> None:
        self.fabric, self.spec = fabric, spec
        self.fd = os.memfd_create("fabricx-inbox", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, _local.INBOX_SIZE)
        fcntl.fcntl(self.fd, _F_ADD_SEALS, _SEALS)
        self.map = mmap.mmap(self.fd, _local.INBOX_SIZE)
        self.inbox = _local.Inbox(self.map, spec.incarnation)
        self.name = b"\0fabricx/" + secrets.token_hex(12).encode()
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(self.name)
        self.listener.listen(128)
        self.listener.setblocking(False)
        self.domains: list[LocalDomain] = []
        self.regions: dict[int, Memory] = {}
        self.free_slots: list[int] = []
        self.next_slot = 0
        self.lock = threading.Lock()
        self.conns: dict[int, _Conn] = {}  # lane -> connection of its sender
        self.open_domains = 0

    def close(self) -> None:
        self.fabric.forget(self)
        os.close(self.fd)
        self.regions.clear()


class LocalDomain(Domain):
    """One virtual NIC of the local fabric."""

    def __init__(self, group: _Group, nic: int, chaos: Any) -> None:
        self.group, self.nic = group, nic
        self.state = _local.LocalState(group.inbox, nic, chaos, os.environ.get("FABRICX_FAILPOINT", ""))
        self.probe = secrets.randbits(63) | 1
        self.state.set_probe(self.probe)
        self.ops, self.dom, self.bell = self.state.ops, self.state.dom, group.inbox.bell
        caps = CAP_LANDED | (0 if chaos is not None else CAP_SYNC)
        self.info = DomainInfo(f"local{nic}", "fabricx local", caps, 1 << 62, depth=512 if chaos is not None else 4096, chunk=_CHUNK, run=8)
        self.addr = struct.pack("<B", nic) + group.name[1:]
        self.conns: dict[int, _Conn] = {}  # peer index -> connection
        self.by_addr: dict[tuple[bytes, bytes], _Conn] = {}
        self.maps: dict[int, list[Any]] = {}  # peer index -> mappings
        self.connecting = threading.Lock()
        self.closed = False

    # -- registration

    def reg(self, memory: Memory) -> LocalKey:
        g = self.group
        if memory.length <= 0:
            raise errors.RegistrationError(22, f"{memory.length} bytes at {memory.addr:#x} cannot be registered")
        if memory.device != "cpu":
            raise errors.RegistrationError(95, f"{self.info.name} reaches host memory only, not {memory.device}")
        with g.lock:
            if g.free_slots:
                slot = g.free_slots.pop()
            elif g.next_slot < _local.N_REGIONS:
                slot = g.next_slot
                g.next_slot += 1
            else:
                raise errors.RegistrationError(
                    28, f"{memory.length} bytes at {memory.addr:#x}: all {_local.N_REGIONS} registrations of {g.spec.device} are in use"
                )
            rkey = (secrets.randbits(47) | 1 << 47) << _SLOT_BITS | slot
            g.regions[rkey] = memory
        if not memory.readonly:
            g.inbox.set_region(rkey, memory.addr, memory.length)
        return LocalKey(0, rkey, memory)

    def dereg(self, key: LocalKey, deadline: float) -> None:
        g = self.group
        if key.rkey not in g.regions:
            return
        g.inbox.clear_region(key.rkey)
        try:
            self._door(g.inbox.lanes(), deadline, f"{key.token.length} bytes at {key.token.addr:#x}")
        except errors.TransferTimeout:
            g.inbox.restore_region(key.rkey)
            raise
        with g.spec.lock():
            g.inbox.wipe_region(key.rkey)
        with g.lock:
            if g.regions.pop(key.rkey, None) is None:
                return  # another thread was quicker
            g.free_slots.append(key.rkey & (_local.N_REGIONS - 1))
        for c in list(g.conns.values()):
            if c.imports.pop(key.rkey, None) is not None:
                try:
                    c.send(Gone(key.rkey))
                except OSError:
                    pass  # it is going itself

    def _door(self, lanes: Sequence[int], deadline: float, what: str) -> None:
        """Waits until every sender that was in the middle of a write has left it."""
        busy = {i: b for i in lanes if (b := self.group.inbox.busy(i))}
        pause = 2e-6
        while busy:
            for i, b in list(busy.items()):
                c = self.group.conns.get(i)
                if self.group.inbox.busy(i) != b or c is None or c.dead or _pid_gone(c.pidfd):
                    del busy[i]
            if busy and time.monotonic() > deadline:
                who = ", ".join(self.group.conns[i].who for i in busy if i in self.group.conns)
                raise errors.TransferTimeout(f"{what}: {who} is in the middle of a write there; the memory must not be reused")
            if busy:
                time.sleep(pause)
                pause = min(pause * 2, 0.002)

    # -- peers

    def connect(self, addr: bytes, netaddr: bytes, deadline: float) -> int:
        key = (addr, netaddr)
        if not self.connecting.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise errors.TransferTimeout("another handshake of this NIC takes too long")
        try:
            known = self.by_addr.get(key)
            if known is not None and not known.dead:
                return known.peer
            conn = self._handshake(addr, netaddr, deadline)
            self.by_addr[key] = conn
            return conn.peer
        finally:
            self.connecting.release()

    def _handshake(self, addr: bytes, netaddr: bytes, deadline: float) -> _Conn:
        from ..address import NetAddr

        who = NetAddr.from_bytes(netaddr)
        if len(addr) < 2:
            raise errors.UnknownPeer(f"{who}: {addr!r} is no address of the local fabric")
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        conn = _Conn(sock, out=True)
        conn.domain, conn.who = self, str(who)
        try:
            self._dial(sock, addr, who, deadline)
            pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            if uid != os.geteuid():
                raise errors.UnknownPeer(f"{who} belongs to user {uid}, this process to {os.geteuid()}")
            conn.pid, conn.pidfd = pid, os.pidfd_open(pid)
        except ProcessLookupError:
            sock.close()
            raise errors.PeerLostError(f"{who} is gone") from None
        except BaseException:
            sock.close()
            raise
        self.group.fabric.watch(conn)
        fds: list[int] = []
        try:
            hello = Hello(who.incarnation, addr[0], self.group.spec.address())
            welcome, fds = conn.ask(hello, deadline, "handshake", "local.hello_sent")
            if not isinstance(welcome, Welcome) or len(fds) != 1 or welcome.lane >= _local.N_LANES:
                raise errors.ProtocolError(f"{who} answers a hello with {type(welcome).__name__}")
            box = self._map(fds[0], _local.INBOX_SIZE, str(who))
            if not self.state.check_box(box, who.incarnation):
                raise errors.ProtocolError(f"{who}: its inbox has another magic, version or incarnation")
            vm = self.group.spec.config.vm_write and _local.may_read(welcome.pid, welcome.probe_addr, welcome.probe)
            src = self.group.spec.source_of(netaddr)
            with self.group.spec.lock():
                index = self.state.add_peer(box, welcome.lane, welcome.head, addr[0], conn.pid, conn.pidfd, src, vm)
            if index is None:
                raise errors.ProviderError(f"{self.info.name} has no room for another peer")
            conn.peer = index
            self.conns[index] = conn
            self.maps[index] = [box]
            conn.vm = vm  # type: ignore[attr-defined]
            if conn.dead:
                raise errors.PeerLostError(f"{who} died during the handshake")
            return conn
        except BaseException:
            self.group.fabric.drop(conn)
            raise
        finally:
            for fd in fds:
                os.close(fd)

    def _dial(self, sock: socket.socket, addr: bytes, who: Any, deadline: float) -> None:
        pause = 0.001
        while True:
            try:
                sock.setblocking(False)
                sock.connect(b"\0" + addr[1:])
                return
            except BlockingIOError:  # its backlog is full
                if time.monotonic() > deadline:
                    raise errors.TransferTimeout(f"{who} does not take connections") from None
                time.sleep(pause)
                pause = min(pause * 2, 0.05)
            except (ConnectionRefusedError, FileNotFoundError):
                raise errors.PeerLostError(f"{who} is not there (any more)") from None

    @staticmethod
    def _map(fd: int, size: int, who: str) -> mmap.mmap:
        """Maps a descriptor of a peer, once it is certain that nobody can shrink it under us."""
        try:
            seals = fcntl.fcntl(fd, _F_GET_SEALS)
        except OSError:
            seals = 0
        if not seals & _SEAL_SHRINK:
            raise errors.ProtocolError(f"{who} sent a descriptor that is not sealed")
        if os.fstat(fd).st_size < size:
            raise errors.ProtocolError(f"{who} sent a descriptor of {os.fstat(fd).st_size} bytes; {size} were promised")
        return mmap.mmap(fd, size)

    def disconnect(self, peer: int) -> None:
        conn = self.conns.get(peer)
        if conn is not None:
            self.lose(conn, tell=False)
            self.group.fabric.drop(conn, bye=True)

    def lose(self, conn: _Conn, tell: bool) -> None:
        """The peer of an outgoing connection is gone, or given up."""
        if conn.peer >= 0:
            with self.group.spec.lock():
                self.state.kill_peer(conn.peer, tell)
            self.group.spec.kick()

    # -- imports

    def import_mr(self, peer: int, rkey: int, base: int, length: int, deadline: float) -> RemoteKey:
        conn = self.conns.get(peer)
        if conn is None or conn.dead:
            raise errors.PeerLostError(f"peer {peer} of {self.info.name} is lost")
        region, fds = conn.ask(Import(rkey), deadline, f"region of {length} bytes at {base:#x}", "local.import_sent")
        try:
            if not isinstance(region, Region):
                raise errors.ProtocolError(f"{conn.who} answers an import with {type(region).__name__}")
            if (region.addr, region.length) != (base, length):
                raise errors.UnregisteredRemote(
                    f"{conn.who}: its key stands for {region.length} bytes at {region.addr:#x}, not for {length} at {base:#x}"
                )
            addr, mode = self._reach(conn, region, fds, rkey)
        finally:
            for fd in fds:
                os.close(fd)
        with self.group.spec.lock():
            index = self.state.add_import(rkey, addr, length, mode, peer)
        if index is None:
            raise errors.ProviderError(f"{self.info.name} has imported as many regions as it can")
        conn.imports.setdefault(rkey, []).append(index)
        return RemoteKey(0, index, (conn, rkey))

    def _reach(self, conn: _Conn, region: Region, fds: list[int], rkey: int) -> tuple[int, str]:
        """Where and how writes into the region go."""
        forced = self.group.spec.config.local_reach
        if forced == "bounce":
            return 0, "bounce"
        if forced == "vm":
            return region.addr, "vm"
        if conn.pid == os.getpid():
            return region.addr, "map"
        if region.mapped and len(fds) == 1:
            page = mmap.PAGESIZE
            start = region.offset - region.offset % page
            size = region.offset + region.length - start
            self._map(fds[0], region.offset + region.length, conn.who).close()
            view = mmap.mmap(fds[0], size, offset=start)
            conn.views.setdefault(rkey, []).append(view)
            return np.frombuffer(view, np.uint8).ctypes.data + region.offset - start, "map"
        if conn.vm:  # type: ignore[attr-defined]
            return region.addr, "vm"
        log.info("%s: no right to write into %s directly; payload goes through the bounce lane", self.info.name, conn.who)
        return 0, "bounce"

    def release_mr(self, peer: int, key: RemoteKey) -> None:
        conn, rkey = key.token
        with self.group.spec.lock():
            self.state.drop_import(key.key)
        keys = conn.imports.get(rkey)
        if keys and key.key in keys:
            keys.remove(key.key)
            if not keys:
                conn.views.pop(rkey, None)  # unmapped with its last reference

    def is_gone(self, peer: int, key: RemoteKey) -> bool:
        with self.group.spec.lock():
            return bool(self.state.import_gone(key.key))

    # -- failures

    def recover(self, peer: int, ctxs: np.ndarray, deadline: float) -> np.ndarray:
        conn = self.conns.get(peer)
        if conn is not None and not conn.dead:
            closed, _ = conn.ask(Close(), deadline, "closing a lane")
            if not isinstance(closed, Closed) or not closed.drained:
                raise errors.TransferTimeout(f"{conn.who} did not drain the lane")
        with self.group.spec.lock():
            return self.state.recovered(peer, np.ascontiguousarray(ctxs, np.uint64))

    def peers(self) -> list[dict[str, Any]]:
        with self.group.spec.lock():
            rows = self.state.peers()
        for r in rows:
            c = self.conns.get(r["index"])
            r["addr"] = c.who if c is not None else "?"
        return rows

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        _die_at("local.closing")
        for conn in list(self.conns.values()):
            self.group.fabric.drop(conn, bye=True)
        self.group.open_domains -= 1
        if self.group.open_domains == 0:
            self.group.close()


def _pid_gone(pidfd: int) -> bool:
    if pidfd < 0:
        return True
    p = select.poll()
    p.register(pidfd, select.POLLIN)
    return bool(p.poll(0))


class LocalFabric(Fabric):
    """Peers on this host: the default that needs nothing installed."""

    name = "local"

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self.wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.selector.register(self.wake, selectors.EVENT_READ, ("wake", None))
        self.jobs: list[Any] = []
        self.lock = threading.Lock()
        self.groups: list[_Group] = []
        self.conns: set[_Conn] = set()
        self.stop = False
        self.closed = False
        self.pid = os.getpid()
        self.thread = threading.Thread(target=self._run, name="fabricx local", daemon=True)
        self.thread.start()
        _fabrics.add(self)

    @classmethod
    def available(cls) -> tuple[bool, str]:
        if not hasattr(os, "memfd_create") or not hasattr(os, "pidfd_open"):
            return False, "this system has no memfd_create or pidfd_open (Linux 5.3 or newer is needed)"
        return True, "always there"

    def open(self, spec: GroupSpec) -> list[Domain]:
        n = spec.nics if isinstance(spec.nics, int) else len(spec.nics)
        chaos = None
        if spec.chaos is not None:
            c: Chaos = spec.chaos
            nic, after = (-1, 0) if c.fail_nic is None else (c.fail_nic, 1) if isinstance(c.fail_nic, int) else c.fail_nic
            chaos = _local.ChaosState(
                c.seed & (1 << 64) - 1, c.reorder, c.max_delay, c.drop_completion, nic, after, c.virtual_clock, c.order
            )
        group = _Group(self, spec)
        group.domains = [LocalDomain(group, i, chaos) for i in range(n)]
        group.open_domains = n
        self.groups.append(group)
        self._do(lambda: self.selector.register(group.listener, selectors.EVENT_READ, ("listen", group)))
        return list(group.domains)

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        if os.getpid() != self.pid:
            return
        self.stop = True
        os.eventfd_write(self.wake, 1)
        if threading.current_thread() is not self.thread:
            self.thread.join(10)
        for c in list(self.conns):
            self._shut(c)
        self.selector.close()
        os.close(self.wake)

    # -- the fabric's thread

    def _do(self, job: Any) -> None:
        with self.lock:
            self.jobs.append(job)
        os.eventfd_write(self.wake, 1)

    def _run(self) -> None:
        while not self.stop:
            for key, _ in self.selector.select(None):
                kind, what = key.data
                try:
                    if kind == "wake":
                        os.eventfd_read(self.wake)
                    elif kind == "listen":
                        self._accept(what)
                    elif kind == "conn":
                        self._read(what)
                    elif kind == "pid":
                        self._died(what)
                except Exception:
                    log.exception("local fabric: %s", kind)
            with self.lock:
                jobs, self.jobs = self.jobs, []
            for job in jobs:
                try:
                    job()
                except Exception:
                    log.exception("local fabric")

    def watch(self, conn: _Conn) -> None:
        conn.sock.setblocking(False)
        self.conns.add(conn)

        def job() -> None:
            if conn.dead:
                return
            self.selector.register(conn.sock, selectors.EVENT_READ, ("conn", conn))
            if conn.pidfd >= 0:
                self.selector.register(conn.pidfd, selectors.EVENT_READ, ("pid", conn))

        self._do(job)

    def drop(self, conn: _Conn, bye: bool = False) -> None:
        """Ends a connection on purpose."""
        if bye:
            try:
                conn.send(Bye())
            except OSError:
                pass
        conn.closing = True
        done = threading.Event()

        def job() -> None:
            self._shut(conn)
            done.set()

        if threading.current_thread() is self.thread or self.stop:
            job()
        else:
            self._do(job)
            done.wait(5)

    def _shut(self, conn: _Conn) -> None:
        """Forgets a connection; its descriptors are closed once."""
        if conn not in self.conns:
            return
        self.conns.discard(conn)
        for f in (conn.sock, conn.pidfd):
            try:
                self.selector.unregister(f)
            except (KeyError, ValueError):
                pass
        with conn.answered:
            conn.dead = True
            conn.answered.notify_all()
        conn.sock.close()
        if conn.out and conn.domain is not None:
            d = conn.domain
            if conn.peer >= 0:
                with d.group.spec.lock():
                    d.state.kill_peer(conn.peer, False)
                    d.state.drop_peer(conn.peer)
                if d.conns.get(conn.peer) is conn:
                    del d.conns[conn.peer]
                conn.views.clear()
                d.maps.pop(conn.peer, None)  # its inbox: nobody looks at a dead peer's
            for k, c in list(d.by_addr.items()):
                if c is conn:
                    del d.by_addr[k]
        if conn.pidfd >= 0:
            os.close(conn.pidfd)
            conn.pidfd = -1

    def forget(self, group: _Group) -> None:
        """A group closes: nobody may connect any more, its senders are cut off."""
        done = threading.Event()

        def job() -> None:
            try:
                self.selector.unregister(group.listener)
            except (KeyError, ValueError):
                pass
            group.listener.close()
            for c in list(group.conns.values()):
                self._shut(c)
            done.set()

        self.groups.remove(group)
        if threading.current_thread() is self.thread or self.stop:
            job()
        else:
            self._do(job)
            done.wait(5)

    def _accept(self, group: _Group) -> None:
        try:
            sock, _ = group.listener.accept()
        except (BlockingIOError, OSError):
            return
        pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if uid != os.geteuid():
            log.warning("local fabric: refused a connection of user %d", uid)
            sock.close()
            return
        conn = _Conn(sock, out=False)
        conn.pid, conn.who = pid, f"pid {pid}"
        conn.group = group  # type: ignore[attr-defined]
        try:
            conn.pidfd = os.pidfd_open(pid)
        except OSError:
            sock.close()
            return
        sock.setblocking(False)
        self.conns.add(conn)
        self.selector.register(sock, selectors.EVENT_READ, ("conn", conn))
        self.selector.register(conn.pidfd, selectors.EVENT_READ, ("pid", conn))

    def _read(self, conn: _Conn) -> None:
        fds: list[int] = []
        try:
            data, fds, _, _ = socket.recv_fds(conn.sock, _PACKET, 4)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._died(conn)
            return
        try:
            m, number = _unpack(data)
            if conn.out:
                if self._answer(conn, m, fds, number):
                    fds = []
            else:
                conn.serving = number
                self._serve(conn, m)
        except errors.ProtocolError as e:
            log.warning("local fabric: %s: %s", conn.who, e)
            try:
                conn.send(Refused("protocol", str(e)))
            except OSError:
                pass
            self._died(conn)
        except OSError:
            self._died(conn)  # it left while it was being answered
        finally:
            for fd in fds:
                os.close(fd)

    def _answer(self, conn: _Conn, m: Any, fds: list[int], number: int) -> bool:
        """Whether the descriptors were taken."""
        if isinstance(m, Gone):
            assert conn.domain is not None
            with conn.domain.group.spec.lock():
                for key in conn.imports.pop(m.rkey, ()):
                    conn.domain.state.drop_import(key)
            conn.views.pop(m.rkey, None)
            return False
        if isinstance(m, Bye):
            self._died(conn)
            return False
        with conn.answered:
            if number == 0 and isinstance(m, Refused):
                number = conn.waiting  # of what could not be read
            if number == 0 or number != conn.waiting:
                return False  # nobody waits for it any more
            conn.answers.append((m, fds))
            conn.answered.notify_all()
        return True

    def _died(self, conn: _Conn) -> None:
        """The process at the other end is gone, or has closed."""
        if conn not in self.conns:
            return
        if conn.out:
            if conn.domain is not None:
                conn.domain.lose(conn, tell=not conn.closing)
            self._shut(conn)
            return
        group: _Group = conn.group  # type: ignore[attr-defined]
        if conn.lane >= 0:
            group.conns.pop(conn.lane, None)
            with group.spec.lock():
                group.inbox.shut_lane(conn.lane)
                group.inbox.end_lane(conn.lane)
            group.spec.kick()
        self._shut(conn)

    def _serve(self, conn: _Conn, m: Any) -> None:
        group: _Group = conn.group  # type: ignore[attr-defined]
        if isinstance(m, Hello):
            self._welcome(group, conn, m)
        elif conn.lane < 0:
            raise errors.ProtocolError(f"{type(m).__name__} before hello")
        elif isinstance(m, Import):
            mem = group.regions.get(m.rkey)
            if mem is not None and mem.readonly:
                conn.reply(Refused("rkey", "the region is read-only memory: a source, not a target"))
                return
            if mem is None:
                conn.reply(Refused("rkey", f"no region has the key {m.rkey:#x} (any more)"))
                return
            conn.imports[m.rkey] = []
            mapped = mem.fd >= 0 and _sealed(mem.fd)
            conn.reply(Region(mem.addr, mem.length, mem.fd_offset, mapped), [mem.fd] if mapped else [])
        elif isinstance(m, Close):
            group.inbox.shut_lane(conn.lane)
            threading.Thread(target=self._drain, args=(group, conn, conn.serving), name="fabricx local drain", daemon=True).start()
        elif isinstance(m, Bye):
            self._died(conn)
        else:
            raise errors.ProtocolError(f"{type(m).__name__} is no request")

    def _drain(self, group: _Group, conn: _Conn, number: int) -> None:
        end = time.monotonic() + group.spec.config.connect_timeout
        try:
            group.domains[0]._door([conn.lane], end, "closing a lane")
            while not group.inbox.drained(conn.lane) and time.monotonic() < end:
                group.spec.kick()
                time.sleep(0.0002)
            conn.reply(Closed(group.inbox.drained(conn.lane)), (), number)
        except (OSError, errors.TransferTimeout):
            try:
                conn.reply(Closed(False), (), number)
            except OSError:
                pass

    def _welcome(self, group: _Group, conn: _Conn, m: Hello) -> None:
        if m.incarnation != group.spec.incarnation:
            conn.reply(Refused("incarnation", f"incarnation {m.incarnation:016x} is over; this is {group.spec.incarnation:016x}"))
            return
        if m.nic >= len(group.domains):
            conn.reply(Refused("nic", f"there is no NIC {m.nic}; there are {len(group.domains)}"))
            return
        if conn.lane >= 0:
            raise errors.ProtocolError("a second hello")
        src = group.spec.source_of(m.netaddr)
        with group.spec.lock():
            lane = group.inbox.open_lane(m.nic, src)
        if lane is None:
            conn.reply(Refused("lanes", f"all {_local.N_LANES} lanes are taken"))
            return
        conn.lane = lane[0]
        group.conns[conn.lane] = conn
        try:
            from ..address import NetAddr

            conn.who = str(NetAddr.from_bytes(m.netaddr))
        except errors.ProtocolError:
            pass
        d = group.domains[m.nic]
        conn.reply(Welcome(lane[0], lane[1], os.getpid(), d.state.probe_addr, d.probe), [group.fd])


def _sealed(fd: int) -> bool:
    try:
        return bool(fcntl.fcntl(fd, _F_GET_SEALS) & _SEAL_SHRINK)
    except OSError:
        return False


_fabrics: weakref.WeakSet[LocalFabric] = weakref.WeakSet()


def _after_fork() -> None:
    """In the child: close what the parent's fabrics hold, without a word to their peers."""
    for f in list(_fabrics):
        f.closed = f.stop = True
        for c in list(f.conns):
            for fd in (c.sock.detach(), c.pidfd):
                if fd >= 0:
                    os.close(fd)
            c.pidfd = -1
        for g in f.groups:
            fd = g.listener.detach()
            if fd >= 0:
                os.close(fd)
        f.conns.clear()


os.register_at_fork(after_in_child=_after_fork)
