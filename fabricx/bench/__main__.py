"""``python -m fabricx.bench``: `fabricx bench p2p` without the command."""

from .p2p import command

raise SystemExit(command())
