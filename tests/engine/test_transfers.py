"""What each submit does, how its end is told, and that everything ends once."""

from __future__ import annotations

import ctypes
import logging
import threading
import time

import numpy as np
import pytest
from engines import Pair, until

import fabricx as fx


@pytest.mark.parametrize("n", [0, 1, 7, 8, 63, 64, 4095, 4096, 262_144, 262_145, 1_000_001])
@pytest.mark.parametrize("offset", [0, 1, 13])
def test_a_write_puts_its_bytes_and_no_others(pair: Pair, n: int, offset: int) -> None:
    x = pair.b.expect_imm_count(5, 1)
    pair.write(n, 5, at=offset, to=offset + 3).wait()
    x.wait()
    assert (pair.dst[offset + 3 : offset + 3 + n] == pair.src[offset : offset + n]).all()
    assert not pair.dst[: offset + 3].any() and not pair.dst[offset + 3 + n :].any()


@pytest.mark.parametrize("kinds", [(np.uint32, np.uint32), (np.uint64, np.uint32), (np.int64, np.int32)])
def test_pages_go_where_their_indices_say_and_each_counts(pair: Pair, kinds: tuple[type, type]) -> None:
    rng = np.random.default_rng(3)
    si = rng.permutation(500)[:321].astype(kinds[0])
    di = rng.permutation(500)[:321].astype(kinds[1])
    x = pair.b.expect_imm_count(6, 321)
    t = pair.a.submit_paged_writes(
        1000, 6, (pair.handle, fx.Pages(si, stride=1024, offset=24)), (pair.desc, fx.Pages(di, stride=2000, offset=5))
    )
    t.wait()
    x.wait()
    want = np.zeros_like(pair.dst)
    for s, d in zip(si.tolist(), di.tolist(), strict=True):
        want[5 + d * 2000 : 5 + d * 2000 + 1000] = pair.src[24 + s * 1024 : 24 + s * 1024 + 1000]
    assert (pair.dst == want).all()


def test_pages_without_indices_are_consecutive(pair: Pair) -> None:
    pages = fx.Pages(stride=512, count=10)
    x = pair.b.expect_imm_count(6, 10)
    pair.a.submit_paged_writes(512, 6, (pair.handle, pages), (pair.desc, pages)).wait()
    x.wait()
    assert (pair.dst[:5120] == pair.src[:5120]).all() and not pair.dst[5120:].any()


def test_zero_pages_and_zero_targets_complete(pair: Pair) -> None:
    none = fx.Pages(np.array([], np.uint32), stride=512)
    pair.a.submit_paged_writes(512, 6, (pair.handle, none), (pair.desc, none)).wait()
    pair.a.submit_scatter(None, 6, pair.handle, []).wait()
    pair.a.submit_barrier(None, 6, []).wait()
    pair.write(0, 6).wait()
    pair.b.expect_imm_count(6, 1).wait()
    assert pair.b.imm_count(6) == 0


def test_prepared_pages_are_submitted_again_and_again(pair: Pair) -> None:
    pages = fx.Pages(np.arange(64, dtype=np.uint32)[::-1].copy(), stride=256)
    plan = pair.a.prepare(256, (pair.handle, pages), (pair.desc, pages))
    assert plan.count == 64
    x = pair.b.expect_imm_count(6, 640)
    for _ in range(10):
        pair.a.submit_prepared(plan, 6)
    x.wait()
    assert (pair.dst[: 64 * 256] == pair.src[: 64 * 256]).all()


def test_scatter_and_barrier_reach_every_peer(pairs) -> None:  # type: ignore[no-untyped-def]
    p = pairs()
    others = [fx.TransferEngine("local") for _ in range(3)]
    try:
        regs = [e.reg_mr(e.alloc(4096)) for e in others]
        group = p.a.add_peer_group([e.address for e in others])
        waits = [e.expect_imm_count(9, 2) for e in others]
        dsts = [fx.ScatterDst(1000, i * 1000, d, 100) for i, (_, d) in enumerate(regs)]
        p.a.submit_scatter(group, 9, p.handle, dsts).wait()
        p.a.submit_barrier(group, 9, [d for _, d in regs]).wait()
        for i, (w, (h, _)) in enumerate(zip(waits, regs, strict=True)):
            w.wait()
            assert (h.memory.owner.array[100:1100] == p.src[i * 1000 : (i + 1) * 1000]).all()
        with pytest.raises(fx.UnknownPeer, match="not in this group"):
            p.a.submit_barrier(group, 9, [p.desc])
        group.free()
        with pytest.raises(fx.UnknownPeer, match="freed"):
            p.a.submit_barrier(group, 9, [regs[0][1]])
    finally:
        for e in others:
            e.close()


def test_a_large_slice_of_a_scatter_arrives_whole(pair: Pair) -> None:
    x = pair.b.expect_imm_count(9, 2)
    dsts = [fx.ScatterDst(700_000, 0, pair.desc, 0), fx.ScatterDst(10, 0, pair.desc, 1_000_000)]
    pair.a.submit_scatter(None, 9, pair.handle, dsts).wait()
    x.wait()
    assert (pair.dst[:700_000] == pair.src[:700_000]).all() and (pair.dst[1_000_000:1_000_010] == pair.src[:10]).all()


def test_the_callback_gets_the_transfer_once_whatever_the_end(pair: Pair) -> None:
    ends: list[str] = []
    done = pair.write(100, None, on_done=lambda t: ends.append(t.status))
    done.wait()
    x = pair.b.expect_imm_count(5, 1, lambda t: ends.append(t.status), timeout=0.03)
    with pytest.raises(fx.TransferTimeout):
        x.wait()
    y = pair.b.expect_imm_count(5, 1, lambda t: ends.append(t.status))
    assert y.cancel() and not y.cancel()
    until(lambda: len(ends) == 3)
    time.sleep(0.02)
    assert ends == ["done", "failed", "cancelled"]


def test_a_native_callback_and_a_counter_are_told_without_python(pair: Pair) -> None:
    word = (ctypes.c_uint64 * 2)()
    made = ctypes.CFUNCTYPE(None, ctypes.c_uint64, ctypes.c_int64)

    def note(arg: int, status: int) -> None:
        word[0] += arg
        word[1] |= status

    f = made(note)
    native = fx.NativeCallback(ctypes.cast(f, ctypes.c_void_p).value, 3, keep=f)
    counter = fx.Counter()
    for _ in range(5):
        pair.write(8, None, on_done=native)
        pair.write(8, None, on_done=counter)
    until(lambda: word[0] == 15 and counter.done == 5)
    x = pair.b.expect_imm_count(5, 1, counter)
    x.cancel()
    until(lambda: counter.failed == 1)
    assert word[1] == 0 and counter.done == 5


def test_numba_cfunc_is_called_by_the_worker(pair: Pair) -> None:
    numba = pytest.importorskip("numba", reason="numba is not installed")
    seen = np.zeros(1, np.uint64)

    @numba.extending.intrinsic
    def at(ctx, addr):  # type: ignore[no-untyped-def]
        ptr = numba.types.CPointer(numba.types.uint64)

        def gen(cgctx, b, sig, args):  # type: ignore[no-untyped-def]
            return b.inttoptr(args[0], cgctx.get_value_type(ptr))

        return ptr(numba.types.uint64), gen

    @numba.cfunc("void(uint64, int64)")
    def bump(arg, status):  # type: ignore[no-untyped-def]
        a = numba.carray(at(arg), (1,))
        a[0] += np.uint64(1)

    for _ in range(7):
        pair.write(8, None, on_done=fx.NativeCallback(bump.address, seen.ctypes.data, keep=(bump, seen)))
    until(lambda: seen[0] == 7)


def test_a_raising_callback_ends_nothing_else(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    errors: list[BaseException] = []
    pair.a.on_error = errors.append

    def bad(_: fx.Transfer) -> None:
        raise RuntimeError("mine")

    with caplog.at_level(logging.ERROR, "fabricx"):
        pair.write(8, None, on_done=bad).wait()
        until(lambda: errors)
    assert str(errors[0]) == "mine" and "a callback raised" in caplog.text
    after: list[int] = []
    pair.write(8, None, on_done=lambda t: after.append(1)).wait()
    until(lambda: after)


def test_a_slow_callback_does_not_stall_the_worker(pair: Pair) -> None:
    gate = threading.Event()
    pair.b.expect_imm_count(1, 1, lambda t: gate.wait(5))
    pair.write(0, 1).wait()
    try:
        for i in range(50):
            x = pair.b.expect_imm_count(2, 1)
            pair.write(8, 2, to=i * 8).wait(2)
            x.wait(2)
    finally:
        gate.set()


def test_wait_with_a_timeout_leaves_the_transfer_alone(pair: Pair) -> None:
    x = pair.b.expect_imm_count(5, 1)
    with pytest.raises(fx.TransferTimeout, match="still in flight"):
        x.wait(0.01)
    assert not x.done() and x.exception() is None and x.status == "pending"
    pair.write(0, 5).wait()
    x.wait()
    assert x.done() and x.exception() is None


def test_cancelled_and_quiet(pair: Pair) -> None:
    x = pair.b.expect_imm_count(5, 1)
    quiet = x.quiesced()
    assert not quiet.done()
    x.cancel()
    quiet.wait(2)
    with pytest.raises(fx.TransferCancelled):
        x.wait()
    assert isinstance(x.exception(), fx.TransferCancelled)
    assert pair.write(8).quiesced().wait(2) is None


def test_landed_is_done_where_completions_mean_landed(pair: Pair) -> None:
    lands = pair.a.groups[0].lands
    if not lands:
        with pytest.raises(ValueError, match="landed=True"):
            pair.write(8).landed()
    pair.write(100_000, None, landed=not lands).landed().wait(2)
    assert (pair.dst[:100_000] == pair.src[:100_000]).all()


def test_eight_waiters_of_which_the_first_leaves(pairs) -> None:  # type: ignore[no-untyped-def]
    p = pairs(progress="caller")
    waits = [p.b.expect_imm_count(20 + i, 1) for i in range(8)]
    threads = [threading.Thread(target=w.wait, args=(10,)) for w in waits]
    for t in threads:
        t.start()
    time.sleep(0.02)
    for i, t in enumerate(threads):
        p.write(0, 20 + i).wait(5)
        t.join(5)
        assert not t.is_alive()


def test_an_application_that_never_waits_still_receives(pair: Pair) -> None:
    got: list[bytes] = []
    for k in range(20):
        pair.b.expect_imm_count(5, 1, lambda t, k=k: got.append(bytes(pair.dst[k * 8 : k * 8 + 8])))
        pair.write(8, 5, at=k * 8, to=k * 8)
        until(lambda k=k: len(got) == k + 1)
    assert b"".join(got) == bytes(pair.src[:160])


def test_sources_may_be_anything_with_a_buffer(pair: Pair) -> None:
    data = bytearray(b"0123456789" * 10)
    for obj in (data, np.frombuffer(data, np.uint8), memoryview(data)):
        h, _ = pair.a.reg_mr(obj)
        x = pair.b.expect_imm_count(5, 1)
        pair.a.submit_single_write(100, 5, (h, 0), (pair.desc, 0)).wait()
        x.wait()
        assert bytes(pair.dst[:100]) == bytes(data)
        pair.a.dereg_mr(h)


def test_targets_may_be_ordinary_memory(pair: Pair) -> None:
    mine = np.zeros(300_000, np.uint8)
    _, desc = pair.b.reg_mr(mine)
    x = pair.b.expect_imm_count(5, 1 + 100)
    pair.a.submit_single_write(300_000, 5, (pair.handle, 0), (desc, 0)).wait()
    rng = np.random.default_rng(1)
    i = rng.permutation(200)[:100].astype(np.uint32)
    pair.a.submit_paged_writes(1024, 5, (pair.handle, fx.Pages(i, stride=1024)), (desc, fx.Pages(i, stride=1024))).wait()
    x.wait()
    assert (mine == pair.src[:300_000]).all()


def test_torch_tensors_in_and_out(pair: Pair) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    src, dst = torch.randn(64, 128), torch.zeros(64, 128)
    h, _ = pair.a.reg_mr(src)
    _, d = pair.b.reg_mr(dst)
    x = pair.b.expect_imm_count(5, 1)
    pair.a.submit_single_write(src.nbytes, 5, (h, 0), (d, 0)).wait()
    x.wait()
    assert torch.equal(src, dst)
    with pytest.raises(fx.NotContiguous, match="contiguous"):
        pair.a.reg_mr(src.t())


def test_a_million_pages_make_no_python_objects(pairs) -> None:  # type: ignore[no-untyped-def]
    import gc
    import sys
    import tracemalloc

    p = pairs(size=1 << 24)
    n = 1_000_000
    idx = np.random.default_rng(0).permutation(n).astype(np.uint32)
    x = p.b.expect_imm_count(5, n)
    warm = fx.Pages(idx[:100].copy(), stride=16)
    p.a.submit_paged_writes(8, None, (p.handle, warm), (p.desc, warm)).wait()
    pages = fx.Pages(idx, stride=16)
    gc.collect()
    refs = sys.getrefcount(idx)
    tracemalloc.start()
    t = p.a.submit_paged_writes(8, 5, (p.handle, pages), (p.desc, pages))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 64 * 1024, f"{peak} bytes of Python objects for {n} pages"
    t.wait(20)
    x.wait(20)
    del t
    until(lambda: sys.getrefcount(idx) == refs)
    a, b = p.src.reshape(-1, 16), p.dst.reshape(-1, 16)
    assert (a[:n, :8] == b[:n, :8]).all() and not b[:n, 8:].any()


def test_dropped_transfers_keep_their_index_arrays(pair: Pair) -> None:
    x = pair.b.expect_imm_count(5, 20 * 1000)
    for _ in range(20):
        i = np.arange(1000, dtype=np.uint32)
        pair.a.submit_paged_writes(1024, 5, (pair.handle, fx.Pages(i, stride=1024)), (pair.desc, fx.Pages(i, stride=1024)))
        del i
    x.wait()
    assert (pair.dst[: 1000 * 1024] == pair.src[: 1000 * 1024]).all()


def test_messages_arrive_whole_and_say_who_sent_them(pair: Pair) -> None:
    got: list[tuple[bytes, object]] = []
    pool = pair.b.submit_recvs(5000, 4, lambda m, who: got.append((bytes(m), who)))
    sent = [bytes([i]) * (i * 37 + 1) for i in range(100)]
    for m in sent:
        pair.a.submit_send(pair.b.address, m)
    until(lambda: len(got) == 100)
    assert sorted(m for m, _ in got) == sorted(sent)
    assert {w for _, w in got} == {pair.a.address}
    pool.free()


def test_a_received_view_is_dead_after_the_callback(pair: Pair) -> None:
    kept: list[memoryview] = []
    pair.b.submit_recvs(100, 2, lambda m, who: kept.append(m))
    pair.a.submit_send(pair.b.address, b"hello").wait()
    until(lambda: kept)
    time.sleep(0.01)
    with pytest.raises(ValueError, match="released"):
        kept[0][0]


def test_an_exhausted_pool_holds_the_sender_back_until_its_deadline(pair: Pair) -> None:
    gate = threading.Event()
    got: list[int] = []

    def slow(m: memoryview, _: object) -> None:
        gate.wait(10)
        got.append(len(m))

    pair.b.submit_recvs(65536, 1, slow)
    big = b"x" * 65536
    sends = [pair.a.submit_send(pair.b.address, big, timeout=0.3 if i > 20 else 10) for i in range(30)]
    with pytest.raises(fx.TransferTimeout):
        sends[-1].wait()
    gate.set()
    for s in sends[:20]:
        s.wait()


def test_a_message_too_long_names_both_sizes(pair: Pair) -> None:
    pair.b.submit_recvs(100, 2, lambda m, who: None)
    pair.a.submit_send(pair.b.address, b"x" * 100).wait()
    with pytest.raises(fx.MessageTooLong, match=r"101 bytes.* 100"):
        pair.a.submit_send(pair.b.address, b"x" * 101).wait()


def test_a_watched_word_tells_old_and_new(pair: Pair) -> None:
    seen: list[tuple[int, int]] = []
    w = pair.a.alloc_uvm_watcher(lambda old, new: seen.append((old, new)))
    for _ in range(100):
        w.word[0] += 1
    until(lambda: seen and seen[-1][1] == 100)
    assert seen[0][0] == 0 and all(a[1] == b[0] for a, b in zip(seen, seen[1:], strict=False))
    w.free()
    w.word[0] += 1
    time.sleep(0.02)
    assert seen[-1][1] == 100
