"""The step's plan under one token budget: who computes how many tokens, and who gives up blocks for it; njit.

There is no prefill phase and no decode phase, only num_computed_tokens catching up with the tokens
that are known or in flight.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cupaged.jit import njit, njit_inner
from cupaged.scheduler.allocator import (
    Blocks,
    blocks_for,
    copy_on_write,
    count_blocks,
    forget_content,
    free_table,
    grow_table,
    is_shared,
    move_tables,
    num_available,
)
from cupaged.scheduler.counters import Counter
from cupaged.scheduler.pools import COPY, SWAP_OUT, Pools
from cupaged.scheduler.prefix_cache import NO_ENTRY
from cupaged.scheduler.state import Rows

PREEMPTIONS = int(Counter.PREEMPTIONS)


class Costs(NamedTuple):
    """What preempting costs, in seconds."""

    swap: float  # a block, out and in again; infinite = never
    recompute: float  # a token


class Head(NamedTuple):
    """The group that is first in the queue."""

    num_tokens: int  # that it would compute if it entered now; 0 if it cannot
    priority: int


@njit_inner
def find_remaining(rows: Rows, some: NDArray[np.int32]) -> tuple[int, int]:
    """Set num_new to what each of some rows could compute now; return (how many tokens, how many decodes).

    A token past max_total_tokens is never computed.
    """
    total = num_decodes = 0
    for row in some:
        at = rows.at[row]
        target = at.num_tokens + at.num_in_flight
        waits = at.is_pending or (at.is_beam and at.num_in_flight > 0) or target >= at.max_total_tokens
        remaining = 0 if waits else target - at.num_computed_tokens
        at.num_new = remaining
        total += remaining
        num_decodes += remaining == 1
    return int(total), int(num_decodes)


@njit_inner
def share_budget(rows: Rows, budget: int, num_decodes: int, head: Head) -> None:
    """Plan every decode, then prefill chunks, in order, out of what is left; num_new are what remains.

    What a head of higher priority would compute is kept aside before the chunks of those it goes before.
    """
    left = budget - num_decodes
    kept = 0
    for row in rows.running[: rows.num_running[0]]:
        at = rows.at[row]
        if at.num_new > 1:
            if kept == 0 and at.priority > head.priority:
                kept = min(left, head.num_tokens)
                left -= kept
            at.num_new = min(at.num_new, left)
            left -= at.num_new


@njit_inner
def take_turns(rows: Rows, turns: NDArray[np.int64], budget: int, num_head: int) -> None:
    """Plan in the order of `turns` until the budget is spent; num_new are what remains.

    The head of the queue has its turn too, as one more running row. Its share is only kept aside here: it is
    admitted when the running rows have their blocks.
    """
    head = rows.num_running[0]
    for i in turns:
        if i == head:
            budget -= min(budget, num_head)
        else:
            row = rows.running[i]
            rows.at[row].num_new = min(budget, rows.at[row].num_new)
            budget -= rows.at[row].num_new


@njit_inner
def first_write(rows: Rows, blocks: Blocks, row: int) -> int:
    """Return the index of the block that the row's planned tokens write first, -1 if they write none."""
    at = rows.at[row]
    first = max(at.num_computed_tokens, at.num_shared_tokens)
    if first >= at.num_computed_tokens + at.num_new:
        return -1
    return int(first // blocks.block_size)


@njit_inner
def count_wanted(rows: Rows, blocks: Blocks, group: NDArray[np.int32]) -> int:
    """Return how many blocks a group's planned tokens need beside those it has.

    Who writes to a shared block copies it first; the last one that holds it does not. Only the first block
    that a row writes can be shared: those behind it hold nothing yet.
    """
    tables, held = blocks.block_tables, blocks.held
    wanted = 0
    for row in group:
        index = first_write(rows, blocks, row)
        if index >= 0:
            end = rows.at[row].num_computed_tokens + rows.at[row].num_new
            wanted += max(0, blocks_for(blocks, end) - held[row].num_blocks)
            if index < held[row].num_blocks:
                block = blocks.at[tables[row, index]]
                block.moved = max(block.moved, 0) + 1
                wanted += block.moved < block.ref_count
    for row in group:
        index = first_write(rows, blocks, row)
        if 0 <= index < held[row].num_blocks:
            blocks.at[tables[row, index]].moved = -1
    return int(wanted)


@njit_inner
def take_blocks(rows: Rows, pools: Pools, row: int) -> None:
    """Give the row the blocks of its planned tokens, its own where it writes."""
    blocks = pools.device
    index = first_write(rows, blocks, row)
    if index < 0:
        return
    if is_shared(blocks, row, index):
        copy_on_write(blocks, row, index, pools.moves.copy[pools.moves.num[COPY]])
        pools.moves.num[COPY] += 1
    else:
        forget_content(blocks, row, index)
    end = rows.at[row].num_computed_tokens + rows.at[row].num_new
    grow_table(blocks, row, blocks_for(blocks, end))


@njit_inner
def group_end(rows: Rows, first: int) -> int:
    """Return the place in `running` behind the group that begins at `first`."""
    running, serial = rows.running, rows.at.serial
    end = first + 1
    while end < rows.num_running[0] and serial[running[end]] == serial[running[first]]:
        end += 1
    return end


@njit_inner
def last_group(rows: Rows) -> int:
    """Return the place in `running` at which the last group begins."""
    running, serial = rows.running, rows.at.serial
    first = rows.num_running[0] - 1
    while first > 0 and serial[running[first - 1]] == serial[running[first]]:
        first -= 1
    return int(first)


@njit_inner
def prefers_swap(rows: Rows, pools: Pools, group: NDArray[np.int32], costs: Costs) -> bool:
    """Return whether to swap the group out: if there is room and it costs less than to recompute it."""
    num_blocks = count_blocks(pools.device, group)
    if num_blocks == 0 or num_blocks > num_available(pools.host):
        return False
    num_tokens = 0
    for i in range(group.size):
        row = group[i]
        shared = rows.at[row].num_prompt_tokens if i > 0 else 0  # is recomputed once
        num_tokens += max(0, rows.at[row].num_computed_tokens - shared)
    return bool(num_blocks * costs.swap < num_tokens * costs.recompute)


@njit
def preempt_last(rows: Rows, pools: Pools, costs: Costs) -> bool:
    """Take the last group out of `running` and its blocks away; return whether they are swapped out.

    Its rows are then found behind the others, at running[num_running:].
    """
    first = last_group(rows)
    group = rows.running[first : rows.num_running[0]]
    rows.num_running[0] = first
    swaps = prefers_swap(rows, pools, group, costs)
    blocks, moves = pools.device, pools.moves
    if swaps:
        out = moves.num[SWAP_OUT]
        count = move_tables(blocks, pools.host, group, moves.swap_out[out:])
        moves.num[SWAP_OUT] += count
    for row in group:
        rows.at[row].num_new = 0
        free_table(blocks, row)
    blocks.counters[PREEMPTIONS] += 1
    return swaps


@njit_inner
def next_to_grow(rows: Rows, blocks: Blocks, first: int) -> int:
    """Return the first place in `running` from `first` on whose row lacks a block of its own to write to."""
    running, at, size = rows.running, rows.at, blocks.block_size
    tables, held, of_block, entries = blocks.block_tables, blocks.held, blocks.at, blocks.cache.at
    for i in range(first, rows.num_running[0]):
        row = running[i]
        computed, stored = at[row].num_computed_tokens, at[row].num_shared_tokens
        end = computed + at[row].num_new
        if at[row].num_new == 0 or end <= stored:
            continue
        if end > held[row].num_blocks * size:
            return i
        block = tables[row, max(computed, stored) // size]
        if of_block[block].ref_count > 1 or (entries.size > 0 and entries[block].serial != NO_ENTRY):
            return i
    return int(rows.num_running[0])


@njit_inner
def num_planned(rows: Rows, end: int) -> int:
    """Return how many tokens are planned for running[:end]."""
    planned = 0
    for row in rows.running[:end]:
        planned += rows.at[row].num_new
    return int(planned)


@njit_inner
def grow_groups(
    rows: Rows, pools: Pools, costs: Costs, is_in_flight: bool, swapped: NDArray[np.bool_]
) -> int:
    """Give planned rows their blocks, group by group; preempt from the end, return how many groups.

    A group gets all that its rows need, or nothing: none is preempted that has taken blocks in this step, so
    that no copy of this step is from or to a block that was given up in it. The last one that runs keeps what
    it has and waits, if others are planned or in flight, who may give blocks back. swapped[i] tells of the
    group that was preempted i-th.
    """
    blocks, running = pools.device, rows.running
    num_preempted = 0
    first = next_to_grow(rows, blocks, 0)
    while first < rows.num_running[0]:
        end = group_end(rows, first)
        wanted = count_wanted(rows, blocks, running[first:end])
        while wanted > num_available(blocks) and rows.num_running[0] > end:
            swapped[num_preempted] = preempt_last(rows, pools, costs)
            num_preempted += 1
        has_room = wanted <= num_available(blocks)
        if not (has_room or is_in_flight or num_planned(rows, first) > 0):
            swapped[num_preempted] = preempt_last(rows, pools, costs)
            num_preempted += 1
            break
        for i in range(first, end):
            if has_room:
                take_blocks(rows, pools, running[i])
            else:
                rows.at[running[i]].num_new = 0
        first = next_to_grow(rows, blocks, end)
    return num_preempted


@njit_inner
def plan_running(
    rows: Rows,
    pools: Pools,
    turns: NDArray[np.int64],
    limits: tuple[int, Head, Costs, bool],
    swapped: NDArray[np.bool_],
) -> int:
    """Set num_new of the running rows and give them blocks; return how many groups were preempted for it.

    limits = (budget, head, costs, whether a step is in flight). The first of `turns` [num_rows + 1] order
    [0, num_running], the head last in number, by last turn; that is needed where num_running >= budget.
    swapped [num_rows] is as grow_groups has it.
    """
    budget, head, costs, is_in_flight = limits
    total, num_decodes = find_remaining(rows, rows.running[: rows.num_running[0]])
    others = head.num_tokens > 0 or total > num_decodes
    # Decodes that use up the budget would starve everybody else, or one another.
    if num_decodes > budget or (num_decodes == budget and others):
        take_turns(rows, turns[: rows.num_running[0] + 1], budget, head.num_tokens)
    elif total > num_decodes:
        share_budget(rows, budget, num_decodes, head)
    return int(grow_groups(rows, pools, costs, is_in_flight, swapped))
