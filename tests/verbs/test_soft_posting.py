"""Posting and completions of the verbs fabric, work request by work request, on the provider in software."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from types import ModuleType

import numpy as np
import pytest
from engines import until

from fabricx import _drive as d

bare = pytest.importorskip("bare", reason="verbs: not in this build", exc_type=ImportError)

SIGNALED, INLINE = 2, 8
WRITE, WRITE_IMM = 0, 1


@pytest.fixture
def make(soft: ModuleType) -> Iterator[object]:
    made: list[bare.Bare] = []

    def make(nic: str, **config: object) -> bare.Bare:
        made.append(bare.Bare(nic, **config))
        return made[-1]

    yield make
    for b in made:
        b.close()


@pytest.fixture
def ends(make) -> tuple[bare.Bare, bare.Bare, bare.Link]:
    a, b = make("soft0"), make("soft1")
    a.memory[:] = np.random.default_rng(1).integers(1, 256, bare.SIZE, dtype=np.uint8)
    return a, b, a.to(b)


def told(x: bare.Bare) -> tuple[int, int]:
    """(posts that succeeded, posts that failed)."""
    return sum(c.count for c in x.of(d.C_DONE)), sum(c.count for c in x.of(d.C_ERROR))


def imms(x: bare.Bare) -> int:
    return sum(c.count for c in x.of(d.C_IMM))


# ---------------------------------------------------------------- what is posted


def test_pages_go_in_chains_under_one_doorbell(soft, ends) -> None:
    a, b, link = ends
    si, di = (
        np.random.default_rng(2).permutation(256)[:102].astype(np.uint32),
        np.arange(102, dtype=np.uint64)[::-1].copy(),
    )
    soft.soft.record(True)
    assert link.pages(1000, 102, imm=7, ctx=5, si=si, di=di).left == 0
    posts = soft.soft.recorded()
    assert [p["src"] - a.address for p in posts] == [int(i) * 1000 for i in si]
    assert [p["dst"] - b.address for p in posts] == [int(i) * 1000 for i in di]
    assert {(p["opcode"], p["imm"], p["len"]) for p in posts} == {(WRITE_IMM, 7, 1000)}
    bells = sorted({p["doorbell"] for p in posts})
    chains = [[p for p in posts if p["doorbell"] == x] for x in bells]
    assert [len(c) for c in chains] == [4] * 25 + [2]
    assert len(bells) / len(posts) <= 0.26
    assert all([p["flags"] & SIGNALED for p in c] == [0] * (len(c) - 1) + [SIGNALED] for c in chains)
    bare.settle(a, b)
    assert told(a) == (102, 0) and imms(b) == 102
    for i, j in zip(si, di, strict=True):
        assert (a.memory[int(i) * 1000 : int(i) * 1000 + 1000] == b.memory[int(j) * 1000 : int(j) * 1000 + 1000]).all()


@pytest.mark.parametrize("kinds", [(None, np.uint32), (np.uint64, np.uint64), (np.uint32, np.uint32)])
@pytest.mark.parametrize("chain", [1, 4, 5])
def test_a_page_outside_stops_a_list_there(soft, make, chain, kinds) -> None:
    """Those before it are posted, whatever its place in a chain; it is named, and goes no further."""
    a, b = make("soft0", verbs_chain=chain), make("soft1")
    a.memory[:] = 1
    link = a.to(b)
    sums = 0
    for at in range(11):
        di = np.arange(11, dtype=kinds[1])
        di[at] = bare.SIZE // 100
        si = None if kinds[0] is None else np.arange(11, dtype=kinds[0])
        b.memory[:] = 0
        p = link.pages(100, 11, imm=1, ctx=at, si=si, di=di)
        assert (link.rc, p.at) == (-d.FE_REMOTE_RANGE, at)
        bare.settle(a, b)
        sums += at
        assert told(a) == (sums, 0) and imms(b) == sums
        assert (b.memory[: at * 100] == 1).all() and not b.memory[at * 100 :].any()


def test_an_immediate_alone_has_no_list_and_little_goes_inline(soft, ends) -> None:
    a, b, link = ends
    soft.soft.record(True)
    assert [link.write(0, imm=0x01020304), link.write(8), link.write(a.domain.inline + 1)] == [d.POST_QUEUED] * 3
    nothing, little, more = soft.soft.recorded()
    assert (nothing["sges"], nothing["opcode"], nothing["imm"]) == (0, WRITE_IMM, 0x01020304)
    assert (little["opcode"], little["flags"] & INLINE, more["flags"] & INLINE) == (WRITE, INLINE, 0)
    bare.settle(a, b)
    assert [c.imm for c in b.of(d.C_IMM)] == [0x01020304]
    assert (b.memory[: a.domain.inline + 1] == a.memory[: a.domain.inline + 1]).all()


def test_writes_to_one_peer_share_a_doorbell(soft, ends) -> None:
    a, b, link = ends
    soft.soft.record(True)
    assert link.many([(64, 9, 100 + i) for i in range(10)]) == [d.POST_QUEUED] * 10
    posts = soft.soft.recorded()
    assert len({p["doorbell"] for p in posts}) == 3
    bare.settle(a, b)
    assert sorted(c.ctx for c in a.of(d.C_DONE)) == [100 + i for i in range(10)]
    assert told(a) == (10, 0) and imms(b) == 10


def test_a_full_queue_takes_no_more_and_gives_its_places_back(soft, make) -> None:
    a, b = make("soft0", verbs_depth=10), make("soft1")
    link = a.to(b)
    soft.soft.hold(link.qp, True)
    for turn in range(7):
        p = link.pages(100, 25, ctx=turn)
        assert (link.rc, p.at) == (d.POST_QUEUED, 10)
        assert link.write(1) == d.POST_FULL
        assert soft.soft.let_go(link.qp, 1000) == 10
        a.poll()
        assert told(a) == (10 * (turn + 1), 0)
    assert link.qp.figures()["taken"] == 0


# ---------------------------------------------------------------- what fails


@pytest.mark.parametrize("chain", [1, 3, 4, 16])
def test_a_failure_anywhere_is_counted_once(soft, make, chain) -> None:
    """Whatever work request of whatever chain fails: those before it are done, the rest failed, each once."""
    n, b = 21, make("soft7")
    for at in range(n):
        a = make("soft0", verbs_chain=chain)
        link = a.to(b)
        a.seen.clear()
        soft.soft.hold(link.qp, True)
        soft.soft.fail(link.qp, at, soft.ERROR_STATUS.REM_OP)
        assert link.pages(100, n - 5, ctx=1).left == 0
        assert [link.write(50, ctx=2) for _ in range(5)] == [d.POST_QUEUED] * 5
        soft.soft.let_go(link.qp, 1000)
        bare.settle(a)
        by = {ctx: [sum(c.count for c in a.of(k) if c.ctx == ctx) for k in (d.C_DONE, d.C_ERROR)] for ctx in (1, 2)}
        assert by == {1: [min(at, n - 5), max(0, n - 5 - at)], 2: [max(0, at - (n - 5)), min(5, n - at)]}, at
        assert [c.ctx for c in a.of(d.C_PEER_LOST)] == [link.peer]
        assert a.of(d.C_ERROR)[0].status == d.FE_PROVIDER
        assert link.write(1) == -d.FE_PEER_LOST
        assert a.domain.peers()[0]["outstanding"] == 0
        a.close()


@pytest.mark.parametrize("code", [errno.ENOMEM, errno.EIO])
@pytest.mark.parametrize("taken", [0, 1, 3])
def test_a_chain_that_is_taken_in_part_makes_nothing_else_succeed(soft, ends, taken, code) -> None:
    """Work before it that is still on its way is not over, and none of it is told twice."""
    a, b, link = ends
    soft.soft.hold(link.qp, True)
    assert link.pages(100, 8, ctx=1).left == 0
    soft.soft.refuse(link.qp, taken, code)
    p = link.pages(100, 4, ctx=2)
    refused = 4 - (p.at if link.rc == d.POST_QUEUED else 0)
    a.poll()
    assert told(a) == (0, 0)
    soft.soft.set_qp(link.qp, soft.enums.IBV_QPS_ERR)
    bare.settle(a)
    assert told(a) == (0, 8 + 4 - refused)
    assert a.domain.peers()[0]["outstanding"] == 0


STATUSES = {
    1: d.FE_LOCAL_KEY, 2: d.FE_PROVIDER, 4: d.FE_LOCAL_KEY, 5: d.FE_PEER_LOST, 9: d.FE_REMOTE_KEY, 10: d.FE_REMOTE_KEY,
    11: d.FE_PROVIDER, 12: d.FE_PEER_LOST, 13: d.FE_PEER_LOST, 16: d.FE_PEER_LOST, 19: d.FE_PROVIDER, 20: d.FE_PEER_LOST,
    21: d.FE_PROVIDER,
}  # fmt: skip


@pytest.mark.parametrize("status", sorted(STATUSES))
def test_each_status_has_a_cause_and_says_where_to_look(soft, ends, status) -> None:
    a, _, link = ends
    soft.soft.fail(link.qp, 0, status)
    link.write(100, ctx=3)
    a.poll()
    (c,) = a.of(d.C_ERROR)
    assert (c.ctx, c.count, c.status) == (3, 1, STATUSES[status])
    assert len(a.domain.explain(c.vendor)) > 10 or status == 16


def test_a_region_that_the_nic_refuses_is_told_as_such(soft, ends) -> None:
    """The peer has let its registration go behind the protocol's back."""
    a, b, link = ends
    b.domain.regions[b.key.rkey][0].close()
    link.write(1000, ctx=1)
    link.write(1000, ctx=2)
    bare.settle(a, b)
    assert [(c.ctx, c.status) for c in a.of(d.C_ERROR)][0] == (1, d.FE_REMOTE_KEY)
    assert not b.memory.any()


# ---------------------------------------------------------------- receives for immediates


def account(soft: ModuleType, x: bare.Bare) -> tuple[int, int]:
    """Empty receives that the domain believes are posted, and that are."""
    return x.domain.state.figures()["imms_posted"], x.domain.isrq.figures()["posted"]


def test_running_out_of_receives_delays_and_is_told(soft, make, caplog) -> None:
    soft.LIMITS["max_srq_wr"] = 256
    a, b = make("soft0"), make("soft1")
    link = a.to(b)
    room = account(soft, b)[1]
    assert account(soft, b) == (room, room) and 64 <= room <= 256
    with b.lock:  # it does not poll
        for i in range(room + 100):
            assert link.write(0, imm=1, ctx=i) == d.POST_QUEUED
        bare.settle(a)
        assert told(a) == (room, 0) and link.qp.figures()["waiting"] == 100
    until(lambda: b.domain.state.figures()["low"] == 1)
    bare.settle(a, b)
    assert told(a) == (room + 100, 0) and imms(b) == room + 100
    assert "receives for immediates were left" in caplog.text
    assert b.domain.rcq.figures()["overruns"] == 0


@pytest.mark.parametrize("taken", [0, 1, 40, 63])
def test_a_batch_of_receives_that_is_taken_in_part_is_counted_right(soft, ends, taken) -> None:
    a, b, link = ends
    soft.soft.refuse_srq(b.domain.isrq, taken, errno.ENOMEM)
    for _ in range(200):
        assert link.write(0, imm=1) == d.POST_QUEUED
        a.poll()
        b.poll()
        have, are = account(soft, b)
        assert have == are
    bare.settle(a, b)
    assert imms(b) == 200 and told(a) == (200, 0)


def test_messages_and_immediates_never_take_each_others_receives(soft, make) -> None:
    """Immediates are used up while messages go through, and the other way round."""
    soft.LIMITS["max_srq_wr"] = 256
    a, b = make("soft0"), make("soft1")
    link = a.to(b)
    room = account(soft, b)[1]
    messages = b.domain.srq.figures()["posted"]
    for _ in range(room + 5):
        link.write(0, imm=1)
    assert b.domain.srq.figures()["posted"] == messages
    with a.lock:
        for k in range(20):
            a.domain.state.ask_import(link.peer, k, 1, 2, 3)
    assert b.domain.srq.figures()["posted"] < messages
    bare.settle(a, b)
    assert imms(b) == room + 5 and b.domain.srq.figures()["posted"] == messages


def test_receives_used_by_a_peer_that_went_are_posted_again(soft, make) -> None:
    """Completions of a queue pair that is destroyed are gone, and its receives with them, unless they were polled before."""
    b = make("soft7")
    messages = b.domain.srq.figures()["posted"]
    for turn in range(5):
        a = make("soft0")
        link = a.to(b)
        with b.domain.pairing:  # the fabric's thread has to wait
            (pair,) = b.domain.pairs.values()
            b.domain.disconnect(pair.index)
            bare.settle(b)  # its farewell is out: nothing of ours is posted any more
            for _ in range(30):
                assert link.write(0, imm=1) == d.POST_QUEUED
            with a.lock:
                for k in range(10):
                    a.domain.state.ask_import(link.peer, k, 1, 2, 3)
            assert b.domain.rcq.figures()["entries"] == 40
            b.domain.tidy()
            assert not b.domain.pairs and not b.domain.leaving
        a.close()
        bare.settle(b)
        have, are = account(soft, b)
        assert have == are, f"after {turn + 1} peers"
        assert b.domain.srq.figures()["posted"] == messages, f"after {turn + 1} peers"


# ---------------------------------------------------------------- queues


def test_completion_queues_never_overrun(soft, make) -> None:
    """Eight peers flood one that polls seldom; all of it ends at once in errors too."""
    soft.LIMITS["max_cqe"] = 1024
    soft.LIMITS["max_srq_wr"] = 512
    b = make("soft7")
    others = [make(f"soft{i % 7}") for i in range(8)]
    links = [x.to(b) for x in others]
    back = [b.to(x) for x in others]
    for turn in range(6):
        for link in links + back:
            for _ in range(300):
                if link.write(0, imm=1) == d.POST_FULL:
                    break
        if turn % 2:
            bare.settle(b, *others)
        for x in [b, *others]:
            for q in (x.domain.scq, x.domain.rcq):
                assert q.figures()["overruns"] == 0
    for link in links + back:
        soft.soft.set_qp(link.qp, soft.enums.IBV_QPS_ERR)
    bare.settle(b, *others)
    for x in [b, *others]:
        assert x.domain.scq.figures()["overruns"] == x.domain.rcq.figures()["overruns"] == 0
        assert all(p["outstanding"] == 0 for p in x.domain.peers())


def test_what_came_before_sleeping_is_seen(soft, ends) -> None:
    """More completions than one poll takes, of which only the last says something."""
    a, b, link = ends
    bare.settle(a, b)
    ctl = next(p for p in a.domain.pairs.values() if p.index == link.peer).ctl
    soft.soft.hold(ctl, True)
    soft.soft.hold(link.qp, True)
    with a.lock:
        for k in range(25):
            a.domain.state.ask_import(link.peer, k, 1, 2, 3)
    assert link.write(100, ctx=9) == d.POST_QUEUED
    soft.soft.let_go(ctl, 1000)
    soft.soft.let_go(link.qp, 1000)
    with a.lock:
        assert a.driver.arm(), "it would sleep on a completion that never rings"
    a.poll()
    assert [c.ctx for c in a.of(d.C_DONE)] == [9]


def test_device_memory_is_not_copied_by_the_cpu(soft, ends) -> None:
    """Inline data is read by the CPU, which cannot read a GPU's memory."""
    from fabricx.fabrics.base import Memory

    a, b, link = ends
    key = a.domain.reg(Memory(a.address, 4096, device="cuda:0"))
    soft.soft.record(True)
    w = d.Write(a.address, 8, 0, link.peer, link.rkey, None, 1, 0, key.lkey)
    with a.lock:
        assert a.driver.post_write(w) == d.POST_QUEUED
    p = d.Pages(a.address, 0, 8, 2, link.peer, link.rkey, ctx=2, lkey=key.lkey)
    with a.lock:
        assert a.driver.post_pages(p) == d.POST_QUEUED
    posts = soft.soft.recorded()
    assert [x["flags"] & INLINE for x in posts] == [0, 0, 0]
    assert {x["lkey"] for x in posts} == {key.lkey & 0xFFFFFFFF}
    bare.settle(a, b)
    assert told(a) == (3, 0)
