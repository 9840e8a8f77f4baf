"""Replay: a step of a known shape makes the calls of the one before it, and only such a step does."""

from collections.abc import Callable

import numpy as np
import pytest

from cupaged.backend.arena import Arena, HostMemory
from cupaged.backend.base import Array
from cupaged.backend.replay import MOST_KEPT, Replay
from cupaged.batch import Batch, padding_batch
from cupaged.threads import ParallelRunner


def decodes(num_seqs: int = 2, table_width: int = 1) -> Batch:
    return padding_batch(
        num_seqs, num_seqs, num_decodes=num_seqs, num_logits=num_seqs, table_width=table_width
    )


class Machine:
    """An arena, a replay over it, and a forward of one kernel that doubles the batch's input ids."""

    def __init__(self) -> None:
        self.arena = Arena(HostMemory())
        self.arena.create(1 << 12)
        self.replay = Replay(ParallelRunner(1), self.arena)
        self.num_forwards = 0

    def step(self, batch: Batch) -> Array:
        self.arena.begin_forward()
        return self.replay.run_part("forward", batch, self.forward(batch))

    def forward(self, batch: Batch) -> Callable[[], Array]:
        def run() -> Array:
            self.num_forwards += 1
            out = self.arena.take(batch.input_ids.shape, np.int32)
            self.replay.run((np.multiply, (batch.input_ids, 2, out)))
            return out

        return run


def test_second_step_runs_the_kernels_on_its_own_numbers_without_the_forward() -> None:
    machine, batch = Machine(), decodes()
    machine.step(batch)
    batch.input_ids[:] = [3, 4]

    doubled = machine.step(batch)

    assert doubled.tolist() == [6, 8]
    assert machine.num_forwards == 1


def test_arena_stands_after_a_replay_where_it_stood_after_the_forward() -> None:
    machine, batch = Machine(), decodes()
    machine.step(batch)
    after = machine.arena.state()

    machine.step(batch)

    assert machine.arena.state() == after


@pytest.mark.parametrize(
    "other",
    [
        decodes(num_seqs=3),
        decodes(table_width=17),
        decodes(),  # of another buffer
        padding_batch(2, 1, num_decodes=0, num_logits=1, table_width=1),
    ],
    ids=["seqs", "table", "buffer", "prefill"],
)
def test_a_step_of_another_shape_runs_its_own_forward(other: Batch) -> None:
    machine = Machine()
    machine.step(decodes())
    other.input_ids[:] = 5

    doubled = machine.step(other)

    assert set(doubled.tolist()) == {10}
    assert machine.num_forwards == 2


def test_a_prompt_is_not_kept() -> None:
    machine, prompt = Machine(), padding_batch(4, 1, num_decodes=0, num_logits=1, table_width=1)

    machine.step(prompt)
    machine.step(prompt)

    assert machine.num_forwards == 2


def test_a_step_that_begins_elsewhere_in_the_arena_runs_its_forward() -> None:
    machine, batch = Machine(), decodes()
    machine.step(batch)

    machine.arena.begin_forward()
    before = machine.arena.take((1,), np.int32)
    out = machine.replay.run_part("forward", batch, machine.forward(batch))

    assert machine.num_forwards == 2
    assert not np.shares_memory(before, out)


def test_what_broke_off_is_not_kept() -> None:
    machine, batch = Machine(), decodes()

    def fail() -> Array:
        machine.replay.run((np.multiply, (batch.input_ids, 2, batch.input_ids)))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        machine.replay.run_part("forward", batch, fail)
    machine.step(batch)

    assert machine.num_forwards == 1


def test_kernels_between_steps_do_not_get_into_one() -> None:
    machine, batch = Machine(), decodes()
    count = np.zeros(1, np.int32)
    machine.step(batch)
    machine.replay.run((np.add, (count, 1, count)))

    machine.step(batch)

    assert count == 1


def test_so_many_are_kept_and_those_used_last() -> None:
    machine = Machine()
    batches = [decodes() for _ in range(MOST_KEPT + 1)]
    for batch in (*batches[:-1], batches[0], batches[-1]):
        machine.step(batch)
    num_forwards = machine.num_forwards

    machine.step(batches[0])
    assert machine.num_forwards == num_forwards
    machine.step(batches[1])

    assert machine.num_forwards == num_forwards + 1
