"""Bad input: each cause has its own exception, its message names the thing, the range and the peer, nothing is posted."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable

import numpy as np
import pytest
from engines import Pair, until

import fabricx as fx
from fabricx.engine import fabric_class


def test_ranges_are_checked_at_both_ends(pair: Pair) -> None:
    size = len(pair.src)
    with pytest.raises(fx.OutOfRange, match=f"source source: bytes 10 .. {size + 10} of {size}"):
        pair.write(size, None, at=10)
    with pytest.raises(fx.OutOfRange, match=rf"target target at .*: bytes {size - 5} .. {size + 5} of {size}"):
        pair.write(10, None, to=size - 5)
    with pytest.raises(fx.OutOfRange):
        pair.write(1 << 63, None)
    with pytest.raises(fx.OutOfRange, match="length is -1"):
        pair.write(-1)
    with pytest.raises(fx.OutOfRange, match="2\\*\\*64"):
        pair.write(1, None, at=1 << 64)
    assert not pair.dst.any()


def test_offsets_beyond_32_bits_are_kept_whole(pair: Pair) -> None:
    with pytest.raises(fx.OutOfRange, match=str((1 << 32) + 8)):
        pair.write(8, None, at=1 << 32)
    with pytest.raises(fx.OutOfRange, match=str((1 << 40) + 8)):
        pair.write(8, None, to=1 << 40)


def test_one_bad_page_of_a_thousand_is_named_and_nothing_is_written(pair: Pair) -> None:
    good = np.arange(1000, dtype=np.uint32)
    bad = good.copy()
    bad[617] = 1 << 20
    with pytest.raises(fx.PageListError, match="target page 617 .*index 1048576.* at "):
        pair.a.submit_paged_writes(1024, 5, (pair.handle, fx.Pages(good, stride=1024)), (pair.desc, fx.Pages(bad, stride=1024)))
    with pytest.raises(fx.PageListError, match="source page 617"):
        pair.a.submit_paged_writes(1024, 5, (pair.handle, fx.Pages(bad, stride=1024)), (pair.desc, fx.Pages(good, stride=1024)))
    assert not pair.dst.any() and pair.b.imm_count(5) == 0


def test_page_lists_that_do_not_fit_each_other(pair: Pair) -> None:
    a, b = fx.Pages(stride=64, count=10), fx.Pages(stride=64, count=11)
    with pytest.raises(fx.PageListError, match="10 source pages of source and 11 target pages of target at"):
        pair.a.submit_paged_writes(64, 5, (pair.handle, a), (pair.desc, b))
    with pytest.raises(fx.PageListError, match="overlap"):
        pair.a.submit_paged_writes(64, 5, (pair.handle, a), (pair.desc, fx.Pages(stride=63, count=10)))
    with pytest.raises(fx.OutOfRange, match="page_len is 0"):
        pair.a.submit_paged_writes(0, 5, (pair.handle, a), (pair.desc, a))
    huge = fx.Pages(np.array([1 << 60], np.uint64), stride=1 << 10)
    with pytest.raises(fx.PageListError, match="page 0"):
        pair.a.submit_paged_writes(64, 5, (pair.handle, huge), (pair.desc, fx.Pages(stride=64, count=1)))


def test_four_causes_are_told_apart(pair: Pair) -> None:
    gone, _ = pair.a.reg_mr(bytearray(100))
    pair.a.dereg_mr(gone)
    with pytest.raises(fx.UnregisteredLocal):
        pair.a.submit_single_write(1, None, (gone, 0), (pair.desc, 0))
    theirs, desc = pair.b.reg_mr(pair.b.alloc(4096), name="short-lived")
    pair.a.submit_single_write(1, None, (pair.handle, 0), (desc, 0)).wait()
    pair.b.dereg_mr(theirs)
    with pytest.raises(fx.UnregisteredRemote, match="short-lived"):
        pair.a.submit_single_write(1, None, (pair.handle, 0), (desc, 0)).wait()
    never = pair.b.reg_mr(pair.b.alloc(4096))[1]
    forged = fx.MrDesc(owner=never.owner, base=never.base, length=never.length, rkeys=tuple(k ^ 1 << 40 for k in never.rkeys), device="cpu", name="forged")
    with pytest.raises(fx.UnregisteredRemote):
        pair.a.submit_single_write(1, None, (pair.handle, 0), (forged, 0)).wait()
    with pytest.raises(fx.OutOfRange):
        pair.write(1, None, to=len(pair.dst))
    with pytest.raises(fx.UnknownPeer, match="'null'"):
        pair.a.submit_send(dataclasses.replace(pair.b.address, fabric="null"), b"x")


def test_a_handle_of_another_engine_is_refused(pair: Pair) -> None:
    with pytest.raises(fx.UnregisteredLocal, match="another engine"):
        pair.a.submit_single_write(1, None, (pair.target, 0), (pair.desc, 0))


def test_source_and_target_may_not_overlap(pair: Pair) -> None:
    with pytest.raises(fx.OutOfRange, match="overlap"):
        pair.a.submit_single_write(100, None, (pair.handle, 0), (pair.back, 50))
    landed = pair.a.expect_imm_count(1, 1)  # that a write is done does not mean, on every fabric, that it has landed
    pair.a.submit_single_write(50, 1, (pair.handle, 0), (pair.back, 50)).wait()
    landed.wait()
    assert (pair.src[50:100] == pair.src[:50]).all()


def test_a_region_is_taken_away_once(pair: Pair) -> None:
    h, _ = pair.a.reg_mr(bytearray(64))
    pair.a.dereg_mr(h)
    with pytest.raises(fx.UnregisteredLocal):
        pair.a.dereg_mr(h)


def test_what_is_in_use_is_not_taken_away(pairs: Callable[..., Pair]) -> None:
    p = pairs(a={"chaos": fx.Chaos(1, order=[0, 1])})  # the first write is held until there is a second
    t = p.write(100)
    with pytest.raises(fx.InUse, match="source.*1 transfers"):
        p.a.dereg_mr(p.handle, wait=False)
    with pytest.raises(fx.InUse, match="in flight"):
        p.a.remove_peer(p.b.address, wait=False)
    with pytest.raises(fx.TransferTimeout, match="still used"):
        p.a.dereg_mr(p.handle, timeout=0.05)
    p.write(100)
    p.a.remove_peer(p.b.address)
    assert t.done()
    p.a.dereg_mr(p.handle)
    with pytest.raises(fx.UnknownPeer):
        p.a.remove_peer(p.b.address)


def test_a_removed_peer_can_be_connected_again(pairs: Callable[..., Pair]) -> None:
    p = pairs()
    for _ in range(20):
        p.write(8, 5).wait()
        p.a.remove_peer(p.b.address)
    p.write(8, 5).wait()
    p.b.expect_imm_count(5, 21).wait()


def test_a_closed_engine_says_so(pair: Pair) -> None:
    x = pair.b.expect_imm_count(5, 1)
    pair.b.close()
    with pytest.raises(fx.EngineClosed):
        x.wait()
    for call in (lambda: pair.b.expect_imm_count(5, 1), lambda: pair.b.reg_mr(bytearray(8)), lambda: pair.b.alloc_imm(),
                 lambda: pair.b.submit_send(pair.a.address, b"x")):
        with pytest.raises(fx.EngineClosed):
            call()


def test_a_fabric_asked_for_by_name_is_never_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(fx.FabricUnavailable, match="there is no fabric 'infiniband'"):
        fx.TransferEngine("infiniband")
    with contextlib.suppress(fx.FabricUnavailable):  # not in this build
        no = (False, "no RDMA port is active")
        monkeypatch.setattr(fabric_class("verbs"), "available", classmethod(lambda cls: no))
    with pytest.raises(fx.FabricUnavailable, match="'verbs'"):
        fx.TransferEngine("verbs")
    with pytest.raises(fx.FabricUnavailable, match="/nowhere/libfabric"):
        fx.TransferEngine("ofi", config=fx.Config(ofi_library="/nowhere/libfabric.so"))


@pytest.mark.parametrize("options", [{"nics": 0}, {"nics": 17}, {"devices": ()}, {"devices": ("cpu:0", "cpu:0")}, {"progress": "magic"}, {"polling": "never"}])
def test_bad_options_are_named(options: dict[str, object]) -> None:
    with pytest.raises(fx.OutOfRange, match=next(iter(options)).rstrip("s")):
        fx.TransferEngine("local", **options)  # type: ignore[arg-type]


def test_a_refused_submit_leaves_nothing_behind(pair: Pair) -> None:
    """Nothing is kept of a request that was never handed over (it was given back once too often)."""
    h, _ = pair.a.reg_mr(bytearray(64))
    pages = fx.Pages(stride=8, count=4)
    plan = pair.a.prepare(8, (h, pages), (pair.desc, pages))
    pair.a.dereg_mr(h)
    for _ in range(50):
        with pytest.raises(fx.UnregisteredLocal):
            pair.a.submit_prepared(plan, 3)
        with pytest.raises(TypeError):
            pair.b.expect_imm_count(5, 1, fx.Counter(), peers=5)
        with pytest.raises(TypeError):
            pair.write(8, 5, on_done="x")
        with pytest.raises(fx.OutOfRange):
            pair.write(8, 5, nic=99)
    for k in range(100):
        pair.write(8, 5, to=k * 8)
    pair.b.expect_imm_count(5, 100).wait()


def test_misuse_is_refused_and_never_crashes(pair: Pair) -> None:
    with pytest.raises(TypeError, match="submit"):
        fx.Transfer()
    with pytest.raises(fx.OutOfRange):
        pair.a.alloc_uvm_watcher(print, word=0)
    with pytest.raises(fx.OutOfRange):
        pair.a.alloc_uvm_watcher(print, word=np.zeros(3, np.uint8))
    with pytest.raises(TypeError, match="float"):
        pair.write(8, 1.9)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="MrHandle"):
        pair.a.dereg_mr(None)  # type: ignore[arg-type]
    for bad in (-1, 1 << 40):
        with pytest.raises(fx.OutOfRange):
            pair.b.imm_count(bad)


def test_short_deadlines_are_kept_by_an_idle_engine(pair: Pair) -> None:
    """The second came a revolution of the wheel (4.3 s) late."""
    for _ in range(6):
        t = time.monotonic()
        with pytest.raises(fx.TransferTimeout):
            pair.b.expect_imm_count(5, 1, timeout=0.001).wait()
        assert time.monotonic() - t < 2
        time.sleep(0.02)


def test_the_callback_thread_outlives_what_on_error_raises(pair: Pair) -> None:
    def bad(_: BaseException) -> None:
        raise SystemExit(1)

    pair.a.on_error = bad
    pair.write(8, None, on_done=lambda t: 1 / 0).wait()
    after: list[int] = []
    pair.write(8, None, on_done=lambda t: after.append(1)).wait()
    until(lambda: after)


def test_expecting_of_a_peer_that_died_before_is_refused(pairs: Callable[..., Pair]) -> None:
    p = pairs()
    p.write(0, 9).wait()
    lost: list[object] = []
    p.b.on_peer_lost = lost.append
    addr = p.a.address
    p.a.close()
    until(lambda: lost)
    with pytest.raises(fx.PeerLostError, match="lost already"):
        p.b.expect_imm_count(3, 1, peers=[addr])
