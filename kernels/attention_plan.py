"""How attention's work is cut into units, and units are handed out, so that all threads have as much to do.

A unit is a few consecutive queries of a sequence and the heads that share one KV head; a decode is a unit of
one query for each of its KV heads. One that would take a thread longer than the rest take together is divided
into the splits of its tokens, whose records are added up afterwards. Nothing here changes a result.
"""

from typing import Any, NamedTuple

import numpy as np

from cupaged.jit import njit, njit_inner
from cupaged.kernels.chunks import num_chunks
from cupaged.kernels.tile import SPLIT

UNIT_ROWS = 48  # (query, head) pairs of a unit at most: so often is a value used that was read once
OVERHEAD = 64  # tokens that take as long as what a unit costs beside its tokens
MOST_SLOTS = 1 << 16  # records, 25 MB for heads of 64
GRAIN = 1 << 17  # bytes of the KV cache, 6 us of a thread's work

# Columns of units, int64[num_units, NUM_COLUMNS].
SEQ, TOKEN, POSITION = 0, 1, 2  # the sequence; the first query among the step's, and in its sequence
COUNT, KV_HEAD = 3, 4  # queries; the head that they attend to
FIRST, END = 5, 6  # splits [FIRST, END)
SLOT = 7  # the place of the first split's first record among those that are added up afterwards; -1 = none
COST = 8
NUM_COLUMNS = 9


class Mask(NamedTuple):
    """What a query may see, and what is done to its scores."""

    scale: float
    sliding_window: int  # tokens, the query's own included; 0 = all
    softcap: float  # 0 = off


class Heads(NamedTuple):
    """The shapes of heads."""

    num_kv_heads: int
    group: int  # query heads of a KV head
    head_dim: int


class Plan(NamedTuple):
    """The units of a step, and whose splits' records are added up afterwards."""

    units: Any  # int64[num_units + num_sums or more, NUM_COLUMNS]
    cuts: Any  # int64[num_pieces + 1]; a piece has the units [cuts[i], cuts[i + 1])
    first_sum: int  # in `units`
    num_sums: int
    slots: int  # records


@njit_inner
def queries_of_unit(group: int) -> int:
    """Return the most queries that a unit has."""
    return max(1, UNIT_ROWS // group)


@njit_inner
def tokens_seen(position: int, count: int, mask: Mask) -> Any:
    """Return the tokens [begin, end) that `count` queries from a position on see together."""
    begin = max(0, position + 1 - mask.sliding_window) if mask.sliding_window > 0 else 0
    return begin, position + count


class Queries(NamedTuple):
    """Consecutive queries of a sequence, the same for each of its KV heads."""

    seq: int
    token: int
    position: int
    number: int
    first: int  # split
    end: int
    cost: int


@njit_inner
def take_queries(query_start: Any, seq_lens: Any, seq: int, token: int, mask: Mask, heads: Heads) -> Queries:
    """Return a unit's queries, from `token` on."""
    stop = np.int64(query_start[seq + 1])
    count = min(queries_of_unit(heads.group), stop - token)
    position = np.int64(seq_lens[seq]) - (stop - token)
    begin, end = tokens_seen(position, count, mask)
    # Bytes of a cache of bfloat16, and a row's arithmetic as those that could be read meanwhile.
    cost = (end - begin + OVERHEAD) * heads.head_dim * (8 + count * heads.group) // 2
    return Queries(seq, token, position, count, begin // SPLIT, (end + SPLIT - 1) // SPLIT, cost)


@njit_inner
def set_unit(unit: Any, queries: Queries, kv_head: int, splits: Any, slot: int, cost: int) -> None:
    """Set the columns of a unit."""
    unit[SEQ], unit[TOKEN], unit[POSITION] = queries.seq, queries.token, queries.position
    unit[COUNT], unit[KV_HEAD] = queries.number, kv_head
    unit[FIRST], unit[END] = splits
    unit[SLOT], unit[COST] = slot, cost


@njit_inner
def cut_evenly(cuts: Any, units: Any, num_units: int) -> None:
    """Set where pieces of about the same cost begin, and where the last one ends."""
    pieces = cuts.shape[0] - 1
    total = done = piece = np.int64(0)
    for unit in range(num_units):
        total += units[unit, COST]
    for unit in range(num_units):
        while piece < pieces and done * pieces >= total * piece:
            cuts[piece] = unit
            piece += 1
        done += units[unit, COST]
    for rest in range(piece, pieces + 1):
        cuts[rest] = num_units


@njit
def plan_units(query_start: Any, seq_lens: Any, mask: Mask, heads: Heads) -> Any:
    """Return the step's plan."""
    step = queries_of_unit(heads.group)
    num_units = total = most_splits = np.int64(0)
    for seq in range(seq_lens.shape[0]):
        for token in range(query_start[seq], query_start[seq + 1], step):
            queries = take_queries(query_start, seq_lens, seq, token, mask, heads)
            num_units += heads.num_kv_heads
            total += heads.num_kv_heads * queries.cost
            most_splits = max(most_splits, queries.end - queries.first)
    pieces = num_chunks(total, GRAIN)
    # Those that are divided cost more than a piece, so there are fewer of them than pieces.
    first_sum = num_units + pieces * most_splits
    units = np.empty((first_sum + pieces, NUM_COLUMNS), np.int64)
    num_units = num_sums = slots = np.int64(0)
    for seq in range(seq_lens.shape[0]):
        for token in range(query_start[seq], query_start[seq + 1], step):
            queries = take_queries(query_start, seq_lens, seq, token, mask, heads)
            first, end, cost = queries.first, queries.end, queries.cost
            rows, num_splits = queries.number * heads.group, end - first
            divided = cost * pieces > total and num_splits > 1
            divided &= slots + heads.num_kv_heads * rows * num_splits <= MOST_SLOTS
            for kv_head in range(heads.num_kv_heads):
                if not divided:
                    set_unit(units[num_units], queries, kv_head, (first, end), -1, cost)
                    num_units += 1
                    continue
                set_unit(units[first_sum + num_sums], queries, kv_head, (first, end), slots, cost)
                num_sums += 1
                for split in range(first, end):
                    set_unit(
                        units[num_units], queries, kv_head, (split, split + 1), slots, cost // num_splits
                    )
                    num_units += 1
                    slots += rows
    cuts = np.empty(min(pieces, num_units) + 1, np.int64)
    cut_evenly(cuts, units, num_units)
    return Plan(units, cuts, first_sum, num_sums, slots)
