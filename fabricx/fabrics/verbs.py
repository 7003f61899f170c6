"""The verbs fabric, control path: opens a port of an RDMA device with pyverbs, connects queue pairs. The hot path is
pyx/verbs.pyx; what control messages say is in control.py.

Queue pairs are connected by datagrams between unreliable (UD) queue pairs, whose numbers are in NIC addresses: CONNECT, answered by
ACCEPT or REFUSE, sent again with back-off until it is answered. The same CONNECT gets the same ACCEPT. When both sides start
at once the one with the lower incarnation is followed. Who accepts must not send over queue pairs before the other's are connected
too: it speaks first there, or says CONFIRM, for which ACCEPT is sent again.
"""

from __future__ import annotations

import ctypes
import ipaddress
import logging
import mmap
import os
import secrets
import selectors
import struct
import threading
import time
from typing import Any

import numpy as np

from .. import errors
from ..address import NetAddr
from ..config import Config
from ..topology import Topology
from .base import CAP_DEVICE, CAP_LANDED, Domain, DomainInfo, GroupSpec, LocalKey, Memory
from .control import ControlDomain, ControlFabric
from .links import route_host
from .pyverbs_env import import_pyverbs
from .verbs_memory import register
from .verbs_port import choose_gid, default_interface, devices, is_active, is_hardware, ports, read_gids

try:
    from .. import _verbs
except ImportError as _e:  # pragma: no cover - depends on the build
    raise ImportError(f"fabricx was built without libibverbs' headers (Debian: libibverbs-dev): {_e}") from None

log = logging.getLogger("fabricx")

ADDRESS = struct.Struct("<4sBBBBHII16s")  # magic, version, link layer, MTU, port, LID, UD queue pair, Q_Key, GID
ADDRESS_MAGIC, ADDRESS_VERSION = b"fxvn", 1
#: magic, version, type, incarnations of who sends and who is meant, attempt, numbers and first PSNs of the control and data queue
#: pairs, reason of a refusal
DATAGRAM = struct.Struct("<4sHHQQQIIIIHH")
MAGIC, VERSION = b"fxvb", 1
CONNECT, ACCEPT, REFUSE, CONFIRM = 1, 2, 3, 4
REASONS = {1: "this incarnation is over", 2: "it speaks another version", 3: "it has no room for another peer"}
_UNSAID = 99  # of a refusal without a reason
_GRH = 40  # bytes in front of a datagram that was received
_FIRST, _MOST = 0.02, 0.5  # seconds between datagrams of one attempt: first, and after back-off
_LOG_AGAIN = 10.0  # seconds between warnings of the same kind
_LAST_WORDS = 0.3  # seconds that a farewell has to get out before queue pairs are stopped
_UD_SLOTS, _UD_SIZE = 256, 1024
_STRANGERS = 4096  # pairs of queue pairs that a domain makes
_HALF_OPEN = 30.0  # seconds in which a peer that asked for a pair must go on with it, if there is need of its room
MTUS = {256: 1, 512: 2, 1024: 3, 2048: 4, 4096: 5}  # bytes to enum ibv_mtu
ETHERNET = 2  # IBV_LINK_LAYER_ETHERNET


#: statuses of work completions, and what an operator should look at
WC_STATUS = {
    1: "local length error: the NIC refuses the length; check max_msg_sz of the port",
    2: "local queue pair operation error: an internal fault; please report it",
    4: "local protection error: the source is not registered with this NIC any more",
    5: "flushed: the queue pair had failed before",
    7: "bad response: the peer's NIC answers what makes no sense; check firmware versions",
    9: "remote invalid request: the peer's NIC refuses the kind of operation or its length",
    10: "remote access error: the peer's region is not registered any more, or smaller",
    11: "remote operation error: the peer's NIC failed; look at its kernel log",
    12: "no acknowledgement after all retries: the peer died, the cable or switch is down, or packets are lost (PFC, ECN, MTU)",
    13: "the peer's receives were used up for longer than its NIC waits: its process does not poll (stopped?)",
    19: "the device failed; look at the kernel log",
    20: "no response in time: the peer or the path to it is down",
    21: "general error: look at the kernel log",
}


class _Pair:
    """The two queue pairs to one NIC of one peer, from the first datagram on."""

    def __init__(self, addr: bytes, incarnation: int, attempt: int) -> None:
        self.addr, self.incarnation, self.attempt = addr, incarnation, attempt
        self.ctl: Any = None
        self.data: Any = None
        self.psn = secrets.randbits(24), secrets.randbits(24)
        self.up = self.refused = 0
        self.confirmed = False  # the other side's queue pairs are connected too
        self.since = time.monotonic()  # when it was made, later when it was given up
        self.version = VERSION
        self.asked = False
        self.index = -1  # of the peer that has them
        self.answered = threading.Event()

    @property
    def key(self) -> tuple[bytes, int]:
        return self.addr, self.incarnation


class VerbsDomain(ControlDomain):
    """One port of an RDMA device."""

    def __init__(self, fabric: VerbsFabric, spec: GroupSpec, device: str, port: int) -> None:
        super().__init__(fabric, spec)
        self.v = fabric.v
        self.e = self.v["enums"]
        self.device, self.port = device, port
        self.name = f"{device}:{port}"
        self.pairs: dict[tuple[bytes, int], _Pair] = {}
        self.pairing = threading.RLock()  # pairs, and UD sends
        self.leaving: list[_Pair] = []  # whose peers are lost
        self.handles: dict[int, Any] = {}  # address handles of datagrams that are out
        self.pv: list[Any] = []  # pyverbs objects in the order they were made
        try:
            self._open_nic()
        except BaseException as e:
            self._close_objects()
            if isinstance(e, errors.FabricxError):
                raise
            if isinstance(e, (OSError, ImportError)) or type(e).__name__.startswith("Pyverbs"):
                raise errors.FabricUnavailable(f"{self.name}: {e}") from e
            raise

    # -- opening

    def _made(self, x: Any) -> Any:
        self.pv.append(x)
        return x

    def _open_nic(self) -> None:
        v, e, config = self.v, self.e, self.spec.config
        self.ctx = self._made(v["device"].Context(name=self.device))
        self.port_attr = self.ctx.query_port(self.port)
        if self.port_attr.state != e.IBV_PORT_ACTIVE:
            raise errors.FabricUnavailable(f"{self.name} is not active: check the cable, and `ip link` on Ethernet")
        self.ethernet = self.port_attr.link_layer == ETHERNET
        self._choose_gid()
        self.mtu = min(self.port_attr.active_mtu, MTUS[config.verbs_mtu]) if config.verbs_mtu else self.port_attr.active_mtu
        limits = self.ctx.query_device()
        pd = self._made(v["pd"].PD(self.ctx))
        self.pd = self._thread_domain(pd)
        self.channel = self._made(v["cq"].CompChannel(self.ctx))
        self.ud_channel = self._made(v["cq"].CompChannel(self.ctx))
        limit = min(_verbs.N_WRITES, limits.max_cqe - _verbs.N_SEND)
        self.peer_limit = min(_verbs.N_PEER_WRITES, limits.max_qp_wr, limit, config.verbs_depth)
        imms = min(_verbs.N_IMMS, limits.max_srq_wr, limits.max_cqe - _verbs.N_RECV) // 64 * 64
        if imms < 64 or self.peer_limit < 4:
            raise errors.FabricUnavailable(f"{self.name} is too small: its completion queues hold {limits.max_cqe} entries")
        # room for every send and every receive that can be posted: neither queue can overrun, whatever peers do
        self.scq = self._made(v["cq"].CQ(self.ctx, limit + _verbs.N_SEND, None, self.channel, 0))
        self.rcq = self._made(v["cq"].CQ(self.ctx, imms + _verbs.N_RECV, None, self.channel, 0))
        self.srq = self._srq(_verbs.N_RECV, 1)
        self.isrq = self._srq(imms, 1)
        self._open_ud()
        probe = self._rc()
        cap = probe.query(e.IBV_QP_CAP)[0].cap
        self.inline = min(cap.max_inline_data, 256)
        self.state = _verbs.VerbsState(
            self.spec.incarnation, self.fabric.hello_fd, probe, self.scq, self.rcq, self.srq, self.isrq,
            self._channel_fd(self.channel), self.inline, config.verbs_chain, limit, self.peer_limit, imms,
        )  # fmt: skip
        self.async_fd, self.pd_address = _verbs.async_fd(probe), _verbs.pd_address(probe)
        probe.close()
        keys = []
        for address, size in self.state.buffers():
            keys.append(self._made(v["mr"].MR(self.pd, size, e.IBV_ACCESS_LOCAL_WRITE, address)).lkey)
        with self.spec.lock():
            self.state.start(*keys)
        self.mark = imms // 4
        self.logged = float("-inf")
        self._mark_low()
        self.ops, self.dom, self.wait_fd = self.state.ops, self.state.dom, self._channel_fd(self.channel)
        self.addr = ADDRESS.pack(
            ADDRESS_MAGIC, ADDRESS_VERSION, self.port_attr.link_layer, self.mtu, self.port, self.port_attr.lid, self.ud.qp_num,
            self.qkey, self.gid,
        )  # fmt: skip
        self.info = DomainInfo(
            self.name,
            f"libibverbs, {self.device}, firmware {firmware(self.device)}",
            CAP_LANDED | CAP_DEVICE,
            self.port_attr.max_msg_sz,
            depth=limit,
            inline=self.inline,
            numa=_numa(self.device),
        )

    def _choose_gid(self) -> None:
        if not self.ethernet:
            self.gid_index, self.gid = 0, ipaddress.IPv6Address(str(self.ctx.query_gid(self.port, 0))).packed
            self.why = f"InfiniBand, LID {self.port_attr.lid}"
            self.link_address = ""
        else:
            gid, why = choose_gid(
                read_gids(self.device, self.port), default_interface(), self.spec.config.verbs_gid_index, self.name
            )
            self.gid_index, self.gid = gid.index, gid.raw
            self.why = f"GID {gid.index}: {why}"
            self.link_address = str(gid.ip) if gid.ip.version == 4 else ""
        log.info("%s: %s", self.name, self.why)

    def link_host(self) -> str:
        return self.link_address or route_host()

    def _thread_domain(self, pd: Any) -> Any:
        """A parent domain whose queue pairs need no locks, since one thread at a time drives them; where the provider has it."""
        return pd  # pyverbs makes thread domains only for its own parent domains, which Soft-RoCE and Debian's pyverbs lack

    def _srq(self, wr: int, sge: int) -> Any:
        s = self.v["srq"]
        return self._made(s.SRQ(self.pd, s.SrqInitAttr(s.SrqAttr(max_wr=wr, max_sge=sge))))

    def _rc(self, depth: int = 0, srq: Any = None) -> Any:
        """A reliable queue pair, not connected."""
        q = self.v["qp"]
        said: Exception | None = None
        for inline in (64, 0):
            cap = q.QPCap(
                max_send_wr=depth or self.peer_limit, max_recv_wr=0, max_send_sge=1, max_recv_sge=0, max_inline_data=inline
            )
            attr = q.QPInitAttr(
                qp_type=self.e.IBV_QPT_RC, scq=self.scq, rcq=self.rcq, srq=srq or self.isrq, cap=cap, sq_sig_all=0
            )
            try:
                return q.QP(self.pd, attr)
            except self.v["pyverbs_error"].PyverbsRDMAError as x:
                said = x
        assert said is not None
        raise said

    def _mark_low(self) -> None:
        """The device says once when it has few empty receives left. Not all can."""
        try:
            self.isrq.modify(self.v["srq"].SrqAttr(srq_limit=self.mark), self.e.IBV_SRQ_LIMIT)
        except Exception as e:
            log.debug("%s: it does not tell when it runs low of receives: %s", self.name, e)

    def ran_low(self) -> None:
        """On the fabric's thread. Senders are only delayed by it, they retry without end; but somebody should know."""
        with self.spec.lock():
            times = self.state.ran_low()
        self.spec.kick()
        if time.monotonic() - self.logged > _LOG_AGAIN:
            self.logged = time.monotonic()
            log.warning(
                "%s: fewer than %d receives for immediates were left (%d times by now): peers send faster than it polls",
                self.name, self.mark, times,
            )  # fmt: skip
        self._mark_low()

    def _channel_fd(self, channel: Any) -> int:
        fd = _verbs.channel_fd(channel)
        os.set_blocking(fd, False)
        return fd

    # -- datagrams

    def _open_ud(self) -> None:
        v, e = self.v, self.e
        self.qkey = secrets.randbits(31)
        self.ud_cq = self._made(v["cq"].CQ(self.ctx, 2 * _UD_SLOTS, None, self.ud_channel, 0))
        q = v["qp"]
        cap = q.QPCap(max_send_wr=_UD_SLOTS, max_recv_wr=_UD_SLOTS, max_send_sge=1, max_recv_sge=1)
        init = q.QPInitAttr(qp_type=e.IBV_QPT_UD, scq=self.ud_cq, rcq=self.ud_cq, cap=cap, sq_sig_all=1)
        attr = q.QPAttr(port_num=self.port)
        attr.qkey, attr.pkey_index = self.qkey, self.spec.config.verbs_pkey_index
        self.ud = self._made(q.QP(self.pd, init, attr))
        self.ud_memory = mmap.mmap(-1, 2 * _UD_SLOTS * _UD_SIZE)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self.ud_memory))
        self.ud_base = base
        self.ud_mr = self._made(v["mr"].MR(self.pd, len(self.ud_memory), e.IBV_ACCESS_LOCAL_WRITE, base))
        self.ud_free = list(range(_UD_SLOTS))
        self.ud_fd = self._channel_fd(self.ud_channel)
        for k in range(_UD_SLOTS):
            self._ud_recv(k)
        self.ud_cq.req_notify()

    def _ud_recv(self, k: int) -> None:
        w = self.v["wr"]
        at = self.ud_base + (_UD_SLOTS + k) * _UD_SIZE
        self.ud.post_recv(w.RecvWR(wr_id=1 << 32 | k, num_sge=1, sg=[w.SGE(at, _UD_SIZE, self.ud_mr.lkey)]))

    def _ud_send(self, to: bytes, raw: bytes) -> None:
        """A datagram to a NIC address. It may be lost, like all of them."""
        w, addr = self.v["wr"], self.v["addr"]
        _, _, _, _, _, lid, qpn, qkey, gid = ADDRESS.unpack(to)
        with self.pairing:
            if not self.ud_free:
                self._ud_poll()
                if not self.ud_free:
                    return
            k = self.ud_free.pop()
            at = k * _UD_SIZE
            self.ud_memory[at : at + len(raw)] = raw
            send = w.SendWR(
                wr_id=k, num_sge=1, sg=[w.SGE(self.ud_base + at, len(raw), self.ud_mr.lkey)], send_flags=self.e.IBV_SEND_SIGNALED
            )
            ah = addr.AH(self.pd, attr=self._ah_attr(lid, gid))
            send.set_wr_ud(ah, qpn, qkey)
            self.handles[k] = ah
            self.ud.post_send(send)

    def _ah_attr(self, lid: int, gid: bytes) -> Any:
        a, config = self.v["addr"], self.spec.config
        if not self.ethernet and gid[:8] == self.gid[:8]:
            return a.AHAttr(dlid=lid, sl=config.verbs_sl, port_num=self.port, is_global=0)
        route = a.GlobalRoute(
            dgid=a.GID(str(ipaddress.IPv6Address(gid).exploded)), sgid_index=self.gid_index, hop_limit=64,
            traffic_class=config.verbs_traffic_class,
        )  # fmt: skip
        return a.AHAttr(dlid=lid, sl=config.verbs_sl, port_num=self.port, is_global=1, gr=route)

    def _ud_poll(self) -> list[bytes]:
        """What came in; finished sends give their slots back. `pairing` is held."""
        out = []
        while True:
            n, wcs = self.ud_cq.poll(16)
            for wc in wcs:
                k = wc.wr_id & 0xFFFFFFFF
                if wc.wr_id >> 32:
                    if wc.status == self.e.IBV_WC_SUCCESS and _GRH < wc.byte_len <= _UD_SIZE:
                        at = (_UD_SLOTS + k) * _UD_SIZE
                        out.append(bytes(self.ud_memory[at + _GRH : at + wc.byte_len]))
                    if not self.closed:
                        self._ud_recv(k)
                else:
                    self.ud_free.append(k)
                    self.handles.pop(k, None)
            if n == 0:
                return out

    def ud_heard(self, _: object) -> None:
        """On the fabric's thread: datagrams have come."""
        with self.pairing:
            if self.closed:
                return
            _verbs.drain_channel(self.ud_fd)
            self.ud_cq.req_notify()
            got = self._ud_poll()
        for raw in got:
            try:
                self._datagram(raw)
            except (errors.ProtocolError, struct.error) as e:
                log.warning("%s: a datagram that makes no sense: %s", self.name, e)
            except Exception:
                log.exception("%s: answering a datagram", self.name)

    def _say(self, kind: int, pair: _Pair | None, to: bytes, theirs: int, attempt: int, reason: int = 0) -> None:
        ctl, data, psn = (pair.ctl.qp_num, pair.data.qp_num, pair.psn) if pair is not None and pair.ctl else (0, 0, (0, 0))
        head = DATAGRAM.pack(MAGIC, VERSION, kind, self.spec.incarnation, theirs, attempt, ctl, data, *psn, reason, 0)
        self._ud_send(to, head + struct.pack("<H", len(self.addr)) + self.addr + struct.pack("<H", 0))

    def _datagram(self, raw: bytes) -> None:
        """One datagram. Nothing in it is trusted."""
        magic, version, kind, theirs, mine, attempt, ctl, data, cpsn, dpsn, reason, _ = DATAGRAM.unpack_from(raw)
        if magic != MAGIC:
            raise errors.ProtocolError("another magic")
        (n,) = struct.unpack_from("<H", raw, DATAGRAM.size)
        addr = raw[DATAGRAM.size + 2 : DATAGRAM.size + 2 + n]
        check_address(addr)
        with self.pairing:
            pair = self.pairs.get((addr, theirs))
            if kind == CONNECT:
                if version != VERSION:
                    self._say(REFUSE, None, addr, theirs, attempt, 2)
                elif mine != self.spec.incarnation:
                    self._say(REFUSE, None, addr, theirs, attempt, 1)
                else:
                    self._connect_asked(pair, addr, theirs, attempt, (ctl, data, cpsn, dpsn))
                return
            ours = pair is not None and mine == self.spec.incarnation and attempt == pair.attempt
            if ours and kind == CONFIRM and pair.up:
                pair.confirmed = True
                pair.answered.set()
                return
            if ours and kind == ACCEPT and pair.up and pair.asked:  # ours is not enough for it
                self._say(CONFIRM, pair, addr, theirs, attempt)
                return
            if pair is None or not ours or not pair.asked or pair.up:
                # a refusal by whoever lives at that address now does not carry the incarnation that was meant
                for p in self.pairs.values() if kind == REFUSE else ():
                    if p.addr == addr and p.asked and not p.up and p.attempt == attempt:
                        p.refused, p.version = reason or _UNSAID, version
                        p.answered.set()
                return
            if kind == REFUSE:
                pair.refused, pair.version = reason or _UNSAID, version
                pair.answered.set()
            elif kind == ACCEPT and version == VERSION:
                self._join(pair, (ctl, data, cpsn, dpsn))
                pair.confirmed = True
                self._say(CONFIRM, pair, addr, theirs, attempt)
                pair.answered.set()

    def _connect_asked(self, pair: _Pair | None, addr: bytes, theirs: int, attempt: int, numbers: tuple[int, ...]) -> None:
        if pair is not None and pair.asked and not pair.up and not pair.refused:
            if self.spec.incarnation < theirs:
                return  # both start at once, and it follows us
            pair.asked = False  # we follow it, with the queue pairs that we have
            pair.attempt = attempt
        elif pair is not None and attempt > pair.attempt:
            self._give_up(pair)  # it begins anew: what we had with it is over
            pair = None
        elif pair is not None and attempt < pair.attempt:
            return  # late
        if pair is None:
            if len(self.pairs) >= _STRANGERS and not self._make_room():
                self._say(REFUSE, None, addr, theirs, attempt, 3)
                return
            pair = self._new_pair(addr, theirs, attempt)
        if not pair.up:
            self._join(pair, numbers)
            pair.confirmed = theirs == self.spec.incarnation  # we are the other side ourselves
            pair.answered.set()
        self._say(ACCEPT, pair, addr, theirs, attempt)

    def _make_room(self) -> bool:
        """Gives up the oldest pair of a peer that asked for it and never said hello; whether there was one."""
        idle = [p for p in self.pairs.values() if p.index < 0 and not p.asked]
        oldest = min(idle, key=lambda p: p.since, default=None)
        if oldest is None or time.monotonic() - oldest.since < _HALF_OPEN:
            return False
        self._give_up(oldest)
        return True

    # -- queue pairs

    def _new_pair(self, addr: bytes, incarnation: int, attempt: int) -> _Pair:
        pair = _Pair(addr, incarnation, attempt)
        pair.ctl, pair.data = self._rc(_verbs.N_PEER_SLOTS + 8, self.srq), self._rc(0, self.isrq)
        q, e = self.v["qp"], self.e
        for qp in (pair.ctl, pair.data):
            a = q.QPAttr(qp_state=e.IBV_QPS_INIT, port_num=self.port)
            a.pkey_index = self.spec.config.verbs_pkey_index
            a.qp_access_flags = e.IBV_ACCESS_REMOTE_WRITE | e.IBV_ACCESS_LOCAL_WRITE
            qp.to_init(a)
        self.pairs[pair.key] = pair
        return pair

    def _join(self, pair: _Pair, numbers: tuple[int, ...]) -> None:
        """Connects both queue pairs to the peer's."""
        q, e, config = self.v["qp"], self.e, self.spec.config
        _, _, _, mtu, _, lid, _, _, gid = ADDRESS.unpack(pair.addr)
        for qp, number, theirs, ours in (
            (pair.ctl, numbers[0], numbers[2], pair.psn[0]),
            (pair.data, numbers[1], numbers[3], pair.psn[1]),
        ):
            a = q.QPAttr(qp_state=e.IBV_QPS_RTR, port_num=self.port)
            a.path_mtu, a.dest_qp_num, a.rq_psn = min(mtu, self.mtu), number, theirs
            a.max_dest_rd_atomic, a.min_rnr_timer = 1, config.verbs_min_rnr_timer
            a.ah_attr = self._ah_attr(lid, gid)
            a.pkey_index = config.verbs_pkey_index
            a.qp_access_flags = e.IBV_ACCESS_REMOTE_WRITE | e.IBV_ACCESS_LOCAL_WRITE
            a.timeout, a.retry_cnt, a.rnr_retry = config.verbs_timeout, config.verbs_retry, config.verbs_rnr_retry
            a.sq_psn, a.max_rd_atomic = ours, 1
            qp.to_rts(a)
        pair.up = 1

    def _give_up(self, pair: _Pair) -> None:
        """A pair is over: its peer is lost, its queue pairs go when nothing is posted on them any more. `pairing` is held."""
        if self.pairs.get(pair.key) is pair:
            del self.pairs[pair.key]
        self.leaving.append(pair)
        pair.since = time.monotonic()
        self._wake()
        if pair.index >= 0:
            with self.spec.lock():
                self.state.lose_one(pair.index)
            self.spec.kick()

    def tidy(self) -> None:
        """On the fabric's thread: pairs whose peers are lost."""
        with self.pairing:
            if self.closed:
                return
            for pair in list(self.pairs.values()):
                if pair.index >= 0 and self.state.state(pair.index)[0] == "lost":
                    self._give_up(pair)
            left = []
            for pair in self.leaving:
                with self.spec.lock():
                    if pair.index >= 0 and not self.state.idle(pair.index):
                        left.append(pair)
                    else:
                        self._end(pair)
                if pair in left:
                    if time.monotonic() - pair.since > _LAST_WORDS:
                        self._stop(pair)
                else:
                    pair.ctl.close()
                    pair.data.close()
            self.leaving = left

    def _stop(self, pair: _Pair) -> None:
        """What is still posted comes back flushed."""
        pair.since = float("inf")
        self._to_error(pair)
        self.spec.kick()

    def _end(self, pair: _Pair) -> None:
        """Nothing is posted on its queue pairs, and they are about to be destroyed, which drops the completions of what they
        have received, and the shared receives with them: they are taken in before. The progress lock is held."""
        self._to_error(pair)
        self.state.reap()
        if pair.index >= 0:
            self.state.detach(pair.index)

    def _to_error(self, pair: _Pair) -> None:
        q, e = self.v["qp"], self.e
        for qp in (pair.ctl, pair.data):
            try:
                qp.modify(q.QPAttr(qp_state=e.IBV_QPS_ERR), e.IBV_QP_STATE)
            except Exception as x:
                log.debug("%s: a queue pair that is over: %s", self.name, x)

    # -- peers

    def connect(self, addr: bytes, netaddr: bytes, deadline: float) -> int:
        who = NetAddr.from_bytes(netaddr)
        try:
            check_address(addr)
        except errors.ProtocolError as e:
            raise errors.UnknownPeer(f"{who}: {e}") from None
        pair = self._reach(addr, who, deadline)
        src = self.spec.source_of(netaddr)
        with self.spec.lock():
            index = self.state.peer(addr, who.incarnation, src)
            if index is not None:
                self.names[index] = str(who)
                self._give_to(pair, index)
        if index is None:
            raise errors.ProviderError(28, f"{self.name} has no room for another peer")
        return super().connect(addr, netaddr, deadline)

    def disconnect(self, peer: int) -> None:
        super().disconnect(peer)
        self._wake()

    def _wake(self) -> None:
        """The fabric's thread has something to clear away."""
        if not self.fabric.stop:
            os.eventfd_write(self.fabric.hello_fd, 1)

    def _give_to(self, pair: _Pair, index: int) -> None:
        """The progress lock is held."""
        if pair.index != index or not self.state.attached(index):
            pair.index = index
            self.state.attach(index, pair.ctl, pair.data)

    def joined(self, index: int, addr: bytes, incarnation: int) -> bool:
        pair = self.pairs.get((addr, incarnation))
        if pair is None or not pair.up:
            return False
        pair.confirmed = True
        self._give_to(pair, index)
        return True

    def _reach(self, addr: bytes, who: NetAddr, deadline: float) -> _Pair:
        """Queue pairs connected to a peer's, asked for if there are none."""
        wait, again = _FIRST, 0.0
        while True:
            self._open(who)
            with self.pairing:
                pair = self.pairs.get((addr, who.incarnation))
                if pair is None:
                    pair = self._new_pair(addr, who.incarnation, time.time_ns())
                    pair.asked = True
                if pair.up and pair.index >= 0 and self.state.state(pair.index)[0] == "lost":
                    self._give_up(pair)  # its peer is to be met anew
                    continue
                if pair.up and pair.confirmed:
                    return pair
                if pair.refused:
                    self._give_up(pair)
                    if pair.refused == 2:
                        raise errors.ProtocolError(
                            f"{who} speaks version {pair.version} of the verbs handshake, this is version {VERSION}"
                        )
                    raise errors.PeerLostError(f"{who} refused: {REASONS.get(pair.refused, 'it gives no reason')}")
                now = time.monotonic()
                if now > deadline:
                    if pair.asked:
                        self._give_up(pair)
                    raise errors.TransferTimeout(f"{who} did not answer within the time-out")
                if now >= again:
                    self._say(CONNECT if pair.asked else ACCEPT, pair, addr, who.incarnation, pair.attempt)
                    again, wait = now + wait, min(2 * wait, _MOST)
                pair.answered.clear()
            pair.answered.wait(max(0.001, min(again, deadline) - now))

    # -- registration

    def reg(self, memory: Memory) -> LocalKey:
        slot, rkey = self.take_slot()
        try:
            mr = register(self.v, self.pd, self.pd_address, memory, self.name)
        except BaseException:
            self.give_slot(slot)
            raise
        with self.spec.lock():
            self.state.add_region(slot, rkey, memory.addr, memory.length, mr.rkey)
            if memory.readonly:
                self.state.hide_region(slot)
        self.regions[rkey] = (mr, memory)
        return LocalKey(mr.lkey if memory.device == "cpu" else mr.lkey | _verbs.LKEY_NOT_BY_CPU, rkey, memory)

    def drop_region(self, rkey: int, mr: Any) -> int:
        self.state.drop_region(rkey)
        mr.close()
        return 0

    def free_mr(self, mr: Any) -> None:
        mr.close()

    def strerror(self, rc: int) -> str:
        return os.strerror(abs(rc))

    def recover(self, peer: int, ctxs: np.ndarray, deadline: float) -> np.ndarray:
        """A port that is gone does not tell what it delivered."""
        return np.full(len(ctxs), -1, np.int64)

    def poll(self) -> None:
        _verbs.poll_once(self.dom)

    def explain(self, vendor: int) -> str:
        return WC_STATUS.get(vendor, "")

    # -- the end

    def close(self) -> None:
        if self.closed:
            return
        super().close()
        with self.pairing:
            for pair in [*self.pairs.values(), *self.leaving]:
                with self.spec.lock():
                    if pair.index >= 0:
                        self.state.detach(pair.index)
                for qp in (pair.ctl, pair.data):
                    if qp is not None:
                        qp.close()
            self.pairs.clear()
            self.leaving.clear()
            self._close_objects()

    def _close_objects(self) -> None:
        self.handles.clear()
        while self.pv:
            x = self.pv.pop()
            try:
                x.close()
            except Exception as e:
                log.warning("%s: closing a %s: %s", self.name, type(x).__name__, e)


def check_address(addr: bytes) -> None:
    """Raises ProtocolError for what is no NIC address of this fabric."""
    if len(addr) != ADDRESS.size:
        raise errors.ProtocolError(f"a NIC address of {len(addr)} bytes; those of the verbs fabric have {ADDRESS.size}")
    magic, version, layer, mtu, _, _, qpn, _, _ = ADDRESS.unpack(addr)
    if magic != ADDRESS_MAGIC or version != ADDRESS_VERSION or layer not in (1, 2) or not 1 <= mtu <= 5 or qpn >> 24:
        raise errors.ProtocolError("no NIC address of the verbs fabric, or of another version")


def firmware(device: str) -> str:
    try:
        with open(f"/sys/class/infiniband/{device}/fw_ver") as f:
            return f.read().strip() or "unknown"
    except OSError:
        return "unknown"


def _numa(device: str) -> int:
    try:
        with open(f"/sys/class/infiniband/{device}/device/numa_node") as f:
            return int(f.read())
    except (OSError, ValueError):
        return -1


def choose_nics(spec: GroupSpec) -> list[tuple[str, int, str]]:
    """(device, port, why) for each NIC of a device."""
    if not isinstance(spec.nics, int):
        return [(n.partition(":")[0], int(n.partition(":")[2] or 1), "asked for") for n in spec.nics]
    have = [(d, p) for d in devices() for p in ports(d) if is_active(d, p)]
    if not have:
        raise errors.FabricUnavailable(f"no RDMA port is active (devices: {', '.join(devices()) or 'none'})")
    near = [(c.nic, c.reason) for c in Topology.read().nearest_nics(spec.device, None)]
    out = []
    for name, why in near:
        out += [(d, p, why) for d, p in have if d == name.partition(":")[0]]
    out += [(d, p, "no nearer one") for d, p in have if (d, p) not in {x[:2] for x in out}]
    if len(out) < spec.nics:
        raise errors.FabricUnavailable(f"{spec.nics} NICs are wanted for {spec.device}; active RDMA ports: {len(out)}")
    return out[: spec.nics]


class VerbsFabric(ControlFabric):
    """RDMA: InfiniBand, RoCE, Soft-RoCE."""

    name = "verbs"

    def __init__(self) -> None:
        self.v = import_pyverbs()
        super().__init__()

    @classmethod
    def available(cls) -> tuple[bool, str]:
        try:
            import_pyverbs()
        except errors.FabricUnavailable as e:
            return False, str(e)
        found = [f"{d}:{p}" for d in devices() for p in ports(d) if is_active(d, p)]
        if not found:
            return False, f"no RDMA port is active (devices: {', '.join(devices()) or 'none'})"
        return True, f"active ports: {', '.join(found)}"

    @classmethod
    def hardware(cls, config: Config) -> tuple[bool, str]:
        """Whether there is an RDMA NIC that is more than software, other than EFA, which has no such queue pairs."""
        ok, why = cls.available()
        real = [d for d in devices() if is_hardware(d) and not d.startswith("efa") and any(is_active(d, p) for p in ports(d))]
        return (True, f"RDMA hardware: {', '.join(real)}") if ok and real else (False, why if not ok else "software devices only")

    def open(self, spec: GroupSpec) -> list[Domain]:
        domains: list[VerbsDomain] = []
        try:
            for device, port, why in choose_nics(spec):
                log.info("%s:%d for %s: %s", device, port, spec.device, why)
                domains.append(VerbsDomain(self, spec, device, port))
        except BaseException:
            for d in domains:
                d.state.shut()
                d._close_objects()
            raise
        for d in domains:
            self.links.selector.register(d.ud_fd, selectors.EVENT_READ, d.ud_heard)
            os.set_blocking(d.async_fd, False)
            self.links.selector.register(d.async_fd, selectors.EVENT_READ, self._event)
        self.add(domains)
        return list(domains)

    def _event(self, fd: int) -> None:
        """A device has something to say of itself."""
        for d in [d for d in list(self.domains) if isinstance(d, VerbsDomain) and d.async_fd == fd]:
            while True:
                try:
                    event = d.ctx.get_async_event()
                except Exception:
                    return
                kind, e = event.event_type, d.e
                event.ack()
                if kind == e.IBV_EVENT_SRQ_LIMIT_REACHED:
                    d.ran_low()
                    continue
                log.info("%s: asynchronous event %d", d.name, kind)
                if kind == e.IBV_EVENT_DEVICE_FATAL or kind == e.IBV_EVENT_PORT_ERR:
                    what = "the device failed" if kind == e.IBV_EVENT_DEVICE_FATAL else "its port is down"
                    log.error("%s: %s", d.name, what)
                    with d.spec.lock():
                        d.state.nic_down()
                    d.spec.kick()

    def forget(self, domain: ControlDomain) -> None:
        assert isinstance(domain, VerbsDomain)
        for fd in (domain.ud_fd, domain.async_fd):
            try:
                self.links.selector.unregister(fd)
            except (KeyError, ValueError):
                pass
        super().forget(domain)
