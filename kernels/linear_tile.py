"""The inner loop of the linear layers: a few rows of x times a panel, which is a few blocks of 16 outputs.

The types of x and weight choose the arithmetic, the same for every number of rows:

x        weight      each output is
float32  float32     one chain of fused multiply-adds, ascending, from the bias on
float32  bf16        the same chain: a weight becomes float32 by a shift
bf16     bf16        one chain of dot products of pairs, ascending, from the bias on (vdpbf16ps)
float32  int8        a chain of fused multiply-adds, ascending, times the output's scale, plus the bias
bf16     int8        a chain of dot products of pairs, ascending, times the scale, plus the bias
uint8    int8 quads  an integer, times the scales of row and output, plus the bias

bfloat16 is passed as uint16. A byte of x is 128 more than what it stands for. Where the inputs are taken in
parts, sums wait in `out`, in their 32 bits.
"""

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

from cupaged.kernels import intrinsics
from cupaged.kernels.emit import FLOATS, INT, LANES, SECOND, STREAMED, WORDS, cgutils, fma, prefetch, splat
from cupaged.kernels.intrinsics import HAS_AVX512

# ruff: noqa: ARG001  (Numba's overloads repeat the parameters of what they stand for)

# Rows and blocks of a tile: rows * BLOCKS accumulators leave room for the weights in the vector registers.
MOST_ROWS, BLOCKS = (8, 3) if HAS_AVX512 else (4, 1)
WIDTH = BLOCKS * LANES  # outputs of a panel, whose weights for a group of inputs lie together
LONG_ROWS = 4  # from which on a tile computes long enough to fetch the next one's weights meanwhile
NEAR = 8192  # bytes; how far ahead of a tile of fewer rows weights are fetched
LINE = 64  # bytes that are fetched at a time
_BYTE, _WORD, _FLOAT = ir.IntType(8), ir.IntType(32), ir.FloatType()


class Places(NamedTuple):
    """Where a tile lies, in elements of the flat arrays; which part of the inputs it takes."""

    row: int
    column: int
    width: int  # outputs from `column` on, of which there may be fewer than the blocks have
    out_stride: int
    x: int  # of the first row's first input
    x_stride: int
    weight: int  # of the panel's first input
    ahead: int  # weights that will be wanted next
    is_first: bool
    is_last: bool


def multiply_tile(out: Any, x: Any, weight: Any, terms: Any, at: Places, rows: int, depth: int) -> None:
    """Set out[rows, WIDTH] to x[rows, depth] @ weight, of at most MOST_ROWS rows.

    terms: (bias,); of int8 pairs (bias, scales); of quads (bias, scales, begin, row_scales), where begin is
    the int32 that makes up for the 128 in x. All but the last are by output, float32.
    """
    bias, scales, begin, row_scales = (*terms, None, None, None)[:4]
    kind: Any = np.float32 if begin is None else np.int32
    sums, zeros = out.view(kind), np.zeros(WIDTH, np.float32)
    group = 4 // x.itemsize if begin is not None else 1 if weight.itemsize == 4 else 2
    lanes = np.arange(min(WIDTH, at.width))
    columns, weights = at.column + lanes, at.weight + lanes * group
    for i in range(rows):
        places = (at.row + i) * at.out_stride + columns
        initial = bias[columns] if scales is None else zeros[lanes] if begin is None else begin[columns]
        total = initial if at.is_first else sums[places]
        for k in range(depth):
            factor = weight[weights + k // group * WIDTH * group + k % group]
            total = total + _numbers(x[at.x + i * at.x_stride + k][None], kind) * _numbers(factor, kind)
        sums[places] = total
        if at.is_last and scales is not None:
            factor = scales[columns] if row_scales is None else row_scales[at.row + i] * scales[columns]
            out[places] = total.astype(np.float32) * factor + bias[columns]


def _numbers(x: Any, kind: Any) -> Any:
    return (x.astype(np.uint32) << 16).view(np.float32) if x.dtype == np.uint16 else x.astype(kind)


class _Tile:
    """Writes the LLVM code of one tile."""

    def __init__(self, builder: Any, arrays: list[Any], terms: list[Any], at: Places) -> None:
        self.builder = builder
        self.out, self.x, self.weight = arrays
        self.bias, self.scales, self.begin, self.row_scales = (*terms, None, None, None)[:4]
        self.at = at
        kind = self.weight.type.pointee
        self.is_float, self.is_byte = kind == _FLOAT, kind == _BYTE
        self.group = 1 if self.is_float else 2 if self.begin is None else 4
        self.step_size = WIDTH * self.group  # weights of a group of inputs
        self.sum = FLOATS if self.begin is None else WORDS

    def load(self, base: Any, index: Any, kind: Any, align: int) -> Any:
        """Load a number or vector `kind` from element `index` on."""
        value = self.builder.load(self.place(base, index, kind))
        value.align = align
        return value

    def place(self, base: Any, index: Any, kind: Any) -> Any:
        return self.builder.bitcast(self.builder.gep(base, [index]), kind.as_pointer())

    def emit(self, rows: int, depth: Any) -> None:
        """Begin, add all products, and put the sums to where they belong."""
        builder = self.builder
        sums = self.begin_sums(rows)
        steps = builder.udiv(depth, INT(self.group)) if self.group > 1 else depth
        with cgutils.for_range(builder, steps) as loop:
            self.fetch(rows, loop.index, steps)
            intrinsics.keep_loop(builder)
            self.step(sums, rows, loop.index, whole=True)
        if self.group == 2:
            odd = builder.trunc(depth, ir.IntType(1))
            with builder.if_then(odd, likely=False):
                self.step(sums, rows, steps, whole=False)
        self.end_sums(sums, rows)

    def fetch(self, rows: int, index: Any, steps: Any) -> None:
        """Ask for the weights that will be wanted after so many steps; where these end, `ahead` begins."""
        builder, at = self.builder, self.at
        num_bytes = self.step_size * (1 if self.is_byte else 4 // self.group)
        place, cache = builder.add(at.ahead, builder.mul(index, INT(self.step_size))), SECOND
        if rows < LONG_ROWS:
            cache = STREAMED  # no row wants them again
            later = builder.add(index, INT(NEAR // num_bytes))
            beyond = builder.sub(later, steps)
            is_here = builder.icmp_signed("<", beyond, INT(0))
            base, step = (
                builder.select(is_here, *values) for values in ((at.weight, at.ahead), (later, beyond))
            )
            place = builder.add(base, builder.mul(step, INT(self.step_size)))
        for offset in range(0, num_bytes, LINE):
            element = builder.add(place, INT(offset * self.step_size // num_bytes))
            prefetch(builder, builder.gep(self.weight, [element]), cache)

    def begin_sums(self, rows: int) -> list[Any]:
        """Return the accumulators: of a first part they begin anew, else with what waits in `out`."""
        builder = self.builder
        sums = [cgutils.alloca_once(builder, self.sum) for _ in range(rows * BLOCKS)]
        with builder.if_else(self.at.is_first) as (anew, waiting):
            with anew:
                for j in range(BLOCKS):
                    start = self.first_sum(j)
                    for i in range(rows):
                        builder.store(start, sums[i * BLOCKS + j])
            with waiting:
                for n, total in enumerate(sums):
                    kept = intrinsics.load_part(builder, *self.outputs(n // BLOCKS, n % BLOCKS))
                    builder.store(builder.bitcast(kept, self.sum), total)
        return sums

    def first_sum(self, block: int) -> Any:
        """Return what each row's sum begins with."""
        base = self.bias if self.scales is None else self.begin
        return ir.Constant(FLOATS, None) if base is None else self.by_output(base, block, self.sum)

    def by_output(self, base: Any, block: int, kind: Any) -> Any:
        """Load what there is one of for each output."""
        return self.load(base, self.builder.add(self.at.column, INT(block * LANES)), kind, 4)

    def outputs(self, row: int, block: int) -> tuple[Any, Any]:
        """Return where the outputs of a row and block are, and how many of them exist."""
        builder, at = self.builder, self.at
        first = builder.add(builder.mul(builder.add(at.row, INT(row)), at.out_stride), at.column)
        count = builder.trunc(builder.sub(at.width, INT(block * LANES)), _WORD)
        return self.place(self.out, builder.add(first, INT(block * LANES)), FLOATS), count

    def end_sums(self, sums: list[Any], rows: int) -> None:
        """Scale the sums, if there is anything to scale them by and they are complete; store them."""
        builder = self.builder
        if self.scales is not None:
            with builder.if_then(self.at.is_last):
                for j in range(BLOCKS):
                    scales, bias = (self.by_output(base, j, FLOATS) for base in (self.scales, self.bias))
                    for i in range(rows):
                        total = sums[i * BLOCKS + j]
                        value = self.scaled(builder.load(total), i, scales, bias)
                        builder.store(builder.bitcast(value, self.sum), total)
        for n, total in enumerate(sums):
            pointer, count = self.outputs(n // BLOCKS, n % BLOCKS)
            intrinsics.store_part(builder, builder.bitcast(builder.load(total), FLOATS), pointer, count)

    def scaled(self, total: Any, row: int, scales: Any, bias: Any) -> Any:
        builder = self.builder
        if self.row_scales is not None:
            scale = self.load(self.row_scales, builder.add(self.at.row, INT(row)), _FLOAT, 4)
            scales = builder.fmul(splat(builder, scale), scales)
            total = builder.sitofp(total, FLOATS)
        return builder.fadd(builder.fmul(total, scales), bias)

    def step(self, sums: list[Any], rows: int, index: Any, *, whole: bool) -> None:
        """Add the products of one group of inputs; of its first one only, if it is not whole."""
        builder, at = self.builder, self.at
        start = builder.add(at.weight, builder.mul(index, INT(self.step_size)))
        weights = [self.weights(builder.add(start, INT(j * LANES * self.group))) for j in range(BLOCKS)]
        first = builder.mul(index, INT(self.group))
        for i in range(rows):
            here = builder.add(builder.add(at.x, builder.mul(INT(i), at.x_stride)), first)
            for total, weight in zip(sums[i * BLOCKS :], weights, strict=False):
                builder.store(self.add(builder.load(total), here, weight, whole=whole), total)

    def weights(self, index: Any) -> Any:
        """Load the weights of a group of inputs, in the form that `add` takes."""
        builder, is_dot = self.builder, self.x.type.pointee != _FLOAT
        if self.is_float:
            return [self.load(self.weight, index, FLOATS, 4)]
        if self.is_byte and self.begin is None:
            pairs = self.load(self.weight, index, ir.VectorType(_BYTE, 2 * LANES), 1)
            convert = intrinsics.halves_of_byte_pairs if is_dot else intrinsics.floats_of_byte_pairs
            return convert(builder, pairs)
        words = self.load(self.weight, index, WORDS, 1 if self.is_byte else 4)
        return words if is_dot else intrinsics.floats_of_pairs(builder, words)

    def add(self, total: Any, here: Any, weight: Any, *, whole: bool) -> Any:
        """Return the total and the products of the inputs from `here` on."""
        builder, kind = self.builder, self.x.type.pointee
        if kind == _FLOAT:
            for k, one in enumerate(weight if whole else weight[:1]):
                x = self.load(self.x, builder.add(here, INT(k)), _FLOAT, 4)
                total = fma(builder, splat(builder, x), one, total)
            return total
        group = self.load(self.x, here, _WORD if whole else ir.IntType(16), 1 if kind == _BYTE else 2)
        x = splat(builder, group if whole else builder.zext(group, _WORD))
        if kind == _BYTE:
            return intrinsics.dot_quads(builder, total, x, weight)
        return intrinsics.dot_pairs(builder, total, weight, x)


def _type_tile(
    _context: Any, out: Any, x: Any, weight: Any, terms: Any, at: Any, rows: Any, depth: Any
) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def data(kind: Any, array: Any) -> Any:
            return context.make_array(kind)(context, builder, array).data

        arrays = [data(signature.args[i], args[i]) for i in range(3)]
        by_output = [
            data(kind, builder.extract_value(args[3], i)) for i, kind in enumerate(signature.args[3])
        ]
        places = [
            context.cast(builder, builder.extract_value(args[4], i), kind, wanted)
            for i, (kind, wanted) in enumerate(zip(signature.args[4], _PLACES, strict=True))
        ]
        tile = _Tile(builder, arrays, by_output, Places(*places))
        done = builder.append_basic_block("done")
        switch = builder.switch(args[5], done)
        for rows in range(1, MOST_ROWS + 1):
            block = builder.append_basic_block(f"rows{rows}")
            switch.add_case(INT(rows), block)
            builder.position_at_end(block)
            tile.emit(rows, args[6])
            builder.branch(done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    return types.void(out, x, weight, terms, at, types.intp, types.intp), generate


_PLACES = [types.boolean if name.startswith("is_") else types.intp for name in Places._fields]
_multiply_tile: Any = intrinsic(_type_tile)


@overload(multiply_tile, strict=False)
def _overload_tile(out: Any, x: Any, weight: Any, terms: Any, at: Any, rows: Any, depth: Any) -> Any:
    return lambda out, x, weight, terms, at, rows, depth: _multiply_tile(
        out, x, weight, terms, at, rows, depth
    )
