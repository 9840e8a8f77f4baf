"""LLMEngine over a scripted model: what the prefix cache finds, who goes first, what is counted."""

from typing import Any

import pytest

from cupaged.engine.llm_engine import LLMEngine
from cupaged.outputs import RequestOutput
from cupaged.scheduler.counters import Counter
from tests.engine.conftest import PROMPT, MakeEngine, finish, greedy, run
from tests.engine.scripted import continuation

LONG = [8 + (11 * i) % 50 for i in range(40)]  # two blocks of 16 and a half


def cached_of(engine: LLMEngine, prompt: Any = LONG, **options: Any) -> int:
    """Run a prompt, check its tokens, return how many of the prompt's were found in the cache."""
    output: RequestOutput = run(engine, greedy(**options), prompt)
    ids = prompt["prompt_token_ids"] if isinstance(prompt, dict) else prompt
    assert [completion.token_ids for completion in output.outputs] == [
        continuation(ids, 8) for _ in output.outputs
    ]
    return output.num_cached_tokens


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_a_prompt_that_was_run_is_found_in_whole_blocks(make_engine: MakeEngine, late: bool, n: int) -> None:
    engine = make_engine(late=late)

    assert cached_of(engine, n=n) == 0
    assert cached_of(engine, n=n) == 32
    assert cached_of(engine, [*LONG[:20], 9], n=n) == 16
    assert cached_of(engine, [9, *LONG], n=n) == 0
    metrics = engine.get_metrics()
    assert metrics["prefix_hit_tokens"] == 48
    assert metrics["prefix_queried_tokens"] >= 40 + 40 + 21 + 41


@pytest.mark.parametrize("late", [False, True])
def test_a_prompt_that_is_cached_whole_still_gives_its_tokens(make_engine: MakeEngine, late: bool) -> None:
    engine = make_engine(late=late)

    assert cached_of(engine, LONG[:32]) == 0
    assert 31 <= cached_of(engine, LONG[:32]) <= 32
    assert 31 <= cached_of(engine, LONG[:32], n=3) <= 32


def test_an_output_is_a_prefix_too(make_engine: MakeEngine) -> None:
    engine = make_engine()
    output = run(engine, greedy(30), LONG).outputs[0]

    assert cached_of(engine, [*LONG, *output.token_ids, 9]) == 64


@pytest.mark.parametrize("options", [{"enable_prefix_caching": False}, {}])
def test_nothing_is_found_without_a_cache_or_where_every_prompt_token_is_scored(
    make_engine: MakeEngine, options: dict[str, bool]
) -> None:
    engine = make_engine(**options)
    cached_of(engine)

    assert cached_of(engine, prompt_logprobs=None if options else 0) == 0


def test_a_reset_cache_is_empty_and_leaves_running_requests_alone(make_engine: MakeEngine) -> None:
    engine = make_engine()
    cached_of(engine)
    engine.add_request("running", LONG, greedy(30))
    engine.step()

    engine.reset_prefix_cache()

    assert finish(engine)["running"].outputs[0].token_ids == continuation(LONG, 30)
    engine.reset_prefix_cache()
    assert cached_of(engine) == 0
    assert cached_of(engine) == 32


def test_salts_keep_prefixes_apart(make_engine: MakeEngine) -> None:
    engine = make_engine()
    cached_of(engine)

    def salted(salt: str) -> int:
        return cached_of(engine, {"prompt_token_ids": LONG, "cache_salt": salt})

    assert [salted("a"), salted("b"), salted("a"), cached_of(engine)] == [0, 0, 32, 32]


def order_of_finish(engine: LLMEngine) -> list[str]:
    order = []
    while engine.has_unfinished():
        order += [output.request_id for output in engine.step() if output.finished]
    return order


def test_the_lowest_priority_goes_first_and_equals_by_arrival(make_engine: MakeEngine) -> None:
    engine = make_engine(scheduling_policy="priority", max_num_seqs=1)
    for name, priority in {"a": 1, "b": 0, "c": 1, "d": -5}.items():
        engine.add_request(name, PROMPT, greedy(), priority)

    assert order_of_finish(engine) == ["d", "b", "a", "c"]


def test_first_come_first_served_refuses_a_priority_and_says_what_to_do(make_engine: MakeEngine) -> None:
    engine = make_engine()

    with pytest.raises(ValueError, match=r"^priority is 3 but .*fcfs.*priority"):
        engine.add_request("r", PROMPT, greedy(), 3)

    engine.add_request("r", PROMPT, greedy(), 0)
    assert finish(engine)["r"].finished


def test_metrics_are_counters_by_name_and_gauges(make_engine: MakeEngine) -> None:
    engine = make_engine(num_blocks=20)
    engine.add_request("r", LONG, greedy(n=2))
    engine.step()
    running = engine.get_metrics()
    finish(engine)
    idle = engine.get_metrics()

    assert {counter.name.lower() for counter in Counter} < running.keys() == idle.keys()
    assert all(type(value) is int for value in running.values())
    assert (running["num_running"], running["num_waiting"], running["num_used_blocks"]) == (2, 0, 3)
    assert running["num_used_blocks"] + running["num_free_blocks"] == 20
    assert (idle["num_running"], idle["num_used_blocks"], idle["num_free_blocks"]) == (0, 0, 20)
    assert idle["num_steps"] > running["num_steps"] > 0
    assert idle["peak_used_blocks"] == 4, "two of the prompt are shared, the third is copied"
