"""Rounding to narrow floats, to nearest, ties to even. The hardware's conversions on a GPU; integer arithmetic in the
interpreter, whose own conversions lose carries out of the mantissa."""

from __future__ import annotations

import triton
import triton.language as tl

from .signals import INTERPRET


@triton.jit
def fp8_bits(v):
    """float32 -> the byte of a float8_e4m3fn; beyond 448 saturates, as the GPU's conversion does."""
    if INTERPRET:
        bits = v.to(tl.int32, bitcast=True)
        a = bits & 0x7FFFFFFF
        normal = ((a + 0x7FFFF + ((a >> 20) & 1)) >> 20) - 960  # exponent bias 127 -> 7, three bits of mantissa
        # below 2**-6 a step is 2**-9: that of float32 from 2**14 on
        small = (tl.abs(v) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        code = tl.minimum(tl.where(a < 0x3C800000, small, normal), 0x7E)
        code = tl.where(a > 0x7F800000, 0x7F, code)
        return (code | ((bits >> 24) & 0x80)).to(tl.uint8)
    else:
        return v.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def round_to(v, dtype: tl.constexpr):
    """float32 -> bfloat16, float16 or float32."""
    if INTERPRET:
        if dtype == tl.bfloat16:
            bits = v.to(tl.uint32, bitcast=True)
            up = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
            nan = (bits & 0x7FFFFFFF) > 0x7F800000
            return tl.where(nan, 0x7FC0, up).to(tl.uint16).to(tl.bfloat16, bitcast=True)
        else:
            return v.to(dtype)
    else:
        return v.to(dtype)
