"""The verbs fabric over a provider in software: see soft_pyverbs.py."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

for _folder in (Path(__file__).resolve().parent, Path(__file__).resolve().parents[1] / "engine"):
    if str(_folder) not in sys.path:
        sys.path.insert(0, str(_folder))

from engines import QUICK, Pair  # noqa: E402

NICS = [f"soft{i}" for i in range(8)]


def missing() -> str:
    """Why the verbs fabric cannot be tested here; empty when it can."""
    try:
        from fabricx import _verbs  # noqa: F401
    except ImportError as e:
        return f"verbs: built without libibverbs' headers ({e})"
    return ""


@pytest.fixture
def soft(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The provider, with devices soft0 .. soft7 found by the fabric; back to its first state afterwards."""
    if missing():
        pytest.skip(missing())
    import soft_pyverbs

    from fabricx.fabrics import verbs, verbs_memory, verbs_port

    soft_pyverbs.reset()
    monkeypatch.setattr(verbs, "import_pyverbs", soft_pyverbs.modules)
    monkeypatch.setattr(verbs, "devices", lambda: NICS)
    monkeypatch.setattr(verbs, "ports", lambda device: [1])
    monkeypatch.setattr(verbs, "is_active", lambda device, port: True)
    monkeypatch.setattr(
        verbs, "read_gids", lambda device, port: [verbs_port.Gid(0, soft_pyverbs.raw_gid(device), "RoCE v2", "lo")]
    )
    for library in ("LIBIBVERBS", "LIBCUDA"):
        monkeypatch.setattr(verbs_memory, library, soft_pyverbs.soft.__file__)
    yield soft_pyverbs
    soft_pyverbs.reset()


@pytest.fixture
def engines_pair(soft: ModuleType) -> Iterator[Callable[..., Pair]]:
    """Makes Pairs of engines over one NIC each, or `n`, and closes them; nothing of the provider's is left open then."""
    made: list[Pair] = []

    def make(n: int = 1, nb: int = 0, **options: object) -> Pair:
        options.setdefault("config", QUICK)
        p = Pair(fabric="verbs", a={"nics": NICS[:n]}, b={"nics": NICS[4 : 4 + (nb or n)]}, **options)  # type: ignore[arg-type]
        made.append(p)
        return p

    yield make
    for p in made:
        p.close()
    left = {k: len(v) for k, v in soft.opened.items() if v}
    assert not left, f"left open: {left}"


@pytest.fixture
def pairs() -> Iterator[Callable[..., Pair]]:
    """Makes Pairs of any fabric and closes them."""
    with contextlib.ExitStack() as stack:

        def make(**options: object) -> Pair:
            p = Pair(**options)  # type: ignore[arg-type]
            stack.callback(p.close)
            return p

        yield make
