"""Replay: the kernel calls of a step of decodes, kept for the next one of the same shape.

Python spends as long on a small step's three hundred calls as memory does on its weights: cutting results
from the arena, reshaping them, finding the next layer. A step that has the shape of an earlier one, in the
same batch buffer and from the same place in the arena, makes the same calls with the same arrays; only the
numbers in them differ. What CUDA graphs are to a GPU.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from cupaged.backend.arena import Arena, ArenaState
from cupaged.backend.base import Array
from cupaged.batch import Batch
from cupaged.threads import Call, ParallelRunner

MOST_KEPT = 16  # forwards; one of a small model is some 300 calls


class Recorded(NamedTuple):
    """A forward that has run."""

    batch: Batch  # whose arrays the calls read
    calls: list[Call]
    hidden: Array  # what it returned: the same place in the arena after each replay
    before: ArenaState
    after: ArenaState


class Replay:
    """Runs kernels; keeps those of a forward, and runs them again for a batch of the same shape."""

    def __init__(self, runner: ParallelRunner, arena: Arena) -> None:
        self._runner = runner
        self._arena = arena
        self._calls: list[Call] | None = None  # of the forward that is being recorded
        self._recorded: OrderedDict[tuple[int, ...], Recorded] = OrderedDict()

    def run(self, call: Call) -> None:
        """Run a kernel."""
        self._runner.run([call])
        if self._calls is not None:
            self._calls.append(call)

    def run_forward(self, batch: Batch, forward: Callable[[], Array]) -> Array:
        """Return forward(), or make the calls that it made for such a batch before."""
        if not batch.num_decodes == batch.num_seqs == batch.num_tokens:
            return forward()  # seldom has a second of its shape, and is long enough
        arena, key = self._arena, _shape(batch)
        if (found := self._recorded.get(key)) and found.before == arena.state():
            self._recorded.move_to_end(key)
            self._runner.run(found.calls)
            arena.restore(found.after)
            return found.hidden
        before, self._calls = arena.state(), []
        try:
            hidden = forward()
            self._recorded[key] = Recorded(batch, self._calls, hidden, before, arena.state())
        finally:
            self._calls = None
        if len(self._recorded) > MOST_KEPT:
            self._recorded.popitem(last=False)
        return hidden


def _shape(batch: Batch) -> tuple[int, ...]:
    """Return what decides where a batch's arrays lie and how large they are, as far as a forward reads them.

    The buffer is told by its id: as long as a record keeps its arrays, no other can have that.
    """
    return (id(batch.buffer), *batch.bucket, batch.num_seqs)
