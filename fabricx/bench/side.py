"""One side of a case, in a process of its own: ``python -m fabricx.bench.side JSON``; started by harness.run_case."""

import signal
import sys

import msgspec

from .harness import serve

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the coordinator, which ends its sides
    serve(**msgspec.json.decode(sys.argv[1]))
