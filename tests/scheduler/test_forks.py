"""Groups of several sequences: one prefill, shared blocks, a copy before the first write to one of them."""

import numpy as np
import pytest

from cupaged.batch import Flag
from cupaged.sampling_params import SamplingParams
from cupaged.scheduler.counters import Counter as Event
from cupaged.sequence import FinishReason, SequenceStatus
from tests.scheduler.groups import GREEDY, expected_output, make_group
from tests.scheduler.harness import assert_all_as_expected, count, start


class TestFork:
    @pytest.mark.parametrize("max_in_flight", [1, 2])
    def test_prompt_is_computed_once_and_its_last_token_by_each_sibling(self, max_in_flight: int) -> None:
        group = make_group(9, n=3)
        harness = start(group, max_in_flight=max_in_flight)

        harness.run()

        assert [step[group] for step in harness.steps[:3]] == [9, 3, 3]
        assert_all_as_expected(harness, [group])

    def test_sibling_reads_the_last_prompt_token_and_does_not_write_it(self) -> None:
        group = make_group(9, n=2)
        harness = start(group)
        harness.step()

        batch = harness.schedule()

        assert batch is not None
        assert batch.positions.tolist() == [9, 8]
        assert batch.slot_mapping[1] == -1
        assert batch.slot_mapping[0] >= 0
        assert batch.flags.tolist() == [Flag.SAMPLES, Flag.SAMPLES | Flag.RESET]

    def test_each_index_says_its_own(self) -> None:
        group = make_group(9, n=3)
        harness = start(group)

        harness.run()

        assert len({tuple(harness.outputs[seq]) for seq in group.sequences}) == 3
        assert_all_as_expected(harness, [group])

    def test_greedy_copies_equal_the_single_one(self) -> None:
        group, single = make_group(9, 8, n=3, params=GREEDY), make_group(9, 8, params=GREEDY)
        harness = start(group, single)

        harness.run()

        assert all(harness.outputs[seq] == harness.output(single) for seq in group.sequences)
        assert count(harness, Event.FORKS) == 2

    @pytest.mark.parametrize("num_prompt", [1, 3, 4, 5, 8])
    @pytest.mark.parametrize("budget", [1, 3, 64])
    @pytest.mark.parametrize("max_in_flight", [1, 2])
    def test_any_prompt_and_budget(self, num_prompt: int, budget: int, max_in_flight: int) -> None:
        group = make_group(num_prompt, 6, n=3)
        harness = start(group, max_num_batched_tokens=budget, max_in_flight=max_in_flight)

        harness.run()

        assert_all_as_expected(harness, [group])

    def test_prompt_blocks_are_held_once(self) -> None:
        group = make_group(12, 9, n=4)
        harness = start(group)
        harness.step()

        assert harness.scheduler.num_used_blocks == 3
        harness.step()
        harness.step()
        assert harness.scheduler.num_used_blocks == 3 + 4

    def test_stored_tokens_are_counted_once(self) -> None:
        harness = start(make_group(9, n=3))

        harness.step()
        assert harness.scheduler.num_stored_tokens == 9
        harness.step()
        assert harness.scheduler.num_stored_tokens == 8 + 2 + 1  # the copy of the first, and what two share

    def test_log_probabilities_of_the_prompt_come_once(self) -> None:
        group = make_group(9, n=3, params=SamplingParams(max_tokens=None, prompt_logprobs=0))
        harness = start(group)

        harness.run()

        assert harness.prompt_positions[group] == list(range(8))


class TestCopyOnWrite:
    def test_partial_block_is_copied_by_all_but_the_last_writer(self) -> None:
        group = make_group(9, n=3)
        harness = start(group)

        harness.run()

        assert count(harness, Event.COPIED_BLOCKS) == 2
        assert_all_as_expected(harness, [group])

    def test_full_blocks_are_never_copied(self) -> None:
        group = make_group(8, n=3)
        harness = start(group)

        harness.run()

        assert count(harness, Event.COPIED_BLOCKS) == 0
        assert_all_as_expected(harness, [group])

    def test_copy_goes_from_the_shared_block_to_the_writers_own(self) -> None:
        group = make_group(6, n=2)
        harness = start(group)
        harness.step()
        shared = harness.scheduler.block_manager.blocks.block_tables[group.sequences[1].row, 1]

        batch = harness.schedule()

        assert batch is not None
        assert batch.copy.tolist() == [[shared, batch.block_tables[0, 1]]]
        assert batch.block_tables[1, 1] == shared

    def test_lone_group_at_the_limit_of_the_pool_runs(self) -> None:
        group = make_group(5, 3, n=2)  # one full block shared, one block more of each
        harness = start(group, num_blocks=3, max_model_len=8)

        harness.run(100)

        assert_all_as_expected(harness, [group])


class TestEnd:
    @pytest.mark.parametrize("index", [0, 1, 2])
    @pytest.mark.parametrize("num_steps", [0, 1, 4], ids=["waiting", "prefilling", "decoding"])
    @pytest.mark.parametrize("max_in_flight", [1, 2])
    def test_one_that_stops_leaves_the_others_as_they_are(
        self, index: int, num_steps: int, max_in_flight: int
    ) -> None:
        group = make_group(9, 12, n=3)
        harness = start(group, max_num_batched_tokens=6, max_in_flight=max_in_flight)
        for _ in range(num_steps):
            harness.step()

        harness.stop(group.sequences[index])
        harness.run()

        for seq in group.sequences:
            expected = expected_output(group, seq.index)
            if seq.index == index:
                assert seq.finish_reason is FinishReason.STOP
                assert harness.outputs[seq] == expected[: len(harness.outputs[seq])]
            else:
                assert harness.outputs[seq] == expected
        assert harness.scheduler.num_used_blocks == 0

    def test_group_is_finished_with_its_last_sequence(self) -> None:
        group = make_group(9, n=2)
        harness = start(group)
        harness.step()

        harness.stop(group.sequences[1])
        assert harness.scheduler.has_unfinished()
        harness.stop(group.sequences[0])

        assert group.status is SequenceStatus.FINISHED
        assert not harness.scheduler.has_unfinished()

    def test_abort_ends_all_that_is_unfinished(self) -> None:
        group = make_group(9, n=3)
        harness = start(group)
        harness.step()
        harness.stop(group.sequences[1])

        harness.abort(group)

        reasons = [seq.finish_reason for seq in group.sequences]
        assert reasons == [FinishReason.ABORT, FinishReason.STOP, FinishReason.ABORT]
        assert harness.scheduler.num_used_blocks == 0

    def test_stop_tokens_end_each_by_itself(self) -> None:
        free = make_group(9, 12, n=3)
        stops = tuple(expected_output(free, index)[2 * index + 1] for index in range(3))
        group = make_group(9, 12, n=3, stop=stops)
        harness = start(group)

        harness.run()

        assert_all_as_expected(harness, [group])
        assert len({len(harness.outputs[seq]) for seq in group.sequences}) > 1


class TestLimits:
    def test_more_sequences_than_rows_are_refused_with_both_numbers(self) -> None:
        with pytest.raises(ValueError, match=r"n is 9 but max_num_seqs is 8"):
            start(make_group(3, n=9))

    def test_group_beyond_the_pool_is_refused_with_the_numbers(self) -> None:
        # 2 full blocks of the prompt are shared, 5 more of each sequence: 2 + 3 * 5 = 17 of 16.
        with pytest.raises(ValueError, match=r"n is 3: .* 17 KV blocks but there are 16"):
            start(make_group(9, 19, n=3), num_blocks=16)

    def test_group_of_the_whole_pool_runs(self) -> None:
        group = make_group(9, 15, n=3)  # 2 + 3 * 4
        harness = start(group, num_blocks=14, max_model_len=32)

        harness.run()

        assert_all_as_expected(harness, [group])

    def test_group_waits_until_all_its_rows_are_free(self) -> None:
        first, wide, late = make_group(3, 3), make_group([4, 5], n=3), make_group([6])
        harness = start(first, wide, late, max_num_seqs=3)

        harness.step()

        assert harness.steps == [{first: 3}]
        harness.run()
        assert harness.admitted == [first, wide, late]
        assert_all_as_expected(harness, [first, wide, late])


class TestPreemption:
    @pytest.mark.parametrize("mode", ["recompute", "swap"])
    @pytest.mark.parametrize("num_prompt", [4, 6])
    @pytest.mark.parametrize("max_in_flight", [1, 2])
    def test_group_goes_and_comes_back_whole(self, mode: str, num_prompt: int, max_in_flight: int) -> None:
        groups = [make_group([i] * num_prompt, 10, n=2) for i in range(3)]
        harness = start(
            *groups,
            num_blocks=12,
            max_model_len=20,
            preemption_mode=mode,
            num_host_blocks=12,
            max_in_flight=max_in_flight,
        )

        harness.run()

        assert count(harness, Event.PREEMPTIONS) > 0
        assert (count(harness, Event.SWAPPED_OUT_BLOCKS) > 0) == (mode == "swap")
        assert_all_as_expected(harness, groups)

    def test_recomputed_siblings_share_the_prompt_again(self) -> None:
        groups = [make_group([i] * 8, 10, n=2) for i in range(2)]
        harness = start(*groups, num_blocks=9, max_model_len=20, preemption_mode="recompute")

        harness.run()

        assert groups[1].num_preemptions > 0
        assert count(harness, Event.FORKS) == 2 + groups[1].num_preemptions
        assert_all_as_expected(harness, groups)


def test_rows_of_a_group_stand_side_by_side_in_the_batch() -> None:
    groups = [make_group([i] * 3, 9, n=3) for i in range(2)]
    harness = start(*groups)
    harness.step()
    harness.step()

    batch = harness.schedule()

    assert batch is not None
    rows = [seq.row for group in groups for seq in group.sequences]
    assert batch.rows.tolist() == rows
    assert np.diff(batch.query_start).tolist() == [1] * 6
