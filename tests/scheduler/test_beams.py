"""Beams: the engine chooses their tokens and which continue; forked, dropped and shrunk at any time."""

import pytest

from cupaged.scheduler.counters import Counter as Event
from cupaged.sequence import FinishReason, SequenceGroup, SequenceStatus
from tests.scheduler.groups import make_group, make_scheduler
from tests.scheduler.harness import Harness, count, start, until


def beams(prompt: int | list[int], max_tokens: int = 8, n: int = 3) -> SequenceGroup:
    return make_group(prompt, max_tokens, n=n, is_beam=True)


def assert_clean(harness: Harness) -> None:
    scheduler = harness.scheduler
    assert scheduler.num_running == scheduler.num_waiting == scheduler.num_used_blocks == 0


@pytest.mark.parametrize("num_prompt", [1, 4, 6])
@pytest.mark.parametrize("budget", [1, 4, 64])
@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_beams_read_the_tokens_that_were_chosen_for_them(
    num_prompt: int, budget: int, max_in_flight: int
) -> None:
    group = beams(num_prompt)
    harness = start(group, max_num_batched_tokens=budget, max_in_flight=max_in_flight)

    harness.run()

    assert len(harness.output(group)) == 7  # the last choice ends the search
    assert_clean(harness)


def test_only_the_first_beam_computes_the_prompt() -> None:
    group = beams(6)
    harness = start(group)

    harness.step()
    harness.step()

    assert harness.steps == [{group: 6}, {group: 3}]


def test_nothing_is_planned_for_a_beam_in_flight_or_unchosen() -> None:
    harness = Harness(make_scheduler(), max_in_flight=2)
    harness.add(beams(6))
    batch = harness.schedule()

    assert batch is not None
    assert harness.schedule() is None


def test_update_appends_nothing_and_ends_nobody() -> None:
    group = beams(6)
    harness = start(group)
    harness.schedule()

    update = harness.update()

    assert update.sequences == [group.sequences[0]]
    assert update.num_tokens.tolist() == [0]
    assert update.finish_reasons.tolist() == [-1]


def test_beams_share_what_they_have_in_common() -> None:
    group = beams(8, 9)
    harness = start(group)
    harness.step()

    assert harness.scheduler.num_used_blocks == 2
    harness.step()
    assert harness.scheduler.num_used_blocks == 2 + 2  # two beams continue


def test_beam_that_nobody_continues_gives_its_blocks_back() -> None:
    group = beams(8, 9)
    harness = start(group)
    while len(harness.outputs[group.sequences[0]]) < 3:
        harness.step()

    harness.scheduler.continue_beams(group, [1], [5])

    harness.check()
    assert harness.scheduler.num_used_blocks == 3


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("budget", [2, 5, 64])
@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_beams_survive_preemption(mode: str, budget: int, max_in_flight: int) -> None:
    groups = [beams([i] * 6, 10) for i in range(3)]
    harness = start(
        *groups,
        num_blocks=14,
        max_num_seqs=9,
        max_num_batched_tokens=budget,
        max_model_len=16,
        preemption_mode=mode,
        num_host_blocks=12,
        max_in_flight=max_in_flight,
    )

    harness.run()

    assert count(harness, Event.PREEMPTIONS) > 0
    assert [len(harness.output(group)) for group in groups] == [9, 9, 9]
    assert_clean(harness)


def test_beams_in_flight_are_continued_though_the_group_is_swapped_out() -> None:
    other, group = make_group([9] * 2, 14), beams([1] * 8, 8, n=2)
    harness = start(other, group, num_blocks=7, max_model_len=16, preemption_mode="swap", num_host_blocks=6)
    while group.status is not SequenceStatus.SWAPPED:
        assert harness.scheduler.has_unfinished()
        if len(harness.in_flight) == 2 or harness.schedule() is None:
            harness.update()
    before = harness.output(group)

    while harness.in_flight:
        harness.update()

    assert group.status is SequenceStatus.SWAPPED
    assert harness.output(group) != before
    harness.run()
    assert len(harness.output(group)) == 7
    assert_clean(harness)


def test_children_of_a_beam_that_is_still_recomputed_write_to_blocks_of_their_own() -> None:
    harness = start(
        block_size=1,
        num_blocks=59,
        max_num_seqs=11,
        max_num_batched_tokens=2,
        max_model_len=24,
        preemption_mode="recompute",
    )
    prompts = [([0], 18), ([1] * 2, 20), ([2] * 4, 15), ([3] * 3, 10), ([4], 13)]
    groups = [make_group(*prompt) for prompt in prompts]
    groups.append(beams([50] * 2, 20, n=2))
    for group, num_steps in zip(groups, (2, 2, 1, 0, 0, 0), strict=True):
        harness.add(group)
        for _ in range(num_steps):
            harness.step()

    harness.run()  # which asserts that no step writes to a shared block

    assert groups[-1].num_preemptions > 0
    assert_clean(harness)


def test_beams_are_continued_while_the_group_is_swapped_out() -> None:
    other, group = make_group([9] * 8, 8), beams([1] * 8, 8, n=2)
    harness = start(other, group, num_blocks=6, max_model_len=16, preemption_mode="swap", num_host_blocks=6)
    until(harness, group, SequenceStatus.SWAPPED)

    harness.continue_beams(group)
    harness.continue_beams(group)

    harness.run()
    assert len(harness.output(group)) == 7
    assert_clean(harness)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_search_is_ended_in_any_state(mode: str) -> None:
    for steps in range(12):
        groups = [beams([i] * 6, 10) for i in range(3)]
        harness = start(
            *groups,
            num_blocks=14,
            max_num_seqs=9,
            max_model_len=16,
            preemption_mode=mode,
            num_host_blocks=12,
            max_in_flight=2,
        )
        for _ in range(steps):
            harness.step()

        for group in groups:
            harness.scheduler.finish_group(group, FinishReason.STOP)
            harness.check()

        assert_clean(harness)
        assert all(group.status is SequenceStatus.FINISHED for group in groups)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_group_of_the_whole_pool_runs(mode: str) -> None:
    """Both beams write to the block that they share; one copy of it is all that there is room for."""
    group = beams(5, 3, n=2)
    harness = start(group, num_blocks=3, max_model_len=8, preemption_mode=mode, num_host_blocks=3)

    harness.run(20)

    assert count(harness, Event.PREEMPTIONS) == 0
    assert len(harness.output(group)) == 2
    assert_clean(harness)
