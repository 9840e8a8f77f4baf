"""A GPU that is lost in a step: the engine says what was first, and can be closed."""

import asyncio
from pathlib import Path

import pytest

from cupaged import SamplingParams
from cupaged.backend.base import Array
from cupaged.backend.cuda import CudaBackend
from cupaged.batch import Batch
from cupaged.engine.async_engine import AsyncEngine, EngineDeadError
from cupaged.engine.llm_engine import LLMEngine
from tests.cuda_on_cpu.gpu import EmulatorError
from tests.cuda_on_cpu.gpu_stream import Launch
from tests.e2e.emulated import create_engine
from tools.make_tiny_model import CLEAR_CASES, write_clear_model, write_tiny_tokenizer

PARAMS = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


class Faulty(CudaBackend):
    """A backend that once puts work on the stream that goes wrong there."""

    num_steps = 0

    def store_last_tokens(self, batch: Batch, token_ids: Array, last_token: Array) -> None:
        """Add it to the tenth step; the first few are made to warm up."""
        super().store_last_tokens(batch, token_ids, last_token)
        if not self._memory.measuring:
            self.num_steps += 1
        if self.num_steps == 10:
            self._device.put(Launch(_fail, (), 0.0))  # type: ignore[attr-defined]


def _fail() -> None:
    raise EmulatorError("an illegal address")


@pytest.fixture
def engine(tmp_path: Path) -> LLMEngine:
    model_dir = write_clear_model(tmp_path, CLEAR_CASES["clear_llama"])
    write_tiny_tokenizer(model_dir)
    engine = create_engine(model_dir, backend_class=Faulty, max_model_len=64, max_num_seqs=2)
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
