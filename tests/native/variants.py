"""Builds tests/native/stress.pyx in variants: as it is, without one fence, disturbed, sanitized.

Variants lie under build/native/<hash of all sources and flags>, so that a second run builds nothing.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
#: sources of the worker; another tree can be put to the test without touching this one
PYX = Path(os.environ.get("FABRICX_STRESS_PYX", ROOT / "pyx"))

FLAGS = ["-O2", "-fPIC", "-shared", "-pthread", "-fno-strict-aliasing", "-w", "-Wl,--wrap=poll"]
#: variant -> what it adds to the compiler's command line
VARIANTS = {
    "intact": [],
    "bell": ["-DFX_NO_FENCE_bell"],
    "sleep": ["-DFX_NO_FENCE_sleep"],
    "unlock": ["-DFX_NO_FENCE_unlock"],
    "perturbed": ["-DPERTURB", "-include", str(HERE / "perturb.h")],
    "tsan": ["-O1", "-g", "-fsanitize=thread"],
}
BUILD_TIMEOUT = 240
_QUIET = {"capture_output": True, "text": True}


def sources() -> list[Path]:
    """What the extension is made of."""
    parts = sorted(p for p in PYX.iterdir() if p.suffix in (".pxd", ".pxi", ".h"))
    return [*(HERE / n for n in ("stress.pyx", "litmus.pxi", "properties.pxi", "perturb.h")), *parts]


def folder() -> Path:
    """Where the variants of these very sources lie."""
    h = hashlib.sha256(repr((sys.version, FLAGS, VARIANTS, str(PYX))).encode())
    for p in sources():
        h.update(p.name.encode() + b"\0" + p.read_bytes())
    return ROOT / "build" / "native" / h.hexdigest()[:20]


def _run(command: list[str], target: Path) -> None:
    part = target.with_name(f"{target.name}.{os.getpid()}.part{target.suffix}")
    done = subprocess.run([*command, "-o", str(part)], cwd=ROOT, check=False, **_QUIET, timeout=BUILD_TIMEOUT)
    if done.returncode:
        raise RuntimeError(f"{target.name}: {' '.join(command)}\n{done.stdout}{done.stderr}")
    os.replace(part, target)


def build(names: list[str] | None = None) -> dict[str, Path]:
    """The paths of variants, those that are missing built in parallel."""
    at = folder()
    at.mkdir(parents=True, exist_ok=True)
    wanted = {n: at / n / "stress.so" for n in names or VARIANTS}
    missing = [n for n, p in wanted.items() if not p.exists()]
    c = at / "stress.c"
    if missing and not c.exists():
        folders = ["-I", str(PYX), "-I", str(HERE)]
        cython = [sys.executable, "-m", "cython", "-3", "--line-directives"]
        _run([*cython, *folders, *_DIRECTIVES, str(HERE / "stress.pyx")], c)
    cc = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()
    common = [*cc, *FLAGS, "-I", str(PYX), "-I", sysconfig.get_paths()["include"]]

    def one(name: str) -> None:
        wanted[name].parent.mkdir(exist_ok=True)
        _run([*common, *VARIANTS[name], str(c)], wanted[name])

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(one, missing))
    return wanted


_DIRECTIVES = [
    x
    for name in ("boundscheck=False", "wraparound=False", "cdivision=True", "initializedcheck=False")
    for x in ("-X", name)
]


def sanitizer() -> str | None:
    """Path of the thread sanitizer's library, to be preloaded into an interpreter built without it; None: not here."""
    cc = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()
    found = subprocess.run([*cc, "-print-file-name=libtsan.so"], check=False, **_QUIET, timeout=20).stdout.strip()
    return os.path.realpath(found) if os.path.isabs(found) and os.path.exists(found) else None


def load(name: str) -> ModuleType:
    """One variant as a module of its own."""
    path = build([name])[name]
    spec = importlib.util.spec_from_file_location("stress", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
