"""The conformance suite (tests/fabrics) over the verbs fabric on the provider in software: also where no virtual machine can be had."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
from engines import QUICK, Pair
from test_imm import *  # noqa: F403
from test_refusals import *  # noqa: F403
from test_transfers import *  # noqa: F403

#: NICs of both sides, and options
VARIANTS: dict[str, tuple[int, int, dict[str, object]]] = {
    "1nic": (1, 1, {}),
    "2nics": (2, 2, {}),
    "1to2nics": (1, 2, {}),
    "caller": (1, 1, {"progress": "caller"}),
    "chain1": (1, 1, {"config": {"verbs_chain": 1}}),
    "shallow": (1, 1, {"config": {"verbs_chain": 16, "verbs_depth": 8}}),
}


@pytest.fixture(params=sorted(VARIANTS))
def pair(request: pytest.FixtureRequest, engines_pair: Callable[..., Pair]) -> Pair:
    na, nb, options = VARIANTS[request.param]
    if "config" in options:
        options = {**options, "config": dataclasses.replace(QUICK, **options["config"])}  # type: ignore[arg-type]
    return engines_pair(na, nb, **options)
