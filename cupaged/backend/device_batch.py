"""The step's batch on a device: one buffer, cut as the host's is, but by counts that are rounded up.

So a step's matrix products have one of few numbers of rows, each tried at load, and a step of decodes has one
of few shapes, each recorded as a CUDA graph. What is counted too much is padding, which is there already:
the host fills its bucket's capacity with it.
"""

from collections.abc import Callable
from functools import cache, lru_cache, partial

import numpy as np

from cupaged.backend.base import Array, Limits
from cupaged.backend.gemm import bucket
from cupaged.batch import Batch, BatchArrays, Bucket, Count, bucket_for, buffer_size, view
from cupaged.kernels.launch import ceil_div
from cupaged.sampling_params import MAX_STOPS

MAX_KEPT = 512  # batches; cutting one anew takes some 50 us


def batch_words(limits: Limits) -> int:
    """Return the words of the largest batch, whose tail has all swaps and what no sequence may sample.

    A step moves a block of the swap pool once at most, out or in.
    """
    largest = bucket_for(limits.num_tokens, limits.num_seqs, ceil_div(limits.seq_len, limits.block_size))
    return buffer_size(largest, 2 * limits.num_host_blocks + limits.num_seqs * 2 * MAX_STOPS)


def padded_counts(host: Batch) -> tuple[int, ...]:
    """Return the batch's counts on the device: tokens and logits, and where all are decodes sequences."""
    counts = host.arrays.counts.tolist()
    counts[Count.NUM_TOKENS] = bucket(host.num_tokens)
    counts[Count.NUM_LOGITS] = bucket(host.num_logits)
    counts[Count.TABLE_WIDTH] = host.bucket.table_width  # kernels look no further than seq_lens
    if host.num_decodes == host.num_seqs:
        counts[Count.NUM_SEQS] = counts[Count.NUM_DECODES] = counts[Count.NUM_TOKENS]
    return tuple(counts)


class DeviceBatches:
    """Batches cut from one device buffer; equal ones are the same object."""

    def __init__(self, buffer: Array) -> None:
        """Cut `buffer`, int32[batch_words]."""
        views = cache(partial(view, buffer))
        self._cut = lru_cache(MAX_KEPT)(partial(_cut, buffer, views))

    def cut(self, host: Batch) -> Batch:
        """Return the batch that is there once the host's words have been copied."""
        return self._cut(host.bucket, padded_counts(host))


def _cut(
    buffer: Array, views: Callable[[Bucket], BatchArrays], bucket: Bucket, counts: tuple[int, ...]
) -> Batch:
    no_serials = np.empty(0, np.int64)  # the scheduler's own
    return Batch(buffer, bucket, no_serials, arrays=views(bucket), counts=np.array(counts, np.int32))
