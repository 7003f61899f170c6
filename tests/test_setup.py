"""Importing costs nothing that is not needed, and `pip install .` works with a compiler alone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def python(code: str, **env: str) -> str:
    p = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT), **env}, capture_output=True, text=True, timeout=60)
    assert p.returncode == 0, p.stderr
    return p.stdout


def test_importing_fabricx_loads_no_library() -> None:
    out = python("import sys; before = set(sys.modules); import fabricx; print(*sorted(m for m in set(sys.modules) - before if '.' not in m))")
    loaded = set(out.split())
    assert not loaded & {"numpy", "torch", "cffi", "numba", "msgspec", "rich", "typer", "asyncio"}, loaded


def test_the_local_fabric_needs_neither_torch_nor_libfabric_nor_asyncio() -> None:
    code = (
        "import sys, fabricx as fx\n"
        "with fx.TransferEngine('local') as e: e.reg_mr(e.alloc(64))\n"
        "print(*sorted(sys.modules)); print(open('/proc/self/maps').read())"
    )
    out = python(code)
    modules = set(out.split("\n", 1)[0].split())
    assert not modules & {"torch", "cffi", "numba"}
    assert "libfabric" not in out and "libibverbs" not in out and "infinipath" not in out


def test_every_public_name_is_there() -> None:
    python("import fabricx\nfor n in fabricx.__all__: getattr(fabricx, n)\nassert 'TransferEngine' in dir(fabricx)")
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        import fabricx

        fabricx.nothing  # noqa: B018


@pytest.mark.timeout(400)
def test_pip_install_leaves_a_fabric_without_headers_out_and_says_so(tmp_path: Path) -> None:
    """In a copy, into a folder of its own, with libfabric's headers hidden; quick and unoptimised."""
    source = tmp_path / "source"
    skip = shutil.ignore_patterns(".git", ".venv", "build", "*.so", "*.c", "__pycache__", "results")
    shutil.copytree(ROOT, source, ignore=skip)
    (tmp_path / "hidden" / "rdma").mkdir(parents=True)
    (tmp_path / "hidden" / "rdma" / "fabric.h").write_text("#error hidden by the test\n")
    env = {**os.environ, "FABRICX_CFLAGS": "-O0 -g0", "CPATH": str(tmp_path / "hidden")}
    command = [sys.executable, "-m", "pip", "install", "-v", "--no-deps", "--no-build-isolation", "--target", str(tmp_path / "site"), str(source)]
    p = subprocess.run(command, env=env, capture_output=True, text=True, timeout=380)
    assert p.returncode == 0, p.stdout[-3000:] + p.stderr[-3000:]
    said = p.stdout + p.stderr
    assert "fabricx._ofi left out: no <rdma/fabric.h> (Debian: libfabric-dev)" in said
    code = (
        "import fabricx as fx, numpy as np\n"
        f"assert fx.__file__.startswith({str(tmp_path / 'site')!r})\n"
        "with fx.TransferEngine('local') as a, fx.TransferEngine('local') as b:\n"
        "    h, _ = a.reg_mr(np.ones(10, np.uint8)); m = b.alloc(10); _, d = b.reg_mr(m)\n"
        "    x = b.expect_imm_count(1, 1); a.submit_single_write(10, 1, (h, 0), (d, 0)); x.wait(5); assert m.array.sum() == 10\n"
        "try: fx.TransferEngine('ofi')\n"
        "except fx.FabricUnavailable as e: print(e)\n"
    )
    q = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(tmp_path / "site")}, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert q.returncode == 0, q.stderr
    assert "libfabric-dev" in q.stdout
