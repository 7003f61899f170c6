"""A fabricx engine in a process of its own, driven over its standard input and output by a test.

Run as a script: one JSON request a line in, one JSON answer a line out.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


class Peer:
    """The test's side of such a process."""

    def __init__(self, fabric: str = "local", size: int = 1 << 20, env: dict[str, str] | None = None, plain: bool = False,
                 launcher: list[str] | None = None, **options: Any) -> None:
        request = json.dumps({"fabric": fabric, "size": size, "plain": plain, "options": options})
        self.process = subprocess.Popen(
            [*(launcher or [sys.executable]), __file__, request],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1", **(env or {})},
        )
        first = self.answer()
        self.pid = self.process.pid
        self.address, self.desc = first["address"], first["desc"]

    def send(self, **request: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()

    def answer(self, seconds: float = 30.0) -> Any:
        assert self.process.stdout is not None
        box: list[str] = []
        t = threading.Thread(target=lambda: box.append(self.process.stdout.readline()), daemon=True)  # type: ignore[union-attr]
        t.start()
        t.join(seconds)
        if not box:
            raise TimeoutError(f"peer {self.process.pid} did not answer within {seconds} s")
        if not box[0]:
            raise EOFError(f"peer ended with {self.process.wait(5)}")
        out = json.loads(box[0])
        if "raised" in out:
            raise RuntimeError(f"peer raised {out['raised']}: {out['text']}")
        return out["ok"]

    def call(self, **request: Any) -> Any:
        self.send(**request)
        return self.answer()

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        for f in (self.process.stdin, self.process.stdout):
            if f is not None:
                f.close()

    def leave(self) -> int:
        """Ask it to end in order; its exit code."""
        self.send(do="leave")
        code = self.process.wait(30)
        self.kill()
        return code


def main() -> None:
    import numpy as np

    import fabricx as fx

    start = json.loads(sys.argv[1])
    options = start["options"]
    config = fx.Config.from_env(**{"timeout": 20.0, "connect_timeout": 5.0, **options.pop("config", {})})
    if "chaos" in options:
        options["chaos"] = fx.Chaos(**options["chaos"])
    engine = fx.TransferEngine(start["fabric"], config=config, **options)
    memory = np.zeros(start["size"], np.uint8) if start["plain"] else engine.alloc(start["size"])
    array = memory if start["plain"] else memory.array
    handle, desc = engine.reg_mr(memory, name=f"memory of {os.getpid()}")
    transfers: dict[str, fx.Transfer] = {}
    messages: list[str] = []
    pools = []

    def say(**k: Any) -> None:
        print(json.dumps(k), flush=True)

    def target(r: dict[str, Any]) -> fx.MrDesc:
        return targets.setdefault(r["desc"], fx.MrDesc.from_bytes(base64.b64decode(r["desc"])))

    targets: dict[str, fx.MrDesc] = {}
    extra: list[tuple[fx.MrHandle, fx.MrDesc]] = []
    buffers: list[fx.HostBuffer] = []

    def do(r: dict[str, Any]) -> Any:
        what = r["do"]
        if what == "fill":
            array[r.get("at", 0) : r.get("at", 0) + r["n"]] = r["value"]
        elif what == "read":
            return base64.b64encode(array[r["at"] : r["at"] + r["n"]].tobytes()).decode()
        elif what == "sum":
            return int(array[r["at"] : r["at"] + r["n"]].astype(np.uint64).sum())
        elif what == "write":
            t = engine.submit_single_write(r["n"], r.get("imm"), (handle, r.get("at", 0)), (target(r), r.get("to", 0)), timeout=r.get("timeout"))
            transfers[r.get("id", "last")] = t
            if r.get("wait", True):
                t.wait()
        elif what == "writes":
            for _ in range(r["count"]):
                transfers["last"] = engine.submit_single_write(r["n"], r.get("imm"), (handle, 0), (target(r), r.get("to", 0)))
                if r.get("pause"):
                    time.sleep(r["pause"])
            transfers["last"].wait()
        elif what == "expect":
            transfers[r.get("id", "expect")] = engine.expect_imm_count(r["imm"], r["count"], timeout=r.get("timeout"))
        elif what == "wait":
            transfers[r["id"]].wait(r.get("seconds"))
        elif what == "count":
            return engine.imm_count(r["imm"])
        elif what == "recvs":
            pools.append(engine.submit_recvs(r["n"], r["count"], lambda m, who: messages.append(bytes(m[:64]).decode())))
        elif what == "messages":
            return messages
        elif what == "send":
            engine.submit_send(fx.NetAddr.from_bytes(base64.b64decode(r["address"])), r["text"].encode() * r.get("times", 1)).wait()
        elif what == "dereg":
            engine.dereg_mr(handle, timeout=r.get("timeout"))
        elif what == "register":
            buffers.append(engine.alloc(r["n"]))
            extra.append(engine.reg_mr(buffers[-1]))
            return base64.b64encode(extra[-1][1].to_bytes()).decode()
        elif what == "sums":  # of what was registered by "register"
            return [int(b.array.astype(np.uint64).sum()) for b in buffers]
        elif what == "forget":
            engine.dereg_mr(extra.pop()[0])
            buffers.pop()
        elif what == "close":
            engine.close()
        elif what == "stats":
            return engine.stats()
        elif what == "status":
            t = transfers[r["id"]]
            return [t.status, type(t.exception()).__name__]
        return None

    say(ok={"address": base64.b64encode(engine.address.to_bytes()).decode(), "desc": base64.b64encode(desc.to_bytes()).decode()})
    for line in sys.stdin:
        r = json.loads(line)
        if r["do"] == "leave":
            break
        try:
            say(ok=do(r))
        except Exception as e:
            say(raised=type(e).__name__, text=str(e))
    engine.close()


if __name__ == "__main__":
    main()
