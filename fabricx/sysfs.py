"""What the kernel tells of GPUs, RDMA NICs, NUMA nodes and the PCI tree, read from /sys and /proc.

Every file may be missing, unreadable or nonsense: the value is then unknown, and a note says which file it was.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

_BRIDGE = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_ROOT = re.compile(r"pci[0-9a-f]{4,}:[0-9a-f]{2}")
_NVIDIA = "0x10de"
_GPU_CLASSES = ("0x0300", "0x0302")  # VGA and 3D controllers; NVSwitches are bridges, 0x0680
_MOST_CORES = 1 << 16  # a core number above it is nonsense, not a machine
_KINDS = {"mlx5_core": "mlx5", "mlx4_core": "mlx4", "bnxt_en": "bnxt_re", "ice": "irdma"}  # PCI driver: RDMA driver


@dataclass(frozen=True, slots=True)
class Gpu:
    """One NVIDIA GPU.

    Attributes
    ----------
    pci : address, e.g. ``"0000:1b:00.0"``.
    path : host bridge, then every PCI bridge down to the GPU and the GPU itself; empty if unknown.
    numa : NUMA node, -1 unknown.
    index : the driver's number, as nvidia-smi shows it; -1 if the driver does not own the GPU or it is excluded.
    uuid, name : as the driver tells; empty if unknown.
    migs : UUIDs of its MIG devices.
    """

    pci: str
    path: tuple[str, ...] = ()
    numa: int = -1
    index: int = -1
    uuid: str = ""
    name: str = ""
    migs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Port:
    """One port of a NIC: `state` as in ``"ACTIVE"``, `link_layer` as in ``"InfiniBand"`` (empty: unknown), `rate` in
    Gb/s (0: unknown)."""

    number: int
    state: str
    link_layer: str
    rate: float


@dataclass(frozen=True, slots=True)
class Nic:
    """One RDMA device.

    Attributes
    ----------
    name : as in /sys/class/infiniband, e.g. ``"mlx5_0"``.
    driver : ``"mlx5"``, ``"efa"``, ``"rxe"`` or another driver's name; empty if unknown.
    vendor : PCI vendor, e.g. ``"0x15b3"``; empty for software.
    pci, path, numa : as of a Gpu. A software NIC has those of the network interface it runs on.
    software : no hardware of its own (rxe, siw).
    netdevs : its network interfaces.
    ports : in order.
    """

    name: str
    driver: str = ""
    vendor: str = ""
    pci: str = ""
    path: tuple[str, ...] = ()
    numa: int = -1
    software: bool = False
    netdevs: tuple[str, ...] = ()
    ports: tuple[Port, ...] = ()

    @property
    def best(self) -> Port:
        """The port that counts: up before down, then the fastest, then the first."""
        unknown = Port(1, "", "", 0.0)
        return min(self.ports, key=lambda p: (p.state not in ("ACTIVE", ""), -p.rate, p.number), default=unknown)

    @property
    def up(self) -> bool:
        """Whether a port is active. One whose state cannot be read is taken as up."""
        return self.best.state in ("ACTIVE", "")


@dataclass(frozen=True, slots=True)
class Node:
    """One NUMA node and its cores; none where it is memory only."""

    number: int
    cores: tuple[int, ...]


@dataclass(slots=True)
class Reader:
    """Files below `root`. What cannot be read is noted once and reads as empty."""

    root: Path
    notes: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def text(self, path: str | Path) -> str:
        """The stripped text of a file; empty if there is none or it cannot be read."""
        try:
            return (self.root / path).read_bytes().decode(errors="replace").strip("\0 \n\t")
        except (FileNotFoundError, NotADirectoryError):
            return ""
        except OSError as e:
            self.note(f"cannot read {self._shown(path)}: {e.strerror}")
            return ""

    def number(self, path: str | Path, default: int = -1) -> int:
        text = self.text(path)
        try:
            return int(text) if text else default
        except ValueError:
            self.note(f"{self._shown(path)} says {text[:40]!r}, which is no number")
            return default

    def cores(self, path: str | Path) -> tuple[int, ...]:
        """A list of cores such as ``0-3,8``."""
        text = self.text(path)
        try:
            return parse_cores(text)
        except ValueError:
            self.note(f"{self._shown(path)} says {text[:40]!r}, which is no list of cores")
            return ()

    def names(self, path: str | Path) -> list[str]:
        """Names in a directory, numbers in them in numeric order; none if it cannot be listed."""
        try:
            return sorted(os.listdir(self.root / path), key=natural)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as e:
            self.note(f"cannot list {self._shown(path)}: {e.strerror}")
            return []

    def real(self, path: str | Path) -> Path | None:
        """Where a link of sysfs leads, or None."""
        try:
            return (self.root / path).resolve(strict=True)
        except (OSError, RuntimeError):
            return None

    def _shown(self, path: str | Path) -> str:
        return "/" + str(path).removeprefix(str(self.root)).lstrip("/")


def natural(name: str) -> tuple[tuple[bool, int, str], ...]:
    """A sort key by which mlx5_2 comes before mlx5_10."""
    return tuple((not p.isdecimal(), int(p) if p.isdecimal() else 0, p) for p in re.split(r"(\d+)", name) if p)


def parse_cores(text: str) -> tuple[int, ...]:
    """Cores from the kernel's notation, ``"0-3,8"``. Raises ValueError."""
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        a, b = int(first), int(last or first)
        if not 0 <= a <= b < _MOST_CORES:
            raise ValueError(part)
        found.update(range(a, b + 1))
    return tuple(sorted(found))


def show_cores(cores: tuple[int, ...]) -> str:
    """The kernel's notation, ``"0-3,8"``, of cores."""
    runs: list[list[int]] = []
    for c in sorted(cores):
        if runs and runs[-1][1] == c - 1:
            runs[-1][1] = c
        else:
            runs.append([c, c])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def pci_address(text: str) -> str:
    """An address as sysfs writes it: NVML and the driver write ``00000000:1B:00.0`` for ``0000:1b:00.0``."""
    domain, colon, rest = text.strip().lower().partition(":")
    return f"{domain.lstrip('0').rjust(4, '0')}{colon}{rest}"


def read_nodes(r: Reader) -> tuple[Node, ...]:
    """NUMA nodes; where the kernel has none, one node 0 with all cores that are online."""
    base = "sys/devices/system/node"
    names = [n for n in r.names(base) if re.fullmatch(r"node\d+", n)]
    if not names:
        r.note("the kernel shows no NUMA nodes; all is taken as node 0")
        return (Node(0, r.cores("sys/devices/system/cpu/online")),)
    return tuple(Node(int(n[4:]), r.cores(f"{base}/{n}/cpulist")) for n in names)


def read_siblings(r: Reader, cores: tuple[int, ...]) -> dict[int, tuple[int, ...]]:
    """The hyperthreads of each core's physical core, itself included."""
    found = {}
    for c in cores:
        base = f"sys/devices/system/cpu/cpu{c}/topology"
        threads = r.cores(f"{base}/core_cpus_list") or r.cores(f"{base}/thread_siblings_list")
        found[c] = threads if c in threads else (c,)
    return found


def _place(r: Reader, device: str | Path) -> tuple[str, tuple[str, ...], int]:
    """PCI address, path and NUMA node of the device at a link; the address is empty where it is not on PCI."""
    real = r.real(device)
    if real is None:
        return "", (), -1
    parts = real.parts
    roots = [i for i, p in enumerate(parts) if _ROOT.fullmatch(p)]
    # The device may lie below its PCI function (virtio3 below 0000:00:03.0), so that the last bridge-like part counts.
    below = [i for i, p in enumerate(parts) if _BRIDGE.fullmatch(p)]
    if not below:
        return "", (), r.number(real / "numa_node")
    path = tuple(p for p in parts[roots[-1] :] if _ROOT.fullmatch(p) or _BRIDGE.fullmatch(p)) if roots else ()
    # Firmware often says the node only of a bridge above.
    for i in reversed(below):
        numa = r.number(Path(*parts[: i + 1]) / "numa_node")
        if numa >= 0:
            break
    return parts[below[-1]], path, numa


def read_gpus(r: Reader) -> list[Gpu]:
    """NVIDIA GPUs in PCI order, numbered as the driver does: those in /proc/driver/nvidia, else those bound to it."""
    found: dict[str, Gpu] = {}
    driven: list[str] = []
    for name in r.names("sys/bus/pci/devices"):
        base = f"sys/bus/pci/devices/{name}"
        if r.text(f"{base}/vendor") == _NVIDIA and r.text(f"{base}/class").startswith(_GPU_CLASSES):
            _, path, numa = _place(r, base)
            found[name] = Gpu(name, path, numa)
            driver = r.real(f"{base}/driver")
            if driver and driver.name == "nvidia":
                driven.append(name)
    owned: list[str] = []
    listed = r.names("proc/driver/nvidia/gpus")
    for name in listed:
        pci = pci_address(name)
        lines = r.text(f"proc/driver/nvidia/gpus/{name}/information").splitlines()
        info = {k.strip(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
        old = found.get(pci, Gpu(pci))
        found[pci] = Gpu(pci, old.path, old.numa, uuid=info.get("GPU UUID", ""), name=info.get("Model", ""))
        if info.get("GPU Excluded", "No") != "Yes":
            owned.append(pci)
    return number_gpus(found, sorted(owned if listed else driven))


def number_gpus(found: dict[str, Gpu], owned: list[str]) -> list[Gpu]:
    """The GPUs in PCI order; those of `owned` numbered in its order, the others -1."""
    index = {pci: i for i, pci in enumerate(owned)}
    return [Gpu(g.pci, g.path, g.numa, index.get(pci, -1), g.uuid, g.name, g.migs) for pci, g in sorted(found.items())]


def read_nics(r: Reader) -> list[Nic]:
    """RDMA devices in `nic_order`."""
    return sorted((_nic(r, name) for name in r.names("sys/class/infiniband")), key=nic_order)


def nic_order(n: Nic) -> tuple[object, ...]:
    """PCI order, NICs without an address last, software after all."""
    return n.software, not n.pci, n.pci, natural(n.name)


def _nic(r: Reader, name: str) -> Nic:
    base = f"sys/class/infiniband/{name}"
    ports = tuple(_port(r, f"{base}/ports/{n}", int(n)) for n in r.names(f"{base}/ports") if n.isdecimal())
    desc, parent = r.text(f"{base}/node_desc"), r.text(f"{base}/parent")
    real = r.real(base)
    # Some kernels link a software NIC to the device of its interface, so that having a device proves no hardware.
    if parent or desc == "rxe" or "Software iWARP" in desc or (real and "virtual" in real.parts):
        return _software(r, name, ports)
    pci, path, numa = _place(r, f"{base}/device")
    link = r.real(f"{base}/device/driver")
    driver = _KINDS.get(link.name, link.name) if link else re.sub(r"_?\d+$", "", name)
    vendor = r.text(f"{base}/device/vendor")
    return Nic(name, driver, vendor, pci, path, numa, False, tuple(r.names(f"{base}/device/net")), ports)


def _software(r: Reader, name: str, ports: tuple[Port, ...]) -> Nic:
    """A NIC without hardware of its own (rxe, siw): it is where its network interface is."""
    base = f"sys/class/infiniband/{name}"
    siw = "Software iWARP" in r.text(f"{base}/node_desc") or name.startswith("siw")
    driver = "siw" if siw else "rxe"
    netdev = r.text(f"{base}/parent") or r.text(f"{base}/ports/1/gid_attrs/ndevs/0")
    pci, path, numa = _place(r, f"sys/class/net/{netdev}/device" if netdev else f"{base}/device")
    return Nic(name, driver, "", pci, path, numa, True, (netdev,) if netdev else (), ports)


def _port(r: Reader, base: str, number: int) -> Port:
    state = r.text(f"{base}/state").partition(":")[2].strip()  # "4: ACTIVE"
    rate = re.match(r"\d+(\.\d+)?", r.text(f"{base}/rate"))  # "400 Gb/sec (4X NDR)"
    layer = r.text(f"{base}/link_layer")
    return Port(number, state, "" if layer == "Unknown" else layer, float(rate[0]) if rate else 0.0)
