"""Rows of floats as whole numbers of 8 bits: each number is its row's scale times -127..127.

The scale is the row's largest magnitude over 127. Of SmolLM2-135M's weights a smaller one, found by the least
squared error, which cuts the largest off, makes the perplexity worse.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

from cupaged.jit import njit, njit_inner
from cupaged.kernels.bits import float_from_bits, load
from cupaged.kernels.chunks import num_chunks
from cupaged.kernels.parallel import parallel_for

# ruff: noqa: ARG001  (Numba's overloads repeat the parameters of what they stand for)

MOST = np.float32(127)
LEAST = np.float32(1e-30)  # a row of no larger numbers is one of zeros: 127 over it must be finite
GRAIN = 1 << 16  # numbers that are worth a thread


def magnitude(x: Any) -> Any:
    """Return the bits of |x| as int32: they order as the numbers do, NaN above all."""
    return np.int32(np.array(x, np.float32).view(np.int32)[()] & 0x7FFFFFFF)


def _type_magnitude(_context: Any, _x: Any) -> Any:
    def emit(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        word = ir.IntType(32)
        return builder.and_(builder.bitcast(args[0], word), word(0x7FFFFFFF))

    return types.int32(types.float32), emit


_magnitude: Any = intrinsic(_type_magnitude)


@overload(magnitude, strict=False)
def _overload_magnitude(x: Any) -> Any:
    return lambda x: _magnitude(x)


@njit_inner
def quantize_row(row: Any, zero: int, quantized: Any) -> Any:
    """Set quantized to zero + round(row / scale), to even, and return the scale; NaN makes it NaN."""
    largest = np.int32(0)
    for k in range(row.shape[0]):
        largest = max(largest, magnitude(load(row[k])))
    most = float_from_bits(largest)
    inverse = MOST / most if most > LEAST else np.float32(0.0)
    for k in range(row.shape[0]):
        x = np.rint(load(row[k]) * inverse)
        quantized[k] = np.int32(x if x == x else np.float32(0.0)) + zero
    return most / MOST


@njit_inner
def quantize_range(x: Any, zero: int, quantized: Any, scales: Any, rows: Any) -> None:
    """Quantise the rows [first, last)."""
    for i in range(*rows):
        scales[i] = quantize_row(x[i], zero, quantized[i, : x.shape[1]])


@njit
def quantize_rows(x: Any, zero: int, quantized: Any, scales: Any) -> None:
    """Quantise the rows of x [n, width] into those of quantized, which may be wider."""
    parallel_for(quantize_range, x.shape[0], num_chunks(x.size, GRAIN), (x, zero, quantized, scales))
