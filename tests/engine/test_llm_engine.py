"""LLMEngine over a scripted model: what goes in, what comes out, how requests end, what is refused."""

import json
from dataclasses import replace
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest

from cupaged import EngineConfig, SamplingParams
from cupaged.engine.llm_engine import LLMEngine
from cupaged.outputs import RequestOutput
from cupaged.sampling_params import RequestOutputKind
from cupaged.scheduler.scheduler import Scheduler
from tests.engine.conftest import ALPHABET, EOS, PROMPT, MakeEngine, finish, greedy, run
from tests.engine.scripted import ScriptedExecutor, continuation, scripted
from tests.engine.tiny_tokenizers import byte_level, write_directory


def text_of(token_ids: list[int]) -> str:
    return "".join(ALPHABET[i] for i in token_ids)


@pytest.mark.parametrize("late", [False, True])
def test_tokens_and_text_are_the_models(make_engine: MakeEngine, late: bool) -> None:
    output = run(make_engine(late=late), greedy())

    expected = continuation(PROMPT, 8)
    assert output.outputs[0].token_ids == expected
    assert output.outputs[0].text == text_of(expected)
    assert (output.finished, output.outputs[0].finish_reason) == (True, "length")
    assert output.prompt_token_ids == PROMPT


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("budget", [1, 3, 16])
def test_many_requests_in_a_tiny_pool_get_their_own_tokens(
    make_engine: MakeEngine, late: bool, budget: int
) -> None:
    engine = make_engine(num_blocks=6, late=late, max_num_batched_tokens=budget, max_model_len=96)
    prompts = [[8 + (i * k) % 50 for k in range(1, 5 + 3 * i)] for i in range(9)]
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, greedy(10 + 3 * i))

    outputs = finish(engine)

    for i, prompt in enumerate(prompts):
        assert outputs[str(i)].outputs[0].token_ids == continuation(prompt, 10 + 3 * i)
    assert engine.get_metrics()["preemptions"] > 0 or budget < 16
    assert engine.scheduler.num_used_blocks == 0


def test_text_prompt_is_tokenised_and_returned(make_engine: MakeEngine) -> None:
    output = run(make_engine(), greedy(), "abc")

    assert (output.prompt, output.prompt_token_ids) == ("abc", [1, 2, 3])


def test_eos_ends_with_stop_and_stays_out_of_the_text(make_engine: MakeEngine) -> None:
    engine = make_engine(follow=lambda _, position: EOS if position == 5 else 9)

    output = run(engine, greedy())

    assert output.outputs[0].token_ids == [9, 9, 9, EOS]
    assert output.outputs[0].text == ALPHABET[9] * 3
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", None)


def test_ignore_eos_goes_on(make_engine: MakeEngine) -> None:
    engine = make_engine(follow=lambda *_: EOS)

    assert run(engine, greedy(4, ignore_eos=True)).outputs[0].token_ids == [EOS] * 4


@pytest.mark.parametrize("eos", [EOS, 5, 6, 7])  # named by tokenizer, config, and generation_config twice
def test_eos_ids_are_those_of_tokenizer_config_and_generation_config(
    scripted_dir: Path, tmp_path: Path, eos: int
) -> None:
    model = copytree(scripted_dir, tmp_path / "model")
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [6, 7]}))

    def executor(config: EngineConfig, _: Path) -> ScriptedExecutor:
        made = ScriptedExecutor(config, follow=lambda *_: eos)
        made.model_config = replace(made.model_config, eos_token_ids=(5,))
        return made

    engine = LLMEngine(EngineConfig.create(model), create_executor=executor)

    assert run(engine, greedy()).outputs[0].token_ids == [eos]
    assert run(engine, greedy(3, ignore_eos=True)).outputs[0].token_ids == [eos] * 3


def test_empty_text_is_a_prompt_where_the_tokenizer_adds_bos(tmp_path: Path) -> None:
    model = write_directory(tmp_path, byte_level(), add_bos_token=True)
    engine = LLMEngine(EngineConfig.create(model), create_executor=scripted())

    output = run(engine, greedy(), "")

    assert output.prompt_token_ids == [1]
    assert output.outputs[0].token_ids == continuation([1], 8)


def test_stop_token_id_is_the_stop_reason(make_engine: MakeEngine) -> None:
    third = continuation(PROMPT, 3)[2]

    output = run(make_engine(), greedy(stop_token_ids=[third]))

    assert output.outputs[0].token_ids == continuation(PROMPT, 3)
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", third)
    assert len(output.outputs[0].text) == 2


def test_include_stop_str_in_output_keeps_the_stop_tokens_text(make_engine: MakeEngine) -> None:
    third = continuation(PROMPT, 3)[2]

    output = run(make_engine(), greedy(stop_token_ids=[third], include_stop_str_in_output=True))

    assert len(output.outputs[0].text) == 3


@pytest.mark.parametrize("late", [False, True])
def test_stop_string_over_two_tokens_ends_text_and_tokens(make_engine: MakeEngine, late: bool) -> None:
    text = text_of(continuation(PROMPT, 8))

    output = run(make_engine(late=late), greedy(stop=[text[3:5]]))

    assert output.outputs[0].text == text[:3]
    assert output.outputs[0].token_ids == continuation(PROMPT, 5)
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", text[3:5])


def test_delta_outputs_add_up_to_the_whole(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add_request("r", PROMPT, greedy(stop=["no such text"], output_kind=RequestOutputKind.DELTA))
    outputs: list[RequestOutput] = []
    while engine.has_unfinished():
        outputs += engine.step()

    assert [i for o in outputs for i in o.outputs[0].token_ids] == continuation(PROMPT, 8)
    assert "".join(o.outputs[0].text for o in outputs) == "".join(
        ALPHABET[i] for i in continuation(PROMPT, 8)
    )
    assert [o.finished for o in outputs] == [False] * 7 + [True]


def test_cumulative_outputs_grow(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add_request("r", PROMPT, greedy(3))
    lengths = []
    while engine.has_unfinished():
        lengths += [len(o.outputs[0].token_ids) for o in engine.step()]

    assert lengths == [1, 2, 3]


def test_final_only_reports_once(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add_request("r", PROMPT, greedy(3, output_kind=RequestOutputKind.FINAL_ONLY))
    outputs = []
    while engine.has_unfinished():
        outputs += engine.step()

    assert [o.outputs[0].token_ids for o in outputs] == [continuation(PROMPT, 3)]


def test_max_tokens_none_fills_the_model_length(make_engine: MakeEngine) -> None:
    output = run(make_engine(max_model_len=32), greedy(None))

    assert len(output.outputs[0].token_ids) == 32 - len(PROMPT)
    assert output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize("late", [False, True])
def test_logprobs_have_the_token_and_the_top(make_engine: MakeEngine, late: bool) -> None:
    output = run(make_engine(late=late), greedy(3, logprobs=1)).outputs[0]

    assert output.logprobs is not None
    for token_id, entry in zip(output.token_ids, output.logprobs, strict=True):
        assert set(entry) == {token_id, 0}
        assert entry[token_id].logprob == -token_id / 8
        assert entry[token_id].rank == token_id + 1
        assert entry[token_id].decoded_token == ALPHABET[token_id]
    assert output.cumulative_logprob == -sum(output.token_ids) / 8


@pytest.mark.parametrize("budget", [2, 64])
def test_prompt_logprobs_have_none_first_and_every_prompt_token(make_engine: MakeEngine, budget: int) -> None:
    prompt = [10, 20, 30, 40, 50]

    output = run(make_engine(max_num_batched_tokens=budget), greedy(2, prompt_logprobs=0), prompt)

    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert [list(entry or {}) for entry in output.prompt_logprobs[1:]] == [[i] for i in prompt[1:]]
    assert output.outputs[0].logprobs is None


def test_metrics_tell_arrival_first_token_and_end(make_engine: MakeEngine) -> None:
    metrics = run(make_engine(), greedy()).metrics

    assert metrics is not None
    assert metrics.first_token_time is not None
    assert metrics.finished_time is not None
    assert metrics.arrival_time <= metrics.first_token_time <= metrics.finished_time


@pytest.mark.parametrize("late", [False, True])
def test_abort_frees_everything_and_leaves_others_alone(make_engine: MakeEngine, late: bool) -> None:
    engine = make_engine(late=late)
    engine.add_request("gone", PROMPT, greedy(50))
    engine.add_request("kept", PROMPT, greedy(20))
    for _ in range(5):
        engine.step()

    engine.abort("gone")
    outputs = finish(engine)

    assert set(outputs) == {"kept"}
    assert outputs["kept"].outputs[0].token_ids == continuation(PROMPT, 20)
    assert engine.scheduler.num_used_blocks == 0


@pytest.mark.parametrize("late", [False, True])
def test_abort_in_the_middle_of_a_prompt_frees_its_blocks(make_engine: MakeEngine, late: bool) -> None:
    engine = make_engine(late=late, max_num_batched_tokens=4)
    engine.add_request("r", [1] * 40, greedy())
    engine.step()
    assert engine.scheduler.num_used_blocks > 0

    engine.abort("r")

    assert finish(engine) == {}
    assert engine.scheduler.num_used_blocks == 0


def test_abort_of_an_unknown_id_is_ignored(make_engine: MakeEngine) -> None:
    make_engine().abort("nobody")


def test_request_id_in_use_is_refused(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add_request("r", PROMPT, greedy())

    with pytest.raises(ValueError, match="'r' is in use"):
        engine.add_request("r", PROMPT, greedy())


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "empty"),
        ("", {}, "empty"),
        ([64], {}, r"prompt_token_ids contains 64.*0\.\.63"),
        ([-1], {}, "prompt_token_ids contains -1"),
        ([1.5], {}, "whole numbers"),
        ([True], {}, "whole numbers"),
        (7, {}, "text or a list"),
        ({"prompt": 5, "prompt_token_ids": [1]}, {}, "'prompt' is text, got int"),
        ({"text": "a"}, {}, "needs 'prompt' or 'prompt_token_ids', .* nothing else"),
        ([1] * 40, {}, r"40 tokens but max_model_len is 32"),
        ([1] * 32, {}, r"32 tokens but max_model_len is 32"),
        ([1] * 30, {"min_tokens": 5, "max_tokens": 9}, r"min_tokens is 5 but only 2"),
        ([1], {"stop_token_ids": [64]}, "stop_token_ids contains 64"),
    ],
)
def test_bad_request_is_refused_and_the_next_one_runs(
    make_engine: MakeEngine, prompt: Any, params: dict[str, Any], message: str
) -> None:
    engine = make_engine(max_model_len=32)

    with pytest.raises(ValueError, match=message):
        engine.add_request("bad", prompt, SamplingParams(**params))

    assert run(engine, greedy()).outputs[0].token_ids == continuation(PROMPT, 8)


def test_eos_named_as_a_stop_token_is_the_stop_reason_where_eos_is_ignored(make_engine: MakeEngine) -> None:
    engine = make_engine(follow=lambda *_: EOS)

    output = run(engine, greedy(ignore_eos=True, stop_token_ids=[EOS])).outputs[0]

    assert (output.finish_reason, output.stop_reason) == ("stop", EOS)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("budget", [2, 7, 64])
def test_logprobs_and_prompt_logprobs_are_whole_when_chunked_and_preempted(
    make_engine: MakeEngine, late: bool, budget: int
) -> None:
    prompts = [[8 + (i * k) % 50 for k in range(1, 12 + 3 * i)] for i in range(6)]
    params = greedy(30, prompt_logprobs=1, logprobs=1)
    cold = [run(make_engine(late=late), params, prompt) for prompt in prompts]
    engine = make_engine(num_blocks=6, late=late, max_num_batched_tokens=budget, max_model_len=96)
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, params)

    outputs = finish(engine)

    assert engine.get_metrics()["preemptions"] > 0
    for i, expected in enumerate(cold):
        assert outputs[str(i)].prompt_logprobs == expected.prompt_logprobs
        assert outputs[str(i)].outputs == expected.outputs


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_text_tokens_and_logprobs_end_at_the_token_that_completes_a_stop_string(
    make_engine: MakeEngine, kind: RequestOutputKind
) -> None:
    text = text_of(continuation(PROMPT, 8))
    engine = make_engine(late=True)
    engine.add_request("r", PROMPT, greedy(stop=[text[3:5]], logprobs=0, output_kind=kind))
    outputs: list[RequestOutput] = []
    while engine.has_unfinished():
        outputs += engine.step()

    parts = [o.outputs[0] for o in outputs]
    if kind != RequestOutputKind.DELTA:
        parts = parts[-1:]
    token_ids = [i for part in parts for i in part.token_ids]
    assert token_ids == continuation(PROMPT, 5)
    assert [next(iter(entry)) for part in parts for entry in part.logprobs or []] == token_ids
    assert "".join(part.text for part in parts) == text[:3]
    assert parts[-1].cumulative_logprob == -sum(token_ids) / 8


@pytest.mark.parametrize("method", ["add", "finish_group", "reset_prefix_cache"])
def test_a_call_that_is_interrupted_leaves_nobody_behind_whom_no_abort_finds(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    engine, call = make_engine(), getattr(Scheduler, method)
    engine.add_request("other", PROMPT, greedy(20))
    engine.step()

    def interrupted(scheduler: Scheduler, *args: Any) -> None:
        if method == "add":  # after it; the others before it
            call(scheduler, *args)
        raise KeyboardInterrupt

    def call_all() -> None:
        engine.add_request("r", PROMPT, greedy())
        engine.abort("r")
        engine.reset_prefix_cache()

    with monkeypatch.context() as patch:
        patch.setattr(Scheduler, method, interrupted)
        with pytest.raises(KeyboardInterrupt):
            call_all()

    assert not engine.has_unfinished()
    assert engine.scheduler.num_waiting == engine.scheduler.num_used_blocks == 0
    assert run(engine, greedy()).outputs[0].token_ids == continuation(PROMPT, 8)
