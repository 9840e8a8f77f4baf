"""An engine on an emulated GPU takes the memory that it planned, gives it back, outlives a failed step."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from cupaged import SamplingParams
from cupaged.backend.cuda import CudaBackend
from cupaged.batch import Batch
from cupaged.engine.async_engine import AsyncEngine
from cupaged.engine.llm_engine import LLMEngine
from cupaged.worker.executor import StepHandle
from tests.cuda_on_cpu.gpu import EmulatedGpu
from tests.e2e.emulated import MEMORY, create_engine

PROMPTS = [[5, 6, 7], [100] * 20, [250]]
PARAMS = SamplingParams(temperature=4.0, seed=1, max_tokens=12, ignore_eos=True)
OPTIONS: dict[str, Any] = {"max_model_len": 64, "max_num_seqs": 5, "max_num_batched_tokens": 32}


def generate(engine: LLMEngine) -> list[list[int]]:
    """Return the tokens that follow each of PROMPTS."""
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(str(i), prompt, PARAMS)
    token_ids: dict[str, list[int]] = {}
    while engine.has_unfinished():
        token_ids |= {output.request_id: output.outputs[0].token_ids for output in engine.step()}
    return [token_ids[str(i)] for i in range(len(PROMPTS))]


@pytest.fixture(scope="module")
def expected(clear_dir: Path) -> list[list[int]]:
    return generate(create_engine(clear_dir, **OPTIONS))


def test_memory_is_the_plans_to_the_byte_and_goes_back(clear_dir: Path, expected: list[list[int]]) -> None:
    gpu = EmulatedGpu(memory=MEMORY)
    for _ in range(2):
        gpu.allocations.clear()
        gpu.pinned.clear()

        engine = create_engine(clear_dir, gpu=gpu, **OPTIONS)

        plan = engine.executor.plan
        kv_cache = plan.num_blocks * plan.block_bytes
        assert gpu.allocations == [plan.use.weights, plan.use.workspace, plan.use.activations, kv_cache]
        assert plan.total == sum(gpu.allocations) + plan.use.reserve <= plan.available
        assert gpu.pinned.count(plan.swap_bytes) == 1
        assert plan.num_host_blocks == 5 * 4  # as many as sequences can have
        assert generate(engine) == expected
        engine.close()
        gpu.thaw()
        assert gpu.memory_info() == (MEMORY, MEMORY)
        assert gpu.pinned_bytes == 0


def test_rates_of_swaps_and_recomputes_are_measured_at_load_and_nothing_is_lost(
    clear_dir: Path, expected: list[list[int]]
) -> None:
    gpu = EmulatedGpu(memory=MEMORY)
    engine = create_engine(clear_dir, gpu=gpu, swap_bandwidth=None, prefill_rate=None, **OPTIONS)

    rates = engine.executor.swap_rates

    assert rates.bandwidth > 1e6
    assert rates.prefill_rate > 1
    assert gpu.num_to_host > engine.executor.plan.num_host_blocks
    assert generate(engine) == expected


def test_load_that_is_interrupted_waits_for_copies_before_their_memory_goes(
    clear_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = EmulatedGpu(memory=MEMORY)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(CudaBackend, "warm_up", interrupt)
    with pytest.raises(KeyboardInterrupt):
        create_engine(clear_dir, gpu=gpu, **OPTIONS)

    gpu.synchronize()  # copies that are not done yet would fail
    assert gpu.memory_info() == (MEMORY, MEMORY)


def test_engine_is_as_new_after_a_step_that_was_interrupted(
    clear_dir: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = create_engine(clear_dir, **OPTIONS)
    submit, steps = engine.executor.submit, iter(range(10))

    def submit_some(batch: Batch) -> StepHandle:
        step = submit(batch)
        if next(steps, None) is None:
            raise KeyboardInterrupt
        return step

    monkeypatch.setattr(engine.executor, "submit", submit_some)
    with pytest.raises(KeyboardInterrupt):
        generate(engine)
    monkeypatch.undo()

    assert not engine.has_unfinished()
    assert generate(engine) == expected


def test_engine_runs_in_a_thread_of_its_own(clear_dir: Path, expected: list[list[int]]) -> None:
    engine = create_engine(clear_dir, **OPTIONS)

    async def serve() -> list[list[int]]:
        running = AsyncEngine(engine)

        async def ask(i: int) -> list[int]:
            async for output in running.generate(PROMPTS[i], PARAMS, str(i)):
                token_ids = output.outputs[0].token_ids
            return token_ids

        answers = await asyncio.gather(*map(ask, range(len(PROMPTS))))
        await running.shutdown(10)
        return answers

    assert asyncio.run(serve()) == expected
