"""Which GID a verbs NIC is used with, on made-up sysfs trees."""

from __future__ import annotations

from pathlib import Path

import pytest

import fabricx as fx
from fabricx.fabrics.verbs_port import choose_gid, default_interface, is_active, is_hardware, ports, read_gids

ROUTE = "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\n"
LINK_LOCAL = "fe80:0000:0000:0000:0000:0aff:fe4d:0001"
NONE = "0000:0000:0000:0000:0000:0000:0000:0000"
GLOBAL6 = "2001:0db8:0000:0000:0000:0000:0000:0001"
V1, V2 = "IB/RoCE v1", "RoCE v2"


def v4(a: int, b: int) -> str:
    return f"0000:0000:0000:0000:0000:ffff:{a:04x}:{b:04x}"


def tree(root: Path, gids: list[tuple[str, str, str]], device: str = "mlx5_0", state: str = "4: ACTIVE") -> Path:
    """A device with one port and a table of (GID, kind, interface)."""
    base = root / "sys/class/infiniband" / device / "ports/1"
    for folder in ("gids", "gid_attrs/types", "gid_attrs/ndevs"):
        (base / folder).mkdir(parents=True)
    (base / "state").write_text(state + "\n")
    for i, (gid, kind, netdev) in enumerate(gids):
        (base / "gids" / str(i)).write_text(gid + "\n")
        if gid != NONE:
            (base / "gid_attrs/types" / str(i)).write_text(kind + "\n")
            (base / "gid_attrs/ndevs" / str(i)).write_text(netdev + "\n")
    return root


TABLES = {
    # as mlx5 fills it: v1 and v2 of each address in turn
    "mlx5": ([(LINK_LOCAL, V1, "a"), (LINK_LOCAL, V2, "a"), (v4(0x0A01, 1), V1, "a"), (v4(0x0A01, 1), V2, "a")], "", 3),
    "only link-local": ([(LINK_LOCAL, V1, "a"), (LINK_LOCAL, V2, "a")], "", 1),
    "global IPv6 beats link-local": ([(LINK_LOCAL, V2, "a"), (GLOBAL6, V2, "a")], "", 1),
    "IPv4 beats global IPv6": ([(GLOBAL6, V2, "a"), (v4(0x0A01, 1), V2, "a")], "", 1),
    "v2 beats v1 whatever the address": ([(v4(0x0A01, 1), V1, "a"), (LINK_LOCAL, V2, "a")], "", 1),
    "v1 if there is no other": ([(LINK_LOCAL, V1, "a"), (v4(0x0A01, 1), V1, "a")], "", 1),
    "the interface that routes": ([(v4(0x0A01, 1), V2, "vlan7"), (v4(0x0A02, 1), V2, "eth0")], "eth0", 1),
    "the first of several": ([(v4(0x0A01, 1), V2, "a"), (v4(0x0A02, 1), V2, "b")], "other", 0),
    "empty places": (
        [(NONE, "", ""), (NONE, "", ""), (LINK_LOCAL, V2, "a"), (NONE, "", ""), (v4(0x0A01, 1), V2, "a")],
        "",
        4,
    ),
}


@pytest.mark.parametrize("name", sorted(TABLES))
def test_the_gid_an_expert_would_take(tmp_path: Path, name: str) -> None:
    table, routed, want = TABLES[name]
    gids = read_gids("mlx5_0", 1, str(tree(tmp_path, table)))
    assert [g.index for g in gids] == [i for i, g in enumerate(table) if g[0] != NONE]
    gid, why = choose_gid(gids, routed)
    assert gid.index == want
    assert ("v1" in why) == (table[want][1] == V1) and table[want][2] in why
    assert ("default route" in why) == (bool(routed) and table[want][2] == routed)


def test_a_large_table_is_read_in_order(tmp_path: Path) -> None:
    table = [(v4(0x0A00, i), V2, f"v{i}") if i % 100 == 3 else (NONE, "", "") for i in range(256)]
    assert [g.index for g in read_gids("mlx5_0", 1, str(tree(tmp_path, table)))] == [3, 103, 203]


def test_a_gid_that_is_asked_for_is_taken_or_the_others_are_named(tmp_path: Path) -> None:
    gids = read_gids("mlx5_0", 1, str(tree(tmp_path, [(LINK_LOCAL, V1, "a"), (v4(0x0A01, 1), V2, "a")])))
    assert choose_gid(gids, "", 0)[0].index == 0
    with pytest.raises(fx.FabricUnavailable, match="mlx5_0:1 has no GID with index 7; in use: 0, 1"):
        choose_gid(gids, "", 7, "mlx5_0:1")


def test_no_gid_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(fx.FabricUnavailable, match="give its network interface an IP address"):
        choose_gid(read_gids("mlx5_0", 1, str(tree(tmp_path, [(NONE, "", "")]))))
    assert read_gids("none", 1, str(tmp_path)) == []


def test_ports_and_devices(tmp_path: Path) -> None:
    root = str(tree(tmp_path, [(LINK_LOCAL, V2, "a")]))
    tree(tmp_path, [(LINK_LOCAL, V2, "a")], "rxe0", "1: DOWN")
    (tmp_path / "sys/class/infiniband/mlx5_0/device").mkdir()
    assert ports("mlx5_0", root) == [1] and ports("none", root) == []
    assert [is_active(d, 1, root) for d in ("mlx5_0", "rxe0", "none")] == [True, False, False]
    assert [is_hardware(d, root) for d in ("mlx5_0", "rxe0", "none")] == [True, False, False]


@pytest.mark.parametrize(
    ("lines", "want"),
    [
        ("", ""),
        ("eth1\t0000010A\t00000000\t0001\t0\t0\t0\t00FFFFFF\n", ""),
        ("eth1\t0000010A\t00000000\t0001\t0\t0\t0\t0\neth0\t00000000\t0100010A\t0003\t0\t0\t100\t0\n", "eth0"),
        ("down0\t00000000\t0100010A\t0002\t0\t0\t100\t0\n", ""),
    ],
)
def test_the_interface_of_the_default_route(tmp_path: Path, lines: str, want: str) -> None:
    (tmp_path / "proc/net").mkdir(parents=True)
    (tmp_path / "proc/net/route").write_text(ROUTE + lines)
    assert default_interface(str(tmp_path)) == want
