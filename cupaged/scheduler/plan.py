"""The step's plan under one token budget, and what a finished step changes: njit over Rows and Blocks.

There is no prefill phase and no decode phase, only num_computed_tokens catching up with the tokens
that are known or in flight.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cupaged.batch import Flag
from cupaged.jit import njit, njit_inner
from cupaged.scheduler.allocator import Blocks, free_table, grow_table
from cupaged.scheduler.state import NO_SERIAL, Rows
from cupaged.sequence import NOT_FINISHED, FinishReason

SAMPLES = int(Flag.SAMPLES)
STOP = int(FinishReason.STOP)
LENGTH = int(FinishReason.LENGTH)


@njit_inner
def num_remaining(rows: Rows, row: int) -> int:
    """Return how many tokens the row could compute now; a token past max_total_tokens never."""
    target = rows.num_tokens[row] + rows.num_in_flight[row]
    return target - rows.num_computed_tokens[row] if target < rows.max_total_tokens[row] else 0


@njit_inner
def share_budget(rows: Rows, budget: int, num_decodes: int) -> None:
    """Plan every decode, then prefill chunks, oldest first, out of what is left."""
    left = budget - num_decodes
    for i in range(rows.num_running[0]):
        row = rows.running[i]
        remaining = num_remaining(rows, row)
        if remaining > 1:
            remaining = min(remaining, left)
            left -= remaining
        rows.num_new[row] = remaining


@njit_inner
def take_turns(rows: Rows, turns: NDArray[np.int64], budget: int, num_head: int) -> None:
    """Plan in the order of `turns` until the budget is spent.

    The head of the queue has its turn too, as one more running row. Its share is only kept aside here: it is
    admitted when the running rows have their blocks.
    """
    head = rows.num_running[0]
    for i in turns:
        if i == head:
            budget -= min(budget, num_head)
        else:
            row = rows.running[i]
            rows.num_new[row] = min(budget, num_remaining(rows, row))
            budget -= rows.num_new[row]


@njit_inner
def grow_tables(rows: Rows, blocks: Blocks) -> int:
    """Give planned rows their blocks, oldest first; preempt from the newest end, return how many.

    running[num_running : num_running + preempted] are then the preempted ones. The victim is never a row that
    has grown in this step: those are all older than the one that asks.
    """
    running, num_running = rows.running, rows.num_running
    before = num_running[0]
    i = 0
    while i < num_running[0]:
        row = running[i]
        if rows.num_new[row] > 0:
            end = rows.num_computed_tokens[row] + rows.num_new[row]
            needed = (end + blocks.block_size - 1) // blocks.block_size
            while not grow_table(blocks, row, needed):
                num_running[0] -= 1
                victim = running[num_running[0]]
                free_table(blocks, victim)
                rows.num_computed_tokens[victim] = 0
                rows.num_new[victim] = 0
                if victim == row:
                    break
        i += 1
    return int(before - num_running[0])


@njit
def plan_running(
    rows: Rows, blocks: Blocks, turns: NDArray[np.int64], budget: int, num_head: int
) -> tuple[int, int]:
    """Set num_new of the running rows and give them blocks; return (tokens planned, rows preempted).

    `num_head` is what the first waiting sequence would compute if it could enter now, else 0. `turns` orders
    [0, num_running], the head last in number, by last turn; it is needed where num_running >= budget.
    """
    num_decodes = 0
    others = num_head > 0
    for i in range(rows.num_running[0]):
        remaining = num_remaining(rows, rows.running[i])
        num_decodes += remaining == 1
        others |= remaining > 1
    # Decodes that use up the budget would starve everybody else, or one another.
    if num_decodes > budget or (num_decodes == budget and others):
        take_turns(rows, turns, budget, num_head)
    else:
        share_budget(rows, budget, num_decodes)
    num_preempted = grow_tables(rows, blocks)
    planned = 0
    for i in range(rows.num_running[0]):
        planned += rows.num_new[rows.running[i]]
    return int(planned), num_preempted


@njit
def advance(rows: Rows, step: int) -> None:
    """Count the planned step as submitted: its tokens computed, its samples in flight."""
    for i in range(rows.num_running[0]):
        row = rows.running[i]
        if rows.num_new[row] > 0:
            end = rows.num_computed_tokens[row] + rows.num_new[row]
            rows.num_computed_tokens[row] = end
            rows.num_in_flight[row] += end == rows.num_tokens[row] + rows.num_in_flight[row]
            rows.prompt_logprobs_end[row] = max(end, rows.prompt_logprobs_end[row])
            rows.last_scheduled[row] = step
            rows.reset[row] = False


@njit
def release(rows: Rows, blocks: Blocks, row: int) -> None:
    """Take blocks and serial from a row; `compact` then takes it out of those that run."""
    free_table(blocks, row)
    rows.serial[row] = NO_SERIAL


@njit
def compact(rows: Rows) -> None:
    """Close the gaps that released rows leave in `running`."""
    kept = 0
    for i in range(rows.num_running[0]):
        row = rows.running[i]
        if rows.serial[row] != NO_SERIAL:
            rows.running[kept] = row
            kept += 1
    rows.num_running[0] = kept


@njit_inner
def is_stop(stop_token_ids: NDArray[np.int32], row: int, token_id: int) -> bool:
    """Return whether the row ends with this token."""
    i = 0
    while stop_token_ids[row, i] >= 0:
        if stop_token_ids[row, i] == token_id:
            return True
        i += 1
    return False


class StepRows(NamedTuple):
    """A step that has come back: of the batch (rows, serials, flags) and of StepOutput."""

    rows: NDArray[np.int32]  # [num_seqs]
    serials: NDArray[np.int64]  # [num_seqs]
    flags: NDArray[np.int32]  # [num_seqs]
    token_ids: NDArray[np.int32]  # [num_seqs, k]
    num_tokens: NDArray[np.int32]  # [num_seqs]


@njit
def apply_output(
    rows: Rows, blocks: Blocks, step: StepRows, num_appended: NDArray[np.int32], reasons: NDArray[np.int8]
) -> None:
    """Append what the step sampled and release the rows that end; write both per sequence.

    num_appended becomes -1 where the row has meanwhile been given up: its result is nobody's.
    """
    tokens, num_tokens, max_total = rows.tokens, rows.num_tokens, rows.max_total_tokens
    serial, num_in_flight, stop_token_ids = rows.serial, rows.num_in_flight, rows.stop_token_ids
    step_rows, serials, flags, sampled, num_sampled = step
    ended = False
    for i in range(step_rows.size):
        row = step_rows[i]
        num_appended[i] = 0
        reasons[i] = NOT_FINISHED
        if serial[row] != serials[i]:
            num_appended[i] = -1
            continue
        samples = (flags[i] & SAMPLES) != 0
        assert samples == (num_sampled[i] > 0), "tokens from a sequence that did not sample, or none"
        num_in_flight[row] -= samples
        for j in range(num_sampled[i]):
            n = num_tokens[row]
            tokens[row, n] = sampled[i, j]
            num_tokens[row] = n + 1
            num_appended[i] += 1
            if is_stop(stop_token_ids, row, sampled[i, j]):
                reasons[i] = STOP
            elif n + 1 >= max_total[row]:
                reasons[i] = LENGTH
            if reasons[i] != NOT_FINISHED:
                release(rows, blocks, row)
                ended = True
                break
    if ended:
        compact(rows)
