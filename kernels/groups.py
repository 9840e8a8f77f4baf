"""Where the groups of a split's tokens lie in the paged cache, and how those to come are asked for."""

from typing import Any, NamedTuple

import numpy as np

from cupaged.jit import njit_inner
from cupaged.kernels import simd
from cupaged.kernels.attention_plan import (
    COUNT,
    END,
    FIRST,
    KV_HEAD,
    POSITION,
    SEQ,
    Heads,
    Mask,
    tokens_seen,
)
from cupaged.kernels.emit import LANES
from cupaged.kernels.tile import GROUPS, SPLIT

PLACES = 2 * GROUPS  # of a split's keys and values
LINE = 64  # bytes, of the cache


class Cache(NamedTuple):
    """Where a layer's keys and values lie in the flat pool, in elements."""

    block_stride: int
    keys: int  # of KV head 0, in block 0: [head_dim, block_size], so that tokens fill a vector
    values: int  # [block_size, head_dim]
    block_size: int


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
    index = (low + begin * LANES) // cache.block_size
    offset = low + begin * LANES - index * cache.block_size
    for g in range(begin, end):
        start = np.int64(table[index]) * cache.block_stride + head
        keys[g] = start + cache.keys + offset
        values[g] = start + cache.values + offset * heads.head_dim
        offset += LANES
        if offset == cache.block_size:
            index, offset = index + 1, 0
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
    line = LINE // pool.itemsize
    for g in range(GROUPS):
        keys, values = groups[at + g], groups[at + GROUPS + g]
        if g == 0 or keys != groups[at + g - 1]:
            for d in range(0, head_dim, max(1, line // block_size)):
                simd.prefetch(pool, keys + d * block_size)
            for j in range(0, LANES * head_dim, line):
                simd.prefetch(pool, values + j)
