"""The null fabric: every peer can be reached, every write is done at once, and no byte moves.

It measures the engine alone. A NIC's name carries its options, so that an engine can mix them:
``nics=["null0"]``, ``nics=["null0:queued,depth=64,loopback"]``.
"""

from __future__ import annotations

import itertools
import threading
from typing import Any

import numpy as np

from .. import _null
from ..errors import FabricUnavailable
from .base import CAP_LANDED, CAP_SYNC, Domain, DomainInfo, Fabric, GroupSpec, LocalKey, Memory, RemoteKey

#: longest write: the 32-bit byte count of a work request is what a ConnectX takes, 2 GiB
MAX_MSG = 1 << 31
DEPTH = 1024


def parse_nic(name: str) -> dict[str, Any]:
    """Options in a NIC's name, ``"null0:queued,depth=64,loopback"``.

    Returns
    -------
    dict
        Arguments of _null.Nic.

    Raises
    ------
    FabricUnavailable
        for an option that is not known, or a depth that is no number within 1 .. 65536.
    """
    options: dict[str, Any] = {}
    for word in filter(None, name.partition(":")[2].split(",")):
        key, _, value = word.partition("=")
        if key in ("queued", "loopback") and not value:
            options[key] = True
        elif key == "depth" and value.isdecimal() and 1 <= int(value) <= 65536:
            options["depth"] = int(value)
        else:
            raise FabricUnavailable(f"NIC {name!r}: {word!r} is no option; known: queued, loopback, depth=1..65536")
    return options


class NullDomain(Domain):
    """A NIC that does nothing.

    Attributes
    ----------
    nic : _null.Nic, its C state: ``nic.posts`` and ``nic.work_request(i)`` show what was posted.
    """

    def __init__(self, name: str, spec: GroupSpec, bell: int) -> None:
        options = parse_nic(name)
        self.nic = _null.Nic(**options)
        caps = CAP_LANDED if options.get("queued") else CAP_LANDED | CAP_SYNC
        self.info = DomainInfo(
            name=name,
            provider="null",
            caps=caps,
            max_msg=MAX_MSG,
            depth=options.get("depth", DEPTH),
            chunk=MAX_MSG,  # nothing is copied: no write is worth cutting
        )
        self.ops, self.dom = self.nic.ops, self.nic.dom
        self.bell = bell or self.nic.bell
        self.addr = name.encode()
        self._spec = spec
        self._lock = threading.Lock()
        self._keys = itertools.count(1)
        self._peers: dict[tuple[bytes, bytes], int] = {}

    def reg(self, memory: Memory) -> LocalKey:
        key = next(self._keys)
        return LocalKey(key, key)

    def dereg(self, key: LocalKey, deadline: float) -> None:
        pass

    def connect(self, addr: bytes, netaddr: bytes, deadline: float) -> int:
        with self._lock:
            index = self._peers.get((addr, netaddr))
            if index is None:
                src = self._spec.source_of(netaddr)
                with self._spec.lock():
                    index = self._peers[addr, netaddr] = self.nic.add_peer(src)
            return index

    def disconnect(self, peer: int) -> None:
        with self._lock:
            self._peers = {k: i for k, i in self._peers.items() if i != peer}
            with self._spec.lock():
                self.nic.peer_alive(peer, False)

    def import_mr(self, peer: int, rkey: int, base: int, length: int, deadline: float) -> RemoteKey:
        return RemoteKey(base, rkey)

    def release_mr(self, peer: int, key: RemoteKey) -> None:
        pass

    def recover(self, peer: int, ctxs: np.ndarray, deadline: float) -> np.ndarray:
        return np.zeros(len(ctxs), np.int64)  # no target counts anything

    def peers(self) -> list[dict[str, Any]]:
        with self._lock:
            return [
                {"index": i, "addr": addr, "src": self._spec.source_of(netaddr), "alive": self.nic.peer_alive(i)}
                for (addr, netaddr), i in self._peers.items()
            ]

    def close(self) -> None:
        pass  # the C state goes with the object: the group may still look at its bell


class NullFabric(Fabric):
    """NICs that do nothing; as many as asked for."""

    name = "null"

    @classmethod
    def available(cls) -> tuple[bool, str]:
        return True, "it does nothing, everywhere"

    def open(self, spec: GroupSpec) -> list[Domain]:
        names = [f"null{i}" for i in range(spec.nics)] if isinstance(spec.nics, int) else list(spec.nics)
        domains: list[Domain] = []
        for n in names:
            if not n.startswith("null"):
                raise FabricUnavailable(f'there is no NIC {n!r}; NICs of this fabric are named "null..."')
            domains.append(NullDomain(n, spec, domains[0].bell if domains else 0))
        return domains
