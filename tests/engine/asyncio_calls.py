"""An AsyncEngine called from tests: what its streams carry, and a model that waits or takes its time."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from cupaged import SamplingParams
from cupaged.engine.async_engine import AsyncEngine
from cupaged.engine.llm_engine import LLMEngine
from cupaged.outputs import RequestOutput
from cupaged.sampling_params import RequestOutputKind
from tests.engine.conftest import PROMPT
from tests.engine.scripted import next_token


def delta(max_tokens: int = 8) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, output_kind=RequestOutputKind.DELTA)


async def collect(engine: AsyncEngine, request_id: str = "r", max_tokens: int = 8) -> list[RequestOutput]:
    return [output async for output in engine.generate(PROMPT, delta(max_tokens), request_id)]


def tokens_of(outputs: list[RequestOutput]) -> list[int]:
    return [token_id for output in outputs for token_id in output.outputs[0].token_ids]


async def until(condition: Callable[[], bool]) -> None:
    """Wait for the engine's thread to make something true."""
    deadline = time.perf_counter() + 10
    while not condition():
        assert time.perf_counter() < deadline, "the engine's thread did not get there in 10 s"
        await asyncio.sleep(0.002)


class Gate:
    """A next_token that waits while the gate is shut, so that a test sees a request in the middle."""

    def __init__(self) -> None:
        self.is_open = threading.Event()
        self.num_steps = 0

    def __call__(self, token_id: int, position: int) -> int:
        self.num_steps += 1
        assert self.is_open.wait(10), "the test left the gate shut"
        return next_token(token_id, position)


@contextmanager
def running(engine: LLMEngine) -> Iterator[AsyncEngine]:
    """Run an AsyncEngine over `engine`, and end its thread."""
    async_engine = AsyncEngine(engine)
    try:
        yield async_engine
    finally:
        asyncio.run(async_engine.shutdown(0))


def run_with(engine: LLMEngine, work: Callable[[AsyncEngine], Awaitable[None]]) -> None:
    async def main() -> None:
        async_engine = AsyncEngine(engine)
        try:
            await work(async_engine)
        finally:
            await async_engine.shutdown(0)

    asyncio.run(main())


def slow_next_token(token_id: int, position: int) -> int:
    time.sleep(0.01)
    return next_token(token_id, position)
