"""`fabricx doctor`: fabrics, libraries, limits, and what to do about what is wrong."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import sys
from typing import Any

from ..config import Config
from ..errors import FabricxError

_LIBRARIES = ("numpy", "msgspec", "cffi", "numba", "torch", "mpich")
_WANTED_MEMLOCK = 1 << 30


def look() -> dict[str, Any]:
    """Everything the report is made of."""
    from ..engine import FABRICS, choose_fabric, fabric_class
    from ..topology import Topology

    fabrics = {}
    for name in FABRICS:
        try:
            ok, why = fabric_class(name).available()
        except FabricxError as e:
            ok, why = False, str(e)
        fabrics[name] = {"available": ok, "why": why}
    choice, why = choose_fabric(Config.from_env())
    versions = {}
    for lib in _LIBRARIES:
        try:
            versions[lib] = importlib.metadata.version(lib)
        except importlib.metadata.PackageNotFoundError:
            versions[lib] = None
    memlock = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    nofile = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    wrong = []
    if not fabrics["local"]["available"]:
        wrong.append(f"the local fabric does not work here: {fabrics['local']['why']}")
    if nofile != resource.RLIM_INFINITY and nofile < 1024:
        wrong.append(f"only {nofile} open files are allowed; raise the limit: ulimit -n 65536")
    seen = Topology.read().describe()
    notes = list(seen.notes)
    if memlock != resource.RLIM_INFINITY and memlock < _WANTED_MEMLOCK:
        notes.append(f"RDMA NICs pin memory, and only {memlock >> 10} KiB may be locked; raise it: ulimit -l unlimited")
    return {
        "python": sys.version.split()[0],
        "kernel": platform.release(),
        "cores": len(os.sched_getaffinity(0)),
        "memlock": memlock if memlock != resource.RLIM_INFINITY else None,
        "open_files": nofile,
        "libraries": versions,
        "fabrics": fabrics,
        "auto": {"fabric": choice, "why": why},
        "network": seen.network,
        "nics": {d.device: {c.nic: c.reason for c in d.nics} for d in seen.devices},
        "wrong": wrong,
        "notes": notes,
    }


def run(as_json: bool) -> int:
    """Prints the report; 1 when something is wrong."""
    r = look()
    if as_json:
        from . import dump

        dump(r)
        return 1 if r["wrong"] else 0
    from rich.console import Console
    from rich.table import Table

    c = Console()
    t = Table("fabric", "there", "why", title="fabrics")
    for name, f in r["fabrics"].items():
        t.add_row(name, "yes" if f["available"] else "no", f["why"])
    c.print(t)
    c.print(f'fabric="auto" takes {r["auto"]["fabric"]}: {r["auto"]["why"]}', highlight=False)
    c.print(f"RDMA network: {r['network']}; see fabricx topology", highlight=False)
    for device, nics in r["nics"].items():
        for nic, reason in nics.items():
            c.print(f"  {device} -> {nic}: {reason}", highlight=False)
    libs = ", ".join(f"{k} {v}" if v else f"no {k}" for k, v in r["libraries"].items())
    memlock = "unlimited" if r["memlock"] is None else f"{r['memlock'] >> 10} KiB"
    c.print(f"Python {r['python']}, kernel {r['kernel']}, {r['cores']} cores; {libs}", highlight=False)
    c.print(f"limits: {r['open_files']} open files, {memlock} of locked memory", highlight=False)
    for n in r["notes"]:
        c.print(f"note: {n}", highlight=False, markup=False)
    for w in r["wrong"]:
        c.print(f"wrong: {w}", style="red", highlight=False)
    return 1 if r["wrong"] else 0
