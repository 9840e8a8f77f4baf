"""Vectors of 16 floats in compiled code: `a + b`, `fma(a, b, c)`, `exp(x)`, loads and stores of either type.

Code reads as if a vector were a number. LLVM makes it one register of AVX-512, two of AVX2, four of NEON;
what each lane computes is the same on all of them, and so is the order in which lanes are added. Where the
compiler is off, a vector is a NumPy array of 16 and the functions below run as they stand.

Arrays are contiguous, float32 or bfloat16 (as uint16), of any number of dimensions; `index` counts their
elements from the first one.
"""

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils as _cgutils
from numba.core.typing import templates as _templates
from numba.extending import lower_builtin as _lower_builtin
from numba.extending import models as _models
from numba.extending import register_model as _register_model

# What has no types, or not all.
cgutils: Any = _cgutils
templates: Any = _templates
models: Any = _models
register_model: Any = _register_model
lower_builtin: Any = _lower_builtin

LANES = 16

_FLOATS = ir.VectorType(ir.FloatType(), LANES)
_WORDS = ir.VectorType(ir.IntType(32), LANES)
_HALVES = ir.VectorType(ir.IntType(16), LANES)
_BITS = ir.VectorType(ir.IntType(1), LANES)

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
    taken = array.reshape(-1)[index : index + count]
    vector = np.zeros(LANES, np.float32)
    vector[:count] = taken if taken.dtype == np.float32 else (taken.astype(np.uint32) << 16).view(np.float32)
    return vector


def store(array: Any, index: Any, x: Any) -> None:
    """Set array[index : index + 16] to x, rounded to even for bfloat16."""
    store_part(array, index, LANES, x)


def store_part(array: Any, index: Any, count: Any, x: Any) -> None:
    """Set array[index : index + count] to the first lanes of x."""
    flat = array.reshape(-1)
    flat[index : index + count] = x[:count] if flat.dtype == np.float32 else _rounded(x)[:count]


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
        x = select_less(x[len(x) // 2 :], x[: len(x) // 2], x[: len(x) // 2], x[len(x) // 2 :])
    return x[0]


def prefetch(array: Any, index: Any) -> None:
    """Ask for the cache line of array[index]; nothing happens where there is no such element."""


class Vector(types.Type):
    """Numba's type of 16 floats."""

    def __init__(self) -> None:
        super().__init__(name="float32x16")


vector = Vector()


@register_model(Vector)
class _Model(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _FLOATS)


def _define(function: Callable[..., Any], result: Any, *parameters: Any) -> Callable[[Any], Any]:
    """Compile calls of `function` to what the decorated (builder, *values) writes.

    Parameters are Numba's types; types.Array stands for any contiguous one, given to the writer as _Memory.
    """
    arrays = [i for i, kind in enumerate(parameters) if kind is types.Array]

    @templates.infer_global(function)
    class Template(templates.AbstractTemplate):  # type: ignore[misc]
        def generic(self, args: Any, kws: Any) -> Any:
            if kws or len(args) != len(parameters):
                return None
            for given, wanted in zip(args, parameters, strict=True):
                if wanted is types.Array:
                    if not (isinstance(given, wanted) and given.is_c_contig and given.dtype in _LOADED):
                        return None
                elif (wanted is vector) != (given == vector):
                    return None
            exact = (a if i in arrays else p for i, (a, p) in enumerate(zip(args, parameters, strict=True)))
            return templates.signature(result, *exact)

    def decorate(write: Any) -> Any:
        @lower_builtin(function, *parameters)  # type: ignore[untyped-decorator]
        def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            given = list(args)
            for i in arrays:
                data = context.make_array(sig.args[i])(context, builder, given[i]).data
                given[i] = _Memory(builder, data, sig.args[i].dtype)
            value = write(builder, *given)
            return context.get_dummy_value() if value is None else value

        return write

    return decorate


_LOADED = (types.float32, types.uint16)


class _Memory:
    """The elements of an array, as the writers of LLVM code see them."""

    def __init__(self, builder: Any, data: Any, dtype: Any) -> None:
        self.builder = builder
        self.data = data
        self.half = dtype == types.uint16

    def at(self, index: Any, kind: Any) -> Any:
        return self.builder.bitcast(self.builder.gep(self.data, [index]), kind.as_pointer())

    def load(self, index: Any) -> Any:
        value = self.builder.load(self.at(index, _HALVES if self.half else _FLOATS))
        value.align = 2 if self.half else 4
        return _widen(self.builder, value) if self.half else value

    def store(self, index: Any, value: Any) -> None:
        value = _round(self.builder, value) if self.half else value
        self.builder.store(value, self.at(index, value.type)).align = 2 if self.half else 4


def _constant(x: float) -> Any:
    return ir.Constant(_FLOATS, [float(np.float32(x))] * LANES)


def _words(x: int) -> Any:
    return ir.Constant(_WORDS, [x] * LANES)


def _widen(builder: Any, halves: Any) -> Any:
    return builder.bitcast(builder.shl(builder.zext(halves, _WORDS), _words(16)), _FLOATS)


def _round(builder: Any, value: Any) -> Any:
    bits = builder.bitcast(value, _WORDS)
    high = builder.lshr(bits, _words(16))
    even = builder.lshr(
        builder.add(bits, builder.add(builder.and_(high, _words(1)), _words(0x7FFF))), _words(16)
    )
    nan = builder.fcmp_unordered("uno", value, value)
    return builder.trunc(builder.select(nan, builder.or_(high, _words(0x40)), even), _HALVES)


def _splat(builder: Any, value: Any, kind: Any = _FLOATS) -> Any:
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), value, ir.IntType(32)(0))
    return builder.shuffle_vector(one, one, _words(0))


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    kind = ir.FunctionType(_FLOATS, [_FLOATS] * 3)
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.fma.v16f32"), [a, b, c])


def _less(builder: Any, a: Any, b: Any, x: Any, y: Any) -> Any:
    return builder.select(builder.fcmp_ordered("<", a, b), x, y)


def _exp(builder: Any, x: Any) -> Any:
    y = _less(builder, x, _constant(_LEAST), _constant(_LEAST), x)
    shifted = _fma(builder, y, _constant(_LOG2_E), _constant(_ROUND))
    n = builder.fsub(shifted, _constant(_ROUND))
    r = _fma(builder, n, _constant(-_LN_2_LOW), _fma(builder, n, _constant(-_LN_2_HIGH), y))
    p = _constant(_EXP[0])
    for c in _EXP[1:]:
        p = _fma(builder, p, r, _constant(c))
    exponent = builder.shl(builder.bitcast(shifted, _WORDS), _words(23))
    power = builder.bitcast(builder.add(builder.bitcast(p, _WORDS), exponent), _FLOATS)
    return _less(builder, x, _constant(_LEAST), _constant(0.0), power)


def _fold(builder: Any, x: Any, combine: Callable[[Any, Any], Any]) -> Any:
    width = LANES
    while width > 1:
        width //= 2
        lower, upper = (
            builder.shuffle_vector(
                x, x, ir.Constant(ir.VectorType(ir.IntType(32), width), list(range(first, first + width)))
            )
            for first in (0, width)
        )
        x = combine(lower, upper)
    return builder.extract_element(x, ir.IntType(32)(0))


def _copy_part(builder: Any, count: Any, source: Any, target: Any, kind: Any) -> None:
    with cgutils.for_range(builder, count) as loop:
        value = builder.load(builder.gep(builder.bitcast(source, kind.as_pointer()), [loop.index]))
        builder.store(value, builder.gep(builder.bitcast(target, kind.as_pointer()), [loop.index]))


@_define(splat, vector, types.float32)
def _write_splat(builder: Any, x: Any) -> Any:
    return _splat(builder, x)


@_define(load, vector, types.Array, types.intp)
def _write_load(_builder: Any, array: Any, index: Any) -> Any:
    return array.load(index)


@_define(load_part, vector, types.Array, types.intp, types.intp)
def _write_load_part(builder: Any, array: Any, index: Any, count: Any) -> Any:
    kind = _HALVES if array.half else _FLOATS
    room = cgutils.alloca_once(builder, kind)
    builder.store(ir.Constant(kind, None), room)
    _copy_part(builder, count, array.at(index, kind.element), room, kind.element)
    value = builder.load(room)
    return _widen(builder, value) if array.half else value


@_define(store, types.none, types.Array, types.intp, vector)
def _write_store(_builder: Any, array: Any, index: Any, x: Any) -> None:
    array.store(index, x)


@_define(store_part, types.none, types.Array, types.intp, types.intp, vector)
def _write_store_part(builder: Any, array: Any, index: Any, count: Any, x: Any) -> None:
    value = _round(builder, x) if array.half else x
    room = cgutils.alloca_once(builder, value.type)
    builder.store(value, room)
    _copy_part(builder, count, room, array.at(index, value.type.element), value.type.element)


@_define(fma, vector, vector, vector, vector)
def _write_fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    return _fma(builder, a, b, c)


@_define(maximum, vector, vector, vector)
def _write_maximum(builder: Any, a: Any, b: Any) -> Any:
    return _less(builder, b, a, a, b)


@_define(select_less, vector, vector, vector, vector, vector)
def _write_select_less(builder: Any, a: Any, b: Any, x: Any, y: Any) -> Any:
    return _less(builder, a, b, x, y)


@_define(keep, vector, vector, types.int32, types.int32, vector)
def _write_keep(builder: Any, x: Any, begin: Any, end: Any, other: Any) -> Any:
    lanes = ir.Constant(_WORDS, list(range(LANES)))
    after = builder.icmp_signed("<=", _splat(builder, begin, _WORDS), lanes)
    before = builder.icmp_signed("<", lanes, _splat(builder, end, _WORDS))
    return builder.select(builder.and_(after, before), x, other)


@_define(exp, vector, vector)
def _write_exp(builder: Any, x: Any) -> Any:
    return _exp(builder, x)


@_define(sum_lanes, types.float32, vector)
def _write_sum_lanes(builder: Any, x: Any) -> Any:
    return _fold(builder, x, builder.fadd)


@_define(max_lanes, types.float32, vector)
def _write_max_lanes(builder: Any, x: Any) -> Any:
    return _fold(builder, x, lambda a, b: _less(builder, b, a, a, b))


@_define(prefetch, types.none, types.Array, types.intp)
def _write_prefetch(builder: Any, array: Any, index: Any) -> None:
    byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
    name = "llvm.prefetch.p0"
    call = cgutils.get_or_insert_function(builder.module, kind, name)
    builder.call(call, [array.at(index, ir.IntType(8)), word(0), word(3), word(1)])


@_define(abs, vector, vector)
def _write_abs(builder: Any, x: Any) -> Any:
    return builder.bitcast(builder.and_(builder.bitcast(x, _WORDS), _words(0x7FFFFFFF)), _FLOATS)


@_define(operator.neg, vector, vector)
def _write_neg(builder: Any, x: Any) -> Any:
    return builder.fneg(x)


def _define_arithmetic() -> None:
    for names, method in (
        (("add", "iadd"), "fadd"),
        (("sub", "isub"), "fsub"),
        (("mul", "imul"), "fmul"),
        (("truediv", "itruediv"), "fdiv"),
    ):
        for name in names:

            def write(builder: Any, a: Any, b: Any, method: str = method) -> Any:
                return getattr(builder, method)(a, b)

            _define(getattr(operator, name), vector, vector, vector)(write)


_define_arithmetic()
