"""Batches on a device: counts are buckets, there is room for any step, equal ones are one object."""

import numpy as np
import pytest

from cupaged.backend.base import Limits
from cupaged.backend.device_batch import DeviceBatches, batch_words
from cupaged.batch import Batch, Count, bucket_for, buffer_size, padding_batch
from tests.backend.cuda_steps import LIMITS, create_batch


@pytest.fixture
def batches() -> DeviceBatches:
    return DeviceBatches(np.zeros(batch_words(LIMITS), np.int32))


def counts(batch: Batch) -> tuple[int, int, int, int]:
    return batch.num_tokens, batch.num_seqs, batch.num_decodes, batch.num_logits


def test_decodes_are_rounded_up_to_a_bucket(batches: DeviceBatches) -> None:
    assert counts(batches.cut(create_batch([20] * 5, [1] * 5))) == (8, 8, 8, 8)


def test_tokens_of_mixed_steps_are_rounded_up_and_sequences_are_not(batches: DeviceBatches) -> None:
    assert counts(batches.cut(create_batch([20, 33, 21], [1, 33, 9]))) == (48, 3, 1, 4)


def test_step_without_logits_has_none(batches: DeviceBatches) -> None:
    host = padding_batch(9, 1, num_decodes=0, num_logits=0, table_width=1)

    assert counts(batches.cut(host)) == (16, 1, 0, 0)


def test_steps_of_one_shape_share_a_batch(batches: DeviceBatches) -> None:
    five, seven = (
        batches.cut(padding_batch(n, n, num_decodes=n, num_logits=n, table_width=2)) for n in (5, 7)
    )

    assert five is seven


def test_batches_lie_where_the_hosts_layout_says() -> None:
    host = create_batch([20, 33, 21], [1, 33, 9], banned=[5, 6])
    buffer = np.zeros(batch_words(LIMITS), np.int32)
    buffer[: len(host.words)] = host.words

    batch = DeviceBatches(buffer).cut(host)

    for name in ("seq_lens", "query_start", "temperature", "block_tables", "banned_start", "banned"):
        ours, theirs = getattr(batch, name), getattr(host, name)
        assert np.array_equal(ours[..., : theirs.shape[-1]], theirs), name
    assert batch.block_tables.shape == (3, host.bucket.table_width)


def test_swaps_stand_in_front_of_what_must_not_be_sampled() -> None:
    limits = LIMITS._replace(num_host_blocks=3)
    plain = create_batch([20, 33, 21], [1, 33, 9], banned=[5, 6])
    words = np.concatenate(
        [plain.buffer[: -len(plain.arrays.tail)], [9, 0, 8, 1, 2, 7, 5, 6]], dtype=np.int32
    )
    host = Batch(words, plain.bucket, plain.serials)
    host.arrays.counts[[Count.NUM_SWAP_OUT, Count.NUM_SWAP_IN]] = 2, 1
    host = Batch(words, plain.bucket, plain.serials)
    buffer = np.zeros(batch_words(limits), np.int32)
    buffer[: len(host.words)] = host.words

    batch = DeviceBatches(buffer).cut(host)

    assert host.words[-8:].tolist() == [9, 0, 8, 1, 2, 7, 5, 6]
    assert (batch.swap_out.tolist(), batch.swap_in.tolist()) == ([[9, 0], [8, 1]], [[2, 7]])
    assert batch.banned.tolist() == [5, 6]


@pytest.mark.parametrize("num_host_blocks", [0, 1, 4096])
def test_every_block_of_the_swap_pool_may_move_in_one_step(num_host_blocks: int) -> None:
    more = batch_words(LIMITS._replace(num_host_blocks=num_host_blocks)) - batch_words(LIMITS)

    assert more == 2 * num_host_blocks


@pytest.mark.parametrize("num_tokens", [1, 7, 80, 100])
@pytest.mark.parametrize("seq_len", [1, 64, 257, 1000])
def test_any_step_fits(num_tokens: int, seq_len: int) -> None:
    limits = Limits(num_tokens, num_seqs=5, seq_len=seq_len, block_size=16, num_slots=512)

    largest = bucket_for(num_tokens, 5, -(-seq_len // 16))

    assert batch_words(limits) >= buffer_size(largest, 5 * 2 * 1024)
    host = padding_batch(num_tokens, 5, num_decodes=0, num_logits=num_tokens, table_width=-(-seq_len // 16))
    batch = DeviceBatches(np.zeros(batch_words(limits), np.int32)).cut(host)
    assert batch.input_ids.shape == (batch.num_tokens,)
    assert batch.logit_index.shape == (batch.num_logits,)
