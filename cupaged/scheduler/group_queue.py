"""GroupQueue: the groups that wait, first those of lower priority numbers, then by arrival."""

from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from cupaged.sequence import SequenceGroup

_MOST_GONE = 16  # that a short heap still holds


class GroupQueue:
    """A heap; who finishes while waiting is dropped when it comes to the head, or is among too many such."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, SequenceGroup]] = []
        self._waiting: set[SequenceGroup] = set()

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[SequenceGroup]:
        """Go through the groups, the first one first."""
        return (group for _, _, group in sorted(self._heap) if group in self._waiting)

    def push(self, group: SequenceGroup) -> None:
        """Put a group where its priority and arrival say."""
        self._waiting.add(group)
        heappush(self._heap, (group.priority, group.arrival, group))

    def head(self) -> SequenceGroup | None:
        """Return the first group."""
        return self._heap[0][2] if self._heap else None

    def remove(self, group: SequenceGroup) -> None:
        """Take a group out: the head, which may come back, or one that has finished."""
        self._waiting.discard(group)
        while self._heap and self._heap[0][2] not in self._waiting:
            heappop(self._heap)
        # Others may stay before it for ever, so that it never comes to the head.
        if len(self._heap) > 2 * len(self._waiting) + _MOST_GONE:
            self._heap = [entry for entry in self._heap if entry[2] in self._waiting]
            heapify(self._heap)
