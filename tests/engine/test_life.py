"""Opening, closing, forking and leaving: from any thread, with work in flight, leaving nothing behind."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
from engines import Pair, until

import fabricx as fx

ROOT = Path(__file__).resolve().parents[2]


def run(code: str, **k: object) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, "-W", "ignore::ResourceWarning", "-c", code], env=env, capture_output=True, text=True, timeout=60, **k)  # type: ignore[call-overload]


def test_close_is_safe_from_many_threads_with_work_in_flight(pair: Pair) -> None:
    stop = threading.Event()
    unexpected: list[BaseException] = []

    def work() -> None:
        try:
            while not stop.is_set():
                x = pair.b.expect_imm_count(5, 1000)
                pair.write(4096, 6).wait()
                x.cancel()
        except (fx.EngineClosed, fx.PeerLostError):
            pass
        except BaseException as e:
            unexpected.append(e)

    threads = [threading.Thread(target=work) for _ in range(4)]
    closers = [threading.Thread(target=e.close) for e in (pair.a, pair.b) * 3]
    for t in threads:
        t.start()
    time.sleep(0.05)
    for t in closers:
        t.start()
    for t in closers:
        t.join(20)
        assert not t.is_alive()
    stop.set()
    for t in threads:
        t.join(20)
        assert not t.is_alive()
    assert not unexpected


def test_close_ends_waiters(pair: Pair) -> None:
    ends: list[BaseException] = []

    def wait() -> None:
        try:
            pair.b.expect_imm_count(5, 1).wait()
        except BaseException as e:
            ends.append(e)

    threads = [threading.Thread(target=wait) for _ in range(3)]
    for t in threads:
        t.start()
    time.sleep(0.03)
    pair.b.close()
    for t in threads:
        t.join(10)
    assert len(ends) == 3 and all(isinstance(e, fx.EngineClosed) for e in ends)


def test_close_within_a_callback(pair: Pair) -> None:
    closed = threading.Event()

    def end(_: fx.Transfer) -> None:
        pair.b.close()
        closed.set()

    pair.b.expect_imm_count(5, 1, end)
    pair.write(0, 5)
    assert closed.wait(10)


def lifetime() -> None:
    with fx.TransferEngine("local") as a, fx.TransferEngine("local", nics=2) as b:
        h, _ = a.reg_mr(a.alloc(65536))
        _, d = b.reg_mr(b.alloc(65536))
        got = threading.Event()
        b.submit_recvs(64, 2, lambda m, who: got.set())
        x = b.expect_imm_count(5, 1)
        a.submit_single_write(65536, 5, (h, 0), (d, 0)).wait()
        x.wait()
        a.submit_send(b.address, b"x").wait()
        assert got.wait(5)
        b.alloc_uvm_watcher(lambda old, new: None)


LIFETIMES = """
import gc, os, sys, threading
import psutil
sys.path.insert(0, {here!r})
from test_life import lifetime
me = psutil.Process()

def marks():
    gc.collect()
    return me.num_fds(), threading.active_count(), len(os.listdir("/dev/shm")), me.memory_info().rss, len(gc.get_objects())

for _ in range(40):
    lifetime()
before = marks()
for _ in range(80):
    lifetime()
after = marks()
print(*(b - a for a, b in zip(before, after)))
"""


def test_many_lifetimes_leave_nothing() -> None:
    p = run(LIFETIMES.format(here=str(Path(__file__).parent)))
    assert p.returncode == 0, p.stderr
    fds, threads, shm, rss, objects = map(int, p.stdout.split())
    assert (fds, threads, shm) == (0, 0, 0)
    assert objects < 80, f"{objects} Python objects more after 80 lifetimes"
    assert rss < 80 * 100_000, f"{rss} bytes more after 80 lifetimes"


def test_a_forked_child_gets_a_clear_error_and_the_parent_goes_on(pair: Pair) -> None:
    r, w = os.pipe()
    pid = os.fork()
    if pid == 0:
        said = b"nothing"
        try:
            pair.a.submit_single_write(8, None, (pair.handle, 0), (pair.desc, 0))
        except fx.EngineClosed as e:
            said = str(e).encode()
        except BaseException as e:
            said = repr(e).encode()
        os.write(w, said)
        os._exit(0)
    os.close(w)
    with os.fdopen(r, "rb") as f:
        said = f.read().decode()
    assert os.waitpid(pid, 0)[1] == 0
    assert "forked child" in said
    x = pair.b.expect_imm_count(5, 1)
    pair.write(100, 5).wait()
    x.wait()
    assert (pair.dst[:100] == pair.src[:100]).all()


@pytest.mark.parametrize("polling", ["busy", "adaptive"])
def test_a_forked_child_can_neither_hang_nor_harm(pairs, polling: str) -> None:  # type: ignore[no-untyped-def]
    p = pairs(polling=polling)
    for _ in range(10):
        pid = os.fork()
        if pid == 0:
            ok = True
            for call in (lambda: p.b.imm_count(1), lambda: p.b.dereg_mr(p.target), lambda: p.b.free_imm(5), lambda: p.a.connect(p.b.address)):
                try:
                    call()
                    ok = False
                except fx.EngineClosed:
                    pass
                except BaseException:
                    ok = False
            p.a.close()
            os._exit(0 if ok else 1)
        end = time.monotonic() + 10
        done = 0
        while not done and time.monotonic() < end:
            done, status = os.waitpid(pid, os.WNOHANG)
            time.sleep(0.001)
        if not done:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
        assert done and status == 0, "the child hung" if not done else "a call did not say EngineClosed"
    x = p.b.expect_imm_count(5, 1)
    p.write(100, 5).wait()
    x.wait()


def test_a_child_may_open_an_engine_of_its_own_and_exits_cleanly() -> None:
    p = run(
        "import fabricx as fx, os\n"
        "e = fx.TransferEngine('local')\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    with fx.TransferEngine('local') as k:\n"
        "        h, d = k.reg_mr(k.alloc(64)); k.expect_imm_count(1, 0).wait()\n"
        "    raise SystemExit(3)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3\n"
        "e.expect_imm_count(1, 0).wait()\n"
        "e.close()\n"
    )
    assert p.returncode == 0, p.stderr


@pytest.mark.parametrize("end", ["", "raise SystemExit(7)", "import sys; sys.exit(7)", "1/0"])
def test_leaving_without_closing_does_not_crash(end: str) -> None:
    p = run(
        "import fabricx as fx\n"
        "a, b = fx.TransferEngine('local'), fx.TransferEngine('local', progress='caller')\n"
        "h, _ = a.reg_mr(a.alloc(1 << 20)); _, d = b.reg_mr(b.alloc(1 << 20))\n"
        "x = b.expect_imm_count(5, 10**6, lambda t: None)\n"
        "ts = [a.submit_single_write(1 << 20, 5, (h, 0), (d, 0)) for _ in range(20)]\n"
        f"{end}\n"
    )
    want = {"": 0, "1/0": 1}.get(end, 7)
    assert p.returncode == want, (p.returncode, p.stderr)
    assert ("ZeroDivisionError" in p.stderr) == (end == "1/0")


def test_a_forgotten_engine_warns_and_is_closed() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        before = threading.active_count()
        e = fx.TransferEngine("local")
        del e
        gc.collect()
        until(lambda: threading.active_count() <= before)
    assert any(w.category is ResourceWarning and "unclosed" in str(w.message) for w in caught)


def test_closing_twice_and_after_use_elsewhere(pair: Pair) -> None:
    pair.write(8).wait()
    pair.a.close()
    pair.a.close()
    assert pair.a.closed and "closed" in repr(pair.a)


def test_idle_engines_cost_nothing_to_speak_of() -> None:
    p = run(
        "import fabricx as fx, time\n"
        "with fx.TransferEngine('local', polling='adaptive') as a:\n"
        "    time.sleep(0.2); t = time.process_time(); s = a.stats()['groups'][0]['turns']; time.sleep(1)\n"
        "    print(a.stats()['groups'][0]['turns'] - s)\n"
    )
    assert p.returncode == 0, p.stderr
    assert int(p.stdout) < 50, "an idle worker turns"
