"""Whatever the machine: NICs are shared fairly, and what is written to a tree is what is read."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sysfs_tree import Tree, read

from fabricx.sysfs import Gpu, Nic, Node, Port, natural, parse_cores, show_cores
from fabricx.topology import Topology, _nearest

Place = tuple[int, tuple[int, ...]]
PLACES = st.tuples(st.integers(0, 2), st.lists(st.integers(0, 1), max_size=4).map(tuple))
PORTS = st.sampled_from(
    [
        ("ACTIVE", "InfiniBand", "400"),
        ("ACTIVE", "InfiniBand", "400"),
        ("ACTIVE", "Ethernet", "200"),
        ("DOWN", "InfiniBand", "10"),
    ]
)
MACHINES = st.tuples(
    st.lists(st.sampled_from([-1, 0, 1]), min_size=3, max_size=3),
    st.lists(PLACES, max_size=9),
    st.lists(st.tuples(PLACES, PORTS), max_size=12),
)


def build(
    numas: list[int], gpus: list[Place], nics: list[tuple[Place, tuple[str, str, str]]]
) -> tuple[list[Gpu], list[Nic]]:
    """GPUs and NICs of a drawn machine. Each bridge and device has its own bus and its host bridge's NUMA node."""
    buses: dict[Place, int] = {}

    def path(host: int, bridges: tuple[int, ...], number: int) -> tuple[str, ...]:
        above = [buses.setdefault((host, bridges[: i + 1]), len(buses)) for i in range(len(bridges))]
        return (f"pci0000:{host:02x}", *(f"0001:{b:02x}:00.0" for b in above), f"0000:{number + 16:02x}:00.0")

    made = [path(h, b, i) for i, (h, b) in enumerate(gpus)]
    g = [Gpu(p[-1], p, numas[h], index=i) for i, (p, (h, _)) in enumerate(zip(made, gpus, strict=True))]
    n = []
    for i, ((h, b), (state, layer, rate)) in enumerate(nics):
        p = path(h, b, i + 100)
        n.append(Nic(f"mlx5_{i}", "mlx5", "0x15b3", p[-1], p, numas[h], ports=(Port(1, state, layer, float(rate)),)))
    return g, n


@settings(max_examples=300, deadline=None)
@given(MACHINES, st.randoms(use_true_random=False))
def test_any_machine_is_shared_fairly(machine: tuple, shuffle: random.Random) -> None:
    gpus, nics = build(*machine)
    t = Topology(tuple(gpus), tuple(nics), (Node(0, ()), Node(1, ())))
    usable = [n for n in nics if n.name not in t.aside]
    assert bool(usable) == bool(nics)
    cells: dict[tuple[Nic, ...], list[Gpu]] = {}
    for g in gpus:
        share = t.shares[g.pci]
        assert bool(share) == bool(nics), "each GPU has a NIC if there is one"
        near = _nearest(g, t._usable)
        assert set(share) <= set(near), "only the nearest"
        cells.setdefault(near, []).append(g)
    load = Counter(n for s in t.shares.values() for n in s)
    for near, cell in cells.items():
        sizes = [len(t.shares[g.pci]) for g in cell]
        assert max(sizes) - min(sizes) <= 1, "equal shares"
        assert all(load[n] for n in near), "none of the nearest lies idle"
        mine = Counter(n for g in cell for n in t.shares[g.pci])
        others = {n for c, gs in cells.items() if c != near for g in gs for n in t.shares[g.pci]}
        if near and not others.intersection(near):
            assert max(mine[n] for n in near) - min(mine[n] for n in near) <= 1, "equal loads"
            assert len(near) < len(cell) or max(mine.values()) == 1, "no sharing where there are enough"
    shuffle.shuffle(gpus)
    shuffle.shuffle(nics)
    again = Topology(tuple(gpus), tuple(nics), t.nodes)
    assert (again.shares, again.network, again.aside) == (t.shares, t.network, t.aside), (
        "the order of finding is nothing"
    )


@settings(max_examples=25, deadline=None)
@given(machine=MACHINES)
def test_any_machine_is_read_as_it_is(tmp_path_factory: pytest.TempPathFactory, machine: tuple) -> None:
    gpus, nics = build(*machine)
    tree = Tree(tmp_path_factory.mktemp("tree")).node(0, "0-3").node(1, "4-7")
    for g in gpus:
        tree.gpu("/".join(g.path), g.numa, "H100")
    for n in nics:
        port = n.ports[0]
        tree.nic(
            n.name, "/".join(n.path), n.numa, state=port.state, layer=port.link_layer, rate=f"{port.rate:g} Gb/sec"
        )
    t = read(tree)
    assert [(g.path, g.numa, g.index) for g in t.gpus] == [(g.path, g.numa, g.index) for g in gpus]
    assert list(t.nics) == nics and t.notes == ()


@given(st.sets(st.integers(0, 300), max_size=40))
def test_core_lists_survive_writing_and_reading(cores: set[int]) -> None:
    assert parse_cores(show_cores(tuple(cores))) == tuple(sorted(cores))


def test_names_are_in_numeric_order() -> None:
    assert sorted(["mlx5_10", "mlx5_2", "efa", "2"], key=natural) == ["2", "efa", "mlx5_2", "mlx5_10"]
