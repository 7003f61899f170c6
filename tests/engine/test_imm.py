"""ImmCounter: logical counts, early arrivals, surplus, re-arming, generations."""

from __future__ import annotations

import threading
import time

import pytest
from engines import QUICK, Pair, until

import fabricx as fx


def stale(e: fx.TransferEngine) -> int:
    return e.stats()["groups"][0]["stale"]


def test_early_arrivals_are_kept_and_a_surplus_carries_over(pair: Pair) -> None:
    for _ in range(5):
        pair.write(0, 3).wait()
    until(lambda: pair.b.imm_count(3) == 5)
    pair.b.expect_imm_count(3, 2).wait(2)
    assert pair.b.imm_count(3) == 3
    pair.b.expect_imm_count(3, 3).wait(2)
    x = pair.b.expect_imm_count(3, 1)
    with pytest.raises(fx.TransferTimeout):
        x.wait(0.02)
    pair.write(0, 3).wait()
    x.wait(2)


def test_expectations_of_one_number_are_served_in_order(pair: Pair) -> None:
    a, b, c = (pair.b.expect_imm_count(3, n) for n in (2, 1, 3))
    for done in ((), (a,), (a, b), (a, b), (a, b), (a, b, c)):
        pair.write(0, 3).wait()
        for x in done:
            x.wait(2)
    assert pair.b.imm_count(3) == 0


def test_a_cancelled_expectation_leaves_its_count_to_the_next(pair: Pair) -> None:
    a, b = pair.b.expect_imm_count(3, 5), pair.b.expect_imm_count(3, 2)
    pair.write(0, 3).wait()
    pair.write(0, 3).wait()
    until(lambda: pair.b.imm_count(3) == 2)
    assert not b.done()
    a.cancel()
    b.wait(2)


def test_rearming_in_the_callback(pair: Pair) -> None:
    rounds: list[int] = []
    done = threading.Event()

    def again(t: fx.Transfer) -> None:
        rounds.append(len(rounds))
        if len(rounds) == 50:
            done.set()
        else:
            pair.b.expect_imm_count(3, 2, again)

    pair.b.expect_imm_count(3, 2, again)
    for _ in range(100):
        pair.write(0, 3)
    assert done.wait(5)
    assert pair.b.imm_count(3) == 0


def test_a_freed_number_drops_late_arrivals_and_is_reused_with_another_generation(pair: Pair) -> None:
    old = pair.b.alloc_imm()
    x = pair.b.expect_imm_count(old, 1)
    pair.b.free_imm(old)
    with pytest.raises(fx.TransferCancelled):
        x.wait(2)
    numbers = {pair.b.alloc_imm() for _ in range(1 << 14)}
    assert len(numbers) == 1 << 14 and old not in numbers
    same_index = next(n for n in numbers if n & 0x3FFF == old & 0x3FFF)
    with pytest.raises(fx.OutOfRange, match="allocated"):
        pair.b.alloc_imm()
    pair.write(0, old).wait()
    until(lambda: stale(pair.b) == 1)
    assert pair.b.imm_count(same_index) == 0
    pair.write(0, same_index).wait()
    pair.b.expect_imm_count(same_index, 1).wait(2)


def test_numbers_outside_the_range_are_refused_with_the_range_named(pair: Pair) -> None:
    for bad in (1 << 20, 1 << 32, -1, 1 << 80):
        with pytest.raises(fx.OutOfRange, match="0 .. "):
            pair.write(0, bad)
    with pytest.raises(fx.OutOfRange, match="524287"):
        pair.b.expect_imm_count(1 << 19, 1)  # of alloc_imm, but not allocated
    with pytest.raises(fx.OutOfRange):
        pair.b.free_imm((1 << 19) + 5)


def test_early_arrivals_are_bounded_a_peer(pairs) -> None:  # type: ignore[no-untyped-def]
    p = pairs(config=fx.Config.from_env(timeout=10, max_early=100))
    errors: list[BaseException] = []
    p.b.on_error = errors.append
    expected = [p.b.expect_imm_count(i, 1) for i in range(1000, 1010)]
    for i in range(150):
        p.write(0, i).wait()
    for i in range(1000, 1010):
        p.write(0, i).wait()
    for x in expected:
        x.wait(2)
    until(lambda: errors)
    assert isinstance(errors[0], fx.TooManyEarly) and "100" in str(errors[0])
    assert p.b.stats()["groups"][0]["refused"] == 50


def test_a_zero_count_is_there_at_once(pair: Pair) -> None:
    pair.b.expect_imm_count(3, 0).wait(1)


def test_many_numbers_and_counts_stay_exact(pair: Pair) -> None:
    n = 300
    waits = [pair.b.expect_imm_count(k, k % 5 + 1) for k in range(n)]
    for k in range(n):
        for _ in range(k % 5 + 1):
            pair.write(0, k)
    for w in waits:
        w.wait(5)
    assert all(pair.b.imm_count(k) == 0 for k in range(n))


def test_a_deadline_ends_a_wait_for_what_never_comes(pair: Pair) -> None:
    t = time.monotonic()
    x = pair.b.expect_imm_count(3, 1, timeout=0.1)
    with pytest.raises(fx.TransferTimeout, match="immediate 3"):
        x.wait()
    assert 0.05 < time.monotonic() - t < 5


def test_expecting_of_a_dead_peer_fails_when_it_is_named(pairs) -> None:  # type: ignore[no-untyped-def]
    p = pairs()
    p.write(0, 9).wait()
    lost: list[object] = []
    p.b.on_peer_lost = lost.append
    named = p.b.expect_imm_count(3, 1, peers=[p.a.address])
    plain = p.b.expect_imm_count(4, 1, timeout=QUICK.timeout)
    p.a.close()
    with pytest.raises(fx.PeerLostError):
        named.wait(5)
    until(lambda: lost == [p.a.address] or lost)
    assert not plain.done()
    plain.cancel()


@pytest.mark.parametrize("seed", range(5))
def test_expectations_cancelled_in_any_order_leave_the_others_theirs(pair: Pair, seed: int) -> None:
    """Beside a model: a list of wanted counts, oldest first, of which any may be taken out."""
    import random

    rng = random.Random(seed)
    model: list[tuple[int, fx.Transfer]] = []
    ended: list[tuple[fx.Transfer, str]] = []
    have = 0

    def settle() -> None:
        nonlocal have
        while model and have >= model[0][0]:
            n, t = model.pop(0)
            have -= n
            ended.append((t, "done"))

    for _ in range(300):
        what = rng.random()
        if what < 0.5:
            n = rng.randint(1, 4)
            model.append((n, pair.b.expect_imm_count(9, n)))
        elif what < 0.75 and model:
            _, t = model.pop(rng.randrange(len(model)))
            assert t.cancel()
            ended.append((t, "cancelled"))
        else:
            pair.write(8, 9).wait()
            have += 1
        settle()
        until(lambda now=have: all(t.done() for t, _ in ended[-6:]) and pair.b.imm_count(9) == now)
    assert all(t.status == how for t, how in ended)
    assert all(t.status == "pending" for _, t in model)
    pair.b.free_imm(9)
    until(lambda: all(t.status == "cancelled" for _, t in model))
