"""Connections that tell of a death: who calls, who is called, strangers, silence and forks."""

from __future__ import annotations

import base64
import os
import signal
import socket
import time
from collections.abc import Iterator

import pytest
from engines import ofi_reason, until
from peer import Peer

import fabricx as fx
from fabricx.fabrics.links import HEAD, MAGIC, VERSION, Links, route_host, sockaddr_host

needs_ofi = pytest.mark.skipif(bool(ofi_reason()), reason=ofi_reason() or "-")


class Side:
    """One end, turned by hand."""

    def __init__(self, *mine: int) -> None:
        self.lost: list[tuple[int, int]] = []
        self.links = Links(lambda: set(mine), lambda a, b: self.lost.append((a, b)))
        self.address = self.links.listen("127.0.0.1")

    def turn(self, seconds: float = 0.02) -> None:
        self.links.connect_wanted()
        for key, _ in self.links.selector.select(seconds):
            key.data(key.fileobj)
        self.links.tidy()

    def until(self, what: object, *others: Side) -> None:
        end = time.monotonic() + 5
        while not what():  # type: ignore[operator]
            assert time.monotonic() < end
            for s in (self, *others):
                s.turn()


@pytest.fixture
def sides() -> Iterator[tuple[Side, Side]]:
    a, b = Side(1, 2), Side(9)
    yield a, b
    a.links.close()
    b.links.close()


def test_one_connection_serves_both_ends(sides: tuple[Side, Side]) -> None:
    a, b = sides
    a.links.call(1, 9, b.address)
    a.until(lambda: b.links.known, b)
    assert list(a.links.known.values()) == [(1, 9)] and list(b.links.known.values()) == [(9, 1)]
    a.links.call(1, 9, b.address)  # there is one already
    a.turn()
    assert len(a.links.known) == 1 and not a.links.pending
    a.links.cut(1)
    b.until(lambda: b.lost)
    assert b.lost == [(9, 1)] and not a.lost


def test_another_group_of_the_same_process_stays(sides: tuple[Side, Side]) -> None:
    a, b = sides
    for mine in (1, 2):
        a.links.call(mine, 9, b.address)
    a.until(lambda: len(b.links.known) == 2, b)
    a.links.cut(2)
    b.until(lambda: b.lost)
    assert b.lost == [(9, 2)] and list(b.links.known.values()) == [(9, 1)]


@pytest.mark.parametrize(
    "what",
    [
        b"",
        b"GET / HTTP/1.0\r\n\r\n" + bytes(64),
        HEAD.pack(MAGIC, VERSION + 1, 0, 0, 5, 9),
        HEAD.pack(MAGIC, VERSION, 0, 7, 5, 9),
        HEAD.pack(MAGIC, VERSION, 0, 0, 5, 8),  # nobody of that incarnation lives here
        HEAD.pack(MAGIC, VERSION, 0, 0, 5, 9)[:-1],
    ],
)
def test_strangers_are_shown_out(sides: tuple[Side, Side], what: bytes) -> None:
    _, b = sides
    host, _, port = b.address.partition("|")
    with socket.create_connection((host, int(port)), timeout=5) as s:
        s.sendall(what)
        s.shutdown(socket.SHUT_WR)
        b.until(lambda: b.links.selector.get_map() and not b.links.pending and _closed(s))
    assert not b.links.known and not b.lost


def _closed(s: socket.socket) -> bool:
    s.setblocking(False)
    try:
        return s.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


def test_those_who_say_nothing_are_shown_out(sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch) -> None:
    _, b = sides
    monkeypatch.setattr("fabricx.fabrics.links._PATIENCE", 0.05)
    monkeypatch.setattr("fabricx.fabrics.links._STRANGERS", 3)
    host, _, port = b.address.partition("|")
    silent = [socket.create_connection((host, int(port)), timeout=5) for _ in range(5)]
    b.until(lambda: all(_closed(s) for s in silent))
    for s in silent:
        s.close()
    assert not b.links.pending


@pytest.mark.parametrize("address", ["127.0.0.1|1", "127.0.0.1|0", "no such|5", "|", "127.0.0.1|99999999", "::1|x"])
def test_an_address_that_leads_nowhere_harms_nobody(sides: tuple[Side, Side], address: str) -> None:
    a, _ = sides
    a.links.call(1, 9, address)
    a.until(lambda: not a.links.wanted and not a.links.pending)
    assert not a.links.known and not a.lost


def test_addresses() -> None:
    assert sockaddr_host(bytes([2, 0, 0, 80, 10, 1, 2, 3]) + bytes(8)) == "10.1.2.3"
    assert sockaddr_host(bytes([10, 0, 0, 80]) + bytes(4) + bytes(15) + b"\1" + bytes(4)) == "::1"
    assert sockaddr_host(bytes(32)) is None and sockaddr_host(b"") is None
    assert socket.inet_aton(route_host()) or ":" in route_host()


@needs_ofi
def test_an_idle_peer_that_dies_is_lost_at_once() -> None:
    lost: list[fx.NetAddr] = []
    with fx.TransferEngine("ofi") as e:
        e.on_peer_lost = lost.append
        p = Peer("ofi")
        try:
            d = fx.MrDesc.from_bytes(base64.b64decode(p.desc))
            h, _ = e.reg_mr(e.alloc(64))
            e.submit_single_write(8, None, (h, 0), (d, 0)).wait()
            os.kill(p.pid, signal.SIGSTOP)
            time.sleep(0.3)
            assert not lost  # one that stands still lives
            os.kill(p.pid, signal.SIGKILL)
            until(lambda: lost)
            with pytest.raises(fx.PeerLostError):
                e.submit_single_write(8, None, (h, 0), (d, 0)).wait()
        finally:
            p.kill()


@needs_ofi
def test_what_was_written_before_the_end_is_counted() -> None:
    """The writer closes as soon as its last write is done; the connection that tells of that must not overtake the writes."""
    lost: list[fx.NetAddr] = []
    with fx.TransferEngine("ofi") as e:
        e.on_peer_lost = lost.append
        buf = e.alloc(1 << 20)
        _, desc = e.reg_mr(buf)
        for k in range(5):
            p = Peer("ofi")
            try:
                x = e.expect_imm_count(k, 200, peers=[fx.NetAddr.from_bytes(base64.b64decode(p.address))])
                p.call(do="fill", n=1 << 20, value=k + 1)
                p.call(do="writes", n=1 << 20, imm=k, count=200, desc=base64.b64encode(desc.to_bytes()).decode())
                assert p.leave() == 0
                x.wait()
            finally:
                p.kill()
        until(lambda: len(lost) == 5)
        assert (buf.array == 5).all()


@needs_ofi
def test_a_forked_child_does_not_keep_its_parent_alive() -> None:
    lost: list[fx.NetAddr] = []
    code = """
import base64, os, sys, time
import fabricx as fx
e = fx.TransferEngine("ofi")
h, _ = e.reg_mr(e.alloc(64))
d = fx.MrDesc.from_bytes(base64.b64decode(sys.argv[1]))
e.submit_single_write(8, 3, (h, 0), (d, 0), landed=True).wait()
pid = os.fork()
if pid == 0:
    os.close(1)
    time.sleep(60)
    os._exit(0)
print(pid, flush=True)
os.kill(os.getpid(), 9)
"""
    import subprocess
    import sys

    with fx.TransferEngine("ofi") as e:
        e.on_peer_lost = lost.append
        _, desc = e.reg_mr(e.alloc(64))
        x = e.expect_imm_count(3, 1)
        run = subprocess.run(
            [sys.executable, "-c", code, base64.b64encode(desc.to_bytes()).decode()],
            stdout=subprocess.PIPE,
            timeout=60,
            check=False,
        )
        child = int(run.stdout)
        try:
            x.wait()
            until(lambda: lost)
            os.kill(child, 0)  # it is still there
        finally:
            os.kill(child, signal.SIGKILL)
