"""LLMEngine over a scripted model: steps that are under way when others fail, end, or the engine closes."""

from typing import Any

import numpy as np
import pytest

from cupaged import SamplingParams
from cupaged.engine.llm_engine import LLMEngine
from cupaged.outputs import CompletionOutput
from tests.engine.conftest import ALPHABET, PROMPT, MakeEngine, finish, greedy, run
from tests.engine.scripted import VOCAB_SIZE, Late, ScriptedExecutor, continuation, next_token


def scripted_executor(engine: LLMEngine) -> ScriptedExecutor:
    assert isinstance(engine.executor, ScriptedExecutor)
    return engine.executor


@pytest.mark.parametrize("late", [False, True, "decodes"])
@pytest.mark.parametrize("error", [RuntimeError("no memory"), KeyboardInterrupt()])
def test_a_step_that_fails_drops_all_requests_and_the_next_one_runs(
    make_engine: MakeEngine, late: Late, error: BaseException
) -> None:
    failures = [error]

    def fail_once(token_id: int, position: int) -> int:
        if position == 6 and failures:
            raise failures.pop()
        return next_token(token_id, position)

    engine = make_engine(late=late, follow=fail_once)
    for name in ("a", "b"):
        engine.add_request(name, PROMPT, greedy())
    with pytest.raises(type(error)):
        finish(engine)

    assert not engine.has_unfinished()
    assert engine.scheduler.num_used_blocks == 0
    assert run(engine, greedy()).outputs[0].token_ids == continuation(PROMPT, 8)


def test_a_step_in_flight_is_waited_for_when_another_fails(make_engine: MakeEngine) -> None:
    ran: list[int] = []

    def fail_at_six(token_id: int, position: int) -> int:
        ran.append(position)
        if position == 6:
            raise RuntimeError("no memory")
        return next_token(token_id, position)

    engine = make_engine(late=True, follow=fail_at_six)
    engine.add_request("r", PROMPT, greedy())
    with pytest.raises(RuntimeError, match="no memory"):
        finish(engine)

    assert ran[-2:] == [6, 7]
    assert not scripted_executor(engine).begun


def mixed_requests(seed: int) -> dict[str, tuple[list[int], SamplingParams, int | None]]:
    """Return prompts with params, some of which end early, and how many tokens they get before an abort."""
    rng = np.random.default_rng(seed)
    made: dict[str, tuple[list[int], SamplingParams, int | None]] = {}
    for i in range(12):
        prompt = rng.integers(8, VOCAB_SIZE, int(rng.integers(1, 30))).tolist()
        num_tokens = int(rng.integers(1, 40))
        last = continuation(prompt, num_tokens)[-1]
        stops: list[dict[str, Any]] = [{}, {"stop_token_ids": [last]}, {"stop": ALPHABET[last : last + 1]}]
        params = greedy(num_tokens, logprobs=0, **stops[i % 3])
        made[str(i)] = (prompt, params, num_tokens // 2 if i % 4 == 3 else None)
    return made


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("budget", [5, 64])
@pytest.mark.parametrize("late", [True, "decodes"])
def test_two_steps_in_flight_give_what_one_gives_with_finishes_aborts_and_preemptions(
    make_engine: MakeEngine, late: Late, budget: int, seed: int
) -> None:
    requests = mixed_requests(seed)

    def run_all(late: Late) -> dict[str, CompletionOutput]:
        engine = make_engine(num_blocks=6, late=late, max_num_batched_tokens=budget, max_model_len=96)
        assert engine.executor.max_in_flight == 1 + bool(late)
        for name, (prompt, params, _) in requests.items():
            engine.add_request(name, prompt, params)
        last: dict[str, CompletionOutput] = {}
        while engine.has_unfinished():
            for output in engine.step():
                last[output.request_id] = output.outputs[0]
                if len(output.outputs[0].token_ids) == requests[output.request_id][2]:
                    engine.abort(output.request_id)
            engine.scheduler.check_invariants()
        assert engine.get_metrics()["preemptions"] > 0 or budget < 64
        assert engine.scheduler.num_used_blocks == 0
        return last

    synchronous = run_all(late=False)

    assert run_all(late) == synchronous
    reasons = {completion.finish_reason for completion in synchronous.values()}
    assert reasons == {"stop", "length", None}  # None: aborted


def test_a_step_that_runs_at_once_holds_up_no_result_and_nothing_holds_up_its_own(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(late="decodes")
    executor = scripted_executor(engine)
    engine.add_request("a", PROMPT, greedy(20))

    assert [len(output.outputs[0].token_ids) for output in engine.step()] == [1]
    assert (executor.num_run, len(executor.begun)) == (1, 0)  # nothing began before its token was out
    for num_tokens in (2, 3):
        assert [len(output.outputs[0].token_ids) for output in engine.step()] == [num_tokens]
        assert (executor.num_run, len(executor.begun)) == (num_tokens, 1)
    engine.add_request("b", PROMPT, greedy(20))  # while a's fourth token is in flight
    assert [output.request_id for output in engine.step()] == ["a"]
    assert (executor.num_run, len(executor.begun)) == (4, 0)  # b's prompt is planned, but has not begun
    assert [len(output.outputs[0].token_ids) for output in engine.step()] == [5, 1]
    assert (executor.num_run, len(executor.begun)) == (5, 0)
    engine.step()

    assert len(executor.begun) == 1


def test_a_step_that_was_planned_is_run_though_nobody_wants_it_any_more(make_engine: MakeEngine) -> None:
    engine = make_engine(late="decodes")
    engine.add_request("a", PROMPT, greedy(20))
    engine.step()
    engine.step()
    engine.add_request("b", PROMPT, greedy(20))
    engine.step()
    num_run = scripted_executor(engine).num_run
    for name in ("a", "b"):
        engine.abort(name)

    assert finish(engine) == {}
    assert scripted_executor(engine).num_run == num_run + 1
    assert engine.scheduler.num_used_blocks == 0
    assert run(engine, greedy()).outputs[0].token_ids == continuation(PROMPT, 8)


def test_a_thousand_requests_leave_nothing_behind(make_engine: MakeEngine) -> None:
    engine = make_engine(late=True)
    for i in range(1000):
        engine.add_request(str(i), PROMPT, greedy(1 + i % 3))
        if i % 5 == 0:
            engine.abort(str(i))

    assert len(finish(engine)) == 800
    assert not engine._requests
    assert not engine._in_flight
    assert engine.scheduler.num_waiting == engine.scheduler.num_running == 0


@pytest.mark.parametrize("late", [False, True])
def test_close_waits_for_steps_in_flight_and_closes_the_executor(make_engine: MakeEngine, late: bool) -> None:
    engine = make_engine(late=late)
    engine.add_request("r", PROMPT, greedy())
    engine.step()
    executor = scripted_executor(engine)
    assert len(executor.begun) == late

    engine.close()

    assert executor.is_closed
    assert not executor.begun
    assert not engine.has_unfinished()
