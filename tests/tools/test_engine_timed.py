"""TimedEngine on an emulated GPU: what it notes of steps, and that it computes what the engine computes."""

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cupaged.backend.cuda import CudaBackend
from cupaged.batch import Batch
from tools.emulated_machine import EmulatedMachine
from tools.engine_model import TINY, Workload, write_model
from tools.engine_timed import MarkedBackend, TimedEngine
from tools.machine import CountedDevice


def load(machine: EmulatedMachine, directory: Path, **options: Any) -> TimedEngine:
    """Return an engine with a tiny llama of random weights."""
    model = write_model(directory, TINY.shape)
    return TimedEngine(machine, model, load_format="dummy", swap_space=0, **options)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> TimedEngine:
    options = {"max_num_seqs": 4, "max_model_len": 64, "max_num_batched_tokens": 32}
    return load(EmulatedMachine(), tmp_path_factory.mktemp("model"), **options)


def test_each_step_has_a_beginning_and_an_end_in_order(engine: TimedEngine) -> None:
    engine.steps.clear()
    engine.add(Workload(2, 5, 4))

    engine.run()

    assert [(step.num_seqs, step.num_decodes) for step in engine.steps] == [(2, 0), (2, 2), (2, 2), (2, 2)]
    assert [step.num_cached for step in engine.steps] == [10, 12, 14, 16]
    assert all(step.begin <= step.end for step in engine.steps)
    assert all(step.end <= after.begin for step, after in pairwise(engine.steps))
    assert all(0 < step.host_seconds < 10 for step in engine.steps)


def test_outputs_are_all_there_in_the_order_of_the_requests(engine: TimedEngine) -> None:
    engine.add(Workload(1, 3, 7))
    engine.add(Workload(2, 4, 2))

    outputs = engine.run()

    assert [len(output.outputs[0].token_ids) for output in outputs] == [7, 2, 2]
    assert [len(output.prompt_token_ids) for output in outputs] == [3, 4, 4]


def test_dropping_all_leaves_nothing_to_do(engine: TimedEngine) -> None:
    engine.add(Workload(3, 5, 9))
    engine.engine.step()

    engine.drop_all()

    assert not engine.engine.has_unfinished()
    assert engine.engine.scheduler.num_used_blocks == 0


class Seam:
    """A backend that says what it was asked for."""

    name = "some"

    def upload(self, batch: Batch) -> str:
        return f"uploaded {batch}"

    def run_forward(self, batch: Any, forward: Any) -> str:  # noqa: ARG002
        return "replayed"


@pytest.mark.parametrize(("is_eager", "result"), [(False, "replayed"), (True, "launched")])
def test_graphs_are_left_out_on_demand(is_eager: bool, result: str) -> None:
    backend = MarkedBackend(cast(CudaBackend, Seam()), lambda: None)
    backend.is_eager = is_eager

    assert backend.run_forward(cast(Batch, None), lambda: "launched") == result


def test_step_begins_behind_the_upload() -> None:
    order: list[str] = []
    seam = SimpleNamespace(upload=order.append)
    backend = MarkedBackend(cast(CudaBackend, seam), lambda: order.append("mark"))

    backend.upload(cast(Batch, "upload"))

    assert order == ["upload", "mark"]


def test_all_else_is_the_backends_own() -> None:
    assert MarkedBackend(cast(CudaBackend, Seam()), lambda: None).name == "some"


def test_driver_memory_is_noted_before_the_first_step_and_each_graph(engine: TimedEngine) -> None:
    before = engine.executor.backend.driver_bytes_before

    # One for 1, 2 and 4 sequences; the smallest block table does for 64 tokens.
    assert len(before) == 1 + 3
    assert before == sorted(before)


def test_allocations_are_those_of_the_engine_alone(tmp_path: Path) -> None:
    machine = Remembering()
    engine = load(machine, tmp_path, max_num_seqs=2, max_model_len=32)
    machine.last.allocate(7)

    assert len(engine.executor.allocations) == 4 + 1
    assert engine.executor.allocations[-1] == 7


class Remembering(EmulatedMachine):
    """A machine that keeps the last GPU that it gave."""

    last: CountedDevice

    def gpu(self) -> CountedDevice:
        self.last = super().gpu()
        return self.last


def test_a_closed_engine_gives_its_memory_back(tmp_path: Path) -> None:
    machine = Remembering()
    engine = load(machine, tmp_path, max_num_seqs=2, max_model_len=32)

    engine.close()
    del engine

    free, total = machine.last.memory_info()
    assert free == total
