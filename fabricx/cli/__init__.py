"""The `fabricx` command. Each sub-command imports what it needs when it runs."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from .. import __version__
from ..errors import FabricxError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Point-to-point transfers for LLM systems.",
)
bench = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Measurements, as ratios to a limit or a peer in one run.")
app.add_typer(bench, name="bench")


@app.command()
def demo(
    fabric: Annotated[str, typer.Option(help="local or ofi")] = "local",
    nics: Annotated[int, typer.Option(help="virtual NICs, or domains, a process")] = 1,
    pages: Annotated[int, typer.Option(help="shuffled pages to move")] = 4096,
    as_json: Annotated[bool, typer.Option("--json", help="figures as JSON on standard output")] = False,
) -> None:
    """Move a real model's weights and shuffled pages between three processes, every byte checked."""
    from ..demo import p2p

    raise typer.Exit(interruptible(lambda: p2p.run(fabric=fabric, nics=nics, pages=pages, as_json=as_json)))


@app.command()
def doctor(as_json: Annotated[bool, typer.Option("--json", help="as JSON")] = False) -> None:
    """What fabricx finds on this machine, what it would choose and why. Exit code 1 when something is wrong."""
    from . import report

    raise typer.Exit(report.run(as_json))


@app.command()
def topology(as_json: Annotated[bool, typer.Option("--json", help="as JSON")] = False) -> None:
    """GPUs, RDMA NICs and NUMA nodes, and which NICs and cores each device would use and why."""
    from . import topology_tables

    topology_tables.run(as_json)


@bench.command()
def p2p(
    json_file: Annotated[Path | None, typer.Option("--json", help="write one row a case")] = None,
    quick: Annotated[bool, typer.Option(help="fewer pairs, for a look")] = False,
    case: Annotated[str, typer.Option(help="only cases whose name contains this")] = "",
    pairs: Annotated[int, typer.Option(help="interleaved pairs a case; 0: 21, or 5 with --quick")] = 0,
    peers_env: Annotated[Path | None, typer.Option(help="a Python with nixl installed, to compare with")] = None,
    strict: Annotated[bool, typer.Option(help="exit code 1 when a bar is missed")] = False,
) -> None:
    """The engine and its fabrics against their limits and peers."""
    from ..bench import p2p as b

    raise typer.Exit(interruptible(lambda: b.main(json=json_file, quick=quick, case=case or None, pairs=pairs or None, peers_env=peers_env, strict=strict)))


@app.command()
def version() -> None:
    """The version of fabricx."""
    print(__version__)


def main() -> None:
    """Entry point: errors of fabricx are one line, without a traceback; Ctrl-C is exit code 130 and silent."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        app()
    except FabricxError as e:
        print(f"fabricx: {type(e).__name__}: {e}", file=sys.stderr)
        raise SystemExit(1) from None


def interruptible(f: Callable[[], int]) -> int:
    """Runs a command; Ctrl-C ends it with exit code 130."""
    try:
        return f()
    except KeyboardInterrupt:
        return 130


def dump(data: object) -> None:
    """JSON on standard output."""
    print(json.dumps(data, indent=1))
