"""Pack the planned step into a Batch: njit, from rows, blocks and moves straight into one flat buffer."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cupaged.batch import BatchArrays, Bucket, Count, Flag, buffer_size, view
from cupaged.jit import njit_inner
from cupaged.scheduler.allocator import Blocks
from cupaged.scheduler.counters import Counter
from cupaged.scheduler.pools import COPY, SWAP_IN, SWAP_OUT, Moves
from cupaged.scheduler.state import Rows, SamplingRows
from cupaged.words import Words, to_words

SAMPLES = int(Flag.SAMPLES)
INPUT_FROM_LAST_TOKEN = int(Flag.INPUT_FROM_LAST_TOKEN)
RESET = int(Flag.RESET)
SCALED_LOGPROBS = int(Flag.SCALED_LOGPROBS)
SWAPPED_OUT_BLOCKS = int(Counter.SWAPPED_OUT_BLOCKS)
SWAPPED_IN_BLOCKS = int(Counter.SWAPPED_IN_BLOCKS)
NUM_TOKENS = int(Count.NUM_TOKENS)
NUM_SEQS = int(Count.NUM_SEQS)
NUM_DECODES = int(Count.NUM_DECODES)
NUM_LOGITS = int(Count.NUM_LOGITS)
TABLE_WIDTH = int(Count.TABLE_WIDTH)
NUM_COPY = int(Count.NUM_COPY)
NUM_SWAP_OUT = int(Count.NUM_SWAP_OUT)
NUM_SWAP_IN = int(Count.NUM_SWAP_IN)
NUM_BANNED = int(Count.NUM_BANNED)
NUM_HISTORY = int(Count.NUM_HISTORY)


class Packed(NamedTuple):
    """Where a step is written."""

    arrays: BatchArrays
    serials: NDArray[np.int64]  # [num_seqs or more]


class Views(NamedTuple):
    """A buffer's views for a bucket."""

    arrays: BatchArrays
    packed: Words  # of Packed
    num_tail: int  # words


class BatchBuffer:
    """One flat host buffer and its views by bucket; memory is touched only as far as a step needs it."""

    def __init__(self, largest: Bucket) -> None:
        """Make room for the largest bucket; the tail uses what smaller ones leave, or grows the buffer."""
        self.words = np.zeros(buffer_size(largest, 0), np.int32)
        self._views: dict[Bucket, Views] = {}
        self.serials = np.zeros(largest.num_seqs, np.int64)

    def views(self, bucket: Bucket, num_tail: int) -> Views:
        """Return the buffer's views for `bucket` with at least `num_tail` words of tail."""
        views = self._views.get(bucket)
        if views is None:
            views = self._views[bucket] = self._cut(bucket)
        if num_tail > views.num_tail:
            self.words = np.zeros(buffer_size(bucket, 2 * num_tail), np.int32)
            views = self._cut(bucket)
            self._views = {bucket: views}
        return views

    def _cut(self, bucket: Bucket) -> Views:
        arrays = view(self.words, bucket)
        return Views(arrays, to_words(Packed(arrays, self.serials)), arrays.tail.size)


@njit_inner
def measure(rows: Rows, sampling: SamplingRows, blocks: Blocks, moves: Moves) -> tuple[int, int, int, int]:
    """Return the planned step's tokens, sequences, widest block table and enough words of tail."""
    tokens = seqs = width = 0
    tail = 2 * (moves.num[SWAP_OUT] + moves.num[SWAP_IN])
    for i in range(rows.num_running[0]):
        row = rows.running[i]
        if rows.at[row].num_new > 0:
            tokens += rows.at[row].num_new
            seqs += 1
            width = max(width, blocks.held[row].num_blocks)
            if rows.at[row].reset and sampling.at[row].wants_history:
                tail += rows.at[row].num_tokens
    tail += seqs * sampling.banned_token_ids.shape[1]  # at most
    return int(tokens), seqs, int(width), int(tail)


@njit_inner
def pack_order(rows: Rows, out: BatchArrays, serials: NDArray[np.int64]) -> int:
    """Write rows, serials and query_start, decodes first, each part by arrival; return how many."""
    running, num_new, serial = rows.running, rows.at.num_new, rows.at.serial
    out_rows, start = out.rows, out.query_start
    tokens = seqs = 0
    for decodes in (True, False):
        for i in range(rows.num_running[0]):
            row = running[i]
            if num_new[row] > 0 and (num_new[row] == 1) == decodes:
                out_rows[seqs] = row
                start[seqs] = tokens
                serials[seqs] = serial[row]
                tokens += num_new[row]
                seqs += 1
        if decodes:
            out.counts[NUM_DECODES] = seqs
    start[seqs:] = tokens
    out.counts[NUM_TOKENS] = tokens
    out.counts[NUM_SEQS] = seqs
    return seqs


@njit_inner
def pack_sampling(sampling: SamplingRows, out: BatchArrays, order: NDArray[np.int32]) -> None:
    """Write the sampling parameters of the sequences."""
    temperature, top_p, min_p, top_k = out.temperature, out.top_p, out.min_p, out.top_k
    seed, group_index = out.seed, out.group_index
    num_logprobs, num_prompt_logprobs = out.num_logprobs, out.num_prompt_logprobs
    for i in range(order.size):
        of_row = sampling.at[order[i]]
        temperature[i], top_p[i], min_p[i] = of_row.temperature, of_row.top_p, of_row.min_p
        top_k[i], group_index[i] = of_row.top_k, of_row.group_index
        seed[i, 0], seed[i, 1] = of_row.seed_low, of_row.seed_high
        num_logprobs[i], num_prompt_logprobs[i] = of_row.num_logprobs, of_row.num_prompt_logprobs


@njit_inner
def pack_flags(rows: Rows, sampling: SamplingRows, out: BatchArrays, order: NDArray[np.int32]) -> None:
    """Write what the step does with each sequence: seq_lens, flags, output_position."""
    num_tokens, in_flight, num_prompt = rows.at.num_tokens, rows.at.num_in_flight, rows.at.num_prompt_tokens
    computed, num_new, reset = rows.at.num_computed_tokens, rows.at.num_new, rows.at.reset
    seq_lens, flags, output_position = out.seq_lens, out.flags, out.output_position
    for i in range(order.size):
        row = order[i]
        total = num_tokens[row] + in_flight[row]
        seq_lens[i] = computed[row] + num_new[row]
        output_position[i] = total - num_prompt[row]
        flags[i] = (RESET if reset[row] else 0) | (SCALED_LOGPROBS if sampling.at[row].scales_logprobs else 0)
        if seq_lens[i] == total:
            flags[i] |= SAMPLES
            if in_flight[row] > 0:
                flags[i] |= INPUT_FROM_LAST_TOKEN


@njit_inner
def pack_tokens(rows: Rows, blocks: Blocks, out: BatchArrays, order: NDArray[np.int32]) -> None:
    """Write input ids, positions and slots; what is in shared blocks already has none."""
    tokens, num_tokens, computed = rows.tokens, rows.at.num_tokens, rows.at.num_computed_tokens
    num_shared = rows.at.num_shared_tokens
    tables, block_size, start = blocks.block_tables, blocks.block_size, out.query_start
    input_ids, positions, slot_mapping = out.input_ids, out.positions, out.slot_mapping
    for i in range(order.size):
        row = order[i]
        first, known, shared = computed[row], num_tokens[row], num_shared[row]
        for t in range(start[i], start[i + 1]):
            p = first + t - start[i]
            input_ids[t] = tokens[row, p] if p < known else 0
            positions[t] = p
            slot = tables[row, p // block_size] * block_size + p % block_size
            slot_mapping[t] = slot if p >= shared else -1


@njit_inner
def pack_logits(rows: Rows, sampling: SamplingRows, out: BatchArrays, order: NDArray[np.int32]) -> None:
    """Write which positions need logits: of the prompt where wanted, and the last of those that sample."""
    tokens, num_prompt, computed = rows.tokens, rows.at.num_prompt_tokens, rows.at.num_computed_tokens
    done, start, flags = rows.at.prompt_logprobs_end, out.query_start, out.flags
    index, seq, target = out.logit_index, out.logit_seq, out.logit_target
    n = 0
    for i in range(order.size):
        row = order[i]
        first = computed[row]
        if sampling.at[row].num_prompt_logprobs >= 0:
            # [prompt_logprobs_end, num_prompt_tokens - 1): each position once, also when it is computed again
            end = min(first + start[i + 1] - start[i], num_prompt[row] - 1)
            for p in range(max(first, done[row]), end):
                index[n] = start[i] + p - first
                seq[n] = i
                target[n] = tokens[row, p + 1]
                n += 1
        if flags[i] & SAMPLES:
            index[n] = start[i + 1] - 1
            seq[n] = i
            target[n] = -1
            n += 1
    out.counts[NUM_LOGITS] = n


@njit_inner
def pack_tables(blocks: Blocks, out: BatchArrays, order: NDArray[np.int32]) -> None:
    """Write the block tables, -1 past the end of each and before its sliding window."""
    tables, num_blocks, target = blocks.block_tables, blocks.held.num_blocks, out.block_tables
    width = 0
    for i in range(order.size):
        row = order[i]
        held = num_blocks[row]
        for j in range(held):
            target[i, j] = tables[row, j]
        for j in range(held, target.shape[1]):
            target[i, j] = -1
        width = max(width, held)
    out.counts[TABLE_WIDTH] = width


@njit_inner
def pack_moves(blocks: Blocks, moves: Moves, out: BatchArrays) -> int:
    """Write and count the pairs of blocks, all moves being done then; return the words of tail they take."""
    num, tail = moves.num, out.tail
    blocks.counters[SWAPPED_OUT_BLOCKS] += num[SWAP_OUT]
    blocks.counters[SWAPPED_IN_BLOCKS] += num[SWAP_IN]
    for i in range(num[COPY]):
        out.copy[i, 0], out.copy[i, 1] = moves.copy[i, 0], moves.copy[i, 1]
    end = 0
    for pairs, count in ((moves.swap_out, num[SWAP_OUT]), (moves.swap_in, num[SWAP_IN])):
        for i in range(count):
            tail[end], tail[end + 1] = pairs[i, 0], pairs[i, 1]
            end += 2
    out.counts[NUM_COPY] = num[COPY]
    out.counts[NUM_SWAP_OUT] = num[SWAP_OUT]
    out.counts[NUM_SWAP_IN] = num[SWAP_IN]
    num[:] = 0
    return end


@njit_inner
def pack_tail(rows: Rows, sampling: SamplingRows, out: BatchArrays, begin: int) -> None:
    """Write the ragged parts of sequences: all banned ids, then all history, each with its starts.

    A token in flight is not in its row's history; it is last_token[row] on the device.
    """
    step_rows, flags, output_position, tail = out.rows, out.flags, out.output_position, out.tail
    banned_start, history_start, tokens = out.banned_start, out.history_start, rows.tokens
    num_tokens, banned, at = rows.at.num_tokens, sampling.banned_token_ids, sampling.at
    num_seqs = out.counts[NUM_SEQS]
    end = begin
    for i in range(num_seqs):
        row = step_rows[i]
        banned_start[i] = end - begin
        if flags[i] & SAMPLES and output_position[i] < at[row].min_tokens:
            j = 0
            while banned[row, j] >= 0:
                tail[end] = banned[row, j]
                j += 1
                end += 1
    banned_start[num_seqs:] = end - begin
    first = end
    for i in range(num_seqs):
        row = step_rows[i]
        history_start[i] = end - first
        if flags[i] & RESET and at[row].wants_history:
            for j in range(num_tokens[row]):
                tail[end] = tokens[row, j]
                end += 1
    history_start[num_seqs:] = end - first
    out.counts[NUM_BANNED] = first - begin
    out.counts[NUM_HISTORY] = end - first


@njit_inner
def pad(out: BatchArrays, num_tokens: int, num_seqs: int, num_logits: int) -> None:
    """Fill the capacity behind the step's tokens, sequences and logits with what touches nothing."""
    out.input_ids[num_tokens:] = 0
    out.positions[num_tokens:] = 0
    out.slot_mapping[num_tokens:] = -1
    out.rows[num_seqs:] = -1
    out.seq_lens[num_seqs:] = 0
    out.flags[num_seqs:] = 0
    out.block_tables[num_seqs:] = -1
    out.logit_index[num_logits:] = -1
    out.logit_seq[num_logits:] = 0
    out.logit_target[num_logits:] = 0


@njit_inner
def pack_batch(rows: Rows, sampling: SamplingRows, blocks: Blocks, moves: Moves, packed: Packed) -> None:
    """Write the planned step and the serials of its rows; moves are done then, the rows stay as they are."""
    out = packed.arrays
    out.counts[:] = 0
    num_seqs = pack_order(rows, out, packed.serials)
    order = out.rows[:num_seqs]
    pack_sampling(sampling, out, order)
    pack_flags(rows, sampling, out, order)
    pack_tokens(rows, blocks, out, order)
    pack_logits(rows, sampling, out, order)
    pack_tables(blocks, out, order)
    pack_tail(rows, sampling, out, pack_moves(blocks, moves, out))
    pad(out, out.counts[NUM_TOKENS], num_seqs, out.counts[NUM_LOGITS])
