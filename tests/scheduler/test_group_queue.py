"""The groups that wait, in the order of priority, then arrival."""

import gc

from cupaged.scheduler.group_queue import GroupQueue
from cupaged.sequence import SequenceGroup
from tests.scheduler.groups import make_group


def arrived(*priorities: int) -> tuple[GroupQueue, list[SequenceGroup]]:
    queue = GroupQueue()
    groups = [make_group(1, priority=priority) for priority in priorities]
    for i, group in enumerate(groups):
        group.arrival = i
        queue.push(group)
    return queue, groups


def test_lower_priority_number_is_ahead_and_equals_are_by_arrival() -> None:
    queue, (a, b, c, d) = arrived(2, 0, 2, 0)

    assert list(queue) == [b, d, a, c]
    assert queue.head() is b
    assert len(queue) == 4


def test_head_that_left_returns_to_its_place() -> None:
    queue, (a, b, _) = arrived(0, 0, 0)

    queue.remove(a)
    assert queue.head() is b
    queue.push(a)

    assert queue.head() is a


def test_who_finishes_in_the_middle_is_gone() -> None:
    queue, (a, b, c) = arrived(0, 0, 0)

    queue.remove(b)

    assert list(queue) == [a, c]
    assert len(queue) == 2
    queue.remove(a)
    assert queue.head() is c
    queue.remove(c)
    assert queue.head() is None


def test_those_that_are_gone_are_not_kept_behind_one_that_stays() -> None:
    queue, (head, *others) = arrived(0, *range(100, 0, -1))
    last = others.pop(50)

    for group in others:
        queue.remove(group)

    assert list(queue) == [head, last]
    entries = [thing for thing in gc.get_referrers(*others) if isinstance(thing, tuple)]
    assert len(entries) < 50
    queue.remove(head)
    assert queue.head() is last
