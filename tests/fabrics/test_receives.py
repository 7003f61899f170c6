"""Receive pools that come and go, and messages that are taken back, over every fabric that has messages."""

from __future__ import annotations

import base64
import gc
import random
import signal
import threading
from collections.abc import Callable, Iterator

import psutil
import pytest

import fabricx as fx
from tests.engine.engines import Pair, open_variant, until
from tests.engine.peer import Peer

RUN = ["local-2nics", "local-chaos", "local-busy", "ofi-2nics"]


@pytest.fixture(params=RUN)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    made: list[Pair] = []

    def make(**k: object) -> Pair:
        made.append(Pair(size=4096, **k))
        return made[-1]

    yield open_variant(request.param, make)
    for p in made:
        p.close()


def collector(got: list[bytes]) -> Callable[[memoryview, object], None]:
    return lambda m, who: got.append(bytes(m))


def test_freeing_a_pool_gives_everything_back(pair: Pair) -> None:
    got: list[bytes] = []
    pair.b.submit_recvs(64, 2, collector(got)).free()
    with pytest.raises(fx.TransferTimeout):
        pair.a.submit_send(pair.b.address, b"", timeout=0.05).wait()
    gc.collect()
    before, regions = psutil.Process().num_fds(), pair.b.stats()["regions"]
    for _ in range(30):
        pool = pair.b.submit_recvs(1000, 8, collector(got))
        pool.free()
        pool.free()
    gc.collect()
    assert psutil.Process().num_fds() <= before
    assert pair.b.stats()["regions"] == regions and not pair.b._pools


def test_nothing_arrives_in_a_freed_pool_and_a_new_one_gets_it(pair: Pair) -> None:
    old: list[bytes] = []
    new: list[bytes] = []
    pool = pair.b.submit_recvs(64, 4, collector(old))
    pair.a.submit_send(pair.b.address, b"first").wait()
    until(lambda: old)
    pool.free()
    t = pair.a.submit_send(pair.b.address, b"second")
    with pytest.raises(fx.TransferTimeout):
        t.wait(0.1) if pair.a.fabric != "local" else t.quiesced().wait(0.1)
    pair.b.submit_recvs(64, 4, collector(new))
    t.wait()
    until(lambda: new)
    assert (old, new) == ([b"first"], [b"second"])


def test_a_pool_may_be_freed_in_its_own_callback(pair: Pair) -> None:
    got: list[bytes] = []
    pools: list[fx.RecvPool] = []

    def once(m: memoryview, who: object) -> None:
        got.append(bytes(m))
        pools[0].free()

    pools.append(pair.b.submit_recvs(64, 1, once))
    pair.a.submit_send(pair.b.address, b"x").wait()
    until(lambda: got and not pair.b._pools)
    assert got == [b"x"]


def test_messages_too_long_for_the_pools_that_are_left_are_refused(pair: Pair) -> None:
    got: list[bytes] = []
    gate, inside = threading.Event(), threading.Event()

    def slow(m: memoryview, who: object) -> None:
        inside.set()
        gate.wait(20)
        got.append(bytes(m))

    dropped: list[BaseException] = []
    pair.b.on_error = dropped.append
    long = pair.b.submit_recvs(1000, 1, slow)
    pair.b.submit_recvs(100, 4, collector(got))
    pair.a.submit_send(pair.b.address, b"a" * 500).wait()
    assert inside.wait(10)
    waits = [pair.a.submit_send(pair.b.address, b"b" * 501) for _ in range(2)]
    long.free()
    gate.set()
    ends = []
    for t in waits:
        try:
            t.wait()
        except fx.MessageTooLong as e:
            assert "501 bytes" in str(e) and "100" in str(e)
            ends.append(e)
    pair.a.submit_send(pair.b.address, b"c" * 100).wait()
    until(lambda: len(got) >= 2)
    assert set(got) == {b"a" * 500, b"c" * 100}
    if pair.a.fabric == "local":  # there a message may have been on its way already: it is dropped, and that is said
        until(lambda: len(ends) + len(dropped) == 2)
        assert all("501 bytes" in str(e) for e in dropped)
    else:
        assert len(ends) == 2


def test_a_message_whose_time_is_up_is_taken_back(pair: Pair) -> None:
    got: list[bytes] = []
    keep = pair.b.submit_recvs(64, 1, collector(got))
    pair.a.submit_send(pair.b.address, b"0").wait()
    until(lambda: got)
    keep.free()
    until(lambda: not pair.b._pools)
    late = [pair.a.submit_send(pair.b.address, b"late", timeout=0.1) for _ in range(3)]
    for t in late:
        with pytest.raises(fx.TransferTimeout):
            t.wait()
        t.quiesced().wait(10)
    pair.b.submit_recvs(64, 4, collector(got))
    pair.a.submit_send(pair.b.address, b"1").wait()
    until(lambda: len(got) == 2)
    assert got == [b"0", b"1"]
    pair.a.remove_peer(pair.b.address, timeout=5)


@pytest.mark.parametrize("seed", range(6))
def test_each_message_is_delivered_once_while_pools_come_and_go(pair: Pair, seed: int) -> None:
    """Those that were done are delivered, unless they were too long for what was left; none twice, and each whole."""
    rng = random.Random(seed)
    got: list[bytes] = []
    stop = threading.Event()

    def pools() -> None:
        r = random.Random(seed + 1000)
        live: list[fx.RecvPool] = []
        while not stop.is_set():
            live.append(pair.b.submit_recvs(r.choice((64, 5000, 70_000)), r.randint(1, 4), collector(got)))
            if len(live) > 2:
                live.pop(r.randrange(len(live))).free()
            stop.wait(r.random() * 0.003)
        for p in live:
            p.free()

    thread = threading.Thread(target=pools)
    thread.start()
    sends = []
    for k in range(150):
        n = rng.choice((8, 50, 3000, 60_000))
        message = k.to_bytes(4, "little") * (n // 4)
        sends.append((message, pair.a.submit_send(pair.b.address, message, timeout=rng.choice((0.01, 0.05, 5)))))
        if k % 7 == 0:
            sends[-1][1].quiesced().wait(20)
    for _, t in sends:
        t.quiesced().wait(20)
    stop.set()
    thread.join()
    pair.b.submit_recvs(70_000, 8, collector(got))
    pair.a.submit_send(pair.b.address, b"end!").wait()
    until(lambda: b"end!" in got)
    numbers = [m[:4] for m in got if m != b"end!"]
    assert len(numbers) == len(set(numbers))
    assert set(got) - {b"end!"} <= {m for m, _ in sends}
    done = {m for m, t in sends if t.status == "done"}
    lost = done - set(got)
    if pair.a.fabric == "local":
        assert all(len(m) > 64 for m in lost)
    else:
        assert not lost


def test_a_sender_that_dies_in_the_middle_gives_its_receive_back() -> None:
    """Local: the ring holds a part of a long message when its sender is killed; the buffer must serve the next one."""
    got: list[bytes] = []
    lost: list[fx.NetAddr] = []
    with fx.TransferEngine("local") as e:
        e.on_peer_lost = lost.append
        e.submit_recvs(1 << 20, 1, collector(got))
        to = base64.b64encode(e.address.to_bytes()).decode()
        dying, living = Peer(env={"FABRICX_FAILPOINT": "local.mid_message:2"}), Peer()
        try:
            with pytest.raises((EOFError, BrokenPipeError)):
                dying.call(do="send", text="x", times=1 << 20, address=to)
            assert dying.process.wait(10) == -signal.SIGKILL
            until(lambda: lost)
            living.call(do="send", text="whole", address=to)
            until(lambda: got)
        finally:
            dying.kill()
            living.kill()
        assert got == [b"whole"]
