import numpy as np
import pytest

from cupaged.batch import NUM_COUNTS, Batch, BatchArrays, Bucket, Count, buffer_size, layout, view

BUCKET = Bucket(num_tokens=33, num_seqs=5, table_width=3)


def test_layout_places_every_view_but_the_tail() -> None:
    assert set(layout(BUCKET)) == set(BatchArrays._fields) - {"tail"}


@pytest.mark.parametrize("bucket", [BUCKET, Bucket(1, 1, 1), Bucket(2048, 256, 512)])
def test_views_begin_at_64_byte_steps_and_do_not_overlap(bucket: Bucket) -> None:
    end = 0
    for offset, shape in layout(bucket).values():
        assert offset % 16 == 0
        assert offset >= end
        end = offset + int(np.prod(shape))


def test_shapes_are_the_bucket_capacities() -> None:
    arrays = view(np.zeros(buffer_size(BUCKET, 7), np.int32), BUCKET)

    assert arrays.counts.shape == (NUM_COUNTS,)
    assert arrays.input_ids.shape == arrays.logit_target.shape == (33,)
    assert arrays.query_start.shape == arrays.banned_start.shape == arrays.history_start.shape == (6,)
    assert arrays.seed.shape == arrays.copy.shape == (5, 2)
    assert arrays.block_tables.shape == (5, 3)
    assert arrays.tail.shape == (7,)


def test_writing_one_view_leaves_the_others() -> None:
    buffer = np.zeros(buffer_size(BUCKET, 7), np.int32)
    arrays = view(buffer, BUCKET)

    for i, array in enumerate(arrays):
        array[...] = i + 1

    for i, array in enumerate(arrays):
        assert (array == i + 1).all()


def test_views_share_the_buffer_and_floats_are_its_bits() -> None:
    buffer = np.zeros(buffer_size(BUCKET, 0), np.int32)

    view(buffer, BUCKET).temperature[0] = 1.0

    offset, _ = layout(BUCKET)["temperature"]
    assert buffer[offset] == np.float32(1.0).view(np.int32)


def test_batch_cuts_the_views_by_the_counts() -> None:
    buffer = np.arange(buffer_size(BUCKET, 40), dtype=np.int32)
    counts = view(buffer, BUCKET).counts
    counts[:] = 0
    counts[[Count.NUM_TOKENS, Count.NUM_SEQS, Count.NUM_DECODES, Count.NUM_LOGITS]] = 20, 4, 3, 9
    counts[[Count.TABLE_WIDTH, Count.NUM_COPY]] = 2, 1

    batch = Batch(buffer, BUCKET, np.zeros(4, np.int64))

    assert (batch.num_tokens, batch.num_seqs, batch.num_decodes, batch.num_logits) == (20, 4, 3, 9)
    assert batch.input_ids.size == batch.positions.size == batch.slot_mapping.size == 20
    assert batch.query_start.size == batch.banned_start.size == batch.history_start.size == 5
    assert batch.rows.size == batch.flags.size == batch.temperature.size == 4
    assert batch.logit_index.size == batch.logit_seq.size == batch.logit_target.size == 9
    assert batch.block_tables.shape == (4, 2)
    assert batch.copy.shape == (1, 2)


def test_tail_holds_swap_pairs_then_banned_then_history() -> None:
    buffer = np.zeros(buffer_size(BUCKET, 40), np.int32)
    arrays = view(buffer, BUCKET)
    arrays.tail[:] = np.arange(40)
    arrays.counts[[Count.NUM_SWAP_OUT, Count.NUM_SWAP_IN, Count.NUM_BANNED, Count.NUM_HISTORY]] = 1, 2, 3, 4

    batch = Batch(buffer, BUCKET, np.zeros(0, np.int64))

    assert batch.swap_out.tolist() == [[0, 1]]
    assert batch.swap_in.tolist() == [[2, 3], [4, 5]]
    assert batch.banned.tolist() == [6, 7, 8]
    assert batch.history.tolist() == [9, 10, 11, 12]


def test_a_copy_of_the_words_is_the_step() -> None:
    buffer = np.arange(buffer_size(BUCKET, 40), dtype=np.int32)
    counts = view(buffer, BUCKET).counts
    counts[:] = 0
    counts[[Count.NUM_TOKENS, Count.NUM_SEQS, Count.NUM_BANNED, Count.NUM_HISTORY]] = 20, 4, 3, 4
    host = Batch(buffer, BUCKET, np.zeros(4, np.int64))
    device_buffer = np.full(buffer_size(BUCKET, 64), -7, np.int32)

    device_buffer[: len(host.words)] = host.words
    device = Batch(device_buffer, BUCKET, host.serials, counts=host.arrays.counts)

    assert device.input_ids.tolist() == host.input_ids.tolist()
    assert device.block_tables.tolist() == host.block_tables.tolist()
    assert device.history.tolist() == host.history.tolist()
    assert device_buffer[len(host.words)] == -7
