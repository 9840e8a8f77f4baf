"""The two products of attention: queries by keys, weights by values, for a few rows and many tokens.

A score is one chain of fused multiply-adds over head_dim, an element of a sum of values one over the tokens,
both in ascending order, whatever the other rows are. So a row's bits do not depend on who shares its tile.
Numba keeps no accumulator in a register over a loop by itself, hence the LLVM code; the plain functions say
what it computes and run where the compiler is off.

Tokens come in groups of 16: for each dimension a vector of their keys, and 16 rows of values. `groups` says
where groups begin in the pool. While one is used, the lines of the group in the same place of those to come
are asked for: blocks lie all over the memory, and no CPU guesses where the next one is.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import llvmlite.binding
import numpy as np
from llvmlite import ir
from numba import types

from cupaged.kernels import simd
from cupaged.kernels.emit import FLOATS, INT, LANES, WORDS, Memory, cgutils, define, fma, splat, words

SPLIT = 256  # tokens that a row's weights are relative to the greatest of; a multiple of every block size
GROUPS = SPLIT // LANES
ROWS = 4
# rows * vectors accumulators fill half of the vector registers, of 16 lanes with AVX-512, else of 8 or 4
VECTORS = 4 if llvmlite.binding.get_host_cpu_features().get("avx512f", False) else 1

EVEN_ODD = [*range(0, 2 * LANES, 2), *range(1, 2 * LANES, 2)]  # lanes of two vectors
IN_ORDER = [half * LANES + i for i in range(LANES) for half in range(2)]  # and back


class Keys(NamedTuple):
    """Where scores [rows, SPLIT] and queries [rows, head_dim] begin, and which groups' keys are meant."""

    scores: int
    q: int
    head_dim: int  # even
    stride: int  # from one dimension of a group's keys to the next, in elements
    first: int  # group, a multiple of VECTORS
    last: int  # if odd, one more may be done; it has a place, too
    now: int  # in `groups`, where those in use begin
    ahead: int  # and those to come


class Values(NamedTuple):
    """Where sums [rows, stride] and weights [rows, SPLIT] begin, and which tokens' values are meant."""

    sums: int
    stride: int
    weights: int
    head_dim: int
    begin: int
    end: int
    now: int
    ahead: int


def score_keys(scores: Any, q: Any, pool: Any, groups: Any, at: Keys, rows: int) -> None:
    """Set the scores of groups of tokens to q . k, for at most ROWS rows."""
    queries = q[at.q : at.q + rows * at.head_dim].reshape(rows, at.head_dim)
    for group in range(at.first, at.last):
        total = np.zeros((rows, LANES), np.float32)
        for d in range(at.head_dim):
            keys = simd.load(pool, groups[at.now + group] + d * at.stride)
            total = simd.fma(queries[:, d, None], keys, total)
        for i in range(rows):
            simd.store(scores, at.scores + i * SPLIT + group * LANES, total[i])


def add_values(sums: Any, weights: Any, pool: Any, groups: Any, at: Values, rows: int) -> None:
    """Add the weighted values of tokens to the sums, in whole vectors of columns, for at most ROWS rows."""
    for i in range(rows):
        for token in range(at.begin, at.end):
            value = groups[at.now + token // LANES] + token % LANES * at.head_dim
            weight = simd.splat(weights[at.weights + i * SPLIT + token])
            for d in range(0, at.head_dim - LANES + 1, LANES):
                to = at.sums + i * at.stride + d
                simd.store(sums, to, simd.fma(weight, simd.load(pool, value + d), simd.load(sums, to)))


@contextmanager
def _loop(builder: Any, begin: Any, end: Any, step: int = 1) -> Iterator[Any]:
    """Emit a loop that LLVM leaves as it is: its body is long, and unrolled it is not faster."""
    before = builder.block
    head, body, done = (builder.append_basic_block(f"loop.{name}") for name in ("head", "body", "done"))
    builder.branch(head)
    builder.position_at_end(head)
    index = builder.phi(INT)
    index.add_incoming(begin, before)
    builder.cbranch(builder.icmp_signed("<", index, end), body, done)
    builder.position_at_end(body)
    yield index
    index.add_incoming(builder.add(index, INT(step)), builder.block)
    module = builder.module
    loop = module.add_metadata([module.add_metadata([ir.MetaDataString(module, "llvm.loop.unroll.disable")])])
    if len(loop.operands) == 1:  # LLVM knows a loop's node by itself being the first operand
        loop.operands = (loop, *loop.operands)
    builder.branch(head).set_metadata("llvm.loop", loop)
    builder.position_at_end(done)


def _add_products(builder: Any, sums: list[Any], x: list[Any], columns: list[Any]) -> None:
    """Emit sums[i, j] += x[i] * columns[j]."""
    for i, value in enumerate(x):
        same = splat(builder, value)
        for total, column in zip(sums[i * len(columns) :], columns, strict=False):
            builder.store(fma(builder, same, column, builder.load(total)), total)


def _place(builder: Any, start: Any, i: int, stride: Any, more: Any) -> Any:
    return builder.add(builder.add(start, builder.mul(INT(i), stride)), more)


def _emit_tiles(
    builder: Any, arrays: tuple[Memory, ...], at: Keys, rows: int, groups: tuple[Any, Any], vectors: int
) -> None:
    """Emit the scores of groups [first, last), some at a time."""
    scores, q, pool, places = arrays
    sums = [cgutils.alloca_once(builder, FLOATS) for _ in range(rows * vectors)]
    with _loop(builder, *groups, vectors) as first:
        for total in sums:
            builder.store(ir.Constant(FLOATS, None), total)
        each = [builder.add(first, INT(j)) for j in range(vectors)]
        now, ahead = (
            [places.load_one(builder.add(start, group)) for group in each] for start in (at.now, at.ahead)
        )
        if pool.half:  # a line has two vectors: of one group, or one each of two
            odd = [builder.mul(builder.and_(group, INT(1)), at.stride) for group in each]
            ahead = [builder.add(start, more) for start, more in zip(ahead, odd, strict=True)]
        with _loop(builder, INT(0), at.head_dim, 2) as even:
            for d in (even, builder.add(even, INT(1))):
                offset = builder.mul(d, at.stride)
                if d is even or not pool.half:
                    for start in ahead:
                        pool.prefetch(builder.add(start, offset))
                columns = [pool.load(builder.add(start, offset)) for start in now]
                x = [q.load_one(_place(builder, at.q, i, at.head_dim, d)) for i in range(rows)]
                _add_products(builder, sums, x, columns)
        to = builder.add(at.scores, builder.mul(first, INT(LANES)))
        for k, total in enumerate(sums):
            place = builder.add(to, INT(k // vectors * SPLIT + k % vectors * LANES))
            scores.store(place, builder.load(total))


def _emit_scores(builder: Any, arrays: tuple[Memory, ...], at: Keys, rows: int) -> None:
    few = max(1, VECTORS // 2)
    count = builder.add(builder.sub(at.last, at.first), INT(few - 1))
    rest = builder.add(at.first, builder.and_(count, INT(-VECTORS)))
    _emit_tiles(builder, arrays, at, rows, (at.first, rest), VECTORS)
    if few < VECTORS:
        _emit_tiles(builder, arrays, at, rows, (rest, at.last), few)


def _load_columns(builder: Any, pool: Memory, start: Any, vectors: int) -> list[Any]:
    """Emit vectors of columns; of halves the even ones of two, then the odd: so they take one instruction."""
    if not pool.half or vectors == 1:
        return [pool.load(builder.add(start, INT(j * LANES))) for j in range(vectors)]
    columns = []
    for j in range(0, vectors, 2):
        pair = builder.load(pool.at(builder.add(start, INT(j * LANES)), WORDS))
        pair.align = 2
        columns += [builder.shl(pair, words(16)), builder.and_(pair, words(-1 << 16))]
    return [builder.bitcast(column, FLOATS) for column in columns]


def _shuffle_pairs(builder: Any, vectors: list[Any], lanes: list[int]) -> list[Any]:
    """Emit, of every two vectors, the first half of `lanes` of both, then the second half."""
    return [
        builder.shuffle_vector(*vectors[j : j + 2], ir.Constant(WORDS, half))
        for j in range(0, len(vectors), 2)
        for half in (lanes[:LANES], lanes[LANES:])
    ]


def _emit_columns(
    builder: Any, arrays: tuple[Memory, ...], at: Values, rows: int, column: Any, vectors: int
) -> None:
    """Emit the sums of a few vectors of columns."""
    out, weights, pool, groups = arrays
    where = [
        _place(builder, at.sums, i, at.stride, builder.add(column, INT(j * LANES)))
        for i in range(rows)
        for j in range(vectors)
    ]
    found = [out.load(index) for index in where]
    parted = pool.half and vectors > 1
    if parted:
        found = _shuffle_pairs(builder, found, EVEN_ODD)
    sums = [cgutils.alloca_once_value(builder, x) for x in found]
    first = builder.sdiv(at.begin, INT(LANES))
    last = builder.sdiv(builder.add(at.end, INT(LANES - 1)), INT(LANES))
    with _loop(builder, first, last) as group:
        now, ahead = (
            builder.add(groups.load_one(builder.add(start, group)), column) for start in (at.now, at.ahead)
        )
        token = builder.mul(group, INT(LANES))
        low, high = builder.sub(at.begin, token), builder.sub(at.end, token)
        low = builder.select(builder.icmp_signed("<", low, INT(0)), INT(0), low)
        high = builder.select(builder.icmp_signed(">", high, INT(LANES)), INT(LANES), high)
        own = builder.add(at.weights, token)
        with _loop(builder, low, high) as t:
            offset = builder.mul(t, at.head_dim)
            for j in range(0, vectors, 2 if pool.half else 1):  # a line has two vectors of halves
                pool.prefetch(_place(builder, ahead, j, INT(LANES), offset))
            columns = _load_columns(builder, pool, builder.add(now, offset), vectors)
            x = [weights.load_one(_place(builder, own, i, INT(SPLIT), t)) for i in range(rows)]
            _add_products(builder, sums, x, columns)
    found = [builder.load(total) for total in sums]
    if parted:
        found = _shuffle_pairs(builder, found, IN_ORDER)
    for index, total in zip(where, found, strict=True):
        out.store(index, total)


def _emit_values(builder: Any, arrays: tuple[Memory, ...], at: Values, rows: int) -> None:
    column = INT(0)
    for vectors in sorted({VECTORS, 1}, reverse=True):
        step = INT(vectors * LANES)
        end = builder.mul(builder.sdiv(at.head_dim, step), step)
        with _loop(builder, column, end, vectors * LANES) as first:
            _emit_columns(builder, arrays, at, rows, first, vectors)
        column = end


def _define_product(function: Any, places: Any, emit: Any) -> None:
    @define(function, types.none, types.Array, types.Array, types.Array, types.int64[::1], places, types.intp)
    def write(builder: Any, *values: Any) -> None:
        *arrays, at, rows = values
        done = builder.append_basic_block("done")
        switch = builder.switch(rows, done)
        for count in range(1, ROWS + 1):
            block = builder.append_basic_block(f"rows{count}")
            switch.add_case(INT(count), block)
            builder.position_at_end(block)
            emit(builder, arrays, at, count)
            builder.branch(done)
        builder.position_at_end(done)


_define_product(score_keys, Keys, _emit_scores)
_define_product(add_values, Values, _emit_values)
