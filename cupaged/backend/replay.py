"""Replay: the kernel calls of a step of decodes, kept for the next one of the same shape.

Python spends as long on a small step's three hundred calls as memory does on its weights: cutting results
from the arena, reshaping them, finding the next layer. A step that has the shape of an earlier one, from the
same place in the arena, makes the same calls with the same arrays, but for those of the batch, which lie in
its buffer as the earlier ones did in theirs; only the numbers in them differ. What CUDA graphs are to a GPU.
A step has two such parts: its forward, and sampling.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

from cupaged.backend.arena import Arena, ArenaState
from cupaged.backend.base import Array
from cupaged.batch import Batch
from cupaged.recording import Call, Recording
from cupaged.threads import ParallelRunner

MOST_KEPT = 64  # parts, two a step; a forward of a small model is some 300 calls, half a megabyte
MOST_BUFFERS = 2  # of batches, which take turns while two steps are in flight


class Step(NamedTuple):
    """A part of a step that has run; all that its key tells by an id is kept."""

    inputs: tuple[Array, ...]
    recordings: list[Recording]  # by the batch's buffer, the newest last
    result: Any  # what it returned: the same places in the arena after each replay
    before: ArenaState
    after: ArenaState


class Replay:
    """Runs kernels; keeps those of a forward or of what samples, and runs them again for such a batch."""

    def __init__(self, runner: ParallelRunner, arena: Arena) -> None:
        self._runner = runner
        self._arena = arena
        self._calls: list[Call] | None = None  # of what is being recorded
        self._reads: list[Array | None] = []
        self._steps: OrderedDict[tuple[Any, ...], Step] = OrderedDict()
        self._last: Recording | None = None

    def run(self, call: Call, reads: Array | None = None) -> None:
        """Run a kernel, which streams the weights `reads` from memory."""
        self._runner.run([call])
        if self._calls is not None:
            self._calls.append(call)
            self._reads.append(reads)

    def run_part(self, name: str, batch: Batch, part: Callable[[], Any], *inputs: Array) -> Any:
        """Return part(), or what it returned for such a batch and inputs before, once its calls are made.

        They have only begun then; the runner's wait() says when they are made.
        """
        if not batch.num_decodes == batch.num_seqs == batch.num_tokens:
            return part()  # seldom has a second of its shape, and is long enough
        arena, key = self._arena, (name, *batch.bucket, batch.num_seqs, *map(id, inputs))
        if (found := self._steps.get(key)) and found.before == arena.state():
            self._steps.move_to_end(key)
            self._last = self._recording_of(found, batch)
            self._runner.play(self._last)
            arena.restore(found.after)
            return found.result
        before, self._calls, self._reads = arena.state(), [], []
        try:
            result = part()
            recording = Recording(self._calls, self._reads, batch.buffer)
        finally:
            self._calls = None
        if self._last is not None:  # the parts take turns, whatever their shapes
            recording.follow(self._last)
            self._last.follow(recording)
        self._last = recording
        self._steps[key] = Step(inputs, [recording], result, before, arena.state())
        if len(self._steps) > MOST_KEPT:
            self._steps.popitem(last=False)
        return result

    def _recording_of(self, step: Step, batch: Batch) -> Recording:
        """Return the step's recording for the batch's buffer."""
        for recording in step.recordings:
            if recording.buffer is batch.buffer:
                return recording
        recording = step.recordings[-1].moved(batch.buffer)
        step.recordings.append(recording)
        del step.recordings[:-MOST_BUFFERS]
        return recording
