"""Posts pages for callgrind to count: `python cost_pages.py fabric|reference CHAIN`. Run by test_soft_cost.py."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

import soft_pyverbs  # noqa: E402

DEPTH = 512  # outstanding at most, as to one peer
PAGES = 400 * DEPTH
soft = soft_pyverbs.soft


def reference(chain: int) -> None:
    context = soft_pyverbs.Context("soft9")
    cq = soft_pyverbs.CQ(context, 16)
    init = soft_pyverbs.QPInitAttr(scq=cq, rcq=cq, cap=soft_pyverbs.QPCap(max_recv_wr=1))
    qp = soft_pyverbs.QP(soft_pyverbs.PD(context), init)
    soft.quick(context, True)
    soft.run_reference(qp, 1024, PAGES, chain, DEPTH)


def fabric(chain: int) -> None:
    import bare
    import numpy as np

    from fabricx.fabrics import verbs, verbs_port

    verbs.import_pyverbs = soft_pyverbs.modules
    verbs.read_gids = lambda device, port: [verbs_port.Gid(0, soft_pyverbs.raw_gid(device), "RoCE v2", "lo")]
    a, b = bare.Bare("soft0", verbs_chain=chain), bare.Bare("soft1")
    link = a.to(b)
    index = np.random.default_rng(1).permutation(DEPTH).astype(np.uint32)
    soft.quick(a.domain.ctx, True)  # from here on the provider only records
    for _ in range(PAGES // DEPTH):
        if link.pages(1024, DEPTH, imm=1, si=index, di=index).left:
            raise SystemExit("not all were taken")
        while a.domain.state.figures()["writes"]:
            a.poll()
    soft.quick(a.domain.ctx, False)
    a.close()
    b.close()


if __name__ == "__main__":
    {"fabric": fabric, "reference": reference}[sys.argv[1]](int(sys.argv[2]))
    figures = soft.quick_figures()
    print(PAGES, figures["posts"], figures["rings"])
