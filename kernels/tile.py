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
from cupaged.kernels.emit import FLOATS, INT, LANES, Memory, cgutils, define, fma, splat

SPLIT = 256  # tokens that a row's weights are relative to the greatest of; a multiple of every block size
GROUPS = SPLIT // LANES
ROWS = 4
# rows * vectors accumulators fill half of the vector registers, of 16 lanes with AVX-512, else of 8 or 4
VECTORS = 4 if llvmlite.binding.get_host_cpu_features().get("avx512f", False) else 1


class Keys(NamedTuple):
    """Where scores [rows, SPLIT] and queries [rows, head_dim] begin, and which groups' keys are meant."""

    scores: int
    q: int
    head_dim: int
    stride: int  # from one dimension of a group's keys to the next, in elements
    first: int  # group
    last: int  # VECTORS are done at a time, so there may be some behind; they have a place, too
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
    keep = module.add_metadata([ir.MetaDataString(module, "llvm.loop.unroll.disable")])
    builder.branch(head).set_metadata("llvm.loop", module.add_metadata([keep]))
    builder.position_at_end(done)


def _add_products(builder: Any, sums: list[Any], x: list[Any], columns: list[Any]) -> None:
    """Emit sums[i, j] += x[i] * columns[j]."""
    for i, value in enumerate(x):
        same = splat(builder, value)
        for total, column in zip(sums[i * len(columns) :], columns, strict=False):
            builder.store(fma(builder, same, column, builder.load(total)), total)


def _place(builder: Any, start: Any, i: int, stride: Any, more: Any) -> Any:
    return builder.add(builder.add(start, builder.mul(INT(i), stride)), more)


def _emit_scores(builder: Any, arrays: tuple[Memory, ...], at: Keys, rows: int) -> None:
    scores, q, pool, groups = arrays
    sums = [cgutils.alloca_once(builder, FLOATS) for _ in range(rows * VECTORS)]
    with _loop(builder, at.first, at.last, VECTORS) as group:
        for total in sums:
            builder.store(ir.Constant(FLOATS, None), total)
        now, ahead = (
            [groups.load_one(_place(builder, start, j, INT(1), group)) for j in range(VECTORS)]
            for start in (at.now, at.ahead)
        )
        with _loop(builder, INT(0), at.head_dim) as d:
            offset = builder.mul(d, at.stride)
            for start in ahead:
                pool.prefetch(builder.add(start, offset))
            columns = [pool.load(builder.add(start, offset)) for start in now]
            x = [q.load_one(_place(builder, at.q, i, at.head_dim, d)) for i in range(rows)]
            _add_products(builder, sums, x, columns)
        first = builder.add(at.scores, builder.mul(group, INT(LANES)))
        for k, total in enumerate(sums):
            to = builder.add(first, INT(k // VECTORS * SPLIT + k % VECTORS * LANES))
            scores.store(to, builder.load(total))


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
    sums = [cgutils.alloca_once_value(builder, out.load(index)) for index in where]
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
            columns = [pool.load(_place(builder, now, j, INT(LANES), offset)) for j in range(vectors)]
            x = [weights.load_one(_place(builder, own, i, INT(SPLIT), t)) for i in range(rows)]
            _add_products(builder, sums, x, columns)
    for index, total in zip(where, sums, strict=True):
        out.store(index, builder.load(total))


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
