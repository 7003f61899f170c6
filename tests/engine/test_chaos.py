"""Every arrival order of small sets, and random workloads by seed with a model beside them: each byte, each count,
each Transfer's single end."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from engines import Pair, until

import fabricx as fx

SEEDS = int(os.environ.get("FABRICX_SEEDS", "1000"))
FIRST = int(os.environ.get("FABRICX_FIRST_SEED", "0"))
BATCH = 50


@pytest.mark.parametrize("n", [2, 3, 4])
def test_every_order_of_arrival(pairs: Callable[..., Pair], n: int) -> None:
    for order in itertools.permutations(range(n)):
        p = pairs(a={"chaos": fx.Chaos(0, order=list(order))})
        seen: list[int] = []
        waits = []
        for i in range(n):
            waits.append(p.b.expect_imm_count(i, 1, lambda t, i=i, p=p, s=seen: s.append(i) if landed(p, i) else s.append(-1)))
        for i in range(n):
            p.write(8 if i % 2 else 5000, i, at=i * 5000, to=i * 5000)
        for w in waits:
            w.wait()
        until(lambda s=seen, n=n: len(s) == n)
        assert sorted(seen) == list(range(n)), (order, seen)
        p.close()


def landed(p: Pair, i: int) -> bool:
    n = 8 if i % 2 else 5000
    return bool((p.dst[i * 5000 : i * 5000 + n] == p.src[i * 5000 : i * 5000 + n]).all())


def one_run(seed: int) -> None:
    """A random workload between two engines under Chaos. The model: disjoint targets, so the final bytes are known; every
    immediate's total is known; every transfer must end exactly once."""
    rng = np.random.default_rng(seed)
    nics = (int(rng.integers(1, 4)), int(rng.integers(1, 4)))
    fail = (0, int(rng.integers(1, 30))) if nics[0] > 1 and rng.random() < 0.3 else None
    chaos = fx.Chaos(seed, max_delay=int(rng.integers(1, 40)), fail_nic=fail, drop_completion=float(rng.random()) if fail else 0.0)
    config = fx.Config(timeout=20.0, split_min=int(rng.choice([4096, 65536 * 2, 1 << 20])))
    p = Pair(size=1 << 19, config=config, progress=str(rng.choice(["thread", "caller"])), a={"nics": nics[0], "chaos": chaos}, b={"nics": nics[1]})
    try:
        ends: Counter[int] = Counter()
        model = np.zeros_like(p.dst)
        totals: Counter[int] = Counter()
        transfers = []
        at = 0
        for k in range(int(rng.integers(5, 25))):
            imm = int(rng.integers(0, 6)) if rng.random() < 0.9 else None
            kind = rng.integers(0, 4)
            note = lambda t, k=k: ends.update([k])  # noqa: E731
            if kind <= 1:
                n = int(rng.choice([0, 1, 8, 100, 4096, 30_000, 131_072]))
                if at + n > len(p.dst):
                    continue
                transfers.append(p.write(n, imm, at=at, to=at, on_done=note))
                model[at : at + n] = p.src[at : at + n]
                at += n
                count = 1
            elif kind == 2:
                size, count = int(rng.choice([1, 64, 1000])), int(rng.integers(0, 60))
                if at + size * count > len(p.dst):
                    continue
                i, j = rng.permutation(count).astype(np.uint32), rng.permutation(count).astype(np.uint64)
                transfers.append(
                    p.a.submit_paged_writes(size, imm, (p.handle, fx.Pages(i, stride=size, offset=at)), (p.desc, fx.Pages(j, stride=size, offset=at)), note)
                )
                for s, d in zip(i.tolist(), j.tolist(), strict=True):
                    model[at + d * size : at + (d + 1) * size] = p.src[at + s * size : at + (s + 1) * size]
                at += size * count
            else:
                size, count = int(rng.integers(0, 500)), int(rng.integers(0, 10))
                if at + size * count > len(p.dst):
                    continue
                dsts = [fx.ScatterDst(size, at + i * size, p.desc, at + i * size) for i in range(count)]
                transfers.append(p.a.submit_scatter(None, imm, p.handle, dsts, note))
                model[at : at + size * count] = p.src[at : at + size * count]
                at += size * count
            if imm is not None:
                totals[imm] += count
        waits = [p.b.expect_imm_count(imm, n) for imm, n in totals.items()]
        for t in transfers + waits:
            t.wait()
        for imm in range(6):
            assert p.b.imm_count(imm) == 0, f"seed {seed}: immediate {imm} counted too often"
        quiet = [t.quiesced() for t in transfers]
        for q in quiet:
            q.wait()
        assert (p.dst == model).all(), f"seed {seed}: bytes differ"
        until(lambda: len(ends) == len(transfers))
        assert set(ends.values()) <= {1}, f"seed {seed}: a transfer ended twice"
        assert p.b.stats()["groups"][0]["half_arrived"] == 0
    finally:
        p.close()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("start", range(FIRST, FIRST + SEEDS, BATCH))
def test_random_workloads_by_seed(start: int) -> None:
    for seed in range(start, min(start + BATCH, FIRST + SEEDS)):
        try:
            one_run(seed)
        except BaseException as e:
            e.add_note(f"seed {seed}: FABRICX_FIRST_SEED={seed} FABRICX_SEEDS=1 runs it alone")
            raise
