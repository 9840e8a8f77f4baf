"""The inner loop of the linear layers: a few rows of x times a few blocks of 16 outputs.

The types of x and weight choose the arithmetic, the same for every number of rows:

x        weight   each output is
float32  float32  one chain of fused multiply-adds, ascending
float32  bf16     the same chain: a weight becomes float32 by a shift
bf16     bf16     one chain of dot products of pairs, ascending (vdpbf16ps)

bfloat16 is passed as uint16. A tile begins with `initial`, which is the bias, or `out` itself where the
inputs are taken in parts.
"""

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils as _cgutils
from numba.extending import intrinsic, overload

from cupaged.kernels import intrinsics
from cupaged.kernels.bits import load
from cupaged.kernels.intrinsics import FLOATS, HAS_AVX512, INT, LANES, WORDS

# ruff: noqa: ARG001  (Numba's overloads repeat the parameters of what they stand for)

cgutils: Any = _cgutils  # untyped
# Rows and blocks of a tile: rows * blocks accumulators leave room for the weights in the vector registers.
MOST_ROWS, MOST_BLOCKS = (8, 3) if HAS_AVX512 else (4, 1)
FETCHING_ROWS = 4  # from which on a tile computes long enough to fetch the next one's weights meanwhile
_ROWS = [rows for rows in (8, 4, 2, 1) if rows <= MOST_ROWS]
_BLOCKS = sorted({MOST_BLOCKS, 1}, reverse=True)


class Places(NamedTuple):
    """Where a tile lies in its flat arrays, and from one row or block to the next, in elements."""

    out: int
    out_stride: int
    initial: int
    initial_stride: int  # 0 if all rows begin alike
    x: int
    x_stride: int
    weight: int  # of the first block's first input
    block_stride: int
    ahead: int  # weights that will be wanted next


def multiply_tile(
    out: Any, initial: Any, x: Any, weight: Any, at: Places, rows: int, blocks: int, depth: int
) -> None:
    """Set out[rows, blocks * LANES] to initial + x[rows, depth] @ weight, of a size in _ROWS and _BLOCKS."""
    pair = 1 if weight.dtype == np.float32 else 2
    for i in range(rows):
        for j in range(blocks * LANES):
            out[at.out + i * at.out_stride + j] = initial[at.initial + i * at.initial_stride + j]
        for j in range(blocks):
            for k in range(depth):
                value = load(x[at.x + i * at.x_stride + k])
                start = at.weight + j * at.block_stride + k // pair * pair * LANES + k % pair
                for lane in range(LANES):
                    place = at.out + i * at.out_stride + j * LANES + lane
                    out[place] += value * load(weight[start + lane * pair])


class _Tile:
    """Writes the LLVM code of one tile."""

    def __init__(self, builder: Any, pointers: tuple[Any, Any, Any, Any], places: list[Any]) -> None:
        self.builder = builder
        self.out, self.initial, self.x, self.weight = pointers
        self.at = Places(*places)
        self.pair = 1 if self.weight.type.pointee == ir.FloatType() else 2
        self.dot = self.x.type.pointee == ir.IntType(16)

    def load(self, base: Any, index: Any, kind: Any) -> Any:
        """Load a number or vector `kind` from element `index` on."""
        place = self.builder.bitcast(self.builder.gep(base, [index]), kind.as_pointer())
        value = self.builder.load(place)
        value.align = 2 if self.dot and base is self.x else 4
        return value

    def emit(self, rows: int, blocks: int, depth: Any) -> None:
        builder, at = self.builder, self.at
        sums = []
        for i in range(rows):
            row = builder.add(at.initial, builder.mul(INT(i), at.initial_stride))
            for j in range(blocks):
                first = self.load(self.initial, builder.add(row, INT(j * LANES)), FLOATS)
                sums.append(cgutils.alloca_once_value(builder, first))
        steps = builder.udiv(depth, INT(self.pair)) if self.pair > 1 else depth
        with cgutils.for_range(builder, steps) as loop:
            ahead = builder.add(at.ahead, builder.mul(loop.index, INT(LANES * self.pair)))
            for j in range(blocks if rows >= FETCHING_ROWS else 0):
                place = builder.add(ahead, builder.mul(INT(j), at.block_stride))
                intrinsics.prefetch(builder, builder.gep(self.weight, [place]))
            intrinsics.keep_loop(builder)
            self.step(sums, rows, blocks, loop.index, whole=True)
        if self.pair > 1:
            odd = builder.icmp_unsigned("!=", builder.urem(depth, INT(self.pair)), INT(0))
            with builder.if_then(odd, likely=False):
                self.step(sums, rows, blocks, steps, whole=False)
        for i in range(rows):
            row = builder.add(at.out, builder.mul(INT(i), at.out_stride))
            for j in range(blocks):
                place = builder.gep(self.out, [builder.add(row, INT(j * LANES))])
                total = builder.load(sums[i * blocks + j])
                builder.store(total, builder.bitcast(place, FLOATS.as_pointer())).align = 4

    def step(self, sums: list[Any], rows: int, blocks: int, index: Any, *, whole: bool) -> None:
        """Add the products of one input, or of a pair; of its first one only, if it is not whole."""
        builder, at = self.builder, self.at
        start = builder.add(at.weight, builder.mul(index, INT(LANES * self.pair)))
        kind = FLOATS if self.pair == 1 else WORDS
        weights = [
            self.load(self.weight, builder.add(start, builder.mul(INT(j), at.block_stride)), kind)
            for j in range(blocks)
        ]
        first = builder.mul(index, INT(self.pair))
        for i in range(rows):
            here = builder.add(builder.add(at.x, builder.mul(INT(i), at.x_stride)), first)
            for total, weight in zip(sums[i * blocks :], weights, strict=False):
                builder.store(self.add(builder.load(total), here, weight, whole=whole), total)

    def add(self, total: Any, here: Any, weight: Any, *, whole: bool) -> Any:
        """Return the total and the product of the inputs at `here`."""
        builder = self.builder
        if self.dot:
            pair = self.load(self.x, here, ir.IntType(32 if whole else 16))
            word = pair if whole else builder.zext(pair, ir.IntType(32))
            return intrinsics.dot_pairs(builder, total, weight, intrinsics.splat(builder, word))
        x = intrinsics.splat(builder, self.load(self.x, here, ir.FloatType()))
        if self.pair == 1:
            return intrinsics.fma(builder, x, weight, total)
        total = intrinsics.fma(builder, x, intrinsics.first_of_pairs(builder, weight), total)
        if not whole:
            return total
        x = intrinsics.splat(builder, self.load(self.x, builder.add(here, INT(1)), ir.FloatType()))
        return intrinsics.fma(builder, x, intrinsics.second_of_pairs(builder, weight), total)


def _type_tile(
    _context: Any,
    out: Any,
    initial: Any,
    x: Any,
    weight: Any,
    at: Any,
    rows: Any,
    blocks: Any,
    depth: Any,
) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointers = tuple(
            context.make_array(signature.args[i])(context, builder, args[i]).data for i in range(4)
        )
        places = [
            context.cast(builder, builder.extract_value(args[4], i), kind, types.intp)
            for i, kind in enumerate(signature.args[4])
        ]
        tile = _Tile(builder, pointers, places)
        done = builder.append_basic_block("done")
        size = builder.add(builder.mul(args[5], INT(MOST_BLOCKS + 1)), args[6])
        switch = builder.switch(size, done)
        for rows in _ROWS:
            for blocks in _BLOCKS:
                block = builder.append_basic_block(f"rows{rows}blocks{blocks}")
                switch.add_case(INT(rows * (MOST_BLOCKS + 1) + blocks), block)
                builder.position_at_end(block)
                tile.emit(rows, blocks, args[7])
                builder.branch(done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    return types.void(out, initial, x, weight, at, types.intp, types.intp, types.intp), generate


_multiply_tile: Any = intrinsic(_type_tile)


@overload(multiply_tile, strict=False)
def _overload_tile(
    out: Any, initial: Any, x: Any, weight: Any, at: Any, rows: Any, blocks: Any, depth: Any
) -> Any:
    return lambda out, initial, x, weight, at, rows, blocks, depth: _multiply_tile(
        out, initial, x, weight, at, rows, blocks, depth
    )
