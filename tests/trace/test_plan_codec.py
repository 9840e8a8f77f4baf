"""A plan comes back from its record as it was, and takes little room if it was foretold."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from cupaged.batch import Batch, BatchArrays, Bucket, Count, Flag, buffer_size, view
from cupaged.scheduler.scheduler_config import SchedulerConfig
from cupaged.trace.plan_decoder import PlanDecoder, describe_difference, plan_of
from cupaged.trace.plan_encoder import PlanEncoder, encode
from cupaged.trace.plan_state import PlanState, create_plan_state
from cupaged.trace.varint import decode_ints

NUM_ROWS, MAX_BLOCKS, BLOCK_SIZE = 5, 7, 4
CONFIG = SchedulerConfig(
    num_blocks=100,
    block_size=BLOCK_SIZE,
    max_num_seqs=NUM_ROWS,
    max_num_batched_tokens=16,
    max_model_len=MAX_BLOCKS * BLOCK_SIZE,
)
PAIRS = (Count.NUM_COPY, Count.NUM_SWAP_OUT, Count.NUM_SWAP_IN)
WORDS = np.iinfo(np.int32)


def random_batch(rng: np.random.Generator) -> Batch:
    """Return a step of which nothing can be foretold: whatever a slot, a flag, a float may hold."""
    num_seqs, width = int(rng.integers(1, NUM_ROWS + 1)), int(rng.integers(1, MAX_BLOCKS + 1))
    bucket = Bucket(16, 8, 16)
    num_new = rng.integers(1, 3, num_seqs)
    num_logits = int(rng.integers(0, 9))
    pairs = rng.integers(0, 4, len(PAIRS))
    words = rng.integers(WORDS.min, WORDS.max, buffer_size(bucket, 64), np.int32, endpoint=True)
    arrays = view(words, bucket)
    arrays.counts[:] = 0
    for place, count in zip(PAIRS, pairs, strict=True):
        arrays.counts[place] = count
    for place, count in (
        (Count.NUM_TOKENS, num_new.sum()),
        (Count.NUM_SEQS, num_seqs),
        (Count.NUM_DECODES, rng.integers(0, num_seqs + 1)),
        (Count.NUM_LOGITS, num_logits),
        (Count.TABLE_WIDTH, width),
    ):
        arrays.counts[place] = count
    for starts, counts in (
        (arrays.query_start, num_new),
        (arrays.banned_start, rng.integers(0, 3, num_seqs)),
    ):
        starts[: num_seqs + 1] = np.concatenate([[0], np.cumsum(counts)])
    arrays.history_start[: num_seqs + 1] = 0
    arrays.rows[:num_seqs] = rng.permutation(NUM_ROWS)[:num_seqs]
    arrays.seq_lens[:num_seqs] = num_new + rng.integers(0, width * BLOCK_SIZE - 2, num_seqs)
    arrays.block_tables[:] = rng.integers(-1, 1000, arrays.block_tables.shape)
    for table, length in zip(arrays.block_tables, arrays.seq_lens[:num_seqs].tolist(), strict=False):
        held = -(-length // BLOCK_SIZE)
        table[held + 1 :] = -1
    arrays.logit_target[:] = rng.integers(-1, 2, 16)
    arrays.logit_seq[:] = rng.integers(0, num_seqs, 16)
    return Batch(words, bucket, np.zeros(num_seqs, np.int64), arrays=arrays)


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32 - 1))
def test_any_plan_comes_back_bit_for_bit(seed: int) -> None:
    rng = np.random.default_rng(seed)
    encoder = PlanEncoder(create_plan_state(CONFIG))
    decoder = PlanDecoder(create_plan_state(CONFIG))

    for _ in range(4):
        batch = random_batch(rng)
        plan = decoder.decode(decode_ints(encoder.encode(batch)))

        assert describe_difference(plan_of(batch), plan) == ""


def steady_step(length: int) -> Batch:
    """Return a step of five decodes, each of `length` tokens, in blocks of their own."""
    bucket = Bucket(16, 8, 16)
    words = np.zeros(buffer_size(bucket, 0), np.int32)
    arrays = view(words, bucket)
    width = -(-length // BLOCK_SIZE)
    for place in (Count.NUM_TOKENS, Count.NUM_SEQS, Count.NUM_DECODES, Count.NUM_LOGITS):
        arrays.counts[place] = NUM_ROWS
    arrays.counts[Count.TABLE_WIDTH] = width
    rows = np.arange(NUM_ROWS)
    arrays.query_start[: NUM_ROWS + 1] = np.arange(NUM_ROWS + 1)
    arrays.rows[:NUM_ROWS], arrays.logit_index[:NUM_ROWS], arrays.logit_seq[:NUM_ROWS] = rows, rows, rows
    arrays.logit_target[:NUM_ROWS] = -1
    arrays.seq_lens[:NUM_ROWS], arrays.positions[:NUM_ROWS] = length, length - 1
    arrays.output_position[:NUM_ROWS] = length
    arrays.flags[:NUM_ROWS] = int(Flag.SAMPLES)
    arrays.block_tables[:NUM_ROWS, :width] = rows[:, None] * MAX_BLOCKS + np.arange(width)
    last = arrays.block_tables[:NUM_ROWS, width - 1]
    arrays.slot_mapping[:NUM_ROWS] = last * BLOCK_SIZE + (length - 1) % BLOCK_SIZE
    return Batch(words, bucket, np.zeros(NUM_ROWS, np.int64), arrays=arrays)


def encode_within(state: PlanState, a: BatchArrays, out: NDArray[np.uint8]) -> int:
    """Do what `encode` does, but fail where it, compiled, would write behind the end of `out`."""
    roomy = np.empty(2**20, np.uint8)
    size = encode(state, a, roomy)
    assert size <= out.size, f"{size} bytes do not fit into {out.size}"
    out[:size] = roomy[:size]
    return size


def test_a_step_that_swaps_far_more_than_it_computes_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cupaged.trace.plan_encoder.encode", encode_within)
    steady, num_pairs = steady_step(6), 3000
    pairs = np.random.default_rng(0).integers(WORDS.min, WORDS.max, 2 * 2 * num_pairs, np.int32)
    words = np.concatenate([steady.buffer, pairs])
    arrays = view(words, steady.bucket)
    arrays.counts[Count.NUM_SWAP_OUT] = arrays.counts[Count.NUM_SWAP_IN] = num_pairs
    batch = Batch(words, steady.bucket, steady.serials, arrays=arrays)

    record = PlanEncoder(create_plan_state(CONFIG)).encode(batch)

    plan = PlanDecoder(create_plan_state(CONFIG)).decode(decode_ints(record))
    assert describe_difference(plan_of(batch), plan) == ""


def test_a_step_of_decodes_takes_a_byte_for_each_count_and_no_more_for_its_sequences() -> None:
    encoder = PlanEncoder(create_plan_state(CONFIG))
    encoder.encode(steady_step(6))

    record = encoder.encode(steady_step(7))

    assert len(record) == len(Count) + 1 + 1 + 1 + 1  # counts and context; sequences; tokens; logits


@pytest.mark.parametrize(
    ("name", "place"), [("slot_mapping", 2), ("flags", 4), ("temperature", 0), ("block_tables", (3, 1))]
)
def test_one_bit_more_is_another_record_and_its_place_is_named(
    name: str, place: int | tuple[int, int]
) -> None:
    one, other = steady_step(6), steady_step(6)
    getattr(other, name).view(np.int32)[place] ^= 1

    records = [PlanEncoder(create_plan_state(CONFIG)).encode(batch) for batch in (one, other)]

    assert records[0] != records[1]
    assert describe_difference(plan_of(one), plan_of(other)).startswith(f"{name}[")
