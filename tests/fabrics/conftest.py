"""The conformance suite's fixtures: the same tests over every variant of every fabric."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ENGINE = str(Path(__file__).resolve().parents[1] / "engine")
if ENGINE not in sys.path:
    sys.path.insert(0, ENGINE)

from engines import VARIANTS, Pair, open_variant  # noqa: E402


@pytest.fixture
def pairs() -> Iterator[Callable[..., Pair]]:
    """Makes Pairs and closes them."""
    with contextlib.ExitStack() as stack:

        def make(**options: object) -> Pair:
            p = Pair(**options)  # type: ignore[arg-type]
            stack.callback(p.close)
            return p

        yield make


@pytest.fixture(params=sorted(VARIANTS))
def pair(request: pytest.FixtureRequest, pairs: Callable[..., Pair]) -> Pair:
    """A Pair of each variant."""
    return open_variant(request.param, pairs)
