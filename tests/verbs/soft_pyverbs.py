"""pyverbs over the software provider in soft_verbs.c: as much of it as the verbs fabric uses, with the same names and signatures.

So the whole fabric, from its handshake to its completions, runs on hosts without RDMA and without a virtual machine, and can be made to
fail at will. What real devices and the kernel do is for the tests in the virtual machine.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.machinery
import importlib.util
import ipaddress
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


def build() -> ModuleType:
    """The provider, compiled once for each state of its source.

    Raises
    ------
    RuntimeError
        with what the compiler says.
    """
    source = HERE / "soft_verbs.c"
    flags = ["-shared", "-fPIC", "-O2", "-g", "-pthread", "-Wall", "-Werror", "-I" + sysconfig.get_path("include")]
    key = hashlib.sha256(source.read_bytes() + repr((sys.version, flags)).encode()).hexdigest()[:20]
    folder = ROOT / "build" / "soft_verbs" / key
    path = folder / "soft_verbs.so"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / f"part.{os.getpid()}.so"
        command = ["cc", *flags, str(source), "-o", str(part)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
        os.replace(part, path)
    if "soft_verbs" not in sys.modules:
        loader = importlib.machinery.ExtensionFileLoader("soft_verbs", str(path))
        spec = importlib.util.spec_from_file_location("soft_verbs", path, loader=loader)
        assert spec is not None
        sys.modules["soft_verbs"] = importlib.util.module_from_spec(spec)
        loader.exec_module(sys.modules["soft_verbs"])
    return sys.modules["soft_verbs"]


soft = build()

enums = SimpleNamespace(
    IBV_PORT_ACTIVE=4, IBV_QPT_RC=2, IBV_QPT_UD=4, IBV_QPS_RESET=0, IBV_QPS_INIT=1, IBV_QPS_RTR=2, IBV_QPS_RTS=3, IBV_QPS_ERR=6,
    IBV_QP_STATE=1, IBV_QP_CAP=1 << 19, IBV_ACCESS_LOCAL_WRITE=1, IBV_ACCESS_REMOTE_WRITE=2, IBV_ACCESS_RELAXED_ORDERING=1 << 20,
    IBV_SEND_SIGNALED=2, IBV_WC_SUCCESS=0, IBV_EVENT_DEVICE_FATAL=8,
    IBV_EVENT_SRQ_LIMIT_REACHED=15,
    IBV_SRQ_LIMIT=2, IBV_EVENT_PORT_ACTIVE=9, IBV_EVENT_PORT_ERR=10,
)  # fmt: skip
ERROR_STATUS = SimpleNamespace(LOC_PROT=4, FLUSH=5, REM_INV=9, REM_ACCESS=10, REM_OP=11, RETRY=12, RNR=13)


class PyverbsRDMAError(Exception):
    """Like pyverbs': has the errno."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(f"{text}. Errno: {code}, {os.strerror(code)}")
        self.error_code = code


#: what the devices are like; tests change it and put it back
LIMITS: dict[str, Any] = {}
DEFAULTS = {
    "max_cqe": 1 << 22, "max_srq_wr": 1 << 15, "max_qp_wr": 1 << 15, "max_inline": 256, "port_state": 4, "link_layer": 2, "lid": 0,
    "active_mtu": 5, "max_msg_sz": 1 << 30, "relaxed": True, "lock_limit": 0,
}  # fmt: skip
#: every object that is open, so that tests can look at them
opened: dict[str, list[Any]] = {}


def reset() -> None:
    LIMITS.clear()
    LIMITS.update(DEFAULTS)
    opened.clear()
    soft.drop_datagrams(0)
    soft.record(False)
    soft.refuse_device(0, 0)


reset()


class _Object(soft.Object):  # type: ignore[name-defined]
    closer = ""

    def made(self) -> None:
        opened.setdefault(type(self).__name__, []).append(self)
        self.closed = False

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            opened[type(self).__name__].remove(self)
            getattr(soft, self.closer)(self)


class Context(_Object):
    closer = "close_context"

    def __init__(self, name: str = "soft0") -> None:
        self.name = name
        self.async_fd, self.event_fd = soft.open_context(self)
        self.made()

    def query_port(self, port: int) -> SimpleNamespace:
        return SimpleNamespace(
            state=LIMITS["port_state"], link_layer=LIMITS["link_layer"], active_mtu=LIMITS["active_mtu"], lid=LIMITS["lid"],
            max_msg_sz=LIMITS["max_msg_sz"], gid_tbl_len=1,
        )  # fmt: skip

    def query_device(self) -> SimpleNamespace:
        return SimpleNamespace(fw_ver="soft", **LIMITS)

    def query_gid(self, port: int, index: int) -> str:
        return str(ipaddress.IPv6Address(raw_gid(self.name)))

    def get_async_event(self) -> SimpleNamespace:
        kind = os.read(self.async_fd, 1)[0]  # raises BlockingIOError when there is none
        return SimpleNamespace(event_type=kind, ack=lambda: None)


def raw_gid(name: str) -> bytes:
    """The GID of a device: IPv4 127.0.0.N, by the digits in its name; the fabric listens there for the deaths of peers."""
    return ipaddress.IPv6Address(f"::ffff:127.0.0.{1 + int('0' + ''.join(c for c in name if c.isdigit()))}").packed


class PD:
    def __init__(self, context: Context) -> None:
        self.context = context

    def close(self) -> None:
        pass


class CompChannel(_Object):
    closer = "close_channel"

    def __init__(self, context: Context) -> None:
        self.fd = soft.open_channel(self, context)
        self.made()


class CQ(_Object):
    closer = "close_cq"

    def __init__(
        self, context: Context, cqe: int, cq_context: object = None, channel: object = None, vector: int = 0
    ) -> None:
        if not 0 < cqe <= LIMITS["max_cqe"]:
            raise PyverbsRDMAError("Failed to create a CQ", errno.EINVAL)
        soft.open_cq(self, context, cqe, channel)
        self.context = context
        self.made()

    def poll(self, n: int = 1) -> tuple[int, list[SimpleNamespace]]:
        got = [
            SimpleNamespace(wr_id=i, status=s, opcode=o, byte_len=b, qp_num=q) for i, s, o, b, q in soft.poll(self, n)
        ]
        return len(got), got

    def req_notify(self) -> None:
        soft.notify(self)

    def figures(self) -> dict[str, int]:
        return soft.cq_figures(self)


class SrqAttr(SimpleNamespace):
    def __init__(self, max_wr: int = 100, max_sge: int = 1, srq_limit: int = 0) -> None:
        super().__init__(max_wr=max_wr, max_sge=max_sge, srq_limit=srq_limit)


class SrqInitAttr(SimpleNamespace):
    def __init__(self, attr: SrqAttr) -> None:
        super().__init__(attr=attr)


class SRQ(_Object):
    closer = "close_srq"

    def __init__(self, pd: PD, init: SrqInitAttr) -> None:
        if not 0 < init.attr.max_wr <= LIMITS["max_srq_wr"]:
            raise PyverbsRDMAError("Failed to create a SRQ", errno.EINVAL)
        soft.open_srq(self, pd.context, init.attr.max_wr)
        self.made()

    def modify(self, attr: SrqAttr, mask: int) -> None:
        if mask != enums.IBV_SRQ_LIMIT:
            raise PyverbsRDMAError("Failed to modify SRQ", errno.EINVAL)
        soft.mark_srq(self, attr.srq_limit)

    def figures(self) -> dict[str, int]:
        return soft.srq_figures(self)


class QPCap(SimpleNamespace):
    def __init__(self, max_send_wr=1, max_recv_wr=10, max_send_sge=1, max_recv_sge=1, max_inline_data=0) -> None:
        super().__init__(
            max_send_wr=max_send_wr, max_recv_wr=max_recv_wr, max_send_sge=max_send_sge, max_recv_sge=max_recv_sge,
            max_inline_data=max_inline_data,
        )  # fmt: skip


class QPInitAttr(SimpleNamespace):
    def __init__(self, qp_type=2, qp_context=None, scq=None, rcq=None, srq=None, cap=None, sq_sig_all=1) -> None:
        super().__init__(qp_type=qp_type, scq=scq, rcq=rcq, srq=srq, cap=cap, sq_sig_all=sq_sig_all)


class QPAttr(SimpleNamespace):
    def __init__(self, qp_state: int = 0, port_num: int = 1) -> None:
        super().__init__(qp_state=qp_state, port_num=port_num)


class QP(_Object):
    closer = "close_qp"

    def __init__(self, pd: PD, init: QPInitAttr, attr: QPAttr | None = None) -> None:
        cap = init.cap
        if not 0 < cap.max_send_wr <= LIMITS["max_qp_wr"] or cap.max_inline_data > LIMITS["max_inline"]:
            raise PyverbsRDMAError("Failed to create QP", errno.EINVAL)
        self.context, self.cap, self.init = pd.context, cap, init
        self.qp_num = soft.open_qp(
            self, pd.context, init.scq, init.rcq, init.srq, init.qp_type, cap.max_send_wr, 0 if init.srq else cap.max_recv_wr,
            cap.max_inline_data,
        )  # fmt: skip
        if attr is not None:  # pyverbs takes a UD queue pair all the way
            soft.set_qp(self, enums.IBV_QPS_RTS if init.qp_type == enums.IBV_QPT_UD else enums.IBV_QPS_INIT)
        self.rts: QPAttr | None = None
        self.made()

    @property
    def qp_state(self) -> int:
        return soft.qp_state(self)

    def query(self, mask: int) -> tuple[SimpleNamespace, SimpleNamespace]:
        return SimpleNamespace(cap=self.cap), SimpleNamespace(cap=self.cap)

    def to_init(self, attr: QPAttr) -> None:
        self._from(enums.IBV_QPS_RESET)
        soft.set_qp(self, enums.IBV_QPS_INIT)

    def to_rts(self, attr: QPAttr) -> None:
        self._from(enums.IBV_QPS_INIT)
        for field in (
            "path_mtu",
            "dest_qp_num",
            "rq_psn",
            "sq_psn",
            "timeout",
            "retry_cnt",
            "rnr_retry",
            "min_rnr_timer",
            "ah_attr",
        ):
            getattr(attr, field)
        self.rts = attr
        soft.set_qp(self, enums.IBV_QPS_RTS, attr.dest_qp_num)

    def modify(self, attr: QPAttr, mask: int) -> None:
        if mask != enums.IBV_QP_STATE or attr.qp_state != enums.IBV_QPS_ERR:
            raise PyverbsRDMAError("Failed to modify QP", errno.EINVAL)
        soft.set_qp(self, enums.IBV_QPS_ERR)

    def _from(self, state: int) -> None:
        if self.qp_state != state:
            raise PyverbsRDMAError(f"Failed to modify QP in state {self.qp_state}", errno.EINVAL)

    def post_send(self, wr: SimpleNamespace) -> None:
        soft.ud_send(self, wr.wr_id, wr.sg[0].addr, wr.sg[0].length, wr.sg[0].lkey, wr.remote_qpn)

    def post_recv(self, wr: SimpleNamespace) -> None:
        soft.ud_recv(self, wr.wr_id, wr.sg[0].addr, wr.sg[0].length, wr.sg[0].lkey)

    def figures(self) -> dict[str, int]:
        return soft.qp_figures(self)


class MR:
    def __init__(self, pd: PD, length: int, access: int, address: int = 0) -> None:
        if LIMITS["lock_limit"] and length > LIMITS["lock_limit"]:
            raise PyverbsRDMAError("Failed to register a MR", errno.ENOMEM)
        if access & enums.IBV_ACCESS_RELAXED_ORDERING and not LIMITS["relaxed"]:
            raise PyverbsRDMAError("Failed to register a MR", errno.EINVAL)
        self.access, self.open = access, True
        self.lkey = self.rkey = soft.add_mr(address, length, access)
        opened.setdefault("MR", []).append(self)

    def close(self) -> None:
        if self.open:
            self.open = False
            opened["MR"].remove(self)
            soft.drop_mr(self.lkey)


class GID(SimpleNamespace):
    def __init__(self, gid: str) -> None:
        super().__init__(raw=ipaddress.IPv6Address(gid).packed)


class GlobalRoute(SimpleNamespace):
    def __init__(self, dgid=None, flow_label=0, sgid_index=-1, hop_limit=1, traffic_class=0) -> None:
        super().__init__(dgid=dgid, sgid_index=sgid_index, hop_limit=hop_limit, traffic_class=traffic_class)


class AHAttr(SimpleNamespace):
    def __init__(self, dlid=0, sl=0, port_num=1, is_global=0, gr=None, src_path_bits=0, static_rate=0) -> None:
        super().__init__(dlid=dlid, sl=sl, port_num=port_num, is_global=is_global, gr=gr)


class AH(SimpleNamespace):
    def __init__(self, pd: PD, attr: AHAttr) -> None:
        super().__init__(attr=attr)

    def close(self) -> None:
        pass


class SGE(SimpleNamespace):
    def __init__(self, addr: int, length: int, lkey: int) -> None:
        super().__init__(addr=addr, length=length, lkey=lkey)


class SendWR(SimpleNamespace):
    def __init__(self, wr_id=0, opcode=2, num_sge=0, imm_data=0, send_flags=2, sg=None) -> None:
        super().__init__(wr_id=wr_id, sg=sg)

    def set_wr_ud(self, ah: AH, qpn: int, qkey: int) -> None:
        self.remote_qpn = qpn


class RecvWR(SimpleNamespace):
    def __init__(self, wr_id=0, num_sge=0, sg=None) -> None:
        super().__init__(wr_id=wr_id, sg=sg)


def modules() -> dict[str, Any]:
    """What the fabric's import_pyverbs() gives."""
    me = sys.modules[__name__]
    names = ("device", "pd", "cq", "srq", "qp", "mr", "addr", "wr", "pyverbs_error")
    return {"enums": enums, **dict.fromkeys(names, me)}


for _cls in (Context, CompChannel, CQ, SRQ, QP):
    _cls.__module__ = "pyverbs.soft"  # the fabric looks only into objects of pyverbs
