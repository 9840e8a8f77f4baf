"""A GPU that fails: after any call that does the engine is as new, and a load leaves nothing behind.

One that is lost stays so: the engine says what was first, and can be closed.
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupaged import SamplingParams
from cupaged.backend.base import Array
from cupaged.backend.cuda import CudaBackend
from cupaged.batch import Batch
from cupaged.engine.async_engine import AsyncEngine, EngineDeadError
from cupaged.engine.llm_engine import LLMEngine
from cupaged.scheduler.counters import Counter
from tests.cuda_on_cpu.gpu import EmulatedGpu, EmulatorError
from tests.cuda_on_cpu.gpu_stream import Launch
from tests.e2e.emulated import MEMORY, create_engine

PARAMS = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
OPTIONS: dict[str, Any] = {"max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 16}
BLOCK_BYTES = 2 * 2 * 2 * 16 * 64 * 2
SWAPPING = {"preemption_mode": "swap", "kv_cache_memory": 5 * BLOCK_BYTES}  # one to grow into


class Faulty(CudaBackend):
    """A backend that once puts work on the stream that goes wrong there."""

    num_steps = 0

    def store_last_tokens(self, batch: Batch, last_token: Array) -> None:
        """Add it to the tenth step; the first few are made to warm up."""
        super().store_last_tokens(batch, last_token)
        if not self._memory.measuring:
            self.num_steps += 1
        if self.num_steps == 10:
            self._device.put(Launch(_fail, (), 0.0))  # type: ignore[attr-defined]


def _fail() -> None:
    raise EmulatorError("an illegal address")


@pytest.fixture
def engine(clear_dir: Path) -> LLMEngine:
    engine = create_engine(clear_dir, backend_class=Faulty, **OPTIONS)
    engine.add_request("r", [5, 6, 7], PARAMS)
    return engine


def run_until_lost(engine: LLMEngine) -> str:
    """Return what the step says that finds it out."""
    try:
        while engine.has_unfinished():
            engine.step()
    except EmulatorError as error:
        return str(error)
    return "all went well"


def test_step_raises_what_went_wrong_first(engine: LLMEngine) -> None:
    assert run_until_lost(engine) == "an illegal address"

    assert not engine.has_unfinished()
    engine.add_request("r", [5, 6, 7], PARAMS)
    assert run_until_lost(engine) == "the device was lost: an illegal address"


def test_close_says_it_and_lets_go_all_the_same(engine: LLMEngine) -> None:
    run_until_lost(engine)

    with pytest.raises(EmulatorError, match="an illegal address"):
        engine.close()

    engine.close()  # nothing is left to wait for


def test_requests_of_a_thread_of_its_own_hear_of_it(engine: LLMEngine) -> None:
    engine.abort("r")

    async def serve() -> None:
        running = AsyncEngine(engine)
        for _ in range(2):  # the second comes too late
            with pytest.raises(EngineDeadError, match="the engine died: EmulatorError: an illegal address"):
                async for _ in running.generate([5, 6, 7], PARAMS, "r"):
                    pass
        await running.shutdown(10)

    asyncio.run(serve())  # a thread that ends by an error is a warning, and so an error


CALLS = {"allocate", "pin", "kernel", "capture", "to_device", "to_host", "record", "put", "put_graph", "wait"}


class FailingGpu(EmulatedGpu):
    """A GPU one of whose calls fails, before or after it has done what it was asked."""

    num_calls = 0
    failing = -1.0  # the call's number; half of one more: after it

    def __getattribute__(self, name: str) -> Any:
        """Return what there is, calls so that they are counted."""
        value = super().__getattribute__(name)
        return partial(self._call, value) if name in CALLS else value

    def _call(self, method: Callable[..., Any], *args: Any, **options: Any) -> Any:
        self.num_calls += 1
        number = self.num_calls
        if number == self.failing:
            raise RuntimeError("planted")
        result = method(*args, **options)
        if number + 0.5 == self.failing:
            raise KeyboardInterrupt("planted")
        return result


def generate(engine: LLMEngine, length: int = 3) -> list[list[int]]:
    """Return the tokens that follow a prompt of so many and one of 3 more, which needs a block sooner."""
    for i in range(2):
        params = replace(PARAMS, max_tokens=7, logprobs=1, prompt_logprobs=1)
        engine.add_request(str(i), [5 + i, *range(6, 5 + length + 3 * i)], params)
    token_ids: dict[str, list[int]] = {}
    while engine.has_unfinished():
        token_ids |= {output.request_id: output.outputs[0].token_ids for output in engine.step()}
    return [token_ids[str(i)] for i in range(2)]


@pytest.mark.parametrize(
    ("length", "options"),
    [(3, {}), (3, {"enforce_eager": True}), (28, SWAPPING)],
    ids=["graphs", "eager", "swapping"],
)
def test_engine_is_as_new_after_any_call_that_failed(
    clear_dir: Path, length: int, options: dict[str, Any]
) -> None:
    gpu = FailingGpu(memory=MEMORY)
    engine = create_engine(clear_dir, gpu=gpu, **OPTIONS | options)
    gpu.num_calls = 0
    expected = generate(engine, length)
    num_calls = gpu.num_calls

    for failing in np.arange(1, num_calls + 1, 19.5):
        gpu.num_calls, gpu.failing = 0, failing
        with pytest.raises((RuntimeError, KeyboardInterrupt), match="planted"):
            generate(engine, length)
        gpu.failing = -1

        assert not engine.has_unfinished()
        assert generate(engine, length) == expected
    assert (engine.counters[Counter.SWAPPED_IN_BLOCKS] > 0) == (length > 16)


def test_load_that_fails_at_any_call_leaves_nothing_behind(clear_dir: Path) -> None:
    gpu = FailingGpu(memory=MEMORY)
    create_engine(clear_dir, gpu=gpu, **OPTIONS).close()
    gpu.thaw()
    num_calls = gpu.num_calls

    for failing in np.arange(1, num_calls + 1, 17.5):
        gpu.num_calls, gpu.failing = 0, failing
        with pytest.raises((RuntimeError, KeyboardInterrupt), match="planted"):
            create_engine(clear_dir, gpu=gpu, **OPTIONS)
        gpu.failing = -1

        gpu.synchronize()  # a copy from memory that is gone would fail
        assert gpu.memory_info() == (MEMORY, MEMORY)
