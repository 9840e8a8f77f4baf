"""How gpu_check times the engine: of which steps, at which lengths. The emulator's times mean nothing."""

from pathlib import Path

import pytest

from tools.emulated_machine import EmulatedMachine
from tools.engine_model import TINY, Workload, write_model
from tools.engine_timed import TimedEngine
from tools.engine_times import time_gemm, time_step, time_workload
from tools.machine import Machine
from tools.steps import Step


@pytest.fixture(scope="module")
def machine() -> EmulatedMachine:
    return EmulatedMachine()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), TINY.shape)


def load(machine: Machine, model: Path, num_blocks: int | None = None) -> TimedEngine:
    memory = None if num_blocks is None else num_blocks * 16 * TINY.shape.kv_bytes
    return TimedEngine(
        machine,
        model,
        load_format="dummy",
        max_num_seqs=TINY.max_num_seqs,
        max_num_batched_tokens=TINY.max_num_batched_tokens,
        max_model_len=TINY.max_model_len,
        kv_cache_memory=memory,
        swap_space=0,
    )


@pytest.fixture(scope="module")
def engine(machine: EmulatedMachine, model: Path) -> TimedEngine:
    return load(machine, model)


@pytest.mark.parametrize(
    "step", [step for step in TINY.steps if step.num_new == 1], ids=lambda step: step.name
)
def test_decodes_are_timed_at_their_length_with_graphs_and_without(
    machine: EmulatedMachine, engine: TimedEngine, step: Step
) -> None:
    found = time_step(machine, engine, TINY, step)

    assert found["graphs"]["num_cached"] / step.num_seqs == pytest.approx(step.length, abs=3)
    assert found["eager"]["num_cached"] > found["graphs"]["num_cached"]
    assert found["seconds"] == found["graphs"]["seconds"] > found["graphs"]["gap_seconds"] > 0
    assert found["graphs"]["gap_90_seconds"] >= found["graphs"]["gap_seconds"]
    assert not engine.engine.has_unfinished()
    assert not engine.executor.backend.is_eager


def test_prompt_is_timed_in_one_step(machine: EmulatedMachine, engine: TimedEngine) -> None:
    found = time_step(machine, engine, TINY, next(step for step in TINY.steps if step.num_new > 1))

    assert found["seconds"] > 0
    assert [step.num_cached for step in engine.steps] == [64]


def test_what_the_kv_cache_does_not_hold_is_not_timed(machine: EmulatedMachine, model: Path) -> None:
    small = load(machine, model, num_blocks=6)

    assert time_step(machine, small, TINY, Step(TINY.shape, 3, 40)) == {
        "skipped": "the KV cache has 6 blocks"
    }


def test_workload_runs_to_its_end(engine: TimedEngine) -> None:
    assert time_workload(engine, Workload(2, 17, 3)) > 0
    assert not engine.engine.has_unfinished()


def test_product_is_timed_by_itself(machine: EmulatedMachine) -> None:
    assert time_gemm(machine, TINY.shape.head(16)).num_sets == 2
