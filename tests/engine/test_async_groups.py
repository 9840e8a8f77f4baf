"""AsyncEngine: groups of sequences, priorities, and resets of the prefix cache."""

import asyncio
from typing import Any

import pytest

from cupaged import SamplingParams
from cupaged.engine.async_engine import AsyncEngine, EngineDeadError
from cupaged.sampling_params import RequestOutputKind
from cupaged.scheduler.scheduler import Scheduler
from tests.engine.asyncio_calls import Gate, collect, delta, run_with, tokens_of, until
from tests.engine.conftest import PROMPT, MakeEngine
from tests.engine.scripted import continuation


def test_all_outputs_of_a_prompt_come_in_one_stream_that_ends_with_the_last(make_engine: MakeEngine) -> None:
    async def work(engine: AsyncEngine) -> None:
        params = SamplingParams(temperature=1, n=3, max_tokens=8, output_kind=RequestOutputKind.DELTA)
        outputs = [output async for output in engine.generate(PROMPT, params, "r")]

        for index in range(3):
            parts = [part for output in outputs for part in output.outputs if part.index == index]
            ids = [token_id for part in parts for token_id in part.token_ids]
            assert ids == continuation(PROMPT, 8, index=index)
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]

    run_with(make_engine(), work)


def test_a_group_that_can_never_fit_fails_alone(make_engine: MakeEngine) -> None:
    async def work(engine: AsyncEngine) -> None:
        good = asyncio.ensure_future(collect(engine, "good"))
        params = SamplingParams(n=8, max_tokens=90)
        with pytest.raises(ValueError, match="blocks"):
            await anext(engine.generate(PROMPT, params, "large"))

        assert tokens_of(await good) == continuation(PROMPT, 8)
        engine.check_health()

    run_with(make_engine(num_blocks=6, max_model_len=96), work)


def test_priorities_go_with_the_requests(make_engine: MakeEngine) -> None:
    gate = Gate()

    async def work(engine: AsyncEngine) -> None:
        order: list[str] = []

        async def run(name: str, priority: int) -> None:
            async for output in engine.generate(PROMPT, delta(), name, priority):
                if output.finished:
                    order.append(name)

        tasks = [asyncio.ensure_future(run("first", 0))]
        await until(lambda: gate.num_steps > 0)
        tasks += [asyncio.ensure_future(run(name, priority)) for name, priority in (("b", 2), ("a", 1))]
        await until(lambda: engine._commands.qsize() == 2)
        gate.is_open.set()
        await asyncio.gather(*tasks)

        assert order == ["first", "a", "b"]

    run_with(make_engine(follow=gate, scheduling_policy="priority", max_num_seqs=1), work)


def test_a_reset_of_the_prefix_cache_is_done_between_steps(make_engine: MakeEngine) -> None:
    async def work(engine: AsyncEngine) -> None:
        prompt = [9] * 40
        running = asyncio.ensure_future(collect(engine, "running", 30))
        cached = []
        for reset in (False, False, True):
            if reset:
                await engine.reset_prefix_cache()
            outputs = [output async for output in engine.generate(prompt, delta(), "r")]
            cached.append(outputs[-1].num_cached_tokens)

        assert cached == [0, 32, 0]
        assert tokens_of(await running) == continuation(PROMPT, 30)

    run_with(make_engine(), work)


def test_a_reset_that_nobody_waits_for_any_more_harms_nobody(make_engine: MakeEngine) -> None:
    gate = Gate()

    async def work(engine: AsyncEngine) -> None:
        running = asyncio.ensure_future(collect(engine))
        await until(lambda: gate.num_steps > 0)
        reset = asyncio.ensure_future(engine.reset_prefix_cache())
        await until(lambda: not engine._commands.empty())
        reset.cancel()
        await asyncio.wait({reset})
        gate.is_open.set()

        assert tokens_of(await running) == continuation(PROMPT, 8)
        engine.check_health()

    run_with(make_engine(follow=gate), work)


@pytest.mark.parametrize("method", ["add", "reset_prefix_cache"])
def test_who_asks_for_what_breaks_the_engine_is_told(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    def fail(*_: Any) -> None:
        raise MemoryError("no room")

    async def ask(engine: AsyncEngine) -> None:
        if method == "add":
            await collect(engine)
        else:
            await engine.reset_prefix_cache()

    async def main() -> None:
        engine = AsyncEngine(make_engine())
        monkeypatch.setattr(Scheduler, method, fail)

        with pytest.raises((EngineDeadError, MemoryError), match="no room"):
            await asyncio.wait_for(ask(engine), 10)
        await until(lambda: engine._stopped)
        with pytest.raises(EngineDeadError, match="the engine died: MemoryError: no room"):
            engine.check_health()

    asyncio.run(main())


def test_a_reset_of_an_engine_that_has_shut_down_says_so(make_engine: MakeEngine) -> None:
    async def main() -> None:
        engine = AsyncEngine(make_engine())
        await engine.shutdown(0)

        with pytest.raises(EngineDeadError, match="shutting down"):
            await engine.reset_prefix_cache()

    asyncio.run(main())
