"""The `fabricx` command and the demo, as a person runs them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[1]
ENV = {**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1", "COLUMNS": "200"}


def fabricx(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "fabricx", *args], env={**ENV, **env}, capture_output=True, text=True, timeout=110)


def demo_model() -> None:
    from fabricx import FabricUnavailable
    from fabricx.demo.p2p import find_weights

    try:
        find_weights()
    except FabricUnavailable as e:
        pytest.skip(str(e))


@pytest.mark.parametrize("nics", [1, 2])
def test_the_demo_moves_a_real_model_and_checks_every_byte(nics: int) -> None:
    demo_model()
    p = fabricx("demo", "--json", "--nics", str(nics))
    assert p.returncode == 0, p.stderr
    out = json.loads(p.stdout)
    assert out["ok"] and out["tensors"] > 100
    checks = {r["rank"]: (r["value"], r["of"]) for r in out["rows"] if r["what"] == "checks"}
    assert checks == {1: (out["tensors"] + 3, out["tensors"] + 3), 2: (2, 2)}
    assert {"weights by single writes", "slices by scatter", "shuffled pages of 16 KiB"} <= {r["what"] for r in out["rows"]}


def test_the_demo_for_people() -> None:
    demo_model()
    p = fabricx("demo", "--pages", "64")
    assert p.returncode == 0, p.stderr
    assert "every byte is right" in p.stdout and "GB/s" in p.stdout and "half round trip" in p.stdout


def test_a_wrong_byte_is_found() -> None:
    demo_model()
    code = (
        "import fabricx.demo.p2p as d, sys\n"
        "real = d.digest\n"
        "d.digest = lambda b: real(bytes(b)[:-1] + b'!') if len(b) > 1000 else real(b)\n"
        "sys.exit(d.run(pages=16, as_json=True))\n"
    )
    p = subprocess.run([sys.executable, "-c", code], env=ENV, capture_output=True, text=True, timeout=110)
    assert p.returncode == 1 and '"ok": false' in p.stdout and "instead of" in p.stderr


@pytest.mark.parametrize("after", [0.4, 0.9, 1.6])
def test_ctrl_c_ends_the_demo_cleanly(after: float) -> None:
    demo_model()
    p = subprocess.Popen([sys.executable, "-m", "fabricx", "demo"], env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    time.sleep(after)
    children = psutil.Process(p.pid).children(recursive=True) if p.poll() is None else []
    p.send_signal(signal.SIGINT)
    _, err = p.communicate(timeout=30)
    assert p.returncode in (130, 0, -signal.SIGINT), (p.returncode, err)  # 0: it was over; -2: not yet at the command
    assert "Traceback" not in err or p.returncode == -signal.SIGINT
    _, alive = psutil.wait_procs(children, timeout=5)
    assert not alive


def test_errors_come_without_a_traceback() -> None:
    p = fabricx("demo", "--fabric", "carrier-pigeon")
    assert p.returncode == 1 and "there is no fabric 'carrier-pigeon'" in p.stderr and "Traceback" not in p.stderr


def test_the_doctor_says_what_there_is_and_why() -> None:
    p = fabricx("doctor", "--json")
    assert p.returncode == 0, p.stdout + p.stderr
    r = json.loads(p.stdout)
    assert r["fabrics"]["local"]["available"] and r["auto"]["fabric"] in r["fabrics"] and r["auto"]["why"]
    assert all(f["why"] for f in r["fabrics"].values())
    q = fabricx("doctor")
    assert q.returncode == 0 and "local" in q.stdout and "locked memory" in q.stdout


def test_help_reads_well() -> None:
    p = fabricx("--help")
    assert p.returncode == 0 and "demo" in p.stdout and "bench" in p.stdout
    assert "--nics" in fabricx("demo", "--help").stdout


def test_a_limit_on_open_files_is_reported() -> None:
    code = "import resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (300, 300)); from fabricx.cli import report; sys.exit(report.run(True))"
    p = subprocess.run([sys.executable, "-c", code], env=ENV, capture_output=True, text=True, timeout=60)
    assert p.returncode == 1 and "ulimit -n" in p.stdout
