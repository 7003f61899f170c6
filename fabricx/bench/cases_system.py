"""What an engine costs while nothing happens: memory, processor time, import."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from .harness import Case, Measure, Side

#: a program that says when it is ready and ends when told; memory is read from outside meanwhile
_IDLE = "import sys; sys.stdout.write('.'); sys.stdout.flush(); sys.stdin.read(1)"
_ENGINE = "import fabricx as fx; e = fx.TransferEngine({fabric!r}, progress={progress!r}, polling='adaptive'); " + _IDLE
#: as above, and says how much processor time it took between two letters
_CPU = (
    "import fabricx as fx, sys, time; e = fx.TransferEngine({fabric!r}, progress={progress!r}, polling='adaptive'); time.sleep(0.2); "
    "a, t = time.process_time(), time.monotonic(); time.sleep({seconds}); "
    "print(100 * (time.process_time() - a) / (time.monotonic() - t)); e.close()"
)
_IMPORT = "import time; t = time.perf_counter(); import fabricx; print((time.perf_counter() - t) * 1e3)"


def memory(program: str) -> tuple[float, float]:
    """(resident, proportional) MB of a program that is idle."""
    env = {k: v for k, v in os.environ.items() if not k.endswith("_NUM_THREADS")}  # as a user's process has it
    p = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)
    assert p.stdin is not None and p.stdout is not None
    try:
        if p.stdout.read(1) != b".":
            raise RuntimeError(f"the program to be measured ended: {program}")
        time.sleep(0.1)
        with open(f"/proc/{p.pid}/smaps_rollup") as f:
            fields = dict(line.split()[:2] for line in f if line.startswith(("Rss:", "Pss:")))
    finally:
        p.stdin.close()
        p.stdout.close()
        p.wait(10)
    return int(fields["Rss:"]) / 1024, int(fields["Pss:"]) / 1024


def number(program: str) -> float:
    """What a program prints."""
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True).stdout
    return float(out)


class Idle(Case):
    """An engine that has nothing to do."""

    sides = 1

    def __init__(self, side: Side) -> None:
        super().__init__(side)
        self.resident: dict[str, float] = {}

    def measures(self) -> list[Measure]:
        out = []
        for fabric in ("local", "null"):
            for i, kind in enumerate(("resident", "proportional")):
                out.append(
                    Measure(
                        "idle",
                        fabric,
                        f"{kind} memory over the interpreter's",
                        "MB",
                        lambda fabric=fabric, i=i: self.over(fabric)[i],
                        bar=30.0,
                        most=3,
                        note="NumPy, which the engine imports, included",
                    )
                )
        for progress in ("thread", "caller"):
            program = _CPU.format(fabric="local", progress=progress, seconds=1.0)
            out.append(
                Measure(
                    "idle",
                    "local",
                    f"processor time, {progress}",
                    "% of a core",
                    lambda p=program: number(p),
                    bar=0.5,
                    most=3,
                )
            )
        out.append(Measure("import", "", "import fabricx", "ms", lambda: number(_IMPORT), bar=150.0))
        return out

    @staticmethod
    def over(fabric: str) -> tuple[float, float]:
        bare = memory(_IDLE)
        engine = memory(_ENGINE.format(fabric=fabric, progress="thread"))
        return engine[0] - bare[0], engine[1] - bare[1]


CASES = [Idle]
