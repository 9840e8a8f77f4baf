"""What a submitted step and one that has come back change: njit over Rows and Blocks."""

import numpy as np
from numpy.typing import NDArray

from cupaged.batch import Flag
from cupaged.jit import njit, njit_inner
from cupaged.scheduler.allocator import (
    HOLE,
    Blocks,
    blocks_for,
    free_before,
    free_table,
    reorder_tables,
    share_table,
)
from cupaged.scheduler.counters import Counter
from cupaged.scheduler.pack import Packed
from cupaged.scheduler.pools import Pools
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
    again = rows.at[row].num_lost_tokens - rows.at[row].num_computed_tokens
    blocks.counters[RECOMPUTED_TOKENS] += max(0, again)
    rows.at[row].num_lost_tokens = 0


@njit_inner
def fork(rows: Rows, blocks: Blocks, source: int, target: int) -> None:
    """Let the pending row `target` go on from the prompt that row `source` has computed.

    If the prompt is all that it knows, it computes the last token again, for a sample of its own.
    """
    prompt = rows.at[target].num_prompt_tokens
    share_table(blocks, source, target, blocks_for(blocks, prompt))
    rows.at[target].num_shared_tokens = prompt
    rows.at[target].num_computed_tokens = min(prompt, rows.at[target].num_tokens - 1)
    rows.at[target].is_pending = False
    registered = rows.at[source].num_registered
    if registered == NEVER or registered * blocks.block_size <= prompt:  # with blocks that both hold
        rows.at[target].num_registered = registered
        rows.at[target].chain_hash = rows.at[source].chain_hash
        rows.at[target].chain_serial = rows.at[source].chain_serial
    count_recomputed(rows, blocks, target)
    blocks.counters[FORKS] += 1


@njit_inner
def advance(rows: Rows, blocks: Blocks, step: int) -> None:
    """Count the planned step as submitted: tokens computed, samples in flight; fork who waits for it."""
    running, num_running = rows.running, rows.num_running[0]
    for i in range(num_running):
        row = running[i]
        at = rows.at[row]
        if at.num_new == 0:
            continue
        at.num_computed_tokens += at.num_new
        at.num_in_flight += at.num_computed_tokens == at.num_tokens + at.num_in_flight
        at.last_scheduled, at.reset, at.num_new = step, False, 0
        j = i + 1
        while j < num_running and rows.at[running[j]].is_pending and rows.at[running[j]].serial == at.serial:
            if at.num_computed_tokens >= at.num_prompt_tokens:
                fork(rows, blocks, row, running[j])
                rows.at[running[j]].last_scheduled = step
            j += 1


@njit_inner
def release(rows: Rows, pools: Pools, row: int) -> None:
    """Take blocks, wherever they lie, and serial from a row; `close_gaps` must follow."""
    free_table(pools.device, row)
    free_table(pools.host, row)
    rows.at[row].serial = NO_SERIAL


@njit_inner
def close_gaps(rows: Rows) -> None:
    """Take released rows out of `running`."""
    kept = 0
    for i in range(rows.num_running[0]):
        row = rows.running[i]
        if rows.at[row].serial != NO_SERIAL:
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
    end = min(num_written // size, blocks.held[row].num_blocks)
    at = rows.at[row]
    while at.num_registered < end:
        n = at.num_registered
        block = blocks.block_tables[row, n]
        if block == HOLE:  # it left the window unregistered: what follows it could never be found
            at.num_registered = NEVER
            return
        tokens = rows.tokens[row, n * size : (n + 1) * size]
        at.chain_hash = chain_hash(cache, at.chain_hash, tokens)
        at.chain_serial = register_block(cache, block, at.chain_hash, at.chain_serial, at.salt, tokens)
        at.num_registered = n + 1


@njit_inner
def is_stop(stop_token_ids: NDArray[np.int32], row: int, token_id: int) -> bool:
    """Return whether the row ends with this token."""
    i = 0
    while stop_token_ids[row, i] >= 0:
        if stop_token_ids[row, i] == token_id:
            return True
        i += 1
    return False


@njit_inner
def apply_output(
    rows: Rows,
    pools: Pools,
    step: Packed,
    output: tuple[NDArray[np.int32], NDArray[np.int32]],
    sliding_window: int,  # tokens, 0 = all
    outcome: tuple[NDArray[np.int32], NDArray[np.int8]],
) -> bool:
    """Append what the step sampled and release the rows that end.

    output = (token_ids, num_tokens), outcome = (num_appended, reasons). num_appended becomes -1 where the row
    has meanwhile been given up: its result is nobody's. Return whether any was, or any ended.
    """
    num_appended, reasons = outcome
    blocks, size = pools.device, pools.device.block_size
    tokens, stop_token_ids = rows.tokens, rows.stop_token_ids
    packed, serials = step
    step_rows, flags, seq_lens = packed.rows, packed.flags, packed.seq_lens
    sampled, num_sampled = output
    caches = blocks.cache.slots.size > 0
    ended = lost = False
    for i in range(num_appended.size):
        row, written = step_rows[i], seq_lens[i]
        num_appended[i], reasons[i] = 0, NOT_FINISHED
        at = rows.at[row]
        if at.serial != serials[i]:
            num_appended[i], lost = -1, True
            continue
        samples = (flags[i] & SAMPLES) != 0
        assert samples == (num_sampled[i] > 0), "tokens from a sequence that did not sample, or none"
        at.num_in_flight -= samples
        at.prompt_logprobs_end = max(at.prompt_logprobs_end, written)
        for j in range(0 if at.is_beam else num_sampled[i]):
            n = at.num_tokens
            tokens[row, n] = sampled[i, j]
            at.num_tokens = n + 1
            num_appended[i] += 1
            if is_stop(stop_token_ids, row, sampled[i, j]):
                reasons[i] = STOP
            elif n + 1 >= at.max_total_tokens:
                reasons[i] = LENGTH
            if reasons[i] != NOT_FINISHED:
                break
        if caches and written // size > at.num_registered:
            register(rows, blocks, row, written)
        if reasons[i] != NOT_FINISHED:
            release(rows, pools, row)
            ended = True
        elif 0 < sliding_window <= written:
            # The next query is at `written` or later: it sees the tokens behind written - sliding_window.
            free_before(blocks, row, (written - sliding_window + 1) // size)
    if ended:
        close_gaps(rows)
    return ended or lost


@njit
def reorder_beams(
    rows: Rows,
    pools: Pools,
    beams: NDArray[np.int32],
    choices: NDArray[np.int32],  # [2, at most beams.size], parents and token ids
    serial: int,
) -> None:
    """Let the row beams[i] be what beams[parents[i]] was and then token_ids[i], the others take no part.

    All get a new serial, so that what is in flight for them is discarded.
    """
    parents, token_ids = choices[0], choices[1]
    longest = 0
    for row in beams:
        assert not rows.at[row].is_pending, "a beam has not come to its token yet"
        rows.at[row].serial = serial
        longest = max(longest, rows.at[row].num_tokens)
    old, tokens = rows.at[beams], np.empty((beams.size, longest), np.int32)
    num_written = np.empty(beams.size, np.int32)
    for i in range(beams.size):
        num_written[i] = max(old[i].num_computed_tokens, old[i].num_shared_tokens)
        for j in range(old[i].num_tokens):
            tokens[i, j] = rows.tokens[beams[i], j]
    reorder_tables(pools.device, beams, parents, num_written)
    reorder_tables(pools.host, beams, parents, num_written)
    for i in range(parents.size):
        row, known = beams[i], old[parents[i]].num_tokens
        rows.at[row] = old[parents[i]]
        for j in range(known):
            rows.tokens[row, j] = tokens[parents[i], j]
        rows.tokens[row, known] = token_ids[i]
        rows.at[row].num_tokens = known + 1
        rows.at[row].num_in_flight = 0
    for row in beams[parents.size :]:
        rows.at[row].num_tokens = rows.at[row].num_computed_tokens = rows.at[row].num_in_flight = 0
