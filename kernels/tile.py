"""The one inner loop of the CPU twins: a few rows of A times a few vectors of columns of B.

Each element of C is one chain of fused multiply-adds over `depth`, in ascending order, whatever the
other rows and columns are. So a row's bits do not depend on who shares its tile: linear and attention
owe their sameness to this. Numba keeps no accumulator in a vector register by itself, hence the LLVM
code; the plain functions say what it computes and run where the compiler is off.
"""

from typing import Any, NamedTuple

import llvmlite.binding
from llvmlite import ir
from numba import types
from numba.core import cgutils as _cgutils
from numba.extending import intrinsic, overload

from cupaged.jit import njit
from cupaged.kernels.bits import load

# ruff: noqa: ARG001  (Numba's overloads repeat the parameters of what they stand for)

VECTOR = 16  # floats
_AVX512 = llvmlite.binding.get_host_cpu_features().get("avx512f", False)
WIDE = 2 if _AVX512 else 1  # vectors; rows * vectors accumulators fill half of the vector registers
ROWS = 8 if _AVX512 else 4

_FLOATS = ir.VectorType(ir.FloatType(), VECTOR)
_WORDS = ir.VectorType(ir.IntType(32), VECTOR)
_HALVES = ir.VectorType(ir.IntType(16), VECTOR)
_INT = ir.IntType(64)
cgutils: Any = _cgutils  # untyped


class Places(NamedTuple):
    """Where the tiles begin in their flat arrays, and from one row to the next, in elements."""

    c: int
    c_stride: int
    a: int
    a_stride: int
    b: int
    b_stride: int


def _tile(c: Any, a: Any, b: Any, at: Places, rows: int, depth: int, columns: int) -> None:
    for i in range(rows):
        for k in range(depth):
            x = a[at.a + i * at.a_stride + k]
            for j in range(columns):
                c[at.c + i * at.c_stride + j] += x * load(b[at.b + k * at.b_stride + j])


def wide_tile(c: Any, a: Any, b: Any, at: Places, rows: int, depth: int) -> None:
    """Do C[rows, WIDE * VECTOR] += A[rows, depth] @ B for at most ROWS rows."""
    _tile(c, a, b, at, rows, depth, WIDE * VECTOR)


def vector_tile(c: Any, a: Any, b: Any, at: Places, rows: int, depth: int) -> None:
    """Do C[rows, VECTOR] += A[rows, depth] @ B for at most ROWS rows."""
    _tile(c, a, b, at, rows, depth, VECTOR)


class _Emitter:
    """Writes the LLVM code of one tile for each number of rows."""

    def __init__(self, builder: Any, pointers: tuple[Any, Any, Any], places: list[Any], depth: Any) -> None:
        self.builder = builder
        self.c, self.a, self.b = pointers
        self.at = Places(*places)
        self.depth = depth
        kind = ir.FunctionType(_FLOATS, [_FLOATS] * 3)
        self.fma = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{VECTOR}f32")

    def vector_at(self, base: Any, index: Any, kind: Any) -> Any:
        pointer = self.builder.gep(base, [index])
        return self.builder.bitcast(pointer, kind.as_pointer())

    def load_floats(self, base: Any, index: Any) -> Any:
        """Load VECTOR numbers, float32 or the upper halves of them."""
        half = base.type.pointee == ir.IntType(16)
        value = self.builder.load(self.vector_at(base, index, _HALVES if half else _FLOATS))
        value.align = 2 if half else 4
        if half:
            words = self.builder.zext(value, _WORDS)
            value = self.builder.bitcast(self.builder.shl(words, ir.Constant(_WORDS, [16] * VECTOR)), _FLOATS)
        return value

    def splat(self, value: Any) -> Any:
        one = self.builder.insert_element(ir.Constant(_FLOATS, ir.Undefined), value, ir.IntType(32)(0))
        return self.builder.shuffle_vector(one, one, ir.Constant(_WORDS, [0] * VECTOR))

    def emit(self, rows: int, vectors: int) -> None:
        """C += A @ B with rows * vectors accumulators."""
        builder, at = self.builder, self.at
        where = [
            builder.add(at.c, builder.add(builder.mul(_INT(i), at.c_stride), _INT(j * VECTOR)))
            for i in range(rows)
            for j in range(vectors)
        ]
        sums = [cgutils.alloca_once_value(builder, self.load_floats(self.c, index)) for index in where]
        with cgutils.for_range(builder, self.depth) as loop:
            start = builder.add(at.b, builder.mul(loop.index, at.b_stride))
            columns = [self.load_floats(self.b, builder.add(start, _INT(j * VECTOR))) for j in range(vectors)]
            for i in range(rows):
                index = builder.add(builder.add(at.a, builder.mul(_INT(i), at.a_stride)), loop.index)
                x = self.splat(builder.load(builder.gep(self.a, [index])))
                for total, column in zip(sums[i * vectors :], columns, strict=False):
                    builder.store(builder.call(self.fma, [x, column, builder.load(total)]), total)
        for index, total in zip(where, sums, strict=True):
            builder.store(builder.load(total), self.vector_at(self.c, index, _FLOATS)).align = 4


def _create_intrinsic(vectors: int) -> Any:
    @intrinsic
    def tile(_context: Any, c: Any, a: Any, b: Any, at: Any, rows: Any, depth: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            pointers = tuple(
                context.make_array(signature.args[i])(context, builder, args[i]).data for i in range(3)
            )
            places = [
                context.cast(builder, builder.extract_value(args[3], i), kind, types.intp)
                for i, kind in enumerate(signature.args[3])
            ]
            emitter = _Emitter(builder, pointers, places, args[5])
            done = builder.append_basic_block("done")
            switch = builder.switch(args[4], done)
            for count in range(1, ROWS + 1):
                block = builder.append_basic_block(f"rows{count}")
                switch.add_case(_INT(count), block)
                builder.position_at_end(block)
                emitter.emit(count, vectors)
                builder.branch(done)
            builder.position_at_end(done)
            return context.get_dummy_value()

        return types.void(c, a, b, at, types.intp, types.intp), generate

    return tile


_wide = _create_intrinsic(WIDE)
_narrow = _create_intrinsic(1)


@overload(wide_tile, strict=False)
def _overload_wide(c: Any, a: Any, b: Any, at: Any, rows: Any, depth: Any) -> Any:
    return lambda c, a, b, at, rows, depth: _wide(c, a, b, at, rows, depth)


@overload(vector_tile, strict=False)
def _overload_vector(c: Any, a: Any, b: Any, at: Any, rows: Any, depth: Any) -> Any:
    return lambda c, a, b, at, rows, depth: _narrow(c, a, b, at, rows, depth)


@njit
def multiply_rows(c: Any, a: Any, b: Any, at: Places, rows: int, columns: int, depth: int) -> None:
    """Do C[rows, columns] += A[rows, depth] @ B[depth, columns] on flat arrays.

    Columns past the last whole vector multiply, then add: another chain, but every row's.
    """
    for i in range(0, rows, ROWS):
        few = min(ROWS, rows - i)
        j = 0
        while columns - j >= VECTOR:
            here = Places(
                at.c + i * at.c_stride + j,
                at.c_stride,
                at.a + i * at.a_stride,
                at.a_stride,
                at.b + j,
                at.b_stride,
            )
            if columns - j >= WIDE * VECTOR:
                wide_tile(c, a, b, here, few, depth)
                j += WIDE * VECTOR
            else:
                vector_tile(c, a, b, here, few, depth)
                j += VECTOR
        if j < columns:
            for row in range(i, i + few):
                for k in range(depth):
                    x = a[at.a + row * at.a_stride + k]
                    for rest in range(j, columns):
                        c[at.c + row * at.c_stride + rest] += x * load(b[at.b + k * at.b_stride + rest])
