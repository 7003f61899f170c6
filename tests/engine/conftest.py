"""Fixtures of the engine's tests."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator

import pytest
from engines import Pair, ofi_reason


@pytest.fixture
def pairs() -> Iterator[Callable[..., Pair]]:
    """Makes Pairs and closes them."""
    with contextlib.ExitStack() as stack:

        def make(**options: object) -> Pair:
            p = Pair(**options)  # type: ignore[arg-type]
            stack.callback(p.close)
            return p

        yield make


FABRICS = os.environ.get("FABRICX_TEST_FABRICS", "local,ofi").split(",")


@pytest.fixture(params=[f"{f}-{p}" for f in FABRICS for p in ("thread", "caller")])
def pair(request: pytest.FixtureRequest, pairs: Callable[..., Pair]) -> Pair:
    """A Pair on each fabric, in both ways of progress."""
    fabric, progress = request.param.split("-")
    if fabric == "ofi" and ofi_reason():
        pytest.skip(ofi_reason())
    return pairs(fabric=fabric, progress=progress)
