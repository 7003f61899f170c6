"""Which port, GID and path a verbs NIC is used with, and why: read from sysfs, so that it can be tested without a device."""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass
from pathlib import Path

from .. import errors

_LINK_LOCAL = 0xFE80 << 112


@dataclass(frozen=True, slots=True)
class Gid:
    """One entry of a port's table of GIDs.

    Attributes
    ----------
    index : its place in the table.
    raw : 16 bytes.
    kind : "RoCE v2", "IB/RoCE v1" or "".
    netdev : network interface that it belongs to; "" unknown.
    """

    index: int
    raw: bytes
    kind: str
    netdev: str

    @property
    def ip(self) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
        v6 = ipaddress.IPv6Address(self.raw)
        return v6.ipv4_mapped or v6


def read_gids(device: str, port: int, root: str = "/") -> list[Gid]:
    """The entries of a port's table that are in use, in their order."""
    base = Path(root) / "sys/class/infiniband" / device / "ports" / str(port)
    out = []
    for index in _indices(base / "gids"):
        text = _short(f"{base}/gids/{index}")
        if text.strip("0:"):  # tables have up to 1024 places, nearly all of them empty
            kind, netdev = _text(base / f"gid_attrs/types/{index}"), _text(base / f"gid_attrs/ndevs/{index}")
            out.append(Gid(index, ipaddress.IPv6Address(text).packed, kind, netdev))
    return out


def _indices(folder: Path) -> list[int]:
    try:
        return sorted(int(name) for name in os.listdir(folder) if name.isdigit())
    except OSError:
        return []


def _short(path: str) -> str:
    """A file of one short line; "" if it cannot be read. Several times faster than a text file's object."""
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError:
        return ""
    try:
        return os.read(fd, 64).decode("ascii", "replace").strip()
    except OSError:
        return ""
    finally:
        os.close(fd)


def choose_gid(gids: list[Gid], routed: str = "", wanted: int = -1, name: str = "the port") -> tuple[Gid, str]:
    """The GID to use on Ethernet, and why.

    RoCE v2 goes through routers and is what current NICs are tuned for; an address that others can route to beats one of this link
    only; of several, the one on the interface that the default route takes, then the first.

    Parameters
    ----------
    gids : of `read_gids`. routed : interface of the default route. wanted : index asked for; -1: choose. name : for errors.

    Raises
    ------
    FabricUnavailable
        no GID, or not the one that was asked for.
    """
    if wanted >= 0:
        for g in gids:
            if g.index == wanted:
                return g, "asked for"
        have = ", ".join(str(g.index) for g in gids) or "none"
        raise errors.FabricUnavailable(f"{name} has no GID with index {wanted}; in use: {have}")
    if not gids:
        raise errors.FabricUnavailable(f"{name} has no GID: give its network interface an IP address and bring it up")

    def rank(g: Gid) -> tuple[bool, int, bool, int]:
        v4 = isinstance(g.ip, ipaddress.IPv4Address)
        reach = 0 if v4 else 2 if g.ip.is_link_local else 1
        return "v2" not in g.kind, reach, bool(routed) and g.netdev != routed, g.index

    best = min(gids, key=rank)
    old, reach, off_route, _ = rank(best)
    kind = "RoCE v1 (there is no v2)" if old else "RoCE v2"
    how = ("IPv4", "global IPv6", "link-local IPv6 (no other address)")[reach]
    on = f", on {best.netdev}" if best.netdev else ""
    route = ", which has the default route" if routed and not off_route and best.netdev else ""
    return best, f"{kind}, {how} {best.ip}{on}{route}"


def default_interface(root: str = "/") -> str:
    """The interface of the IPv4 default route; "" without one."""
    for line in _text(Path(root) / "proc/net/route").splitlines()[1:]:
        f = line.split()
        if len(f) > 3 and f[1] == "00000000" and int(f[3], 16) & 1:
            return f[0]
    return ""


def ports(device: str, root: str = "/") -> list[int]:
    """Port numbers of a device."""
    return sorted(int(p.name) for p in (Path(root) / "sys/class/infiniband" / device / "ports").glob("*"))


def is_active(device: str, port: int, root: str = "/") -> bool:
    return "ACTIVE" in _text(Path(root) / "sys/class/infiniband" / device / "ports" / str(port) / "state")


def devices(root: str = "/") -> list[str]:
    """RDMA devices by name."""
    return sorted(p.name for p in (Path(root) / "sys/class/infiniband").glob("*"))


def is_hardware(device: str, root: str = "/") -> bool:
    """Whether a device is more than software (Soft-RoCE, Soft-iWARP)."""
    base = Path(root) / "sys/class/infiniband" / device
    return (base / "device").exists() and not device.startswith(("rxe", "siw"))


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
