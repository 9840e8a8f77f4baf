"""Steps made by hand for backend tests: no scheduler, no worker."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cupaged.backend.base import Limits
from cupaged.batch import Batch, Count, Flag, bucket_for, buffer_size, padding_batch, view

VOCAB_SIZE = 97
TABLE_WIDTH = 3  # blocks of 16 tokens
LIMITS = Limits(num_tokens=80, num_seqs=5, seq_len=64, block_size=16, num_slots=512)


def random(*shape: int) -> NDArray[np.float32]:
    """Return numbers that every dtype has, and whose sums of products float32 has."""
    numbers = np.random.default_rng(len(shape)).standard_normal(shape, np.float32)
    rounded: NDArray[np.float32] = (np.round(numbers * 64) / 64).clip(-3.875, 3.875)
    return rounded


def create_batch(lens: Sequence[int], new: Sequence[int], *, banned: Sequence[int] = ()) -> Batch:
    """Return a step that brings sequence i to lens[i] tokens by new[i]; the first may not sample `banned`.

    All sample, greedily; sequence i has rows and blocks of its own.
    """
    total, num_seqs = sum(new), len(lens)
    bucket = bucket_for(total, num_seqs, TABLE_WIDTH)
    padded = padding_batch(
        total, num_seqs, num_decodes=list(new).count(1), num_logits=num_seqs, table_width=TABLE_WIDTH
    )
    buffer = np.zeros(buffer_size(bucket, len(banned)), np.int32)
    buffer[: len(padded.buffer)] = padded.buffer
    arrays = view(buffer, bucket)
    arrays.counts[Count.NUM_BANNED] = len(banned)
    arrays.tail[:] = banned
    arrays.banned_start[1:] = len(banned)
    arrays.query_start[1:] = total
    arrays.query_start[1 : num_seqs + 1] = np.cumsum(new)
    arrays.rows[:num_seqs] = np.arange(num_seqs)[::-1]
    arrays.flags[:num_seqs] = Flag.SAMPLES
    arrays.seq_lens[:num_seqs] = lens
    blocks = np.arange(TABLE_WIDTH * num_seqs)[::-1].reshape(num_seqs, TABLE_WIDTH)
    arrays.block_tables[:num_seqs, :TABLE_WIDTH] = blocks
    positions = np.concatenate([np.arange(end - n, end) for end, n in zip(lens, new, strict=True)])
    seqs = np.repeat(np.arange(num_seqs), new)
    arrays.positions[:total] = positions
    arrays.input_ids[:total] = (positions * 7 + seqs) % VOCAB_SIZE
    arrays.slot_mapping[:total] = arrays.block_tables[seqs, positions // 16] * 16 + positions % 16
    arrays.logit_index[:num_seqs] = arrays.query_start[1 : num_seqs + 1] - 1
    arrays.logit_seq[:num_seqs] = np.arange(num_seqs)
    arrays.logit_target[:num_seqs] = -1
    return Batch(buffer, bucket, np.zeros(num_seqs, np.int64), arrays=arrays)


def copy_batch(batch: Batch) -> Batch:
    """Return the batch in a buffer of its own; steps change their input_ids."""
    return Batch(batch.buffer.copy(), batch.bucket, batch.serials)
