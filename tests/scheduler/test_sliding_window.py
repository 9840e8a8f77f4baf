"""Blocks that have left every layer's window are given back; their places in the table are holes."""

import pytest

from cupaged.scheduler.counters import Counter as Event
from cupaged.sequence import Sequence, SequenceStatus
from tests.scheduler.groups import make_group
from tests.scheduler.harness import Harness, assert_all_as_expected, count, start


def table(harness: Harness, seq: Sequence) -> list[int]:
    blocks = harness.scheduler.block_manager.blocks
    return [int(block) for block in blocks.block_tables[seq.row, : blocks.held.num_blocks[seq.row]]]


@pytest.mark.parametrize("max_in_flight", [1, 2])
@pytest.mark.parametrize("window", [2, 5, 8, 9])
@pytest.mark.parametrize("budget", [3, 64])
def test_long_output_holds_its_window_only(window: int, max_in_flight: int, budget: int) -> None:
    group = make_group(9, 40)
    harness = start(group, sliding_window=window, max_in_flight=max_in_flight, max_num_batched_tokens=budget)
    used = []

    while harness.scheduler.has_unfinished():
        harness.step()
        used.append(harness.scheduler.num_used_blocks)

    assert max(used[12:]) <= -(-(window + max_in_flight) // 4) + 1
    assert_all_as_expected(harness, [group])


def test_holes_stand_in_front_of_the_window() -> None:
    group = make_group(9, 12)
    harness = start(group, sliding_window=5)
    for _ in range(7):
        harness.step()

    batch = harness.schedule()  # position 15 sees 11 to 15

    assert batch is not None
    assert batch.positions.tolist() == [15]
    assert (batch.block_tables[0] >= 0).tolist() == [False, False, True, True]


def test_window_wider_than_the_sequence_frees_nothing() -> None:
    group = make_group(9, 12)
    harness = start(group, sliding_window=100)
    for _ in range(9):
        harness.step()

    assert min(table(harness, group.sequences[0])) >= 0


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("max_in_flight", [1, 2])
@pytest.mark.parametrize("enable_prefix_caching", [False, True])
def test_holes_survive_preemption(mode: str, n: int, max_in_flight: int, enable_prefix_caching: bool) -> None:
    groups = [make_group([i, 7], 18, n=n) for i in range(4)]
    harness = start(
        *groups,
        num_blocks=2 + 4 * n,
        max_model_len=20,
        sliding_window=6,
        preemption_mode=mode,
        num_host_blocks=16,
        max_in_flight=max_in_flight,
        enable_prefix_caching=enable_prefix_caching,
    )

    harness.run()

    assert count(harness, Event.PREEMPTIONS) > 0
    assert_all_as_expected(harness, groups)


def test_forks_of_a_prompt_with_holes_share_what_is_left() -> None:
    group = make_group(18, 9, n=3)
    harness = start(group, sliding_window=6, max_num_batched_tokens=7)
    while len(harness.steps) < 4:
        harness.step()

    held = [table(harness, seq) for seq in group.sequences]

    assert held[0][:2] == held[1][:2] == [-1, -1]
    harness.run()
    assert_all_as_expected(harness, [group])


def test_prefix_is_found_behind_holes() -> None:
    first, second = make_group(17, 4), make_group([*range(1, 18), 50], 4)
    harness = start(first, sliding_window=6, enable_prefix_caching=True)
    harness.run()
    harness.add(second)

    harness.step()

    assert second.num_cached_tokens == 16
    assert table(harness, second.sequences[0])[:2] == [-1, -1]
    harness.run()
    assert_all_as_expected(harness, [second])


def test_beams_with_holes() -> None:
    group = make_group(9, 16, n=3, is_beam=True)
    harness = start(group, sliding_window=6)

    harness.run()

    assert len(harness.output(group)) == 15
    assert harness.scheduler.num_used_blocks == 0


def test_sibling_without_output_forks_from_a_found_prompt() -> None:
    other, group = make_group([9] * 3, 3), make_group(8, 4, n=2)
    harness = start(
        other,
        group,
        num_blocks=4,
        max_model_len=16,
        sliding_window=5,
        enable_prefix_caching=True,
        preemption_mode="recompute",
    )
    harness.step()  # the first sequence has a token
    harness.schedule()  # the other's comes too late
    harness.schedule()
    assert group.status is SequenceStatus.PREEMPTED

    harness.run()

    assert_all_as_expected(harness, [other, group])
