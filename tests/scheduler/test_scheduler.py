"""The rules of the scheduler, one a test, over a scripted worker that checks every slot it is given."""

from itertools import pairwise

import numpy as np
import pytest

from cupaged.batch import Flag, StepOutput
from cupaged.sampling_params import SamplingParams
from cupaged.sequence import NOT_FINISHED, FinishReason, Sequence, SequenceStatus
from tests.scheduler.scripted import (
    Harness,
    assert_all_as_expected,
    expected_output,
    make_scheduler,
    make_sequence,
)


def start(*seqs: Sequence, max_in_flight: int = 1, **options: int) -> Harness:
    harness = Harness(make_scheduler(**options), max_in_flight)
    harness.add(*seqs)
    return harness


class TestAdd:
    def test_empty_prompt_is_refused(self) -> None:
        with pytest.raises(ValueError, match="no tokens"):
            start(make_sequence([]))

    def test_too_long_is_refused_with_both_numbers(self) -> None:
        with pytest.raises(ValueError, match=r"65 tokens .* max_model_len is 64"):
            start(make_sequence(60, 5))

    def test_prompt_without_room_for_output_is_refused_with_both_numbers(self) -> None:
        with pytest.raises(ValueError, match=r"prompt has 60 tokens .* may have 60"):
            start(make_sequence(60, 0, params=SamplingParams()))

    def test_refused_sequence_leaves_nothing_behind(self) -> None:
        harness = start()

        with pytest.raises(ValueError, match="max_model_len"):
            harness.add(make_sequence(60, 5))

        assert not harness.scheduler.has_unfinished()

    def test_max_model_len_above_the_pool_is_refused_with_both_numbers(self) -> None:
        with pytest.raises(ValueError, match=r"max_model_len is 64 .* 60 tokens"):
            make_scheduler(num_blocks=15)


class TestBudget:
    def test_prompt_beyond_the_budget_is_computed_in_chunks(self) -> None:
        seq = make_sequence(17)
        harness = start(seq, max_num_batched_tokens=7)

        harness.run()

        assert [step[seq] for step in harness.steps] == [7, 7, 3, 1, 1, 1]
        assert_all_as_expected(harness, [seq])

    def test_decodes_go_before_older_prefill_chunks(self) -> None:
        long, short = make_sequence(20), make_sequence(2)
        harness = start(short, max_num_batched_tokens=5)
        harness.step()
        harness.add(long)

        harness.step()

        assert harness.steps[-1] == {short: 1, long: 4}

    def test_prefill_chunks_share_what_is_left_oldest_first(self) -> None:
        first, second = make_sequence(9), make_sequence(9)
        harness = start(first, second, max_num_batched_tokens=6)

        harness.step()
        harness.step()

        assert harness.steps == [{first: 6}, {first: 3, second: 3}]

    def test_finished_leave_and_waiting_enter_in_the_next_step(self) -> None:
        first, second = make_sequence(3, 1), make_sequence(3, 1)
        harness = start(first, second, max_num_seqs=1)

        harness.step()
        harness.step()

        assert harness.steps == [{first: 3}, {second: 3}]

    @pytest.mark.parametrize("max_in_flight", [1, 2])
    def test_decodes_beyond_the_budget_take_turns(self, max_in_flight: int) -> None:
        seqs = [make_sequence([i], 6) for i in range(5)]
        harness = start(*seqs, max_num_batched_tokens=2, max_in_flight=max_in_flight)

        harness.run()

        turns = [[i for i, step in enumerate(harness.steps) if seq in step] for seq in seqs]
        assert max(b - a for steps in turns for a, b in pairwise(steps)) <= 4
        assert_all_as_expected(harness, seqs)

    def test_budget_of_one_serves_prefill_decode_and_waiting_in_turn(self) -> None:
        decode, prefill = make_sequence(1, 12), make_sequence(4, 12)
        harness = start(decode, prefill, max_num_batched_tokens=1)
        harness.step()
        late = make_sequence(1, 12)
        harness.add(late)

        for _ in range(12):
            harness.step()

        assert sum(step[decode] for step in harness.steps) >= 4
        assert sum(step[prefill] for step in harness.steps) >= 3
        assert sum(step[late] for step in harness.steps) >= 3
        harness.run()
        assert_all_as_expected(harness, [decode, prefill, late])

    def test_newcomers_enter_one_a_round_when_decodes_use_up_the_budget(self) -> None:
        harness = start(make_sequence([1], 30), make_sequence([2], 30), max_num_batched_tokens=1)
        for _ in range(4):
            harness.step()
        harness.add(*[make_sequence([i], 30) for i in range(3, 6)])

        for _ in range(20):
            harness.step()

        firsts = [next(i for i, s in enumerate(harness.steps) if seq in s) for seq in harness.admitted]
        assert len(harness.admitted) == 5
        for before, after in pairwise(firsts[2:]):
            others = set(harness.admitted[: 1 + firsts.index(before)])
            assert others <= {seq for step in harness.steps[before + 1 : after] for seq in step}

    def test_budget_below_max_num_seqs_admits_everybody(self) -> None:
        seqs = [make_sequence(2, 20) for _ in range(8)]
        harness = start(*seqs, max_num_batched_tokens=3)

        for _ in range(20):
            harness.step()

        assert harness.scheduler.num_running == 8


class TestAdmission:
    def test_is_first_come_first_served(self) -> None:
        seqs = [make_sequence([i] * (1 + i % 7)) for i in range(20)]
        harness = start(*seqs, max_num_seqs=3)

        harness.run()

        assert harness.admitted == seqs

    def test_stops_at_the_first_that_does_not_fit(self) -> None:
        running, large, small = make_sequence(20), make_sequence(44), make_sequence(1)
        harness = start(running, large, small, num_blocks=16, max_num_batched_tokens=64)

        harness.step()

        assert harness.steps == [{running: 20}]
        assert harness.scheduler.num_waiting == 2

    def test_allocates_all_known_tokens_at_once(self) -> None:
        harness = start(make_sequence(33), max_num_batched_tokens=4)

        harness.step()

        assert harness.scheduler.num_used_blocks == 9

    def test_keeps_the_watermark_for_those_that_run(self) -> None:
        first, second = make_sequence(4), make_sequence(60)  # 1 and 15 of 16 blocks
        harness = start(first, second, num_blocks=16)

        harness.step()

        assert harness.scheduler.num_waiting == 1

    def test_waives_the_watermark_for_a_lone_sequence(self) -> None:
        seq = make_sequence(61, 3)
        harness = start(seq, num_blocks=16)

        harness.run()

        assert_all_as_expected(harness, [seq])

    def test_never_exceeds_max_num_seqs(self) -> None:
        harness = start(*[make_sequence(1) for _ in range(9)], max_num_seqs=4)

        harness.step()

        assert (harness.scheduler.num_running, harness.scheduler.num_waiting) == (4, 5)


def preempting() -> tuple[Harness, list[Sequence]]:
    """Return three sequences of one block each that grow until four blocks no longer hold them."""
    seqs = [make_sequence([i, 5, 6, 7], 8) for i in range(3)]
    harness = start(*seqs, num_blocks=4, max_model_len=16)
    return harness, seqs


class TestPreemption:
    def test_takes_the_newest(self) -> None:
        harness, (first, second, third) = preempting()

        harness.step()
        harness.step()

        assert third.status is SequenceStatus.PREEMPTED
        assert first.status is second.status is SequenceStatus.RUNNING
        assert harness.scheduler.num_preemptions == third.num_preemptions == 1

    def test_preempted_sequence_resumes_with_same_tokens(self) -> None:
        harness, seqs = preempting()

        harness.run()

        assert harness.scheduler.num_preemptions > 0
        assert_all_as_expected(harness, seqs)

    def test_preempted_sequence_keeps_its_row(self) -> None:
        harness, (_, _, third) = preempting()
        harness.step()
        row = third.row

        harness.step()

        assert third.row == row >= 0

    def test_preempted_sequence_returns_before_newcomers(self) -> None:
        harness, (_, _, third) = preempting()
        harness.step()
        harness.step()
        newcomer = make_sequence(1, 1)
        harness.add(newcomer)

        while newcomer not in harness.admitted:
            assert third in harness.steps[-1] or third.status is SequenceStatus.PREEMPTED
            harness.step()

        assert third.status is SequenceStatus.RUNNING or third.finish_reason is not None

    def test_several_preempted_in_one_step_return_by_arrival(self) -> None:
        old = [make_sequence([i] * 4, 2) for i in range(3)]  # each needs its second block in the second step
        young = [make_sequence([i, i], 6) for i in range(2)]
        harness = start(*old, *young, num_blocks=6, max_model_len=24)
        harness.step()

        harness.step()

        assert harness.scheduler.num_preemptions == 2
        harness.run()
        returned = [seq for step in harness.steps[2:] for seq in step if seq in young]
        assert returned[:2] == young
        assert_all_as_expected(harness, [*old, *young])

    def test_nobody_enters_in_a_step_that_preempted(self) -> None:
        harness, (first, second, third) = preempting()
        harness.step()
        harness.add(make_sequence(1, 1))

        harness.step()

        assert harness.steps[-1].keys() == {first, second}
        assert third.status is SequenceStatus.PREEMPTED

    def test_oldest_sequence_is_never_preempted(self) -> None:
        seqs = [make_sequence([i, 5, 6], 10) for i in range(6)]
        harness = start(*seqs, num_blocks=4, max_model_len=16, max_num_batched_tokens=3)

        harness.run()

        assert seqs[0].num_preemptions == 0
        assert_all_as_expected(harness, seqs)

    def test_waiting_start_although_running_and_preempted_take_all_rows(self) -> None:
        seqs = [make_sequence([i, 5, 6, 7], 8) for i in range(3)]
        late = make_sequence(2, 2)
        harness = start(*seqs, late, num_blocks=4, max_model_len=16, max_num_seqs=3)

        harness.run()

        assert harness.scheduler.num_preemptions > 0
        assert_all_as_expected(harness, [*seqs, late])

    def test_whose_turn_it_is_preempts_itself_and_another_runs_instead(self) -> None:
        seqs = [make_sequence([i] * n, 6) for i, n in enumerate((4, 2, 4))]
        harness = start(*seqs, num_blocks=5, max_model_len=16, max_num_batched_tokens=1)

        harness.run()

        assert harness.scheduler.num_preemptions > 0
        assert_all_as_expected(harness, seqs)


class TestEnd:
    def test_stop_token_ends_and_stays(self) -> None:
        free = make_sequence(3, 8)
        stop = expected_output(free)[2]
        seq = make_sequence(3, 8, stop=(1000, stop))
        harness = start(seq)

        harness.run()

        assert harness.outputs[seq][-1] == stop
        assert len(harness.outputs[seq]) <= 3
        assert seq.finish_reason is FinishReason.STOP

    def test_many_stop_tokens_are_all_known(self) -> None:
        output = expected_output(make_sequence(3, 8))
        few, many = make_sequence(3, 8, stop=(2000,)), make_sequence(3, 8, stop=(*range(100, 200), output[0]))
        harness = start(few, many)

        harness.run()

        assert harness.outputs[many] == output[:1]
        assert harness.outputs[few] == output

    def test_max_total_tokens_ends_with_length(self) -> None:
        seq = make_sequence(3, 5)
        harness = start(seq)

        harness.run()

        assert len(harness.outputs[seq]) == 5
        assert seq.finish_reason is FinishReason.LENGTH

    def test_stop_token_at_the_last_place_ends_with_stop(self) -> None:
        seq = make_sequence(3, 1, stop=tuple(expected_output(make_sequence(3, 1))))
        harness = start(seq)

        harness.run()

        assert seq.finish_reason is FinishReason.STOP

    def test_update_says_who_ended_and_why(self) -> None:
        short, long = make_sequence(3, 1), make_sequence(3, 2)
        harness = start(short, long)
        harness.schedule()

        update = harness.update()

        assert update.sequences == [short, long]
        assert update.num_tokens.tolist() == [1, 1]
        assert update.finish_reasons.tolist() == [FinishReason.LENGTH, NOT_FINISHED]

    def test_chunk_that_does_not_sample_appends_nothing(self) -> None:
        harness = start(make_sequence(9), max_num_batched_tokens=8)
        harness.schedule()

        update = harness.update()

        assert update.num_tokens.tolist() == [0]
        assert update.finish_reasons.tolist() == [NOT_FINISHED]

    def test_tokens_from_a_chunk_that_does_not_sample_are_refused(self) -> None:
        scheduler = make_scheduler(max_num_batched_tokens=8)
        scheduler.add(make_sequence(9))
        batch = scheduler.schedule()
        assert batch is not None

        with pytest.raises(AssertionError, match="did not sample"):
            scheduler.update(batch, StepOutput(np.ones((1, 1), np.int32), np.ones(1, np.int32)))


class TestAbort:
    def test_waiting_sequence_leaves_the_queue(self) -> None:
        first, second = make_sequence(3), make_sequence(3)
        harness = start(first, second)

        harness.abort(first)
        harness.run()

        assert harness.admitted == [second]
        assert first.finish_reason is FinishReason.ABORT

    def test_running_sequence_frees_row_and_blocks_at_once(self) -> None:
        seq = make_sequence(9)
        harness = start(seq)
        harness.step()

        harness.abort(seq)

        assert harness.scheduler.kv_usage == harness.scheduler.num_running == 0
        assert seq.row == -1

    def test_prefill_between_two_chunks_frees_its_blocks(self) -> None:
        seq = make_sequence(9)
        harness = start(seq, max_num_batched_tokens=4)
        harness.step()

        harness.abort(seq)

        assert harness.scheduler.kv_usage == 0

    def test_preempted_sequence_frees_its_row(self) -> None:
        harness, seqs = preempting()
        harness.step()
        harness.step()

        harness.abort(seqs[2])
        harness.run()

        assert_all_as_expected(harness, seqs[:2])

    def test_result_of_a_step_in_flight_is_discarded(self) -> None:
        aborted, other = make_sequence(3), make_sequence(3)
        harness = start(aborted, other)
        harness.schedule()
        harness.abort(aborted)

        update = harness.update()

        assert update.sequences == [None, other]
        assert update.num_tokens.tolist() == [0, 1]

    def test_result_in_flight_is_not_given_to_the_next_sequence_in_the_row(self) -> None:
        aborted, successor = make_sequence(3), make_sequence(5)
        harness = start(aborted, successor, max_num_seqs=1, max_in_flight=2)
        harness.schedule()
        harness.abort(aborted)

        harness.run()

        assert harness.outputs[aborted] == []
        assert_all_as_expected(harness, [successor])

    def test_finished_sequence_stays_as_it_is(self) -> None:
        seq = make_sequence(3, 1)
        harness = start(seq)
        harness.run()

        harness.abort(seq)

        assert seq.finish_reason is FinishReason.LENGTH

    def test_all_aborted_leaves_all_gauges_at_zero(self) -> None:
        seqs = [make_sequence(9) for _ in range(12)]
        harness = start(*seqs, max_in_flight=2)
        harness.schedule()
        harness.schedule()

        for seq in seqs:
            harness.abort(seq)

        scheduler = harness.scheduler
        assert (scheduler.num_running, scheduler.num_waiting, scheduler.kv_usage) == (0, 0, 0.0)
        assert not scheduler.has_unfinished()


class TestInFlight:
    def test_second_step_takes_its_input_from_the_device(self) -> None:
        harness = start(make_sequence(3))
        harness.schedule()

        batch = harness.schedule()

        assert batch is not None
        assert batch.flags.tolist() == [Flag.SAMPLES | Flag.INPUT_FROM_LAST_TOKEN]
        assert batch.positions.tolist() == [3]

    def test_known_token_is_not_taken_from_the_device(self) -> None:
        harness = start(make_sequence(3))
        harness.step()

        batch = harness.schedule()

        assert batch is not None
        assert batch.flags.tolist() == [Flag.SAMPLES]

    def test_nothing_is_scheduled_beyond_max_total_tokens(self) -> None:
        harness = start(make_sequence(3, 1))
        harness.schedule()

        assert harness.schedule() is None

    def test_third_step_in_flight_is_refused(self) -> None:
        harness = start(make_sequence(3, 9))
        harness.schedule()
        harness.schedule()

        with pytest.raises(AssertionError, match="oldest batch"):
            harness.schedule()

    def test_batches_come_back_in_order(self) -> None:
        scheduler = make_scheduler()
        scheduler.add(make_sequence(3, 9))
        scheduler.schedule()
        second = scheduler.schedule()
        assert second is not None

        with pytest.raises(AssertionError, match="in the order they went"):
            scheduler.update(second, StepOutput(np.ones((1, 1), np.int32), np.ones(1, np.int32)))

    def test_second_batch_leaves_the_first_untouched(self) -> None:
        harness = start(make_sequence(3, 9))
        first = harness.schedule()
        assert first is not None
        before = first.input_ids.copy()

        harness.schedule()

        assert np.array_equal(first.input_ids, before)

    def test_token_in_flight_reaches_a_sequence_preempted_meanwhile(self) -> None:
        seqs = [make_sequence([i, 5, 6, 7], 8) for i in range(3)]
        harness = start(*seqs, num_blocks=4, max_model_len=16, max_in_flight=2)
        harness.schedule()
        harness.schedule()
        assert seqs[2].status is SequenceStatus.PREEMPTED

        harness.update()

        assert harness.outputs[seqs[2]] == expected_output(seqs[2])[:1]
        harness.run()
        assert_all_as_expected(harness, seqs)

    def test_sequence_resumes_while_its_token_is_in_flight(self) -> None:
        old, young = make_sequence([1, 5, 6, 7], 5), make_sequence([2, 5, 6, 7], 8)
        harness = start(old, young, num_blocks=4, max_model_len=16)
        harness.schedule()
        for _ in range(4):
            harness.schedule()
            harness.update()
        assert harness.schedule() is None  # old waits for its last token, young found no third block
        harness.abort(old)

        batch = harness.schedule()

        assert batch is not None
        assert batch.seq_lens.tolist() == [9]
        assert batch.flags.tolist() == [Flag.SAMPLES | Flag.INPUT_FROM_LAST_TOKEN | Flag.RESET]
        harness.run()
        assert_all_as_expected(harness, [young])

    def test_preempted_sequence_can_end_by_its_token_in_flight(self) -> None:
        old = [make_sequence([i, 5, 6, 7], 8) for i in range(2)]
        young = make_sequence([2, 5, 6, 7], 1)
        harness = start(*old, young, num_blocks=4, max_model_len=16, max_in_flight=2)
        harness.schedule()
        harness.schedule()
        assert young.status is SequenceStatus.PREEMPTED

        harness.update()

        assert young.finish_reason is FinishReason.LENGTH
        harness.run()
        assert_all_as_expected(harness, [*old, young])

    def test_step_after_the_stop_token_is_discarded(self) -> None:
        seq = make_sequence(3, 8, stop=tuple(expected_output(make_sequence(3, 1))))
        harness = start(seq, max_in_flight=2)

        harness.run()

        assert len(harness.steps) == 2
        assert_all_as_expected(harness, [seq])

    def test_one_batch_at_a_time_is_enough(self) -> None:
        seqs = [make_sequence(5) for _ in range(3)]
        harness = start(*seqs, num_batches=1)

        harness.run()

        assert_all_as_expected(harness, seqs)


class TestPromptLogprobs:
    @pytest.mark.parametrize("budget", [1, 3, 64])
    def test_each_position_comes_once_whatever_the_chunks(self, budget: int) -> None:
        params = SamplingParams(max_tokens=4, prompt_logprobs=0)
        seq, other = make_sequence(9, params=params), make_sequence(5)
        harness = start(seq, other, max_num_batched_tokens=budget)

        harness.run()

        assert harness.prompt_positions == {seq: list(range(8)), other: []}

    def test_recomputed_prompt_does_not_bring_them_again(self) -> None:
        params = SamplingParams(max_tokens=8, prompt_logprobs=2)
        seqs = [make_sequence(4, 8, params=params) for _ in range(3)]
        harness = start(*seqs, num_blocks=4, max_model_len=16, max_in_flight=2)

        harness.run()

        assert seqs[2].num_preemptions > 0
        assert harness.prompt_positions[seqs[2]] == [0, 1, 2]


def test_waiting_and_running_add_up_to_unfinished() -> None:
    harness = start(*[make_sequence(3) for _ in range(5)], max_num_seqs=2)

    harness.step()

    assert (harness.scheduler.num_running, harness.scheduler.num_waiting) == (2, 3)
    assert harness.scheduler.has_unfinished()
