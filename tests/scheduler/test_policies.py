"""Who goes first: by arrival, or by priority and then arrival; nobody starves, within a stated bound."""

from itertools import pairwise
from typing import Any

import pytest

from cupaged.scheduler.counters import Counter as Event
from cupaged.sequence import SequenceGroup, SequenceStatus
from tests.scheduler.groups import make_group
from tests.scheduler.harness import Harness, assert_all_as_expected, count, start

PRIORITY: dict[str, Any] = {"policy": "priority"}


def ranked(priority: int, prompt: int | list[int] = 4, max_tokens: int = 4, n: int = 1) -> SequenceGroup:
    return make_group(prompt, max_tokens, n=n, priority=priority)


class TestPriority:
    def test_is_refused_under_fcfs(self) -> None:
        with pytest.raises(ValueError, match=r"priority is 3 but scheduling_policy is 'fcfs'"):
            start(ranked(3))

    def test_lower_number_enters_first(self) -> None:
        groups = [ranked(p) for p in (2, 0, 1, -5)]
        harness = start(*groups, max_num_seqs=1, **PRIORITY)

        harness.run()

        assert harness.admitted == [groups[i] for i in (3, 1, 2, 0)]

    def test_equal_priority_keeps_arrival_order(self) -> None:
        groups = [ranked(i % 3) for i in range(12)]
        harness = start(*groups, max_num_seqs=2, **PRIORITY)

        harness.run()

        for priority in range(3):
            peers = [group for group in groups if group.priority == priority]
            assert [group for group in harness.admitted if group in peers] == peers
        assert_all_as_expected(harness, groups)

    @pytest.mark.parametrize("max_in_flight", [1, 2])
    def test_newcomer_takes_the_row_of_a_lower_one(self, max_in_flight: int) -> None:
        low = [ranked(5, max_tokens=20) for _ in range(2)]
        harness = start(*low, max_num_seqs=2, max_in_flight=max_in_flight, **PRIORITY)
        harness.step()
        high = ranked(1)
        harness.add(high)

        harness.step()
        harness.step()

        assert high.status is SequenceStatus.RUNNING
        assert low[1].status is SequenceStatus.PREEMPTED
        harness.run()
        assert_all_as_expected(harness, [*low, high])

    @pytest.mark.parametrize("mode", ["recompute", "swap"])
    @pytest.mark.parametrize("max_in_flight", [1, 2])
    def test_newcomer_takes_the_blocks_of_a_lower_one(self, mode: str, max_in_flight: int) -> None:
        low = [ranked(5, 20, 10) for _ in range(2)]
        harness = start(
            *low,
            num_blocks=16,
            max_in_flight=max_in_flight,
            preemption_mode=mode,
            num_host_blocks=16,
            **PRIORITY,
        )
        harness.step()
        high = ranked(1, 40, 4, n=2)
        harness.add(high)

        harness.step()
        harness.step()

        assert high.status is SequenceStatus.RUNNING
        harness.run()
        assert_all_as_expected(harness, [*low, high])

    @pytest.mark.parametrize("mode", ["recompute", "swap"])
    def test_blocks_that_a_victim_and_the_newcomer_share_are_not_free_with_the_victim(
        self, mode: str
    ) -> None:
        shared = list(range(12))
        low = [ranked(5, [70] * 9, 6), ranked(5, [*shared, 50, 51], 6)]
        harness = start(
            *low,
            num_blocks=8,
            max_model_len=32,
            enable_prefix_caching=True,
            preemption_mode=mode,
            num_host_blocks=8,
            **PRIORITY,
        )
        harness.step()
        high = ranked(1, [*shared, *[90] * 5], 3)
        harness.add(high)

        harness.step()

        assert high in harness.steps[-1]
        assert [group.num_preemptions for group in low] == [1, 1]
        harness.run()
        assert_all_as_expected(harness, [*low, high])

    @pytest.mark.parametrize("mode", ["recompute", "swap"])
    def test_who_gave_way_does_not_return_in_the_same_step(self, mode: str) -> None:
        low = [ranked(5, [i] * 5, 3) for i in range(3)]  # 2 blocks each
        harness = start(
            *low, num_blocks=8, max_model_len=32, preemption_mode=mode, num_host_blocks=8, **PRIORITY
        )
        harness.step()
        high = ranked(1, [7] * 5, 3)
        harness.add(high)

        harness.step()

        assert high in harness.steps[-1]
        assert low[1].num_preemptions == low[2].num_preemptions == 1
        assert not harness.steps[-1].keys() & {low[1], low[2]}
        harness.run()
        assert_all_as_expected(harness, [*low, high])

    def test_newcomer_takes_the_rows_of_the_least_important_swapped_group(self) -> None:
        old = [ranked(0, [i] * 4, 2) for i in range(3)]
        young = [ranked(5, [i + 10, i], 6) for i in range(2)]
        harness = start(
            *old,
            *young,
            num_blocks=6,
            max_model_len=24,
            max_num_seqs=5,
            preemption_mode="swap",
            num_host_blocks=8,
            **PRIORITY,
        )
        harness.step()
        harness.step()
        assert [group.status for group in young] == [SequenceStatus.SWAPPED] * 2
        high = ranked(1, [7], 2, n=4)
        harness.add(high)

        harness.step()

        assert young[1].status is SequenceStatus.PREEMPTED
        assert young[0].status is not SequenceStatus.PREEMPTED
        harness.run()
        assert_all_as_expected(harness, [*old, *young, high])

    def test_newcomer_takes_the_budget_of_a_lower_one(self) -> None:
        low = ranked(5, 40)
        harness = start(low, max_num_batched_tokens=4, **PRIORITY)
        harness.step()
        high = ranked(1, 12)
        harness.add(high)

        harness.step()
        harness.step()

        assert harness.steps[1][high] + harness.steps[2][high] >= 4
        harness.run()
        assert_all_as_expected(harness, [low, high])

    def test_victim_is_the_last_in_the_order_not_the_newest(self) -> None:
        low, high = ranked(9, [9] * 4, 8), [ranked(0, [i] * 4, 8) for i in range(2)]
        harness = start(low, *high, num_blocks=4, max_model_len=16, **PRIORITY)

        harness.run()

        assert low.num_preemptions > 0
        assert high[0].num_preemptions == 0
        assert_all_as_expected(harness, [low, *high])

    def test_equals_never_take_from_one_another_at_admission(self) -> None:
        groups = [ranked(1, max_tokens=20) for _ in range(3)]
        harness = start(*groups, max_num_seqs=2, **PRIORITY)

        harness.run()

        assert count(harness, Event.PREEMPTIONS) == 0

    @pytest.mark.parametrize(
        "prompt", [[*range(12), *[4] * 13], [4] * 24], ids=["holds what it finds", "leaves none for others"]
    )
    def test_nobody_gives_way_to_a_group_that_could_not_enter_then(self, prompt: list[int]) -> None:
        highest, low, high = ranked(0, [9] * 13, 3), ranked(5, [*range(12), 3], 3), ranked(1, prompt, 3)
        harness = start(highest, low, num_blocks=10, enable_prefix_caching=True, max_model_len=40, **PRIORITY)
        harness.step()
        harness.add(high)

        harness.run()

        assert count(harness, Event.PREEMPTIONS) == 0
        assert_all_as_expected(harness, [highest, low, high])

    @pytest.mark.parametrize("mode", ["recompute", "swap"])
    def test_preempted_group_returns_before_its_equals(self, mode: str) -> None:
        groups = [ranked(1, [i] * 4, 8) for i in range(6)]
        harness = start(
            *groups,
            num_blocks=6,
            max_num_seqs=3,
            max_model_len=16,
            preemption_mode=mode,
            num_host_blocks=6,
            **PRIORITY,
        )
        while harness.scheduler.has_unfinished():
            away = [g for g in groups if g.status in (SequenceStatus.PREEMPTED, SequenceStatus.SWAPPED)]
            waiting = [g for g in groups if g.status is SequenceStatus.WAITING]
            harness.step()
            for newcomer in waiting:
                if newcomer.status is not SequenceStatus.WAITING:
                    still = (SequenceStatus.PREEMPTED, SequenceStatus.SWAPPED)
                    assert not any(group.status in still for group in away)

        assert count(harness, Event.PREEMPTIONS) > 0
        assert_all_as_expected(harness, groups)


@pytest.mark.parametrize("max_in_flight", [1, 2])
@pytest.mark.parametrize("num_blocks", [16, 40])
@pytest.mark.parametrize("budget", [4, 64])
def test_no_inversion_lasts_longer_than_one_step(num_blocks: int, max_in_flight: int, budget: int) -> None:
    """A group that waits while a less important one computes does so in no two steps in a row."""
    groups = [ranked(7 * i % 5, [i, *range(3 + 5 * i % 11)], 6 + i % 7, n=1 + i % 2) for i in range(16)]
    harness = start(
        num_blocks=num_blocks,
        max_num_seqs=4,
        max_num_batched_tokens=budget,
        max_in_flight=max_in_flight,
        **PRIORITY,
    )
    inverted: list[set[tuple[SequenceGroup, SequenceGroup]]] = []
    for i, group in enumerate(groups):
        harness.add(group)
        if i % 3 == 2:
            harness.step()
            inverted.append(inversions(harness))
    while harness.scheduler.has_unfinished():
        harness.step()
        inverted.append(inversions(harness))

    assert not any(before & after for before, after in pairwise(inverted))
    assert_all_as_expected(harness, groups)


def inversions(harness: Harness) -> set[tuple[SequenceGroup, SequenceGroup]]:
    """Return (who waits, who computes) of the last step, in the wrong order."""
    away = (SequenceStatus.WAITING, SequenceStatus.PREEMPTED, SequenceStatus.SWAPPED)
    waiting = [group for group in harness.groups if group.status in away]
    return {(w, r) for w in waiting for r in harness.steps[-1] if w.priority < r.priority}
