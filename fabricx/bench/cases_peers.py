"""Other libraries, where an environment with them is given: NIXL's paged writes over shared memory."""

from __future__ import annotations

import os
import subprocess
import time

import fabricx as fx

from .cases_local import PagedWrites
from .harness import Measure, Side, Skip
from .programs import Program

#: modules under which NIXL's wheels install themselves
NIXL = ("nixl", "nixl_cu12", "nixl_cu13")
#: what lets UCX, under NIXL, use shared memory between processes of one host
SHARED_MEMORY = {"UCX_TLS": "tcp,posix,sysv,cma", "NIXL_LOG_LEVEL": "error"}


def nixl_python(path: str) -> tuple[str, str]:
    """(interpreter, module) of an environment that has NIXL.

    Raises
    ------
    Skip
        when there is none, with the reason.
    """
    if not path:
        raise Skip("NIXL is measured only in an environment of its own: --peers-env DIR")
    python = path if os.path.isfile(path) else os.path.join(path, "bin", "python")
    if not os.path.exists(python):
        raise Skip(f"{path} is no Python environment")
    for module in NIXL:
        done = subprocess.run([python, "-c", f"import {module}._api"], capture_output=True, timeout=60, check=False)
        if done.returncode == 0:
            return python, module
    raise Skip(f"none of {', '.join(NIXL)} can be imported in {path}")


class NixlPages(PagedWrites):
    """1,024 shuffled pages as one prepared request, complete at the initiator, against the same of NIXL. Neither library is told
    anything by the target; NIXL's target calls into NIXL all the while, ours sleeps."""

    def __init__(self, side: Side) -> None:
        python, module = nixl_python(side.options.get("peers_env") or "")
        super().__init__(side)
        p = self.plan
        self.prepared = self.engine.prepare(
            p.PAGE, (self.from_, fx.Pages(p.src, stride=p.PAGE)), (self.their, fx.Pages(p.dst, stride=p.PAGE))
        )
        script = os.path.join(os.path.dirname(__file__), "nixl_pages.py")
        role = "init" if side.first else "target"
        self.nixl = Program([python, script, module, role], SHARED_MEMORY)
        there = side.swap(self.nixl.words("ready"))
        self.nixl.say("peer " + " ".join(there))
        side.sync()
        self.nixl.words()
        side.sync()

    def measures(self) -> list[Measure]:
        return [
            Measure(
                "pages",
                "local",
                "1,024 shuffled, mapped, prepared, complete at the initiator",
                "M pages/s",
                self.initiate,
                self.peer,
                size=self.plan.PAGE,
                reference="NIXL, shared memory",
                bar=15.0,
                at_least=True,
            )
        ]

    def initiate(self) -> float:
        if not self.side.first:
            return 0.0
        t = time.perf_counter_ns()
        for _ in range(self.rounds):
            self.engine.submit_prepared(self.prepared, None).wait()
        return self.rate(time.perf_counter_ns() - t)

    def peer(self) -> float:
        if self.side.first:
            self.side.sync()
            ns = self.nixl.number(f"pages {self.rounds // 4}")
            self.side.sync()
            return self.plan.N * 1e3 / ns
        self.nixl.say("serve")
        self.nixl.words()
        self.side.sync()
        self.side.sync()
        wrong = self.nixl.number("check")
        if wrong:
            raise AssertionError(f"{wrong:.0f} bytes that NIXL wrote are not those that were sent")
        return 0.0

    def close(self) -> None:
        self.nixl.close()
        super().close()


CASES = [NixlPages]
