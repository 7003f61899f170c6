"""The verbs fabric on Soft-RoCE in the kernel: what a stand-in cannot show. Two devices, rxe0 and rxe1; a device's traffic to itself
takes no network."""

from __future__ import annotations

import base64
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from engines import Pair, until
from peer import Peer

import fabricx as fx

#: the guest is emulated: a hundred times slower than a host
SLOW = {"timeout": 60.0, "connect_timeout": 30.0}
CONFIG = fx.Config.from_env(**SLOW)
#: the peer is given up after 7 retries of 4.096 us << 12, a quarter of a second
IMPATIENT = fx.Config.from_env(**SLOW, verbs_timeout=12)
pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def pair() -> Iterator[Pair]:
    p = Pair(fabric="verbs", config=CONFIG, a={"nics": ["rxe0"]}, b={"nics": ["rxe1"]})
    yield p
    p.close()


@pytest.fixture
def engine() -> Iterator[fx.TransferEngine]:
    with fx.TransferEngine("verbs", nics=["rxe0"], config=IMPATIENT) as e:
        yield e


@pytest.fixture
def peers() -> Iterator[list[Peer]]:
    all_: list[Peer] = []
    yield all_
    for p in all_:
        p.kill()


def start(peers: list[Peer], **options: object) -> Peer:
    peers.append(Peer("verbs", nics=["rxe1"], config=SLOW, **options))
    return peers[-1]


def desc(p: Peer) -> fx.MrDesc:
    return fx.MrDesc.from_bytes(base64.b64decode(p.desc))


def address(p: Peer) -> fx.NetAddr:
    return fx.NetAddr.from_bytes(base64.b64decode(p.address))


def domain(e: fx.TransferEngine) -> object:
    return e.groups[0].domains[0]


@pytest.fixture
def bad_network() -> Iterator[None]:
    """Both directions lose, reorder and delay."""
    for dev in ("eth0", "eth1"):
        command = f"tc qdisc replace dev {dev} root netem loss 3% reorder 5% delay 1ms"
        subprocess.run(command.split(), check=True, timeout=30)
    yield
    for dev in ("eth0", "eth1"):
        subprocess.run(f"tc qdisc del dev {dev} root".split(), check=True, timeout=30)


def lost_packets(dev: str) -> int:
    """Packets that the emulated network of a device has dropped."""
    said = subprocess.run(["tc", "-s", "qdisc", "show", "dev", dev], capture_output=True, text=True, timeout=30).stdout
    return int(said.split("(dropped ")[1].split(",")[0])


# ---------------------------------------------------------------- what arrives


def test_the_choice_is_said(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "fabricx")
    with fx.TransferEngine("verbs", nics=["rxe1"], config=CONFIG) as e:
        info = domain(e).info
        assert info.name == "rxe1:1" and info.caps & 1 and info.inline >= 0 and info.max_msg >= 1 << 20
    assert "RoCE v2, IPv4 10.77.0.2, on eth1" in caplog.text


def test_messages_and_immediates_together_never_take_each_others_receives(pair: Pair) -> None:
    """Both ways at once, more of each than there are receives."""
    got: dict[str, list[bytes]] = {"a": [], "b": []}
    pools = [
        pair.a.submit_recvs(20000, 8, lambda m, _: got["a"].append(bytes(m))),
        pair.b.submit_recvs(20000, 8, lambda m, _: got["b"].append(bytes(m))),
    ]
    _, back = pair.a.reg_mr(pair.src_buf, name="also a target")
    writes, messages = 3000, 60
    counted = [pair.b.expect_imm_count(1, writes), pair.a.expect_imm_count(2, writes)]
    failed: list[BaseException] = []

    def write(e: fx.TransferEngine, h: fx.MrHandle, to: fx.MrDesc, imm: int) -> None:
        try:
            left = [e.submit_single_write(0, imm, (h, 0), (to, 0)) for _ in range(writes)]
            for t in left:
                t.wait()
        except BaseException as x:
            failed.append(x)

    def send(e: fx.TransferEngine, to: fx.NetAddr) -> None:
        try:
            for k in range(messages):
                e.submit_send(to, bytes([k]) * (1 + 331 * k)).wait()
        except BaseException as x:
            failed.append(x)

    threads = [
        threading.Thread(target=write, args=(pair.a, pair.handle, pair.desc, 1)),
        threading.Thread(target=write, args=(pair.b, pair.target, back, 2)),
        threading.Thread(target=send, args=(pair.a, pair.b.address)),
        threading.Thread(target=send, args=(pair.b, pair.a.address)),
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join(200)
    assert not failed and not any(t.is_alive() for t in threads), failed
    for t in counted:
        t.wait()
    until(lambda: len(got["a"]) == len(got["b"]) == messages, 60)
    assert got["a"] == got["b"] == [bytes([k]) * (1 + 331 * k) for k in range(messages)]
    for e in (pair.a, pair.b):
        f = domain(e).state.figures()
        assert f["imms"] - f["imms_posted"] < 64 and domain(e).state.counts()["garbage"] == 0
    for p in pools:
        p.free()


def test_pages_in_chains(pair: Pair) -> None:
    before = domain(pair.a).state.figures()
    n = 1000
    si, di = np.random.default_rng(1).permutation(1024)[:n].astype(np.uint32), np.random.default_rng(2).permutation(1024)[:n]
    heard = pair.b.expect_imm_count(4, n)
    pages = (fx.Pages(si, stride=1000), fx.Pages(di.astype(np.uint64), stride=1000))
    pair.a.submit_paged_writes(1000, 4, (pair.handle, pages[0]), (pair.desc, pages[1])).wait()
    heard.wait()
    for s, t in zip(si, di, strict=True):
        assert (pair.src[s * 1000 : s * 1000 + 1000] == pair.dst[t * 1000 : t * 1000 + 1000]).all()
    after = domain(pair.a).state.figures()
    assert (after["doorbells"] - before["doorbells"]) / (after["posts"] - before["posts"]) <= 0.26


@pytest.mark.timeout(900)
def test_twenty_thousand_writes_on_a_bad_network(bad_network: None, pair: Pair) -> None:
    """No counter is early, every byte is right, though packets are lost and come in another order."""
    per, size = 50, len(pair.dst)
    rng = np.random.default_rng(5)
    room = size // per
    for imm in range(1, 401):
        sizes = np.where(rng.random(per) < 0.2, 0, rng.integers(1, np.where(rng.random(per) < 0.1, room, 600)))
        heard = pair.b.expect_imm_count(imm, per, timeout=120)
        sources = rng.integers(0, size - room, per)
        left = [
            pair.write(int(n), imm, at=int(at), to=k * room, timeout=120)
            for k, (n, at) in enumerate(zip(sizes, sources, strict=True))
        ]
        heard.wait()
        for k, (n, at) in enumerate(zip(sizes, sources, strict=True)):
            assert (pair.dst[k * room : k * room + n] == pair.src[at : at + n]).all(), (imm, k, n)
        for t in left:
            t.wait()
    assert pair.b.imm_count(1) == 0 and domain(pair.a).peers()[0]["outstanding"] == 0
    assert lost_packets("eth0") > 100 and lost_packets("eth1") > 100


def test_connecting_on_a_bad_network(bad_network: None, peers: list[Peer], engine: fx.TransferEngine) -> None:
    h, _ = engine.reg_mr(engine.alloc(4096))
    for _ in range(4):
        p = start(peers)
        p.send(do="expect", imm=1, count=1)
        p.answer()
        engine.submit_single_write(10, 1, (h, 0), (desc(p), 0)).wait()
        p.call(do="wait", id="expect", seconds=60)
        p.kill()


# ---------------------------------------------------------------- who dies


@pytest.mark.parametrize("state", ["idle", "writing", "waited for", "stopped"])
def test_a_killed_peer_is_lost_in_bounded_time_and_others_go_on(
    engine: fx.TransferEngine, peers: list[Peer], state: str
) -> None:
    victim, other = start(peers), start(peers)
    h, _ = engine.reg_mr(engine.alloc(1 << 20))
    for p in (victim, other):
        engine.submit_single_write(10, None, (h, 0), (desc(p), 0)).wait()
    left, expected = [], None
    if state in ("writing", "stopped"):
        if state == "stopped":
            victim.process.send_signal(signal.SIGSTOP)
        left = [engine.submit_single_write(1 << 20, 1, (h, 0), (desc(victim), 0)) for _ in range(20)]
    elif state == "waited for":
        expected = engine.expect_imm_count(9, 1, peers=[address(victim)])
    victim.process.kill()
    begun = time.monotonic()
    failed = 0
    for t in left:
        try:
            t.wait(40)
        except fx.PeerLostError:
            failed += 1
    if expected is not None:
        with pytest.raises(fx.PeerLostError):
            expected.wait(40)
    if left:
        assert failed
    with pytest.raises(fx.FabricxError):
        engine.submit_single_write(10, None, (h, 0), (desc(victim), 0), timeout=40).wait()
    assert time.monotonic() - begun < 40
    engine.submit_single_write(1 << 20, None, (h, 0), (desc(other), 0)).wait()
    assert all(r["outstanding"] == 0 for r in domain(engine).peers())
    until(lambda: len(domain(engine).pairs) == 1 and not domain(engine).leaving, 30)


def test_a_restarted_peer_is_met_anew(engine: fx.TransferEngine, peers: list[Peer]) -> None:
    h, _ = engine.reg_mr(engine.alloc(4096))
    seen = set()
    for turn in range(3):
        p = start(peers)
        p.call(do="expect", imm=turn, count=1)
        engine.submit_single_write(100, turn, (h, 0), (desc(p), 0)).wait()
        p.call(do="wait", id="expect", seconds=30)
        seen.add(address(p).incarnation)
        p.process.kill()
        p.process.wait(10)
    assert len(seen) == 3


def test_a_stopped_target_delays_and_loses_nothing(engine: fx.TransferEngine, peers: list[Peer]) -> None:
    """More immediates than it keeps receives: the rest waits in the sender's NIC."""
    p = start(peers)
    h, _ = engine.reg_mr(engine.alloc(4096))
    n = domain(engine).state.figures()["imms"] + 300
    p.call(do="expect", imm=3, count=n, timeout=120)
    engine.submit_single_write(1, None, (h, 0), (desc(p), 0)).wait()
    os.kill(p.pid, signal.SIGSTOP)
    left = [engine.submit_single_write(0, 3, (h, 0), (desc(p), 0), timeout=120) for _ in range(n)]
    time.sleep(3)  # longer than the peer would be given without an answer
    assert not all(t.done() for t in left)
    os.kill(p.pid, signal.SIGCONT)
    for t in left:
        t.wait()
    p.send(do="wait", id="expect", seconds=100)
    p.answer(110)


# ---------------------------------------------------------------- what else fails


def test_a_region_that_the_nic_refuses_says_so_and_the_peer_can_be_met_again(pair: Pair) -> None:
    """The registration is gone behind the protocol's back: the NIC of the peer refuses."""
    pair.write(10).wait()
    d = domain(pair.b)
    rkey = pair.desc.rkeys[0]
    d.regions[rkey][0].close()
    with pytest.raises(fx.UnregisteredRemote, match="remote access error"):
        pair.write(100, 1).wait()
    _, again = pair.b.reg_mr(pair.b.alloc(4096))
    end = time.monotonic() + 60
    while True:
        try:
            pair.a.submit_single_write(100, None, (pair.handle, 0), (again, 0)).wait()
            break
        except fx.FabricxError:
            assert time.monotonic() < end
            time.sleep(0.05)


def test_a_port_that_goes_down_fails_its_writes(pair: Pair) -> None:
    pair.write(100).wait()
    subprocess.run(["ip", "link", "set", "eth0", "down"], check=True, timeout=30)
    try:
        with pytest.raises(fx.FabricxError):
            for _ in range(100000):
                pair.write(1000).wait(60)
        assert not any(r["alive"] for r in domain(pair.a).peers()) or domain(pair.a).state.counts()["writes"] == 0
    finally:
        subprocess.run(["ip", "link", "set", "eth0", "up"], check=True, timeout=30)

