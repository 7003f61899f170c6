"""Several NICs: splitting, spreading, different numbers at the two ends, pinning, and a NIC that fails."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from engines import QUICK, Pair, until

import fabricx as fx

MiB = 1 << 20


def loads(e: fx.TransferEngine) -> list[int]:
    return [n["bytes"] for n in e.stats()["groups"][0]["nics"]]


@pytest.mark.parametrize(("n", "m"), [(1, 2), (2, 1), (2, 2), (4, 2), (1, 4), (3, 2), (4, 4)])
@pytest.mark.parametrize("chaos", [False, True])
def test_counts_are_logical_whatever_the_numbers_of_nics(pairs: Callable[..., Pair], n: int, m: int, chaos: bool) -> None:
    kw = {"chaos": fx.Chaos(n * 10 + m)} if chaos else {}
    p = pairs(size=4 * MiB, a={"nics": n, **kw}, b={"nics": m})
    x = p.b.expect_imm_count(5, 1 + 64 + 3)
    p.write(3 * MiB, 5)
    pages = fx.Pages(np.arange(64, dtype=np.uint32), stride=4096, offset=3 * MiB)
    p.a.submit_paged_writes(4096, 5, (p.handle, pages), (p.desc, pages))
    p.a.submit_scatter(None, 5, p.handle, [fx.ScatterDst(1000, 3 * MiB + 300_000 + i * 1000, p.desc, 3 * MiB + 300_000 + i * 1000) for i in range(3)])
    x.wait()
    for a, b in ((0, 3 * MiB), (3 * MiB, 3 * MiB + 64 * 4096), (3 * MiB + 300_000, 3 * MiB + 303_000)):
        assert (p.dst[a:b] == p.src[a:b]).all()
    assert p.b.imm_count(5) == 0 and p.b.stats()["groups"][0]["half_arrived"] == 0


def test_a_large_write_is_split_and_pages_are_spread(pairs: Callable[..., Pair]) -> None:
    p = pairs(size=8 * MiB, a={"nics": 4}, b={"nics": 4})
    x = p.b.expect_imm_count(5, 1)
    p.write(8 * MiB, 5).wait()
    x.wait()
    assert loads(p.a) == [2 * MiB] * 4
    pages = fx.Pages(stride=1024, count=4096)
    x = p.b.expect_imm_count(6, 4096)
    p.a.submit_paged_writes(1024, 6, (p.handle, pages), (p.desc, pages)).wait()
    x.wait()
    after = loads(p.a)
    assert max(after) - min(after) <= 512 * 1024 and sum(after) == 12 * MiB


def test_a_pinned_transfer_stays_on_its_nic(pairs: Callable[..., Pair]) -> None:
    p = pairs(size=4 * MiB, a={"nics": 3}, b={"nics": 3})
    x = p.b.expect_imm_count(5, 2)
    p.write(4 * MiB, 5, nic=2).wait()
    p.write(100, 5, nic=2).wait()
    x.wait()
    assert loads(p.a) == [0, 0, 4 * MiB + 100]
    with pytest.raises(fx.OutOfRange, match="NICs 0 .. 2"):
        p.write(8, None, nic=3)


def test_load_goes_to_the_nic_with_the_fewest_bytes_outstanding(pairs: Callable[..., Pair]) -> None:
    p = pairs(size=4 * MiB, a={"nics": 2, "chaos": fx.Chaos(1, order=list(range(41)))}, b={"nics": 2})
    writes = [p.write(4 * MiB, None, nic=0)] + [p.write(1000) for _ in range(40)]
    for w in writes:
        w.wait()
    assert loads(p.a) == [4 * MiB, 40_000]


def test_of_two_split_writes_with_one_shard_each_none_has_landed(pairs: Callable[..., Pair]) -> None:
    # 2 writes x 2 shards are held, and executed in every order: the counter follows whole writes, never sums of shards
    for order in itertools.permutations(range(4)):
        p = pairs(size=4 * MiB, a={"nics": 2, "chaos": fx.Chaos(1, order=list(order))}, b={"nics": 2})
        steps: list[tuple[bool, bool]] = []
        first = p.b.expect_imm_count(5, 1, lambda t, p=p, s=steps: s.append(whole(p)))
        second = p.b.expect_imm_count(5, 1, lambda t, p=p, s=steps: s.append(whole(p)))
        p.write(2 * MiB, 5, at=0, to=0)
        p.write(2 * MiB, 5, at=2 * MiB, to=2 * MiB)
        first.wait()
        second.wait()
        until(lambda s=steps: len(s) == 2)
        assert any(steps[0]) and all(steps[1]), order
        p.close()


def whole(p: Pair) -> tuple[bool, bool]:
    h = 2 * MiB
    return bool((p.dst[:h] == p.src[:h]).all()), bool((p.dst[h : 2 * h] == p.src[h : 2 * h]).all())


def test_nothing_fires_while_shards_are_missing(pairs: Callable[..., Pair]) -> None:
    # 5 are to be held before any is executed, and only 4 come: after the deadline none was counted
    p = pairs(size=4 * MiB, a={"nics": 2, "chaos": fx.Chaos(1, order=[0, 2, 4, 1, 3])}, b={"nics": 2})
    x = p.b.expect_imm_count(5, 1, timeout=0.2)
    p.write(2 * MiB, 5)
    p.write(2 * MiB, 5, to=2 * MiB)
    with pytest.raises(fx.TransferTimeout):
        x.wait()
    assert p.b.imm_count(5) == 0
    p.write(8, 6)
    p.b.expect_imm_count(5, 2).wait()


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("drop", [0.0, 0.5, 1.0])
def test_counts_stay_exact_when_a_nic_fails(pairs: Callable[..., Pair], seed: int, drop: float) -> None:
    p = pairs(size=4 * MiB, a={"nics": 2, "chaos": fx.Chaos(seed, drop_completion=drop, fail_nic=(seed % 2, 10 + seed))}, b={"nics": 2})
    errors: list[BaseException] = []
    p.a.on_error = errors.append
    n = 60
    transfers = [p.write(1000, 5, at=i * 1000, to=i * 1000) for i in range(n)]
    transfers.append(p.write(3 * MiB, 6, at=MiB, to=MiB))
    pages = fx.Pages(np.arange(50, dtype=np.uint32), stride=2048, offset=100_000)
    transfers.append(p.a.submit_paged_writes(2048, 7, (p.handle, pages), (p.desc, pages)))
    for t in transfers:
        t.wait()
    for imm, count in ((5, n), (6, 1), (7, 50)):
        p.b.expect_imm_count(imm, count).wait()
        assert p.b.imm_count(imm) == 0
    assert (p.dst[: n * 1000] == p.src[: n * 1000]).all() and (p.dst[MiB:] == p.src[MiB:]).all()
    until(lambda: any(isinstance(e, fx.NicFailed) for e in errors))
    up = [x["up"] for x in p.a.stats()["groups"][0]["nics"]]
    assert up.count(False) == 1


def test_the_last_nic_to_fail_fails_the_transfers(pairs: Callable[..., Pair]) -> None:
    p = pairs(a={"nics": 1, "chaos": fx.Chaos(3, fail_nic=(0, 3))}, config=QUICK)
    ends = []
    for i in range(6):
        t = p.write(8, 5, to=i * 8)
        with pytest.raises((fx.NicFailed, fx.MaybeDelivered)) if i > 3 else _either():
            t.wait()
        ends.append(t.status)
    assert "failed" in ends


class _either:
    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        return kind is None or issubclass(kind, (fx.NicFailed, fx.MaybeDelivered))
