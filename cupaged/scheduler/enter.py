"""How a group enters: what it needs, the blocks it finds or gets, its place among those that run; njit."""

import numpy as np
from numpy.typing import NDArray

from cupaged.jit import njit
from cupaged.scheduler.allocator import (
    HOLE,
    Blocks,
    blocks_for,
    count_blocks,
    count_released,
    grow_table,
    hold_block,
    move_tables,
    num_available,
)
from cupaged.scheduler.plan import count_wanted, find_remaining, take_blocks
from cupaged.scheduler.pools import SWAP_IN, Pools
from cupaged.scheduler.progress import count_recomputed
from cupaged.scheduler.state import Rows


@njit
def measure_prompt(
    blocks: Blocks, num_tokens: int, first_fork: int, found: NDArray[np.int32], sliding_window: int
) -> tuple[int, int, int]:
    """Return (tokens, blocks, first) of a row that knows `num_tokens` and finds cached blocks.

    It computes `tokens`, of all cached the last one, takes `blocks` from those available, the found ones that
    nobody holds included, and holds found[first:]: those before have left its window, and the window of who
    forks from it and begins at position `first_fork` or later.
    """
    size = blocks.block_size
    computed = min(found.size * size, num_tokens - 1)
    first = 0
    if sliding_window > 0:
        first = max(0, min(computed, first_fork) - sliding_window + 1) // size
    taken = blocks_for(blocks, num_tokens) - found.size
    for i in range(first, found.size):
        taken += blocks.at[found[i]].ref_count == 0
    return int(num_tokens - computed), int(taken), int(first)


@njit
def start_prompt(rows: Rows, blocks: Blocks, row: int, found: NDArray[np.int32], first: int) -> None:
    """Give a new row found[first:] and blocks for all tokens that it knows; those must be available."""
    size = blocks.block_size
    num_tokens, num_found = rows.at[row].num_tokens, found.size
    blocks.block_tables[row, :first] = HOLE
    for i in range(first, num_found):
        hold_block(blocks, found[i])
        blocks.block_tables[row, i] = found[i]
    blocks.held[row].first_block, blocks.held[row].num_blocks = first, num_found
    rows.at[row].num_shared_tokens = num_found * size
    rows.at[row].num_computed_tokens = min(num_found * size, num_tokens - 1)
    if num_found > 0:
        last = found[num_found - 1]
        rows.at[row].num_registered = num_found
        rows.at[row].chain_hash = blocks.cache.at[last].hash
        rows.at[row].chain_serial = blocks.cache.at[last].serial
    count_recomputed(rows, blocks, row)
    grow_table(blocks, row, blocks_for(blocks, num_tokens))


@njit
def obtainable_blocks(blocks: Blocks, rows: NDArray[np.int32], found: NDArray[np.int32]) -> int:
    """Return how many blocks would be available if these rows gave theirs back, all but the found ones."""
    for block in found:
        blocks.at[block].ref_count += 1
    count = num_available(blocks) + count_released(blocks, rows)
    for block in found:
        blocks.at[block].ref_count -= 1
    return count


@njit
def measure_swapped(rows: Rows, pools: Pools, group: NDArray[np.int32]) -> tuple[int, int]:
    """Return (tokens, blocks) that a swapped group would compute and need, back on the device."""
    host = pools.host
    num_blocks = count_blocks(host, group)
    num_tokens, _ = find_remaining(rows, group)
    num_blocks += count_wanted(rows, host, group)
    for row in group:
        rows.at[row].num_new = 0
    return num_tokens, num_blocks


@njit
def swap_in(pools: Pools, group: NDArray[np.int32]) -> None:
    """Bring a swapped group's blocks back, for which there must be room."""
    moves = pools.moves
    count = move_tables(pools.host, pools.device, group, moves.swap_in[moves.num[SWAP_IN] :])
    moves.num[SWAP_IN] += count


@njit
def enter(rows: Rows, pools: Pools, group: NDArray[np.int32], budget: int) -> int:
    """Let a group run, where its priority and arrival say, and plan it; return the tokens planned.

    Its blocks must be available.
    """
    running, priority, arrival = rows.running, rows.at.priority, rows.at.arrival
    place = rows.num_running[0]
    row = group[0]
    while place > 0:
        other = running[place - 1]
        if (priority[other], arrival[other]) < (priority[row], arrival[row]):
            break
        running[place + group.size - 1] = other
        place -= 1
    for i in range(group.size):
        running[place + i] = group[i]
    rows.num_running[0] += group.size
    left = budget
    find_remaining(rows, group)
    for row in group:
        rows.at[row].reset = True
        rows.at[row].num_new = min(left, rows.at[row].num_new)
        left -= rows.at[row].num_new
        take_blocks(rows, pools, row)
    return budget - left
