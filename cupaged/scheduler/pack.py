"""Pack the planned rows into a Batch: njit, from Rows and Blocks straight into one flat host buffer."""

import numpy as np
from numpy.typing import NDArray

from cupaged.batch import BatchArrays, Bucket, Count, Flag, buffer_size, view
from cupaged.jit import njit
from cupaged.scheduler.allocator import Blocks
from cupaged.scheduler.state import Rows

SAMPLES = int(Flag.SAMPLES)
INPUT_FROM_LAST_TOKEN = int(Flag.INPUT_FROM_LAST_TOKEN)
RESET = int(Flag.RESET)
NUM_TOKENS = int(Count.NUM_TOKENS)
NUM_SEQS = int(Count.NUM_SEQS)
NUM_DECODES = int(Count.NUM_DECODES)
NUM_LOGITS = int(Count.NUM_LOGITS)
TABLE_WIDTH = int(Count.TABLE_WIDTH)
NUM_BANNED = int(Count.NUM_BANNED)
NUM_HISTORY = int(Count.NUM_HISTORY)
SMALLEST = Bucket(num_tokens=16, num_seqs=8, table_width=16)


def bucket_for(num_tokens: int, num_seqs: int, table_width: int) -> Bucket:
    """Return the smallest bucket that holds the counts: powers of two, not below SMALLEST."""
    wanted = (num_tokens, num_seqs, table_width)
    return Bucket(*(max(least, 1 << (n - 1).bit_length()) for n, least in zip(wanted, SMALLEST, strict=True)))


class BatchBuffer:
    """One flat host buffer and its views by bucket; memory is touched only as far as a step needs it."""

    def __init__(self, largest: Bucket) -> None:
        """Make room for the largest bucket; the tail uses what smaller ones leave, or grows the buffer."""
        self._words = np.zeros(buffer_size(largest, 0), np.int32)
        self._views: dict[Bucket, BatchArrays] = {}
        self.serials = np.zeros(largest.num_seqs, np.int64)

    def views(self, bucket: Bucket, num_tail: int) -> BatchArrays:
        """Return the buffer's views for `bucket` with at least `num_tail` words of tail."""
        needed = buffer_size(bucket, num_tail)
        if needed > self._words.size:
            self._words = np.zeros(2 * needed, np.int32)
            self._views.clear()
        if bucket not in self._views:
            self._views[bucket] = view(self._words, bucket)
        return self._views[bucket]


@njit
def samples(rows: Rows, row: int) -> bool:
    """Return whether the planned chunk ends at the row's last token."""
    end = rows.num_computed_tokens[row] + rows.num_new[row]
    return bool(end == rows.num_tokens[row] + rows.num_in_flight[row])


@njit
def num_banned(rows: Rows, row: int) -> int:
    """Return how many token ids the row must not sample in the planned step."""
    total = rows.num_tokens[row] + rows.num_in_flight[row]
    if total >= rows.min_total_tokens[row] or not samples(rows, row):
        return 0
    n = 0
    while rows.banned_token_ids[row, n] >= 0:
        n += 1
    return n


@njit
def measure(rows: Rows, blocks: Blocks) -> tuple[int, int, int, int]:
    """Return the planned step's tokens, sequences, widest block table and words of tail."""
    tokens = seqs = width = tail = 0
    for i in range(rows.num_running[0]):
        row = rows.running[i]
        if rows.num_new[row] > 0:
            tokens += rows.num_new[row]
            seqs += 1
            width = max(width, blocks.num_blocks[row])
            tail += num_banned(rows, row)
            if rows.reset[row] and rows.wants_history[row]:
                tail += rows.num_tokens[row]
    return tokens, seqs, width, tail


@njit
def pack_tokens(rows: Rows, blocks: Blocks, out: BatchArrays, i: int, block_size: int) -> None:
    """Write ids, positions and slots of sequence i, from query_start[i], and the logits it needs."""
    row = out.rows[i]
    first = rows.num_computed_tokens[row]
    known = rows.num_tokens[row]
    start = out.query_start[i]
    logits = out.counts[NUM_LOGITS]
    for j in range(rows.num_new[row]):
        p = first + j
        out.input_ids[start + j] = rows.tokens[row, p] if p < known else 0
        out.positions[start + j] = p
        block = blocks.block_tables[row, p // block_size]
        out.slot_mapping[start + j] = block * block_size + p % block_size
    if rows.num_prompt_logprobs[row] >= 0:
        # [prompt_logprobs_end, num_prompt_tokens - 1): each position once, also when it is computed again
        end = min(first + rows.num_new[row], rows.num_prompt_tokens[row] - 1)
        for p in range(max(first, rows.prompt_logprobs_end[row]), end):
            out.logit_index[logits] = start + p - first
            out.logit_seq[logits] = i
            out.logit_target[logits] = rows.tokens[row, p + 1]
            logits += 1
    if out.flags[i] & SAMPLES:
        out.logit_index[logits] = start + rows.num_new[row] - 1
        out.logit_seq[logits] = i
        out.logit_target[logits] = -1
        logits += 1
    out.counts[NUM_LOGITS] = logits


@njit
def pack_row(rows: Rows, blocks: Blocks, out: BatchArrays, i: int) -> None:
    """Write what sequence i has once: flags, sampling, its block table."""
    row = out.rows[i]
    total = rows.num_tokens[row] + rows.num_in_flight[row]
    end = rows.num_computed_tokens[row] + rows.num_new[row]
    out.seq_lens[i] = end
    flags = RESET if rows.reset[row] else 0
    if end == total:
        flags |= SAMPLES
        if rows.num_in_flight[row] > 0:
            flags |= INPUT_FROM_LAST_TOKEN
    out.flags[i] = flags
    out.temperature[i] = rows.temperature[row]
    out.top_p[i] = rows.top_p[row]
    out.min_p[i] = rows.min_p[row]
    out.top_k[i] = rows.top_k[row]
    out.seed[i, 0] = rows.seed[row, 0]
    out.seed[i, 1] = rows.seed[row, 1]
    out.group_index[i] = rows.group_index[row]
    out.output_position[i] = total - rows.num_prompt_tokens[row]
    out.num_logprobs[i] = rows.num_logprobs[row]
    out.num_prompt_logprobs[i] = rows.num_prompt_logprobs[row]
    held = blocks.num_blocks[row]
    out.block_tables[i, :held] = blocks.block_tables[row, :held]
    out.block_tables[i, held:] = -1


@njit
def pack_tail(rows: Rows, out: BatchArrays, num_seqs: int) -> None:
    """Write the ragged parts: all banned ids, then all history, each with its starts."""
    end = 0
    for i in range(num_seqs):
        out.banned_start[i] = end
        row = out.rows[i]
        n = num_banned(rows, row)
        out.tail[end : end + n] = rows.banned_token_ids[row, :n]
        end += n
    out.banned_start[num_seqs:] = end
    out.counts[NUM_BANNED] = end
    history = end
    for i in range(num_seqs):
        out.history_start[i] = end - history
        row = out.rows[i]
        if rows.reset[row] and rows.wants_history[row]:
            n = rows.num_tokens[row]
            out.tail[end : end + n] = rows.tokens[row, :n]
            end += n
    out.history_start[num_seqs:] = end - history
    out.counts[NUM_HISTORY] = end - history


@njit
def pad(out: BatchArrays, num_tokens: int, num_seqs: int) -> None:
    """Fill the capacity behind the step's tokens and sequences with what touches nothing."""
    out.input_ids[num_tokens:] = 0
    out.positions[num_tokens:] = 0
    out.slot_mapping[num_tokens:] = -1
    out.query_start[num_seqs:] = num_tokens
    out.rows[num_seqs:] = -1
    out.seq_lens[num_seqs:] = 0
    out.flags[num_seqs:] = 0
    out.block_tables[num_seqs:] = -1


@njit
def pack_batch(
    rows: Rows, blocks: Blocks, out: BatchArrays, serials: NDArray[np.int64], block_size: int
) -> None:
    """Write the planned step, decodes first, each part by arrival; `rows` stays as it is."""
    out.counts[:] = 0
    tokens = seqs = width = 0
    for decodes in (True, False):
        for i in range(rows.num_running[0]):
            row = rows.running[i]
            new = rows.num_new[row]
            if new > 0 and (new == 1) == decodes:
                out.rows[seqs] = row
                out.query_start[seqs] = tokens
                serials[seqs] = rows.serial[row]
                width = max(width, blocks.num_blocks[row])
                pack_row(rows, blocks, out, seqs)
                pack_tokens(rows, blocks, out, seqs, block_size)
                tokens += new
                seqs += 1
        if decodes:
            out.counts[NUM_DECODES] = seqs
    out.counts[NUM_TOKENS] = tokens
    out.counts[NUM_SEQS] = seqs
    out.counts[TABLE_WIDTH] = width
    pack_tail(rows, out, seqs)
    pad(out, tokens, seqs)
