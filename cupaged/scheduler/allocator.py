"""The block pool and its njit functions: a stack of free block ids, reference counts, block tables.

Arrays only: who gets blocks and who gives them back is decided in plan.py and scheduler.py.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cupaged.jit import njit


class Blocks(NamedTuple):
    """Every block of the pool and which rows hold it."""

    free: NDArray[np.int32]  # [total], a stack: free[:num_free] are the ids of the free blocks
    num_free: NDArray[np.int32]  # [1]
    ref_count: NDArray[np.int32]  # [total], how many block tables hold the block; 0 = free
    block_tables: NDArray[np.int32]  # [num_rows, max_blocks], valid below num_blocks
    num_blocks: NDArray[np.int32]  # [num_rows]
    block_size: int  # tokens


def create_blocks(total: int, block_size: int, num_rows: int, max_blocks: int) -> Blocks:
    """Return a pool of `total` free blocks and empty tables."""
    return Blocks(
        free=np.arange(total - 1, -1, -1, dtype=np.int32),  # so that block 0 goes first
        num_free=np.array([total], dtype=np.int32),
        ref_count=np.zeros(total, dtype=np.int32),
        block_tables=np.zeros((num_rows, max_blocks), dtype=np.int32),
        num_blocks=np.zeros(num_rows, dtype=np.int32),
        block_size=block_size,
    )


@njit
def grow_table(blocks: Blocks, row: int, needed: int) -> bool:
    """Extend the row's table to `needed` blocks; take none and return False if there are too few."""
    held = blocks.num_blocks[row]
    top = blocks.num_free[0]
    if needed - held > top:
        return False
    for i in range(held, needed):
        top -= 1
        block = blocks.free[top]
        blocks.ref_count[block] = 1
        blocks.block_tables[row, i] = block
    if needed > held:
        blocks.num_blocks[row] = needed
        blocks.num_free[0] = top
    return True


@njit
def free_table(blocks: Blocks, row: int) -> None:
    """Drop the row's references, last block first; blocks without references are free at once.

    A step in flight may still read or write them. That is safe: steps run in order on the device, so
    whoever gets the block writes it in a later step.
    """
    top = blocks.num_free[0]
    for i in range(blocks.num_blocks[row] - 1, -1, -1):
        block = blocks.block_tables[row, i]
        blocks.ref_count[block] -= 1
        if blocks.ref_count[block] == 0:
            blocks.free[top] = block
            top += 1
    blocks.num_free[0] = top
    blocks.num_blocks[row] = 0
