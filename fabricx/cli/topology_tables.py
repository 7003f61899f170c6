"""`fabricx topology`: what is near what, as tables or JSON."""

from __future__ import annotations

import msgspec
from rich.console import Console
from rich.table import Table

from ..sysfs import show_cores
from ..topology import Description, Topology

_CORES_SHOWN = 4


def run(as_json: bool) -> None:
    """Prints the topology of this machine."""
    d = Topology.read().describe()
    if as_json:
        from . import dump

        dump(to_json(d))
        return
    c = Console()
    for t in tables(d):
        if t.row_count:
            c.print(t)
    c.print(f"RDMA network: {d.network}", highlight=False)
    for n in d.notes:
        c.print(f"note: {n}", highlight=False, markup=False)


def to_json(d: Description) -> dict[str, object]:
    """The rows as plain dictionaries; a distance is its words."""
    out = msgspec.to_builtins(d)
    for device, row in zip(out["devices"], d.devices, strict=True):
        for choice, c in zip(device["nics"], row.nics, strict=True):
            choice["distance"] = str(c.distance)
    return out


def tables(d: Description) -> list[Table]:
    """The NUMA nodes, the NICs, and what each device would use."""
    nodes = Table("node", "cores", title="NUMA nodes")
    for n in d.nodes:
        nodes.add_row(str(n.node), n.cores)
    nics = Table("NIC", "driver", "PCI", "node", "state", "link", "interfaces", "use", title="RDMA NICs")
    for n in d.nics:
        nics.add_row(n.nic, n.driver, n.pci, _node(n.numa), n.state, n.link, ", ".join(n.netdevs), n.use)
    devices = Table("device", "PCI", "node", "cores, best first", "NIC", "why", title="devices")
    for r in d.devices:
        cores = ", ".join(map(str, r.cores[:_CORES_SHOWN])) + (
            f" of {show_cores(r.cores)}" if r.cores[_CORES_SHOWN:] else ""
        )
        first = (r.device, r.pci, _node(r.numa), cores)
        for i, choice in enumerate(r.nics):
            devices.add_row(*(first if i == 0 else ("", "", "", "")), choice.nic, choice.reason)
        if not r.nics:
            devices.add_row(*first, "none", d.network)
    return [nodes, nics, devices]


def _node(number: int) -> str:
    return "unknown" if number < 0 else str(number)
