"""`fabricx bench p2p`: every figure that the engine promises, measured beside its reference, in one run."""

from __future__ import annotations

import argparse
import fnmatch
import importlib
import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from ..errors import OutOfRange
from . import harness
from .harness import Row

MODULES = tuple(f"{__package__}.cases_{name}" for name in ("null", "local", "ofi", "peers", "system"))
PAIRS, QUICK_PAIRS, MOST_PAIRS = 21, 5, 1001


class Result(msgspec.Struct):
    """What ``--json`` writes: the machine, and a row for each thing measured."""

    machine: dict[str, Any]
    rows: list[Row]


def machine() -> dict[str, Any]:
    """What figures must be read with: processor, cores, kernel, load, versions."""
    versions = {}
    for name in ("numpy", "numba", "msgspec", "torch", "mpich"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    from .. import __version__

    return {
        "cpu": _cpu(),
        "arch": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_mb": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load": round(os.getloadavg()[0], 2),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "fabricx": __version__,
        **versions,
    }


def _cpu() -> str:
    try:
        with open("/proc/cpuinfo") as f:
            for line in f:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def chosen(pattern: str | None) -> list[tuple[str, str, type[harness.Case]]]:
    """(spec, fabric, class) of the cases whose "fabric:Class" contains or matches `pattern`.

    Raises
    ------
    OutOfRange
        when there is none; it lists those there are.
    """
    out = []
    for module in MODULES:
        fabric = module.rpartition("cases_")[2]
        for cls in importlib.import_module(module).CASES:
            out.append((f"{module}:{cls.__name__}", fabric, cls))
    if not pattern:
        return out
    want = pattern.lower()
    names = {f"{fabric}:{cls.__name__}".lower(): (spec, fabric, cls) for spec, fabric, cls in out}
    picked = [x for name, x in names.items() if want in name or fnmatch.fnmatch(name, want)]
    if not picked:
        raise OutOfRange(f"no case matches {pattern!r}; there are {', '.join(names)}")
    return picked


def show(row: Row) -> str:
    """A row as one line of text, for while it runs."""
    if row.value is None:
        return f"{row.case} ({row.fabric}): {row.note}"
    mark = {True: "holds", False: "MISSED", None: ""}[row.holds]
    return f"{row.case} ({row.fabric}), {row.metric}{size(row.size)}: {row.value:.4g} {row.unit}{against(row)} {mark}".rstrip()


def size(n: int) -> str:
    """ ", 64 KiB" for a size in bytes; nothing for none."""
    if not n:
        return ""
    for unit, shift in (("MiB", 20), ("KiB", 10)):
        if n >= 1 << shift and n % (1 << shift) == 0:
            return f", {n >> shift} {unit}"
    return f", {n} B"


def against(row: Row) -> str:
    """How a row compares, as words."""
    if row.reference_value is not None:
        text = f"; {row.ratio:.3g} of {row.reference} ({row.q1:.3g} .. {row.q3:.3g})"
        return text if row.bar is None else f"{text}, bar {'>=' if row.at_least else '<='} {row.bar:g}"
    return "" if row.bar is None else f"; bar {'>=' if row.at_least else '<='} {row.bar:g}"


def table(rows: Sequence[Row]) -> Any:
    """All rows as a rich table."""
    from rich.table import Table

    t = Table(title="fabricx bench p2p")
    for name, right in (
        ("fabric", 0),
        ("what", 0),
        ("value", 1),
        ("reference", 1),
        ("ratio (quartiles)", 1),
        ("bar", 1),
        ("", 0),
    ):
        t.add_column(name, justify="right" if right else "left")
    for r in rows:
        if r.value is None:
            t.add_row(r.fabric, f"{r.case}: {r.note}", "", "", "", "", "-")
            continue
        ratio = (
            f"{r.ratio:.3g} ({r.q1:.3g} .. {r.q3:.3g})" if r.ratio is not None and r.reference_value is not None else ""
        )
        reference = f"{r.reference_value:.4g} {r.reference}" if r.reference_value is not None else ""
        bar = "" if r.bar is None else f"{'>=' if r.at_least else '<='} {r.bar:g}"
        mark = {True: "[green]holds[/]", False: "[red]missed[/]", None: ""}[r.holds]
        t.add_row(
            r.fabric, f"{r.case}: {r.metric}{size(r.size)}", f"{r.value:.4g} {r.unit}", reference, ratio, bar, mark
        )
    return t


def markdown(result: Result) -> str:
    """The machine and all rows as a Markdown table, for docs and notes."""
    m = result.machine
    lines = [
        f"{m['cpu']}, {m['cores']} cores, Linux {m['kernel']}, Python {m['python']}, {m['time'][:10]}, load {m['load']} at the start.",
        "",
        "| fabric | what | value | reference | ratio (quartiles) | bar | |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in result.rows:
        if r.value is None:
            lines.append(f"| {r.fabric} | {r.case}: {r.note} | | | | | |")
            continue
        compared = r.reference_value is not None
        reference = f"{r.reference_value:.4g} {r.reference}" if compared else ""
        ratio = f"{r.ratio:.3g} ({r.q1:.3g} .. {r.q3:.3g})" if compared else ""
        bar = "" if r.bar is None else f"{'>=' if r.at_least else '<='} {r.bar:g}"
        mark = {True: "holds", False: "**missed**", None: ""}[r.holds]
        lines.append(
            f"| {r.fabric} | {r.case}: {r.metric}{size(r.size)} | {r.value:.4g} {r.unit} | {reference} | {ratio} | {bar} | {mark} |"
        )
    return "\n".join(lines) + "\n"


def run(
    *,
    pairs: int = PAIRS,
    case: str | None = None,
    peers_env: str | None = None,
    tell: Any = None,
) -> Result:
    """Runs the cases, one after another.

    Parameters
    ----------
    pairs : interleaved pairs of (ours, reference) a row.
    case : only cases whose "fabric:Class" contains or matches this.
    peers_env : directory of a Python environment with NIXL.
    tell : called with each Row as it comes.
    """
    if not 1 <= pairs <= MOST_PAIRS:
        raise OutOfRange(f"pairs is {pairs}; it must be within 1 .. {MOST_PAIRS}")
    picked = chosen(case)
    result = Result(machine(), [])
    options = {"pairs": pairs, "peers_env": peers_env}
    for spec, fabric, cls in picked:
        limit = cls.limit * max(1.0, pairs / PAIRS)
        result.rows += harness.run_case(spec, fabric, cls.sides, limit, options, tell or (lambda row: None))
    return result


def main(options: Mapping[str, Any] | None = None, **more: Any) -> int:
    """Runs the bench as the command does: rows as they come, a table at the end; the exit code.

    Parameters
    ----------
    options, more : json and markdown (paths), quick, pairs, case, peers_env, strict; as on the command line.

    Returns
    -------
    int
        0; with `strict` 1 when a bar is missed or something failed.
    """
    from rich.console import Console

    o = {
        "json": None,
        "markdown": None,
        "quick": False,
        "pairs": None,
        "case": None,
        "peers_env": None,
        "strict": False,
    }
    given = {**(options or {}), **more}
    unknown = sorted(set(given) - set(o))
    if unknown:
        raise TypeError(f"unknown options {unknown}; known: {sorted(o)}")
    o.update(given)
    console = Console()
    pairs = o["pairs"] if o["pairs"] is not None else QUICK_PAIRS if o["quick"] else PAIRS
    targets = {name: Path(o[name]) for name in ("json", "markdown") if o[name]}
    for name, target in targets.items():
        if not target.parent.is_dir():
            raise OutOfRange(f"--{name} {target}: there is no directory {target.parent}")
    result = run(
        pairs=pairs,
        case=o["case"],
        peers_env=str(o["peers_env"]) if o["peers_env"] else None,
        tell=lambda row: console.print(show(row), highlight=False, markup=False, soft_wrap=True),
    )
    m = result.machine
    console.print(table(result.rows))
    console.print(
        f"{m['cpu']}, {m['cores']} cores, Linux {m['kernel']}, Python {m['python']}, load {m['load']}", highlight=False
    )
    missed = [r for r in result.rows if r.holds is False or r.note.startswith("failed")]
    asked = sum(r.holds is not None for r in result.rows)
    console.print(
        f"{sum(r.holds is True for r in result.rows)} of {asked} bars hold; {pairs} pairs a row", highlight=False
    )
    if "json" in targets:
        targets["json"].write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
    if "markdown" in targets:
        targets["markdown"].write_text(markdown(result))
    return 1 if o["strict"] and missed else 0


def command(argv: Sequence[str] | None = None) -> int:
    """``python -m fabricx.bench``: the same without the `fabricx` command."""
    p = argparse.ArgumentParser(prog="fabricx bench p2p", description=__doc__)
    p.add_argument("--json", metavar="FILE", help="write the machine and one row a case")
    p.add_argument("--markdown", metavar="FILE", help="write the same as a Markdown table")
    p.add_argument("--quick", action="store_true", help=f"{QUICK_PAIRS} pairs a row instead of {PAIRS}")
    p.add_argument("--pairs", type=int, help="pairs a row")
    p.add_argument("--case", metavar="PATTERN", help='only cases whose "fabric:Class" contains or matches this')
    p.add_argument("--peers-env", metavar="DIR", help="a Python environment with NIXL")
    p.add_argument("--strict", action="store_true", help="exit code 1 when a bar is missed or a case fails")
    try:
        return main(vars(p.parse_args(argv)))
    except OutOfRange as e:
        print(f"fabricx bench p2p: {e}", file=sys.stderr)
        return 2
