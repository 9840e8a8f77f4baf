"""How functions are compiled to LLVM code that we write, and what any such code is made of.

A function's body says what it computes, and runs where the compiler is off. `define` tells Numba what to put
in place of a call: no function of its own, so nothing that would have to be inlined.
"""

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
INT = ir.IntType(64)
FLOATS = ir.VectorType(ir.FloatType(), LANES)
WORDS = ir.VectorType(ir.IntType(32), LANES)
HALVES = ir.VectorType(ir.IntType(16), LANES)
NEAREST, SECOND, STREAMED = 3, 2, 0  # caches, to prefetch; the last: near, and soon gone


class Vector(types.Type):
    """Numba's type of 16 floats."""

    def __init__(self) -> None:
        super().__init__(name="float32x16")


vector = Vector()


@register_model(Vector)
class _Model(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, FLOATS)


class Memory:
    """The elements of an array, as the writers of LLVM code see them."""

    def __init__(self, builder: Any, data: Any, dtype: Any) -> None:
        self.builder = builder
        self.data = data
        self.half = dtype == types.uint16

    def at(self, index: Any, kind: Any) -> Any:
        """Return a pointer to what lies at an element, as to something of type `kind`."""
        return self.builder.bitcast(self.builder.gep(self.data, [index]), kind.as_pointer())

    def load(self, index: Any) -> Any:
        """Return 16 elements as floats."""
        value = self.builder.load(self.at(index, HALVES if self.half else FLOATS))
        value.align = 2 if self.half else 4
        return widen(self.builder, value) if self.half else value

    def load_one(self, index: Any) -> Any:
        """Return one element as it is."""
        return self.builder.load(self.builder.gep(self.data, [index]))

    def store(self, index: Any, value: Any) -> None:
        """Set 16 elements to floats."""
        value = round_to_half(self.builder, value) if self.half else value
        self.builder.store(value, self.at(index, value.type)).align = 2 if self.half else 4

    def prefetch(self, index: Any) -> None:
        """Ask for an element's line of the cache."""
        prefetch(self.builder, self.builder.gep(self.data, [index]), NEAREST)


def define(function: Callable[..., Any], result: Any, *parameters: Any) -> Callable[[Any], Any]:
    """Compile calls of `function` to what the decorated (builder, *values) writes.

    Parameters are Numba's types, types.Array for one of floats (float32 or uint16), or a NamedTuple of
    integers. The writer gets arrays as Memory, and such a NamedTuple of values.
    """

    def match(given: Any, wanted: Any) -> Any:
        if wanted is types.Array:
            return (
                given if isinstance(given, wanted) and given.dtype in (types.float32, types.uint16) else None
            )
        if isinstance(wanted, types.Array) or wanted == vector or given == vector:
            return given if given == wanted else None
        if isinstance(wanted, type):
            return given if getattr(given, "instance_class", None) is wanted else None
        return wanted

    @templates.infer_global(function)
    class Template(templates.AbstractTemplate):  # type: ignore[misc]
        def generic(self, args: Any, kws: Any) -> Any:
            if kws or len(args) != len(parameters):
                return None
            exact = [match(*pair) for pair in zip(args, parameters, strict=True)]
            return None if None in exact else templates.signature(result, *exact)

    def convert(context: Any, builder: Any, kind: Any, wanted: Any, value: Any) -> Any:
        if isinstance(kind, types.Array):
            return Memory(builder, context.make_array(kind)(context, builder, value).data, kind.dtype)
        if isinstance(wanted, type):
            fields = (builder.extract_value(value, i) for i in range(len(kind)))
            return wanted(
                *(context.cast(builder, x, k, types.intp) for x, k in zip(fields, kind, strict=True))
            )
        return value

    general = [types.BaseTuple if isinstance(p, type) and p is not types.Array else p for p in parameters]

    def decorate(write: Any) -> Any:
        @lower_builtin(function, *general)  # type: ignore[untyped-decorator]
        def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            values = zip(sig.args, parameters, args, strict=True)
            done = write(builder, *(convert(context, builder, *value) for value in values))
            return context.get_dummy_value() if done is None else done

        return write

    return decorate


def call(builder: Any, name: str, result: Any, *args: Any) -> Any:
    """Return what LLVM's function `name` makes of the values, of the type `result`."""
    kind = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)


def prefetch(builder: Any, pointer: Any, cache: int) -> None:
    """Ask for the cache line at `pointer`, to be in NEAREST, SECOND or STREAMED; any address will do."""
    place, word = builder.bitcast(pointer, ir.IntType(8).as_pointer()), ir.IntType(32)
    call(builder, "llvm.prefetch.p0", ir.VoidType(), place, word(0), word(cache), word(1))


def constant(x: float) -> Any:
    """Return x in all lanes."""
    return ir.Constant(FLOATS, [float(np.float32(x))] * LANES)


def words(x: int) -> Any:
    """Return the int32 x in all lanes."""
    return ir.Constant(WORDS, [x] * LANES)


def splat(builder: Any, value: Any) -> Any:
    """Return a number in all lanes (vpbroadcastd; of memory it is part of the instruction that uses it)."""
    kind = ir.VectorType(value.type, LANES)
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), value, ir.IntType(32)(0))
    return builder.shuffle_vector(one, one, words(0))


def fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """Return a * b + c, rounded once (vfmadd231ps)."""
    return call(builder, f"llvm.fma.v{LANES}f32", FLOATS, a, b, c)


def widen(builder: Any, halves: Any) -> Any:
    """Return bfloat16 as float32."""
    return builder.bitcast(builder.shl(builder.zext(halves, WORDS), words(16)), FLOATS)


def round_to_half(builder: Any, value: Any) -> Any:
    """Return float32 as bfloat16, rounded to even; NaN stays NaN."""
    bits = builder.bitcast(value, WORDS)
    high = builder.lshr(bits, words(16))
    even = builder.lshr(
        builder.add(bits, builder.add(builder.and_(high, words(1)), words(0x7FFF))), words(16)
    )
    nan = builder.fcmp_unordered("uno", value, value)
    return builder.trunc(builder.select(nan, builder.or_(high, words(0x40)), even), HALVES)
