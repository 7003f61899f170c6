"""What users do wrong, or at a bad moment: each is refused with words that help, and changes nothing."""

from __future__ import annotations

import gc
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
from engines import QUICK, Pair, until

import fabricx as fx

ROOT = Path(__file__).resolve().parents[2]


# ---------------------------------------------------------------- after close


def test_every_call_of_a_closed_engine_says_that_it_is_closed() -> None:
    e = fx.TransferEngine("local", config=QUICK)
    h, d = e.reg_mr(e.alloc(64))
    address, pages = e.address, fx.Pages(count=1, stride=8)
    prepared = e.prepare(8, (h, pages), (d, pages))
    group = e.add_peer_group([address])
    e.close()
    calls: dict[str, Callable[[], object]] = {
        "alloc": lambda: e.alloc(64),
        "reg_mr": lambda: e.reg_mr(bytearray(8)),
        "connect": lambda: e.connect(address),
        "remove_peer": lambda: e.remove_peer(address),
        "add_peer_group": lambda: e.add_peer_group([address]),
        "submit_send": lambda: e.submit_send(address, b"x"),
        "submit_recvs": lambda: e.submit_recvs(8, 1, print),
        "submit_single_write": lambda: e.submit_single_write(8, None, (h, 0), (d, 0)),
        "submit_paged_writes": lambda: e.submit_paged_writes(8, None, (h, pages), (d, pages)),
        "prepare": lambda: e.prepare(8, (h, pages), (d, pages)),
        "submit_prepared": lambda: e.submit_prepared(prepared, None),
        "submit_scatter": lambda: e.submit_scatter(group, None, h, [fx.ScatterDst(8, 0, d, 0)]),
        "submit_barrier": lambda: e.submit_barrier(group, 1, [d]),
        "alloc_imm": e.alloc_imm,
        "free_imm": lambda: e.free_imm(1),
        "expect_imm_count": lambda: e.expect_imm_count(1, 1),
        "imm_count": lambda: e.imm_count(1),
        "alloc_uvm_watcher": lambda: e.alloc_uvm_watcher(print),
    }
    for name, call in calls.items():
        with pytest.raises(fx.EngineClosed):
            call()
            pytest.fail(f"{name} did not refuse")
    still = {"close", "stats", "dereg_mr", "address", "addresses", "closed", "groups"}  # of use after the end
    public = {n for n in dir(e) if not n.startswith("_") and callable(getattr(type(e), n, None))}
    assert public - still <= set(calls), public - still - set(calls)
    e.dereg_mr(h)


# ---------------------------------------------------------------- NICs by number


@pytest.mark.parametrize("nic", [0, 1])
def test_scatter_and_barrier_go_over_the_nic_that_is_named(pairs: Callable[..., Pair], nic: int) -> None:
    p = pairs(nics=2)
    p.write(8).wait()
    before = [n["posts"] for n in p.a.stats()["groups"][0]["nics"]]
    x = p.b.expect_imm_count(3, 20)
    for _ in range(10):
        p.a.submit_scatter(None, 3, p.handle, [fx.ScatterDst(8, 0, p.desc, 0)], nic=nic).wait()
        p.a.submit_barrier(None, 3, [p.desc], nic=nic).wait()
    x.wait()
    after = [n["posts"] for n in p.a.stats()["groups"][0]["nics"]]
    assert after[nic] - before[nic] == 20 and after[1 - nic] == before[1 - nic]


def test_a_nic_that_is_not_there_is_refused(pair: Pair) -> None:
    for call in (
        lambda: pair.a.submit_scatter(None, 3, pair.handle, [fx.ScatterDst(8, 0, pair.desc, 0)], nic=7),
        lambda: pair.a.submit_barrier(None, 3, [pair.desc], nic=7),
        lambda: pair.write(8, nic=-1),
    ):
        with pytest.raises(fx.OutOfRange, match="nic"):
            call()
    pair.write(8).wait()
    until(lambda: pair.handle.inflight == 0)


# ---------------------------------------------------------------- groups of peers


def test_peers_that_do_not_answer_take_no_time_from_the_others() -> None:
    config = fx.Config.from_env(timeout=10, connect_timeout=1.0)
    with fx.TransferEngine("local", config=config) as e, fx.TransferEngine("local") as good:
        dead = []
        for _ in range(4):
            x = fx.TransferEngine("local")
            dead.append(x.address)
            x.close()
        with pytest.raises((fx.PeerLostError, fx.TransferTimeout), match="4 of 5") as info:
            e.add_peer_group([*dead, good.address])
        assert f"{good.address.incarnation:016x}" not in str(info.value)
        assert all(f"{a.incarnation:016x}" in str(info.value) for a in dead)
        assert len(e.add_peer_group([good.address, good.address])) == 2


def test_a_freed_group_is_refused_also_without_targets(pair: Pair) -> None:
    group = pair.a.add_peer_group([pair.b.address])
    group.free()
    with pytest.raises(fx.UnknownPeer, match="freed"):
        pair.a.submit_scatter(group, None, pair.handle, [])
    with pytest.raises(fx.UnknownPeer, match="freed"):
        pair.a.submit_barrier(group, 1, [])


# ---------------------------------------------------------------- memory


def test_memory_that_is_not_mapped_is_refused(pair: Pair) -> None:
    with pytest.raises(fx.RegistrationError, match="0x10000 .. 0x11000 are not all mapped"):
        pair.a.reg_mr(0x10000, 4096)
    import mmap

    m = mmap.mmap(-1, 1 << 20)
    at = np.frombuffer(m, np.uint8).ctypes.data
    for start, n in ((at, 1 << 20), (at + 5, 1), (at + (1 << 20) - 1, 1)):
        pair.a.dereg_mr(pair.a.reg_mr(start, n)[0])
    with pytest.raises(fx.RegistrationError, match="not all mapped"):
        pair.a.reg_mr(at, 1 << 40)


def test_views_that_a_callback_keeps_keep_the_buffer(pair: Pair) -> None:
    """One is a slice, one an array: as long as they live their bytes stay, and the pool goes on with the other buffers."""
    kept: list[object] = []
    got: list[bytes] = []

    def cb(m: memoryview, who: object) -> None:
        got.append(bytes(m))
        if len(got) == 1:
            kept.append(m[1:])
        elif len(got) == 2:
            kept.append(np.frombuffer(m, np.uint8))

    pool = pair.b.submit_recvs(64, 3, cb)
    for k in range(40):
        pair.a.submit_send(pair.b.address, f"{k:04}".encode()).wait()
        until(lambda k=k: len(got) == k + 1)
    assert got == [f"{k:04}".encode() for k in range(40)]
    assert bytes(kept[0]) == b"000" and bytes(kept[1]) == b"0001"
    assert len(pool._lent) == 2
    kept.clear()
    gc.collect()
    assert not pool._lent
    for _ in range(3):  # all three are there again
        pair.a.submit_send(pair.b.address, b"more").wait()
    until(lambda: len(got) == 43)


def test_a_pool_that_is_freed_ends_with_the_last_view_of_it(pair: Pair) -> None:
    kept: list[object] = []
    pool = pair.b.submit_recvs(64, 1, lambda m, who: kept.append(m[:]))
    pair.a.submit_send(pair.b.address, b"bytes").wait()
    until(lambda: kept)
    pool.free()
    time.sleep(0.01)
    assert pair.b._pools and bytes(kept[0]) == b"bytes"
    kept.clear()
    until(lambda: not pair.b._pools)


def test_an_array_of_a_message_does_not_stop_the_pool_when_the_callback_raises(pair: Pair) -> None:
    seen: list[BaseException] = []
    got: list[int] = []
    pair.b.on_error = seen.append

    def cb(m: memoryview, who: object) -> None:
        got.append(len(np.frombuffer(m, np.uint8)))
        raise KeyError("mine")

    pair.b.submit_recvs(64, 1, cb)
    for k in range(5):
        pair.a.submit_send(pair.b.address, b"x" * (k + 1)).wait()
    until(lambda: len(seen) == 5)
    assert got == [1, 2, 3, 4, 5] and all(isinstance(e, KeyError) for e in seen)


def test_regions_that_their_owner_took_back_are_forgotten(pair: Pair) -> None:
    me = psutil.Process()
    sizes = []
    for k in range(3000):
        h, d = pair.b.reg_mr(pair.dst_buf)
        t = pair.a.submit_single_write(8, None, (pair.handle, 0), (d, 0))
        t.wait()
        pair.b.dereg_mr(h)
        if k % 1000 == 999:
            sizes.append((len(pair.a._remotes), me.memory_info().rss))
    assert all(n <= 2 * 256 + 2 for n, _ in sizes)
    assert sizes[-1][1] - sizes[0][1] < 2 << 20
    with pytest.raises(fx.UnregisteredRemote):
        pair.a.submit_single_write(8, None, (pair.handle, 0), (d, 0)).wait()


def test_a_descriptor_that_was_forgotten_is_refused_for_ever(pair: Pair) -> None:
    """Its place serves another region by then, and must not be written through the old descriptor."""
    old = []
    for _ in range(20):
        h, d = pair.b.reg_mr(pair.dst_buf)
        pair.a.submit_single_write(8, None, (pair.handle, 0), (d, 0)).wait()
        pair.b.dereg_mr(h)
        old.append(d)
    with pair.a._lock:
        pair.a._sweep()
    fresh = []
    for _ in range(20):
        buf = pair.b.alloc(64)
        h, d = pair.b.reg_mr(buf)
        pair.a.submit_single_write(0, None, (pair.handle, 0), (d, 0)).wait()
        fresh.append(buf)
    for d in old:
        with pytest.raises(fx.UnregisteredRemote):
            pair.a.submit_single_write(8, None, (pair.handle, 0), (d, 0)).wait()
    assert not any(b.array.any() for b in fresh)


# ---------------------------------------------------------------- limits


def test_settings_beyond_their_width_are_refused_by_name() -> None:
    for name in ("spin", "yields", "max_early"):
        with pytest.raises(fx.OutOfRange, match=f"{name} is 4294967296.*4294967295"):
            fx.Config.from_env(**{name: 1 << 32})
    with pytest.raises(fx.OutOfRange, match="spin is 1.5"):
        fx.Config.from_env(spin=1.5)


@pytest.mark.parametrize("fabric", ["local", "ofi"])
def test_exhausted_descriptors_are_named(fabric: str) -> None:
    """A first write when no descriptor is left: an error that says so, and the engine goes on when there are some again."""
    if fabric == "ofi":
        from engines import ofi_reason

        if ofi_reason():
            pytest.skip(ofi_reason())
    code = f"""
import os, resource, sys
import fabricx as fx
fabric = {fabric!r}
config = fx.Config.from_env(connect_timeout=3.0, timeout=3.0)
with fx.TransferEngine(fabric, config=config) as a, fx.TransferEngine(fabric, config=config) as b:
    h, _ = a.reg_mr(a.alloc(64)); _, d = b.reg_mr(b.alloc(64))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    taken = []
    try:
        while True:
            taken.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        pass
    try:
        a.submit_single_write(8, None, (h, 0), (d, 0)).wait()
        print("went through")
    except fx.FabricxError as e:
        print(type(e).__name__, e)
    try:
        a.alloc(64)
    except fx.FabricxError as e:
        print(type(e).__name__, e)
    for fd in taken:
        os.close(fd)
    a.submit_single_write(8, None, (h, 0), (d, 0), landed=True).wait()
    print("goes on")
"""
    p = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT, check=False)
    assert p.returncode == 0, p.stderr[-2000:]
    lines = p.stdout.splitlines()
    assert lines[-1] == "goes on"
    assert lines[0] == "went through" or "open files" in lines[0], lines
    assert "RegistrationError" in lines[1] and "open files" in lines[1], lines
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 256  # of this process: untouched


def test_threads_that_free_and_receive_do_not_wait_for_each_other(pair: Pair) -> None:
    """free() from many threads at once, while messages come in."""
    for _ in range(10):
        pool = pair.b.submit_recvs(64, 4, lambda m, who: None)
        sends = [pair.a.submit_send(pair.b.address, b"x", timeout=0.2) for _ in range(6)]
        threads = [threading.Thread(target=pool.free) for _ in range(8)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(10)
            assert not t.is_alive()
        for s in sends:
            s.quiesced().wait(10)
        until(lambda: not pair.b._pools)
