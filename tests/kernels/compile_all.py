"""Compile every kernel for an H200, which needs no GPU: run by test_compile.py in a process where Triton does not
interpret.

Launches are caught, and compiled with the types and constants that they came with.
"""

from __future__ import annotations

import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import jit

import fabricx.kernels as fk
from fabricx.kernels import bulk, receive, routing, send

TARGET = GPUTarget("cuda", 90, 32)
FP8 = torch.float8_e4m3fn
TYPES = {
    torch.uint8: "u8", torch.int8: "i8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64",
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16",
}  # fmt: skip
compiled: dict[str, list[str]] = {}


def compile_only(self, *args, grid, warmup, **named):
    values = dict(zip(self.arg_names, args, strict=False))
    options = {k: named.pop(k) for k in list(named) if k not in self.arg_names}
    values |= named
    signature, constants, attributes = {}, {}, {}
    for i, name in enumerate(self.arg_names):
        value = values[name]
        if self.params[i].is_constexpr:
            signature[name], constants[(i,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = "*" + TYPES[value.dtype]
            attributes[(i,)] = [["tt.divisibility", 16]] if value.data_ptr() % 16 == 0 else []
        else:
            signature[name] = "i32"
    kernel = triton.compile(ASTSource(self, signature, constants, attributes), target=TARGET, options=options)
    assert kernel.asm["cubin"]
    compiled.setdefault(self.__name__, []).append(kernel.asm["ptx"])
    return kernel


def zeros(*shape, dtype=torch.int32):
    n = 1
    for s in shape:
        n *= s
    return torch.zeros(n * dtype.itemsize + 16, dtype=torch.uint8)[: n * dtype.itemsize].view(dtype).reshape(shape)


def exchange(tokens, near, cast=False, expected=None, **case):
    layout = fk.Layout(**case, near_ranks=near, near_rows=64 if near else 0, pad=16)
    flags = [zeros(1)] * near
    control, wait = fk.new_control("cpu", near=flags, back_near=flags), zeros(1 + near)
    offsets = zeros(near, dtype=torch.int64)
    topk, hidden, n, el = layout.topk, layout.hidden, 64, layout.local_experts
    x = zeros(tokens, hidden, dtype=torch.bfloat16 if cast else layout.dtype)
    scales = zeros(tokens, layout.scales, dtype=torch.float32) if layout.scales and not cast else None
    rows = zeros(tokens * topk, layout.row_bytes, dtype=torch.uint8)
    fk.dispatch_send(layout, x, zeros(tokens, topk), rows, scales=scales, near=offsets, control=control, wait=wait)
    maps = zeros(n), zeros(n, dtype=torch.int64)
    fk.dispatch_receive(
        layout, rows, zeros(layout.ranks, el), zeros(n, hidden, dtype=layout.dtype), *maps, zeros(el), zeros(2),
        out_scales=zeros(n, layout.scales, dtype=torch.float32) if layout.scales else None, starts=zeros(layout.ranks),
        near=offsets, control=control, wait=wait, host_flag=zeros(1), expected_rows=expected,
    )  # fmt: skip
    back = zeros(n, layout.combine_row_bytes, dtype=torch.uint8)
    y = zeros(n, hidden, dtype=layout.combine_dtype)
    fk.combine_send(layout, y, *maps, zeros(2), back, control=control, wait=wait)
    fk.combine_receive(
        layout, back, zeros(tokens, topk), zeros(tokens, topk, dtype=torch.float32),
        zeros(tokens, hidden, dtype=torch.bfloat16), accumulate=cast, control=control, wait=wait, host_flag=zeros(1),
    )  # fmt: skip


def main() -> None:
    jit.JITFunction.run = compile_only
    for module in (send, receive, routing, bulk):
        module.programmatic = lambda device: True
    wide = dict(hidden=7168, experts=256, ranks=64, topk=8, dtype=FP8, scales=56)
    exchange(128, 8, **wide)
    exchange(256, 8, expected=5000, **wide)
    exchange(128, 0, cast=True, **wide)
    send.BULK = False
    exchange(128, 8, **wide)
    exchange(256, 8, expected=5000, **wide)
    send.BULK = True
    exchange(5, 0, hidden=127, experts=601, ranks=5, topk=16, dtype=FP8, scales=1)
    fk.route(zeros(9, 2, dtype=torch.int64), 5)
    fk.prefix(zeros(5))
    fk.scalar_inc_(zeros(1, dtype=torch.int64))
    fk.scalar_inc_(zeros(1, dtype=torch.int64), zeros(1, dtype=torch.int64))
    first = {name: texts[0] for name, texts in compiled.items()}
    # what the wide shape must compile to: 16 bytes an access or the copy engine, signals with their scopes
    for name in ("send_small", "send_large", "receive_small", "copy_rows", "send_back"):
        assert any("st.global.v4" in text for text in compiled[name]), f"{name} does not store 16 bytes at a time"
    for name in ("send_small", "send_large"):
        assert "cp.async.bulk.global" in first[name], f"{name} does not use the copy engine"
    assert "ld.global.v4" in first["sum_rows"] or "ld.global.L1::no_allocate.v4" in first["sum_rows"]
    for name in ("send_small", "send_back"):
        assert "st.release.sys" in first[name] and "fence.acq_rel.sys" in first[name], name
    for name in ("send_small", "receive_small", "count_sources", "send_back", "sum_rows"):
        assert "ld.acquire.sys" in first[name] and "%globaltimer" in first[name], name
    print(len(first), "kernels,", sum(map(len, compiled.values())), "variants", file=sys.stderr)


if __name__ == "__main__":
    main()
