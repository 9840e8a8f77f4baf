"""DecodeGraphs: the forward of a step of decodes as a CUDA graph, one for each shape that a batch can have.

A graph keeps the places of all arrays and the sizes of all launches. So the batch must lie where it always
does, the arena must stand where it stood, and what depends on lengths must have been launched for the
longest. The numbers in the arrays are free.
"""

from collections.abc import Callable
from typing import NamedTuple

from cupaged.backend.arena import Arena, ArenaState
from cupaged.backend.base import Array, Limits
from cupaged.backend.device import Device, Graph
from cupaged.backend.gemm import buckets
from cupaged.batch import SMALLEST, Batch, Bucket, bucket_for
from cupaged.kernels.launch import ceil_div


def graph_shapes(limits: Limits) -> list[tuple[int, int]]:
    """Return num_seqs and table_width of all graphs: as many as steps of decodes can have of either."""
    widest = bucket_for(1, 1, ceil_div(limits.seq_len, limits.block_size)).table_width
    widths = [SMALLEST.table_width]
    while widths[-1] < widest:
        widths.append(2 * widths[-1])
    sizes = buckets(min(limits.num_seqs, limits.num_tokens))
    return [(num_seqs, table_width) for num_seqs in sizes for table_width in widths]


class Recorded(NamedTuple):
    """A forward, once it has been captured."""

    graph: Graph
    hidden: Array  # what it returned: the same place in the arena after each launch
    before: ArenaState
    after: ArenaState


class DecodeGraphs:
    """Records forwards, and replays them for later steps of their shape; a batch is as upload returns it."""

    def __init__(self, device: Device, arena: Arena) -> None:
        self._device = device
        self._arena = arena
        self._recorded: dict[tuple[Bucket, int], Recorded] = {}

    def record(self, batch: Batch, forward: Callable[[], Array]) -> Array:
        """Return forward(), and keep what it does for all steps of decodes of this shape."""
        assert _is_plain(batch), "a step of other things than decodes is not for a graph"
        arena = self._arena
        before = arena.state()
        forward()  # loads what a capture could not
        arena.restore(before)
        hidden: list[Array] = []
        graph = self._device.capture(lambda: hidden.append(forward()))
        recorded = Recorded(graph, hidden[0], before, arena.state())
        self._recorded[batch.bucket, batch.num_seqs] = recorded
        return recorded.hidden  # where forward() put it before the capture, which ran nothing

    def replay(self, batch: Batch) -> Array | None:
        """Return what the forward of this batch returns, by its graph; None if there is none for it."""
        recorded = self._recorded.get((batch.bucket, batch.num_seqs))
        if recorded is None or not _is_plain(batch):
            return None
        state = self._arena.state()
        assert state == recorded.before, f"the arena stands at {state}, for the graph at {recorded.before}"
        recorded.graph.launch()
        self._arena.restore(recorded.after)
        return recorded.hidden


def _is_plain(batch: Batch) -> bool:
    """Return whether each sequence has one new token."""
    return batch.num_decodes == batch.num_seqs == batch.num_tokens
