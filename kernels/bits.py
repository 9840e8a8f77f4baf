"""Floats from their bits, and the exponential that LLVM can vectorise because it is made of them."""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

from cupaged.jit import njit

# ruff: noqa: ARG001, ARG005  (Numba's overloads repeat the parameters of what they stand for)


def float_from_bits(bits: Any) -> Any:
    """Return the float32 whose bits are the int32 `bits`."""
    return np.array(bits, np.int32).view(np.float32)[()]


def _type_bitcast(_context: Any, _bits: Any) -> Any:
    def emit(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), emit


_bitcast: Any = intrinsic(_type_bitcast)


@overload(float_from_bits, strict=False)
def _float_from_bits(bits: Any) -> Any:
    return lambda bits: _bitcast(bits)


def load(x: Any) -> Any:
    """Return a float32 or bfloat16 (as uint16) number as float32."""
    return x if isinstance(x, np.float32) else float_from_bits(np.int32(x) << 16)


@overload(load, strict=False)
def _load(x: Any) -> Any:
    if x == types.float32:
        return lambda x: x
    return lambda x: _bitcast(np.int32(np.int32(x) << 16))


def store(like: Any, x: Any) -> Any:
    """Return the float32 x in the form of `like`: float32, or bfloat16 (as uint16) rounded to even."""
    if isinstance(like, np.float32):
        return x
    bits = int(np.array(x, np.float32).view(np.uint32))
    return np.uint16(((bits >> 16) | 0x40) if x != x else (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)


def _type_round(_context: Any, _x: Any) -> Any:
    """Generate code on 32-bit words: Numba's own integers grow to 64 bits, which halves a vector."""

    def emit(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        word = ir.IntType(32)
        bits = builder.bitcast(args[0], word)
        high = builder.lshr(bits, word(16))
        half = builder.add(word(0x7FFF), builder.and_(high, word(1)))
        rounded = builder.lshr(builder.add(bits, half), word(16))
        is_nan = builder.fcmp_unordered("uno", args[0], args[0])
        return builder.trunc(builder.select(is_nan, builder.or_(high, word(0x40)), rounded), ir.IntType(16))

    return types.uint16(types.float32), emit


_round: Any = intrinsic(_type_round)


@overload(store, strict=False)
def _store(like: Any, x: Any) -> Any:
    if like == types.float32:
        return lambda like, x: x
    return lambda like, x: _round(np.float32(x))


@njit
def exp(x: Any) -> Any:
    """Return e**x in float32 for x <= 0, within 2 ulp; 0 below -87, NaN of NaN."""
    y = x if x > np.float32(-87.0) else np.float32(-87.0)
    n = np.int32(y * np.float32(1.44269504) - np.float32(0.5))  # truncation rounds to nearest, as y <= 0
    k = np.float32(n)
    r = (y - k * np.float32(0.693359375)) + k * np.float32(2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = (p * r * r + r) + np.float32(1.0)
    power = float_from_bits(np.int32((n + np.int32(127)) << np.int32(23)))
    inside = p * power if x == x else x
    return np.float32(0.0) if x < np.float32(-87.0) else inside
