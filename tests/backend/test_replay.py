"""Replay: a step of a known shape makes the calls of the one before it, and only such a step does."""

import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from cupaged.backend.arena import Arena, HostMemory
from cupaged.backend.base import Array
from cupaged.backend.replay import MOST_BUFFERS, MOST_KEPT, Replay
from cupaged.batch import Batch, padding_batch
from cupaged.jit import njit, specialize
from cupaged.recording import AHEAD, Recording
from cupaged.threads import ParallelRunner


@njit
def multiply(x: Any, weight: Any, out: Any) -> None:
    for i in range(out.shape[0]):
        out[i] = x[i] * weight[0]


def decodes(num_seqs: int = 2, table_width: int = 1) -> Batch:
    return padding_batch(
        num_seqs, num_seqs, num_decodes=num_seqs, num_logits=num_seqs, table_width=table_width
    )


class Machine:
    """An arena, a replay over it, and a forward of one kernel that doubles the batch's input ids."""

    step_factor = 2

    def __init__(self) -> None:
        self.arena = Arena(HostMemory())
        self.arena.create(1 << 12)
        self.runner = ParallelRunner(1)
        self.replay = Replay(self.runner, self.arena)
        self.num_forwards = 0

    def step(self, batch: Batch) -> Array:
        self.arena.begin_forward()
        return self.run_part("forward", batch, self.forward(batch))

    def run_part(self, name: str, batch: Batch, part: Callable[[], Array], *inputs: Array) -> Array:
        result = self.replay.run_part(name, batch, part, *inputs)
        self.runner.wait()
        return result

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


@pytest.mark.parametrize("num_buffers", [2, 3])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_step_of_another_buffer_is_replayed_on_its_own_numbers(num_buffers: int, is_compiled: bool) -> None:
    model = Model() if is_compiled else Machine()
    batches = [decodes() for _ in range(num_buffers)]
    for turn in range(3):
        for i, batch in enumerate(batches):
            batch.input_ids[:] = turn + i, 7

            assert (model.step(batch) // model.step_factor).tolist() == [turn + i, 7]

    assert model.num_forwards == 1
    assert all(len(step.recordings) == MOST_BUFFERS for step in model.replay._steps.values())


@pytest.mark.parametrize(
    "other",
    [
        decodes(num_seqs=3),
        decodes(table_width=17),
        padding_batch(2, 1, num_decodes=0, num_logits=1, table_width=1),
    ],
    ids=["seqs", "table", "prefill"],
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
    out = machine.run_part("forward", batch, machine.forward(batch))

    assert machine.num_forwards == 2
    assert not np.shares_memory(before, out)


def test_what_broke_off_is_not_kept() -> None:
    machine, batch = Machine(), decodes()

    def fail() -> Array:
        machine.replay.run((np.multiply, (batch.input_ids, 2, batch.input_ids)))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        machine.run_part("forward", batch, fail)
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
    batches = [decodes(num_seqs=1 + i) for i in range(MOST_KEPT + 1)]
    for batch in (*batches[:-1], batches[0], batches[-1]):
        machine.step(batch)
    num_forwards = machine.num_forwards

    machine.step(batches[0])
    assert machine.num_forwards == num_forwards
    machine.step(batches[1])

    assert machine.num_forwards == num_forwards + 1


class Model(Machine):
    """Two matrices in its forward, one where it samples; both parts are compiled, and count their runs."""

    step_factor = 30

    def __init__(self) -> None:
        super().__init__()
        specialize(multiply, "void(i4[::1],i4[::1],i4[::1])")
        self.weights = [np.array([n], np.int32) for n in (2, 3, 5)]
        self.num_samplings = 0

    def step(self, batch: Batch) -> Array:
        hidden = super().step(batch)
        return self.run_part("sampling", batch, lambda: self.sample(hidden), hidden)

    def forward(self, batch: Batch) -> Callable[[], Array]:
        def run() -> Array:
            self.num_forwards += 1
            return self.multiply(self.multiply(batch.input_ids, self.weights[0]), self.weights[1])

        return run

    def sample(self, hidden: Array) -> Array:
        self.num_samplings += 1
        return self.multiply(hidden, self.weights[2])

    def multiply(self, x: Array, weight: Array) -> Array:
        out = self.arena.take(x.shape, np.int32)
        self.replay.run((multiply, (x, weight, out)), weight)
        return out

    def recordings(self) -> list[Recording]:
        return [recording for step in self.replay._steps.values() for recording in step.recordings]


def test_both_parts_of_a_step_are_played_whatever_was_between() -> None:
    model, batches = Model(), [decodes(), decodes(num_seqs=3), decodes()]
    for turn in range(3):
        for batch in batches:
            batch.input_ids[:] = turn

            assert set(model.step(batch).tolist()) == {30 * turn}

    assert (model.num_forwards, model.num_samplings) == (2, 2)


def test_parts_fetch_the_first_weights_of_the_part_that_follows() -> None:
    model, batches = Model(), [decodes(), decodes(num_seqs=3), decodes()]

    for batch in (*batches, *batches):
        model.step(batch)

    first, second, head = (weight.ctypes.data for weight in model.weights)
    tables = [recording.table for recording in model.recordings()]
    found = [table[:, AHEAD].tolist() for table in tables if table is not None]
    assert sorted(found, key=len) == [[first]] * 3 + [[second, head]] * 3


def test_what_other_arrays_go_into_is_another_part() -> None:
    model, batch = Model(), decodes()
    inputs = [np.full(2, n, np.int32) for n in (1, 4)]

    for hidden in (*inputs, *inputs):
        model.arena.begin_forward()
        out = model.run_part("sampling", batch, partial(model.sample, hidden), hidden)

        assert set(out.tolist()) == {5 * hidden[0]}

    assert model.num_samplings == 2


def test_inputs_of_a_part_live_as_long_as_it_is_kept() -> None:
    model, batch, memory = Model(), decodes(), np.ones(4, np.int32)
    kept = []
    for _ in range(MOST_KEPT + 3):
        hidden = memory[:2]  # which its kernels do not keep; another one must not be taken for it
        model.arena.begin_forward()
        model.run_part("sampling", batch, partial(model.sample, hidden[:]), hidden)
        kept.append(weakref.ref(hidden))
    del hidden

    assert [each() is not None for each in kept] == [False] * 3 + [True] * MOST_KEPT
    assert model.num_samplings == len(kept)


def test_parts_are_told_by_their_names() -> None:
    model, batch = Model(), decodes()
    batch.input_ids[:] = 1
    for name, weight in (("forward", 0), ("sampling", 1), ("forward", 0), ("sampling", 1)):
        model.arena.begin_forward()
        part = partial(model.multiply, batch.input_ids, model.weights[weight])

        assert set(model.run_part(name, batch, part).tolist()) == {2 + weight}


def test_a_new_part_follows_the_one_that_was_played_last() -> None:
    model, known, lone, new = Model(), decodes(), decodes(), decodes()
    model.step(known)
    Machine.step(model, lone)  # without sampling, as of a step whose log-probabilities somebody wants
    model.step(known)
    Machine.step(model, new)

    table, head = model.recordings()[-1].table, model.weights[-1]
    assert table is not None
    assert table[-1, AHEAD] == head.ctypes.data


def test_nothing_outlives_the_engine() -> None:
    model, batch = Model(), decodes()
    model.step(batch)
    model.step(batch)
    kept = [weakref.ref(each) for each in (model.replay, model.weights[0], batch.buffer, model.arena)]

    gc.disable()  # no cycles either: memory is returned at once
    try:
        del model, batch
        assert [each() for each in kept] == [None] * 4
    finally:
        gc.enable()


def test_a_part_without_kernels_can_be_replayed() -> None:
    machine, batch = Machine(), decodes()
    for _ in range(2):
        machine.arena.begin_forward()
        assert machine.run_part("forward", batch, lambda: 7) == 7


def test_an_error_in_a_replay_is_the_kernels_and_the_next_step_is_whole() -> None:
    machine, batch = Machine(), decodes()
    machine.step(batch)
    out = machine.step(batch)
    out.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        machine.step(batch)

    out.flags.writeable = True
    batch.input_ids[:] = 4

    assert machine.step(batch).tolist() == [8, 8]
