"""The stream of an emulated GPU: work that waits in a queue until the host waits for it, and graphs of it."""

import sys
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from tests.cuda_on_cpu.build import EmulatorError
from tests.cuda_on_cpu.gpu_memory import FILL, Piece, Watch

BYTES_PER_SECOND = 50e9  # of a copy, in the stream's own time

Run = Callable[[], None]


class Work(Protocol):
    """Something to do on the device."""

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """Return the device memory that it may touch."""

    @property
    def seconds(self) -> float:
        """Return how long it takes in the stream's own time."""

    def begin(self) -> Run:
        """Do what becomes true on the host at once, and return what the device does in its turn."""


class Launch(NamedTuple):
    """A kernel, or a matrix product: all but the contents of arrays is known."""

    run: Run
    pieces: tuple[Piece, ...]
    seconds: float

    def begin(self) -> Run:
        """Return it as it is."""
        return self.run


class Copy(NamedTuple):
    """A copy between device memory and pinned memory."""

    is_to_host: bool
    device: Piece
    device_offset: int  # bytes
    host: Piece
    host_offset: int
    num_bytes: int
    place: str  # in the source, that asked for it

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """Return the device's side alone: who frees pinned memory early shall be found."""
        return (self.device,)

    @property
    def seconds(self) -> float:
        """Return how long it takes."""
        return self.num_bytes / BYTES_PER_SECOND

    def begin(self) -> Run:
        """Overwrite a target, unless work before this needs it: who reads it too early reads garbage."""
        if self.is_to_host and not self.host.watches_of(self.host_offset, self.num_bytes):
            self._host_bytes().fill(FILL)
        return partial(self._run, Watch(self.host, self.host_offset, self.num_bytes))

    def _host_bytes(self) -> Any:
        try:
            root = self.host.root()
        except EmulatorError:
            raise EmulatorError(f"{self}: the pinned memory was freed too early") from None
        return root[self.host_offset : self.host_offset + self.num_bytes]

    def _run(self, watch: Watch) -> None:
        host = self._host_bytes()
        if watch.has_changed():
            raise EmulatorError(f"{self}: the host wrote to the pinned memory before the copy was done")
        device = self.device.root()[self.device_offset : self.device_offset + self.num_bytes]
        if not self.is_to_host:
            device[:] = host
            return
        host[:] = device
        for other in self.host.watches_of(self.host_offset, self.num_bytes):
            other.renew()

    def __str__(self) -> str:
        return f"copy of {self.num_bytes} bytes {'to host' if self.is_to_host else 'to device'}, {self.place}"


class Stream:
    """Work in order: queued by the host, done when the host waits for it, or at once if not deferred."""

    def __init__(self, *, deferred: bool) -> None:
        self._deferred = deferred
        self._queue: deque[tuple[Run, float, list[Any]]] = deque()
        self._recorded: list[Work] | None = None  # while it captures
        self._failure: Exception | None = None
        self.num_put = self.num_done = 0
        self.seconds = 0.0  # of what was done since somebody set it to 0

    @property
    def is_capturing(self) -> bool:
        """Return whether work is recorded and not done."""
        return self._recorded is not None

    def put(self, work: Work) -> None:
        """Put work behind all that is there."""
        if self._recorded is not None:
            self._recorded.append(work)
            return
        self.check()
        roots = [piece.root() for piece in work.pieces]  # device memory waits for its work, as cudaFree does
        self._queue.append((work.begin(), work.seconds, roots))
        self.num_put += 1
        if not self._deferred:
            self.finish(self.num_put)

    def finish(self, number: int) -> None:
        """Do the first `number` pieces of work that were ever put, and no more."""
        self.check()
        while self.num_done < number:
            run, seconds, _ = self._queue.popleft()
            self.num_done += 1
            try:
                run()
            except Exception as failure:
                self._failure = failure
                self._queue.clear()
                raise
            self.seconds += seconds

    def check(self) -> None:
        """Raise EmulatorError if work has failed before: a GPU's context is then lost."""
        if self._failure is not None:
            raise EmulatorError(f"the device was lost: {self._failure}") from self._failure

    def capture(self, work: Callable[[], None]) -> "Recorded":
        """Return what `work` puts on the stream."""
        self.check()
        recorded: list[Work] = []
        self._recorded = recorded
        try:
            work()
        finally:
            self._recorded = None
        return Recorded(recorded)


class Recorded:
    """The work of a graph; it does not keep the memory that the work touches."""

    def __init__(self, works: Iterable[Work]) -> None:
        self._works = tuple(works)
        self.pieces = tuple({id(piece): piece for work in self._works for piece in work.pieces}.values())
        self.seconds = sum(work.seconds for work in self._works)

    def __len__(self) -> int:
        return len(self._works)

    def begin(self) -> Run:
        """Begin each."""
        runs = [work.begin() for work in self._works]

        def run() -> None:
            for each in runs:
                each()

        return run


def calling_place() -> str:
    """Return file and line of the caller outside this emulator."""
    folder = str(Path(__file__).parent)
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(f"{folder}/gpu"):
        frame = frame.f_back
    return f"asked for at {Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
