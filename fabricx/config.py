"""Settings: arguments first, then FABRICX_* variables, then the defaults here."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields

from .errors import OutOfRange

_MOST32 = (1 << 32) - 1
_VERBS = {
    "verbs_gid_index": (-1, 255),
    "verbs_sl": (0, 15),
    "verbs_traffic_class": (0, 255),
    "verbs_pkey_index": (0, 65535),
    "verbs_timeout": (1, 31),
    "verbs_retry": (0, 7),
    "verbs_rnr_retry": (0, 7),
    "verbs_min_rnr_timer": (0, 31),
    "verbs_chain": (1, 16),
    "verbs_depth": (4, 512),
}


@dataclass(frozen=True, slots=True)
class Config:
    """Settings of an engine. Times are in seconds, sizes in bytes.

    Attributes
    ----------
    timeout : deadline of an operation that names none.
    connect_timeout : deadline of a handshake, an import or a lane's closing.
    split_min : a write of at least this size is split over several NICs.
    max_early : early immediates kept for one peer before it is cut off.
    spin : empty turns a driver spins before it yields (adaptive polling).
    yields : empty turns it yields before it sleeps.
    pin : pin workers to cores near their devices (on machines with more than four).
    ofi_library : path of libfabric; empty: search.
    ofi_provider : provider to ask for; empty: efa where there is hardware, else tcp (net in 1.17).
    ofi_address : address or interface to bind to; empty: the provider's choice, loopback on tcp.
    verbs_gid_index : GID to use on Ethernet; -1: RoCE v2 over IPv4 or global IPv6, the interface that routes.
    verbs_mtu : path MTU in bytes, 256 .. 4096; 0: the port's.
    verbs_sl, verbs_traffic_class, verbs_pkey_index : service level, traffic class (DSCP << 2 | ECN) and partition of all packets.
    verbs_timeout : 4.096 us << this without an acknowledgement, and a packet is sent again. verbs_retry : so many times.
    verbs_rnr_retry : times that a peer without a receive is tried again; 7: for ever. verbs_min_rnr_timer : how long it asks to wait.
    verbs_chain : work requests under one doorbell, 1 .. 16. verbs_depth : outstanding to one peer.
    vm_write : allow process_vm_writev on the local fabric; False goes through the bounce lane.
    local_reach : how the local fabric writes: "auto" (map what can be mapped, else process_vm_writev, else the bounce lane), or
        always "vm" or "bounce", which is for tests and measurements.
    """

    timeout: float = 30.0
    connect_timeout: float = 10.0
    split_min: int = 1 << 20
    max_early: int = 65536
    spin: int = 200
    yields: int = 50
    pin: bool = True
    ofi_library: str = ""
    ofi_provider: str = ""
    ofi_address: str = ""
    verbs_gid_index: int = -1
    verbs_mtu: int = 0
    verbs_sl: int = 0
    verbs_traffic_class: int = 0
    verbs_pkey_index: int = 0
    verbs_timeout: int = 14
    verbs_retry: int = 7
    verbs_rnr_retry: int = 7
    verbs_min_rnr_timer: int = 12
    verbs_chain: int = 4
    verbs_depth: int = 512
    vm_write: bool = True
    local_reach: str = "auto"

    def __post_init__(self) -> None:
        for name in ("timeout", "connect_timeout"):
            if not 0 < getattr(self, name) <= 1e6:
                raise OutOfRange(f"{name} is {getattr(self, name)!r}; it must be above 0 and at most 1e6 seconds")
        if self.local_reach not in ("auto", "vm", "bounce"):
            raise OutOfRange(f'local_reach is {self.local_reach!r}; it must be "auto", "vm" or "bounce"')
        for name, most in (("split_min", 1 << 62), ("max_early", _MOST32), ("spin", _MOST32), ("yields", _MOST32)):
            value = getattr(self, name)
            if not isinstance(value, int) or not 0 <= value <= most:
                raise OutOfRange(f"{name} is {value!r}; it must be within 0 .. {most}")
        for name, (least, most) in _VERBS.items():
            value = getattr(self, name)
            if not isinstance(value, int) or not least <= value <= most:
                raise OutOfRange(f"{name} is {value!r}; it must be within {least} .. {most}")
        if self.verbs_mtu not in (0, 256, 512, 1024, 2048, 4096):
            raise OutOfRange(f"verbs_mtu is {self.verbs_mtu!r}; it must be 0, 256, 512, 1024, 2048 or 4096 bytes")

    @classmethod
    def from_env(cls, **given: object) -> Config:
        """Settings from `given`, then the environment (FABRICX_TIMEOUT, FABRICX_OFI_LIBRARY, ...)."""
        values: dict[str, object] = {}
        for f in fields(cls):
            text = os.environ.get("FABRICX_" + f.name.upper())
            if f.name == "ofi_library":
                text = os.environ.get("FABRICX_LIBFABRIC", text)
            if text is None:
                continue
            try:
                values[f.name] = _parse(text, type(f.default))
            except ValueError as e:
                raise OutOfRange(f"FABRICX_{f.name.upper()}={text!r}: {e}") from None
        values.update({k: v for k, v in given.items() if v is not None})
        return cls(**values)  # type: ignore[arg-type]


def _parse(text: str, kind: type) -> object:
    if kind is bool:
        if text.lower() in ("1", "true", "yes", "on"):
            return True
        if text.lower() in ("0", "false", "no", "off"):
            return False
        raise ValueError("want 0 or 1")
    return kind(text)
