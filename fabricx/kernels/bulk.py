"""Rows through Hopper's copy engine: one instruction of one thread moves a row between global and shared memory.

Triton offers that only for tensor descriptors with registers in between, so the assembly is our own, with static shared
memory that Triton does not know of. Layout there: the row, its mbarrier (16 bytes), then a table of target addresses.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ._launch import programmatic
from .layout import MAX_TOPK, Layout

MAX_ROW = 40 << 10  # bytes; static shared memory ends at 48 KiB, and Triton wants some


def fits(layout: Layout, x: torch.Tensor, scales: torch.Tensor | None) -> bool:
    """Whether rows can go this way: a GPU that has it, and pieces of whole 16 bytes."""
    pieces = layout.x_bytes % 16 == 0 and (4 * layout.scales) % 16 == 0
    aligned = x.data_ptr() % 16 == 0 and (scales is None or scales.data_ptr() % 16 == 0)
    return programmatic(x.device) and pieces and aligned and layout.row_bytes <= MAX_ROW


def gather_text(layout: Layout) -> str:
    """Thread 0 starts loading the token at $1 and its scales at $2; every thread gets the row's address in shared
    memory.

    A load that was started must be waited for before the program ends: `scatter_text` does, whatever is selected.
    """
    x, s = layout.x_bytes, 4 * layout.scales
    n = x + s
    scales = "" if not s else (
        f"add.u32 t, r, {x}; "
        f"cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [t], [$2], {s}, [b];"
    )  # fmt: skip
    return f"""{{
        .shared .align 128 .b8 row[{n + 16 + 8 * MAX_TOPK}];
        .reg .pred p; .reg .u32 t, r, b;
        mov.u32 r, row; add.u32 b, r, {n};
        mov.u32 t, %tid.x; setp.ne.u32 p, t, 0; @p bra DONE;
        mbarrier.init.shared::cta.b64 [b], 1; fence.mbarrier_init.release.cluster;
        mbarrier.arrive.expect_tx.shared::cta.b64 _, [b], {n};
        cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [r], [$1], {x}, [b];
        {scales}
    DONE: mov.u32 $0, r; }}"""


def table_text(layout: Layout) -> str:
    """Element $2 of the table becomes address $3. Whichever threads hold the element write the same."""
    table = layout.x_bytes + 4 * layout.scales + 16
    return f"""{{ .reg .u32 t; mad.lo.u32 t, $2, 8, $1; st.shared.u64 [t + {table}], $3;
        mov.u32 $0, 0; }}"""


def scatter_text(layout: Layout) -> str:
    """Thread k of the first topk stores the row at $1 to address k of the table, unless that is 0, and waits until it
    is written. All of the first warp wait for the row to be there."""
    n = layout.x_bytes + 4 * layout.scales
    return f"""{{
        .reg .pred p; .reg .u32 t, b; .reg .u64 a;
        mov.u32 t, %tid.x; setp.ge.u32 p, t, 32; @p bra DONE;
        add.u32 b, $1, {n};
    LOOP: mbarrier.try_wait.parity.shared::cta.b64 p, [b], 0; @!p bra LOOP;
        setp.ge.u32 p, t, {layout.topk}; @p bra DONE;
        mad.lo.u32 b, t, 8, $1; ld.shared.u64 a, [b + {n + 16}];
        setp.eq.u64 p, a, 0; @p bra DONE;
        cp.async.bulk.global.shared::cta.bulk_group [a], [$1], {n};
        cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
    DONE: mov.u32 $0, 0; }}"""


@triton.jit
def gather(x, scales, TEXT: tl.constexpr):
    """Start loading a row; its address in shared memory."""
    src = [x.to(tl.int64), scales.to(tl.int64)]
    return tl.inline_asm_elementwise(TEXT, "=r,l,l", src, dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def scatter(row, k, send, at, sel, UNIT: tl.constexpr, TABLE: tl.constexpr, TEXT: tl.constexpr):
    """Store the row to the selected ones of the places `at`, in 16 bytes (UNIT elements) from `send`."""
    to = tl.where(sel, (send + at * UNIT).to(tl.int64), 0)
    tl.inline_asm_elementwise(TABLE, "=r,r,r,l", [row, k, to], dtype=tl.int32, is_pure=False, pack=1)
    tl.debug_barrier()
    tl.inline_asm_elementwise(TEXT, "=r,r", [row], dtype=tl.int32, is_pure=False, pack=1)
