"""Engines over the verbs fabric, on the provider in software."""

from __future__ import annotations

import numpy as np

import fabricx as fx


def test_writes_pages_and_messages(engines_pair) -> None:
    p = engines_pair()
    heard = p.b.expect_imm_count(5, 257)
    p.write(4096, 5).wait()
    assert (p.src[:4096] == p.dst[:4096]).all()
    at = np.random.default_rng(3).permutation(256).astype(np.uint32)
    pages = fx.Pages(at, stride=4096)
    p.a.submit_paged_writes(4096, 5, (p.handle, pages), (p.desc, pages)).wait()
    heard.wait()
    assert (p.src == p.dst).all()
