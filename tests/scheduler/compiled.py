"""What tests call of the allocator's inner functions, which only compiled code may."""

import numpy as np
from numpy.typing import NDArray

from cupaged.jit import njit
from cupaged.scheduler import allocator
from cupaged.scheduler.allocator import Blocks
from cupaged.scheduler.prefix_cache import ROOT, chain_hash, register_block, root_hash


@njit
def allocate(blocks: Blocks, row: int, found: NDArray[np.int32], needed: int) -> None:
    """Give an empty row the blocks that were found for it, and new ones up to `needed`."""
    for i in range(found.size):
        allocator.hold_block(blocks, found[i])
        blocks.block_tables[row, i] = found[i]
    blocks.held[row].num_blocks = found.size
    allocator.grow_table(blocks, row, needed)


@njit
def write(blocks: Blocks, row: int, index: int, pair: NDArray[np.int32]) -> bool:
    """Make block `index` the row's own before it writes there; return whether pair says what to copy."""
    if allocator.is_shared(blocks, row, index):
        allocator.copy_on_write(blocks, row, index, pair)
        return True
    allocator.forget_content(blocks, row, index)
    return False


@njit
def register(blocks: Blocks, row: int, tokens: NDArray[np.int32], salt: int) -> None:
    """Make the row's full blocks findable."""
    size = blocks.block_size
    parent, value = ROOT, root_hash(salt)
    for i in range(tokens.size // size):
        part = tokens[i * size : (i + 1) * size]
        value = chain_hash(blocks.cache, value, part)
        parent = register_block(blocks.cache, blocks.block_tables[row, i], value, parent, salt, part)


@njit
def grow(blocks: Blocks, row: int, needed: int) -> None:
    allocator.grow_table(blocks, row, needed)


@njit
def fork(blocks: Blocks, source: int, target: int, number: int) -> None:
    allocator.share_table(blocks, source, target, number)


@njit
def free(blocks: Blocks, row: int) -> None:
    allocator.free_table(blocks, row)


@njit
def free_before(blocks: Blocks, row: int, index: int) -> None:
    allocator.free_before(blocks, row, index)


@njit
def reorder(
    blocks: Blocks, rows: NDArray[np.int32], parents: NDArray[np.int32], num_written: NDArray[np.int32]
) -> None:
    allocator.reorder_tables(blocks, rows, parents, num_written)


@njit
def move(source: Blocks, target: Blocks, rows: NDArray[np.int32], pairs: NDArray[np.int32]) -> int:
    return allocator.move_tables(source, target, rows, pairs)


@njit
def count(blocks: Blocks, rows: NDArray[np.int32]) -> tuple[int, int]:
    """Return (blocks of the rows, blocks that freeing them would make available)."""
    return allocator.count_blocks(blocks, rows), allocator.count_released(blocks, rows)
