"""BlockManager: the pool of KV blocks seen from Python, where a sequence enters.

It owns the arrays of `allocator.Blocks`, on which the step's plan grows and frees tables; it knows rows,
not sequences, and nothing of the memory behind the blocks.
"""

import numpy as np

from cupaged.scheduler.allocator import create_blocks, grow_table

MAX_SLOTS = 2**31  # Batch.slot_mapping is int32


class BlockManager:
    """Own the pool, admit rows to it, and prove that no block is lost."""

    def __init__(self, *, num_blocks: int, block_size: int, num_rows: int, max_model_len: int) -> None:
        """Start with every block free; a pool that cannot hold one longest sequence is a ValueError."""
        if max_model_len > num_blocks * block_size:
            raise ValueError(
                f"max_model_len is {max_model_len} but the KV cache holds {num_blocks * block_size} tokens "
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
        self.blocks = create_blocks(num_blocks, block_size, num_rows, self.blocks_for(max_model_len))

    @property
    def num_free(self) -> int:
        """Return how many blocks nobody holds."""
        return int(self.blocks.num_free[0])

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks `num_tokens` tokens take."""
        return -(-num_tokens // self.block_size)

    def can_allocate(self, num_tokens: int, *, keep_watermark: bool) -> bool:
        """Return whether a row without blocks could get those of `num_tokens` tokens."""
        kept = self.watermark if keep_watermark else 0
        return self.blocks_for(num_tokens) + kept <= self.num_free

    def allocate(self, row: int, num_tokens: int) -> None:
        """Give an empty row the blocks of its `num_tokens` tokens; ask `can_allocate` first."""
        assert self.blocks.num_blocks[row] == 0, f"row {row} already has blocks"
        taken = grow_table(self.blocks, row, self.blocks_for(num_tokens))
        assert taken, f"{self.num_free} free blocks, row {row} needs {self.blocks_for(num_tokens)}"

    def check_invariants(self) -> None:
        """Assert that free + used = total and that every reference is explained by one table."""
        blocks = self.blocks
        free = blocks.free[: self.num_free]
        held = np.arange(blocks.block_tables.shape[1]) < blocks.num_blocks[:, None]
        references = np.bincount(blocks.block_tables[held], minlength=self.total)
        assert np.array_equal(references, blocks.ref_count), "a reference count that no table explains"
        assert references.max() <= 1, f"block {references.argmax()} is in two places"
        assert np.unique(free).size == free.size, "a block is twice on the free stack"
        assert not references[free].any(), "a free block is in a table"
        used = np.count_nonzero(references)
        assert free.size + used == self.total, f"{free.size} free + {used} used != {self.total} blocks"
