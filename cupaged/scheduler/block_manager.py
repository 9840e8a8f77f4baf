"""BlockManager: the pools of KV blocks seen from Python, where a group enters.

It owns the arrays of `allocator.Blocks`, of the device and of host memory, on which the step's plan grows,
shares, moves and frees tables; it knows rows, not sequences, and nothing of the memory behind the blocks.
"""

import numpy as np
from numpy.typing import NDArray

from cupaged.scheduler.allocator import (
    HOLE,
    Blocks,
    count_tokens,
    create_blocks,
    create_host_blocks,
    free_evictable,
)
from cupaged.scheduler.pools import Pools, create_moves
from cupaged.scheduler.prefix_cache import EMPTY, NO_ENTRY, create_prefix_cache
from cupaged.scheduler.scheduler_config import SchedulerConfig

MAX_SLOTS = 2**31  # Batch.slot_mapping is int32


class BlockManager:
    """Own the pools, and prove that no block is lost."""

    def __init__(self, config: SchedulerConfig, counters: NDArray[np.int64]) -> None:
        """Start with every block free; a pool that cannot hold one longest sequence is a ValueError."""
        num_blocks, block_size, longest = config.num_blocks, config.block_size, config.max_model_len
        if longest > num_blocks * block_size:
            raise ValueError(
                f"max_model_len is {longest} but the KV cache holds {num_blocks * block_size} tokens "
                f"({num_blocks} blocks of {block_size}); lower max_model_len or give the cache more memory"
            )
        if num_blocks * block_size > MAX_SLOTS:
            raise ValueError(
                f"the KV cache holds {num_blocks * block_size} tokens ({num_blocks} blocks of {block_size}) "
                f"but no more than {MAX_SLOTS} can be numbered; give the cache less memory"
            )
        self.block_size = block_size
        self.total = num_blocks
        self.watermark = max(1, num_blocks // 100)  # blocks kept free at admission, for those that run
        table_shape = (config.max_num_seqs, self.blocks_for(longest))
        self.blocks = create_blocks(
            num_blocks,
            block_size,
            table_shape=table_shape,
            cache=create_prefix_cache(num_blocks, block_size, enabled=config.enable_prefix_caching),
            counters=counters,
        )
        num = self.blocks.num
        self._num_listed = num["free"].data, num["evictable"].data  # quicker to read than arrays
        self.host_blocks = create_host_blocks(config.num_host_blocks, block_size, table_shape=table_shape)
        self.moves = create_moves(config.max_num_seqs, config.num_host_blocks)
        self.pools = Pools(self.blocks, self.host_blocks, self.moves)

    @property
    def num_free(self) -> int:
        """Return how many blocks can be taken: nobody holds them, though some may still be found."""
        free, evictable = self._num_listed
        return int(free[0] + evictable[0])

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks `num_tokens` tokens take."""
        return -(-num_tokens // self.block_size)

    def most_blocks(self, num_prompt: int, num_total: int, num_sequences: int) -> int:
        """Return the blocks that sequences of one prompt take at most: they share its full blocks."""
        shared = num_prompt // self.block_size
        return shared + num_sequences * (self.blocks_for(num_total) - shared)

    def count_tokens(self, rows: NDArray[np.int32], num_computed: NDArray[np.int32]) -> int:
        """Return how many tokens the rows' blocks hold, num_computed[i] being those of rows[i]."""
        return count_tokens(self.blocks, rows, num_computed)

    def reset_prefix_cache(self) -> None:
        """Forget all entries; blocks in use stay with who holds them."""
        self.blocks.cache.at.serial.fill(NO_ENTRY)
        self.blocks.cache.slots.fill(EMPTY)
        free_evictable(self.blocks)

    def check_invariants(self) -> None:
        """Assert that in each pool free + evictable + used = total and tables explain every reference."""
        check_pool(self.blocks)
        check_cache(self.blocks)
        check_pool(self.host_blocks)
        both = (self.blocks.held.num_blocks > 0) & (self.host_blocks.held.num_blocks > 0)
        assert not both.any(), f"row {both.argmax()} has a table in both pools"


def check_pool(blocks: Blocks) -> None:
    """Assert that each block is free, evictable or explained by tables, and holes come first in these."""
    total = blocks.free.size
    free, ring = blocks.free[: blocks.num[0].free], evictable(blocks)
    index = np.arange(blocks.block_tables.shape[1])
    valid = index < blocks.held.num_blocks[:, None]
    hole = valid & (index < blocks.held.first_block[:, None])
    assert (blocks.held.first_block <= blocks.held.num_blocks).all(), "more holes than blocks"
    assert (blocks.block_tables[hole] == HOLE).all(), "a block where a hole should be"
    held = blocks.block_tables[valid & ~hole]
    assert not held.size or (held.min() >= 0 and held.max() < total), "a table names no block of the pool"
    references = np.bincount(held, minlength=total)
    assert np.array_equal(references, blocks.at.ref_count[:total]), "a reference count that no table explains"
    unused = np.concatenate([free, np.array(ring, np.int32)])
    assert np.unique(unused).size == unused.size, "a block is twice among the free and evictable ones"
    assert not references[unused].any(), "a free block is in a table"
    used = np.count_nonzero(references)
    assert unused.size + used == total, f"{unused.size} free + {used} used != {total} blocks"
    assert (blocks.at.moved == -1).all(), "scratch was left behind"


def evictable(blocks: Blocks) -> list[int]:
    """Return the evictable blocks, the one to be evicted first in front."""
    end = blocks.free.size
    found: list[int] = []
    before, block = end, int(blocks.at[end].newer)
    while block != end:
        assert blocks.at[block].older == before, "the ring of evictable blocks is broken"
        assert len(found) < end, "the ring of evictable blocks does not end"
        found.append(block)
        before, block = block, int(blocks.at[block].newer)
    assert blocks.at[end].older == before, "the ring of evictable blocks is broken"
    assert len(found) == blocks.num[0].evictable, "evictable blocks are miscounted"
    return found


def check_cache(blocks: Blocks) -> None:
    """Assert that the hash table finds all entries, and that those nobody holds are the evictable blocks."""
    cache = blocks.cache
    if cache.slots.size == 0:
        assert blocks.num[0].evictable == 0, "blocks are cached though caching is off"
        return
    entries = np.flatnonzero(cache.at.serial != NO_ENTRY)
    in_table = np.sort(cache.slots[cache.slots != EMPTY])
    assert np.array_equal(in_table, entries), "the hash table and the blocks disagree on the entries"
    assert np.unique(cache.at.serial[entries]).size == entries.size, "two entries have one serial"
    assert (cache.at.serial[entries] <= cache.last_serial[0]).all(), "a serial not given yet"
    last = cache.slots.size - 1
    for place in np.flatnonzero(cache.slots != EMPTY).tolist():
        probe = int(cache.at[cache.slots[place]].hash) & last
        while probe != place:
            assert cache.slots[probe] != EMPTY, f"block {cache.slots[place]} cannot be found"
            probe = (probe + 1) & last
    ring = np.sort(np.array(evictable(blocks), np.int64))
    assert np.array_equal(ring, entries[blocks.at.ref_count[entries] == 0]), "a free entry is not evictable"
