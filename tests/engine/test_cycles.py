"""The same thing thousands of times: nothing grows, nothing slows down, nothing is left of what failed."""

from __future__ import annotations

import dataclasses
import gc
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from engines import QUICK, Pair, until
from peer import Peer

import fabricx as fx

ROOT = Path(__file__).resolve().parents[2]


def test_ten_thousand_registrations_stay_flat() -> None:
    """Descriptors and memory do not grow; the late half is not slower in kind (the medians of many are compared, and by
    a factor that no noise makes: 5)."""
    me = psutil.Process()
    with fx.TransferEngine("local") as e:
        memory = e.alloc(4096)
        times = []
        for k in range(10_000):
            t = time.perf_counter()
            h, _ = e.reg_mr(memory)
            e.dereg_mr(h)
            times.append(time.perf_counter() - t)
            if k == 1000:
                fds, rss = me.num_fds(), me.memory_info().rss
        assert me.num_fds() <= fds  # fewer: engines of tests before may end late
        assert me.memory_info().rss - rss < 2 << 20
        early, late = sorted(times[500:2500])[1000], sorted(times[8000:])[1000]
        assert late < 5 * early
        assert e.stats()["regions"] == 1  # our own


def test_a_thousand_failed_connects_leave_nothing() -> None:
    me = psutil.Process()
    with fx.TransferEngine("local", config=QUICK) as e, fx.TransferEngine("local") as other:
        gone = fx.TransferEngine("local")
        dead = gone.address
        gone.close()
        stale = dataclasses.replace(other.address, incarnation=other.address.incarnation ^ 1)

        def fail() -> None:
            for a in (dead, stale):
                with pytest.raises(fx.PeerLostError, match=f"{a.incarnation:016x}"):
                    e.connect(a)

        for _ in range(20):
            fail()
        gc.collect()
        before = me.num_fds(), threading.active_count()
        for _ in range(480):
            fail()
        deadline = time.monotonic() + 5
        while (me.num_fds(), threading.active_count()) != before and time.monotonic() < deadline:
            time.sleep(0.01)
        assert (me.num_fds(), threading.active_count()) == before
        e.connect(other.address)


def test_sixteen_threads_resolve_one_peer_after_its_removal(pairs: Callable[..., Pair]) -> None:
    p = pairs()
    for _ in range(5):
        errors: list[BaseException] = []

        def go(errors: list[BaseException] = errors) -> None:
            try:
                p.write(8, 5).wait()
            except BaseException as e:
                errors.append(e)

        threads = [threading.Thread(target=go) for _ in range(16)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(10)
        assert not errors
        assert sum(x["alive"] for x in p.a.groups[0].domains[0].peers()) == 1
        p.a.remove_peer(p.b.address)
    p.b.expect_imm_count(5, 80).wait()


def test_many_peers_at_once() -> None:
    """More than a summary word of lanes."""
    with fx.TransferEngine("local", config=QUICK) as hub:
        buf = hub.alloc(1 << 16)
        _, desc = hub.reg_mr(buf)
        engines = [fx.TransferEngine("local", config=QUICK, progress="caller") for _ in range(70)]
        try:
            done = hub.expect_imm_count(1, 70 * 3)
            for i, e in enumerate(engines):
                h, _ = e.reg_mr(bytearray([i + 1]) * 100)
                for k in range(3):
                    e.submit_single_write(100, 1, (h, 0), (fx.MrDesc.from_bytes(desc.to_bytes()), i * 300 + k * 100))
            done.wait()
            for i in range(70):
                assert (buf.array[i * 300 : (i + 1) * 300] == i + 1).all()
            group = hub.add_peer_group([e.address for e in engines])
            descs = [e.reg_mr(e.alloc(64))[1] for e in engines]
            waits = [e.expect_imm_count(2, 1) for e in engines]
            hub.submit_barrier(group, 2, descs).wait()
            for w in waits:
                w.wait()
        finally:
            for e in engines:
                e.close()


def test_a_missing_rank_is_named() -> None:
    with fx.TransferEngine("local", config=QUICK) as a, fx.TransferEngine("local") as b:
        gone = fx.TransferEngine("local")
        addr = gone.address
        gone.close()
        with pytest.raises(fx.PeerLostError, match=f"1 of 2 peers.*{addr.incarnation:016x}"):
            a.add_peer_group([b.address, addr], timeout=2)


def test_exhausted_descriptors_are_an_error_that_says_so() -> None:
    code = (
        "import resource, fabricx as fx\n"
        "with fx.TransferEngine('local') as e:\n"
        "    resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))\n"
        "    kept = []\n"
        "    try:\n"
        "        while True: kept.append(e.alloc(12345))\n"
        "    except fx.RegistrationError as x: print(x.errno, x)\n"
        "    try: fx.TransferEngine('local')\n"
        "    except OSError as x: print(type(x).__name__, x)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    p = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert p.returncode == 0, p.stderr
    assert "24" in p.stdout and "12345 bytes" in p.stdout and p.stdout.count("\n") == 2


def test_registrations_run_out_with_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from fabricx import _local

    monkeypatch.setattr("fabricx.fabrics.local._local.N_REGIONS", 4)
    assert _local.N_REGIONS == 4
    with fx.TransferEngine("local") as e:
        for _ in range(3):
            e.reg_mr(bytearray(8))
        with pytest.raises(fx.RegistrationError, match="777 bytes.*all 4 registrations") as x:
            e.reg_mr(bytearray(777))
        assert x.value.errno == 28


def test_chaos_between_processes() -> None:
    """Decisions are functions of (seed, peer, sequence number) there: counts and bytes stay exact."""
    reader = Peer(size=1 << 20, nics=2)
    writers = [Peer(size=1 << 20, nics=n, chaos={"seed": n, "max_delay": 40}) for n in (1, 2, 4)]
    try:
        reader.call(do="expect", imm=3, count=3 * 50)
        for i, w in enumerate(writers):
            w.call(do="fill", n=1 << 20, value=i + 1)
            w.send(do="writes", count=50, n=100_000, imm=3, to=i * 100_000, desc=reader.desc)
        for w in writers:
            w.answer()
        reader.call(do="wait", id="expect")
        for i in range(3):
            assert reader.call(do="sum", at=i * 100_000, n=100_000) == (i + 1) * 100_000
        assert reader.call(do="count", imm=3) == 0
    finally:
        for p in (reader, *writers):
            p.kill()


def test_a_virtual_clock_replays_exactly() -> None:
    """The same seed gives the same order of arrival, other seeds others: one thread polls, a tick is a poll."""

    def run(seed: int) -> list[int]:
        caller = {"config": QUICK, "progress": "caller"}
        a = fx.TransferEngine("local", chaos=fx.Chaos(seed, order=None, max_delay=30), **caller)  # type: ignore[arg-type]
        b = fx.TransferEngine("local", **caller)  # type: ignore[arg-type]
        try:
            h, _ = a.reg_mr(a.alloc(4096))
            _, d = b.reg_mr(b.alloc(4096))
            a.submit_single_write(8, 99, (h, 0), (d, 0)).wait()
            b.expect_imm_count(99, 1).wait()
            seen: list[int] = []
            with a.groups[0].lock():  # nobody polls a before all are queued
                ends = [a.submit_single_write(8, i, (h, 0), (d, 8 * i), lambda t, i=i: seen.append(i)) for i in range(12)]
            for t in ends:
                t.wait()
            until(lambda: len(seen) == 12)
            return seen
        finally:
            a.close()
            b.close()

    first = [run(seed) for seed in range(6)]
    assert [run(seed) for seed in range(6)] == first
    assert len({tuple(x) for x in first}) > 1


def test_memlock_is_of_no_concern_to_the_local_fabric() -> None:
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))\n"
        "import fabricx as fx\n"
        "with fx.TransferEngine('local') as e: e.reg_mr(e.alloc(1 << 20)); e.expect_imm_count(1, 0).wait()\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    p = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert p.returncode == 0, p.stderr
    assert resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] != 0


def test_regions_that_are_taken_back_are_unmapped_by_their_writers(pairs: Callable[..., Pair]) -> None:
    def maps() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:fabricx ")

    p = Peer()
    e = fx.TransferEngine("local", config=QUICK)
    try:
        h, _ = e.reg_mr(bytearray(64))
        import base64

        first = fx.MrDesc.from_bytes(base64.b64decode(p.desc))
        e.submit_single_write(8, None, (h, 0), (first, 0)).wait()
        before = maps()
        for _ in range(10):
            d = fx.MrDesc.from_bytes(base64.b64decode(p.call(do="register", n=1 << 20)))
            e.submit_single_write(8, None, (h, 0), (d, 0)).wait()
            p.call(do="forget")
            with pytest.raises(fx.UnregisteredRemote):
                e.submit_single_write(8, None, (h, 0), (d, 0)).wait()
        until(lambda: maps() <= before)
        e.submit_single_write(8, None, (h, 0), (first, 0)).wait()
    finally:
        e.close()
        p.kill()
