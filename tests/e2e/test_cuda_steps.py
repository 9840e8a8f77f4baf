"""What a step of an engine on an emulated GPU puts on its stream, and what loading says and refuses."""

import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cupaged import SamplingParams
from cupaged.backend.base import Limits, MemoryUse
from cupaged.backend.cuda import CudaBackend
from cupaged.batch import Batch
from cupaged.engine.llm_engine import LLMEngine
from cupaged.scheduler.counters import Counter
from cupaged.worker.executor import StepHandle
from tests.cuda_on_cpu.gpu import EmulatedGpu
from tests.e2e.emulated import MEMORY, create_engine

NUM_LAYERS = 2
BLOCK_BYTES = NUM_LAYERS * 2 * 2 * 16 * 64 * 2
PARAMS = SamplingParams(temperature=1.0, seed=1, max_tokens=9, ignore_eos=True)
OPTIONS: dict[str, Any] = {"max_model_len": 64, "max_num_seqs": 5, "max_num_batched_tokens": 32}


SWAPPING: dict[str, Any] = OPTIONS | {"kv_cache_memory": 6 * BLOCK_BYTES, "preemption_mode": "swap"}


def run(engine: LLMEngine, params: SamplingParams = PARAMS) -> None:
    """Run requests with chunks, mixed steps and steps of decodes."""
    for i, length in enumerate((40, 3, 20)):
        engine.add_request(str(i), list(range(3, 3 + length)), params)
    while engine.has_unfinished():
        engine.step()


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_step_is_one_copy_to_the_gpu_and_one_of_the_tokens_back(
    clear_dir: Path, async_scheduling: bool
) -> None:
    gpu = EmulatedGpu(memory=MEMORY)
    engine = create_engine(clear_dir, gpu=gpu, async_scheduling=async_scheduling, **OPTIONS)
    gpu.num_to_device = gpu.num_to_host = 0

    run(engine)

    assert engine.num_steps > 9
    assert gpu.num_to_device == gpu.num_to_host == engine.num_steps


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_step_that_swaps_is_one_copy_more_for_each_block(
    clear_dir: Path, async_scheduling: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = EmulatedGpu(memory=MEMORY)
    engine = create_engine(clear_dir, gpu=gpu, async_scheduling=async_scheduling, **SWAPPING)
    submit = engine.executor.submit

    def watched(batch: Batch) -> StepHandle:
        gpu.num_to_device = gpu.num_to_host = 0
        gpu.launches.clear()
        step = submit(batch)
        assert gpu.num_to_device == 1 + len(batch.swap_in)
        assert gpu.num_to_host == 1 + len(batch.swap_out)
        assert gpu.launches.count("copy_blocks") == (len(batch.copy) > 0)
        return step

    monkeypatch.setattr(engine.executor, "submit", watched)
    run(engine, replace(PARAMS, n=2, max_tokens=20))

    for counter in (Counter.SWAPPED_OUT_BLOCKS, Counter.SWAPPED_IN_BLOCKS, Counter.COPIED_BLOCKS):
        assert engine.counters[counter] > 0, counter.name


def test_logprobs_come_back_in_three_copies_more(clear_dir: Path) -> None:
    gpu = EmulatedGpu(memory=MEMORY)
    engine = create_engine(clear_dir, gpu=gpu, **OPTIONS)
    gpu.num_to_device = gpu.num_to_host = 0

    run(engine, replace(PARAMS, logprobs=2, prompt_logprobs=0))

    assert gpu.num_to_device == engine.num_steps
    assert gpu.num_to_host == 4 * engine.num_steps


def test_layer_has_four_products_qkv_and_gate_up_being_one_each(clear_dir: Path) -> None:
    gpu = EmulatedGpu(memory=MEMORY)
    engine = create_engine(clear_dir, gpu=gpu, enforce_eager=True, async_scheduling=False, **OPTIONS)
    engine.add_request("0", list(range(3, 43)), PARAMS)  # in two chunks, of which the first has no logits

    num_products = []
    for _ in range(3):
        gpu.launches.clear()
        engine.step()
        num_products.append(gpu.launches.count("matmul"))

    assert num_products == [4 * NUM_LAYERS, 4 * NUM_LAYERS + 1, 4 * NUM_LAYERS + 1]


def test_plan_is_said_before_anything_is_allocated(clear_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    gpu = EmulatedGpu(memory=MEMORY)
    said: list[str] = []

    class Watched(CudaBackend):
        def allocate(self, limits: Limits, use: MemoryUse) -> None:
            """See what was said before."""
            said.extend(caplog.messages)
            assert gpu.allocations == gpu.pinned == []
            super().allocate(limits, use)

    with caplog.at_level(logging.INFO, logger="cupaged"):
        engine = create_engine(clear_dir, gpu=gpu, backend_class=Watched, **OPTIONS)

    assert said == [str(engine.executor.plan)]
    *products, rates = caplog.messages[1:]
    assert all(message.startswith("matrix products, ") for message in products)
    assert len(products) == 3  # shapes: qkv, gate and up; o, down; head
    assert rates.startswith("blocks are swapped at ")


@pytest.mark.parametrize(
    ("memory", "kv_cache_memory"), [(290 << 20, None), (300 << 20, 20 * BLOCK_BYTES)], ids=["memory", "cache"]
)
def test_length_that_does_not_fit_is_refused_with_the_largest_that_does(
    clear_dir: Path, memory: int, kv_cache_memory: int | None
) -> None:
    def load(max_model_len: int) -> LLMEngine:
        options = OPTIONS | {"kv_cache_memory": kv_cache_memory, "enforce_eager": True}
        return create_engine(
            clear_dir, gpu=gpu, gpu_memory_utilization=1.0, **options | {"max_model_len": max_model_len}
        )

    gpu = EmulatedGpu(memory=memory)
    with pytest.raises(ValueError, match="the largest that fits") as error:
        load(1024)

    assert gpu.allocations == gpu.pinned == []
    (named,) = map(int, re.findall(r"lower max_model_len to (\d+),", str(error.value)))
    with pytest.raises(ValueError, match=f"lower max_model_len to {named},"):
        load(named + 16)  # a block more
    run(load(named))
