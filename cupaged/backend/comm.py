"""Communicators: what ranks say to each other."""

from typing import Any


class SingleRank:
    """The only rank: what it says it hears."""

    rank = 0
    size = 1

    def all_reduce(self, x: Any) -> Any:
        """Return the sum over ranks."""
        return x

    def all_gather(self, x: Any) -> Any:
        """Return the ranks' x side by side along the last axis."""
        return x

    def broadcast(self, x: Any) -> Any:
        """Return rank 0's x."""
        return x

    def barrier(self) -> None:
        """Wait for all ranks."""
