"""Calls at bad moments: answers that come too late, peers removed under a write, engines closed in the middle, memory that
must not be written."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
from engines import QUICK, Pair, ofi_reason, until
from peer import Peer

import fabricx as fx

ROOT = Path(__file__).resolve().parents[2]
FABRICS = ["local", pytest.param("ofi", marks=pytest.mark.skipif(bool(ofi_reason()), reason=ofi_reason() or "-"))]


def desc(p: Peer, text: str) -> fx.MrDesc:
    return fx.MrDesc.from_bytes(base64.b64decode(text))


def all_stopped(pid: int) -> bool:
    """Whether every thread of a process stands still."""
    stats = [f.read_text() for f in Path(f"/proc/{pid}/task").glob("*/stat")]
    return all(t.rpartition(")")[2].split()[0] == "T" for t in stats)


@pytest.mark.parametrize("fabric", FABRICS)
def test_an_answer_that_comes_too_late_is_no_answer_to_the_next_question(fabric: str) -> None:
    """The target stands still while a region is asked for, then goes on and answers; the next question is for another one."""
    config = dataclasses.replace(QUICK, connect_timeout=0.4)
    with fx.TransferEngine(fabric, config=config) as e:
        p = Peer(fabric)
        try:
            first, second = (desc(p, p.call(do="register", n=4096)) for _ in range(2))
            buf = e.alloc(4096)
            buf.array[:] = 7
            h, _ = e.reg_mr(buf)
            e.connect(first.owner)
            os.kill(p.pid, signal.SIGSTOP)
            until(lambda: all_stopped(p.pid))
            with pytest.raises(fx.TransferTimeout):
                e.submit_single_write(64, None, (h, 0), (first, 0))
            os.kill(p.pid, signal.SIGCONT)
            p.call(do="count", imm=1)
            time.sleep(0.1)
            p.call(do="expect", imm=5, count=1)
            e.submit_single_write(64, 5, (h, 0), (second, 0), landed=True).wait()
            p.call(do="wait", id="expect")
            assert p.call(do="sums") == [0, 7 * 64]
            e.submit_single_write(64, 6, (h, 0), (first, 0), landed=True).wait()
            until(lambda: p.call(do="count", imm=6) == 1)
            assert p.call(do="sums") == [7 * 64, 7 * 64]
        finally:
            p.kill()


@pytest.mark.parametrize("fabric", FABRICS)
@pytest.mark.parametrize("progress", ["thread", "caller"])
def test_prepared_pages_of_a_removed_peer_are_refused_however_they_are_dropped(
    pairs: Callable[..., Pair], fabric: str, progress: str
) -> None:
    p = pairs(fabric=fabric, progress=progress)
    idx = np.arange(16, dtype=np.uint32)
    for _ in range(15):
        theirs = fx.MrDesc.from_bytes(p.desc.to_bytes())
        pages = p.a.prepare(1024, (p.handle, fx.Pages(idx, stride=1024)), (theirs, fx.Pages(idx, stride=1024)))
        p.a.submit_prepared(pages, 1).wait()
        p.a.remove_peer(p.b.address)
        last = None
        for _ in range(200):
            last = p.a.submit_prepared(pages, 1)
        del pages, theirs
        junk = [bytearray(700) for _ in range(200)]
        with pytest.raises(fx.PeerLostError):
            last.wait()  # type: ignore[union-attr]
        del junk
        p.a.submit_single_write(1, 1, (p.handle, 0), (fx.MrDesc.from_bytes(p.desc.to_bytes()), 0)).wait()


@pytest.mark.parametrize("fabric", FABRICS)
def test_removing_a_peer_under_its_writers_leaves_nothing_broken(pairs: Callable[..., Pair], fabric: str) -> None:
    p = pairs(fabric=fabric)
    stop = threading.Event()

    def write() -> None:
        d = fx.MrDesc.from_bytes(p.desc.to_bytes())
        while not stop.is_set():
            try:
                p.a.submit_single_write(1, 1, (p.handle, 0), (d, 0)).wait(5)
            except fx.FabricxError:
                pass

    threads = [threading.Thread(target=write) for _ in range(3)]
    for t in threads:
        t.start()
    removed = 0
    end = time.monotonic() + 3
    while removed < 150 and time.monotonic() < end:
        try:
            p.a.remove_peer(p.b.address, timeout=2)
            removed += 1
        except fx.UnknownPeer:
            pass
    stop.set()
    for t in threads:
        t.join(20)
        assert not t.is_alive()
    assert removed > 3
    try:
        p.write(1, 1).wait()
    except fx.PeerLostError:
        p.a.connect(p.b.address)
        p.write(1, 1).wait()


def test_a_peer_can_come_and_go_more_often_than_there_are_places(pairs: Callable[..., Pair]) -> None:
    p = pairs()
    for _ in range(1100):
        p.a.connect(p.b.address)
        p.a.remove_peer(p.b.address)
    x = p.b.expect_imm_count(3, 1)
    p.write(64, 3).wait()
    x.wait()
    assert (p.dst[:64] == p.src[:64]).all()


@pytest.mark.parametrize("fabric", FABRICS)
def test_shards_of_a_new_connection_survive_the_end_of_the_old_one(pairs: Callable[..., Pair], fabric: str) -> None:
    """The receiver's callback thread is busy, so that it looks at the end of the old connection late."""
    p = pairs(fabric=fabric, nics=2, size=8 << 20)
    gate = threading.Event()
    p.write(100, 1).wait()
    p.b.expect_imm_count(99, 0, lambda t: gate.wait(20))
    for _ in range(10):
        p.write(8 << 20, 7).cancel()
        p.a.remove_peer(p.b.address)
        p.a.connect(p.b.address)
    seen = p.b.imm_count(7)
    p.dst[:] = 0
    x = p.b.expect_imm_count(8, 3)
    for _ in range(3):
        p.write(8 << 20, 8).wait()
    gate.set()
    x.wait()
    assert (p.dst == p.src).all()
    assert seen <= 10


def test_split_writes_go_on_when_all_tags_are_lost(pairs: Callable[..., Pair]) -> None:
    """A tag goes with each split write that fails; without any, writes go whole."""
    p = pairs(nics=2, size=8 << 20, config=dataclasses.replace(QUICK, timeout=3.0))
    for k in range(3000):
        t = p.write(8 << 20, 7)
        if k % 2:
            time.sleep(0.0002)
        t.cancel()
        if k % 500 == 499:
            x = p.b.expect_imm_count(8, 1)
            p.write(8 << 20, 8).wait()
            x.wait()
    assert (p.dst == p.src).all()


# ---------------------------------------------------------------- close


def test_a_callback_that_closes_does_not_wait_for_who_closes() -> None:
    e = fx.TransferEngine("local", config=QUICK)
    inside = threading.Event()
    done = threading.Event()

    def cb(t: fx.Transfer) -> None:
        inside.set()
        time.sleep(0.2)
        e.close()
        done.set()

    e.expect_imm_count(1, 0, cb)
    assert inside.wait(10)
    e.close()
    assert done.wait(5)  # it would take the 10 s that close() gives callbacks


def test_close_with_nonsense_changes_nothing() -> None:
    e = fx.TransferEngine("local", config=QUICK)
    with pytest.raises((TypeError, ValueError)):
        e.close("x")  # type: ignore[arg-type]
    x = e.expect_imm_count(1, 1)
    h, d = e.reg_mr(e.alloc(64))
    e.submit_single_write(8, 1, (h, 0), (d, 32)).wait()
    x.wait()
    e.close()
    assert e.closed


@pytest.mark.parametrize("fabric", FABRICS)
def test_ctrl_c_in_close_closes_all_the_same(fabric: str) -> None:
    """A transfer to a peer that is stopped keeps close() waiting; SIGINT ends the patience."""
    code = f"""
import os, signal, sys, threading, time
import fabricx as fx
e = fx.TransferEngine({fabric!r})
e.expect_imm_count(1, 1)
h, d = e.reg_mr(e.alloc(64))
with fx.TransferEngine({fabric!r}) as b:
    t = e.submit_send(b.address, b"x", timeout=60)  # nobody receives
    print("ready", flush=True)
    try:
        e.close(30)
    except KeyboardInterrupt:
        print("interrupted", type(t.exception()).__name__, flush=True)
    e.close()
    names = [x.name for x in threading.enumerate() if e.name in x.name and "callbacks" in x.name]
    print(len(names), flush=True)
"""
    p = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert p.stdout is not None
    assert p.stdout.readline() == "ready\n"
    time.sleep(0.3)
    p.send_signal(signal.SIGINT)
    out, _ = p.communicate(timeout=20)
    assert out.splitlines()[0] == "interrupted EngineClosed"
    assert p.returncode == 0


@pytest.mark.parametrize("fabric", FABRICS)
@pytest.mark.parametrize("progress", ["thread", "caller"])
def test_what_is_submitted_while_the_engine_closes_ends(pairs: Callable[..., Pair], fabric: str, progress: str) -> None:
    """The submit has passed its checks and copies without the GIL when close() comes."""
    p = pairs(fabric=fabric, progress=progress)
    p.a.connect(p.b.address)
    big = bytes(200 << 20)
    out: list[object] = []

    def send() -> None:
        try:
            out.append(p.a.submit_send(p.b.address, big))
        except fx.EngineClosed as e:
            out.append(e)

    t = threading.Thread(target=send)
    t.start()
    time.sleep(0.01)
    p.a.close(0)
    t.join(20)
    if isinstance(out[0], fx.Transfer):
        with pytest.raises(fx.EngineClosed):
            out[0].wait(5)


@pytest.mark.parametrize("fabric", FABRICS)
def test_quiet_after_close(pairs: Callable[..., Pair], fabric: str) -> None:
    p = pairs(fabric=fabric)
    t = p.write(100)
    t.wait()
    p.a.close()
    t.quiesced().wait(5)


# ---------------------------------------------------------------- memory that must not be written


@pytest.mark.parametrize(
    ("fabric", "reach"),
    [("local", "auto"), ("local", "vm"), ("local", "bounce"), pytest.param("ofi", "auto", marks=FABRICS[1].marks)],  # type: ignore[union-attr]
)
def test_read_only_memory_is_a_source_and_no_target(
    pairs: Callable[..., Pair], tmp_path: Path, fabric: str, reach: str
) -> None:
    p = pairs(fabric=fabric, config=dataclasses.replace(QUICK, local_reach=reach))
    (tmp_path / "f").write_bytes(b"7" * 8192)
    mapped = np.memmap(tmp_path / "f", np.uint8, mode="r")
    for memory in (mapped, b"7" * 8192, memoryview(bytearray(b"7" * 8192)).toreadonly()):
        _, theirs = p.b.reg_mr(memory)
        with pytest.raises(fx.UnregisteredRemote):
            p.a.submit_single_write(64, None, (p.handle, 0), (theirs, 0)).wait()
        assert bytes(memory) == b"7" * 8192
        source, _ = p.a.reg_mr(memory)
        p.a.submit_single_write(8192, None, (source, 0), (p.desc, 0), landed=True).wait()
        assert bytes(p.dst[:8192]) == b"7" * 8192
        p.dst[:8192] = 0


# ---------------------------------------------------------------- what nobody holds


def test_an_expectation_that_nobody_holds_fails_with_its_peer(pairs: Callable[..., Pair]) -> None:
    with fx.TransferEngine("local", config=QUICK) as e:
        p = Peer()
        counter = fx.Counter()
        try:
            h, _ = e.reg_mr(e.alloc(64))
            d = desc(p, p.desc)
            e.submit_single_write(8, None, (h, 0), (d, 0)).wait()
            e.expect_imm_count(3, 1, counter, timeout=60, peers=[d.owner])
            gc.collect()
        finally:
            p.kill()
        until(lambda: counter.failed == 1)


def test_loops_that_end_with_transfers_awaited_leave_no_descriptors() -> None:
    async def give_up(e: fx.TransferEngine) -> None:
        t = e.expect_imm_count(1, 1, timeout=30)
        try:
            await asyncio.wait_for(asyncio.shield(asyncio.ensure_future(_wait(t))), 0.001)
        except TimeoutError:
            pass
        kept.append(t)

    async def _wait(t: fx.Transfer) -> None:
        await t

    kept: list[fx.Transfer] = []
    with fx.TransferEngine("local", config=QUICK) as e:
        for _ in range(3):
            asyncio.run(give_up(e))
        e.free_imm(1)
        kept.clear()
        asyncio.run(asyncio.sleep(0))
        before = psutil.Process().num_fds()
        for _ in range(20):
            asyncio.run(give_up(e))
            e.free_imm(1)
            kept.clear()
        gc.collect()
        assert psutil.Process().num_fds() <= before + 4


def test_pools_freed_in_a_forked_child_stay_the_parents(pair: Pair) -> None:
    got: list[bytes] = []
    pool = pair.b.submit_recvs(64, 2, lambda m, who: got.append(bytes(m)))
    pid = os.fork()
    if pid == 0:
        pool.free()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    for k in range(4):
        pair.a.submit_send(pair.b.address, b"%d" % k).wait()
    until(lambda: len(got) == 4)


@pytest.mark.parametrize(
    ("what", "error", "words"),
    [
        (lambda: fx.TransferEngine("local", nics=[]), fx.OutOfRange, "nics"),
        (lambda: fx.TransferEngine("local", nics=0), fx.OutOfRange, "nics"),
        (lambda: fx.TransferEngine("local", chaos=5), TypeError, "chaos"),
        (lambda: fx.TransferEngine("local", config=5), TypeError, "config"),
        (lambda: fx.TransferEngine("local", chaos=fx.Chaos(1, fail_nic=7)), fx.OutOfRange, "NIC 7"),
    ],
)
def test_engines_that_cannot_be_are_refused_by_name(what: Callable[[], object], error: type[Exception], words: str) -> None:
    before = psutil.Process().num_fds()
    with pytest.raises(error, match=words):
        what()
    gc.collect()
    assert psutil.Process().num_fds() <= before


def test_arguments_of_reg_mr_are_checked(pair: Pair) -> None:
    for kw in ({"device": 5}, {"name": 5}, {"length": 1.5}):
        with pytest.raises(TypeError, match=next(iter(kw))):
            pair.a.reg_mr(bytearray(64), **kw)
    assert pair.a.alloc(np.int64(64)).nbytes == 64
