"""A pool of KV blocks and its njit functions: free blocks, reference counts, block tables.

Arrays only: who gets blocks and who gives them back is decided in plan.py, admission.py and preemption.py.
The device has one pool and host memory, for what is swapped out, another.

A step in flight may still read or write a block that is given back here. That is safe: steps run in order
on the device, so whoever gets the block writes it in a later step.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cupaged.jit import njit, njit_inner
from cupaged.scheduler.counters import Counter, create_counters
from cupaged.scheduler.prefix_cache import NO_ENTRY, PrefixCache, create_prefix_cache, remove_entry

COPIED_BLOCKS = int(Counter.COPIED_BLOCKS)
EVICTED_BLOCKS = int(Counter.EVICTED_BLOCKS)
HOLE = -1  # in a block table: the block has left the sliding window


BLOCK = np.dtype(
    [
        ("ref_count", np.int32),  # how many block tables hold the block
        ("newer", np.int32),  # the ring of evictable blocks
        ("older", np.int32),
        ("moved", np.int32),  # scratch, -1 between calls
    ]
)
HELD = np.dtype([("first_block", np.int32), ("num_blocks", np.int32)])  # of a row's table: holes, and all
NUM = np.dtype([("free", np.int64), ("evictable", np.int64)])  # blocks on the stack and in the ring


class Blocks(NamedTuple):
    """Every block of a pool and which rows hold it.

    A block that no table holds is on the stack, or, if its content can be found, in a ring by how long ago
    it was given back: the block longest there is evicted first.
    """

    free: NDArray[np.int32]  # [total], a stack: free[: num[0].free]
    num: Any  # NUM[1], records
    at: Any  # BLOCK[total + 1], records; the last one lies in the ring between its newest and its oldest
    block_tables: NDArray[np.int32]  # [num_rows, max_blocks]: holes, then blocks, valid below num_blocks
    held: Any  # HELD[num_rows], records
    cache: PrefixCache
    counters: NDArray[np.int64]  # [NUM_COUNTERS]
    block_size: int  # tokens


def create_blocks(
    total: int,
    block_size: int,
    *,
    table_shape: tuple[int, int],
    cache: PrefixCache,
    counters: NDArray[np.int64],
) -> Blocks:
    """Return a pool of `total` free blocks and empty tables [num_rows, max_blocks]."""
    at = np.zeros(total + 1, BLOCK).view(np.recarray)
    at.newer[total] = at.older[total] = total
    at.moved.fill(-1)
    num = np.zeros(1, NUM).view(np.recarray)
    num.free[0] = total
    return Blocks(
        free=np.arange(total - 1, -1, -1, dtype=np.int32),  # so that block 0 goes first
        num=num,
        at=at,
        block_tables=np.zeros(table_shape, dtype=np.int32),
        held=np.zeros(table_shape[0], HELD).view(np.recarray),
        cache=cache,
        counters=counters,
        block_size=block_size,
    )


def create_host_blocks(total: int, block_size: int, *, table_shape: tuple[int, int]) -> Blocks:
    """Return a pool in host memory; nothing is found there by its content."""
    return create_blocks(
        total,
        block_size,
        table_shape=table_shape,
        cache=create_prefix_cache(0, block_size, enabled=False),
        counters=create_counters(),
    )


@njit_inner
def blocks_for(blocks: Blocks, num_tokens: int) -> int:
    """Return how many blocks `num_tokens` tokens take."""
    return int((num_tokens + blocks.block_size - 1) // blocks.block_size)


@njit_inner
def num_available(blocks: Blocks) -> int:
    """Return how many blocks can be taken."""
    return int(blocks.num[0].free + blocks.num[0].evictable)


@njit_inner
def leave_ring(blocks: Blocks, block: int) -> None:
    """Take a block out of the ring of evictable ones."""
    at = blocks.at
    at[at[block].newer].older = at[block].older
    at[at[block].older].newer = at[block].newer
    blocks.num[0].evictable -= 1


@njit_inner
def take_block(blocks: Blocks) -> int:
    """Return a block with one reference; there must be one available."""
    at, num = blocks.at, blocks.num[0]
    if num.free > 0:
        num.free -= 1
        block = blocks.free[num.free]
    else:
        block = at[blocks.free.size].newer
        leave_ring(blocks, block)
        remove_entry(blocks.cache, block)
        blocks.counters[EVICTED_BLOCKS] += 1
    at[block].ref_count = 1
    return int(block)


@njit_inner
def hold_block(blocks: Blocks, block: int) -> None:
    """Add a reference to a block that is held or cached."""
    if blocks.at[block].ref_count == 0:
        leave_ring(blocks, block)
    blocks.at[block].ref_count += 1


@njit_inner
def drop_block(blocks: Blocks, block: int) -> None:
    """Take a reference away; without any a block can be taken, a cached one after all that are there."""
    at, num = blocks.at, blocks.num[0]
    at[block].ref_count -= 1
    if at[block].ref_count > 0:
        return
    if blocks.cache.at.size > 0 and blocks.cache.at[block].serial != NO_ENTRY:
        end = blocks.free.size
        newest = at[end].older
        at[block].older, at[block].newer = newest, end
        at[newest].newer = at[end].older = block
        num.evictable += 1
    else:
        blocks.free[num.free] = block
        num.free += 1


@njit_inner
def grow_table(blocks: Blocks, row: int, needed: int) -> None:
    """Extend the row's table to `needed` blocks, which must be available."""
    for i in range(blocks.held[row].num_blocks, needed):
        blocks.block_tables[row, i] = take_block(blocks)
    blocks.held[row].num_blocks = max(needed, blocks.held[row].num_blocks)


@njit_inner
def is_shared(blocks: Blocks, row: int, index: int) -> bool:
    """Return whether the row must copy its block `index` before it writes there."""
    there = index < blocks.held[row].num_blocks
    return bool(there and blocks.at[blocks.block_tables[row, index]].ref_count > 1)


@njit_inner
def copy_on_write(blocks: Blocks, row: int, index: int, pair: NDArray[np.int32]) -> None:
    """Give the row a block of its own for a shared one; pair = (from, to) is for the device to copy.

    The shared one stays held by others, so it keeps its content until the copy is done.
    """
    shared = blocks.block_tables[row, index]
    own = take_block(blocks)
    blocks.at[shared].ref_count -= 1
    blocks.block_tables[row, index] = own
    pair[0], pair[1] = shared, own
    blocks.counters[COPIED_BLOCKS] += 1


@njit_inner
def forget_content(blocks: Blocks, row: int, index: int) -> None:
    """Let the row's block `index`, if it is there, be found no more: the row is about to write to it.

    A block that forks shared may have been filled, and found, by one of them that has let go of it.
    """
    if index < blocks.held[row].num_blocks and blocks.cache.slots.size > 0:
        block = blocks.block_tables[row, index]
        if blocks.cache.at[block].serial != NO_ENTRY:
            remove_entry(blocks.cache, block)


@njit_inner
def share_table(blocks: Blocks, source: int, target: int, number: int) -> None:
    """Let the empty row `target` hold the first `number` blocks of row `source`."""
    tables, at = blocks.block_tables, blocks.at
    first = blocks.held[source].first_block
    tables[target, :first] = HOLE
    for i in range(first, number):
        tables[target, i] = tables[source, i]
        at[tables[source, i]].ref_count += 1
    blocks.held[target].first_block = first
    blocks.held[target].num_blocks = number


@njit_inner
def free_table(blocks: Blocks, row: int) -> None:
    """Drop the row's references, last block first: a prefix is evicted later than what continues it."""
    for i in range(blocks.held[row].num_blocks - 1, blocks.held[row].first_block - 1, -1):
        drop_block(blocks, blocks.block_tables[row, i])
    blocks.held[row].first_block = 0
    blocks.held[row].num_blocks = 0


@njit_inner
def free_before(blocks: Blocks, row: int, index: int) -> None:
    """Make holes of the row's blocks below `index`."""
    for i in range(blocks.held[row].first_block, min(index, blocks.held[row].num_blocks)):
        drop_block(blocks, blocks.block_tables[row, i])
        blocks.block_tables[row, i] = HOLE
        blocks.held[row].first_block = i + 1


@njit_inner
def count_blocks(blocks: Blocks, rows: NDArray[np.int32]) -> int:
    """Return how many blocks the rows hold together, shared ones once."""
    count = 0
    for mark in (0, -1):
        for row in rows:
            for i in range(blocks.held[row].first_block, blocks.held[row].num_blocks):
                block = blocks.block_tables[row, i]
                count += blocks.at[block].moved != mark and mark == 0
                blocks.at[block].moved = mark
    return count


@njit_inner
def count_released(blocks: Blocks, rows: NDArray[np.int32]) -> int:
    """Return how many blocks would be available if the rows' tables were freed, beside those that are."""
    count = 0
    for row in rows:
        for i in range(blocks.held[row].first_block, blocks.held[row].num_blocks):
            block = blocks.at[blocks.block_tables[row, i]]
            block.moved = max(block.moved, 0) + 1
            count += block.moved == block.ref_count
    for row in rows:
        for i in range(blocks.held[row].first_block, blocks.held[row].num_blocks):
            blocks.at[blocks.block_tables[row, i]].moved = -1
    return count


@njit_inner
def move_tables(source: Blocks, target: Blocks, rows: NDArray[np.int32], pairs: NDArray[np.int32]) -> int:
    """Move the rows' tables to another pool, which must have room; what they share is shared there.

    Write (from, to) of each block to pairs, and return how many.
    """
    count = 0
    at = source.at
    for row in rows:
        first, end = source.held[row].first_block, source.held[row].num_blocks
        target.block_tables[row, :first] = HOLE
        for i in range(first, end):
            block = source.block_tables[row, i]
            if at[block].moved < 0:
                at[block].moved = take_block(target)
                pairs[count, 0], pairs[count, 1] = block, at[block].moved
                count += 1
            else:
                target.at[at[block].moved].ref_count += 1
            target.block_tables[row, i] = at[block].moved
        target.held[row].first_block, target.held[row].num_blocks = first, end
    for row in rows:
        free_table(source, row)
    for i in range(count):
        at[pairs[i, 0]].moved = -1
    return count


@njit
def free_evictable(blocks: Blocks) -> None:
    """Put the evictable blocks, entries no more, on the stack, the one to be evicted first below."""
    at, num, end = blocks.at, blocks.num[0], blocks.free.size
    block = at[end].newer
    while block != end:
        blocks.free[num.free] = block
        num.free += 1
        block = at[block].newer
    num.evictable = 0
    at[end].newer = at[end].older = end


@njit
def reorder_tables(
    blocks: Blocks, rows: NDArray[np.int32], parents: NDArray[np.int32], num_written: NDArray[np.int32]
) -> None:
    """Let rows[i] hold what rows[parents[i]] held, and rows behind the parents nothing.

    num_written[i] are the tokens of rows[i] in its blocks; blocks behind them are shared with nobody.
    """
    tables, at = blocks.block_tables, blocks.at
    first, held = np.empty(rows.size, np.int32), np.empty(rows.size, np.int32)
    widest = 0
    for i in range(rows.size):
        first[i] = blocks.held[rows[i]].first_block
        held[i] = min(blocks.held[rows[i]].num_blocks, blocks_for(blocks, num_written[i]))
        widest = max(widest, held[i])
    old = np.empty((rows.size, widest), np.int32)
    for i in range(rows.size):
        for j in range(held[i]):
            old[i, j] = tables[rows[i], j]
    for i in range(parents.size):
        for j in range(first[parents[i]], held[parents[i]]):
            at[old[parents[i], j]].ref_count += 1
    for i in range(rows.size):
        free_table(blocks, rows[i])
    for i in range(parents.size):
        row, parent = rows[i], parents[i]
        for j in range(held[parent]):
            tables[row, j] = old[parent, j]
        blocks.held[row].first_block, blocks.held[row].num_blocks = first[parent], held[parent]


@njit
def count_tokens(blocks: Blocks, rows: NDArray[np.int32], num_computed: NDArray[np.int32]) -> int:
    """Return how many tokens the rows' blocks hold, shared ones once; num_computed[i] is of rows[i]."""
    count, size, held = 0, blocks.block_size, np.zeros(blocks.free.size, np.int32)
    for k in range(rows.size):
        row = rows[k]
        for i in range(blocks.held[row].first_block, blocks.held[row].num_blocks):
            block = blocks.block_tables[row, i]
            tokens = min(size, max(0, num_computed[k] - i * size))
            count += max(0, tokens - held[block])
            held[block] = max(held[block], tokens)
    return count
