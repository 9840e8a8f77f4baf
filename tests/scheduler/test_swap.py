"""Preemption by swap or recompute: which one, what moves, and in which order groups come back."""

from typing import Any

import pytest

from cupaged.scheduler.counters import Counter as Event
from cupaged.sequence import FinishReason, SequenceStatus
from tests.scheduler.groups import expected_output, make_group
from tests.scheduler.harness import assert_all_as_expected, count, preempting, start, until

SWAP: dict[str, Any] = {"preemption_mode": "swap", "num_host_blocks": 8}


class TestMode:
    @pytest.mark.parametrize(
        ("options", "swaps"),
        [
            (SWAP, True),
            ({"preemption_mode": "swap", "num_host_blocks": 0}, False),
            ({"preemption_mode": "recompute", "num_host_blocks": 8}, False),
            ({"preemption_mode": "auto", "num_host_blocks": 0}, False),
        ],
    )
    def test_is_obeyed_where_there_is_a_host_pool(self, options: dict[str, Any], swaps: bool) -> None:
        harness, groups = preempting(**options)

        harness.run()

        assert count(harness, Event.PREEMPTIONS) > 0
        assert (count(harness, Event.SWAPPED_OUT_BLOCKS) > 0) == swaps
        assert (count(harness, Event.RECOMPUTED_TOKENS) > 0) == (not swaps)
        assert_all_as_expected(harness, groups)

    @pytest.mark.parametrize(
        ("block_bytes", "bandwidth", "prefill_rate", "swaps"),
        [
            (1000, 1e6, 100.0, True),  # a block of 4 tokens: 2 ms against 40 ms
            (1000, 1e6, 1e6, False),  # 2 ms against 4 us
            (1000, 1e6, 1999.0, True),  # 2 ms against 2.001 ms
            (1000, 1e6, 2000.0, False),  # a tie is recomputed: it leaves the host pool alone
            (2000, 1e6, 1999.0, False),
            (1000, 5e5, 1999.0, False),
        ],
    )
    def test_auto_takes_what_costs_less(
        self, block_bytes: int, bandwidth: float, prefill_rate: float, swaps: bool
    ) -> None:
        # The victim has one block and four computed tokens.
        harness, groups = preempting(
            num_host_blocks=8, block_bytes=block_bytes, swap_bandwidth=bandwidth, prefill_rate=prefill_rate
        )

        harness.step()
        harness.step()

        wanted = SequenceStatus.SWAPPED if swaps else SequenceStatus.PREEMPTED
        assert groups[2].status is wanted

    def test_auto_counts_a_shared_prompt_once_on_both_sides(self) -> None:
        # 3 blocks against 8 + 2 * 1 tokens that would be computed again, not 2 * 9.
        other, group = make_group([9] * 12, 8), make_group([1] * 8, 8, n=2)
        options = {"num_blocks": 8, "max_model_len": 32, "num_host_blocks": 8, "block_bytes": 1}

        harness = start(other, group, swap_bandwidth=1.0, prefill_rate=2.0, **options)  # 2 * 4 against 5.0
        until(harness, group, SequenceStatus.PREEMPTED)
        harness.run()

        assert count(harness, Event.SWAPPED_OUT_BLOCKS) == 0
        assert_all_as_expected(harness, [other, group])


class TestRecompute:
    @pytest.mark.parametrize("max_in_flight", [1, 2])
    def test_tax_is_what_is_computed_once_more(self, max_in_flight: int) -> None:
        harness, groups = preempting(preemption_mode="recompute", max_in_flight=max_in_flight)

        harness.run()

        computed = sum(sum(step.values()) for step in harness.steps)
        assert computed == 3 * (4 + 8 - 1) + count(harness, Event.RECOMPUTED_TOKENS)
        assert_all_as_expected(harness, groups)


class TestSwap:
    def test_nothing_is_computed_again(self) -> None:
        harness, groups = preempting(**SWAP)

        harness.run()

        assert count(harness, Event.RECOMPUTED_TOKENS) == 0
        assert count(harness, Event.SWAPPED_OUT_BLOCKS) == count(harness, Event.SWAPPED_IN_BLOCKS) > 0
        assert sum(sum(step.values()) for step in harness.steps) == 3 * (4 + 8 - 1)
        assert_all_as_expected(harness, groups)

    @pytest.mark.parametrize("max_in_flight", [1, 2])
    @pytest.mark.parametrize("enable_prefix_caching", [False, True])
    def test_swapped_group_resumes_with_same_tokens(
        self, max_in_flight: int, enable_prefix_caching: bool
    ) -> None:
        groups = [make_group([i, 5, 6], 12) for i in range(5)]
        harness = start(
            *groups,
            num_blocks=6,
            max_model_len=16,
            max_in_flight=max_in_flight,
            enable_prefix_caching=enable_prefix_caching,
            **SWAP,
        )

        harness.run()

        assert count(harness, Event.SWAPPED_IN_BLOCKS) > 0
        assert_all_as_expected(harness, groups)

    def test_block_shared_in_a_group_moves_once(self) -> None:
        other, group = make_group([9] * 12, 8), make_group([1] * 8, 8, n=2)
        harness = start(other, group, num_blocks=8, max_model_len=32, **SWAP)

        until(harness, group, SequenceStatus.SWAPPED)

        assert all(seq.row >= 0 for seq in group.sequences)
        moved = count(harness, Event.SWAPPED_OUT_BLOCKS)
        assert moved == 2 + 2  # the prompt's, and one of each sequence
        harness.run()
        assert count(harness, Event.SWAPPED_IN_BLOCKS) == moved
        assert_all_as_expected(harness, [other, group])

    def test_full_host_pool_falls_back_to_recompute(self) -> None:
        groups = [make_group([i] * 4, 12) for i in range(4)]
        harness = start(*groups, num_blocks=5, max_model_len=16, preemption_mode="swap", num_host_blocks=1)
        seen = set()

        while harness.scheduler.has_unfinished():
            harness.step()
            seen |= {group.status for group in groups}

        assert {SequenceStatus.SWAPPED, SequenceStatus.PREEMPTED} <= seen
        assert_all_as_expected(harness, groups)

    def test_group_larger_than_the_host_pool_is_recomputed_whole(self) -> None:
        other, group = make_group([9] * 12, 8), make_group([1] * 8, 8, n=2)
        harness = start(
            other, group, num_blocks=8, max_model_len=32, preemption_mode="swap", num_host_blocks=3
        )

        harness.run()

        assert count(harness, Event.SWAPPED_OUT_BLOCKS) == 0
        assert count(harness, Event.PREEMPTIONS) > 0
        assert_all_as_expected(harness, [other, group])

    def test_host_blocks_come_back(self) -> None:
        harness, groups = preempting(**SWAP)

        harness.run()

        assert harness.scheduler.block_manager.host_blocks.num.free[0] == 8
        assert_all_as_expected(harness, groups)

    def test_step_that_computes_nothing_swaps_nothing(self) -> None:
        # The first waits for its last token; the second finds too few blocks, though the third gives its own.
        first, second, third = make_group([1] * 5, 2), make_group([2] * 2, 3, n=3), make_group([3], 5)
        harness = start(first, second, third, num_blocks=11, block_size=1, max_model_len=11, **SWAP)
        harness.schedule()
        harness.schedule()
        harness.update()

        assert harness.schedule() is None

        assert third.status is SequenceStatus.PREEMPTED
        harness.run()
        assert_all_as_expected(harness, [first, second, third])


class TestReturn:
    def test_swapped_group_returns_before_newcomers(self) -> None:
        harness, groups = preempting(**SWAP)
        until(harness, groups[2], SequenceStatus.SWAPPED)
        newcomer = make_group([7], 1)
        harness.add(newcomer)

        while newcomer not in harness.admitted:
            harness.step()

        returned = next(i for i, step in enumerate(harness.steps) if i > 1 and groups[2] in step)
        entered = next(i for i, step in enumerate(harness.steps) if newcomer in step)
        assert returned <= entered
        harness.run()
        assert_all_as_expected(harness, [*groups, newcomer])

    def test_several_return_by_arrival(self) -> None:
        old = [make_group([i] * 4, 2) for i in range(3)]  # each needs its second block in the second step
        young = [make_group([i + 10, i], 6) for i in range(2)]
        harness = start(*old, *young, num_blocks=6, max_model_len=24, **SWAP)
        harness.step()
        harness.step()
        assert [group.status for group in young] == [SequenceStatus.SWAPPED] * 2

        harness.run()

        returned = [group for step in harness.steps[2:] for group in step if group in young]
        assert returned[:2] == young
        assert_all_as_expected(harness, [*old, *young])

    def test_first_step_back_says_reset(self) -> None:
        harness, groups = preempting(**SWAP)
        until(harness, groups[2], SequenceStatus.SWAPPED)
        batch = None
        while groups[2].status is SequenceStatus.SWAPPED:
            batch = harness.schedule()
            harness.update()

        row = groups[2].sequences[0].row
        assert batch is not None
        assert len(batch.swap_in) > 0
        assert batch.flags[batch.rows.tolist().index(row)] & 4


class TestEnd:
    def test_abort_of_a_swapped_group_frees_its_host_blocks(self) -> None:
        harness, groups = preempting(**SWAP)
        until(harness, groups[2], SequenceStatus.SWAPPED)

        harness.abort(groups[2])

        assert harness.scheduler.block_manager.host_blocks.num.free[0] == 8
        harness.run()
        assert_all_as_expected(harness, groups[:2])

    @pytest.mark.parametrize("index", [0, 1])
    @pytest.mark.parametrize("mode", ["swap", "recompute"])
    def test_one_sequence_ends_while_its_group_is_away(self, index: int, mode: str) -> None:
        other, group = make_group([9] * 12, 8), make_group([1] * 6, 8, n=2)
        harness = start(other, group, num_blocks=8, max_model_len=32, preemption_mode=mode, num_host_blocks=8)
        until(harness, group, SequenceStatus.SWAPPED if mode == "swap" else SequenceStatus.PREEMPTED)

        harness.stop(group.sequences[index])
        harness.run()

        assert group.sequences[index].finish_reason is FinishReason.STOP
        assert harness.outputs[group.sequences[1 - index]] == expected_output(group, 1 - index)
        assert_all_as_expected(harness, [other])

    def test_token_in_flight_of_a_swapped_group_is_not_lost(self) -> None:
        harness, groups = preempting(**SWAP)
        harness.max_in_flight = 2
        harness.schedule()
        harness.schedule()
        assert groups[2].status is SequenceStatus.SWAPPED

        harness.update()

        assert harness.output(groups[2]) == expected_output(groups[2])[:1]
        harness.run()
        assert_all_as_expected(harness, groups)

    def test_swapped_group_can_end_by_its_token_in_flight(self) -> None:
        old = [make_group([i, 5, 6, 7], 8) for i in range(2)]
        young = make_group([2, 5, 6, 7], 1)
        harness = start(*old, young, num_blocks=4, max_model_len=16, max_in_flight=2, **SWAP)
        harness.schedule()
        harness.schedule()

        harness.update()

        assert young.status is SequenceStatus.FINISHED
        assert harness.scheduler.block_manager.host_blocks.num.free[0] == 8
        harness.run()
        assert_all_as_expected(harness, [*old, young])
