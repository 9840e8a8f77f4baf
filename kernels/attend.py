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
    SEQ,
    SLOT,
    TOKEN,
    Heads,
    Mask,
    tokens_seen,
)
from cupaged.kernels.emit import LANES
from cupaged.kernels.tile import GROUPS, ROWS, SPLIT, VECTORS, Keys, Values, add_values, score_keys

PLACES = 2 * GROUPS  # of a split's keys and values


class Cache(NamedTuple):
    """Where a layer's keys and values lie in the flat pool, in elements."""

    block_stride: int
    keys: int  # of KV head 0, in block 0: [head_dim, block_size], so that tokens fill a vector
    values: int  # [block_size, head_dim]
    block_size: int


class Room(NamedTuple):
    """What a thread works in."""

    groups: Any  # int64[2 * PLACES], of the split in work and of the next one
    seen: Any  # int64[rows, 2], the tokens [begin, end) of the split that each row sees
    q: Any  # float32[rows, head_dim], scaled
    scores: Any  # float32[ROWS, SPLIT], then the weights
    records: Any  # float32[2, rows, record_size], a split's and all so far


@njit_inner
def record_size(head_dim: int) -> int:
    """Return the floats of a row's record."""
    return (-(-head_dim // LANES) + 2) * LANES


@njit_inner
def place_groups(
    groups: Any,
    at: int,
    units: Any,
    unit: int,
    split: int,
    cache: Cache,
    heads: Heads,
    tables: Any,
    mask: Mask,
) -> None:
    """Set where a unit's keys and values of one split begin in the pool, by groups, from groups[at] on.

    A group that no row sees gets the place of one that is seen: its scores are computed, but not used.
    """
    low = split * SPLIT
    first, last = tokens_seen(units[unit, POSITION], units[unit, COUNT], mask)
    begin = max(first - low, 0) // LANES
    end = (min(last - low, SPLIT) + LANES - 1) // LANES
    head = units[unit, KV_HEAD] * cache.block_size * heads.head_dim
    table = tables[units[unit, SEQ]]
    keys, values = groups[at : at + GROUPS], groups[at + GROUPS : at + PLACES]
    for g in range(begin, end):
        token = low + g * LANES
        index = token // cache.block_size
        offset = token - index * cache.block_size
        start = np.int64(table[index]) * cache.block_stride + head
        keys[g] = start + cache.keys + offset
        values[g] = start + cache.values + offset * heads.head_dim
    for g in range(begin):
        keys[g], values[g] = keys[begin], values[begin]
    for g in range(end, GROUPS):
        keys[g], values[g] = keys[end - 1], values[end - 1]


@njit_inner
def place_next(
    groups: Any,
    now: int,
    units: Any,
    unit: int,
    split: int,
    last: int,
    cache: Cache,
    heads: Heads,
    tables: Any,
    mask: Mask,
) -> int:
    """Place the groups that come after a split, of this unit or the next one; return where they are."""
    if split + 1 < units[unit, END]:
        split += 1
    elif unit + 1 < last:
        unit += 1
        split = units[unit, FIRST]
    else:
        return now
    place_groups(groups, PLACES - now, units, unit, split, cache, heads, tables, mask)
    return PLACES - now


@njit_inner
def ask_for_groups(pool: Any, groups: Any, at: int, head_dim: int, block_size: int) -> None:
    """Ask for the cache lines of groups that nothing asked for while it was at work."""
    for g in range(GROUPS):
        keys, values = groups[at + g], groups[at + GROUPS + g]
        if g == 0 or keys != groups[at + g - 1]:
            for d in range(head_dim):
                simd.prefetch(pool, keys + d * block_size)
            for j in range(0, LANES * head_dim, LANES):
                simd.prefetch(pool, values + j)


@njit_inner
def soften(x: Any, softcap: Any) -> Any:
    """Return softcap * tanh(x / softcap)."""
    one = simd.splat(1.0)
    y = x / simd.splat(softcap)
    e = simd.exp(simd.splat(-2.0) * abs(y))
    t = simd.splat(softcap) * (one - e) / (one + e)
    return simd.select_less(y, simd.splat(0.0), -t, t)


@njit_inner
def weigh_scores(scores: Any, at: int, begin: int, end: int, softcap: Any, record: Any, tail: int) -> None:
    """Turn a row's scores of the tokens [begin, end) into weights, others in their vectors into 0.

    Set the record's sums of weights and m, from record[tail] on.
    """
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
    m = simd.splat(simd.max_lanes(top))
    total = simd.splat(0.0)
    for j in range(begin // LANES * LANES, end, LANES):
        weight = simd.exp(simd.load(scores, at + j) - m)
        simd.store(scores, at + j, weight)
        total += weight
    simd.store(record, tail, total)
    simd.store(record, tail + LANES, m)


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
        low, high = min(low, seen[row, 0]), max(high, seen[row, 1])
        begin, end = max(begin, seen[row, 0]), min(end, seen[row, 1])
    if low >= high:
        return
    if begin >= end:
        begin = end = SPLIT
    tile, tiles = low // LANES // VECTORS * VECTORS, (high + LANES - 1) // LANES
    keys = Keys(0, first * head_dim, head_dim, block_size, tile, tiles, now, ahead)
    score_keys(scores, room.q, pool, room.groups, keys, few)
    for row in range(first, last):
        record = at + row * size
        for j in range(record, record + size, LANES):
            simd.store(records, j, simd.splat(0.0))
        if seen[row, 0] < seen[row, 1]:
            tail = record + size - 2 * LANES
            weigh_scores(scores, (row - first) * SPLIT, seen[row, 0], seen[row, 1], softcap, records, tail)
    for step in range(2 * few + 1):  # each row alone up to begin, all to end, each alone from there
        row, count, left, right = first + step % (few + 1), 1, begin, end
        if step < few:
            left, right = seen[row, 0], min(begin, seen[row, 1])
        elif step > few:
            left, right = max(end, seen[row, 0]), seen[row, 1]
        else:
            row, count = first, few
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
        if seen[row, 0] < seen[row, 1]:
            a, b, end = at + row * size, to + row * size, size - LANES
            m, before = simd.load(source, a + end), simd.load(records, b + end)
            greater = simd.maximum(m, before)
            factor, old_factor = simd.exp(m - greater), simd.exp(before - greater)
            for j in range(0, end, LANES):
                kept = simd.load(records, b + j) * old_factor
                simd.store(records, b + j, simd.fma(simd.load(source, a + j), factor, kept))
            simd.store(records, b + end, greater)


@njit_inner
def begin_rows(
    units: Any, unit: int, q: Any, scale: Any, sinks: Any, heads: Heads, room: Room, to: int
) -> None:
    """Set a unit's scaled queries, and its records from records[to] on to what sinks give."""
    head_dim, size = heads.head_dim, record_size(heads.head_dim)
    whole = head_dim // LANES * LANES
    for row in range(units[unit, COUNT] * heads.group):
        head = units[unit, KV_HEAD] * heads.group + row % heads.group
        source = (
            (units[unit, TOKEN] + row // heads.group) * q.strides[0] + head * q.strides[1]
        ) // q.itemsize
        target = row * head_dim
        for d in range(0, whole, LANES):
            simd.store(room.q, target + d, simd.load(q, source + d) * simd.splat(scale))
        if whole < head_dim:
            part = simd.load_part(q, source + whole, head_dim - whole) * simd.splat(scale)
            simd.store_part(room.q, target + whole, head_dim - whole, part)
        record = to + row * size
        for j in range(record, record + size, LANES):
            simd.store(room.records, j, simd.splat(0.0))
        if sinks.shape[0] > 0:
            room.records[record + size - 2 * LANES] = np.float32(1.0)
            simd.store(room.records, record + size - LANES, simd.splat(sinks[head]))
        else:
            simd.store(room.records, record + size - LANES, simd.splat(-np.inf))


@njit_inner
def end_rows(units: Any, unit: int, heads: Heads, records: Any, at: int, out: Any) -> None:
    """Set a unit's part of out [num_tokens, num_heads, head_dim] to the sums over the weights' total."""
    head_dim, size = heads.head_dim, record_size(heads.head_dim)
    whole = head_dim // LANES * LANES
    for row in range(units[unit, COUNT] * heads.group):
        head = units[unit, KV_HEAD] * heads.group + row % heads.group
        token = units[unit, TOKEN] + row // heads.group
        source, target = at + row * size, (token * out.shape[1] + head) * head_dim
        total = simd.sum_lanes(simd.load(records, source + size - 2 * LANES))
        scale = simd.splat(1.0) / simd.splat(total)
        for d in range(0, whole, LANES):
            simd.store(out, target + d, simd.load(records, source + d) * scale)
        if whole < head_dim:
            part = simd.load(records, source + whole) * scale
            simd.store_part(out, target + whole, head_dim - whole, part)


@njit_inner
def look(seen: Any, units: Any, unit: int, split: int, mask: Mask, group: int) -> None:
    """Set which tokens of the split each row of a unit sees."""
    for row in range(units[unit, COUNT] * group):
        begin, end = tokens_seen(units[unit, POSITION] + row // group, 1, mask)
        seen[row, 0] = min(max(begin - split * SPLIT, 0), SPLIT)
        seen[row, 1] = min(max(end - split * SPLIT, 0), SPLIT)


@njit
def attend_units(
    units: Any,  # int64[num_units, NUM_COLUMNS]
    cuts: Any,  # int64[num_pieces + 1]
    adding: bool,  # records lie in `partial`, and are only added
    q: Any,  # float32[num_tokens, num_heads, head_dim], a head's in a row
    pool: Any,  # T[num_blocks * block_stride]
    cache: Cache,
    heads: Heads,
    tables: Any,  # int32[num_seqs, table_width]
    mask: Mask,
    sinks: Any,  # float32[num_heads], or [0] for none
    most: int,  # rows of a unit
    partial: Any,  # float32[slots, record_size]
    out: Any,  # T[num_tokens, num_heads, head_dim]
    pieces: tuple[int, int],
) -> None:
    """Do the units of the pieces [first, last), or add the records of their splits."""
    size, total = record_size(heads.head_dim), most * record_size(heads.head_dim)
    room = Room(
        np.empty(2 * PLACES, np.int64),
        np.empty((most, 2), np.int64),
        np.empty(most * heads.head_dim, np.float32),
        np.empty(ROWS * SPLIT, np.float32),
        np.empty(2 * total, np.float32),
    )
    now = np.int64(0)
    first, last = cuts[pieces[0]], cuts[pieces[1]]
    if first < last and not adding:
        place_groups(room.groups, now, units, first, units[first, FIRST], cache, heads, tables, mask)
        ask_for_groups(pool, room.groups, now, heads.head_dim, cache.block_size)
    for unit in range(first, last):
        rows, slot = units[unit, COUNT] * heads.group, units[unit, SLOT]
        begin_rows(units, unit, q, mask.scale, sinks, heads, room, total)
        for split in range(units[unit, FIRST], units[unit, END]):
            look(room.seen, units, unit, split, mask, heads.group)
            records = partial if slot >= 0 else room.records
            at = (slot + (split - units[unit, FIRST]) * rows) * size if slot >= 0 else 0
            if not adding:
                ahead = place_next(room.groups, now, units, unit, split, last, cache, heads, tables, mask)
                row, block_size, softcap = np.int64(0), cache.block_size, mask.softcap
                while row < rows:
                    few, to_come = rows_together(row, rows, heads.group), ahead if row == 0 else now
                    attend_rows(
                        pool, heads.head_dim, block_size, softcap, room, row, few, records, at, now, to_come
                    )
                    row += few
                now = ahead
            if adding or slot < 0:
                add_records(records, at, room.records, total, rows, size, room.seen)
        if adding or slot < 0:
            end_rows(units, unit, heads, room.records, total, out)
