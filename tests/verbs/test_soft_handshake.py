"""The handshake of the verbs fabric on the provider in software: lost, repeated, late, forged and crossing datagrams."""

from __future__ import annotations

import random
import struct
import threading
import time
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
from engines import until

import fabricx as fx

bare = pytest.importorskip("bare", reason="verbs: not in this build")

LINK_IB = 1
REASON = 48  # where a datagram has it


@pytest.fixture
def make(soft: ModuleType) -> Iterator[Callable[..., object]]:
    made: list[bare.Bare] = []

    def make(nic: str, **config: object) -> bare.Bare:
        made.append(bare.Bare(nic, **config))
        return made[-1]

    yield make
    for b in made:
        b.close()


def connect(a: bare.Bare, b: bare.Bare, seconds: float = 10.0, incarnation: int | None = None) -> int:
    netaddr = b.netaddr
    if incarnation is not None:
        netaddr = fx.NetAddr("verbs", incarnation, "cpu:0", "host", 1, netaddr.nics)
    return bare.both(a, b, lambda: a.domain.connect(b.domain.addr, netaddr.to_bytes(), time.monotonic() + seconds))


def tap(x: bare.Bare, change: Callable[[bytes], bytes | None] = lambda raw: raw) -> list[bytes]:
    """What a domain sends from now on, after `change`, whose None is a loss."""
    sent: list[bytes] = []
    real = x.domain._ud_send

    def send(to: bytes, raw: bytes) -> None:
        new = change(raw)
        sent.append(raw if new is None else new)
        if new is not None:
            real(to, new)

    x.domain._ud_send = send
    return sent


def kind(raw: bytes) -> int:
    return struct.unpack_from("<H", raw, 6)[0]


def pairs(x: bare.Bare) -> list[object]:
    with x.domain.pairing:
        return list(x.domain.pairs.values())


def joined(a: bare.Bare, b: bare.Bare) -> bool:
    """Whether each has one pair, whose queue pairs are connected to those of the other."""
    (p,), (q,) = pairs(a), pairs(b)
    return all(
        x.rts.dest_qp_num == y.qp_num and y.rts.dest_qp_num == x.qp_num and x.rts.rq_psn == y.rts.sq_psn
        for x, y in ((p.ctl, q.ctl), (p.data, q.data), (q.ctl, p.ctl), (q.data, p.data))
    )


# ---------------------------------------------------------------- datagrams that are lost, repeated, crossing


@pytest.mark.parametrize("lost", [1, 2, 3, 6])
def test_lost_datagrams_are_sent_again(soft, make, lost) -> None:
    a, b = make("soft0"), make("soft1")
    soft.soft.drop_datagrams(lost)
    connect(a, b)
    assert joined(a, b)


def test_the_same_question_gets_the_same_answer(soft, make) -> None:
    a, b = make("soft0"), make("soft1")
    asked, answered = tap(a), tap(b)
    connect(a, b)
    before = (pairs(b)[0].ctl.qp_num, len(soft.opened["QP"]))
    (question,) = {x for x in asked if kind(x) == 1}
    for _ in range(3):
        b.domain._datagram(question)
    assert len(answered) >= 4 and set(answered) == {answered[0]} and kind(answered[0]) == 2
    assert (pairs(b)[0].ctl.qp_num, len(soft.opened["QP"])) == before
    assert joined(a, b)


@pytest.mark.parametrize("turn", range(5))
def test_both_sides_at_once_end_in_one_pair(soft, make, turn) -> None:
    """Also when the first questions of either are lost."""
    a, b = make("soft0"), make("soft1")
    left = {id(a): turn % 3, id(b): (turn + 1) % 3}

    def losing(x: bare.Bare) -> Callable[[bytes], bytes | None]:
        def change(raw: bytes) -> bytes | None:
            left[id(x)] -= 1
            return raw if left[id(x)] < 0 else None

        return change

    tap(a, losing(a))
    tap(b, losing(b))
    at = threading.Barrier(2)
    out: dict[str, object] = {}

    def run(me: bare.Bare, other: bare.Bare, name: str) -> None:
        at.wait(10)
        try:
            out[name] = me.domain.connect(other.domain.addr, other.netaddr.to_bytes(), time.monotonic() + 10)
        except Exception as e:
            out[name] = e

    threads = [threading.Thread(target=run, args=x) for x in ((a, b, "a"), (b, a, "b"))]
    for t in threads:
        t.start()
    until(lambda: (a.poll(), b.poll(), len(out) == 2)[2], 15)
    for t in threads:
        t.join(5)
    assert all(isinstance(x, int) for x in out.values()), out
    assert joined(a, b)
    link = a.to(b)
    assert link.write(100, imm=3) == 0
    bare.settle(a, b)
    assert [c.imm for c in b.of(2)] == [3]


def test_any_number_of_threads_get_one_pair(soft, make) -> None:
    a, b = make("soft0"), make("soft1")
    out: list[int] = []

    def run() -> None:
        out.append(a.domain.connect(b.domain.addr, b.netaddr.to_bytes(), time.monotonic() + 10))

    threads = [threading.Thread(target=run) for _ in range(8)]
    for t in threads:
        t.start()
    until(lambda: (a.poll(), b.poll(), len(out) == 8)[2], 15)
    assert set(out) == {out[0]} and joined(a, b)


def test_a_domain_can_be_its_own_peer(soft, make) -> None:
    a = make("soft0")
    link = a.to(a)
    a.memory[:100] = 5
    assert link.write(100, imm=8, to=4096) == 0
    bare.settle(a)
    assert [c.imm for c in a.of(2)] == [8] and (a.memory[4096:4196] == 5).all()


# ---------------------------------------------------------------- no, and no answer


def test_nobody_there_ends_at_the_deadline_and_leaves_nothing(soft, make) -> None:
    a, b = make("soft0"), make("soft1")
    b.close()
    for _ in range(3):
        with pytest.raises(fx.TransferTimeout, match="did not answer"):
            a.domain.connect(b.domain.addr, b.netaddr.to_bytes(), time.monotonic() + 0.1)
    until(lambda: (a.poll(), not pairs(a) and not a.domain.leaving)[1])


def test_another_incarnation_is_refused(soft, make) -> None:
    a, b = make("soft0"), make("soft1")
    with pytest.raises(fx.PeerLostError, match="incarnation is over"):
        connect(a, b, incarnation=b.incarnation ^ 1)
    assert not pairs(b)
    connect(a, b)
    assert joined(a, b) or len(pairs(a)) == 1


def test_another_version_is_named_with_ours(soft, make) -> None:
    """A peer of version 7 refuses, in the layout that all versions share, and we say which is which."""
    a, b = make("soft0"), make("soft1")
    tap(a, lambda raw: raw[:4] + struct.pack("<H", 7) + raw[6:])  # a stranger's question
    answers = tap(b)
    with pytest.raises(fx.ProtocolError):
        connect(a, b)
    assert kind(answers[0]) == 3 and not pairs(b)
    c, d = make("soft2"), make("soft3")
    # a refusal by version 7
    tap(d, lambda raw: raw[:4] + struct.pack("<HH", 7, 3) + raw[8:REASON] + struct.pack("<H", 2) + raw[REASON + 2 :])
    with pytest.raises(fx.ProtocolError, match=r"version 7.*version 1"):
        connect(c, d)


# ---------------------------------------------------------------- what strangers send


def test_garbage_is_dropped_and_nothing_is_made_of_it(soft, make) -> None:
    a, b, c = make("soft0"), make("soft1"), make("soft2")
    asked = tap(a)
    connect(a, b)
    good = next(x for x in asked if kind(x) == 1)
    queue_pairs, rng = len(soft.opened["QP"]), random.Random(4)
    for n in range(400):
        if n % 3 == 0:
            raw = rng.randbytes(rng.randrange(1, 200))
        elif n % 3 == 1:
            raw = good[: rng.randrange(len(good))]
        else:  # an answer that nobody asked for, or a question cut short or changed where it matters
            x = bytearray(good)
            for at in rng.sample([0, 1, 6, 7, *range(16, 24), *range(52, 60)], 2):
                x[at] ^= 1 << rng.randrange(8)
            raw = bytes(x)
        c.domain._ud_send(b.domain.addr, raw or b"x")
    until(lambda: c.domain.ud_cq.figures()["entries"] == 0)
    connect(c, b)  # the thread that heard all that still answers
    assert len(pairs(b)) <= 2 and len(soft.opened["QP"]) <= queue_pairs + 4 + 2 * len(b.domain.leaving)
    assert a.domain.state.state(0)[0] == "up"


def test_half_open_pairs_do_not_keep_others_out(soft, make, monkeypatch) -> None:
    """Questions of peers that never go on, each another incarnation: a bounded number of queue pairs, and the oldest give way."""
    from fabricx.fabrics import verbs

    monkeypatch.setattr(verbs, "_STRANGERS", 8)
    monkeypatch.setattr(verbs, "_HALF_OPEN", 0.0)
    a, b, c = make("soft0"), make("soft1"), make("soft2")
    connect(c, b)
    asked = tap(a, lambda raw: None)
    with pytest.raises(fx.TransferTimeout):
        a.domain.connect(b.domain.addr, b.netaddr.to_bytes(), time.monotonic() + 0.05)
    question = bytearray(next(x for x in asked if kind(x) == 1))
    for n in range(40):
        struct.pack_into("<Q", question, 8, 1000 + n)  # the incarnation of who asks
        b.domain._datagram(bytes(question))
        assert len(pairs(b)) <= 8
    assert any(p.index >= 0 for p in pairs(b)), "the peer that is up gave way"
    a.domain.__dict__.pop("_ud_send")
    connect(a, b)


def test_half_open_pairs_are_kept_while_they_may_go_on(soft, make, monkeypatch) -> None:
    from fabricx.fabrics import verbs

    monkeypatch.setattr(verbs, "_STRANGERS", 2)
    a, b = make("soft0"), make("soft1")
    asked = tap(a, lambda raw: None)
    with pytest.raises(fx.TransferTimeout):
        a.domain.connect(b.domain.addr, b.netaddr.to_bytes(), time.monotonic() + 0.05)
    question = bytearray(next(x for x in asked if kind(x) == 1))
    answers = tap(b)
    for n in range(3):
        struct.pack_into("<Q", question, 8, 1000 + n)
        b.domain._datagram(bytes(question))
    assert [kind(x) for x in answers] == [2, 2, 3]


# ---------------------------------------------------------------- again


def test_a_peer_that_was_removed_is_connected_anew(soft, make) -> None:
    a, b = make("soft0"), make("soft1")
    seen = set()
    for turn in range(4):
        index = connect(a, b)
        with a.domain.pairing:
            seen.add(next(p for p in a.domain.pairs.values() if p.index == index).data.qp_num)
        link = a.to(b)
        assert link.write(10, imm=turn) == 0
        bare.settle(a, b)
        a.domain.disconnect(index)
        until(lambda: (a.poll(), b.poll(), not pairs(a) and not pairs(b))[2])
    assert len(seen) == 4 and [c.imm for c in b.of(2)] == [0, 1, 2, 3]
    until(lambda: (a.poll(), b.poll(), not a.domain.leaving and not b.domain.leaving)[2])
    assert len(soft.opened["QP"]) == 2  # for datagrams


def test_a_restarted_peer_is_another(soft, make) -> None:
    a, b = make("soft0"), make("soft1")
    old = connect(a, b)
    b.close()
    again = make("soft1")
    new = connect(a, again)
    assert new != old
    link = a.to(again)
    assert link.write(10, imm=1) == 0
    bare.settle(a, again)
    assert [c.imm for c in again.of(2)] == [1]
    assert a.domain.state.state(old)[0] == "lost"


# ---------------------------------------------------------------- paths


def attributes(x: bare.Bare) -> list[object]:
    (p,) = pairs(x)
    return [p.ctl.rts, p.data.rts]


def test_settings_reach_the_queue_pairs(soft, make) -> None:
    config = {
        "verbs_sl": 3, "verbs_traffic_class": 106, "verbs_pkey_index": 2, "verbs_timeout": 11, "verbs_retry": 5,
        "verbs_rnr_retry": 6, "verbs_min_rnr_timer": 9, "verbs_mtu": 1024,
    }  # fmt: skip
    a, b = make("soft0", **config), make("soft1")
    connect(a, b)
    for r in attributes(a):
        assert (r.timeout, r.retry_cnt, r.rnr_retry, r.min_rnr_timer, r.pkey_index) == (11, 5, 6, 9, 2)
        assert (r.ah_attr.sl, r.ah_attr.gr.traffic_class, r.ah_attr.is_global) == (3, 106, 1)
        assert r.ah_attr.gr.dgid.raw == soft.raw_gid("soft1")
    assert {r.path_mtu for r in attributes(a) + attributes(b)} == {3}


def test_infiniband_goes_by_lid(soft, make) -> None:
    soft.LIMITS.update(link_layer=LINK_IB, lid=17)
    a = make("soft0")
    soft.LIMITS.update(lid=18)
    b = make("soft1")
    connect(a, b)
    assert {(r.ah_attr.dlid, r.ah_attr.is_global) for r in attributes(a)} in ({(18, 0)}, {(18, 1)})
    assert {(r.ah_attr.dlid) for r in attributes(b)} == {17}


def test_a_port_that_is_down_says_so(soft, make) -> None:
    soft.LIMITS["port_state"] = 1
    with pytest.raises(fx.FabricUnavailable, match="soft0:1 is not active"):
        make("soft0")
    assert not any(soft.opened.values())


@pytest.mark.parametrize("limits", [{"max_cqe": 300}, {"max_srq_wr": 63}, {"max_qp_wr": 3}])
def test_a_device_that_is_too_small_says_so_and_leaves_nothing(soft, make, limits) -> None:
    soft.LIMITS.update(limits)
    with pytest.raises(fx.FabricUnavailable, match="soft0"):
        make("soft0")
    assert not any(soft.opened.values())
