"""What a packed step says, field by field."""

import numpy as np
import pytest

from cupaged.batch import Batch, Bucket, Flag, bucket_for
from cupaged.sampling_params import SamplingParams
from cupaged.scheduler.counters import Counter as Event
from cupaged.scheduler.pack import BatchBuffer
from cupaged.scheduler.pools import SWAP_IN, SWAP_OUT
from cupaged.scheduler.step import measure_step
from tests.scheduler.groups import make_group, make_scheduler
from tests.scheduler.harness import Harness, count, start


def schedule(harness: Harness) -> Batch:
    batch = harness.schedule()
    assert batch is not None
    return batch


def mixed() -> tuple[Harness, Batch]:
    """Return a step of a prefill chunk of 5 that arrived first and one decode."""
    harness = Harness(make_scheduler(max_num_batched_tokens=6))
    harness.add(make_group([21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31]))
    harness.step()
    harness.add(make_group([41], 9))
    harness.step()
    harness.add(make_group([51, 52, 53, 54, 55, 56, 57, 58, 59]))
    return harness, schedule(harness)


def test_decodes_come_first() -> None:
    _, batch = mixed()

    assert batch.num_decodes == 2
    assert np.diff(batch.query_start).tolist() == [1, 1, 4]


def test_rows_are_by_arrival_within_decodes_and_within_chunks() -> None:
    harness = Harness(make_scheduler())
    groups = [make_group([i] * n) for i, n in enumerate((1, 3, 1, 2, 1))]
    harness.add(*groups)

    batch = schedule(harness)

    assert batch.rows.tolist() == [groups[i].sequences[0].row for i in (0, 2, 4, 1, 3)]


def test_chunk_of_one_token_counts_as_decode() -> None:
    harness = Harness(make_scheduler(max_num_batched_tokens=4))
    harness.add(make_group([1, 2, 3]), make_group([4, 5, 6]))

    batch = schedule(harness)

    assert batch.num_decodes == 1
    assert batch.input_ids.tolist() == [4, 1, 2, 3]
    assert batch.flags.tolist() == [Flag.RESET, Flag.RESET | Flag.SAMPLES]


def test_ids_positions_and_lengths_continue_where_the_last_chunk_ended() -> None:
    harness = Harness(make_scheduler(max_num_batched_tokens=6))
    harness.add(make_group([21, 22, 23, 24, 25, 26, 27, 28, 29]))
    harness.step()

    batch = schedule(harness)

    assert batch.input_ids.tolist() == [27, 28, 29]
    assert batch.positions.tolist() == [6, 7, 8]
    assert batch.seq_lens.tolist() == [9]


def test_slots_follow_the_block_table() -> None:
    harness = Harness(make_scheduler(block_size=4))
    harness.add(make_group(2), make_group(6))

    batch = schedule(harness)

    tables = batch.block_tables
    assert batch.slot_mapping[:2].tolist() == [4 * tables[0, 0], 4 * tables[0, 0] + 1]
    assert batch.slot_mapping[2:].tolist() == [4 * tables[1, p // 4] + p % 4 for p in range(6)]


def test_block_tables_are_as_wide_as_the_longest_and_end_with_minus_one() -> None:
    harness = Harness(make_scheduler(block_size=4))
    harness.add(make_group(2), make_group(9))

    batch = schedule(harness)

    assert batch.block_tables.shape == (2, 3)
    assert (batch.block_tables[0] >= 0).tolist() == [True, False, False]
    assert batch.block_tables[0, 1:].tolist() == [-1, -1]


def test_first_step_and_first_step_after_preemption_say_reset() -> None:
    groups = [make_group([i, 5, 6, 7], 8) for i in range(3)]
    harness = Harness(make_scheduler(num_blocks=4, max_model_len=16))
    harness.add(*groups)
    resets = []

    while harness.scheduler.has_unfinished():
        batch = schedule(harness)
        by_row = {group.sequences[0].row: group for group in groups}
        resets += [by_row[int(row)] for row in batch.rows[batch.flags & int(Flag.RESET) > 0]]
        harness.update()

    assert [resets.count(group) for group in groups] == [1 + group.num_preemptions for group in groups]
    assert count(harness, Event.PREEMPTIONS) > 0


def test_sampling_rows_want_their_last_position() -> None:
    harness = Harness(make_scheduler(max_num_batched_tokens=8))
    harness.add(make_group(3), make_group(9))

    batch = schedule(harness)

    assert batch.logit_index.tolist() == [2]
    assert batch.logit_seq.tolist() == [0]
    assert batch.logit_target.tolist() == [-1]


def test_prompt_positions_want_the_next_prompt_token_and_then_a_sample() -> None:
    harness = Harness(make_scheduler())
    params = SamplingParams(max_tokens=4, prompt_logprobs=3)
    harness.add(make_group([7, 8]), make_group([11, 12, 13], params=params))

    batch = schedule(harness)

    assert batch.logit_index.tolist() == [1, 2, 3, 4]
    assert batch.logit_seq.tolist() == [0, 1, 1, 1]
    assert batch.logit_target.tolist() == [-1, 12, 13, -1]
    assert batch.num_prompt_logprobs.tolist() == [-1, 3]


@pytest.mark.parametrize("budget", [1, 3, 64])
def test_each_prompt_position_comes_once_whatever_the_chunks(budget: int) -> None:
    params = SamplingParams(max_tokens=4, prompt_logprobs=0)
    group, other = make_group(9, params=params), make_group(5)
    harness = start(group, other, max_num_batched_tokens=budget)

    harness.run()

    assert harness.prompt_positions == {group: list(range(8)), other: []}


def test_recomputed_prompt_does_not_bring_them_again() -> None:
    params = SamplingParams(max_tokens=8, prompt_logprobs=2)
    groups = [make_group(4, 8, params=params) for _ in range(3)]
    harness = start(*groups, num_blocks=4, max_model_len=16, max_in_flight=2)

    harness.run()

    assert groups[2].num_preemptions > 0
    assert harness.prompt_positions[groups[2]] == [0, 1, 2]


def test_sampling_parameters_stand_by_sequence() -> None:
    harness = Harness(make_scheduler())
    params = SamplingParams(temperature=0.5, top_p=0.75, min_p=0.125, top_k=40, max_tokens=4, logprobs=5)
    harness.add(make_group(5), make_group(3, params=params, seed=0xFEDCBA98_00000007))

    batch = schedule(harness)

    assert batch.temperature.tolist() == [1.0, 0.5]
    assert batch.top_p.tolist() == [1.0, 0.75]
    assert batch.min_p.tolist() == [0.0, 0.125]
    assert batch.top_k.tolist() == [0, 40]
    assert batch.num_logprobs.tolist() == [-1, 5]
    assert batch.seed[1].view(np.uint32).tolist() == [7, 0xFEDCBA98]


def test_negative_seed_is_two_words_of_twos_complement() -> None:
    harness = Harness(make_scheduler())
    harness.add(make_group(3, seed=-2))

    assert schedule(harness).seed.tolist() == [[-2, -1]]


def test_output_position_counts_the_tokens_in_flight() -> None:
    harness = Harness(make_scheduler())
    harness.add(make_group(3))

    assert schedule(harness).output_position.tolist() == [0]
    assert schedule(harness).output_position.tolist() == [1]
    harness.update()
    assert schedule(harness).output_position.tolist() == [2]


def test_banned_ids_last_until_min_tokens_are_out_or_in_flight() -> None:
    params = SamplingParams(max_tokens=4, min_tokens=2)
    harness = Harness(make_scheduler())
    harness.add(make_group(2), make_group(3, params=params, banned=(8, 9)))

    first, second = schedule(harness), schedule(harness)
    assert [first.banned.tolist(), first.banned_start.tolist()] == [[8, 9], [0, 0, 2]]
    assert second.banned.tolist() == [8, 9]
    harness.update()
    third = schedule(harness)
    assert [third.banned.tolist(), third.banned_start.tolist()] == [[], [0, 0, 0]]


def test_chunk_that_does_not_sample_bans_nothing() -> None:
    params = SamplingParams(max_tokens=4, min_tokens=2)
    harness = Harness(make_scheduler(max_num_batched_tokens=2))
    harness.add(make_group(3, params=params, banned=(8, 9)))

    assert schedule(harness).banned.size == 0


def test_banned_ids_beyond_the_buffer_make_it_grow() -> None:
    params = SamplingParams(max_tokens=4, min_tokens=2)
    harness = Harness(make_scheduler())
    banned = tuple(range(1000, 9000))
    harness.add(make_group(3, params=params, banned=banned), make_group(3))

    batch = schedule(harness)

    assert batch.banned.tolist() == list(banned)
    assert schedule(harness).banned.tolist() == list(banned)
    assert batch.input_ids.tolist() == [1, 2, 3, 1, 2, 3]


def test_history_comes_with_reset_for_rows_that_want_it() -> None:
    harness = Harness(make_scheduler(max_num_batched_tokens=4))
    groups = [make_group([5, 6]), make_group([7, 8, 9])]
    harness.add(*groups)
    harness.scheduler._admit(4)
    harness.scheduler._table.sampling.at.wants_history[groups[1].sequences[0].row] = True

    batch = schedule(harness)

    assert batch.history.tolist() == [7, 8, 9]
    assert batch.history_start.tolist() == [0, 0, 3]
    harness.update()
    assert schedule(harness).history.size == 0


@pytest.mark.parametrize("way", [SWAP_OUT, SWAP_IN])
def test_a_pair_that_is_swapped_takes_two_words_of_tail(way: int) -> None:
    scheduler = make_scheduler(num_host_blocks=8)
    scheduler.block_manager.moves.num[way] = 3

    *_, num_tail = measure_step(scheduler._words)

    assert num_tail == 6


@pytest.mark.parametrize("max_num_seqs", [8, 9])
def test_padding_touches_nothing(max_num_seqs: int) -> None:
    harness = Harness(make_scheduler(max_num_seqs=max_num_seqs, num_batches=1))
    harness.add(*[make_group(7, 2) for _ in range(max_num_seqs)])
    harness.run()
    harness.add(make_group([5, 6, 7]))

    batch = schedule(harness)

    arrays = batch.arrays
    assert not arrays.input_ids[3:].any()
    assert not arrays.positions[3:].any()
    assert (arrays.slot_mapping[3:] == -1).all()
    assert (arrays.query_start[1:] == 3).all()
    assert (arrays.rows[1:] == -1).all()
    assert not arrays.seq_lens[1:].any()
    assert (arrays.block_tables[1:] == -1).all()
    assert (arrays.block_tables[0, 1:] == -1).all()


def test_buckets_are_powers_of_two_that_hold_the_counts() -> None:
    assert bucket_for(1, 1, 1) == Bucket(16, 8, 16)
    assert bucket_for(17, 8, 16) == Bucket(32, 8, 16)
    assert bucket_for(2048, 256, 257) == Bucket(2048, 256, 512)


def test_views_of_a_bucket_are_cut_once() -> None:
    buffer = BatchBuffer(Bucket(16, 8, 16))

    assert buffer.views(Bucket(16, 8, 16), 0) is buffer.views(Bucket(16, 8, 16), 0)


def test_buffer_that_grew_for_a_tail_still_holds_the_largest_bucket() -> None:
    buffer = BatchBuffer(Bucket(32, 8, 16))

    assert buffer.views(Bucket(16, 8, 16), 5000).arrays.tail.size >= 5000
    assert buffer.views(Bucket(32, 8, 16), 0).arrays.block_tables.shape == (8, 16)
