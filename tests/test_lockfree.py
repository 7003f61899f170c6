"""Proof of the worker's lock-free parts: no wake-up is lost, and each of the three fences is needed for that.

A wake-up counts as lost when a thread is found asleep in the kernel although what it waits for was published and all
bells for it were rung; no verdict hangs on the clock. FABRICX_SOAK=1 runs many more rounds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

NATIVE = Path(__file__).resolve().parent / "native"
sys.path.insert(0, str(NATIVE))

import races  # noqa: E402 - found by the line above
import variants  # noqa: E402

SOAK = os.environ.get("FABRICX_SOAK") == "1"
SCALE = 20 if SOAK else 1
CORES = sorted(os.sched_getaffinity(0))[:2]
#: s; a run that takes longer hangs
LONG = 600.0 if SOAK else 100.0

pytestmark = pytest.mark.timeout(2400 if SOAK else 300)
two_cores = pytest.mark.skipif(len(CORES) < 2, reason="stores pass loads only between two cores")


@pytest.fixture(scope="session")
def native() -> Callable[[str], ModuleType]:
    """Loads a variant; all but the sanitized one are built at once."""
    variants.build([n for n in variants.VARIANTS if n != "tsan"])
    return variants.load


@pytest.fixture
def intact(native: Callable[[str], ModuleType]) -> ModuleType:
    return native("intact")


def clean(out: dict, rounds: int) -> None:
    """All rounds ran, in time, and nothing was lost."""
    assert not out["late"], out
    assert out["rounds"] == rounds, out
    assert out["lost"] == 0, out


# ---------------------------------------------------------------- fences


def arrivals(m: ModuleType, rounds: int, enough: int, seed: int) -> dict:
    return m.published("arrival", rounds, CORES, LONG, seed, window=(60, 150, 300, 600)[seed % 4], enough=enough)


def requests(m: ModuleType, rounds: int, enough: int, seed: int) -> dict:
    return m.published("request", rounds, CORES, LONG, seed, window=(100, 200, 400)[seed % 3], enough=enough)


def parking(m: ModuleType, rounds: int, enough: int, seed: int) -> dict:
    return m.parked(rounds, CORES, LONG, seed, window=(100, 200, 400)[seed % 3], enough=enough)


NEVER = 2**64 - 1
#: fence -> the run in which only this fence stands between a waiter and its wake-up, rounds a try, tries
CONTROLS = {
    "bell": (arrivals, 300_000, 40),
    "sleep": (arrivals, 300_000, 40),
    "unlock": (parking, 30_000, 40),
}


@two_cores
@pytest.mark.parametrize("fence", CONTROLS)
def test_without_a_fence_a_wake_up_is_lost(native: Callable[[str], ModuleType], fence: str) -> None:
    run, rounds, tries = CONTROLS[fence]
    m = native(fence)
    for seed in range(tries):
        out = run(m, rounds, 1, seed)
        assert not out["late"], out
        if out["lost"]:
            return
    pytest.fail(f"{tries * rounds} rounds without the fence {fence!r} lost nothing: the stress proves nothing")


@two_cores
@pytest.mark.skipif(not SOAK, reason="takes millions of rounds: FABRICX_SOAK=1")
def test_without_its_fence_a_sleeper_misses_a_request(native: Callable[[str], ModuleType]) -> None:
    m = native("sleep")
    assert any(requests(m, 500_000, 1, seed)["lost"] for seed in range(60))


@two_cores
@pytest.mark.parametrize(("run", "rounds"), [(arrivals, 100_000), (requests, 15_000), (parking, 30_000)])
def test_with_all_fences_none_is_lost(intact: ModuleType, run: Callable[..., dict], rounds: int) -> None:
    for seed in range(4):
        out = run(intact, rounds * SCALE, NEVER, seed)
        clean(out, rounds * SCALE)
        assert out.get("sleeps", 1) > 0, "the worker never slept: nothing was tried"


@two_cores
def test_a_queued_request_is_taken_or_the_bell_is_rung(intact: ModuleType) -> None:
    for seed, window in enumerate((20, 60, 200)):
        clean(intact.taken(50_000 * SCALE, CORES, LONG, seed, window), 50_000 * SCALE)


# ---------------------------------------------------------------- who is meant is who wakes


def test_waking_the_worker_leaves_no_sleeping_caller_without_a_bell(intact: ModuleType) -> None:
    clean(intact.woken_beside(500 * SCALE, LONG), 500 * SCALE)


@pytest.mark.parametrize("waking", [False, True])
@pytest.mark.parametrize("variant", ["intact", "perturbed"])
def test_with_descriptors_no_sleeper_takes_the_others_wake_up(
    native: Callable[[str], ModuleType], variant: str, waking: bool
) -> None:
    m = native(variant)
    m.perturb(3)
    try:
        out = m.woken_beside(1000 * SCALE, LONG, descriptors=True, waking=waking)
    finally:
        m.perturb(0)
    clean(out, 1000 * SCALE)


@pytest.mark.parametrize("variant", ["intact", "perturbed"])
def test_a_sleeping_worker_hears_of_the_backlog(native: Callable[[str], ModuleType], variant: str) -> None:
    m = native(variant)
    for seed in range(1, 5):
        m.perturb(seed)
        try:
            out = m.handed_over(2000 * SCALE, CORES, LONG, seed)
        finally:
            m.perturb(0)
        clean(out, 2000 * SCALE)
        assert out["aside"] == [0, 0], out


def test_no_waiter_sleeps_past_the_end(intact: ModuleType) -> None:
    for seed in range(3):
        clean(intact.ended(3000 * SCALE, CORES, LONG, seed), 3000 * SCALE)


# ---------------------------------------------------------------- queues and the pool


@pytest.mark.parametrize("producers", [1, 3, 8])
def test_the_queue_loses_doubles_and_reorders_nothing(intact: ModuleType, producers: int) -> None:
    n = 40_000 * SCALE
    out = intact.queue(producers, n, LONG)
    clean(out, n * producers)
    assert (out["wrong"], out["seen"]) == (0, [n] * producers)


@pytest.mark.parametrize("producers", [1, 3, 8])
def test_the_stack_keeps_each_producers_order_over_batches(intact: ModuleType, producers: int) -> None:
    n = 2000 * SCALE if producers == 1 else 20_000 * SCALE
    out = intact.stack(producers, n, LONG)
    clean(out, n * producers)
    assert (out["wrong"], out["seen"]) == (0, [n] * producers)


def test_a_batch_comes_oldest_first(intact: ModuleType) -> None:
    assert intact.one_batch(1000) == list(range(1000))
    assert intact.one_batch(1) == [0]


def test_the_pool_hands_no_request_to_two(intact: ModuleType) -> None:
    out = intact.pool(4, 200_000 * SCALE, LONG)
    clean(out, 200_000 * SCALE)
    assert out["kept"] == out["counted"] > 0


@pytest.mark.parametrize("groups", [1, 3])
def test_every_end_reaches_the_event_loop_once(intact: ModuleType, groups: int) -> None:
    n = (3000 if groups == 1 else 20_000) * SCALE
    out = intact.told(groups, n, LONG)
    clean(out, n * groups)
    assert out["aside"] == [0] * (groups + 1)


# ---------------------------------------------------------------- everything together


def settled(out: dict, rounds: int) -> None:
    """Each request ended once, was told once, and gave back what it held."""
    clean(out, rounds)
    assert out["ended"] == out["wanted"], out
    assert out["calls"] == out["called"], out
    assert out["news"] == out["delivered"] > 0, out
    for what in ("failed", "surplus", "backlog", "timers", "zombies", "queued", "inflight", "bytes"):
        assert out[what] == 0, (what, out)


@pytest.mark.parametrize("caller", [False, True], ids=["thread", "caller"])
@pytest.mark.parametrize("spin", [0, 20])
def test_all_requests_end_once(intact: ModuleType, caller: bool, spin: int) -> None:
    for seed in range(3):
        settled(intact.mixed(caller, 3000 * SCALE, LONG, seed, spin, spin // 4), 3000 * SCALE)


@pytest.mark.parametrize("seed", range(1, 1 + 6 * SCALE))
def test_under_a_disturbed_schedule(native: Callable[[str], ModuleType], seed: int) -> None:
    m = native("perturbed")
    before = m.perturb(seed)
    try:
        out = m.queue(3, 4000, LONG, seed)
        clean(out, 12_000)
        assert out["wrong"] == 0
        out = m.stack(3, 4000, LONG, seed)
        clean(out, 12_000)
        assert out["wrong"] == 0
        clean(m.stack(1, 500, LONG, seed), 500)
        clean(m.pool(4, 10_000, LONG, seed), 10_000)
        clean(m.told(2, 4000, LONG, seed), 8000)
        clean(m.ended(3000, CORES, LONG, seed), 3000)
        clean(m.published("arrival", 2000, CORES * 2, LONG, seed), 2000)
        clean(m.published("request", 2000, CORES * 2, LONG, seed), 2000)
        clean(m.parked(2000, CORES * 2, LONG, seed), 2000)
        clean(m.taken(2000, CORES, LONG, seed), 2000)
        for caller, spin in ((False, 0), (True, 0), (True, 20)):
            settled(m.mixed(caller, 1000, LONG, seed, spin, spin // 4), 1000)
    finally:
        after = m.perturb(0)
    assert after > before, "nothing was disturbed"


# ---------------------------------------------------------------- data races


def test_the_thread_sanitizer_finds_no_race_but_those_by_design(tmp_path: Path) -> None:
    library = variants.sanitizer()
    if library is None:
        pytest.skip("no libtsan beside this compiler")
    variants.build(["tsan"])
    env = dict(os.environ, LD_PRELOAD=library, TSAN_OPTIONS=f"log_path={tmp_path}/race exitcode=0 history_size=4")
    command = [sys.executable, str(NATIVE / "races.py"), str(3000 * SCALE)]
    done = subprocess.run(command, check=False, env=env, capture_output=True, text=True, timeout=LONG * 2)
    if done.returncode and "ThreadSanitizer" in done.stderr and "memory layout" in done.stderr:
        pytest.skip("the thread sanitizer does not run under this kernel's memory layout")
    assert done.returncode == 0, done.stderr
    for name, out in json.loads(done.stdout).items():
        assert not out["late"], (name, out)
    found = [r for p in sorted(tmp_path.iterdir()) for r in races.reports(p.read_text())]
    assert found, "not even the races by design were found: the sanitizer did not look"
    assert [r for r in found if not races.by_design(r)] == []
