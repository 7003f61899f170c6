"""What the classes share: pairs of engines on a fabric, and peers that are nowhere."""

from __future__ import annotations

import fabricx as fx

MIB = 1 << 20


def far(number: int) -> fx.MrDesc:
    """A region of a peer that is nowhere: the null fabric reaches everybody."""
    owner = fx.NetAddr(fabric="null", incarnation=number + 1, device="cpu:0", host="nowhere", pid=1, nics=(b"null0",))
    return fx.MrDesc(owner=owner, base=1 << 40, length=1 << 44, rkeys=(number + 1,), device="cpu", name=f"far {number}")


class Null:
    """An engine on null NICs; the caller posts inline."""

    nics: object = 1

    def setup(self, *_: object) -> None:
        self.engine = fx.TransferEngine("null", progress="caller", nics=self.nics)
        self.handle = self.engine.reg_mr(1 << 40, 1 << 34, name="nowhere")[0]
        self.desc = far(0)
        self.engine.connect(self.desc.owner)

    def teardown(self, *_: object) -> None:
        self.engine.close()


class Pair:
    """Engines `a` and `b` on one fabric; `a` writes into `b`."""

    size = 32 * MIB

    def setup(self, fabric: str, *_: object) -> None:
        try:
            self.a = fx.TransferEngine(fabric, progress="caller")
        except fx.FabricUnavailable as e:
            raise NotImplementedError(str(e)) from None  # asv's word for "skip"
        self.b = fx.TransferEngine(fabric, progress="thread")
        self.src_buf, self.dst_buf = self.a.alloc(self.size), self.b.alloc(self.size)
        self.src_buf.array[:] = 1
        self.dst_buf.array[:] = 0
        self.src, _ = self.a.reg_mr(self.src_buf)
        self.dst, self.desc = self.b.reg_mr(self.dst_buf)
        self.write(8)

    def teardown(self, *_: object) -> None:
        if hasattr(self, "b"):
            self.a.close()
            self.b.close()

    def write(self, n: int) -> None:
        self.a.submit_single_write(n, None, (self.src, 0), (self.desc, 0)).wait(30)
