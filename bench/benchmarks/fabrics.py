"""Moving bytes between two engines of one process, over each fabric."""

from __future__ import annotations

import numpy as np

import fabricx as fx

from .common import MIB, Pair

FABRICS = ("local", "ofi")


class SingleWrite(Pair):
    """One write at a time."""

    params = (FABRICS, (8, 65_536, MIB, 16 * MIB))
    param_names = ("fabric", "bytes")
    timeout = 60

    def time_write_and_wait(self, fabric: str, n: int) -> None:
        self.write(n)

    def time_write_and_expect(self, fabric: str, n: int) -> None:
        x = self.b.expect_imm_count(5, 1)
        self.a.submit_single_write(n, 5, (self.src, 0), (self.desc, 0)).wait(30)
        x.wait(30)


class Window(Pair):
    """16 writes in flight."""

    params = (FABRICS, (65_536, MIB))
    param_names = ("fabric", "bytes")
    timeout = 60

    def time_64_writes(self, fabric: str, n: int) -> None:
        flying: list[fx.Transfer] = []
        for i in range(64):
            if len(flying) == 16:
                flying.pop(0).wait(30)
            at = i % 16 * n
            flying.append(self.a.submit_single_write(n, None, (self.src, at), (self.desc, at)))
        for x in flying:
            x.wait(30)


class Paged(Pair):
    """1,024 shuffled pages, counted at the target."""

    params = (FABRICS, (1_024, 16_384))
    param_names = ("fabric", "page")
    timeout = 60

    def setup(self, fabric: str, page: int) -> None:
        super().setup(fabric)
        rng = np.random.default_rng(1)
        self.lists = [fx.Pages(rng.permutation(1024).astype(np.uint32), stride=page) for _ in range(2)]

    def time_pages(self, fabric: str, page: int) -> None:
        x = self.b.expect_imm_count(6, 1024)
        self.a.submit_paged_writes(page, 6, (self.src, self.lists[0]), (self.desc, self.lists[1])).wait(30)
        x.wait(30)


class Groups(Pair):
    """Scatter and barrier to one peer eight times: as many writes as to eight peers, without eight processes."""

    params = (FABRICS,)
    param_names = ("fabric",)
    timeout = 60

    def time_scatter(self, fabric: str) -> None:
        x = self.b.expect_imm_count(7, 8)
        dsts = [fx.ScatterDst(7168, i * 7168, self.desc, i * 7168) for i in range(8)]
        self.a.submit_scatter(None, 7, self.src, dsts).wait(30)
        x.wait(30)

    def time_barrier(self, fabric: str) -> None:
        x = self.b.expect_imm_count(8, 8)
        self.a.submit_barrier(None, 8, [self.desc] * 8).wait(30)
        x.wait(30)

    def time_message(self, fabric: str) -> None:
        if not hasattr(self, "pool"):
            self.pool = self.b.submit_recvs(4096, 8, lambda message, source: None)
        self.a.submit_send(self.b.address, b"x" * 1024).wait(30)
