"""Which NICs and which cores are near a GPU or a NUMA node, by a fixed rule that can say why.

The rule for NICs: only the NICs of one network are used, the one with the most bandwidth. Each GPU takes the NICs at
its nearest distance; GPUs that have the same NICs nearest divide them in PCI order, or share them evenly where there
are too few. GPUs that this process cannot see take part, so that processes with different CUDA_VISIBLE_DEVICES agree.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from pathlib import Path
from typing import Any

from . import sysfs
from .cuda_visible import Visible, add_nvml, visible
from .errors import OutOfRange
from .sysfs import Gpu, Nic, Node, show_cores


class Distance(IntEnum):
    """How far a NIC is, nearest first."""

    SWITCH = 1
    ROOT_PORT = 2
    HOST_BRIDGE = 3
    NUMA = 4
    SYSTEM = 5
    UNKNOWN = 6

    def __str__(self) -> str:
        return _WORDS[self]


_WORDS = {
    Distance.SWITCH: "same PCIe switch",
    Distance.ROOT_PORT: "same PCIe root port",
    Distance.HOST_BRIDGE: "same PCIe host bridge",
    Distance.NUMA: "same NUMA node",
    Distance.SYSTEM: "other NUMA node",
    Distance.UNKNOWN: "unknown distance",
}


@dataclass(frozen=True, slots=True)
class Choice:
    """A NIC chosen for a device: its name, how far it is, why it was chosen, and the other GPUs that share it."""

    nic: str
    distance: Distance
    reason: str
    shared_with: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DeviceRow:
    """One device: its PCI address (empty for a NUMA node), the NICs chosen, and cores for its worker, best first."""

    device: str
    pci: str
    name: str
    numa: int
    nics: tuple[Choice, ...]
    cores: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class NicRow:
    """One NIC. `used_by` names the GPUs it was given to; `aside` says why it is used by none, if it was set aside;
    `use` is either in words."""

    nic: str
    driver: str
    pci: str
    numa: int
    state: str
    link: str
    netdevs: tuple[str, ...]
    used_by: tuple[str, ...]
    aside: str
    use: str


@dataclass(frozen=True, slots=True)
class NodeRow:
    """One NUMA node and its cores as ``"0-3,8"``."""

    node: int
    cores: str


@dataclass(frozen=True, slots=True)
class Description:
    """All that `Topology` knows and would choose; `str()` of it is for people."""

    devices: tuple[DeviceRow, ...]
    nics: tuple[NicRow, ...]
    nodes: tuple[NodeRow, ...]
    network: str
    notes: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"NUMA node {n.node}: cores {n.cores or 'none'}" for n in self.nodes]
        for n in self.nics:
            where = n.pci or "no PCI address"
            lines.append(
                f"{n.nic} ({n.driver or 'unknown driver'}, {where}, node {n.numa}, {n.state}, {n.link}): {n.use}"
            )
        for d in self.devices:
            lines.append(f"{d.device}{f' ({d.name})' if d.name else ''}, node {d.numa}: cores {show_cores(d.cores)}")
            lines += [f"  {c.nic}: {c.reason}" for c in d.nics] or ["  no NIC"]
        return "\n".join([*lines, f"network: {self.network}", *(f"note: {n}" for n in self.notes)])


@dataclass(slots=True)
class Topology:
    """GPUs, NICs and NUMA nodes of one machine, as `read` found them.

    Attributes
    ----------
    gpus : all GPUs in PCI order, also those that CUDA_VISIBLE_DEVICES hides.
    nics : all RDMA devices in PCI order.
    nodes : NUMA nodes.
    siblings : for each core the hyperthreads of its physical core, itself included.
    cuda : the GPUs of this process; ``cuda[N]`` is ``"cuda:N"``. An entry's `gpu` is None if it cannot be told which.
    notes : what was unreadable or had to be assumed.
    network, aside : the network used in words, and for each NIC that is set aside the reason.
    shares : for the PCI address of each GPU, the NICs it is given.
    """

    gpus: tuple[Gpu, ...]
    nics: tuple[Nic, ...]
    nodes: tuple[Node, ...] = (Node(0, ()),)
    siblings: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    cuda: tuple[Visible, ...] = ()
    notes: tuple[str, ...] = ()
    network: str = field(init=False)
    aside: dict[str, str] = field(init=False)
    shares: dict[str, tuple[Nic, ...]] = field(init=False)
    _usable: tuple[Nic, ...] = field(init=False)
    _users: dict[str, list[Gpu]] = field(init=False)

    def __post_init__(self) -> None:
        self.gpus = tuple(sorted(self.gpus, key=lambda g: g.pci))
        self.nics = tuple(sorted(self.nics, key=sysfs.nic_order))
        self._usable, self.network, self.aside = _choose_network(self.nics)
        self.shares = _share(self.gpus, self._usable)
        self._users = {n.name: [g for g in self.gpus if n in self.shares[g.pci]] for n in self.nics}

    @classmethod
    def read(cls, root: str | Path = "/", nvml: Any = None, environ: Mapping[str, str] | None = None) -> Topology:
        """Read the topology of this machine. Never fails for want of a file or a library: see `notes`.

        Parameters
        ----------
        root : where /sys and /proc are; another root is for tests and for trees copied from other machines.
        nvml : the pynvml module or a stand-in; None: pynvml where it is installed and `root` is ``"/"``; False: none.
        environ : for CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER; os.environ if not given.
        """
        environ = os.environ if environ is None else environ
        r = sysfs.Reader(Path(root).resolve())
        nodes = sysfs.read_nodes(r)
        gpus = sysfs.read_gpus(r)
        if nvml is None and str(r.root) == "/":
            try:
                import pynvml as nvml
            except ImportError:
                nvml = None
        if nvml:
            gpus = add_nvml(nvml, gpus, r)
        nics = sysfs.read_nics(r)
        if len(nodes) == 1:  # then -1 can only mean this one
            gpus = [replace(g, numa=nodes[0].number) if g.numa < 0 else g for g in gpus]
            nics = [replace(n, numa=nodes[0].number) if n.numa < 0 else n for n in nics]
        cuda = visible(gpus, environ, r)
        siblings = sysfs.read_siblings(r, tuple(c for n in nodes for c in n.cores))
        return cls(tuple(gpus), tuple(nics), nodes, siblings, cuda, tuple(r.notes))

    def gpu(self, device: str) -> Gpu | None:
        """The GPU of ``"cuda:N"`` (``"cuda"`` is 0); None if it cannot be told which one it is. Raises OutOfRange."""
        n = _number(device, "cuda")
        if n >= len(self.cuda):
            seen = f"cuda:0 .. cuda:{len(self.cuda) - 1}" if self.cuda else "no GPU"
            hidden = len(self.gpus) - len({v.gpu.pci for v in self.cuda if v.gpu})
            raise OutOfRange(f"{device}: this process sees {seen}; {hidden} of {len(self.gpus)} GPUs are hidden")
        return self.cuda[n].gpu

    def node(self, device: str) -> int:
        """The NUMA node of ``"cpu:NODE"`` (``"cpu"`` is 0) or of ``"cuda:N"``; -1 unknown. Raises OutOfRange."""
        if device.partition(":")[0] == "cuda":
            gpu = self.gpu(device)
            return gpu.numa if gpu else -1
        n = _number(device, "cpu")
        if n not in (known := [x.number for x in self.nodes]):
            raise OutOfRange(f"{device}: there is no NUMA node {n}; there are {known}")
        return n

    def distance(self, device: str | Gpu, nic: str | Nic) -> Distance:
        """How far a NIC is from a device. Raises OutOfRange for one that is not there."""
        if isinstance(nic, str):
            found = next((n for n in self.nics if n.name == nic), None)
            if found is None:
                raise OutOfRange(f"there is no RDMA device {nic!r}; there are {[n.name for n in self.nics]}")
            nic = found
        return _distance(self._place(device) if isinstance(device, str) else device, nic)

    def _place(self, device: str) -> Gpu:
        """The GPU of a device, or for a NUMA node a stand-in that has no PCI path."""
        gpu = self.gpu(device) if device.partition(":")[0] == "cuda" else None
        return gpu or Gpu("", numa=self.node(device))

    def nearest_nics(self, device: str, count: int | None = None) -> list[Choice]:
        """The NICs for a device, best first.

        Parameters
        ----------
        device : ``"cuda:N"`` or ``"cpu:NODE"``.
        count : None for the device's own share, at least one NIC if there is any. A number takes that many, or all of
            the network if it has fewer: the own share, then those of others, nearest first, then what no GPU takes.

        Raises
        ------
        OutOfRange
            There is no such device, or `count` is below 1.
        """
        if count is not None and count < 1:
            raise OutOfRange(f"count is {count}; it must be at least 1")
        place = self._place(device)
        return self._choices(place, self._own(place), count)

    def _own(self, place: Gpu) -> tuple[Nic, ...]:
        """The share of a GPU; of a NUMA node, all that is nearest, without what GPUs leave alone if they use some."""
        if place.pci:
            return self.shares[place.pci]
        near = _nearest(place, self._usable)
        return tuple(n for n in near if self._users[n.name]) or near

    def _choices(self, place: Gpu, own: tuple[Nic, ...], count: int | None) -> list[Choice]:
        # A NIC that no GPU takes may be cabled to a storage network, so that it comes after those that some GPU takes.
        others = [n for n in self._usable if n not in own]
        others.sort(key=lambda n: (not self._users[n.name], _distance(place, n), len(self._users[n.name])))
        chosen = own if count is None else [*own, *others][:count]
        return [self._choice(place, n, n in own) for n in chosen]

    def _choice(self, place: Gpu, nic: Nic, own: bool) -> Choice:
        d = _distance(place, nic)
        users = [self.label(g) for g in self._users[nic.name] if g.pci != place.pci]
        where = f"{d} (NIC on {nic.numa}, device on {place.numa})" if d == Distance.SYSTEM else str(d)
        if not own:
            extra = f"; it is for {', '.join(users)}" if users else "; nearest to no GPU"
            return Choice(nic.name, d, f"{where}, beyond the device's own share{extra}", tuple(users))
        near = _nearest(place, self._usable)
        rank = "" if d == (Distance.SWITCH if place.pci else Distance.NUMA) else ", none is nearer"
        if not place.pci:
            return Choice(nic.name, d, f"{where}{rank}", tuple(users))
        peers = [g for g in self.gpus if _nearest(g, self._usable) == near]
        part = (
            f"; {_many(len(near), 'NIC')} there for {_many(len(peers), 'GPU')}"
            if len(peers) > 1 or len(near) > 1
            else ""
        )
        sharing = f"; shared with {', '.join(users)}" if users else ""
        return Choice(nic.name, d, f"{where}{rank}{part}{sharing}", tuple(users))

    def label(self, gpu: Gpu) -> str:
        """``"cuda:N"``, or for a GPU that this process does not see its address."""
        n = next((i for i, v in enumerate(self.cuda) if v.gpu and v.gpu.pci == gpu.pci), None)
        return f"GPU {gpu.pci}" if n is None else f"cuda:{n}"

    def cores(self, device: str, allowed: Collection[int] | None = None) -> tuple[int, ...]:
        """Cores to pin a worker of the device to, best first.

        Those of its NUMA node that this process may use, or all it may use if the node is unknown or has none of them.
        From the top down, one of each physical core first; core 0, where the system's own work gathers, last. GPUs of
        one node start at different cores, and so do their processes.

        Parameters
        ----------
        device : ``"cuda:N"`` or ``"cpu:NODE"``.
        allowed : cores that may be used; those of sched_getaffinity if not given.

        Raises
        ------
        OutOfRange
            There is no such device, or `allowed` is empty.
        """
        place = self._place(device)
        return self._cores(place, os.sched_getaffinity(0) if allowed is None else allowed)

    def _cores(self, place: Gpu, allowed: Collection[int]) -> tuple[int, ...]:
        if not allowed:
            raise OutOfRange("no core is allowed")
        near = {c for n in self.nodes if n.number == place.numa for c in n.cores}
        mine = sorted(near & set(allowed) or set(allowed), reverse=True)
        threads = {c: set(self.siblings.get(c, (c,))).intersection(mine) for c in mine}
        busy = {c for c in mine if 0 in self.siblings.get(c, (c,))}  # core 0 and its hyperthreads
        lead = {c for c in mine if c == min(threads[c], default=c)}  # the lowest thread stands for a physical core
        first = [c for c in mine if c in lead - busy]
        there = [g.pci for g in self.gpus if g.numa == place.numa]
        turn = there.index(place.pci) if place.pci in there else len(there)
        first = first[turn % len(first) :] + first[: turn % len(first)] if first else []
        return (*first, *(c for c in mine if c not in lead | busy), *(c for c in mine if c in busy))

    def describe(self, allowed: Collection[int] | None = None) -> Description:
        """Everything found and chosen, as rows. `allowed` is as in `cores`."""
        allowed = os.sched_getaffinity(0) if allowed is None else allowed
        places: list[tuple[str, Gpu]] = []
        for i, v in enumerate(self.cuda):
            places.append((f"cuda:{i}", v.gpu or Gpu("", name=v.text)))
        seen = {g.pci for _, g in places}
        places += [(f"GPU {g.pci} (hidden)", g) for g in self.gpus if g.pci not in seen]
        places += [(f"cpu:{n.number}", Gpu("", numa=n.number)) for n in self.nodes]
        devices = tuple(
            DeviceRow(d, g.pci, g.name, g.numa, tuple(self._choices(g, self._own(g), None)), self._cores(g, allowed))
            for d, g in places
        )
        nodes = tuple(NodeRow(n.number, show_cores(n.cores)) for n in self.nodes)
        return Description(devices, tuple(map(self._nic_row, self.nics)), nodes, self.network, self.notes)

    def _nic_row(self, n: Nic) -> NicRow:
        state = n.best.state.lower() or "state unknown"
        used = tuple(self.label(g) for g in self._users[n.name])
        aside = self.aside.get(n.name, "")
        idle = "nearest to no GPU" if self.gpus else "there is no GPU"
        use = aside or (f"for {', '.join(used)}" if used else idle)
        return NicRow(n.name, n.driver, n.pci, n.numa, state, _link(n), n.netdevs, used, aside, use)

    def __str__(self) -> str:
        return str(self.describe())


def _number(device: str, kind: str) -> int:
    """N of ``"kind:N"``; 0 for ``"kind"`` alone."""
    name, colon, n = device.partition(":")
    if name != kind or (colon and not (n.isascii() and n.isdecimal())):
        raise OutOfRange(f'{device!r} is no device; want "cuda:N" or "cpu:NODE"')
    return int(n) if n else 0


def _many(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"


def _link(n: Nic) -> str:
    layer = n.best.link_layer or "unknown link"
    return f"{layer} {n.best.rate:g} Gb/s" if n.best.rate else f"{layer}, unknown rate"


def _distance(a: Gpu, b: Nic) -> Distance:
    apart = a.numa >= 0 and b.numa >= 0 and a.numa != b.numa
    shared = os.path.commonprefix([a.path[:-1], b.path[:-1]])  # host bridge, root port, and so on down
    # Virtual machines put everything under one host bridge; the node then knows better.
    if shared and not apart:
        below = max(len(a.path), len(b.path)) - 1 - len(shared)
        if len(shared) == 1:
            return Distance.HOST_BRIDGE
        return Distance.SWITCH if below <= 1 else Distance.ROOT_PORT  # one below: the switch's downstream port
    if a.numa < 0 or b.numa < 0:
        return Distance.UNKNOWN
    return Distance.SYSTEM if apart else Distance.NUMA


def _nearest(place: Gpu, nics: Iterable[Nic]) -> tuple[Nic, ...]:
    """All NICs at the least distance."""
    far = [(_distance(place, n), n) for n in nics]
    least = min((d for d, _ in far), default=None)
    return tuple(n for d, n in far if d == least)


def _choose_network(nics: tuple[Nic, ...]) -> tuple[tuple[Nic, ...], str, dict[str, str]]:
    """The NICs to use, the network's name, and why each of the others is set aside.

    Hardware that is up before software that is up before what is down; of those the NICs of one driver, link layer and
    rate, namely the ones with the most bandwidth in all, then the most NICs, then InfiniBand. Storage and management
    NICs are fewer or slower, and one transfer cannot be spread over networks that do not reach the same peers.
    """
    if not nics:
        return (), "no RDMA device", {}
    classes = {n.name: (not n.up, n.software) for n in nics}
    best = min(classes.values())
    groups: dict[tuple[str, str, float], list[Nic]] = {}
    for n in nics:
        if classes[n.name] == best:
            groups.setdefault((n.driver, n.best.link_layer, n.best.rate), []).append(n)
    key = min(groups, key=lambda k: (-k[2] * len(groups[k]), -len(groups[k]), k[1] != "InfiniBand", k))
    used = tuple(groups[key])
    network = f"{key[0] or 'unknown driver'}, {_link(used[0])}, {len(used)} of {_many(len(nics), 'NIC')}"
    if best[0]:
        network += "; none is up"
    aside = {}
    for n in nics:
        if n.up != (not best[0]):
            aside[n.name] = f"its port is {n.best.state.lower()}"
        elif n.software != best[1]:
            aside[n.name] = "software, and there is hardware"
        elif n not in used:
            aside[n.name] = f"another network: {n.driver or 'unknown driver'}, {_link(n)}"
    return used, network, aside


def _share(gpus: tuple[Gpu, ...], nics: tuple[Nic, ...]) -> dict[str, tuple[Nic, ...]]:
    """The NICs of each GPU. GPUs with the same nearest NICs are a cell; the nearest cell goes first, and of those the
    one with the least choice."""
    if not nics:
        return {g.pci: () for g in gpus}
    cells: dict[tuple[Nic, ...], list[Gpu]] = {}
    for g in gpus:
        cells.setdefault(_nearest(g, nics), []).append(g)
    users: Counter[str] = Counter()
    shares: dict[str, tuple[Nic, ...]] = {}

    def order(near: tuple[Nic, ...]) -> tuple[int, int, str]:
        return min(_distance(g, near[0]) for g in cells[near]), len(near), cells[near][0].pci

    for near in sorted(cells, key=order):
        cell = cells[near]
        free = [n for n in near if not users[n.name]]
        for i, g in enumerate(cell):
            if len(free) >= len(cell):
                each, more = divmod(len(free), len(cell))
                start = i * each + min(i, more)
                shares[g.pci] = tuple(free[start : start + each + (i < more)])
            else:
                shares[g.pci] = (min(near, key=lambda n: users[n.name]),)
            users.update(n.name for n in shares[g.pci])
    return shares
