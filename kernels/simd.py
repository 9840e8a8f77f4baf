"""Vectors of 16 floats in compiled code: `a + b`, `fma(a, b, c)`, `exp(x)`, loads and stores of either type.

Code reads as if a vector were a number. LLVM makes it one register of AVX-512, two of AVX2, four of NEON;
what each lane computes is the same on all of them, and so is the order in which lanes are added. Where the
compiler is off, a vector is a NumPy array of 16 and the functions below run as they stand.

Arrays are float32 or bfloat16 (as uint16), of any number of dimensions; `index` counts elements in memory
from the array's first one.
"""

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from cupaged.kernels import emit
from cupaged.kernels.emit import vector

LANES = emit.LANES

# e**r = 1 + r + r^2 (...) for |r| <= ln(2) / 2, of the least relative error, 3e-9
_EXP = (0.00138145406, 0.00836874545, 0.0416683890, 0.166665211, 0.499999940, 1.0, 1.0)
_LOG2_E = 1.44269504
_LN_2_HIGH, _LN_2_LOW = 0.693359375, -2.12194440e-4  # the first times any exponent is exact
_ROUND = 12582912.0  # 1.5 * 2**23; adding it leaves the nearest integer in the last bits
_LEAST = -87.0


def splat(x: Any) -> Any:
    """Return x in all lanes."""
    return np.full(LANES, x, np.float32)


def load(array: Any, index: Any) -> Any:
    """Return array[index : index + 16]."""
    return load_part(array, index, LANES)


def load_part(array: Any, index: Any, count: Any) -> Any:
    """Return array[index : index + count], at most 16, and zeros behind."""
    taken = _memory(array, index + count)[index:]
    x = np.zeros(LANES, np.float32)
    x[:count] = taken if taken.dtype == np.float32 else (taken.astype(np.uint32) << 16).view(np.float32)
    return x


def store(array: Any, index: Any, x: Any) -> None:
    """Set array[index : index + 16] to x, rounded to even for bfloat16."""
    store_part(array, index, LANES, x)


def store_part(array: Any, index: Any, count: Any, x: Any) -> None:
    """Set array[index : index + count] to the first lanes of x."""
    memory = _memory(array, index + count)
    memory[index:] = x[:count] if memory.dtype == np.float32 else _rounded(x)[:count]


def _memory(array: Any, size: Any) -> Any:
    if array.flags.c_contiguous:
        return array.reshape(-1)[:size]
    return np.lib.stride_tricks.as_strided(array, (size,), (array.itemsize,))


def _rounded(x: Any) -> Any:
    bits = x.view(np.uint32).astype(np.uint64)
    high = bits >> 16
    even = (bits + 0x7FFF + (high & 1)) >> 16
    return np.where(np.isnan(x), high | 0x40, even).astype(np.uint16)


def fma(a: Any, b: Any, c: Any) -> Any:
    """Return a * b + c, rounded once."""
    return (a.astype(np.float64) * b + c).astype(np.float32)


def maximum(a: Any, b: Any) -> Any:
    """Return the greater; b where either is NaN."""
    return select_less(b, a, a, b)


def select_less(a: Any, b: Any, x: Any, y: Any) -> Any:
    """Return x where a < b, y elsewhere and where a or b is NaN."""
    return np.where(a < b, x, y)


def keep(x: Any, begin: Any, end: Any, other: Any) -> Any:
    """Return x in the lanes [begin, end), int32 that may lie outside [0, 16), and `other` elsewhere."""
    lanes = np.arange(LANES)
    return np.where((begin <= lanes) & (lanes < end), x, other)


def exp(x: Any) -> Any:
    """Return e**x for x <= 0, within 1 ulp: 1 of 0, 0 below -87, NaN of NaN."""
    y = maximum(splat(_LEAST), x)
    shifted = fma(y, splat(_LOG2_E), splat(_ROUND))
    n = shifted - splat(_ROUND)
    r = fma(n, splat(-_LN_2_LOW), fma(n, splat(-_LN_2_HIGH), y))
    p = splat(_EXP[0])
    for c in _EXP[1:]:
        p = fma(p, r, splat(c))
    power = (p.view(np.int32) + (shifted.view(np.int32) << 23)).view(np.float32)
    return select_less(x, splat(_LEAST), splat(0.0), power)


def sum_lanes(x: Any) -> Any:
    """Return the sum of the lanes: upper half to lower half, four times over."""
    while len(x) > 1:
        x = x[: len(x) // 2] + x[len(x) // 2 :]
    return x[0]


def max_lanes(x: Any) -> Any:
    """Return the greatest lane; what `maximum` gives of halves, four times over."""
    while len(x) > 1:
        x = maximum(x[: len(x) // 2], x[len(x) // 2 :])
    return x[0]


def prefetch(array: Any, index: Any) -> None:
    """Ask for the cache line of array[index]; nothing happens where there is no such element."""


def _less(builder: Any, a: Any, b: Any, x: Any, y: Any) -> Any:
    return builder.select(builder.fcmp_ordered("<", a, b), x, y)


def _fold(builder: Any, x: Any, combine: Callable[[Any, Any], Any]) -> Any:
    width = LANES
    while width > 1:
        width //= 2
        kind = ir.VectorType(ir.IntType(32), width)
        lower, upper = (
            builder.shuffle_vector(x, x, ir.Constant(kind, list(range(first, first + width))))
            for first in (0, width)
        )
        x = combine(lower, upper)
    return builder.extract_element(x, ir.IntType(32)(0))


def _copy(builder: Any, count: Any, source: Any, target: Any, kind: Any) -> None:
    with emit.cgutils.for_range(builder, count) as loop:
        value = builder.load(builder.gep(builder.bitcast(source, kind.as_pointer()), [loop.index]))
        builder.store(value, builder.gep(builder.bitcast(target, kind.as_pointer()), [loop.index]))


@emit.define(splat, vector, types.float32)
def _write_splat(builder: Any, x: Any) -> Any:
    return emit.splat(builder, x)


@emit.define(load, vector, types.Array, types.intp)
def _write_load(_builder: Any, array: Any, index: Any) -> Any:
    return array.load(index)


@emit.define(load_part, vector, types.Array, types.intp, types.intp)
def _write_load_part(builder: Any, array: Any, index: Any, count: Any) -> Any:
    kind = emit.HALVES if array.half else emit.FLOATS
    room = emit.cgutils.alloca_once(builder, kind)
    builder.store(ir.Constant(kind, None), room)
    _copy(builder, count, array.at(index, kind.element), room, kind.element)
    value = builder.load(room)
    return emit.widen(builder, value) if array.half else value


@emit.define(store, types.none, types.Array, types.intp, vector)
def _write_store(_builder: Any, array: Any, index: Any, x: Any) -> None:
    array.store(index, x)


@emit.define(store_part, types.none, types.Array, types.intp, types.intp, vector)
def _write_store_part(builder: Any, array: Any, index: Any, count: Any, x: Any) -> None:
    value = emit.round_to_half(builder, x) if array.half else x
    room = emit.cgutils.alloca_once(builder, value.type)
    builder.store(value, room)
    _copy(builder, count, room, array.at(index, value.type.element), value.type.element)


@emit.define(fma, vector, vector, vector, vector)
def _write_fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    return emit.fma(builder, a, b, c)


@emit.define(maximum, vector, vector, vector)
def _write_maximum(builder: Any, a: Any, b: Any) -> Any:
    return _less(builder, b, a, a, b)


@emit.define(select_less, vector, vector, vector, vector, vector)
def _write_select_less(builder: Any, a: Any, b: Any, x: Any, y: Any) -> Any:
    return _less(builder, a, b, x, y)


@emit.define(keep, vector, vector, types.int32, types.int32, vector)
def _write_keep(builder: Any, x: Any, begin: Any, end: Any, other: Any) -> Any:
    lanes = ir.Constant(emit.WORDS, list(range(LANES)))
    after = builder.icmp_signed("<=", emit.splat(builder, begin), lanes)
    before = builder.icmp_signed("<", lanes, emit.splat(builder, end))
    return builder.select(builder.and_(after, before), x, other)


@emit.define(exp, vector, vector)
def _write_exp(builder: Any, x: Any) -> Any:
    y = _less(builder, x, emit.constant(_LEAST), emit.constant(_LEAST), x)
    shifted = emit.fma(builder, y, emit.constant(_LOG2_E), emit.constant(_ROUND))
    n = builder.fsub(shifted, emit.constant(_ROUND))
    r = emit.fma(builder, n, emit.constant(-_LN_2_HIGH), y)
    r = emit.fma(builder, n, emit.constant(-_LN_2_LOW), r)
    p = emit.constant(_EXP[0])
    for c in _EXP[1:]:
        p = emit.fma(builder, p, r, emit.constant(c))
    exponent = builder.shl(builder.bitcast(shifted, emit.WORDS), emit.words(23))
    power = builder.bitcast(builder.add(builder.bitcast(p, emit.WORDS), exponent), emit.FLOATS)
    return _less(builder, x, emit.constant(_LEAST), emit.constant(0.0), power)


@emit.define(sum_lanes, types.float32, vector)
def _write_sum_lanes(builder: Any, x: Any) -> Any:
    return _fold(builder, x, builder.fadd)


@emit.define(max_lanes, types.float32, vector)
def _write_max_lanes(builder: Any, x: Any) -> Any:
    return _fold(builder, x, lambda a, b: _less(builder, b, a, a, b))


@emit.define(prefetch, types.none, types.Array, types.intp)
def _write_prefetch(_builder: Any, array: Any, index: Any) -> None:
    array.prefetch(index)


@emit.define(abs, vector, vector)
def _write_abs(builder: Any, x: Any) -> Any:
    return builder.bitcast(builder.and_(builder.bitcast(x, emit.WORDS), emit.words(0x7FFFFFFF)), emit.FLOATS)


@emit.define(operator.neg, vector, vector)
def _write_neg(builder: Any, x: Any) -> Any:
    return builder.fneg(x)


def _define_arithmetic(names: tuple[str, ...], method: str) -> None:
    for name in names:
        emit.define(getattr(operator, name), vector, vector, vector)(
            lambda builder, a, b: getattr(builder, method)(a, b)
        )


_define_arithmetic(("add", "iadd"), "fadd")
_define_arithmetic(("sub", "isub"), "fsub")
_define_arithmetic(("mul", "imul"), "fmul")
_define_arithmetic(("truediv", "itruediv"), "fdiv")
