"""How the control fabrics learn that a peer's process or host is gone: a TCP connection a pair of groups, on which nothing is
said but who is there. The kernel closes it with the process, whatever ended that; a host that is gone ends it by keep-alives.

NICs do not tell: a provider may try to reconnect for ever, an RDMA queue pair is silent while it is idle. A process that is
merely stopped keeps its connections, and is not lost.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
import struct
import time
import weakref
from collections.abc import Callable

log = logging.getLogger("fabricx")

MAGIC, VERSION = b"fxlink\r\n", 1
HEAD = struct.Struct("<8sHHIQQ")  # magic, version, reserved, bytes that follow (0), incarnation of the caller, of the called
_STRANGERS = 256  # connections that have not said yet who they are
_PATIENCE = 10.0  # seconds that they have for it, and that a connection may take
_SILENCE = 20  # seconds after which a host that answers no keep-alive is gone


class Links:
    """The connections of one fabric. All methods but `listen`, `call` and `close` run on the fabric's thread.

    Parameters
    ----------
    mine : the incarnations of the groups that are open here.
    lost : called with (own incarnation, peer's incarnation) when a connection ends.
    """

    def __init__(self, mine: Callable[[], set[int]], lost: Callable[[int, int], None]) -> None:
        self.mine, self.lost = mine, lost
        self.selector = selectors.DefaultSelector()
        self.servers: dict[str, socket.socket] = {}
        self.known: dict[socket.socket, tuple[int, int]] = {}
        self.pending: dict[socket.socket, tuple[float, tuple[int, int] | None, bytearray]] = {}
        self.wanted: list[tuple[int, int, str]] = []
        _all.add(self)

    # -- from any thread

    def listen(self, host: str) -> str:
        """The address, ``host:port``, at which peers find this fabric; "" when there is none."""
        if host not in self.servers:
            try:
                family = socket.AF_INET6 if ":" in host else socket.AF_INET
                s = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
                s.bind((host, 0))
                s.listen(1024)
            except OSError as e:
                log.warning("no socket at %s to tell peers of a death (%s): they find out by time-outs", host, e.strerror)
                return ""
            self.servers[host] = s
            self.selector.register(s, selectors.EVENT_READ, self.accept)
        port = self.servers[host].getsockname()[1]
        return f"{host}|{port}"

    def call(self, mine: int, theirs: int, address: str) -> None:
        """Asks the fabric's thread, which the caller wakes, to connect to a peer that gave `address`."""
        self.wanted.append((mine, theirs, address))

    # -- on the fabric's thread

    def accept(self, server: socket.socket) -> None:
        while True:
            try:
                s, _ = server.accept()
            except OSError:
                return
            if len(self.pending) >= _STRANGERS:
                s.close()
                continue
            s.setblocking(False)
            self.pending[s] = (time.monotonic() + _PATIENCE, None, bytearray())
            self.selector.register(s, selectors.EVENT_READ, self.introduced)

    def introduced(self, s: socket.socket) -> None:
        """A caller says who it is."""
        deadline, _, got = self.pending[s]
        try:
            more = s.recv(HEAD.size - len(got))
        except BlockingIOError:
            return
        except OSError:
            more = b""
        got += more
        if more and len(got) < HEAD.size:
            return
        who = None
        if more:
            magic, version, _, extra, theirs, mine = HEAD.unpack(got)
            if magic == MAGIC and version == VERSION and extra == 0 and mine in self.mine():
                who = mine, theirs
        del self.pending[s]
        if who is None:
            self.drop(s)
        else:
            self.keep(s, who)

    def connect_wanted(self) -> None:
        wanted, self.wanted = self.wanted, []
        for mine, theirs, address in wanted:
            host, _, port = address.partition("|")
            if (mine, theirs) in self.known.values():
                continue
            s = None
            try:
                s = socket.socket(
                    socket.AF_INET6 if ":" in host else socket.AF_INET,
                    socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK,
                )
                s.connect_ex((host, int(port)))
            except (OSError, ValueError, OverflowError) as e:
                log.info("no connection to %s, which would tell of a peer's death: %s", address, e)
                if s is not None:
                    s.close()
                continue
            head = bytearray(HEAD.pack(MAGIC, VERSION, 0, 0, mine, theirs))
            self.pending[s] = (time.monotonic() + _PATIENCE, (mine, theirs), head)
            self.selector.register(s, selectors.EVENT_WRITE, self.connected)

    def connected(self, s: socket.socket) -> None:
        """A connection of ours stands, or does not."""
        _, who, head = self.pending.pop(s)
        assert who is not None
        error = s.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        try:
            if error:
                raise OSError(error, os.strerror(error))
            s.send(head)  # a fresh socket takes so little whole
        except OSError as e:
            log.info("no connection to %016x, which would tell of its death: %s", who[1], e)
            self.drop(s)
            return
        self.keep(s, who)

    def keep(self, s: socket.socket, who: tuple[int, int]) -> None:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        s.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
        s.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
        s.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, max(1, (_SILENCE - 5) // 5))
        self.known[s] = who
        self.selector.modify(s, selectors.EVENT_READ, self.ended)

    def ended(self, s: socket.socket) -> None:
        try:
            if s.recv(64):
                return  # nothing is said here; whatever it is, the peer lives
        except BlockingIOError:
            return
        except OSError:
            pass
        who = self.known.pop(s)
        self.drop(s)
        if who not in self.known.values():
            self.lost(*who)

    def drop(self, s: socket.socket) -> None:
        try:
            self.selector.unregister(s)
        except (KeyError, ValueError):
            pass
        s.close()

    def cut(self, mine: int) -> None:
        """A group closes: so do its connections."""
        for s in [s for s, who in self.known.items() if who[0] == mine]:
            del self.known[s]
            self.drop(s)

    def tidy(self) -> None:
        """Drops who did not say in time who it is."""
        now = time.monotonic()
        for s in [s for s, (end, _, _) in self.pending.items() if end < now]:
            del self.pending[s]
            self.drop(s)

    def close(self) -> None:
        """The fabric's thread has ended."""
        for s in [*self.known, *self.pending, *self.servers.values()]:
            s.close()
        self.known.clear()
        self.pending.clear()
        self.servers.clear()
        self.selector.close()
        _all.discard(self)


_all: weakref.WeakSet[Links] = weakref.WeakSet()


def _after_fork() -> None:
    """A child must not keep its parent's connections: they would tell that it lives."""
    for links in list(_all):
        links.close()


os.register_at_fork(after_in_child=_after_fork)


def route_host() -> str:
    """The IP address by which this host is reached from others, as its default route has it; loopback without one."""
    for family, target in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as s:
                s.connect((target, 9))  # sends nothing
                return str(s.getsockname()[0])
        except OSError:
            continue
    return "127.0.0.1"


def sockaddr_host(raw: bytes) -> str | None:
    """The IP address in a struct sockaddr_in or sockaddr_in6; None if it is another kind of address."""
    if len(raw) >= 16:
        family = int.from_bytes(raw[:2], "little")
        if family == socket.AF_INET:
            return socket.inet_ntop(socket.AF_INET, raw[4:8])
        if family == socket.AF_INET6 and len(raw) >= 28:
            return socket.inet_ntop(socket.AF_INET6, raw[8:24])
    return None
