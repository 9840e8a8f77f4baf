"""A pool of KV blocks and its njit functions: free blocks, reference counts, block tables.

Arrays only: who gets blocks and who gives them back is decided in plan.py and scheduler.py. The device has
one pool and host memory, for what is swapped out, another.

A step in flight may still read or write a block that is given back here. That is safe: steps run in order
on the device, so whoever gets the block writes it in a later step.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cupaged.jit import njit, njit_inner
from cupaged.scheduler.counters import Counter
from cupaged.scheduler.prefix_cache import NO_ENTRY, PrefixCache, create_prefix_cache, remove_entry

COPIED_BLOCKS = int(Counter.COPIED_BLOCKS)
EVICTED_BLOCKS = int(Counter.EVICTED_BLOCKS)
HOLE = -1  # in a block table: the block has left the sliding window


class Blocks(NamedTuple):
    """Every block of a pool and which rows hold it.

    A block that no table holds is on the stack, or, if its content can be found, in a ring by how long ago
    it was given back: the block longest there is evicted first.
    """

    free: NDArray[np.int32]  # [total], a stack: free[:num_free]
    num_free: NDArray[np.int32]  # [1]
    newer: NDArray[np.int32]  # [total + 1], the ring; index `total` lies between its newest and its oldest
    older: NDArray[np.int32]  # [total + 1]
    num_evictable: NDArray[np.int32]  # [1], blocks in the ring
    ref_count: NDArray[np.int32]  # [total], how many block tables hold the block
    block_tables: NDArray[np.int32]  # [num_rows, max_blocks]: holes, then blocks, valid below num_blocks
    first_block: NDArray[np.int32]  # [num_rows], how many holes
    num_blocks: NDArray[np.int32]  # [num_rows], holes included
    cache: PrefixCache
    counters: NDArray[np.int64]  # [NUM_COUNTERS]
    moved: NDArray[np.int32]  # [total], scratch; all -1 between calls
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
    ring = np.full(total + 1, total, np.int32)
    return Blocks(
        free=np.arange(total - 1, -1, -1, dtype=np.int32),  # so that block 0 goes first
        num_free=np.array([total], dtype=np.int32),
        newer=ring,
        older=ring.copy(),
        num_evictable=np.zeros(1, np.int32),
        ref_count=np.zeros(total, dtype=np.int32),
        block_tables=np.zeros(table_shape, dtype=np.int32),
        first_block=np.zeros(table_shape[0], np.int32),
        num_blocks=np.zeros(table_shape[0], np.int32),
        cache=cache,
        counters=counters,
        moved=np.full(total, -1, np.int32),
        block_size=block_size,
    )


def create_host_blocks(total: int, block_size: int, *, table_shape: tuple[int, int]) -> Blocks:
    """Return a pool in host memory; nothing is found there by its content."""
    return create_blocks(
        total,
        block_size,
        table_shape=table_shape,
        cache=create_prefix_cache(0, block_size, enabled=False),
        counters=np.zeros(len(Counter), np.int64),
    )


@njit_inner
def num_available(blocks: Blocks) -> int:
    """Return how many blocks can be taken."""
    return int(blocks.num_free[0] + blocks.num_evictable[0])


@njit_inner
def leave_ring(blocks: Blocks, block: int) -> None:
    """Take a block out of the ring of evictable ones."""
    newer, older = blocks.newer, blocks.older
    older[newer[block]] = older[block]
    newer[older[block]] = newer[block]
    blocks.num_evictable[0] -= 1


@njit_inner
def take_block(blocks: Blocks) -> int:
    """Return a block with one reference; there must be one available."""
    if blocks.num_free[0] > 0:
        blocks.num_free[0] -= 1
        block = blocks.free[blocks.num_free[0]]
    else:
        block = blocks.newer[blocks.ref_count.size]
        leave_ring(blocks, block)
        remove_entry(blocks.cache, block)
        blocks.counters[EVICTED_BLOCKS] += 1
    blocks.ref_count[block] = 1
    return int(block)


@njit_inner
def hold_block(blocks: Blocks, block: int) -> None:
    """Add a reference to a block that is held or cached."""
    if blocks.ref_count[block] == 0:
        leave_ring(blocks, block)
    blocks.ref_count[block] += 1


@njit_inner
def drop_block(blocks: Blocks, block: int) -> None:
    """Take a reference away; without any a block can be taken, a cached one after all that are there."""
    blocks.ref_count[block] -= 1
    if blocks.ref_count[block] > 0:
        return
    serials = blocks.cache.serials
    if serials.size > 0 and serials[block] != NO_ENTRY:
        newer, older, end = blocks.newer, blocks.older, blocks.ref_count.size
        newest = older[end]
        newer[newest] = older[end] = block
        older[block], newer[block] = newest, end
        blocks.num_evictable[0] += 1
    else:
        blocks.free[blocks.num_free[0]] = block
        blocks.num_free[0] += 1


@njit_inner
def grow_table(blocks: Blocks, row: int, needed: int) -> None:
    """Extend the row's table to `needed` blocks, which must be available."""
    for i in range(blocks.num_blocks[row], needed):
        blocks.block_tables[row, i] = take_block(blocks)
    blocks.num_blocks[row] = max(needed, blocks.num_blocks[row])


@njit_inner
def is_shared(blocks: Blocks, row: int, index: int) -> bool:
    """Return whether the row must copy its block `index` before it writes there."""
    return bool(index < blocks.num_blocks[row] and blocks.ref_count[blocks.block_tables[row, index]] > 1)


@njit_inner
def copy_on_write(blocks: Blocks, row: int, index: int, pair: NDArray[np.int32]) -> None:
    """Give the row a block of its own for a shared one; pair = (from, to) is for the device to copy.

    The shared one stays held by others, so it keeps its content until the copy is done.
    """
    shared = blocks.block_tables[row, index]
    own = take_block(blocks)
    blocks.ref_count[shared] -= 1
    blocks.block_tables[row, index] = own
    pair[0], pair[1] = shared, own
    blocks.counters[COPIED_BLOCKS] += 1


@njit_inner
def forget_content(blocks: Blocks, row: int, index: int) -> None:
    """Let the row's block `index`, if it is there, be found no more: the row is about to write to it.

    A block that forks shared may have been filled, and found, by one of them that has let go of it.
    """
    if index < blocks.num_blocks[row] and blocks.cache.slots.size > 0:
        block = blocks.block_tables[row, index]
        if blocks.cache.serials[block] != NO_ENTRY:
            remove_entry(blocks.cache, block)


@njit_inner
def share_table(blocks: Blocks, source: int, target: int, number: int) -> None:
    """Let the empty row `target` hold the first `number` blocks of row `source`."""
    tables, ref_count = blocks.block_tables, blocks.ref_count
    first = blocks.first_block[source]
    tables[target, :first] = HOLE
    for i in range(first, number):
        tables[target, i] = tables[source, i]
        ref_count[tables[source, i]] += 1
    blocks.first_block[target] = first
    blocks.num_blocks[target] = number


@njit_inner
def free_table(blocks: Blocks, row: int) -> None:
    """Drop the row's references, last block first: a prefix is evicted later than what continues it."""
    for i in range(blocks.num_blocks[row] - 1, blocks.first_block[row] - 1, -1):
        drop_block(blocks, blocks.block_tables[row, i])
    blocks.first_block[row] = 0
    blocks.num_blocks[row] = 0


@njit_inner
def free_before(blocks: Blocks, row: int, index: int) -> None:
    """Make holes of the row's blocks below `index`."""
    for i in range(blocks.first_block[row], min(index, blocks.num_blocks[row])):
        drop_block(blocks, blocks.block_tables[row, i])
        blocks.block_tables[row, i] = HOLE
        blocks.first_block[row] = i + 1


@njit_inner
def count_blocks(blocks: Blocks, rows: NDArray[np.int32]) -> int:
    """Return how many blocks the rows hold together, shared ones once."""
    count = 0
    for mark in (0, -1):
        for row in rows:
            for i in range(blocks.first_block[row], blocks.num_blocks[row]):
                block = blocks.block_tables[row, i]
                count += blocks.moved[block] != mark and mark == 0
                blocks.moved[block] = mark
    return count


@njit_inner
def count_released(blocks: Blocks, rows: NDArray[np.int32]) -> int:
    """Return how many blocks would be available if the rows' tables were freed, beside those that are."""
    count = 0
    moved, ref_count = blocks.moved, blocks.ref_count
    for row in rows:
        for i in range(blocks.first_block[row], blocks.num_blocks[row]):
            block = blocks.block_tables[row, i]
            moved[block] = max(moved[block], 0) + 1
            count += moved[block] == ref_count[block]
    for row in rows:
        for i in range(blocks.first_block[row], blocks.num_blocks[row]):
            moved[blocks.block_tables[row, i]] = -1
    return count


@njit_inner
def move_tables(source: Blocks, target: Blocks, rows: NDArray[np.int32], pairs: NDArray[np.int32]) -> int:
    """Move the rows' tables to another pool, which must have room; what they share is shared there.

    Write (from, to) of each block to pairs, and return how many.
    """
    count = 0
    moved = source.moved
    for row in rows:
        first, end = source.first_block[row], source.num_blocks[row]
        target.block_tables[row, :first] = HOLE
        for i in range(first, end):
            block = source.block_tables[row, i]
            if moved[block] < 0:
                moved[block] = take_block(target)
                pairs[count, 0], pairs[count, 1] = block, moved[block]
                count += 1
            else:
                target.ref_count[moved[block]] += 1
            target.block_tables[row, i] = moved[block]
        target.first_block[row], target.num_blocks[row] = first, end
    for row in rows:
        free_table(source, row)
    for i in range(count):
        moved[pairs[i, 0]] = -1
    return count


@njit_inner
def reorder_tables(blocks: Blocks, rows: NDArray[np.int32], parents: NDArray[np.int32]) -> None:
    """Let rows[i] hold what rows[parents[i]] held, and rows behind the parents nothing."""
    tables, ref_count = blocks.block_tables, blocks.ref_count
    first, held = np.empty(rows.size, np.int32), np.empty(rows.size, np.int32)
    widest = 0
    for i in range(rows.size):
        first[i], held[i] = blocks.first_block[rows[i]], blocks.num_blocks[rows[i]]
        widest = max(widest, held[i])
    old = np.empty((rows.size, widest), np.int32)
    for i in range(rows.size):
        for j in range(held[i]):
            old[i, j] = tables[rows[i], j]
    for i in range(parents.size):
        for j in range(first[parents[i]], held[parents[i]]):
            ref_count[old[parents[i], j]] += 1
    for i in range(rows.size):
        free_table(blocks, rows[i])
    for i in range(parents.size):
        row, parent = rows[i], parents[i]
        for j in range(held[parent]):
            tables[row, j] = old[parent, j]
        blocks.first_block[row], blocks.num_blocks[row] = first[parent], held[parent]


@njit
def count_tokens(blocks: Blocks, rows: NDArray[np.int32], num_computed: NDArray[np.int32]) -> int:
    """Return how many tokens the rows' blocks hold, shared ones once; num_computed[i] is of rows[i]."""
    count, size, held = 0, blocks.block_size, np.zeros(blocks.ref_count.size, np.int32)
    for k in range(rows.size):
        row = rows[k]
        for i in range(blocks.first_block[row], blocks.num_blocks[row]):
            block = blocks.block_tables[row, i]
            tokens = min(size, max(0, num_computed[k] - i * size))
            count += max(0, tokens - held[block])
            held[block] = max(held[block], tokens)
    return count
