"""Registration of host and device memory, and a device's own events, on the provider in software."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
from engines import until

import fabricx as fx
from fabricx import _drive as d
from fabricx.fabrics.base import Memory

bare = pytest.importorskip("bare", reason="verbs: not in this build")

PORT_ERR, FATAL = 10, 8


@pytest.fixture
def make(soft: ModuleType) -> Iterator[Callable[..., object]]:
    made: list[bare.Bare] = []

    def make(nic: str, **config: object) -> bare.Bare:
        made.append(bare.Bare(nic, **config))
        return made[-1]

    yield make
    for b in made:
        b.close()


def newest(soft: ModuleType) -> object:
    return soft.opened["MR"][-1]


def test_relaxed_ordering_where_it_is_accepted(soft, make) -> None:
    a = make("soft0")
    relaxed = soft.enums.IBV_ACCESS_RELAXED_ORDERING
    assert newest(soft).access == relaxed | 3
    soft.LIMITS["relaxed"] = False
    a.domain.reg(Memory(a.address, 4096))
    assert newest(soft).access == 3


def test_memory_that_is_only_read_cannot_be_written_by_peers(soft, make) -> None:
    a = make("soft0")
    a.domain.reg(Memory(a.address, 4096, readonly=True))
    assert newest(soft).access & 3 == 0


def test_a_limit_on_locked_memory_is_named(soft, make) -> None:
    a = make("soft0")
    soft.LIMITS["lock_limit"] = 4096
    with pytest.raises(fx.RegistrationError, match=r"soft0:1: 8192 bytes at 0x.*ulimit -l") as e:
        a.domain.reg(Memory(a.address, 8192))
    assert e.value.errno == errno.ENOMEM
    slots = len(a.domain.free_slots)
    with pytest.raises(fx.RegistrationError):
        a.domain.reg(Memory(a.address, 8192))
    assert len(a.domain.free_slots) == slots


def test_device_memory_by_a_dmabuf_that_is_given(soft, make) -> None:
    """Its NIC addresses are those of the memory, whatever its place in the buffer."""
    a, b = make("soft0"), make("soft1")
    fd = os.memfd_create("stands for a dma-buf")
    key = b.domain.reg(Memory(b.address + 100, 4096, device="cuda:0", dmabuf_fd=fd, dmabuf_offset=8192))
    f = soft.soft.device_figures()
    assert (f["offset"], f["len"], f["iova"], f["fd"], f["open"]) == (8192, 4096, b.address + 100, fd, 1)
    os.close(fd)
    peer = a.to(b).peer
    remote = bare.both(a, b, lambda: a.domain.import_mr(peer, key.rkey, b.address + 100, 4096, bare.soon()))
    a.memory[:300] = 9
    w = d.Write(a.address, 300, 50, peer, remote.key, None, 1, 0, a.key.lkey)
    with a.lock:
        assert a.driver.post_write(w) == d.POST_QUEUED
    bare.settle(a, b)
    assert [(c.ctx, c.count) for c in a.of(d.C_DONE)] == [(1, 1)] and not a.of(d.C_ERROR)
    assert (b.memory[150:450] == 9).all() and not b.memory[:150].any() and not b.memory[450:].any()
    a.domain.release_mr(peer, remote)
    bare.both(a, b, lambda: b.domain.dereg(key, bare.soon()))
    assert soft.soft.device_figures()["open"] == 0


def test_device_memory_by_a_dmabuf_of_the_driver(soft, make) -> None:
    """Whole pages are exported, and the descriptor is not kept."""
    a = make("soft0")
    page = mmap.PAGESIZE
    at = (a.address + page - 1) // page * page + 100
    key = a.domain.reg(Memory(at, 5000, device="cuda:1"))
    f = soft.soft.device_figures()
    assert (f["start"], f["exported"]) == (at - 100, 2 * page)
    assert (f["offset"], f["len"], f["iova"], f["left"]) == (100, 5000, at, 0)
    a.domain.dereg(key, bare.soon())
    assert soft.soft.device_figures()["open"] == 0


@pytest.mark.parametrize(("nic", "driver"), [(0, 801), (errno.EOPNOTSUPP, 0)])
def test_without_dmabufs_by_address(soft, make, nic, driver) -> None:
    a = make("soft0")
    soft.soft.refuse_device(nic, driver)
    before = len(soft.opened["MR"])
    a.domain.reg(Memory(a.address, 4096, device="cuda:0"))
    assert len(soft.opened["MR"]) == before + 1 and soft.soft.device_figures()["left"] == 0


def test_device_memory_that_no_way_takes_says_what_was_tried(soft, make) -> None:
    a = make("soft0")
    soft.soft.refuse_device(errno.EOPNOTSUPP, 0)
    soft.LIMITS["lock_limit"] = 1024
    with pytest.raises(fx.RegistrationError, match="dma-buf: .*not supported.*nvidia-peermem"):
        a.domain.reg(Memory(a.address, 4096, device="cuda:0"))
    soft.soft.refuse_device(0, 999)
    with pytest.raises(fx.RegistrationError, match="cuMemGetHandleForAddressRange says 999"):
        a.domain.reg(Memory(a.address, 4096, device="cuda:0"))
    assert soft.soft.device_figures()["left"] == 0


def test_without_a_driver_the_reason_is_said(soft, make, monkeypatch) -> None:
    from fabricx.fabrics import verbs_memory

    monkeypatch.setattr(verbs_memory, "LIBCUDA", "libno-such-driver.so")
    a = make("soft0")
    soft.LIMITS["lock_limit"] = 1024
    with pytest.raises(fx.RegistrationError, match="libno-such-driver"):
        a.domain.reg(Memory(a.address, 4096, device="cuda:0"))


@pytest.mark.parametrize("kind", [PORT_ERR, FATAL])
def test_a_device_that_fails_is_told_once(soft, make, kind) -> None:
    a, b = make("soft0"), make("soft1")
    link = a.to(b)
    for _ in range(2):
        os.write(a.domain.ctx.event_fd, bytes([kind]))
    until(lambda: (a.poll(), a.of(d.C_NIC_DOWN))[1])
    os.write(a.domain.ctx.event_fd, bytes([kind]))
    bare.settle(a, b)
    assert len(a.of(d.C_NIC_DOWN)) == 1
    assert link.write(10) == -d.FE_NIC and not b.of(d.C_NIC_DOWN)


def test_a_port_that_comes_up_is_no_failure(soft, make, caplog) -> None:
    caplog.set_level("INFO")
    a = make("soft0")
    os.write(a.domain.ctx.event_fd, bytes([9]))
    until(lambda: "asynchronous event 9" in caplog.text)
    bare.settle(a)
    assert not a.of(d.C_NIC_DOWN)
