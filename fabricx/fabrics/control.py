"""The control path of fabrics whose NICs talk by messages (ofi, verbs): registrations and their importers, the handshake,
the thread that answers it. What a message is made of and how it is posted is in pyx/ctl_*.pxi.
"""

from __future__ import annotations

import logging
import os
import secrets
import selectors
import socket
import struct
import threading
import time
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from .. import errors
from ..address import NetAddr
from .base import Domain, Fabric, GroupSpec, LocalKey, Memory, RemoteKey
from .links import Links, route_host

log = logging.getLogger("fabricx")

_SLOT_BITS = 16
N_REGIONS = 1 << _SLOT_BITS
_HELLO_FIRST, _HELLO_MOST = 0.05, 1.0  # seconds between hellos: first, and after back-off
_TELL_AGAIN = 0.2  # seconds after which importers that have not let go of a region are told again
_DRAIN, _DRAIN_MOST = 0.05, 5.0  # seconds in which nothing arrives, after which a peer that is gone is lost; at most so long
_AUTHENTICATOR = 256  # bytes that a hello may carry in the field kept for one
REFUSALS = {1: "incarnation", 2: "version", 3: "full", 4: "garbage"}


class ControlDomain(Domain):
    """A NIC with a control protocol. A subclass sets `state` (a CtlState), `info`, `ops`, `dom` and `addr`."""

    state: Any

    def __init__(self, fabric: ControlFabric, spec: GroupSpec) -> None:
        self.fabric, self.spec = fabric, spec
        self.regions: dict[int, tuple[Any, Memory]] = {}  # rkey -> (registration, memory)
        self.free_slots: list[int] = []
        self.next_slot = 0
        self.slots = threading.Lock()
        self.asking = threading.Lock()
        self.names: dict[int, str] = {}
        self.link = ""  # where peers connect to see our death
        self.closed = False

    # -- what a subclass does in its own way

    @abstractmethod
    def drop_region(self, rkey: int, mr: Any) -> int:
        """Ends a registration with the provider; minus an errno if it refuses. The progress lock is held."""

    @abstractmethod
    def free_mr(self, mr: Any) -> None:
        """Ends a registration of a domain that closes. The progress lock is held."""

    @abstractmethod
    def poll(self) -> None:
        """Polls once for the control messages' sake; the worker has stopped. The progress lock is held."""

    def link_host(self) -> str:
        """The IP address of this host that peers of this NIC can connect to."""
        return route_host()

    leaving: Sequence[Any] = ()  #: what `tidy` has to come back to

    def tidy(self) -> None:
        """Clears away what lost peers leave behind; on the fabric's thread, after a loss, and as long as `leaving` is not empty."""

    def joined(self, index: int, addr: bytes, incarnation: int) -> bool:
        """A hello has come from a peer, and is about to be answered: whether it can be. The progress lock is held."""
        return True

    @abstractmethod
    def strerror(self, rc: int) -> str:
        """The provider's word for an error."""

    # -- registration

    def take_slot(self) -> tuple[int, int]:
        """(slot, remote key) for a new region; the key is 48 random bits, then the slot."""
        with self.slots:
            if self.free_slots:
                slot = self.free_slots.pop()
            elif self.next_slot < N_REGIONS:
                slot = self.next_slot
                self.next_slot += 1
            else:
                raise errors.RegistrationError(28, f"all {N_REGIONS} registrations of {self.info.name} are in use")
        return slot, (secrets.randbits(47) | 1 << 47) << _SLOT_BITS | slot

    def give_slot(self, slot: int) -> None:
        with self.slots:
            self.free_slots.append(slot)

    def dereg(self, key: LocalKey, deadline: float) -> None:
        if key.rkey not in self.regions:
            return
        pause, again = 0.0001, 0.0
        while True:
            now = time.monotonic()
            self._open(f"{key.token.length} bytes at {key.token.addr:#x}")
            with self.spec.lock():
                waiting = self.state.gone(key.rkey, now >= again > 0)
                if waiting and now > deadline:
                    self.state.keep_region(key.rkey)
            if not waiting:
                break
            if now > deadline:
                raise errors.TransferTimeout(
                    f"{key.token.length} bytes at {key.token.addr:#x}: {waiting} peers have not let go; "
                    "the memory must not be reused"
                )
            if now >= again:
                again = now + _TELL_AGAIN
            self.spec.kick()
            time.sleep(pause)
            pause = min(pause * 2, 0.005)
        with self.spec.lock():
            entry = self.regions.pop(key.rkey, None)
            if entry is None:  # closed with its domain
                return
            mr, memory = entry
            rc = self.drop_region(key.rkey, mr)
        if rc:
            raise errors.RegistrationError(
                -rc, f"{self.info.name}: {memory.length} bytes at {memory.addr:#x}: {self.strerror(rc)}"
            )
        self.give_slot(key.rkey & (N_REGIONS - 1))

    def _open(self, what: object) -> None:
        """Ends what waits while another thread closes the domain."""
        if self.closed:
            raise errors.EngineClosed(f"{what}: {self.info.name} was closed meanwhile")

    # -- peers

    def connect(self, addr: bytes, netaddr: bytes, deadline: float) -> int:
        who = NetAddr.from_bytes(netaddr)
        src = self.spec.source_of(netaddr)
        try:
            with self.spec.lock():
                index = self.state.peer(addr, who.incarnation, src)
        except OSError as e:
            raise errors.UnknownPeer(f"{who}: {e.strerror}") from None
        if index is None:
            raise errors.ProviderError(28, f"{self.info.name} has no room for another peer")
        self.names[index] = str(who)
        mine = self.spec.address()
        body = _join(self.addr, mine, self.link.encode())
        wait, again = _HELLO_FIRST, 0.0
        while True:
            self._open(who)
            state, reason = self.state.state(index)
            if state == "up":
                return index
            if state == "lost":
                raise errors.PeerLostError(f"{who} is lost")
            if state == "refused":
                with self.spec.lock():
                    self.state.reset(index)
                why = REFUSALS.get(reason, "?")
                if why == "version":
                    raise errors.ProtocolError(f"{who} speaks another version of the {self.fabric.name} fabric")
                raise errors.PeerLostError(
                    f"{who} refused: {'this incarnation is over' if why == 'incarnation' else why}"
                )
            now = time.monotonic()
            if now > deadline:
                with self.spec.lock():
                    self.state.give_up(index)
                raise errors.TransferTimeout(f"{who} did not answer within the time-out")
            if now >= again:
                with self.spec.lock():
                    self.state.hello(index, body)
                again = now + wait
                wait = min(wait * 2, _HELLO_MOST)
            self.spec.kick()
            time.sleep(0.0005)

    def disconnect(self, peer: int) -> None:
        with self.spec.lock():
            self.state.forget(peer)
        self.spec.kick()

    def import_mr(self, peer: int, rkey: int, base: int, length: int, deadline: float) -> RemoteKey:
        what = f"region of {length} bytes at {base:#x} at {self.names.get(peer, f'peer {peer}')}"
        if not self.asking.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise errors.TransferTimeout(f"{what}: another import takes too long")
        try:
            again, wait = 0.0, 0.2
            answer = None
            number = secrets.randbits(60)
            while answer is None:
                self._open(what)
                if self.state.state(peer)[0] != "up":
                    raise errors.PeerLostError(f"{what}: the peer is lost")
                now = time.monotonic()
                if now > deadline:
                    raise errors.TransferTimeout(f"{what}: no answer")
                if now >= again:
                    with self.spec.lock():
                        self.state.ask_import(peer, number, rkey, base, length)
                    again, wait = now + wait, min(wait * 2, 1.0)
                self.spec.kick()
                time.sleep(0.0002)
                answer = self.state.reply()
            status, key, addr = answer
            if status:
                raise errors.from_status(status, what)
            with self.spec.lock():
                index = self.state.add_import(peer, rkey, key, addr, length)
        finally:
            self.asking.release()
        if index is None:
            raise errors.ProviderError(28, f"{self.info.name} has imported as many regions as it can")
        return RemoteKey(0, index)

    def release_mr(self, peer: int, key: RemoteKey) -> None:
        with self.spec.lock():
            self.state.drop_import(key.key)

    def is_gone(self, peer: int, key: RemoteKey) -> bool:
        with self.spec.lock():
            return bool(self.state.import_gone(key.key))

    def peers(self) -> list[dict[str, Any]]:
        with self.spec.lock():
            rows = self.state.peers()
        for r in rows:
            r["addr"] = self.names.get(r["index"], "?")
        return rows

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self.fabric.forget(self)
        with self.spec.lock():
            self.state.closing()
            for p in self.state.peers():
                self.state.bye(p["index"])
        end = time.monotonic() + 0.3
        while self.state.unsent() and time.monotonic() < end:
            with self.spec.lock():
                self.poll()
            time.sleep(0.0005)
        with self.spec.lock():
            for mr, _ in self.regions.values():
                self.free_mr(mr)
            self.regions.clear()
            self.state.shut()

    # -- hellos of others, on the fabric's thread

    def answer_hellos(self) -> None:
        """Answers what was heard; the same hello twice gets the same answer."""
        while True:
            with self.spec.lock():
                h = self.state.next_hello()
            if h is None:
                return
            theirs, session, target, version, body = h
            try:
                addr, netaddr, link = _split(body)
                who = NetAddr.from_bytes(netaddr)
            except (errors.ProtocolError, struct.error, UnicodeDecodeError):
                log.warning("%s: a hello that makes no sense", self.info.name)
                continue
            if who.incarnation != session:
                log.warning("%s: a hello whose address has another incarnation", self.info.name)
                continue
            src = self.spec.source_of(netaddr)
            try:
                with self.spec.lock():
                    index = self.state.peer(addr, session, src)
                    if index is not None and self.joined(index, addr, session):
                        self.names[index] = str(who)
                        if version != 1:
                            self.state.refuse(index, theirs, 2)
                        elif target != self.spec.incarnation:
                            self.state.refuse(index, theirs, 1)
                        else:
                            self.state.welcome(index, theirs, src)
                            if link:
                                self.fabric.links.call(self.spec.incarnation, session, link)
            except OSError as e:
                log.warning("%s: hello of %s: %s", self.info.name, who, e)
            self.spec.kick()


def _join(addr: bytes, netaddr: bytes, link: bytes) -> bytes:
    """The body of a hello: the NIC's address, the group's, where a connection shows that it lives, and a field kept for an
    authenticator. This layout is the same in all versions, so that a refusal finds its way."""
    return (
        struct.pack("<H", len(addr)) + addr + struct.pack("<I", len(netaddr)) + netaddr
        + struct.pack("<H", len(link)) + link + struct.pack("<H", 0)
    )  # fmt: skip


def _split(body: bytes) -> tuple[bytes, bytes, str]:
    at, parts = 0, []
    for head in ("<H", "<I", "<H", "<H"):
        (n,) = struct.unpack_from(head, body, at)
        at += struct.calcsize(head)
        parts.append(body[at : at + n])
        if len(parts[-1]) != n:
            raise errors.ProtocolError("a hello that is cut off")
        at += n
    if at != len(body) or len(parts[2]) > 64 or len(parts[3]) > _AUTHENTICATOR:
        raise errors.ProtocolError("a hello of the wrong length")
    return parts[0], parts[1], parts[2].decode("ascii")


class ControlFabric(Fabric):
    """A fabric with a thread that answers the hellos its domains hear, and sees who dies."""

    def __init__(self) -> None:
        self.hello_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.links = Links(lambda: {d.spec.incarnation for d in list(self.domains)}, self._died)
        self.domains: list[ControlDomain] = []
        self.lock = threading.Lock()
        self.dying: dict[tuple[int, int], tuple[float, int]] = {}
        self.stop = False
        self.pid = os.getpid()
        self.thread = threading.Thread(target=self._run, name=f"fabricx {self.name}", daemon=True)
        self.thread.start()

    def add(self, domains: Sequence[ControlDomain]) -> None:
        """Domains whose hellos are to be answered."""
        for d in domains:
            d.link = self.links.listen(d.link_host())
        with self.lock:
            self.domains += domains
        os.eventfd_write(self.hello_fd, 1)

    def forget(self, domain: ControlDomain) -> None:
        with self.lock:
            if domain in self.domains:
                self.domains.remove(domain)
        if not self.stop:
            os.eventfd_write(self.hello_fd, 1)  # its connections end

    def _run(self) -> None:
        selector = self.links.selector
        selector.register(self.hello_fd, selectors.EVENT_READ, None)
        while not self.stop:
            soon = self.dying or any(d.leaving for d in list(self.domains))
            for key, _ in selector.select(_DRAIN if soon else 5.0 if self.links.pending else None):
                try:
                    if key.data is None:
                        self._hellos()
                    elif not isinstance(key.fileobj, socket.socket) or key.fileobj.fileno() >= 0:  # closed a moment ago
                        key.data(key.fileobj)
                except Exception:
                    log.exception("the %s fabric's thread", self.name)
            self.links.tidy()
            self._bury()
            for d in list(self.domains) if soon else ():
                d.tidy()

    def _hellos(self) -> None:
        try:
            os.eventfd_read(self.hello_fd)
        except BlockingIOError:
            return
        with self.lock:
            domains = list(self.domains)
        for d in domains:
            try:
                d.answer_hellos()
                d.tidy()
            except Exception:
                log.exception("%s: answering a hello", d.info.name)
        self.links.connect_wanted()
        for mine in {who[0] for who in self.links.known.values()} - {d.spec.incarnation for d in domains}:
            self.links.cut(mine)

    def _died(self, mine: int, theirs: int) -> None:
        """The connection to a peer has ended: its process or its host is gone, or it has closed."""
        self.dying[mine, theirs] = (time.monotonic(), -1)

    def _bury(self) -> None:
        """Declares peers lost that are gone, once what they had sent before has stopped coming in."""
        now = time.monotonic()
        for (mine, theirs), (since, seen) in list(self.dying.items()):
            with self.lock:
                domains = [d for d in self.domains if d.spec.incarnation == mine]
            arrivals = sum(d.state.arrivals for d in domains)
            if now - since < _DRAIN or arrivals != seen and now - since < _DRAIN_MOST:
                self.dying[mine, theirs] = (since, arrivals)
                continue
            del self.dying[mine, theirs]
            for d in domains:
                with d.spec.lock():
                    d.state.lost(theirs)
                d.spec.kick()

    def close(self) -> None:
        if self.stop or os.getpid() != self.pid:
            return
        self.stop = True
        os.eventfd_write(self.hello_fd, 1)
        if threading.current_thread() is not self.thread:
            self.thread.join(10)
        self.links.close()
        os.close(self.hello_fd)
