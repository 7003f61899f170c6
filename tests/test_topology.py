"""Which NICs and cores a device gets, on made-up trees of machines whose layout is public."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import sysfs_tree as trees
from sysfs_tree import DGX_H100, Tree, gpu_uuid, read

from fabricx import Config, OutOfRange, engine
from fabricx.cli import topology_tables as cli
from fabricx.sysfs import Gpu
from fabricx.topology import Distance, Topology

ROOT = Path(__file__).resolve().parents[1]
EVERYTHING = range(1024)


def chosen(t: Topology, device: str, count: int | None = None) -> list[str]:
    return [c.nic for c in t.nearest_nics(device, count)]


# ---------------------------------------------------------------------- machines


def test_on_a_dgx_h100_each_gpu_has_the_nic_of_its_network_module(tmp_path: Path) -> None:
    t = read(trees.dgx_h100(tmp_path))
    assert {f"cuda:{i}": chosen(t, f"cuda:{i}") for i in range(8)} == {
        "cuda:0": ["mlx5_0"],
        "cuda:1": ["mlx5_3"],
        "cuda:2": ["mlx5_4"],
        "cuda:3": ["mlx5_5"],
        "cuda:4": ["mlx5_6"],
        "cuda:5": ["mlx5_9"],
        "cuda:6": ["mlx5_10"],
        "cuda:7": ["mlx5_11"],
    }
    assert t.nearest_nics("cuda:3")[0].distance == Distance.ROOT_PORT
    assert t.notes == ()


def test_the_storage_nics_of_a_dgx_h100_are_for_no_gpu_and_the_reason_is_told(tmp_path: Path) -> None:
    t = read(trees.dgx_h100(tmp_path))
    rows = {n.nic: n for n in t.describe(EVERYTHING).nics}
    assert rows["mlx5_2"].aside == rows["mlx5_8"].aside == "another network: mlx5, Ethernet 200 Gb/s"
    assert not rows["mlx5_1"].used_by and not rows["mlx5_7"].used_by
    assert t.network == "mlx5, InfiniBand 400 Gb/s, 10 of 12 NICs"
    assert rows["mlx5_1"].use == "nearest to no GPU" and rows["mlx5_2"].use == rows["mlx5_2"].aside
    assert (
        rows["mlx5_10"].use == "for cuda:6"
        and rows["mlx5_10"].netdevs == ("ibp206s0",)
        and rows["mlx5_10"].used_by == ("cuda:6",)
    )
    assert chosen(t, "cpu:0") == ["mlx5_0", "mlx5_3", "mlx5_4", "mlx5_5"]
    assert chosen(t, "cpu:1") == ["mlx5_6", "mlx5_9", "mlx5_10", "mlx5_11"]


def test_more_nics_than_the_share_are_those_of_other_gpus_nearest_first_and_storage_last(tmp_path: Path) -> None:
    t = read(trees.dgx_h100(tmp_path))
    assert chosen(t, "cuda:5", 1) == ["mlx5_9"]
    order = ["mlx5_9", "mlx5_6", "mlx5_10", "mlx5_11", "mlx5_0", "mlx5_3", "mlx5_4", "mlx5_5", "mlx5_7", "mlx5_1"]
    assert chosen(t, "cuda:5", 99) == order
    far = t.nearest_nics("cuda:5", 5)[4]
    assert far.distance == Distance.SYSTEM and far.shared_with == ("cuda:0",)
    assert far.reason == "other NUMA node (NIC on 0, device on 1), beyond the device's own share; it is for cuda:0"
    with pytest.raises(OutOfRange, match="count is 0"):
        t.nearest_nics("cuda:5", 0)


def test_a_gpu_whose_nic_is_down_takes_a_free_one_of_its_node(tmp_path: Path) -> None:
    t = read(trees.dgx_h100(tmp_path, down=("mlx5_4",)))
    assert chosen(t, "cuda:2") == ["mlx5_1"] and chosen(t, "cuda:1") == ["mlx5_3"]
    assert t.aside["mlx5_4"] == "its port is down"


def test_on_a_p5_each_gpu_has_the_four_nics_of_its_switch(tmp_path: Path) -> None:
    t = read(trees.p5(tmp_path))
    assert [chosen(t, f"cuda:{i}") for i in range(8)] == [
        ["rdmap79s0", "rdmap80s0", "rdmap81s0", "rdmap82s0"],
        ["rdmap96s0", "rdmap97s0", "rdmap98s0", "rdmap99s0"],
        ["rdmap113s0", "rdmap114s0", "rdmap115s0", "rdmap116s0"],
        ["rdmap130s0", "rdmap131s0", "rdmap132s0", "rdmap133s0"],
        ["rdmap147s0", "rdmap148s0", "rdmap149s0", "rdmap150s0"],
        ["rdmap164s0", "rdmap165s0", "rdmap166s0", "rdmap167s0"],
        ["rdmap181s0", "rdmap182s0", "rdmap183s0", "rdmap184s0"],
        ["rdmap198s0", "rdmap199s0", "rdmap200s0", "rdmap201s0"],
    ]
    first = t.nearest_nics("cuda:0")[0]
    assert (first.distance, first.reason) == (Distance.SWITCH, "same PCIe switch; 4 NICs there for 1 GPU")
    assert t.network == "efa, unknown link 100 Gb/s, 32 of 32 NICs"
    assert [g.pci for g in t.gpus] == [f"0000:{b}:00.0" for b in ("53", "64", "75", "86", "97", "a8", "b9", "ca")]


def test_on_a_p5en_two_gpus_of_a_switch_divide_its_four_nics(tmp_path: Path) -> None:
    t = read(trees.p5en(tmp_path))
    assert [chosen(t, f"cuda:{i}") for i in range(8)] == [
        ["rdmap85s0", "rdmap86s0"],
        ["rdmap87s0", "rdmap88s0"],
        ["rdmap110s0", "rdmap111s0"],
        ["rdmap112s0", "rdmap113s0"],
        ["rdmap135s0", "rdmap136s0"],
        ["rdmap137s0", "rdmap138s0"],
        ["rdmap160s0", "rdmap161s0"],
        ["rdmap162s0", "rdmap163s0"],
    ]
    assert t.nearest_nics("cuda:7")[0].reason == "same PCIe switch; 4 NICs there for 2 GPUs"
    assert chosen(t, "cuda:1", 4) == ["rdmap87s0", "rdmap88s0", "rdmap85s0", "rdmap86s0"]


def test_four_gpus_share_the_one_nic_of_a_two_socket_box(tmp_path: Path) -> None:
    t = read(trees.two_sockets(tmp_path))
    assert [chosen(t, f"cuda:{i}") for i in range(4)] == [["mlx5_0"]] * 4
    assert [t.distance(f"cuda:{i}", "mlx5_0") for i in range(4)] == [
        Distance.HOST_BRIDGE,
        Distance.NUMA,
        Distance.SYSTEM,
        Distance.SYSTEM,
    ]
    c = t.nearest_nics("cuda:2")[0]
    assert c.shared_with == ("cuda:0", "cuda:1", "cuda:3")
    assert c.reason == (
        "other NUMA node (NIC on 0, device on 1), none is nearer; "
        "1 NIC there for 4 GPUs; shared with cuda:0, cuda:1, cuda:3"
    )
    assert chosen(t, "cpu:1") == ["mlx5_0"]


def test_a_laptop_has_a_gpu_and_no_nic(tmp_path: Path) -> None:
    t = read(trees.laptop(tmp_path))
    assert chosen(t, "cuda:0") == chosen(t, "cpu:0") == chosen(t, "cpu", 3) == []
    assert t.network == "no RDMA device" and t.node("cuda:0") == 0
    assert "cuda:0 (NVIDIA GeForce RTX 4070 Laptop GPU), node 0" in str(t) and "  no NIC" in str(t)
    assert t.cores("cuda:0", range(16)) == (14, 12, 10, 8, 6, 4, 2, 15, 13, 11, 9, 7, 5, 3, 1, 0)


@pytest.mark.parametrize("old", [False, True])
def test_soft_roce_is_where_its_interface_is_and_serves_where_there_is_nothing_else(tmp_path: Path, old: bool) -> None:
    t = read(trees.laptop(tmp_path).rxe("rxe0", "enp0s31f6", old))
    (nic,) = t.nics
    assert (nic.driver, nic.software, nic.pci, nic.numa) == ("rxe", True, "0000:00:1f.6", 0)
    assert t.nearest_nics("cuda:0")[0].distance == Distance.HOST_BRIDGE
    assert chosen(t, "cpu:0") == ["rxe0"]


def test_soft_roce_is_set_aside_where_there_is_hardware(tmp_path: Path) -> None:
    t = read(trees.two_sockets(tmp_path).rxe("rxe0", "enp24s0np0"))
    assert chosen(t, "cuda:0", 9) == ["mlx5_0"]
    assert t.aside == {"rxe0": "software, and there is hardware"}


# ---------------------------------------------------------------------- rules


def flat(root: Path, gpus: int, nics: dict[str, dict[str, str]]) -> Tree:
    """GPUs and NICs in slots of one host bridge."""
    t = Tree(root).node(0, "0-7")
    for i in range(gpus):
        t.gpu(f"pci0000:00/0000:00:{i + 1:02x}.0/0000:{i + 1:02x}:00.0", 0)
    for i, (name, port) in enumerate(nics.items(), 0x40):
        t.nic(name, f"pci0000:00/0000:00:{i - 0x40 + 16:02x}.0/0000:{i:02x}:00.0", 0, **port)
    return t


def test_more_gpus_than_nics_share_them_evenly(tmp_path: Path) -> None:
    t = read(flat(tmp_path, 8, {"mlx5_0": {}, "mlx5_1": {}, "mlx5_2": {}}))
    assert [chosen(t, f"cuda:{i}") for i in range(8)] == [[f"mlx5_{i % 3}"] for i in range(8)]
    assert t.nearest_nics("cuda:2")[0].shared_with == ("cuda:5",)
    assert "3 NICs there for 8 GPUs" in t.nearest_nics("cuda:2")[0].reason


def test_nics_that_do_not_divide_evenly_go_to_the_first_gpus(tmp_path: Path) -> None:
    t = read(flat(tmp_path, 3, {f"mlx5_{i}": {} for i in range(7)}))
    assert [len(chosen(t, f"cuda:{i}")) for i in range(3)] == [3, 2, 2]


def test_a_slow_ethernet_nic_among_the_others_is_set_aside(tmp_path: Path) -> None:
    ether = {"layer": "Ethernet", "rate": "25 Gb/sec (1X EDR)"}
    t = read(flat(tmp_path, 4, {"mlx5_0": ether, **{f"mlx5_{i}": {} for i in range(1, 5)}}))
    assert [chosen(t, f"cuda:{i}") for i in range(4)] == [[f"mlx5_{i}"] for i in range(1, 5)]
    assert t.aside == {"mlx5_0": "another network: mlx5, Ethernet 25 Gb/s"}


def test_one_fast_nic_does_not_outweigh_many(tmp_path: Path) -> None:
    t = read(flat(tmp_path, 1, {"mlx5_0": {}, **{f"mlx5_{i}": {"rate": "200 Gb/sec (4X HDR)"} for i in range(1, 5)}}))
    assert chosen(t, "cuda:0") == ["mlx5_1", "mlx5_2", "mlx5_3", "mlx5_4"]


def test_the_port_that_is_up_speaks_for_a_nic_of_two_ports(tmp_path: Path) -> None:
    tree = flat(
        tmp_path, 1, {"mlx5_0": {"state": "DOWN"}, "mlx5_1": {"rate": "100 Gb/sec (4X EDR)", "layer": "Ethernet"}}
    )
    port = "sys/class/infiniband/mlx5_0/ports/2"
    tree.write(f"{port}/state", "4: ACTIVE")
    tree.write(f"{port}/rate", "200 Gb/sec (4X HDR)")
    tree.write(f"{port}/link_layer", "InfiniBand")
    t = read(tree)
    assert chosen(t, "cuda:0") == ["mlx5_0"] and t.network == "mlx5, InfiniBand 200 Gb/s, 1 of 2 NICs"
    assert [p.number for p in t.nics[0].ports] == [1, 2] and t.nics[0].best.number == 2


def test_where_no_port_is_up_the_nics_are_given_all_the_same_and_it_is_said(tmp_path: Path) -> None:
    t = read(flat(tmp_path, 1, {"mlx5_0": {"state": "DOWN"}}))
    assert chosen(t, "cuda:0") == ["mlx5_0"] and t.network.endswith("none is up")
    assert t.describe(EVERYTHING).nics[0].state == "down"


def test_without_gpus_a_numa_node_has_all_the_nics(tmp_path: Path) -> None:
    t = read(flat(tmp_path, 0, {"mlx5_0": {}, "mlx5_1": {}}))
    assert chosen(t, "cpu:0") == ["mlx5_0", "mlx5_1"]
    assert {n.use for n in t.describe(EVERYTHING).nics} == {"there is no GPU"}


def test_in_a_vm_with_one_host_bridge_the_numa_node_decides(tmp_path: Path) -> None:
    t = Tree(tmp_path).node(0, "0-3").node(1, "4-7")
    t.gpu("pci0000:00/0000:00:04.0", 0).gpu("pci0000:00/0000:00:05.0", 1)
    t.nic("mlx5_0", "pci0000:00/0000:00:06.0", 1).nic("mlx5_1", "pci0000:00/0000:00:07.0", 0)
    seen = read(t)
    assert chosen(seen, "cuda:0") == ["mlx5_1"] and chosen(seen, "cuda:1") == ["mlx5_0"]
    assert seen.distance("cuda:0", "mlx5_0") == Distance.SYSTEM


def test_distance_counts_the_bridges_between(tmp_path: Path) -> None:
    up = "pci0000:10/0000:10:01.0/0000:11:00.0"
    t = Tree(tmp_path).node(0, "0-3").node(1, "4-7").gpu(f"{up}/0000:12:00.0/0000:13:00.0", 0)
    t.nic("a", f"{up}/0000:12:01.0/0000:14:00.0", 0)
    t.nic("b", f"{up}/0000:12:02.0/0000:15:00.0/0000:17:00.0", 0)
    t.nic("c", "pci0000:10/0000:10:02.0/0000:18:00.0", 0)
    t.nic("d", "pci0000:20/0000:20:01.0/0000:21:00.0", 0)
    t.nic("e", "pci0000:30/0000:30:01.0/0000:31:00.0", 1)
    t.nic("f", "pci0000:40/0000:40:01.0/0000:41:00.0", -1)
    seen = read(t)
    assert [seen.distance("cuda:0", n) for n in "abcdef"] == list(Distance)
    assert chosen(seen, "cuda:0", 6) == list("abcdef")
    with pytest.raises(OutOfRange, match="there is no RDMA device 'g'"):
        seen.distance("cuda:0", "g")


def test_numa_minus_one_with_two_nodes_is_unknown_and_with_one_node_is_that_node(tmp_path: Path) -> None:
    t = Tree(tmp_path).node(0, "0-3").node(1, "4-7")
    t.gpu("pci0000:16/0000:16:02.0/0000:17:00.0", -1).nic("mlx5_0", "pci0000:64/0000:64:02.0/0000:65:00.0", -1)
    seen = read(t)
    assert seen.nearest_nics("cuda:0")[0].reason == "unknown distance, none is nearer"
    assert seen.node("cuda:0") == -1 and seen.cores("cuda:0", range(8)) == (7, 6, 5, 4, 3, 2, 1, 0)
    shutil.rmtree(tmp_path / "sys/devices/system/node/node1")
    assert read(t).nearest_nics("cuda:0")[0].distance == Distance.NUMA


def test_a_numa_node_that_firmware_gives_only_to_the_bridge_counts(tmp_path: Path) -> None:
    t = Tree(tmp_path).node(0, "0-3").node(1, "4-7").gpu("pci0000:16/0000:16:02.0/0000:17:00.0", 1)
    t.write("sys/devices/pci0000:16/0000:16:02.0/0000:17:00.0/numa_node", "-1")
    assert read(t).node("cuda:0") == 1


# ---------------------------------------------------------------------- hidden GPUs


@pytest.mark.parametrize(
    ("visible", "gpus"),
    [
        (None, [0, 1, 2, 3, 4, 5, 6, 7]),
        ("2,5", [2, 5]),
        ("7, 0", [7, 0]),
        (f"{gpu_uuid(6)},1", [6, 1]),
        ("GPU-3", [3]),
        ("", []),
        ("-1", []),
        ("4,-1,5", [4]),
        ("4,99,5", [4]),
        ("1,1", [1]),
        ("GPU-", []),
        ("all", []),
    ],
)
def test_hidden_gpus_keep_their_nics(tmp_path: Path, visible: str | None, gpus: list[int]) -> None:
    t = read(trees.dgx_h100(tmp_path), visible)
    assert [v.gpu.pci[5:7] for v in t.cuda if v.gpu] == [DGX_H100[i][0] for i in gpus]
    assert [chosen(t, f"cuda:{n}") for n in range(len(gpus))] == [[DGX_H100[i][2]] for i in gpus]
    with pytest.raises(
        OutOfRange, match=rf"cuda:{len(gpus)}: this process sees .*; {8 - len(gpus)} of 8 GPUs are hidden"
    ):
        t.nearest_nics(f"cuda:{len(gpus)}")
    devices = [d.device for d in t.describe(EVERYTHING).devices]
    assert len([d for d in devices if "hidden" in d]) == 8 - len(gpus) and "cpu:1" in devices


def test_an_entry_that_ends_the_list_is_noted(tmp_path: Path) -> None:
    t = read(trees.dgx_h100(tmp_path), "4,99,5")
    assert t.notes == ("CUDA_VISIBLE_DEVICES=4,99,5: '99' is no GPU here; the list ends before it",)


def test_only_gpus_that_the_driver_lists_are_numbered_and_the_others_keep_their_nics(tmp_path: Path) -> None:
    tree = trees.dgx_h100(tmp_path)
    for bus in ("1b", "43", "52", "61", "9d", "c3"):  # as in a container that was given two GPUs
        shutil.rmtree(tmp_path / f"proc/driver/nvidia/gpus/0000:{bus}:00.0")
    t = read(tree)
    assert [chosen(t, f"cuda:{i}") for i in range(len(t.cuda))] == [["mlx5_10"], ["mlx5_11"]]
    assert len(t.gpus) == 8 and t.shares["0000:1b:00.0"][0].name == "mlx5_0"


def test_a_gpu_that_the_driver_excludes_is_not_numbered(tmp_path: Path) -> None:
    tree = trees.dgx_h100(tmp_path)
    info = tmp_path / "proc/driver/nvidia/gpus/0000:43:00.0/information"
    info.write_text(info.read_text().replace("Excluded:\t No", "Excluded:\t Yes"))
    t = read(tree)
    assert len(t.cuda) == 7 and chosen(t, "cuda:1") == ["mlx5_4"]
    for bus, *_ in DGX_H100:
        (tmp_path / f"proc/driver/nvidia/gpus/0000:{bus}:00.0/information").write_text("GPU Excluded: Yes")
    assert read(tree).cuda == ()


def test_without_proc_the_gpus_bound_to_the_driver_are_numbered(tmp_path: Path) -> None:
    t = Tree(tmp_path).node(0, "0-3")
    t.gpu("pci0000:00/0000:00:04.0", 0, proc=False).device(
        "pci0000:00/0000:00:03.0", "0x10de", "0x030000", 0, "vfio-pci"
    )
    seen = read(t)
    assert [g.index for g in seen.gpus] == [-1, 0] and len(seen.cuda) == 1


# ---------------------------------------------------------------------- NVML


class Nvml:
    """A stand-in for pynvml. A GPU is (busId, UUID, name, MIG UUIDs by slot), or None for one that fell off the bus."""

    class NVMLError(Exception):
        pass

    def __init__(self, gpus: list[tuple[str, str, str, list[str | None]] | None], starts: bool = True) -> None:
        self.gpus, self.starts, self.running = gpus, starts, 0

    def nvmlInit(self) -> None:
        if not self.starts:
            raise self.NVMLError("Driver Not Loaded")
        self.running += 1

    def nvmlShutdown(self) -> None:
        self.running -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, i: int) -> object:
        if self.gpus[i] is None:
            raise self.NVMLError("GPU is lost")
        return self.gpus[i]

    def nvmlDeviceGetPciInfo(self, h: tuple) -> SimpleNamespace:
        return SimpleNamespace(busId=h[0])

    def nvmlDeviceGetUUID(self, h: tuple | str) -> str:
        return h if isinstance(h, str) else h[1]

    def nvmlDeviceGetName(self, h: tuple) -> bytes:
        return h[2].encode()

    def nvmlDeviceGetMaxMigDeviceCount(self, h: tuple) -> int:
        if not h[3]:
            raise self.NVMLError("Not Supported")
        return len(h[3])

    def nvmlDeviceGetMigDeviceHandleByIndex(self, h: tuple, i: int) -> str:
        if h[3][i] is None:
            raise self.NVMLError("Not Found")
        return h[3][i]


def nvml_of_dgx(**migs: list[str | None]) -> Nvml:
    return Nvml(
        [
            (f"00000000:{b[0].upper()}:00.0", f"GPU-nvml-{i}", "H100", migs.get(f"gpu{i}", []))
            for i, b in enumerate(DGX_H100)
        ]
    )


def test_nvml_gives_numbers_and_uuids(tmp_path: Path) -> None:
    nvml = nvml_of_dgx()
    t = read(trees.dgx_h100(tmp_path), "GPU-nvml-5", nvml=nvml)
    assert chosen(t, "cuda:0") == ["mlx5_9"] and t.gpu("cuda:0").name == "H100"
    assert t.node("cuda:0") == 1
    assert nvml.running == 0


def test_mig_devices_are_on_the_gpu_that_nvml_tells(tmp_path: Path) -> None:
    nvml = nvml_of_dgx(gpu3=["MIG-aaaa", None, "MIG-bbbb"], gpu6=["MIG-cccc"])
    t = read(trees.dgx_h100(tmp_path), "MIG-cccc,MIG-bbbb,MIG-aaaa,MIG-dddd", nvml=nvml)
    assert [chosen(t, f"cuda:{i}") for i in range(len(t.cuda))] == [["mlx5_10"], ["mlx5_5"], ["mlx5_5"]]
    assert "'MIG-dddd' is no GPU here" in t.notes[0]


def test_a_mig_device_without_nvml_gets_a_nic_and_it_is_said_what_is_missing(tmp_path: Path) -> None:
    t = read(trees.dgx_h100(tmp_path), "MIG-cccc")
    assert len(chosen(t, "cuda:0")) == 8 and t.nearest_nics("cuda:0")[0].distance == Distance.UNKNOWN
    assert t.notes == ("CUDA_VISIBLE_DEVICES=MIG-cccc: NVML is needed to tell which GPU has MIG-cccc",)
    assert t.describe(EVERYTHING).devices[0].name == "MIG-cccc"


def test_an_old_mig_name_holds_the_uuid_of_its_gpu(tmp_path: Path) -> None:
    assert chosen(read(trees.dgx_h100(tmp_path), f"MIG-{gpu_uuid(4)}/1/0"), "cuda:0") == ["mlx5_6"]


def test_a_mig_device_of_the_only_gpu_needs_no_nvml(tmp_path: Path) -> None:
    t = read(flat(tmp_path, 1, {"mlx5_0": {}}), "MIG-cccc")
    assert t.gpu("cuda:0") == t.gpus[0] and t.notes == ()


def test_nvml_that_does_not_start_changes_nothing(tmp_path: Path) -> None:
    t = read(trees.dgx_h100(tmp_path), nvml=Nvml([], starts=False))
    assert chosen(t, "cuda:7") == ["mlx5_11"] and t.notes == ("NVML does not start: Driver Not Loaded",)


def test_a_gpu_that_fell_off_the_bus_hides_no_other(tmp_path: Path) -> None:
    nvml = nvml_of_dgx()
    nvml.gpus[2] = None
    t = read(trees.dgx_h100(tmp_path), nvml=nvml)
    assert len(t.cuda) == 7 and chosen(t, "cuda:2") == ["mlx5_5"]
    assert t.notes == ("NVML, GPU 2: GPU is lost",)


def test_gpus_of_several_models_are_noted_unless_cuda_counts_by_address(tmp_path: Path) -> None:
    t = Tree(tmp_path).node(0, "0-3").gpu("pci0000:00/0000:00:04.0", 0, "A").gpu("pci0000:00/0000:00:05.0", 0, "B")
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in Topology.read(t.root, environ={}).notes[0]
    assert read(t).notes == ()


# ---------------------------------------------------------------------- cores


def test_cores_are_of_the_node_from_the_top_one_a_physical_core_first_and_core_0_last(tmp_path: Path) -> None:
    t = read(trees.dgx_h100(tmp_path))
    near = t.cores("cpu:0", range(224))
    assert set(near) == {*range(56), *range(112, 168)}
    assert set(near[:55]) == set(range(1, 56)) and near[55:57] == (167, 166) and near[-2:] == (112, 0)
    far = t.cores("cuda:4", range(224))
    assert far[:3] == (111, 110, 109) and far[56] == 223 and len(far) == 112


def test_gpus_of_one_node_start_at_different_cores_in_every_process(tmp_path: Path) -> None:
    tree = trees.dgx_h100(tmp_path)
    together = [read(tree).cores(f"cuda:{i}", range(224))[0] for i in range(8)]
    alone = [read(tree, str(i)).cores("cuda:0", range(224))[0] for i in range(8)]
    assert together == alone == [55, 54, 53, 52, 111, 110, 109, 108]
    assert read(tree).cores("cpu:0", range(224))[0] == 51


@pytest.mark.parametrize(
    ("allowed", "cores"),
    [
        ({0, 1, 2, 3}, (3, 2, 1, 0)),
        ({0}, (0,)),
        ({0, 112}, (112, 0)),
        ({5, 117}, (5, 117)),
        ({117}, (117,)),
        ({60, 61}, (61, 60)),
    ],
    ids=str,
)
def test_only_allowed_cores_are_given(tmp_path: Path, allowed: set[int], cores: tuple[int, ...]) -> None:
    t = read(trees.dgx_h100(tmp_path))
    got = t.cores("cuda:0", allowed)
    assert got == cores


def test_the_affinity_of_the_process_is_the_default(tmp_path: Path) -> None:
    t = Tree(tmp_path).node(0, "0-1023")
    assert set(read(t).cores("cpu:0")) == os.sched_getaffinity(0)
    with pytest.raises(OutOfRange, match="no core is allowed"):
        read(t).cores("cpu:0", ())


def test_a_node_without_cores_takes_any(tmp_path: Path) -> None:
    t = read(Tree(tmp_path).node(0, "0-3").node(8, ""))
    assert t.cores("cpu:8", range(4)) == (3, 2, 1, 0) and "NUMA node 8: cores none" in str(t)


# ---------------------------------------------------------------------- what is missing or wrong


def test_an_empty_root_is_a_machine_without_anything(tmp_path: Path) -> None:
    t = read(Tree(tmp_path))
    assert t.gpus == t.nics == t.cuda == () and chosen(t, "cpu:0") == []
    assert t.cores("cpu:0", {2, 3}) == (3, 2)
    assert t.notes == ("the kernel shows no NUMA nodes; all is taken as node 0",)
    with pytest.raises(OutOfRange, match="cuda:0: this process sees no GPU; 0 of 0"):
        t.cores("cuda:0")


@pytest.mark.parametrize("device", ["gpu:0", "cuda:", "cuda:-1", "cuda:x", "cpu:²", "", "cuda:0:1"])
def test_a_device_that_is_none_is_refused(tmp_path: Path, device: str) -> None:
    with pytest.raises(OutOfRange, match='want "cuda:N" or "cpu:NODE"'):
        read(trees.laptop(tmp_path)).nearest_nics(device)


def test_a_numa_node_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OutOfRange, match=r"cpu:7: there is no NUMA node 7; there are \[0, 1\]"):
        read(trees.dgx_h100(tmp_path)).cores("cpu:7")


def unreadable(path: Path) -> None:
    """Puts a directory where the file was: reading it fails for root, too."""
    path.unlink()
    path.mkdir()


def test_files_that_cannot_be_read_or_make_no_sense_are_noted_and_unknown(tmp_path: Path) -> None:
    tree = trees.two_sockets(tmp_path)
    nic = tmp_path / "sys/devices/pci0000:16/0000:16:04.0/0000:18:00.0"
    unreadable(nic / "infiniband/mlx5_0/ports/1/state")
    (nic / "infiniband/mlx5_0/ports/1/rate").write_text("fast")
    (nic / "numa_node").write_text("banana")
    unreadable(tmp_path / "sys/devices/pci0000:16/0000:16:04.0/numa_node")
    (tmp_path / "sys/devices/system/node/node1/cpulist").write_text("16-\xff")
    (tmp_path / "sys/devices/system/cpu/cpu3/topology/thread_siblings_list").write_text("99999999-1")
    t = read(tree)
    assert chosen(t, "cuda:3") == ["mlx5_0"] and t.distance("cuda:3", "mlx5_0") == Distance.UNKNOWN
    row = t.describe(EVERYTHING).nics[0]
    assert (row.state, row.link, row.numa) == ("state unknown", "Ethernet, unknown rate", -1)
    notes = "\n".join(t.notes)
    assert "cannot read /sys/class/infiniband/mlx5_0/ports/1/state: Is a directory" in notes
    assert "/sys/devices/pci0000:16/0000:16:04.0/0000:18:00.0/numa_node says 'banana', which is no number" in notes
    assert "node1/cpulist says" in notes and "cpu3/topology/thread_siblings_list says '99999999-1'" in notes


def test_links_that_lead_nowhere_are_devices_at_an_unknown_place(tmp_path: Path) -> None:
    tree = trees.two_sockets(tmp_path)
    shutil.rmtree(tmp_path / "sys/devices/pci0000:16/0000:16:04.0")
    tree.write("sys/class/infiniband/loop", "")
    t = read(tree)
    assert [n.name for n in t.nics] == ["loop", "mlx5_0"] and {n.pci for n in t.nics} == {""}
    assert [(n.driver, n.software) for n in t.nics] == [("loop", False), ("mlx5", False)]
    assert len(chosen(t, "cuda:0")) == 1


def test_a_gpu_known_only_to_the_driver_is_at_an_unknown_place(tmp_path: Path) -> None:
    tree = trees.two_sockets(tmp_path)
    (tmp_path / "sys/bus/pci/devices/0000:17:00.0").unlink()
    t = read(tree)
    assert t.gpu("cuda:0") == Gpu("0000:17:00.0", index=0, uuid=gpu_uuid(0), name="NVIDIA A100-PCIE-40GB")
    assert t.distance("cuda:0", "mlx5_0") == Distance.UNKNOWN and chosen(t, "cuda:0") == ["mlx5_0"]


# ---------------------------------------------------------------------- who uses it


@pytest.mark.parametrize("machine", [trees.dgx_h100, trees.p5, trees.p5en, trees.two_sockets, trees.laptop, Tree])
def test_every_machine_can_be_described(tmp_path: Path, machine: Callable[[Path], Tree]) -> None:
    t = read(machine(tmp_path))
    d = t.describe(EVERYTHING)
    out = json.loads(json.dumps(cli.to_json(d)))
    assert [x["device"] for x in out["devices"]] == [x.device for x in d.devices]
    for x in out["devices"]:
        assert all(c["reason"].startswith(c["distance"]) for c in x["nics"])
        assert all(f"{c['nic']}: {c['reason']}" in str(d) for c in x["nics"])
    nodes, nics, devices = cli.tables(d)
    assert nics.row_count == len(t.nics) and nodes.row_count == len(t.nodes)
    assert devices.row_count == sum(max(1, len(x.nics)) for x in d.devices)


def test_the_engine_pins_its_workers_near_their_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dgx = read(trees.dgx_h100(tmp_path))
    monkeypatch.setattr(engine.Topology, "read", lambda **kw: dgx)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(224)))

    def pins(*devices: str, pin: bool = True, cores: int = 224) -> list[int]:
        return engine.TransferEngine._pins(SimpleNamespace(config=Config(pin=pin), name="test"), devices, cores)

    assert pins("cuda:1", "cuda:6", "cpu:1") == [54, 109, 107]
    assert pins("cpu:0", "cpu:1", "cpu:2", "cpu:3") == [51, 107, 50, 49]  # nodes 2 and 3 are not there
    assert pins("cuda:0", pin=False) == pins("cuda:0", cores=4) == [-1]


def run(*args: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    return subprocess.run([sys.executable, "-m", "fabricx", *args], env=env, capture_output=True, text=True, timeout=60)


def test_the_command_shows_this_machine() -> None:
    p, q = run("topology", "--json"), run("topology")
    assert p.returncode == q.returncode == 0, p.stderr + q.stderr
    out = json.loads(p.stdout)
    assert out["network"] in q.stdout and "NUMA nodes" in q.stdout
    cores = next(d["cores"] for d in out["devices"] if d["device"].startswith("cpu:"))
    assert set(cores) <= os.sched_getaffinity(0) and cores


def test_the_doctor_names_the_network() -> None:
    out = json.loads(run("doctor", "--json").stdout)
    assert out["network"] in run("doctor").stdout and "cpu:0" in out["nics"]
