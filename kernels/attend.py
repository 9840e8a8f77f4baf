"""Attention of a few queries to their sequence: what one thread does of a step.

A unit's rows are its (query, head) pairs. It goes through its tokens in splits of SPLIT, counted from
position 0. A split gives each row a record: the sums of values, weighted by e**(score - m), then the sums of
weights by lanes, then m, the greatest score, in all lanes. Records are added in ascending order. What a row
does not see is skipped. So a row's arithmetic does not depend on its unit, its chunk or its batch, nor on
which thread does which split.
"""

from typing import Any, NamedTuple

import numpy as np

from cupaged.jit import njit, njit_inner
from cupaged.kernels import simd
from cupaged.kernels.attention_plan import (
    COUNT,
    END,
    FIRST,
    KV_HEAD,
    POSITION,
    SLOT,
    TOKEN,
    Heads,
    Mask,
    Plan,
    tokens_seen,
)
from cupaged.kernels.emit import LANES
from cupaged.kernels.groups import LINE, PLACES, Cache, ask_for_groups, place_groups, place_next
from cupaged.kernels.tile import GROUPS, ROWS, SPLIT, VECTORS, Keys, Values, add_values, score_keys


class Step(NamedTuple):
    """What all threads share."""

    q: Any  # float32[num_tokens, num_heads, head_dim], a head's in a row
    pool: Any  # T[num_blocks * block_stride]
    cache: Cache
    heads: Heads
    tables: Any  # int32[num_seqs, table_width]
    mask: Mask
    sinks: Any  # float32[num_heads], or [0] for none
    most: int  # rows of a unit
    partial: Any  # float32[slots, record_size]
    out: Any  # T[num_tokens, num_heads, head_dim]


class Room(NamedTuple):
    """What a thread works in."""

    groups: Any  # int64[2 * PLACES], of the split in work and of the next one
    seen: Any  # int64[2 * rows], the tokens [begin, end) of the split that each row sees
    q: Any  # float32[rows, head_dim], scaled
    scores: Any  # float32[ROWS, SPLIT], then the weights
    records: Any  # float32[2, rows, record_size], a split's and all so far


@njit_inner
def record_size(head_dim: int) -> int:
    """Return the floats of a row's record."""
    return (-(-head_dim // LANES) + 2) * LANES


@njit_inner
def soften(x: Any, softcap: Any) -> Any:
    """Return softcap * tanh(x / softcap)."""
    one = simd.splat(1.0)
    y = x / simd.splat(softcap)
    e = simd.exp(simd.splat(-2.0) * abs(y))
    t = simd.splat(softcap) * (one - e) / (one + e)
    return simd.select_less(y, simd.splat(0.0), -t, t)


@njit_inner
def find_greatest(scores: Any, at: int, begin: int, end: int, softcap: Any) -> Any:
    """Return the greatest of a row's scores of the tokens [begin, end); make others in their vectors -inf."""
    lost = simd.splat(-np.inf)
    top = lost
    for j in range(begin // LANES * LANES, end, LANES):
        s = simd.load(scores, at + j)
        if softcap > 0:
            s = soften(s, softcap)
        if j < begin or j + LANES > end:
            s = simd.keep(s, begin - j, end - j, lost)
        simd.store(scores, at + j, s)
        top = simd.maximum(top, s)
    return simd.splat(simd.max_lanes(top))


@njit_inner
def weigh_scores(scores: Any, at: int, begin: int, end: int, m: Any) -> Any:
    """Turn a row's scores of the tokens [begin, end) into weights; return their sums by lanes."""
    total = simd.splat(0.0)
    for j in range(begin // LANES * LANES, end, LANES):
        weight = simd.exp(simd.load(scores, at + j) - m)
        simd.store(scores, at + j, weight)
        total += weight
    return total


@njit_inner
def add_last_values(sums: Any, weights: Any, pool: Any, groups: Any, at: Values, rows: int) -> None:
    """Add the weighted values of tokens to the sums' columns past the last whole vector."""
    d = at.head_dim // LANES * LANES
    for i in range(rows):
        total = simd.load(sums, at.sums + i * at.stride + d)
        for token in range(at.begin, at.end):
            value = groups[at.now + token // LANES] + token % LANES * at.head_dim + d
            weight = simd.splat(weights[at.weights + i * SPLIT + token])
            total = simd.fma(weight, simd.load_part(pool, value, at.head_dim - d), total)
        simd.store(sums, at.sums + i * at.stride + d, total)


@njit_inner
def rows_together(row: int, rows: int, group: int) -> int:
    """Return how many rows from `row` on share a tile: those of one query, which see the same, if not few."""
    if group <= ROWS // 2:
        return min(ROWS, rows - row)
    tiles = -(-group // ROWS)
    return min(-(-group // tiles), group - row % group)


@njit_inner
def attend_rows(
    pool: Any,
    head_dim: int,
    block_size: int,
    softcap: Any,
    room: Room,
    first: int,
    few: int,
    records: Any,
    at: int,
    now: int,
    ahead: int,
) -> None:
    """Set the records of a few rows for one split; those of all rows begin at records[at]."""
    seen, scores, last, size = room.seen, room.scores, first + few, record_size(head_dim)
    low, high, begin, end = SPLIT, 0, 0, SPLIT  # any row sees [low, high), all see [begin, end)
    for row in range(first, last):
        low, high = min(low, seen[2 * row]), max(high, seen[2 * row + 1])
        begin, end = max(begin, seen[2 * row]), min(end, seen[2 * row + 1])
    if low >= high:
        return
    alone = 0 if (begin, end) == (low, high) else few  # rows that see more than all do
    if begin >= end:
        begin = end = SPLIT
    tile, tiles = low // LANES // VECTORS * VECTORS, (high + LANES - 1) // LANES
    keys = Keys(0, first * head_dim, head_dim, block_size, tile, tiles, now, ahead)
    score_keys(scores, room.q, pool, room.groups, keys, few)
    for row in range(first, last):
        m = find_greatest(scores, (row - first) * SPLIT, seen[2 * row], seen[2 * row + 1], softcap)
        simd.store(records, at + (row + 1) * size - LANES, m)
    for row in range(first, last):  # all over again, for the latency of the above is long
        record, tail = at + row * size, at + (row + 1) * size - 2 * LANES
        m = simd.load(records, tail + LANES)
        total = weigh_scores(scores, (row - first) * SPLIT, seen[2 * row], seen[2 * row + 1], m)
        simd.store(records, tail, total)
        for j in range(record, tail, LANES):
            simd.store(records, j, simd.splat(0.0))
    for step in range(2 * alone + 1):  # each row alone up to begin, all to end, each alone from there
        row, count, left, right = first, few, begin, end
        if step < alone:
            row, count = first + step, 1
            left, right = seen[2 * row], min(begin, seen[2 * row + 1])
        elif step > alone:
            row, count = first + step - alone - 1, 1
            left, right = max(end, seen[2 * row]), seen[2 * row + 1]
        if left < right:
            sums, weights = at + row * size, (row - first) * SPLIT
            values = Values(sums, size, weights, head_dim, left, right, now + GROUPS, ahead + GROUPS)
            add_values(records, scores, pool, room.groups, values, count)
            if head_dim % LANES > 0:
                add_last_values(records, scores, pool, room.groups, values, count)


@njit_inner
def add_records(source: Any, at: int, records: Any, to: int, rows: int, size: int, seen: Any) -> None:
    """Add the records from source[at] on, of one split, to those from records[to] on."""
    for row in range(rows):
        if seen[2 * row] < seen[2 * row + 1]:
            a, b, end = at + row * size, to + row * size, size - LANES
            m, before = simd.load(source, a + end), simd.load(records, b + end)
            greater = simd.maximum(m, before)
            factor, old_factor = simd.exp(m - greater), simd.exp(before - greater)
            for j in range(0, end, LANES):
                kept = simd.load(records, b + j) * old_factor
                simd.store(records, b + j, simd.fma(simd.load(source, a + j), factor, kept))
            simd.store(records, b + end, greater)


@njit_inner
def scale_rows(units: Any, unit: int, q: Any, scale: Any, heads: Heads, scaled: Any) -> None:
    """Set `scaled` to a unit's queries times scale."""
    head_dim, whole = heads.head_dim, heads.head_dim // LANES * LANES
    token_stride, head_stride = q.strides[0] // q.itemsize, q.strides[1] // q.itemsize
    first, row = units[unit, TOKEN] * token_stride + units[unit, KV_HEAD] * heads.group * head_stride, 0
    for _ in range(units[unit, COUNT]):
        for head in range(heads.group):
            source, target = first + head * head_stride, row * head_dim
            for d in range(0, whole, LANES):
                simd.store(scaled, target + d, simd.load(q, source + d) * simd.splat(scale))
            if whole < head_dim:
                part = simd.load_part(q, source + whole, head_dim - whole) * simd.splat(scale)
                simd.store_part(scaled, target + whole, head_dim - whole, part)
            row += 1
        first += token_stride


@njit_inner
def begin_records(records: Any, at: int, rows: int, size: int, sinks: Any, first: int, group: int) -> None:
    """Set the records from records[at] on to what sinks give, those of the heads from `first` on."""
    for row in range(rows):
        record = at + row * size
        for j in range(record, record + size, LANES):
            simd.store(records, j, simd.splat(0.0))
        m = simd.splat(-np.inf)
        if sinks.shape[0] > 0:
            records[record + size - 2 * LANES] = np.float32(1.0)
            m = simd.splat(sinks[first + row % group])
        simd.store(records, record + size - LANES, m)


@njit_inner
def end_rows(units: Any, unit: int, heads: Heads, records: Any, at: int, out: Any) -> None:
    """Set a unit's part of out [num_tokens, num_heads, head_dim] to the sums over the weights' total."""
    head_dim, size = heads.head_dim, record_size(heads.head_dim)
    whole, source = head_dim // LANES * LANES, at
    target = (units[unit, TOKEN] * out.shape[1] + units[unit, KV_HEAD] * heads.group) * head_dim
    for _ in range(units[unit, COUNT]):
        for head in range(heads.group):
            to = target + head * head_dim
            total = simd.sum_lanes(simd.load(records, source + size - 2 * LANES))
            scale = simd.splat(1.0) / simd.splat(total)
            for d in range(0, whole, LANES):
                simd.store(out, to + d, simd.load(records, source + d) * scale)
            if whole < head_dim:
                part = simd.load(records, source + whole) * scale
                simd.store_part(out, to + whole, head_dim - whole, part)
            source += size
        target += out.shape[1] * head_dim


@njit_inner
def look(seen: Any, units: Any, unit: int, split: int, mask: Mask, group: int) -> None:
    """Set which tokens of the split each row of a unit sees."""
    row = 0
    for i in range(units[unit, COUNT]):
        begin, end = tokens_seen(units[unit, POSITION] + i, 1, mask)
        begin = min(max(begin - split * SPLIT, 0), SPLIT)
        end = min(max(end - split * SPLIT, 0), SPLIT)
        for _ in range(group):
            seen[2 * row], seen[2 * row + 1] = begin, end
            row += 1


@njit_inner
def room_size(most: int, head_dim: int) -> int:
    """Return the floats in which a thread works on units of at most so many rows."""
    return LINE // 4 + ROWS * SPLIT + most * (head_dim + 2 * record_size(head_dim))


@njit_inner
def divide_room(words: Any, floats: Any, most: int, head_dim: int) -> Room:
    """Return the parts of a thread's memory; vectors of floats are whole lines of the cache."""
    first = -floats.ctypes.data % LINE // 4
    records = first + ROWS * SPLIT
    q = records + 2 * most * record_size(head_dim)
    return Room(
        words[: 2 * PLACES], words[2 * PLACES :], floats[q:], floats[first:records], floats[records:q]
    )


@njit_inner
def attend_split(step: Step, room: Room, rows: int, records: Any, at: int, now: int, ahead: int) -> None:
    """Set the records of a unit's rows for one split, from records[at] on."""
    heads, block_size, softcap = step.heads, step.cache.block_size, step.mask.softcap
    row = np.int64(0)
    while row < rows:
        few, to_come = rows_together(row, rows, heads.group), ahead if row == 0 else now
        attend_rows(step.pool, heads.head_dim, block_size, softcap, room, row, few, records, at, now, to_come)
        row += few


@njit_inner
def attend_pieces(
    plan: Plan, adding: bool, step: Step, words: Any, floats: Any, pieces: tuple[int, int]
) -> None:
    """Do what attend_units says, in the memory that it has."""
    room = divide_room(words, floats, step.most, step.heads.head_dim)
    if adding:
        first, last = plan.first_sum + pieces[0], plan.first_sum + pieces[1]
    else:
        first, last = plan.cuts[pieces[0]], plan.cuts[pieces[1]]
    units, heads, mask, sinks = plan.units, step.heads, step.mask, step.sinks
    size, total, now = record_size(heads.head_dim), step.most * record_size(heads.head_dim), np.int64(0)
    if first < last and not adding:
        split = units[first, FIRST]
        place_groups(room.groups, now, units, first, split, step.cache, heads, step.tables, mask)
        ask_for_groups(step.pool, room.groups, now, heads.head_dim, step.cache.block_size)
    for unit in range(first, last):
        rows, slot = units[unit, COUNT] * heads.group, units[unit, SLOT]
        first_split, end_split = units[unit, FIRST], units[unit, END]
        is_sum = adding or (slot < 0 and (end_split - first_split > 1 or sinks.shape[0] > 0))
        if is_sum:
            head = units[unit, KV_HEAD] * heads.group
            begin_records(room.records, total, rows, size, sinks, head, heads.group)
        if not adding:
            scale_rows(units, unit, step.q, mask.scale, heads, room.q)
        records = step.partial if slot >= 0 else room.records
        at = slot * size if slot >= 0 else 0 if is_sum else total  # one split's records are the unit's
        for split in range(first_split, end_split):
            look(room.seen, units, unit, split, mask, heads.group)
            if not adding:
                ahead = place_next(
                    room.groups, now, units, unit, split, last, step.cache, heads, step.tables, mask
                )
                attend_split(step, room, rows, records, at, now, ahead)
                now = ahead
            if is_sum:
                add_records(records, at, room.records, total, rows, size, room.seen)
            at += rows * size if slot >= 0 else 0
        if adding or slot < 0:
            end_rows(units, unit, heads, room.records, total, step.out)


@njit
def attend_units(plan: Plan, adding: bool, step: Step, pieces: tuple[int, int]) -> None:
    """Do the units of the pieces [first, last); `adding`: add up the records of these sums' splits."""
    words = np.empty(2 * PLACES + 2 * step.most, np.int64)
    floats = np.empty(room_size(step.most, step.heads.head_dim), np.float32)
    attend_pieces(plan, adding, step, words, floats, pieces)
