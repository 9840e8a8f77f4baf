"""Write a plan as a record: njit, from the batch's arrays, against the rows' last steps.

Every array of a batch is covered but for token ids (input_ids, logit_target, banned, history).
plan_decoder.py reads it back and is what says that nothing is lost.
"""

import numpy as np
from numpy.typing import NDArray

from cupaged.batch import Batch, BatchArrays, Count, Flag
from cupaged.jit import njit, njit_inner
from cupaged.trace.plan_state import CONTEXT, NUM_COLUMNS, Column, PlanState
from cupaged.trace.varint import MAX_BYTES, put

SAMPLES = int(Flag.SAMPLES)
RESET = int(Flag.RESET)
C_TOKENS, C_SEQS, C_DECODES = int(Count.NUM_TOKENS), int(Count.NUM_SEQS), int(Count.NUM_DECODES)
C_LOGITS, C_WIDTH = int(Count.NUM_LOGITS), int(Count.TABLE_WIDTH)
C_COPY = int(Count.NUM_COPY)
C_SWAP_OUT, C_SWAP_IN = int(Count.NUM_SWAP_OUT), int(Count.NUM_SWAP_IN)
ROW, TABLE, NUM_NEW = int(Column.ROW), int(Column.TABLE), int(Column.NUM_NEW)
SEQ_LEN, FLAGS, OUTPUT_POSITION = int(Column.SEQ_LEN), int(Column.FLAGS), int(Column.OUTPUT_POSITION)
NUM_BANNED, NUM_HISTORY = int(Column.NUM_BANNED), int(Column.NUM_HISTORY)
GROUP_INDEX, TEMPERATURE, TOP_P = int(Column.GROUP_INDEX), int(Column.TEMPERATURE), int(Column.TOP_P)
MIN_P, TOP_K = int(Column.MIN_P), int(Column.TOP_K)
SEED_LOW, SEED_HIGH = int(Column.SEED_LOW), int(Column.SEED_HIGH)
NUM_LOGPROBS, NUM_PROMPT_LOGPROBS = int(Column.NUM_LOGPROBS), int(Column.NUM_PROMPT_LOGPROBS)


@njit_inner
def foretell(last: NDArray[np.int32], is_decode: bool, num_new: int, told: NDArray[np.int64]) -> None:
    """Write what a row's columns should be after `last`; `num_new` is what they are, for the length."""
    for k in range(NUM_COLUMNS):
        told[k] = last[k]
    if is_decode:
        told[NUM_NEW] = 1
    told[SEQ_LEN] += num_new
    if told[FLAGS] & SAMPLES:
        told[OUTPUT_POSITION] += 1
    told[FLAGS] &= ~RESET
    told[NUM_HISTORY] = 0


@njit_inner
def count_changes(table: NDArray[np.int32], last: NDArray[np.int32], at_least: int) -> tuple[int, int]:
    """Return how many places of a block table are not as last time, and where it ends.

    It is -1 past its end, which is not before `at_least`.
    """
    changes = 0
    for j in range(at_least):
        changes += table[j] + np.int32(1) != last[j]
    end = at_least
    while end < table.size and table[end] >= 0:
        changes += table[end] + np.int32(1) != last[end]
        end += 1
    return changes, end


@njit_inner
def put_table(
    out: NDArray[np.uint8], at: int, table: NDArray[np.int32], last: NDArray[np.int32], changes: int
) -> int:
    """Write where a block table is not as last time, (places skipped, difference to the block before)."""
    at = put(out, at, changes)
    place = 0
    before = np.int32(0)
    for j in range(table.size):
        block = table[j] + np.int32(1)
        if block != last[j]:
            at = put(out, at, j - place)
            at = put(out, at, np.int64(block) - before)
            place = j + 1
            before = block
            last[j] = block
    return at


@njit
def put_seqs(state: PlanState, a: BatchArrays, num_seqs: int, out: NDArray[np.uint8], at: int) -> int:
    """Write each sequence that is not as foretold: how many before it were, a mask, what it masks."""
    row_after, columns, tables, ends = state.row_after, state.columns, state.tables, state.table_ends
    rows, block_tables, size = a.rows, a.block_tables, state.block_size
    query_start, banned_start, history_start = a.query_start, a.banned_start, a.history_start
    temperature, top_p, min_p = a.temperature.view(np.int32), a.top_p.view(np.int32), a.min_p.view(np.int32)
    seq_lens, flags, positions, index = a.seq_lens, a.flags, a.output_position, a.group_index
    top_k, seed, logprobs, prompt_logprobs = a.top_k, a.seed, a.num_logprobs, a.num_prompt_logprobs
    num_decodes, width = a.counts[C_DECODES], np.int64(a.counts[C_WIDTH])
    now, told = np.empty(NUM_COLUMNS, np.int64), np.empty(NUM_COLUMNS, np.int64)
    previous = row_after.size - 1
    as_foretold = 0
    for i in range(num_seqs):
        row = rows[i]
        now[NUM_NEW] = query_start[i + 1] - query_start[i]
        now[NUM_BANNED] = banned_start[i + 1] - banned_start[i]
        now[NUM_HISTORY] = history_start[i + 1] - history_start[i]
        now[SEQ_LEN], now[FLAGS], now[OUTPUT_POSITION] = seq_lens[i], flags[i], positions[i]
        now[GROUP_INDEX], now[TOP_K] = index[i], top_k[i]
        now[TEMPERATURE], now[TOP_P], now[MIN_P] = temperature[i], top_p[i], min_p[i]
        now[SEED_LOW], now[SEED_HIGH] = seed[i, 0], seed[i, 1]
        now[NUM_LOGPROBS], now[NUM_PROMPT_LOGPROBS] = logprobs[i], prompt_logprobs[i]
        foretell(columns[row], i < num_decodes, now[NUM_NEW], told)
        mask = np.int64(row != row_after[previous]) << ROW
        for k in range(NUM_NEW, NUM_COLUMNS):
            mask |= np.int64(now[k] != told[k]) << k
            columns[row, k] = now[k]
        at_least = min(width, max(np.int64(ends[row]), (now[SEQ_LEN] + size - 1) // size))
        changes, end = count_changes(block_tables[i, :width], tables[row, :width], at_least)
        ends[row] = max(end, ends[row])
        mask |= np.int64(changes > 0) << TABLE
        if mask:
            at = put(out, at, as_foretold)
            at = put(out, at, mask)
            as_foretold = -1
            if mask & 1 << ROW:
                at = put(out, at, row)
            for k in range(NUM_NEW, NUM_COLUMNS):
                if mask & 1 << k:
                    at = put(out, at, now[k] - told[k])
            if changes:
                at = put_table(out, at, block_tables[i, :end], tables[row, :end], changes)
        as_foretold += 1
        row_after[previous] = row
        previous = row
    return put(out, at, as_foretold)


@njit_inner
def put_tokens(state: PlanState, a: BatchArrays, num_seqs: int, out: NDArray[np.uint8], at: int) -> int:
    """Write the positions and slots that do not follow from lengths and tables, (index, value), then -1."""
    query_start, seq_lens, tables = a.query_start, a.seq_lens, a.block_tables
    positions, slots, block_size = a.positions, a.slot_mapping, state.block_size
    for i in range(num_seqs):
        start, end = query_start[i], query_start[i + 1]
        for t in range(start, end):
            p = seq_lens[i] - end + t
            if positions[t] != p:
                at = put(out, at, 2 * t)
                at = put(out, at, positions[t])
            slot = tables[i, p // block_size] * block_size + p % block_size
            if slots[t] != slot:
                at = put(out, at, 2 * t + 1)
                at = put(out, at, slots[t])
    return put(out, at, -1)


@njit_inner
def put_logits(a: BatchArrays, num_seqs: int, out: NDArray[np.uint8], at: int) -> int:
    """Write 0 if whose logits are wanted follows from who samples; else 1, and which."""
    index, seq, target, num_logits = a.logit_index, a.logit_seq, a.logit_target, a.counts[C_LOGITS]
    flags, query_start = a.flags, a.query_start
    n = 0
    for i in range(num_seqs):
        if flags[i] & SAMPLES:
            if n < num_logits and index[n] == query_start[i + 1] - 1 and seq[n] == i and target[n] < 0:
                n += 1
            else:
                n = num_logits + 1
                break
    if n == num_logits:
        return put(out, at, 0)
    at = put(out, at, 1)
    for n in range(num_logits):
        at = put(out, at, index[n])
        at = put(out, at, 2 * seq[n] + (target[n] < 0))
    return at


@njit_inner
def put_pairs(out: NDArray[np.uint8], at: int, words: NDArray[np.int32]) -> int:
    """Write numbers that come in pairs, each as the difference to the one two before."""
    for i in range(words.size):
        before = np.int64(words[i - 2]) if i > 1 else np.int64(0)
        at = put(out, at, words[i] - before)
    return at


@njit
def encode(state: PlanState, a: BatchArrays, out: NDArray[np.uint8]) -> int:
    """Write a plan into `out`, move `state` on; return the bytes."""
    counts, before, num_seqs = a.counts, state.counts, a.counts[C_SEQS]
    at = 0
    for k in range(CONTEXT):
        at = put(out, at, counts[k] - before[k])
        before[k] = counts[k]
    context = np.int64(0)
    for i in range(num_seqs):
        context += a.seq_lens[i]
    at = put(out, at, context - before[CONTEXT])
    before[CONTEXT] = context
    at = put_seqs(state, a, num_seqs, out, at)
    at = put_tokens(state, a, num_seqs, out, at)
    at = put_logits(a, num_seqs, out, at)
    at = put_pairs(out, at, a.copy[: counts[C_COPY]].reshape(-1))
    swap_in = 2 * counts[C_SWAP_OUT]
    at = put_pairs(out, at, a.tail[:swap_in])
    return put_pairs(out, at, a.tail[swap_in : swap_in + 2 * counts[C_SWAP_IN]])


class PlanEncoder:
    """Turns plans into bytes, one after the other, and keeps what they are foretold from."""

    def __init__(self, state: PlanState) -> None:
        """Take the state before the first plan."""
        self._state = state
        self._out = np.empty(0, np.uint8)

    def encode(self, batch: Batch) -> bytes:
        """Return the plan of `batch`."""
        per_seq = 4 + NUM_COLUMNS + 2 * batch.block_tables.shape[1]
        pairs = 2 * sum(map(len, (batch.copy, batch.swap_out, batch.swap_in)))
        at_most = 32 + batch.num_seqs * per_seq + 4 * batch.num_tokens + 2 * batch.num_logits + pairs
        if self._out.size < MAX_BYTES * at_most:
            self._out = np.empty(2 * MAX_BYTES * at_most, np.uint8)  # touched only as far as it is written
        return self._out[: encode(self._state, batch.arrays, self._out)].tobytes()
