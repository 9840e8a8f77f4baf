"""A stream of work whose clock is known, and its events and graphs, for tests of how a GPU is timed."""

from types import SimpleNamespace
from typing import Any

CALL_SECONDS = 1e-5


class Stream:
    """Work takes time on it; while it is captured it takes none, and its graph does later."""

    ptr = 1

    def __init__(self) -> None:
        self.clock = 0.0
        self.captured: float | None = None

    def work(self, seconds: float) -> None:
        if self.captured is None:
            self.clock += seconds
        else:
            self.captured += seconds

    def record(self) -> "Event":
        assert self.captured is None
        return Event(self.clock)

    def begin_capture(self) -> None:
        assert self.captured is None
        self.captured = 0.0

    def end_capture(self) -> Any:
        seconds, self.captured = self.captured, None
        assert seconds is not None
        return SimpleNamespace(launch=lambda stream: stream.work(seconds))


class Event:
    """A moment of a stream's clock."""

    def __init__(self, clock: float) -> None:
        self.clock = clock

    def synchronize(self) -> None: ...
