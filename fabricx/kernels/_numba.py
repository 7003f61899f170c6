"""Numba for the CPU twins: memory by address, conversions of narrow floats, and a choice between one thread and
many."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache

import numba
import numpy as np
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

PARALLEL_BYTES = 1 << 20  # below, waking other threads takes longer than the work
F32, BF16, F16 = range(3)  # kinds of element
HALF = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)  # every float16, widened


@intrinsic
def copy_bytes(typingctx, dst, src, n):
    """memcpy by addresses."""

    def gen(context, builder, sig, args):
        to, fro = (builder.inttoptr(a, cgutils.voidptr_t) for a in args[:2])
        cgutils.raw_memcpy(builder, to, fro, args[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), gen


@intrinsic
def pointer(typingctx, address):
    """An address as a pointer, for carray."""

    def gen(context, builder, sig, args):
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), gen


def inline(f: Callable) -> Callable:
    """Compile for use by other compiled functions."""
    return numba.njit(nogil=True, error_model="numpy")(f)


@inline
def widen(kind, address, out):
    """out[:] = the float32 values of out.size elements of `kind` at `address`."""
    n = out.size
    if kind == F32:
        out[:] = carray(pointer(address), n, np.float32)
    elif kind == BF16:
        src = carray(pointer(address), n, np.uint16)
        bits = out.view(np.uint32)
        for i in range(n):
            bits[i] = np.uint32(src[i]) << np.uint32(16)
    else:
        src = carray(pointer(address), n, np.uint16)
        for i in range(n):
            out[i] = HALF[src[i]]


@inline
def _bf16_bits(b):
    """float32 bits -> bfloat16 bits, to nearest even."""
    if (b & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000):
        return np.uint16(0x7FC0)
    return np.uint16((b + np.uint32(0x7FFF) + ((b >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


@inline
def narrow(kind, values, address):
    """The reverse of `widen`: round to nearest even. Changes `values`."""
    n = values.size
    if kind == F32:
        carray(pointer(address), n, np.float32)[:] = values
        return
    dst = carray(pointer(address), n, np.uint16)
    bits = values.view(np.uint32)
    if kind == BF16:
        for i in range(n):
            dst[i] = _bf16_bits(bits[i])
        return
    for i in range(n):
        b = bits[i]
        sign = np.uint16((b >> np.uint32(16)) & np.uint32(0x8000))
        a = b & np.uint32(0x7FFFFFFF)
        if a > np.uint32(0x7F800000):
            h = np.uint32(0x7E00)
        elif a >= np.uint32(0x477FF000):  # 65520 and beyond
            h = np.uint32(0x7C00)
        elif a < np.uint32(0x38800000):  # below 2**-14 a step is 2**-24: that of float32 from 1/2 on
            values[i] = abs(values[i]) + np.float32(0.5)
            h = bits[i] - np.uint32(0x3F000000)
        else:  # exponent bias 127 -> 15, ten bits of mantissa
            h = ((a + np.uint32(0xFFF) + ((a >> np.uint32(13)) & np.uint32(1))) >> np.uint32(13)) - np.uint32(0x1C000)
        dst[i] = np.uint16(h) | sign


@inline
def to_fp8(values, out):
    """float32 -> bytes of float8_e4m3fn, to nearest even; beyond 448 saturates. Selections, no branches: it
    vectorises."""
    bits = values.view(np.uint32)
    shifted = np.abs(values) + np.float32(16384.0)
    small = shifted.view(np.uint32)  # below 2**-6 a step is 2**-9: that of float32 from 2**14 on
    for i in range(values.size):
        a = bits[i] & np.uint32(0x7FFFFFFF)
        # exponent bias 127 -> 7, three bits of mantissa
        c = ((a + np.uint32(0x7FFFF) + ((a >> np.uint32(20)) & np.uint32(1))) >> np.uint32(20)) - np.uint32(960)
        c = np.uint32(0x7E) if c > np.uint32(0x7E) else c
        c = small[i] - np.uint32(0x46800000) if a < np.uint32(0x3C800000) else c
        c = np.uint32(0x7F) if a > np.uint32(0x7F800000) else c
        out[i] = np.uint8(c | ((bits[i] >> np.uint32(24)) & np.uint32(0x80)))


@inline
def largest(values):
    """The largest magnitude; as integers their bits are in the same order, and a maximum of integers vectorises."""
    bits = values.view(np.uint32)
    top = np.zeros(1, np.uint32)
    m = np.uint32(0)
    for i in range(bits.size):
        m = max(m, bits[i] & np.uint32(0x7FFFFFFF))
    top[0] = m
    return top.view(np.float32)[0]


def _compile(f: Callable, parallel: bool) -> Callable:
    options = dict(nogil=True, error_model="numpy", parallel=parallel)
    try:
        return numba.njit(cache=True, **options)(f)
    except RuntimeError:  # no place to keep compiled code
        return numba.njit(**options)(f)


@cache
def _team_lock():
    """What callers of parallel code must hold: nothing, or, where Numba has only its own thread pool, which ends the
    process when two threads use it at once, a lock."""

    @numba.njit(parallel=True)
    def probe(n):
        total = 0
        for i in numba.prange(n):
            total += i
        return total

    probe(2)
    return threading.Lock() if numba.threading_layer() == "workqueue" else nullcontext()


def loops(f: Callable) -> Callable:
    """A function whose prange loops run on one thread for little data, on Numba's threads for much.

    The compiled function gets one argument more than it is written with: the bytes that it moves, first.
    """
    serial = _compile(f, False)
    team = _compile(f, True)

    def call(nbytes: int, *args: object) -> object:
        if nbytes < PARALLEL_BYTES or numba.get_num_threads() == 1:
            return serial(*args)
        with _team_lock():
            return team(*args)

    call.__doc__ = f.__doc__
    call.serial, call.team = serial, team
    return call
