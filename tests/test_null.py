"""The null fabric: what it posts, what it hands back, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest

import fabricx as fx
from fabricx.fabrics.null import parse_nic

SIZE = 1 << 16


@pytest.fixture(params=["thread", "caller"])
def progress(request):
    return request.param


class Rig:
    """An engine on null NICs with one region, half of it source and half target."""

    def __init__(self, nics, progress="caller"):
        self.engine = fx.TransferEngine("null", nics=nics, progress=progress, config=fx.Config(timeout=5.0))
        self.buffer = self.engine.alloc(SIZE)
        self.handle, self.desc = self.engine.reg_mr(self.buffer)

    def write(self, n=8, imm=None, at=0, to=SIZE // 2, **k):
        return self.engine.submit_single_write(n, imm, (self.handle, at), (self.desc, to), **k)

    def pages(self, si, di, n=64, imm=None):
        return self.engine.submit_paged_writes(
            n, imm, (self.handle, fx.Pages(si, stride=n)), (self.desc, fx.Pages(di, stride=n, offset=SIZE // 2))
        )

    def nic(self, i=0):
        return self.engine._domains[0][i].nic

    def figures(self, i=0):
        return self.engine.stats()["groups"][0]["nics"][i]


@pytest.fixture
def rig():
    rigs = []

    def make(nics=1, progress="caller"):
        rigs.append(Rig(nics, progress))
        return rigs[-1]

    yield make
    for r in rigs:
        r.engine.close()


def test_a_write_fills_a_work_request_and_is_done(rig, progress):
    r = rig(progress=progress)
    r.write(256, 77, at=512, to=SIZE // 2 + 64).wait(5)
    w = r.nic().work_request(0)
    assert w["opcode"] == 0x09 and w["imm"] == 77 and w["length"] == 256
    assert w["addr"] == r.buffer.addr + 512 and w["raddr"] == r.buffer.addr + SIZE // 2 + 64
    assert r.figures()["completions"] == 0  # posted and already done: nothing to poll for


def test_a_write_without_immediate_has_another_opcode(rig):
    r = rig()
    r.write(16).wait(5)
    assert r.nic().work_request(0)["opcode"] == 0x08


@pytest.mark.parametrize("dtype", [np.uint32, np.uint64])
def test_each_page_has_its_own_work_request(rig, dtype):
    r = rig()
    si, di = np.array([3, 1, 9], dtype), np.array([0, 7, 2], dtype)
    r.pages(si, di, imm=5).wait(5)
    assert r.nic().posts == 3
    for i in range(3):
        w = r.nic().work_request(i)
        assert w["addr"] == r.buffer.addr + int(si[i]) * 64
        assert w["raddr"] == r.buffer.addr + SIZE // 2 + int(di[i]) * 64


def test_only_the_last_requests_can_be_looked_at(rig):
    r = rig()
    idx = np.zeros(1100, np.uint32)
    r.engine.submit_paged_writes(
        8, None, (r.handle, fx.Pages(idx, stride=8)), (r.desc, fx.Pages(np.arange(1100, dtype=np.uint32), stride=8))
    ).wait(5)
    assert r.nic().work_request(1099)["raddr"] == r.buffer.addr + 1099 * 8
    for gone in (75, 1100):
        with pytest.raises(IndexError, match=str(gone)):
            r.nic().work_request(gone)


def test_queued_posts_complete_at_the_next_poll(rig, progress):
    r = rig(["null0:queued"], progress)
    r.pages(np.arange(100, dtype=np.uint32), np.arange(100, dtype=np.uint32)).wait(5)
    r.write().wait(5)
    assert r.figures()["completions"] == 101 and r.figures()["outstanding_bytes"] == 0


@pytest.mark.parametrize("mode", ["", "queued,"])
def test_a_full_queue_delays_and_loses_nothing(rig, progress, mode):
    r = rig([f"null0:{mode}depth=7,loopback"], progress)
    transfers = [r.pages(np.arange(50, dtype=np.uint32), np.arange(50, dtype=np.uint32), imm=9) for _ in range(20)]
    r.engine.expect_imm_count(9, 1000).wait(5)
    for t in transfers:
        t.wait(5)
    assert r.figures()["queue_full"] > 0
    assert r.nic().posts == 1000 and r.engine.imm_count(9) == 0


def test_loopback_counts_each_write_and_nothing_else(rig, progress):
    r = rig(["null0:loopback"], progress)
    r.write(8, 3).wait(5)
    r.write(8).wait(5)
    r.pages(np.arange(20, dtype=np.uint32), np.arange(20, dtype=np.uint32), imm=3).wait(5)
    dsts = [fx.ScatterDst(8, 0, r.desc, SIZE // 2 + 8 * i) for i in range(5)]
    r.engine.submit_scatter(None, 4, r.handle, dsts).wait(5)
    r.engine.submit_barrier(None, 4, [r.desc]).wait(5)
    r.engine.expect_imm_count(3, 21).wait(5)
    r.engine.expect_imm_count(4, 6).wait(5)
    assert r.engine.imm_count(3) == r.engine.imm_count(4) == 0


def test_without_loopback_nothing_arrives(rig):
    r = rig()
    r.write(8, 3).wait(5)
    t = r.engine.expect_imm_count(3, 1, timeout=0.05)
    with pytest.raises(fx.TransferTimeout):
        t.wait(5)


def test_any_peer_can_be_reached_until_it_is_removed(rig):
    r = rig()
    far = fx.NetAddr(fabric="null", incarnation=7, device="cpu:0", host="nowhere", pid=1, nics=(b"x",))
    desc = fx.MrDesc(owner=far, base=0x10000, length=1 << 40, rkeys=(99,), device="cpu", name="far")
    r.engine.submit_single_write(8, None, (r.handle, 0), (desc, 1 << 39)).wait(5)
    w = r.nic().work_request(0)
    assert w["raddr"] == 0x10000 + (1 << 39) and w["rkey"] == 99
    assert [p["alive"] for p in r.engine._domains[0][0].peers()] == [True]
    r.engine.remove_peer(far)
    assert r.engine._domains[0][0].peers() == []
    assert not r.nic().peer_alive(0)
    r.engine.connect(far)
    again = fx.MrDesc.from_bytes(desc.to_bytes())
    r.engine.submit_single_write(8, None, (r.handle, 0), (again, 0)).wait(5)
    assert r.nic().peer_alive(1)


def test_a_message_is_taken_and_goes_nowhere(rig, progress):
    r = rig(["null0:queued"], progress)
    got = []
    r.engine.submit_recvs(64, 2, lambda m, s: got.append(bytes(m)))
    r.engine.submit_send(r.engine.address, b"hello").wait(5)
    assert r.nic().work_request(0)["opcode"] == 0x0A and r.nic().work_request(0)["length"] == 5
    assert got == []


def test_several_nics_share_the_load(rig):
    r = rig(2)
    for _ in range(10):
        r.write(64).wait(5)
    assert r.nic(0).posts == r.nic(1).posts == 5


def test_options_are_read_from_the_name():
    assert parse_nic("null0") == {}
    assert parse_nic("null3:queued,depth=64,loopback") == {"queued": True, "depth": 64, "loopback": True}


@pytest.mark.parametrize(
    "name", ["null0:fast", "null0:depth=0", "null0:depth=x", "null0:queued=1", "null0:depth=65537"]
)
def test_an_unknown_option_is_refused_by_name(name):
    with pytest.raises(fx.FabricUnavailable, match=name.partition(":")[2]):
        fx.TransferEngine("null", nics=[name])


def test_an_unknown_nic_is_refused_by_name():
    with pytest.raises(fx.FabricUnavailable, match="eth0"):
        fx.TransferEngine("null", nics=["eth0"])
