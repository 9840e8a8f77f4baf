"""AsyncEngine: streams on the event loop over an engine in its own thread; endings, failures, shutdown."""

import asyncio
import logging
import time
from contextlib import aclosing

import pytest

from cupaged.engine.async_engine import AsyncEngine, EngineDeadError
from tests.engine.asyncio_calls import (
    Gate,
    collect,
    delta,
    run_with,
    running,
    slow_next_token,
    tokens_of,
    until,
)
from tests.engine.conftest import PROMPT, MakeEngine
from tests.engine.scripted import continuation


def test_generate_yields_the_models_tokens_and_ends(make_engine: MakeEngine) -> None:
    async def work(engine: AsyncEngine) -> None:
        outputs = await collect(engine)

        assert tokens_of(outputs) == continuation(PROMPT, 8)
        assert [output.finished for output in outputs] == [False] * 7 + [True]

    run_with(make_engine(), work)


def test_requests_run_beside_each_other(make_engine: MakeEngine) -> None:
    async def work(engine: AsyncEngine) -> None:
        lengths = [3, 9, 30, 1, 17]
        results = await asyncio.gather(*(collect(engine, str(i), n) for i, n in enumerate(lengths)))

        assert [tokens_of(outputs) for outputs in results] == [continuation(PROMPT, n) for n in lengths]
        assert engine.engine.num_steps < sum(lengths)

    run_with(make_engine(), work)


def test_a_stream_of_several_requests_carries_the_outputs_of_all(make_engine: MakeEngine) -> None:
    async def work(engine: AsyncEngine) -> None:
        requests = [await engine.make_request(str(i), PROMPT, delta(3 + i)) for i in range(3)]

        outputs = [output async for output in engine.stream(requests)]

        for i in range(3):
            own = [output for output in outputs if output.request_id == str(i)]
            assert tokens_of(own) == continuation(PROMPT, 3 + i)

    run_with(make_engine(), work)


def test_closing_the_iterator_frees_the_blocks(make_engine: MakeEngine) -> None:
    async def work(engine: AsyncEngine) -> None:
        async with aclosing(engine.generate(PROMPT, delta(200), "r")) as outputs:
            await anext(outputs)

        await until(lambda: engine.engine.scheduler.num_used_blocks == 0)
        assert not engine.engine.has_unfinished()
        assert engine.engine.num_steps < 200

    run_with(make_engine(follow=slow_next_token), work)


def test_cancelling_the_caller_aborts_also_while_queued(make_engine: MakeEngine) -> None:
    gate = Gate()

    async def work(engine: AsyncEngine) -> None:
        first = asyncio.ensure_future(collect(engine, "first"))
        await until(lambda: gate.num_steps > 0)
        queued = asyncio.ensure_future(collect(engine, "queued"))
        await asyncio.sleep(0.02)
        queued.cancel()
        await asyncio.wait({queued})
        gate.is_open.set()

        assert tokens_of(await first) == continuation(PROMPT, 8)
        await until(lambda: not engine.engine.has_unfinished())
        assert gate.num_steps == 8, "the queued request was run though its caller had gone"

    run_with(make_engine(follow=gate, max_num_seqs=1), work)


def test_a_bad_request_fails_alone(make_engine: MakeEngine) -> None:
    async def work(engine: AsyncEngine) -> None:
        good = asyncio.ensure_future(collect(engine, "good"))
        with pytest.raises(ValueError, match="the prompt is empty"):
            await anext(engine.generate([], delta(), "bad"))

        assert tokens_of(await good) == continuation(PROMPT, 8)
        engine.check_health()

    run_with(make_engine(), work)


def test_an_id_in_use_is_refused_and_free_again_afterwards(make_engine: MakeEngine) -> None:
    async def work(engine: AsyncEngine) -> None:
        async with aclosing(engine.generate(PROMPT, delta(200), "r")) as outputs:
            await anext(outputs)
            with pytest.raises(ValueError, match="request_id 'r' is in use"):
                await collect(engine)
            assert await asyncio.wait_for(anext(outputs), 10), "the refusal ended the one that ran"

        await until(lambda: not engine.engine.has_unfinished())
        await asyncio.sleep(0.01)
        assert tokens_of(await collect(engine)) == continuation(PROMPT, 8)

    run_with(make_engine(follow=slow_next_token), work)


def test_a_request_that_the_engine_will_not_take_fails_alone(make_engine: MakeEngine) -> None:
    async def work(engine: AsyncEngine) -> None:
        twins = [await engine.make_request("twin", PROMPT, delta()) for _ in range(2)]

        with pytest.raises(ValueError, match="'twin' is in use"):
            [output async for output in engine.stream(twins)]

        assert tokens_of(await collect(engine)) == continuation(PROMPT, 8)

    run_with(make_engine(), work)


def test_a_step_that_raises_fails_all_that_wait_and_all_that_come(
    make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_token_id: int, _position: int) -> int:
        raise ArithmeticError("no more tokens")

    async def work(engine: AsyncEngine) -> None:
        waiting = [asyncio.ensure_future(collect(engine, str(i))) for i in range(3)]
        results = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 10)

        for error in results:
            assert isinstance(error, EngineDeadError)
            assert str(error) == "the engine died: ArithmeticError: no more tokens"
        with pytest.raises(EngineDeadError, match="no more tokens"):
            engine.check_health()
        with pytest.raises(EngineDeadError, match="no more tokens"):
            await collect(engine)

    with caplog.at_level(logging.CRITICAL, logger="cupaged"):
        run_with(make_engine(follow=fail), work)


def test_a_request_that_comes_while_the_engine_dies_fails_too(
    make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    gate = Gate()

    def fail(token_id: int, position: int) -> int:
        gate(token_id, position)
        raise ArithmeticError("no more tokens")

    async def work(engine: AsyncEngine) -> None:
        first = asyncio.ensure_future(collect(engine, "first"))
        await until(lambda: gate.num_steps == 1)
        second = await engine.make_request("second", PROMPT, delta())
        late = asyncio.ensure_future(anext(engine.stream([second])))
        await asyncio.sleep(0)
        gate.is_open.set()

        for task in (first, late):
            with pytest.raises(EngineDeadError, match="no more tokens"):
                await asyncio.wait_for(task, 10)

    with caplog.at_level(logging.CRITICAL, logger="cupaged"):
        run_with(make_engine(follow=fail), work)


def test_an_idle_engine_sleeps(make_engine: MakeEngine) -> None:
    async def work(engine: AsyncEngine) -> None:
        await collect(engine)
        await until(lambda: not engine.engine.has_unfinished())
        steps, used = engine.engine.num_steps, time.process_time()
        await asyncio.sleep(0.2)

        assert engine.engine.num_steps == steps
        assert time.process_time() - used < 0.1

    run_with(make_engine(), work)


def test_the_event_loop_turns_while_a_step_runs(make_engine: MakeEngine) -> None:
    gate = Gate()

    async def work(engine: AsyncEngine) -> None:
        task = asyncio.ensure_future(collect(engine))
        await until(lambda: gate.num_steps == 1)
        assert not task.done()
        gate.is_open.set()

        assert tokens_of(await task) == continuation(PROMPT, 8)

    run_with(make_engine(follow=gate), work)


def test_shutdown_lets_requests_in_flight_finish_and_refuses_new_ones(make_engine: MakeEngine) -> None:
    gate = Gate()
    llm_engine = make_engine(follow=gate)

    async def main() -> None:
        engine = AsyncEngine(llm_engine)
        task = asyncio.ensure_future(collect(engine))
        await until(lambda: gate.num_steps == 1)
        stopping = asyncio.ensure_future(engine.shutdown(10))
        await asyncio.sleep(0)
        with pytest.raises(EngineDeadError, match="shutting down"):
            await collect(engine, "late")
        gate.is_open.set()
        await stopping

        assert tokens_of(await task) == continuation(PROMPT, 8)
        assert llm_engine.executor.is_closed  # type: ignore[attr-defined]

    asyncio.run(main())


def test_shutdown_aborts_what_has_not_finished_in_time(make_engine: MakeEngine) -> None:
    llm_engine = make_engine(follow=slow_next_token)

    async def main() -> None:
        engine = AsyncEngine(llm_engine)
        task = asyncio.ensure_future(collect(engine, max_tokens=200))
        await until(lambda: llm_engine.num_steps > 0)
        await engine.shutdown(0.02)

        with pytest.raises(EngineDeadError, match="before the request had finished"):
            await task
        assert not llm_engine.has_unfinished()
        assert llm_engine.num_steps < 100

    asyncio.run(main())


def test_shutdown_of_an_idle_engine_is_immediate(make_engine: MakeEngine) -> None:
    begin = time.perf_counter()

    run_with(make_engine(), lambda engine: engine.shutdown(60))

    assert time.perf_counter() - begin < 5


def test_one_event_loop_after_another_may_use_it(make_engine: MakeEngine) -> None:
    with running(make_engine()) as engine:
        for _ in range(2):
            assert tokens_of(asyncio.run(collect(engine))) == continuation(PROMPT, 8)


def test_a_caller_that_vanishes_with_its_event_loop_blocks_nothing(make_engine: MakeEngine) -> None:
    async def leave(engine: AsyncEngine) -> None:
        await anext(engine.generate(PROMPT, delta(200), "r"))

    with running(make_engine()) as engine:
        asyncio.run(leave(engine))

        assert tokens_of(asyncio.run(collect(engine))) == continuation(PROMPT, 8)
