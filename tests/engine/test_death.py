"""kill -9 at every named failpoint, SIGSTOP in the middle, and what the others see of it."""

from __future__ import annotations

import base64
import os
import signal
import time
from collections.abc import Iterator

import pytest
from engines import until
from peer import Peer

import fabricx as fx
from fabricx.fabrics.local import FAILPOINTS

KILLING = sorted(FAILPOINTS)


def b64(x: fx.NetAddr | fx.MrDesc) -> str:
    return base64.b64encode(x.to_bytes()).decode()


@pytest.fixture
def engine() -> Iterator[fx.TransferEngine]:
    with fx.TransferEngine("local", config=fx.Config(timeout=5.0, connect_timeout=3.0)) as e:
        yield e


@pytest.fixture
def peers() -> Iterator[list[Peer]]:
    all_: list[Peer] = []
    yield all_
    for p in all_:
        p.kill()


@pytest.mark.parametrize("point", KILLING)
def test_a_writer_killed_at_a_failpoint_harms_nobody_else(engine: fx.TransferEngine, peers: list[Peer], point: str) -> None:
    buf = engine.alloc(1 << 16)
    _, desc = engine.reg_mr(buf)
    good = Peer()
    peers.append(good)
    lost: list[fx.NetAddr] = []
    engine.on_peer_lost = lost.append
    engine.submit_recvs(4096, 4, lambda m, who: None)
    bad = Peer(env={"FABRICX_FAILPOINT": f"{point}:1"})
    peers.append(bad)
    bad_addr = fx.NetAddr.from_bytes(base64.b64decode(bad.address))
    before = engine.imm_count(7)
    try:
        bad.call(do="write", n=4096, imm=7, desc=b64(desc))
        bad.call(do="send", text="x" * 100, address=b64(engine.address))
        bad.send(do="close")
        bad.answer(5)
    except (EOFError, RuntimeError, BrokenPipeError):
        pass
    assert bad.process.wait(10) == -signal.SIGKILL, f"it did not die at {point}"
    # what was counted is whole writes only
    time.sleep(0.05)
    assert engine.imm_count(7) - before in (0, 1)
    if point not in ("local.hello_sent",):
        until(lambda: bad_addr in lost, 5)
    # the other pair goes on, and so does the engine
    x = engine.expect_imm_count(8, 3)
    for i in range(3):
        good.call(do="write", n=100, imm=8, to=8192 + i * 100, desc=b64(desc))
    x.wait()
    h, _ = engine.reg_mr(bytearray(b"y" * 64))
    good_desc = fx.MrDesc.from_bytes(base64.b64decode(good.desc))
    engine.submit_single_write(64, None, (h, 0), (good_desc, 0)).wait()


def test_a_target_killed_mid_write_fails_its_own_transfers_only(engine: fx.TransferEngine, peers: list[Peer]) -> None:
    dying, living = Peer(size=1 << 22), Peer(size=1 << 22)
    peers += [dying, living]
    h, _ = engine.reg_mr(engine.alloc(1 << 22))
    d1, d2 = (fx.MrDesc.from_bytes(base64.b64decode(p.desc)) for p in (dying, living))
    engine.submit_single_write(8, None, (h, 0), (d1, 0)).wait()
    os.kill(dying.pid, signal.SIGKILL)
    with pytest.raises(fx.PeerLostError, match=str(dying.pid)):
        for _ in range(2000):
            engine.submit_single_write(1 << 20, 5, (h, 0), (d1, 0)).wait()
            time.sleep(0.001)
    living.call(do="expect", imm=5, count=4)
    for _ in range(4):
        engine.submit_single_write(1 << 20, 5, (h, 0), (d2, 0)).wait()
    living.call(do="wait", id="expect")
    t = engine.submit_scatter(None, 6, h, [fx.ScatterDst(100, 0, d1, 0), fx.ScatterDst(100, 0, d2, 0)])
    with pytest.raises(fx.PeerLostError, match=f"no. 0.*{dying.pid}"):
        t.wait()
    until(lambda: living.call(do="count", imm=6) == 1)


def test_a_restarted_peer_is_another_peer(engine: fx.TransferEngine, peers: list[Peer]) -> None:
    first = Peer()
    peers.append(first)
    h, _ = engine.reg_mr(engine.alloc(64))
    d1 = fx.MrDesc.from_bytes(base64.b64decode(first.desc))
    engine.submit_single_write(8, None, (h, 0), (d1, 0)).wait()
    first.kill()
    second = Peer()
    peers.append(second)
    d2 = fx.MrDesc.from_bytes(base64.b64decode(second.desc))
    engine.submit_single_write(8, None, (h, 0), (d2, 0)).wait()
    until(lambda: _refused(engine, h, d1))
    with pytest.raises(fx.PeerLostError):
        engine.connect(d1.owner)
    assert d1.owner.incarnation != d2.owner.incarnation


def _refused(engine: fx.TransferEngine, h: object, d: fx.MrDesc) -> bool:
    try:
        engine.submit_single_write(8, None, (h, 0), (d, 0)).wait()
    except fx.PeerLostError:
        return True
    return False


def test_three_processes_one_killed_the_other_pair_goes_on(engine: fx.TransferEngine, peers: list[Peer]) -> None:
    a, b = Peer(), Peer()
    peers += [a, b]
    b.call(do="expect", imm=3, count=200)
    a.send(do="writes", count=200, n=1000, imm=3, desc=b.desc, pause=0.001)
    h, _ = engine.reg_mr(engine.alloc(64))
    d = fx.MrDesc.from_bytes(base64.b64decode(b.desc))
    doomed = Peer()
    peers.append(doomed)
    doomed.send(do="writes", count=100000, n=1000, imm=9, to=4096, desc=b.desc)
    time.sleep(0.05)
    os.kill(doomed.pid, signal.SIGKILL)
    engine.submit_single_write(64, None, (h, 0), (d, 0)).wait()
    a.answer()
    b.call(do="wait", id="expect")


@pytest.mark.parametrize("plain", [False, True])
def test_a_stopped_writer_cannot_write_into_memory_that_was_given_up(engine: fx.TransferEngine, peers: list[Peer], plain: bool) -> None:
    """SIGSTOP a writer anywhere, time out, take the region back, put canaries in, SIGCONT: they are intact."""
    import numpy as np

    for k in range(6):
        buf = np.zeros(1 << 16, np.uint8) if plain else engine.alloc(1 << 16).array
        handle, desc = engine.reg_mr(buf)
        w = Peer()
        peers.append(w)
        w.call(do="fill", n=1 << 16, value=170)
        w.call(do="write", n=8, desc=b64(desc))
        w.send(do="writes", count=3000, n=1 << 16, imm=4, desc=b64(desc))
        time.sleep(0.003 * (k + 1))
        os.kill(w.pid, signal.SIGSTOP)
        x = engine.expect_imm_count(4, 10**6, timeout=0.05)
        with pytest.raises(fx.TransferTimeout):
            x.wait()
        try:
            engine.dereg_mr(handle, timeout=0.2)
        except fx.TransferTimeout:
            # stopped in the middle of a copy: the region stays in quarantine until it goes on
            os.kill(w.pid, signal.SIGCONT)
            engine.dereg_mr(handle, timeout=5)
        buf[:] = 85
        os.kill(w.pid, signal.SIGCONT)
        with pytest.raises(RuntimeError, match="UnregisteredRemote"):
            w.answer()
        assert (buf == 85).all()
        w.kill()


def test_a_stopped_target_holds_nothing_up(engine: fx.TransferEngine, peers: list[Peer]) -> None:
    """A stopped peer's memory can still be written (one-sided); a message to it waits until its sender's deadline."""
    p, q = Peer(), Peer()
    peers += [p, q]
    d, e = (fx.MrDesc.from_bytes(base64.b64decode(x.desc)) for x in (p, q))
    h, _ = engine.reg_mr(bytearray(b"z" * 4096))
    for x in (d, e):
        engine.submit_single_write(8, None, (h, 0), (x, 0)).wait()
    os.kill(p.pid, signal.SIGSTOP)
    engine.submit_single_write(4096, 5, (h, 0), (d, 0)).wait()
    t = engine.submit_send(d.owner, b"hello", timeout=0.2)
    engine.submit_single_write(4096, 5, (h, 0), (e, 0)).wait()
    with pytest.raises(fx.TransferTimeout):
        t.wait()
    os.kill(p.pid, signal.SIGCONT)
    p.call(do="expect", imm=5, count=1)
    p.call(do="wait", id="expect")
    assert p.call(do="sum", at=0, n=4096) == ord("z") * 4096


def test_killed_engines_leave_nothing_in_dev_shm(peers: list[Peer]) -> None:
    before = sorted(os.listdir("/dev/shm"))
    for _ in range(3):
        p = Peer(nics=2)
        p.kill()
    assert sorted(os.listdir("/dev/shm")) == before
