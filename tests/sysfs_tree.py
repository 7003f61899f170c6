"""Made-up /sys and /proc trees with the links of real ones, and the trees of some well-known machines.

A device is named by its chain, host bridge first: ``"pci0000:15/0000:15:01.0/0000:16:00.0/0000:18:00.0"``.
"""

from __future__ import annotations

import os
from pathlib import Path

from fabricx.sysfs import parse_cores
from fabricx.topology import Topology

PORT = {"state": "ACTIVE", "layer": "InfiniBand", "rate": "400 Gb/sec (4X NDR)"}
_STATES = {"DOWN": 1, "INIT": 2, "ACTIVE": 4}


class Tree:
    """Builds a tree below `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.gpus = 0

    def write(self, path: str | Path, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")

    def link(self, path: str | Path, target: str | Path) -> None:
        """A relative link, as the kernel makes them."""
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.symlink_to(os.path.relpath(self.root / target, file.parent))

    def node(self, number: int, cores: str) -> Tree:
        self.write(f"sys/devices/system/node/node{number}/cpulist", cores)
        return self

    def threads(self, *groups: str) -> Tree:
        """Hyperthreads of one physical core each: ``"0,112"``."""
        for group in groups:
            for c in parse_cores(group):
                self.write(f"sys/devices/system/cpu/cpu{c}/topology/thread_siblings_list", group)
        return self

    def device(self, chain: str, vendor: str, cls: str, numa: int, driver: str = "") -> Path:
        """A PCI device and the bridges above it."""
        parts = chain.split("/")
        for i, part in enumerate(parts[1:], 1):
            path = Path("sys/devices", *parts[: i + 1])
            if (self.root / path).exists():
                continue
            last = i == len(parts) - 1
            self.write(path / "vendor", vendor if last else "0x1000")
            self.write(path / "class", cls if last else "0x060400")
            self.write(path / "numa_node", str(numa))
            self.link(f"sys/bus/pci/devices/{part}", path)
        if driver:
            (self.root / f"sys/bus/pci/drivers/{driver}").mkdir(parents=True, exist_ok=True)
            self.link(path / "driver", f"sys/bus/pci/drivers/{driver}")
        return path

    def gpu(
        self, chain: str, numa: int, name: str = "NVIDIA H100 80GB HBM3", cls: str = "0x030200", proc: bool = True
    ) -> Tree:
        """A GPU of the nvidia driver; its UUID is GPU-<n>0000000-... by order of building."""
        self.device(chain, "0x10de", cls, numa, "nvidia")
        if proc:
            uuid, pci = gpu_uuid(self.gpus), chain.rpartition("/")[2]
            info = (
                f"Model: \t\t {name}\nIRQ:   \t\t 10\nGPU UUID: \t {uuid}\nBus Location: \t {pci}\nGPU Excluded:\t No"
            )
            self.write(f"proc/driver/nvidia/gpus/{pci}/information", info)
        self.gpus += 1
        return self

    def nic(self, name: str, chain: str, numa: int, driver: str = "mlx5_core", netdev: str = "", **port: str) -> Tree:
        """An RDMA NIC with one port; `port` may give state, layer and rate."""
        vendor, cls = ("0x1d0f", "0x020000") if driver == "efa" else ("0x15b3", "0x020700")
        path = self.device(chain, vendor, cls, numa, driver)
        self._rdma(name, path / "infiniband" / name, PORT | port)
        self.link(path / "infiniband" / name / "device", path)
        if netdev:
            self.netdev(netdev, path)
        return self

    def netdev(self, name: str, device: Path) -> Tree:
        """A network interface of a device."""
        path = device / "net" / name
        self.write(path / "operstate", "up")
        self.link(path / "device", device)
        self.link(f"sys/class/net/{name}", path)
        return self

    def rxe(self, name: str, netdev: str, old: bool = False) -> Tree:
        """A Soft-RoCE device on a network interface; old kernels link it to the interface's device."""
        path = Path("sys/devices/virtual/infiniband", name)
        self._rdma(name, path, PORT | {"layer": "Ethernet", "rate": "2.5 Gb/sec (1X SDR)"})
        self.write(path / "parent", netdev)
        self.write(path / "node_desc", "rxe")
        if old:
            device = (self.root / f"sys/class/net/{netdev}/device").resolve().relative_to(self.root.resolve())
            self.link(path / "device", device)
        return self

    def _rdma(self, name: str, path: Path, port: dict[str, str]) -> None:
        self.write(path / "ports/1/state", f"{_STATES[port['state']]}: {port['state']}")
        self.write(path / "ports/1/rate", port["rate"])
        self.write(path / "ports/1/link_layer", port["layer"])
        self.link(f"sys/class/infiniband/{name}", path)


def read(tree: Tree, visible: str | None = None, **kw: object) -> Topology:
    """The topology of a tree, for a process with these CUDA_VISIBLE_DEVICES."""
    environ = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"} | ({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    return Topology.read(tree.root, environ=environ, **kw)


def gpu_uuid(n: int) -> str:
    """The UUID of the n-th GPU built."""
    return f"GPU-{n}0000000-1111-2222-3333-444444444444"


#: GPU bus, NIC bus, NIC and its interface, by GPU: "Network Modules" in NVIDIA's DGX H100 user guide. The interface
#: names tell the bus of each NIC (ibp24s0: 0x18); GPUs 0 .. 3 are on socket 0.
DGX_H100 = [
    ("1b", "18", "mlx5_0", "ibp24s0"),
    ("43", "40", "mlx5_3", "ibp64s0"),
    ("52", "4f", "mlx5_4", "ibp79s0"),
    ("61", "5e", "mlx5_5", "ibp94s0"),
    ("9d", "9a", "mlx5_6", "ibp154s0"),
    ("c3", "c0", "mlx5_9", "ibp192s0"),
    ("d1", "ce", "mlx5_10", "ibp206s0"),
    ("df", "dc", "mlx5_11", "ibp220s0"),
]


def _pair(gpu: str, nic: str) -> tuple[str, str]:
    """Chains of a GPU and a NIC under one root port with several bridges between them (nvidia-smi shows PXB)."""
    n = int(nic, 16)
    up = f"pci0000:{n - 3:02x}/0000:{n - 3:02x}:01.0/0000:{n - 2:02x}:00.0"
    return (
        f"{up}/0000:{n - 1:02x}:02.0/0000:{n + 1:02x}:00.0/0000:{n + 2:02x}:00.0/0000:{gpu}:00.0",
        f"{up}/0000:{n - 1:02x}:00.0/0000:{nic}:00.0",
    )


def dgx_h100(root: Path, down: tuple[str, ...] = ()) -> Tree:
    """A DGX H100: a ConnectX-7 under the root port of each GPU, two two-port cards for storage, four NVSwitches, and a
    BMC's display. Bridge numbers are made up; the addresses of GPUs and NICs are those of the real machine."""
    t = Tree(root).node(0, "0-55,112-167").node(1, "56-111,168-223")
    t.threads(*(f"{c},{c + 112}" for c in range(112)))
    for i, (gpu, nic, name, netdev) in enumerate(DGX_H100):
        g, n = _pair(gpu, nic)
        t.gpu(g, i // 4)
        t.nic(name, n, i // 4, netdev=netdev, state="DOWN" if name in down else "ACTIVE")
    for bus, first, numa in (("29", 1, 0), ("aa", 7, 1)):
        card = f"pci0000:{int(bus, 16) - 1:02x}/0000:{int(bus, 16) - 1:02x}:01.0/0000:{bus}:00"
        ether = {"layer": "Ethernet", "rate": "200 Gb/sec (4X HDR)"}
        t.nic(f"mlx5_{first}", f"{card}.0", numa, netdev=f"ibp{int(bus, 16)}s0f0")
        t.nic(f"mlx5_{first + 1}", f"{card}.1", numa, netdev=f"enp{int(bus, 16)}s0f1np1", **ether)
    for i in range(4):
        t.device(f"pci0000:03/0000:03:01.0/0000:04:00.0/0000:05:0{i}.0/0000:0{6 + i}:00.0", "0x10de", "0x068000", 0)
    t.device("pci0000:00/0000:00:1c.5/0000:02:00.0", "0x1a03", "0x030000", 0)
    return t


def p5(root: Path) -> Tree:
    """An AWS p5.48xlarge: eight switches (upstream ports at 45, 56, 67, ... as in aws-ofi-nccl's topology file), each
    with four EFA NICs and then the GPU."""
    t = Tree(root).node(0, "0-47,96-143").node(1, "48-95,144-191")
    t.threads(*(f"{c},{c + 96}" for c in range(96)))
    for i in range(8):
        up = 0x45 + 0x11 * i
        chain = f"pci0000:{up - 1:02x}/0000:{up - 1:02x}:01.0/0000:{up:02x}:00.0/0000:{up + 1:02x}:"
        for j in range(4):
            bus = up + 10 + j
            t.nic(
                f"rdmap{bus}s0",
                f"{chain}0{j}.0/0000:{bus:02x}:00.0",
                i // 4,
                "efa",
                layer="Unknown",
                rate="100 Gb/sec (4X EDR)",
            )
        t.gpu(f"{chain}04.0/0000:{up + 14:02x}:00.0", i // 4)
    return t


def p5en(root: Path) -> Tree:
    """An AWS p5en.48xlarge: four switches, each with four EFA NICs (85 .. 88, 110 .. 113, 135 .. 138, 160 .. 163, as
    libfabric lists them) and two GPUs. The addresses of the GPUs and bridges are made up."""
    t = Tree(root).node(0, "0-47,96-143").node(1, "48-95,144-191")
    t.threads(*(f"{c},{c + 96}" for c in range(96)))
    for i, first in enumerate((85, 110, 135, 160)):
        up = first - 10
        chain = f"pci0000:{up - 1:02x}/0000:{up - 1:02x}:01.0/0000:{up:02x}:00.0/0000:{up + 1:02x}:"
        for j in range(4):
            bus = first + j
            t.nic(
                f"rdmap{bus}s0",
                f"{chain}0{j}.0/0000:{bus:02x}:00.0",
                i // 2,
                "efa",
                layer="Unknown",
                rate="200 Gb/sec (4X HDR)",
            )
        for j in range(2):
            t.gpu(f"{chain}0{4 + j}.0/0000:{first + 4 + j:02x}:00.0", i // 2, "NVIDIA H200")
    return t


def two_sockets(root: Path) -> Tree:
    """Four GPUs in slots of their own, two a socket, and one NIC on socket 0 beside the first."""
    t = Tree(root).node(0, "0-15,32-47").node(1, "16-31,48-63").threads(*(f"{c},{c + 32}" for c in range(32)))
    t.gpu("pci0000:16/0000:16:02.0/0000:17:00.0", 0, "NVIDIA A100-PCIE-40GB")
    t.nic(
        "mlx5_0",
        "pci0000:16/0000:16:04.0/0000:18:00.0",
        0,
        netdev="enp24s0np0",
        layer="Ethernet",
        rate="100 Gb/sec (4X EDR)",
    )
    t.gpu("pci0000:64/0000:64:02.0/0000:65:00.0", 0, "NVIDIA A100-PCIE-40GB")
    t.gpu("pci0000:b2/0000:b2:02.0/0000:b3:00.0", 1, "NVIDIA A100-PCIE-40GB")
    t.gpu("pci0000:e2/0000:e2:02.0/0000:e3:00.0", 1, "NVIDIA A100-PCIE-40GB")
    return t


def laptop(root: Path) -> Tree:
    """Eight cores of two threads, numbered side by side, an integrated display, an NVIDIA GPU and a wired interface."""
    t = Tree(root).node(0, "0-15").threads(*(f"{c}-{c + 1}" for c in range(0, 16, 2)))
    t.device("pci0000:00/0000:00:02.0", "0x8086", "0x030000", -1, "i915")
    t.gpu("pci0000:00/0000:00:01.0/0000:01:00.0", -1, "NVIDIA GeForce RTX 4070 Laptop GPU", cls="0x030000")
    t.netdev("enp0s31f6", t.device("pci0000:00/0000:00:1f.6", "0x8086", "0x020000", -1, "e1000e"))
    return t
