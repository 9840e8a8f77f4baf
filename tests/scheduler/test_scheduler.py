"""What the scheduler lets in, in which order, and how a sequence ends."""

import numpy as np
import pytest

from cupaged.batch import StepOutput
from cupaged.sampling_params import SamplingParams
from cupaged.sequence import NOT_FINISHED, FinishReason
from tests.scheduler.groups import expected_output, make_group, make_scheduler
from tests.scheduler.harness import assert_all_as_expected, preempting, start


class TestAdd:
    def test_empty_prompt_is_refused(self) -> None:
        with pytest.raises(ValueError, match="no tokens"):
            start(make_group([]))

    def test_too_long_is_refused_with_both_numbers(self) -> None:
        with pytest.raises(ValueError, match=r"65 tokens .* max_model_len is 64"):
            start(make_group(60, 5))

    def test_prompt_without_room_for_output_is_refused_with_both_numbers(self) -> None:
        with pytest.raises(ValueError, match=r"prompt has 60 tokens .* may have 60"):
            start(make_group(60, 0, params=SamplingParams()))

    def test_refused_sequence_leaves_nothing_behind(self) -> None:
        harness = start()

        with pytest.raises(ValueError, match="max_model_len"):
            harness.add(make_group(60, 5))

        assert not harness.scheduler.has_unfinished()

    def test_max_model_len_above_the_pool_is_refused_with_both_numbers(self) -> None:
        with pytest.raises(ValueError, match=r"max_model_len is 64 .* 60 tokens"):
            make_scheduler(num_blocks=15)

    def test_more_sequences_than_memory_has_tables_for_are_refused_by_name(self) -> None:
        with pytest.raises(ValueError, match=r"max_num_seqs=10000000000000 .* lower max_num_seqs or"):
            make_scheduler(max_num_seqs=10**13)


class TestAdmission:
    def test_is_first_come_first_served(self) -> None:
        groups = [make_group([i] * (1 + i % 7)) for i in range(20)]
        harness = start(*groups, max_num_seqs=3)

        harness.run()

        assert harness.admitted == groups

    def test_budget_beyond_the_pool_costs_no_memory(self) -> None:
        groups = [make_group(20), make_group(20)]
        harness = start(*groups, max_num_batched_tokens=10**12)

        harness.run()

        assert_all_as_expected(harness, groups)
        assert harness.steps[0] == dict.fromkeys(groups, 20)

    def test_stops_at_the_first_that_does_not_fit(self) -> None:
        running, large, small = make_group(20), make_group(44), make_group(1)
        harness = start(running, large, small, num_blocks=16, max_num_batched_tokens=64)

        harness.step()

        assert harness.steps == [{running: 20}]
        assert harness.scheduler.num_waiting == 2

    def test_allocates_all_known_tokens_at_once(self) -> None:
        harness = start(make_group(33), max_num_batched_tokens=4)

        harness.step()

        assert harness.scheduler.num_used_blocks == 9

    def test_keeps_the_watermark_for_those_that_run(self) -> None:
        first, second = make_group(4), make_group(60)  # 1 and 15 of 16 blocks
        harness = start(first, second, num_blocks=16)

        harness.step()

        assert harness.scheduler.num_waiting == 1

    def test_waives_the_watermark_for_a_lone_sequence(self) -> None:
        group = make_group(61, 3)
        harness = start(group, num_blocks=16)

        harness.run()

        assert_all_as_expected(harness, [group])

    def test_never_exceeds_max_num_seqs(self) -> None:
        harness = start(*[make_group(1) for _ in range(9)], max_num_seqs=4)

        harness.step()

        assert (harness.scheduler.num_running, harness.scheduler.num_waiting) == (4, 5)


class TestEnd:
    def test_stop_token_ends_and_stays(self) -> None:
        free = make_group(3, 8)
        stop = expected_output(free)[2]
        group = make_group(3, 8, stop=(1000, stop))
        harness = start(group)

        harness.run()

        assert harness.output(group)[-1] == stop
        assert len(harness.output(group)) <= 3
        assert group.sequences[0].finish_reason is FinishReason.STOP

    def test_many_stop_tokens_are_all_known(self) -> None:
        output = expected_output(make_group(3, 8))
        few, many = make_group(3, 8, stop=(2000,)), make_group(3, 8, stop=(*range(100, 200), output[0]))
        harness = start(few, many)

        harness.run()

        assert harness.output(many) == output[:1]
        assert harness.output(few) == output

    def test_max_total_tokens_ends_with_length(self) -> None:
        group = make_group(3, 5)
        harness = start(group)

        harness.run()

        assert len(harness.output(group)) == 5
        assert group.sequences[0].finish_reason is FinishReason.LENGTH

    def test_stop_token_at_the_last_place_ends_with_stop(self) -> None:
        group = make_group(3, 1, stop=tuple(expected_output(make_group(3, 1))))
        harness = start(group)

        harness.run()

        assert group.sequences[0].finish_reason is FinishReason.STOP

    def test_update_says_who_ended_and_why(self) -> None:
        short, long = make_group(3, 1), make_group(3, 2)
        harness = start(short, long)
        harness.schedule()

        update = harness.update()

        assert update.sequences == [short.sequences[0], long.sequences[0]]
        assert update.num_tokens.tolist() == [1, 1]
        assert update.finish_reasons.tolist() == [FinishReason.LENGTH, NOT_FINISHED]

    def test_chunk_that_does_not_sample_appends_nothing(self) -> None:
        harness = start(make_group(9), max_num_batched_tokens=8)
        harness.schedule()

        update = harness.update()

        assert update.num_tokens.tolist() == [0]
        assert update.finish_reasons.tolist() == [NOT_FINISHED]

    def test_tokens_from_a_chunk_that_does_not_sample_are_refused(self) -> None:
        scheduler = make_scheduler(max_num_batched_tokens=8)
        scheduler.add(make_group(9))
        batch = scheduler.schedule()
        assert batch is not None

        with pytest.raises(AssertionError, match="did not sample"):
            scheduler.update(batch, StepOutput(np.ones((1, 1), np.int32), np.ones(1, np.int32)))


class TestAbort:
    def test_waiting_sequence_leaves_the_queue(self) -> None:
        first, second = make_group(3), make_group(3)
        harness = start(first, second)

        harness.abort(first)
        harness.run()

        assert harness.admitted == [second]
        assert first.sequences[0].finish_reason is FinishReason.ABORT

    def test_running_sequence_frees_row_and_blocks_at_once(self) -> None:
        group = make_group(9)
        harness = start(group)
        harness.step()

        harness.abort(group)

        assert harness.scheduler.num_used_blocks == harness.scheduler.num_running == 0
        assert group.sequences[0].row == -1

    def test_prefill_between_two_chunks_frees_its_blocks(self) -> None:
        group = make_group(9)
        harness = start(group, max_num_batched_tokens=4)
        harness.step()

        harness.abort(group)

        assert harness.scheduler.num_used_blocks == 0

    def test_preempted_sequence_frees_its_row(self) -> None:
        harness, groups = preempting()
        harness.step()
        harness.step()

        harness.abort(groups[2])
        harness.run()

        assert_all_as_expected(harness, groups[:2])

    def test_result_of_a_step_in_flight_is_discarded(self) -> None:
        aborted, other = make_group(3), make_group(3)
        harness = start(aborted, other)
        harness.schedule()
        harness.abort(aborted)

        update = harness.update()

        assert update.sequences == [None, other.sequences[0]]
        assert update.num_tokens.tolist() == [0, 1]

    def test_result_in_flight_is_not_given_to_the_next_sequence_in_the_row(self) -> None:
        aborted, successor = make_group(3), make_group(5)
        harness = start(aborted, successor, max_num_seqs=1, max_in_flight=2)
        harness.schedule()
        harness.abort(aborted)

        harness.run()

        assert harness.output(aborted) == []
        assert_all_as_expected(harness, [successor])

    def test_finished_sequence_stays_as_it_is(self) -> None:
        group = make_group(3, 1)
        harness = start(group)
        harness.run()

        harness.abort(group)

        assert group.sequences[0].finish_reason is FinishReason.LENGTH

    def test_all_aborted_leaves_all_gauges_at_zero(self) -> None:
        groups = [make_group(9) for _ in range(12)]
        harness = start(*groups, max_in_flight=2)
        harness.schedule()
        harness.schedule()

        for group in groups:
            harness.abort(group)

        scheduler = harness.scheduler
        assert (scheduler.num_running, scheduler.num_waiting, scheduler.num_used_blocks) == (0, 0, 0)
        assert not scheduler.has_unfinished()


def test_waiting_and_running_add_up_to_unfinished() -> None:
    harness = start(*[make_group(3) for _ in range(5)], max_num_seqs=2)

    harness.step()

    assert (harness.scheduler.num_running, harness.scheduler.num_waiting) == (2, 3)
    assert harness.scheduler.has_unfinished()
