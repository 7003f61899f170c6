"""Each kernel alone on one GPU, beside a copy of as many bytes: `python -m fabricx.kernels.bench [--json FILE]`.

L2 is flushed and the launch queued behind a spin before every sample; flags are up already, but waited for. Times are
microseconds between CUDA events, in a stream and as event nodes of a CUDA graph; routing is fresh in every sample.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import platform
import time
from collections.abc import Callable

import numpy as np
import torch
import triton
import triton.language as tl

import fabricx.kernels as fk
from fabricx.kernels import send as fk_send

SPIN = 600_000  # cycles: longer than it takes Python to launch what is measured
GRAPH_SPIN = 20_000
FLUSH = 256 << 20  # bytes, several times the L2
SETS = 32  # routings made ahead; a sample takes the next one
UP = 1 << 30  # a flag that is up for every round measured


class Timer:
    """Samples of single launches."""

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.flush = torch.ones(FLUSH // 4, dtype=torch.int32, device="cuda")
        self.total = torch.zeros((), dtype=torch.int64, device="cuda")
        self.events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(samples)]

    def _before(self, spin: int) -> None:
        torch.sum(self.flush, dim=0, out=self.total)
        torch.cuda._sleep(spin)

    def stream(self, prepare: Callable[[int], None], launch: Callable[[], object]) -> np.ndarray:
        """us between events around each launch, all kernels launched by Python."""
        for i in range(5):
            prepare(i)
            launch()
        torch.cuda.synchronize()
        for i, (start, end) in enumerate(self.events):
            prepare(i)
            self._before(SPIN)
            start.record()
            launch()
            end.record()
            if i % 50 == 49:
                torch.cuda.synchronize()
        torch.cuda.synchronize()
        return np.array([a.elapsed_time(b) for a, b in self.events]) * 1e3

    def graph(self, prepare: Callable[[int], None], launch: Callable[[], object]) -> np.ndarray:
        """us between event nodes around the launch in one graph, which is replayed with other inputs in the same
        buffers."""
        prepare(0)
        launch()
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True, external=True) for _ in range(2))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._before(GRAPH_SPIN)
            start.record()
            launch()
            end.record()
        times = []
        for i in range(self.samples):
            prepare(i)
            graph.replay()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) * 1e3)
        return np.array(times)


class Exchange:
    """One rank of an exchange with all its buffers; the other ranks are passive. Inputs lie in fixed buffers."""

    def __init__(self, tokens: int, ranks: int, near: int, hidden: int, experts: int, topk: int, cast: bool) -> None:
        first = 0 if near == ranks else min(8, ranks - near)
        self.tokens, self.experts, self.topk = tokens, experts, topk
        probe = fk.Layout(hidden, experts, ranks, topk)
        room = probe.near_bound(tokens) if tokens <= 1024 else 2 * tokens * topk // ranks + 4096
        self.layout = fk.Layout(
            hidden, experts, ranks, topk, rank=first + near // 2, dtype=torch.float8_e4m3fn, scales=-(-hidden // 128),
            private=32, near_first=first, near_ranks=near, near_rows=room, pad=64,
        )  # fmt: skip
        layout, n = self.layout, tokens * topk
        rows = self._send_pool(n, near * room, layout.row_bytes)
        self.send, self.near = rows[:n], self._offsets(rows, n, room, layout.row_bytes)
        self.x = torch.randn(tokens, hidden, device="cuda").to(torch.bfloat16)
        self.scales = None
        if not cast:
            self.x, self.scales = fk.reference.cast_fp8(self.x)
        self.routings = [self._routing() for _ in range(SETS)]
        self.idx = self.routings[0].clone()
        self.received = [self._received() for _ in range(SETS if tokens <= 1024 else 4)]
        most = max(int(c.sum()) for c in self.received)
        self.capacity = most + layout.local_experts * layout.pad
        self._make_signals()
        self._make_receive(n, room)

    @staticmethod
    def _send_pool(send_rows: int, near_rows: int, row_bytes: int) -> torch.Tensor:
        return torch.empty(send_rows + near_rows, row_bytes, dtype=torch.uint8, device="cuda")

    def _offsets(self, pool: torch.Tensor, send_rows: int, room: int, row_bytes: int) -> torch.Tensor:
        start = pool.data_ptr() + send_rows * row_bytes
        return fk.near_offsets(pool, [start + i * room * row_bytes for i in range(self.layout.near_ranks)])

    def _routing(self) -> torch.Tensor:
        scores = torch.rand(self.tokens, self.experts, device="cuda")
        return scores.topk(self.topk, dim=1).indices.to(torch.int32)

    def _received(self) -> torch.Tensor:
        """Rows of each (source, local expert), every source routing as many tokens at random."""
        layout = self.layout
        e0 = layout.first_expert(layout.rank)
        routings = [self._routing().flatten().long() for _ in range(layout.ranks)]
        per_source = [torch.bincount(r, minlength=self.experts) for r in routings]
        return torch.stack(per_source)[:, e0 : e0 + layout.local_experts].to(torch.int32).contiguous()

    def _make_signals(self) -> None:
        near = self.layout.near_ranks
        self.host = torch.zeros(64, dtype=torch.int32).pin_memory()
        self.flags = torch.zeros(2, near, 32, dtype=torch.int32, device="cuda")
        self.control = fk.new_control(
            "cuda", counts=self.host[0:1], far=self.host[16:17], back_far=self.host[32:33],
            near=list(self.flags[0, :, :1]), back_near=list(self.flags[1, :, :1]), abort=self.host[48:49],
        )  # fmt: skip
        self.up = torch.full((1 + near,), UP, dtype=torch.int32, device="cuda")
        self.counts = torch.zeros(self.experts, dtype=torch.int32).pin_memory()

    def _make_receive(self, n: int, room: int) -> None:
        layout, capacity = self.layout, self.capacity
        of = max(int(c.sum(1).max()) for c in self.received)
        rows = layout.near_ranks * room + layout.ranks * (layout.private + max(of - layout.private, 0))
        empty = torch.empty
        gpu = dict(device="cuda")
        self.recv = torch.randint(0, 100, (rows, layout.row_bytes), dtype=torch.uint8, **gpu)
        self.source_counts = self.received[0].clone()
        self.starts = torch.zeros(layout.ranks, dtype=torch.int32, **gpu)
        self.out_x = empty(capacity, layout.hidden, dtype=torch.uint8, **gpu).view(layout.dtype)
        self.out_scales = empty(capacity, layout.scales, **gpu)
        self.map_row = empty(capacity, dtype=torch.int32, **gpu)
        self.map_to = empty(capacity, dtype=torch.int64, **gpu)
        self.expert_tokens = empty(layout.local_experts, dtype=torch.int32, **gpu)
        self.totals = empty(2, dtype=torch.int32, **gpu)
        self.expected = int(sum(int(c.sum()) for c in self.received) / len(self.received))
        self.receive_work = empty(fk.receive_workspace_words(layout, capacity), dtype=torch.int32, **gpu)
        self.work = empty(fk.workspace_words(self.tokens, self.topk, self.experts), dtype=torch.int32, **gpu)
        self.positions = empty(self.tokens, self.topk, dtype=torch.int32, **gpu)
        back_rows = layout.ranks * of
        back = self._send_pool(back_rows, layout.near_ranks * of, layout.combine_row_bytes)
        self.back, self.back_near = back[:back_rows], self._offsets(back, back_rows, of, layout.combine_row_bytes)
        self.y = torch.randn(capacity, layout.hidden, **gpu).to(layout.combine_dtype)
        self.buf = torch.randn(max(n, 1), layout.hidden, **gpu).to(layout.combine_dtype).view(torch.uint8)
        self.weights = torch.rand(self.tokens, self.topk, **gpu)
        self.out = empty(self.tokens, layout.hidden, dtype=torch.bfloat16, **gpu)

    # -- the four kernels, and what changes from sample to sample
    def fresh_routing(self, i: int) -> None:
        self.idx.copy_(self.routings[i % SETS])

    def fresh_positions(self, i: int) -> None:
        self.fresh_routing(i)
        self.positions.copy_(fk.route(self.idx, self.experts)[1])

    def fresh_counts(self, i: int) -> None:
        self.source_counts.copy_(self.received[i % len(self.received)])

    def fresh_maps(self, i: int) -> None:
        self.fresh_counts(i)
        self.dispatch_receive()

    def dispatch_send(self) -> None:
        fk.dispatch_send(
            self.layout, self.x, self.idx, self.send, scales=self.scales, near=self.near, counts=self.counts,
            positions=self.positions, control=self.control, wait=self.up, workspace=self.work,
        )  # fmt: skip

    def dispatch_receive(self) -> None:
        fk.dispatch_receive(
            self.layout, self.recv, self.source_counts, self.out_x, self.map_row, self.map_to, self.expert_tokens,
            self.totals, out_scales=self.out_scales, starts=self.starts, near=self.back_near, control=self.control,
            wait=self.up, expected_rows=self.expected, workspace=self.receive_work,
        )  # fmt: skip

    def combine_send(self) -> None:
        fk.combine_send(
            self.layout, self.y, self.map_row, self.map_to, self.totals, self.back, control=self.control, wait=self.up,
            expected_rows=self.expected,
        )  # fmt: skip

    def combine_receive(self) -> None:
        fk.combine_receive(
            self.layout, self.buf, self.positions, self.weights, self.out, control=self.control, wait=self.up
        )

    def stages(self) -> list[tuple]:
        """(name, prepare a sample, launch, bytes moved)."""
        layout, rows = self.layout, self.tokens * self.topk
        sent = layout.bytes_dispatch_send(self.tokens, rows, self.x.dtype)
        received = layout.bytes_dispatch_receive(self.expected)
        summed = layout.bytes_combine_receive(self.tokens, rows)
        return [
            ("dispatch send", self.fresh_routing, self.dispatch_send, sent),
            ("dispatch receive", self.fresh_counts, self.dispatch_receive, received),
            ("combine send", self.fresh_maps, self.combine_send, layout.bytes_combine_send(self.expected)),
            ("combine receive", self.fresh_positions, self.combine_receive, summed),
        ]  # fmt: skip


def figures(times: np.ndarray) -> dict:
    """p50, p99 and minimum of samples, in us."""
    p50, p99 = np.percentile(times, [50, 99])
    return {"p50_us": float(p50), "p99_us": float(p99), "min_us": float(times.min())}


@triton.jit
def _copy(src, dst, n, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(dst + o, tl.load(src + o, mask=o < n), mask=o < n)


def copies(nbytes: int) -> dict[str, Callable[[], object]]:
    """Ways to copy so that `nbytes` are read and written together.

    Copies are of whole 4 KiB (rounded up): of other sizes the driver's take up to 1.5 times as long, and would flatter
    what is compared with them.
    """
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuMemcpyDtoDAsync_v2.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]
    a = torch.ones(-(-nbytes // 8192) * 4096, dtype=torch.uint8, device="cuda")
    b = torch.empty_like(a)

    def by_driver() -> None:
        status = driver.cuMemcpyDtoDAsync_v2(
            b.data_ptr(), a.data_ptr(), a.numel(), torch.cuda.current_stream().cuda_stream
        )
        if status:
            raise RuntimeError(f"cuMemcpyDtoDAsync gave {status}")

    a32, b32 = a.view(torch.int32), b.view(torch.int32)
    grid = (-(-a32.numel() // 2048),)

    def by_kernel() -> None:
        _copy[grid](a32, b32, a32.numel(), BLOCK=2048, num_warps=4)

    return {"Tensor.copy_": lambda: b.copy_(a), "cudaMemcpyAsync": by_driver, "kernel": by_kernel}


def _empty_kernel() -> Callable[[], object]:
    @triton.jit
    def empty():
        pass

    return lambda: empty[(1,)](num_warps=1)


def measure(timer: Timer, case: dict) -> list[dict]:
    """All rows of one case: the four kernels, each with the faster copy of its bytes."""
    exchange = Exchange(**case["shape"])
    rows = []
    for name, prepare, launch, nbytes in exchange.stages():
        row = dict(case=case["name"], kernel=name, bytes=nbytes, **case["shape"])
        for mode, run in (("stream", timer.stream), ("graph", timer.graph)):
            row[mode] = figures(run(prepare, launch))
            ways = {way: figures(run(lambda i: None, copy)) for way, copy in copies(nbytes).items()}
            best = min(ways, key=lambda w: ways[w]["p50_us"])
            row[f"{mode}_copy"] = dict(way=best, **ways[best], all={w: f["p50_us"] for w, f in ways.items()})
            row[f"{mode}_ratio"] = row[mode]["p50_us"] / ways[best]["p50_us"]
        status = fk.read_status(exchange.control)
        if status != fk.OK:
            raise RuntimeError(f"{name}: a wait {fk.status_text(status)} while measuring")
        rows.append(row)
        shown = [
            f"{mode} {row[mode]['p50_us']:7.2f}/{row[mode]['p99_us']:7.2f} (copy {row[f'{mode}_copy']['p50_us']:7.2f}, "
            f"x{row[f'{mode}_ratio']:.2f})"
            for mode in ("stream", "graph")
        ]
        print(f"{case['name']:22s} {name:17s} {nbytes / 1e6:7.1f} MB ", *shown, flush=True)
    return rows


def replay_to_flag(samples: int) -> dict:
    """us from calling a graph's replay() until the CPU sees the counts, and the far rows, announced."""
    exchange = Exchange(128, 64, 8, 7168, 256, 8, False)
    exchange.dispatch_send()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        exchange.dispatch_send()
    words = [ctypes.c_uint32.from_address(exchange.host.data_ptr() + at) for at in (0, 64)]
    seen: list[list[float]] = [[], []]
    for i in range(samples):
        exchange.fresh_routing(i)
        torch.cuda.synchronize()
        want = words[0].value + 1
        start = time.perf_counter_ns()
        graph.replay()
        for word, times in zip(words, seen, strict=True):
            while word.value != want:
                if time.perf_counter_ns() - start > 1_000_000_000:
                    raise TimeoutError("the flag of a replayed graph did not come within a second")
            times.append((time.perf_counter_ns() - start) / 1e3)
    return {"counts": figures(np.array(seen[0])), "far_rows": figures(np.array(seen[1]))}


def watcher(timer: Timer) -> dict:
    """us of scalar_inc_ alone, by way."""
    word = torch.zeros(1, dtype=torch.int64).pin_memory()
    shadow = torch.zeros(1, dtype=torch.int64, device="cuda")
    ways: dict[str, Callable[[], object]] = {
        "add": lambda: fk.scalar_inc_(word),
        "shadow": lambda: fk.scalar_inc_(word, shadow),
        "numba": lambda: fk.scalar_inc_numba_(word),
    }
    out = {}
    for name, launch in ways.items():
        try:
            out[name] = {"stream": figures(timer.stream(lambda i: None, launch))}
            out[name]["graph"] = figures(timer.graph(lambda i: None, launch))
        except Exception as e:  # Numba-CUDA wants compiler libraries that a machine may not have
            if name != "numba":
                raise
            out[name] = {"error": f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}"}
    return out


def cases(quick: bool) -> list[dict]:
    """The shapes measured: a decode step at EP64 and EP8, one token, prefill."""
    shape = dict(tokens=128, ranks=64, near=8, hidden=7168, experts=256, topk=8, cast=False)
    many = [
        ("decode EP64 n8", {}),
        ("decode EP64 n1", dict(near=1)),
        ("decode EP8 n8", dict(ranks=8)),
        ("decode EP64 n8 cast", dict(cast=True)),
        ("1 token EP64 n8", dict(tokens=1)),
        ("prefill EP64 n8", dict(tokens=4096)),
    ]
    return [dict(name=name, shape=shape | more) for name, more in (many[:1] if quick else many)]


def machine() -> dict:
    """What it ran on."""
    return dict(
        gpu=torch.cuda.get_device_name(),
        torch=torch.__version__,
        triton=triton.__version__,
        cuda=torch.version.cuda,
        python=platform.python_version(),
        fabricx=__import__("fabricx").__version__,
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="file to write all figures to")
    parser.add_argument("--samples", type=int, default=1000, help="of each kernel (a tenth of it for prefill)")
    parser.add_argument("--quick", action="store_true", help="the first case only")
    parser.add_argument("--registers", action="store_true", help="no copy engine in dispatch send")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this measures kernels on a GPU, and there is none")
    fk_send.BULK = not args.registers
    result: dict = dict(machine=machine(), samples=args.samples, copy_engine=fk_send.BULK, rows=[])
    timer, few = Timer(args.samples), Timer(max(args.samples // 10, 20))
    empty = _empty_kernel()
    result["empty_kernel"] = {
        mode: figures(run(lambda i: None, empty)) for mode, run in (("stream", timer.stream), ("graph", timer.graph))
    }
    print("empty kernel", {m: round(f["p50_us"], 2) for m, f in result["empty_kernel"].items()}, flush=True)

    def save() -> None:
        if args.json:
            with open(args.json, "w") as f:
                json.dump(result, f, indent=1)

    for case in cases(args.quick):
        result["rows"] += measure(few if case["shape"]["tokens"] > 1024 else timer, case)
        torch.cuda.empty_cache()
        save()
    result["replay_to_flag"] = replay_to_flag(args.samples)
    print("graph replay to flag", {k: round(v["p50_us"], 2) for k, v in result["replay_to_flag"].items()}, flush=True)
    result["scalar_inc"] = watcher(timer)
    print("scalar_inc_", json.dumps(result["scalar_inc"]), flush=True)
    save()


if __name__ == "__main__":
    main()
