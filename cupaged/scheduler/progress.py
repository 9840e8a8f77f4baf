"""What a submitted step and one that has come back change: njit over Rows and Blocks."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cupaged.batch import Flag
from cupaged.jit import njit, njit_inner
from cupaged.scheduler.allocator import HOLE, Blocks, free_before, free_table, reorder_tables, share_table
from cupaged.scheduler.counters import Counter
from cupaged.scheduler.plan import Pools
from cupaged.scheduler.prefix_cache import chain_hash, register_block
from cupaged.scheduler.state import NEVER, NO_SERIAL, Rows
from cupaged.sequence import NOT_FINISHED, FinishReason

SAMPLES = int(Flag.SAMPLES)
STOP = int(FinishReason.STOP)
LENGTH = int(FinishReason.LENGTH)
FORKS = int(Counter.FORKS)
RECOMPUTED_TOKENS = int(Counter.RECOMPUTED_TOKENS)


@njit_inner
def count_recomputed(rows: Rows, blocks: Blocks, row: int) -> None:
    """Count what the row computes once more, now that it begins at num_computed_tokens."""
    again = rows.num_lost_tokens[row] - rows.num_computed_tokens[row]
    blocks.counters[RECOMPUTED_TOKENS] += max(0, again)
    rows.num_lost_tokens[row] = 0


@njit_inner
def fork(rows: Rows, blocks: Blocks, source: int, target: int) -> None:
    """Let the pending row `target` go on from the prompt that row `source` has computed.

    If the prompt is all that it knows, it computes the last token again, for a sample of its own.
    """
    prompt = rows.num_prompt_tokens[target]
    share_table(blocks, source, target, (prompt + blocks.block_size - 1) // blocks.block_size)
    rows.num_stored_tokens[target] = prompt
    rows.num_computed_tokens[target] = min(prompt, rows.num_tokens[target] - 1)
    rows.is_pending[target] = False
    count_recomputed(rows, blocks, target)
    blocks.counters[FORKS] += 1


@njit
def advance(rows: Rows, blocks: Blocks, step: int) -> None:
    """Count the planned step as submitted: tokens computed, samples in flight; fork who waits for it."""
    num_new, computed, serial = rows.num_new, rows.num_computed_tokens, rows.serial
    num_tokens, in_flight, pending = rows.num_tokens, rows.num_in_flight, rows.is_pending
    running, num_running = rows.running, rows.num_running[0]
    for i in range(num_running):
        row = running[i]
        if num_new[row] == 0:
            continue
        computed[row] += num_new[row]
        in_flight[row] += computed[row] == num_tokens[row] + in_flight[row]
        rows.last_scheduled[row] = step
        rows.reset[row] = False
        num_new[row] = 0
        j = i + 1
        while j < num_running and pending[running[j]] and serial[running[j]] == serial[row]:
            if computed[row] >= rows.num_prompt_tokens[row]:
                fork(rows, blocks, row, running[j])
                rows.last_scheduled[running[j]] = step
            j += 1


@njit_inner
def release(rows: Rows, pools: Pools, row: int) -> None:
    """Take blocks, wherever they lie, and serial from a row; `close_gaps` must follow."""
    free_table(pools.device, row)
    free_table(pools.host, row)
    rows.serial[row] = NO_SERIAL


@njit_inner
def close_gaps(rows: Rows) -> None:
    """Take released rows out of `running`."""
    kept = 0
    for i in range(rows.num_running[0]):
        row = rows.running[i]
        if rows.serial[row] != NO_SERIAL:
            rows.running[kept] = row
            kept += 1
    rows.num_running[0] = kept


@njit
def release_rows(rows: Rows, pools: Pools, given_up: NDArray[np.int32]) -> None:
    """Take blocks and serials from rows."""
    for row in given_up:
        release(rows, pools, row)
    close_gaps(rows)


@njit_inner
def register(rows: Rows, blocks: Blocks, row: int, num_written: int) -> None:
    """Tell the prefix cache of the row's full blocks among its first `num_written` tokens."""
    cache, size = blocks.cache, blocks.block_size
    end = min(num_written // size, blocks.num_blocks[row])
    while rows.num_registered[row] < end:
        n = rows.num_registered[row]
        block = blocks.block_tables[row, n]
        if block == HOLE:  # it left the window unregistered: what follows it could never be found
            rows.num_registered[row] = NEVER
            return
        tokens = rows.tokens[row, n * size : (n + 1) * size]
        value = chain_hash(cache, rows.chain_hash[row], tokens)
        parent, salt = rows.chain_serial[row], rows.salt[row]
        rows.chain_serial[row] = register_block(cache, block, value, parent, salt, tokens)
        rows.chain_hash[row] = value
        rows.num_registered[row] = n + 1


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
    """A step that has come back: of the batch (rows, serials, flags, seq_lens) and of StepOutput."""

    rows: NDArray[np.int32]  # [num_seqs]
    serials: NDArray[np.int64]  # [num_seqs]
    flags: NDArray[np.int32]  # [num_seqs]
    seq_lens: NDArray[np.int32]  # [num_seqs]
    token_ids: NDArray[np.int32]  # [num_seqs, k]
    num_tokens: NDArray[np.int32]  # [num_seqs]


@njit
def apply_output(
    rows: Rows,
    pools: Pools,
    step: StepRows,
    sliding_window: int,  # tokens, 0 = all
    outcome: tuple[NDArray[np.int32], NDArray[np.int8]],
) -> None:
    """Append what the step sampled and release the rows that end; outcome = (num_appended, reasons).

    num_appended becomes -1 where the row has meanwhile been given up: its result is nobody's.
    """
    num_appended, reasons = outcome
    blocks, size = pools.device, pools.device.block_size
    tokens, num_tokens, max_total = rows.tokens, rows.num_tokens, rows.max_total_tokens
    serial, in_flight, is_beam = rows.serial, rows.num_in_flight, rows.is_beam
    asked, registered, stop_token_ids = rows.prompt_logprobs_end, rows.num_registered, rows.stop_token_ids
    step_rows, serials, flags, seq_lens, sampled, num_sampled = step
    caches = blocks.cache.slots.size > 0
    ended = False
    for i in range(step_rows.size):
        row, written = step_rows[i], seq_lens[i]
        num_appended[i], reasons[i] = 0, NOT_FINISHED
        if serial[row] != serials[i]:
            num_appended[i] = -1
            continue
        samples = (flags[i] & SAMPLES) != 0
        assert samples == (num_sampled[i] > 0), "tokens from a sequence that did not sample, or none"
        in_flight[row] -= samples
        asked[row] = max(asked[row], written)
        for j in range(0 if is_beam[row] else num_sampled[i]):
            n = num_tokens[row]
            tokens[row, n] = sampled[i, j]
            num_tokens[row] = n + 1
            num_appended[i] += 1
            if is_stop(stop_token_ids, row, sampled[i, j]):
                reasons[i] = STOP
            elif n + 1 >= max_total[row]:
                reasons[i] = LENGTH
            if reasons[i] != NOT_FINISHED:
                break
        if caches and written // size > registered[row]:
            register(rows, blocks, row, written)
        if reasons[i] != NOT_FINISHED:
            release(rows, pools, row)
            ended = True
        elif 0 < sliding_window <= written:
            # The next query is at `written` or later: it sees the tokens behind written - sliding_window.
            free_before(blocks, row, (written - sliding_window + 1) // size)
    if ended:
        close_gaps(rows)


@njit_inner
def reorder_column(column: NDArray[Any], beams: NDArray[np.int32], parents: NDArray[np.int32]) -> None:
    """Let column[beams[i]] be what column[beams[parents[i]]] was, and 0 behind the parents."""
    old = column[beams]
    for i in range(beams.size):
        column[beams[i]] = old[parents[i]] if i < parents.size else 0


@njit
def reorder_beams(
    rows: Rows,
    pools: Pools,
    beams: NDArray[np.int32],
    parents: NDArray[np.int32],
    token_ids: NDArray[np.int32],
) -> None:
    """Let the row beams[i] be what beams[parents[i]] was and then token_ids[i], the others take no part."""
    longest = 0
    for row in beams:
        rows.num_in_flight[row] = 0
        longest = max(longest, rows.num_tokens[row])
    old = np.empty((beams.size, longest), np.int32)
    for i in range(beams.size):
        for j in range(rows.num_tokens[beams[i]]):
            old[i, j] = rows.tokens[beams[i], j]
    reorder_tables(pools.device, beams, parents)
    reorder_tables(pools.host, beams, parents)
    reorder_column(rows.num_tokens, beams, parents)
    reorder_column(rows.num_computed_tokens, beams, parents)
    reorder_column(rows.num_stored_tokens, beams, parents)
    reorder_column(rows.num_lost_tokens, beams, parents)
    reorder_column(rows.num_registered, beams, parents)
    reorder_column(rows.chain_hash, beams, parents)
    reorder_column(rows.chain_serial, beams, parents)
    for i in range(parents.size):
        row = beams[i]
        for j in range(rows.num_tokens[row]):
            rows.tokens[row, j] = old[parents[i], j]
        rows.tokens[row, rows.num_tokens[row]] = token_ids[i]
        rows.num_tokens[row] += 1
