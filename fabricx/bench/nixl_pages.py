"""NIXL's part of a comparison, run in an environment that has NIXL: ``python nixl_pages.py MODULE init|target``.

Driven over stdin/stdout like every fabricx.bench.programs.Program; it imports nothing of fabricx. Page plan and pool are those
of cases_local.PagePlan.
"""

import importlib
import select
import sys
import time

import numpy as np

PAGE, N, POOL = 1024, 1024, 8192


class Nixl:
    """An agent on UCX without a progress thread, its pool registered."""

    def __init__(self, module: str, role: str) -> None:
        api = importlib.import_module(f"{module}._api")
        self.agent = api.nixl_agent(role, api.nixl_agent_config(backends=[], enable_prog_thread=False))
        self.agent.create_backend("UCX", {})
        self.pool = np.zeros(POOL * PAGE, np.uint8)
        self.pool[:] = np.arange(POOL * PAGE) % 251 if role == "init" else 0
        self.base = self.pool.ctypes.data
        self.agent.register_memory([(self.base, POOL * PAGE, 0, "")], "DRAM")
        rng = np.random.default_rng(1)
        self.src, self.dst = (rng.permutation(POOL)[:N] for _ in range(2))
        self.handle = None
        self.role = role

    def connect(self, metadata: bytes, base: int) -> None:
        peer = self.agent.add_remote_agent(metadata)
        if self.role == "target":
            return
        self.agent.make_connection(peer)

        def descriptors(at, index):
            rows = np.zeros((N, 3), np.uint64)
            rows[:, 0], rows[:, 1] = index.astype(np.uint64) * PAGE + np.uint64(at), PAGE
            return rows

        each = np.arange(N, dtype=np.int32)
        mine = self.agent.prep_xfer_dlist("", descriptors(self.base, self.src), "DRAM")
        theirs = self.agent.prep_xfer_dlist(peer, descriptors(base, self.dst), "DRAM")
        self.handle = self.agent.make_prepped_xfer("WRITE", mine, each, theirs, each)

    def write(self, count: int) -> float:
        """ns a batch of all pages, posted again and again by one prepared handle."""
        t = time.perf_counter_ns()
        for _ in range(count):
            state = self.agent.transfer(self.handle)
            while state == "PROC":
                state = self.agent.check_xfer_state(self.handle)
            if state != "DONE":
                raise RuntimeError(f"transfer state {state}")
        return (time.perf_counter_ns() - t) / count

    def poll(self) -> None:
        """Lets NIXL make progress as a target until the next command."""
        while not select.select([sys.stdin], [], [], 0)[0]:
            for _ in range(64):
                self.agent.get_new_notifs()

    def wrong(self) -> int:
        """Bytes of the pool that are not what the pages should have made of it."""
        want = np.zeros((POOL, PAGE), np.uint8)
        want[self.dst] = (np.arange(POOL * PAGE) % 251).astype(np.uint8).reshape(POOL, PAGE)[self.src]
        return int(np.count_nonzero(want.ravel() != self.pool))


def main() -> None:
    nixl = Nixl(sys.argv[1], sys.argv[2])
    print("ready", nixl.agent.get_agent_metadata().hex(), nixl.base, flush=True)
    while True:
        line = sys.stdin.buffer.raw.readline().decode().split()
        if not line:
            return
        value = 0.0
        if line[0] == "peer":
            nixl.connect(bytes.fromhex(line[1]), int(line[2]))
        elif line[0] == "pages":
            value = nixl.write(int(line[1]))
        elif line[0] == "check":
            value = nixl.wrong()
        print("ok", value, flush=True)
        if line[0] == "serve":
            nixl.poll()


if __name__ == "__main__":
    try:
        main()
    except Exception as e:
        print("error", type(e).__name__, e, flush=True)
        raise
