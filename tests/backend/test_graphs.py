"""DecodeGraphs on a device that only notes what it is told; tests/e2e/test_cuda_graphs.py runs models."""

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest

from cupaged.backend.arena import Arena, HostMemory
from cupaged.backend.base import Limits
from cupaged.backend.device import Device
from cupaged.backend.graphs import DecodeGraphs, graph_shapes
from cupaged.batch import Batch, Bucket, bucket_for, padding_batch

LIMITS = Limits(num_tokens=512, num_seqs=20, seq_len=700, block_size=16, num_slots=4096)


class FakeGraph:
    """Work that was put off."""

    def __init__(self) -> None:
        self.work: list[Callable[[], None]] = []

    def launch(self) -> None:
        """Do all of it."""
        for each in self.work:
            each()


class FakeDevice:
    """Runs work at once, or while it captures notes it."""

    def __init__(self) -> None:
        self.num_run = 0
        self._graph: FakeGraph | None = None

    def run(self, work: Callable[[], None]) -> None:
        """Launch a "kernel"."""
        if self._graph is None:
            self.num_run += 1
            work()
        else:
            self._graph.work.append(work)

    def capture(self, work: Callable[[], None]) -> FakeGraph:
        """Note what `work` launches."""
        self._graph = graph = FakeGraph()
        try:
            work()
        finally:
            self._graph = None
        return graph


class Machine:
    """A "model" of two layers on the fake device, its batch always in the same buffer."""

    def __init__(self) -> None:
        self.device = FakeDevice()
        self.arena = Arena(HostMemory())
        self.arena.create(1 << 16)
        self.graphs = DecodeGraphs(cast(Device, self.device), self.arena)
        self.ids = np.zeros(64, np.int32)

    def forward(self, batch: Batch) -> Any:
        """Return input_ids + 1 + 2, each sum an array of its own."""
        x = self.ids[: batch.num_tokens]
        for add in (1, 2):
            self.arena.begin_layer()
            x = self._add(x, add)
        return x

    def _add(self, x: Any, number: int) -> Any:
        out = self.arena.take(x.shape, np.int32)
        self.device.run(lambda: np.add(x, number, out=out))
        return out

    def begin(self, batch: Batch, first_id: int) -> None:
        """Begin a step whose tokens are first_id, first_id + 1, ..."""
        self.arena.begin_forward()
        self.ids[: batch.num_tokens] = np.arange(first_id, first_id + batch.num_tokens)


@pytest.fixture
def machine() -> Machine:
    """Return one that has recorded nothing."""
    return Machine()


def decodes(num_seqs: int, table_width: int = 16) -> Batch:
    return padding_batch(
        num_seqs, num_seqs, num_decodes=num_seqs, num_logits=num_seqs, table_width=table_width
    )


def recorded(machine: Machine, num_seqs: int, table_width: int = 16) -> Batch:
    """Record a step and return its batch."""
    batch = decodes(num_seqs, table_width)
    machine.begin(batch, 0)
    machine.graphs.record(batch, lambda: machine.forward(batch))
    return batch


def test_recording_returns_what_the_forward_does(machine: Machine) -> None:
    batch = decodes(4)
    machine.begin(batch, 10)

    hidden = machine.graphs.record(batch, lambda: machine.forward(batch))

    assert hidden.tolist() == [13, 14, 15, 16]
    assert machine.device.num_run == 2  # once, not again while it is captured


def test_replay_computes_from_what_the_batch_holds_now_and_launches_nothing_else(machine: Machine) -> None:
    batch = recorded(machine, 4)
    machine.begin(batch, 50)

    hidden = machine.graphs.replay(batch)

    assert hidden is not None
    assert hidden.tolist() == [53, 54, 55, 56]
    assert machine.device.num_run == 2  # both before


def test_replay_leaves_the_arena_as_the_forward_does(machine: Machine) -> None:
    batch = recorded(machine, 4)
    machine.begin(batch, 0)
    machine.forward(batch)
    eager = machine.arena.state()
    machine.begin(batch, 0)

    machine.graphs.replay(batch)

    assert machine.arena.state() == eager
    machine.arena.begin_layer()
    later = machine.arena.take((4,), np.int32)
    later[:] = -1
    assert machine.graphs._recorded[batch.bucket, 4].hidden.tolist() == [3, 4, 5, 6]


def test_each_shape_has_its_own_graph(machine: Machine) -> None:
    batches = [recorded(machine, *shape) for shape in ((2, 16), (4, 16), (4, 32))]

    for batch in batches:
        machine.begin(batch, 7)
        hidden = machine.graphs.replay(batch)
        assert hidden is not None
        assert hidden.tolist() == [10 + i for i in range(batch.num_seqs)]


def test_steps_without_a_graph_are_not_replayed(machine: Machine) -> None:
    batch = recorded(machine, 4)
    prefill = padding_batch(4, 2, num_decodes=1, num_logits=2, table_width=16)

    machine.begin(batch, 0)

    assert machine.graphs.replay(decodes(8)) is None
    assert machine.graphs.replay(decodes(4, table_width=17)) is None
    assert machine.graphs.replay(prefill) is None
    assert machine.graphs.replay(decodes(4, table_width=3)) is not None  # of the same bucket


def test_batch_of_another_layout_is_not_replayed(machine: Machine) -> None:
    batch = recorded(machine, 4)
    batch.bucket = Bucket(32, 8, 16)  # its arrays lie elsewhere

    assert machine.graphs.replay(batch) is None


def test_arena_that_stands_elsewhere_is_noticed(machine: Machine) -> None:
    batch = recorded(machine, 4)
    machine.begin(batch, 0)
    machine.arena.take((1,), np.int32)

    with pytest.raises(AssertionError, match="the arena stands at ArenaState"):
        machine.graphs.replay(batch)


def test_other_steps_are_not_recorded(machine: Machine) -> None:
    batch = padding_batch(4, 2, num_decodes=1, num_logits=2, table_width=16)

    with pytest.raises(AssertionError, match="not for a graph"):
        machine.graphs.record(batch, lambda: machine.forward(batch))


def test_shapes_are_all_that_steps_of_decodes_can_have() -> None:
    shapes = graph_shapes(LIMITS)

    assert shapes == [(n, width) for n in (1, 2, 4, 8, 16, 24) for width in (16, 32, 64)]
    assert graph_shapes(LIMITS._replace(num_tokens=3, seq_len=16)) == [(1, 16), (2, 16), (4, 16)]


def test_shapes_have_the_layouts_of_smaller_steps() -> None:
    for num_seqs in range(1, LIMITS.num_seqs + 1):
        for seq_len in (1, 256, 257, 512, 513, LIMITS.seq_len):
            own = bucket_for(num_seqs, num_seqs, -(-seq_len // LIMITS.block_size))
            fitting = min(n for n, _ in graph_shapes(LIMITS) if n >= num_seqs)
            assert (fitting, own.table_width) in graph_shapes(LIMITS)
            assert decodes(fitting, own.table_width).bucket == own
