"""Who computes how many tokens in a step, and who is preempted when blocks run out."""

from itertools import pairwise

import pytest

from cupaged.scheduler.counters import Counter as Event
from cupaged.sequence import SequenceStatus
from tests.scheduler.groups import GREEDY, make_group
from tests.scheduler.harness import assert_all_as_expected, count, preempting, start


class TestBudget:
    def test_prompt_beyond_the_budget_is_computed_in_chunks(self) -> None:
        group = make_group(17)
        harness = start(group, max_num_batched_tokens=7)

        harness.run()

        assert [step[group] for step in harness.steps] == [7, 7, 3, 1, 1, 1]
        assert_all_as_expected(harness, [group])

    def test_decodes_go_before_older_prefill_chunks(self) -> None:
        long, short = make_group(20), make_group(2)
        harness = start(short, max_num_batched_tokens=5)
        harness.step()
        harness.add(long)

        harness.step()

        assert harness.steps[-1] == {short: 1, long: 4}

    def test_prefill_chunks_share_what_is_left_oldest_first(self) -> None:
        first, second = make_group(9), make_group(9)
        harness = start(first, second, max_num_batched_tokens=6)

        harness.step()
        harness.step()

        assert harness.steps == [{first: 6}, {first: 3, second: 3}]

    def test_finished_leave_and_waiting_enter_in_the_next_step(self) -> None:
        first, second = make_group(3, 1), make_group(3, 1)
        harness = start(first, second, max_num_seqs=1)

        harness.step()
        harness.step()

        assert harness.steps == [{first: 3}, {second: 3}]

    @pytest.mark.parametrize("max_in_flight", [1, 2])
    def test_decodes_beyond_the_budget_take_turns(self, max_in_flight: int) -> None:
        groups = [make_group([i], 6) for i in range(5)]
        harness = start(*groups, max_num_batched_tokens=2, max_in_flight=max_in_flight)

        harness.run()

        turns = [[i for i, step in enumerate(harness.steps) if group in step] for group in groups]
        assert max(b - a for steps in turns for a, b in pairwise(steps)) <= 4
        assert_all_as_expected(harness, groups)

    def test_budget_of_one_serves_prefill_decode_and_waiting_in_turn(self) -> None:
        decode, prefill = make_group(1, 12), make_group(4, 12)
        harness = start(decode, prefill, max_num_batched_tokens=1)
        harness.step()
        late = make_group(1, 12)
        harness.add(late)

        for _ in range(12):
            harness.step()

        assert sum(step[decode] for step in harness.steps) >= 4
        assert sum(step[prefill] for step in harness.steps) >= 3
        assert sum(step[late] for step in harness.steps) >= 3
        harness.run()
        assert_all_as_expected(harness, [decode, prefill, late])

    def test_newcomers_enter_one_a_round_when_decodes_use_up_the_budget(self) -> None:
        harness = start(make_group([1], 30), make_group([2], 30), max_num_batched_tokens=1)
        for _ in range(4):
            harness.step()
        harness.add(*[make_group([i], 30) for i in range(3, 6)])

        for _ in range(20):
            harness.step()

        firsts = [next(i for i, s in enumerate(harness.steps) if group in s) for group in harness.admitted]
        assert len(harness.admitted) == 5
        for before, after in pairwise(firsts[2:]):
            others = set(harness.admitted[: 1 + firsts.index(before)])
            assert others <= {group for step in harness.steps[before + 1 : after] for group in step}

    def test_budget_below_max_num_seqs_admits_everybody(self) -> None:
        groups = [make_group(2, 20) for _ in range(8)]
        harness = start(*groups, max_num_batched_tokens=3)

        for _ in range(20):
            harness.step()

        assert harness.scheduler.num_running == 8


class TestPreemption:
    def test_takes_the_newest(self) -> None:
        harness, (first, second, third) = preempting()

        harness.step()
        harness.step()

        assert third.status is SequenceStatus.PREEMPTED
        assert first.status is second.status is SequenceStatus.RUNNING
        assert count(harness, Event.PREEMPTIONS) == third.num_preemptions == 1

    def test_preempted_sequence_resumes_with_same_tokens(self) -> None:
        harness, groups = preempting()

        harness.run()

        assert count(harness, Event.PREEMPTIONS) > 0
        assert_all_as_expected(harness, groups)

    def test_turn_of_a_group_that_preempts_itself_goes_to_the_others(self) -> None:
        groups = [make_group(1, 7, params=GREEDY) for _ in range(2)]  # equal: each finds the other's blocks
        harness = start(
            *groups,
            num_blocks=9,
            block_size=1,
            max_model_len=8,
            max_num_batched_tokens=1,
            enable_prefix_caching=True,
        )

        harness.run()

        assert count(harness, Event.PREEMPTIONS) > 0
        assert_all_as_expected(harness, groups)

    def test_preempted_sequence_gives_its_row_to_others(self) -> None:
        harness, (_, _, third) = preempting()
        harness.step()

        harness.step()

        assert third.status is SequenceStatus.PREEMPTED
        assert third.sequences[0].row == -1

    def test_preempted_sequence_returns_before_newcomers(self) -> None:
        harness, (_, _, third) = preempting()
        harness.step()
        harness.step()
        newcomer = make_group(1, 1)
        harness.add(newcomer)

        while newcomer not in harness.admitted:
            assert third in harness.steps[-1] or third.status is SequenceStatus.PREEMPTED
            harness.step()

        assert third.status is SequenceStatus.RUNNING or third.sequences[0].finish_reason is not None

    def test_several_preempted_in_one_step_return_by_arrival(self) -> None:
        old = [make_group([i] * 4, 2) for i in range(3)]  # each needs its second block in the second step
        young = [make_group([i, i], 6) for i in range(2)]
        harness = start(*old, *young, num_blocks=6, max_model_len=24)
        harness.step()

        harness.step()

        assert count(harness, Event.PREEMPTIONS) == 2
        harness.run()
        returned = [group for step in harness.steps[2:] for group in step if group in young]
        assert returned[:2] == young
        assert_all_as_expected(harness, [*old, *young])

    def test_nobody_enters_in_a_step_that_preempted(self) -> None:
        harness, (first, second, third) = preempting()
        harness.step()
        harness.add(make_group(1, 1))

        harness.step()

        assert harness.steps[-1].keys() == {first, second}
        assert third.status is SequenceStatus.PREEMPTED

    def test_oldest_sequence_is_never_preempted(self) -> None:
        groups = [make_group([i, 5, 6], 10) for i in range(6)]
        harness = start(*groups, num_blocks=4, max_model_len=16, max_num_batched_tokens=3)

        harness.run()

        assert groups[0].num_preemptions == 0
        assert_all_as_expected(harness, groups)

    def test_waiting_start_although_running_and_preempted_take_all_rows(self) -> None:
        groups = [make_group([i, 5, 6, 7], 8) for i in range(3)]
        late = make_group(2, 2)
        harness = start(*groups, late, num_blocks=4, max_model_len=16, max_num_seqs=3)

        harness.run()

        assert count(harness, Event.PREEMPTIONS) > 0
        assert_all_as_expected(harness, [*groups, late])

    def test_whose_turn_it_is_preempts_itself_and_another_runs_instead(self) -> None:
        groups = [make_group([i] * n, 6) for i, n in enumerate((4, 2, 4))]
        harness = start(*groups, num_blocks=5, max_model_len=16, max_num_batched_tokens=1)

        harness.run()

        assert count(harness, Event.PREEMPTIONS) > 0
        assert_all_as_expected(harness, groups)

    def test_last_group_waits_for_a_block_while_others_are_planned(self) -> None:
        old, young = make_group([1] * 3, 9), make_group([2] * 4, 8)
        harness = start(old, young, num_blocks=4, max_model_len=12)
        for _ in range(5):
            harness.step()  # young has 8 tokens in 2 blocks, old takes the 2 others

        harness.step()

        assert harness.steps[-1] == {old: 1}
        assert young.status is SequenceStatus.RUNNING
        assert harness.scheduler.num_used_blocks == 4
        harness.run()
        assert_all_as_expected(harness, [old, young])

    def test_lone_group_that_finds_no_block_is_not_kept_waiting(self) -> None:
        group = make_group([1] * 4, 12)
        harness = start(group, num_blocks=4, max_model_len=16)

        harness.run()

        assert group.num_preemptions == 0
        assert_all_as_expected(harness, [group])
