"""The control path of a fabric: what the engine asks of it in Python, seldom and never on the hot path.

The hot path is the C table of functions in pyx/fabric.pxd; a `Domain` here carries its address.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

CAP_LANDED = 1
CAP_SYNC = 2
CAP_DEVICE = 4


@dataclass(frozen=True, slots=True)
class DomainInfo:
    """What a domain (one NIC) can do.

    Attributes
    ----------
    name : the NIC as an operator knows it, e.g. ``"local0"``, ``"lo/tcp"``, ``"mlx5_0:1"``.
    provider : library and version behind it, for ``fabricx doctor``.
    caps : CAP_ bits of pyx/fabric.pxd.
    max_msg : longest single write in bytes.
    depth : posts that may be outstanding at once.
    chunk : bytes a post should carry on a CAP_SYNC domain, so that immediates are not starved.
    run : pages that one ctx stands for at most. A fabric that completes pages in any order and can only say how many of a ctx
        were counted, not which, takes so many at a time that it carries them out as one.
    inline : bytes up to which a write needs no registered source; 0 if there is no such size.
    numa : NUMA node, -1 unknown.
    """

    name: str
    provider: str
    caps: int
    max_msg: int
    depth: int = 1024
    chunk: int = 262_144
    run: int = 256
    inline: int = 0
    numa: int = -1


@dataclass(slots=True)
class GroupSpec:
    """What the engine tells a fabric when it opens the NICs of one device.

    Attributes
    ----------
    device : e.g. ``"cpu:0"`` or ``"cuda:3"``.
    nics : number of NICs wanted, or names of NICs.
    address : the group's NetAddr without its NIC addresses yet (incarnation, host, pid), as a callable that
        returns the finished bytes: it is valid once `Fabric.open` has returned.
    source_of : maps the bytes of a peer group's NetAddr to the dense 32-bit number that completions carry
        as ``src``; the same for all NICs of that peer. Callable from any thread.
    lock : ``with spec.lock():`` holds the group's progress lock. Needed around every call into
        the C state of a domain from Python once `open` has returned. Not re-entrant.
    kick : wakes the worker, so that it polls soon.
    config : fabricx.config.Config.
    chaos : fabricx.fabrics.local.Chaos or None.
    """

    device: str
    nics: int | Sequence[str]
    address: Callable[[], bytes]
    source_of: Callable[[bytes], int]
    lock: Callable[[], AbstractContextManager[None]]
    kick: Callable[[], None]
    config: Any
    chaos: Any = None
    incarnation: int = 0  #: of the group; 64 random bits, also in its NetAddr


@dataclass(slots=True)
class LocalKey:
    """A registration with one domain: `lkey` for posting, `rkey` (64 bits) for peers."""

    lkey: int
    rkey: int
    token: Any = None


@dataclass(slots=True)
class RemoteKey:
    """An imported remote region as one domain sees it: posts go to ``base + offset`` with `key`."""

    base: int
    key: int
    token: Any = None


@dataclass(slots=True)
class Memory:
    """Memory to register.

    Attributes
    ----------
    addr, length : the range in bytes; any alignment, length > 0.
    fd, fd_offset : a sealed memfd (or other mappable file) that holds it, else -1.
    device : ``"cpu"`` or ``"cuda:N"``.
    owner : whatever keeps it alive.
    readonly : memory that must not be written, or cannot be: registered as a source, and no peer may import it.
    dmabuf_fd, dmabuf_offset : a dma-buf of device memory, for NICs that register by it; else -1.
    """

    addr: int
    length: int
    fd: int = -1
    fd_offset: int = 0
    device: str = "cpu"
    owner: Any = field(default=None, repr=False)
    dmabuf_fd: int = -1
    dmabuf_offset: int = 0
    readonly: bool = False


class Domain(ABC):
    """One opened NIC. Every blocking call takes a deadline in `time.monotonic()` seconds, raises
    fabricx.errors and may be called from any thread, without the progress lock held."""

    info: DomainInfo
    ops: int  #: address of a static fabric_ops_t
    dom: int  #: address of the domain's C state
    addr: bytes  #: this NIC's address, at most 512 bytes, opaque to the engine
    bell: int = 0  #: address of a uint32 bell that arrivals ring, shared by a group's domains; 0: none
    wait_fd: int = -1  #: descriptor that turns readable on arrivals, where there is no bell

    @abstractmethod
    def reg(self, memory: Memory) -> LocalKey:
        """Register memory. Raises RegistrationError naming address, length and errno."""

    @abstractmethod
    def dereg(self, key: LocalKey, deadline: float) -> None:
        """Undo `reg`. When it returns, nothing can land there any more through this domain. Raises
        TransferTimeout, and the region stays as it was to its owner (quarantine), if a peer that may still write
        does not let go before the deadline."""

    @abstractmethod
    def connect(self, addr: bytes, netaddr: bytes, deadline: float) -> int:
        """Resolve the peer NIC `addr` (of the group whose NetAddr is `netaddr`) and shake hands.

        Idempotent and thread-safe: any number of threads asking for one peer get one connection.
        Raises PeerLostError (refused, dead, another incarnation), TransferTimeout."""

    @abstractmethod
    def disconnect(self, peer: int) -> None:
        """Forget a peer; its posts fail with FE_PEER_LOST from now on. Connecting again is legal."""

    @abstractmethod
    def import_mr(self, peer: int, rkey: int, base: int, length: int, deadline: float) -> RemoteKey:
        """Make a peer's region writable from here. `base` and `length` are those of its MrDesc."""

    @abstractmethod
    def release_mr(self, peer: int, key: RemoteKey) -> None:
        """Undo `import_mr`."""

    def is_gone(self, peer: int, key: RemoteKey) -> bool:
        """Whether the owner is known to have taken the region back, so that posts to it are refused anyway."""
        return False

    @abstractmethod
    def recover(self, peer: int, ctxs: np.ndarray, deadline: float) -> np.ndarray:
        """After C_NIC_DOWN or C_PEER_LOST: close the lane to `peer` so that nothing more can land through it, and say
        how many posts of each outstanding ctx (uint64 array) the target has counted (int64 array; -1:
        nobody can tell)."""

    def explain(self, vendor: int) -> str:
        """What the raw code of a failed post means and what an operator should look at; "" if that is not known."""
        return ""

    @abstractmethod
    def peers(self) -> list[dict[str, Any]]:
        """State of every peer for hang dumps and tests: index, addr, src, alive."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back. No call of the C table follows. Idempotent."""


class Fabric(ABC):
    """A kind of NIC: finds and opens domains."""

    name: str

    @classmethod
    @abstractmethod
    def available(cls) -> tuple[bool, str]:
        """Whether it can be used on this machine, and why or why not. Cheap, never raises."""

    @abstractmethod
    def open(self, spec: GroupSpec) -> list[Domain]:
        """Open the NICs of one device. Raises FabricUnavailable."""

    def close(self) -> None:  # noqa: B027 - optional
        """Stop whatever the fabric shares between groups."""
