"""Bodies: what is parsed, what each field means in SamplingParams, what is refused and by which path."""

import json
from contextlib import suppress
from typing import Any

import pytest

from cupaged.sampling_params import RequestOutputKind, SamplingParams
from cupaged.server.protocol import (
    BodyError,
    ChatBody,
    CompletionBody,
    blame,
    chat_params,
    completion_params,
    parse_body,
    prompts_of,
    salted,
)

MESSAGES = [{"role": "user", "content": "hi"}]


def completion(**fields: Any) -> CompletionBody:
    return parse_body(json.dumps({"prompt": "abc", **fields}).encode(), CompletionBody)


def chat(**fields: Any) -> ChatBody:
    return parse_body(json.dumps({"messages": MESSAGES, **fields}).encode(), ChatBody)


SAMPLING: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 7,
    "min_p": 0.1,
    "seed": 3,
    "stop": ["x", "y"],
    "stop_token_ids": [4],
    "max_tokens": 9,
    "min_tokens": 2,
    "ignore_eos": True,
    "prompt_logprobs": 1,
    "skip_special_tokens": False,
    "include_stop_str_in_output": True,
    "n": 2,
    "best_of": 2,
}


def test_every_sampling_field_of_a_completion_arrives() -> None:
    params = completion_params(completion(**SAMPLING, logprobs=2), {})

    expected = SamplingParams(**SAMPLING, logprobs=2, output_kind=RequestOutputKind.FINAL_ONLY)
    assert params == expected


def test_every_sampling_field_of_a_chat_arrives() -> None:
    params = chat_params(chat(**SAMPLING, logprobs=True, top_logprobs=2), {})

    expected = SamplingParams(**SAMPLING, logprobs=2, output_kind=RequestOutputKind.FINAL_ONLY)
    assert params == expected


def test_null_is_absent_for_every_field() -> None:
    names = [name for name in CompletionBody.__struct_fields__ if name != "prompt"]

    assert completion(**dict.fromkeys(names)) == completion()


def test_the_models_defaults_hold_where_the_body_is_silent() -> None:
    defaults = {"temperature": 0.6, "top_p": 0.9, "max_tokens": 5}

    params = completion_params(completion(top_p=0.8), defaults)

    assert (params.temperature, params.top_p, params.max_tokens) == (0.6, 0.8, 16)


def test_a_chat_without_max_tokens_may_fill_the_window() -> None:
    assert chat_params(chat(), {"max_tokens": 5}).max_tokens is None


def test_max_completion_tokens_supersedes_max_tokens() -> None:
    assert chat_params(chat(max_tokens=3, max_completion_tokens=4), {}).max_tokens == 4
    assert chat_params(chat(max_tokens=3), {}).max_tokens == 3


def test_chat_logprobs_without_top_logprobs_asks_for_the_chosen_token_only() -> None:
    assert chat_params(chat(logprobs=True), {}).logprobs == 0
    assert chat_params(chat(logprobs=False), {}).logprobs is None
    assert chat_params(chat(top_logprobs=0), {}).logprobs is None


def test_echo_with_logprobs_asks_for_the_prompts_too() -> None:
    assert completion_params(completion(echo=True, logprobs=2), {}).prompt_logprobs == 2
    assert completion_params(completion(echo=True), {}).prompt_logprobs is None
    assert completion_params(completion(logprobs=2), {}).prompt_logprobs is None


def test_a_streamed_body_asks_for_deltas() -> None:
    assert completion_params(completion(stream=True), {}).output_kind == RequestOutputKind.DELTA


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
def test_the_four_forms_of_a_prompt(prompt: Any, prompts: Any) -> None:
    assert prompts_of(completion(prompt=prompt)) == prompts


@pytest.mark.parametrize(
    ("prompt", "param"),
    [([], "prompt"), (["a", 1], "prompt[1]"), ([1, "a"], "prompt[1]"), ([[1], 2], "prompt[1]")],
)
def test_other_forms_of_a_prompt_are_refused(prompt: Any, param: str) -> None:
    with pytest.raises(BodyError) as caught:
        prompts_of(completion(prompt=prompt))

    assert caught.value.param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": 1}, "prompt"),
        ({"prompt": [[1, "a"]]}, "prompt[0][1]"),
        ({"prompt": [True]}, "prompt[0]"),
        ({"model": 1}, "model"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_k": 1.5}, "top_k"),
        ({"stop": [1]}, "stop[0]"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids[0]"),
        ({"logprobs": True}, "logprobs"),
        ({"echo": 1}, "echo"),
        ({"logit_bias": {"1": "a"}}, "logit_bias[...]"),
    ],
)
def test_a_wrong_type_is_named_by_its_path(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BodyError) as caught:
        completion(**fields)

    assert caught.value.param == param
    assert str(caught.value).endswith(f" - at `$.{param}`")


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ("hi", "messages"),
        ([], "messages"),
        ([{"content": "hi"}], "messages[0].role"),
        ([{"role": "tool", "content": "hi"}], "messages[0].role"),
        ([{"role": "user", "content": 1}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
    ],
)
def test_a_bad_message_is_named_by_its_path(messages: Any, param: str) -> None:
    with pytest.raises(BodyError) as caught:
        chat(messages=messages)

    assert caught.value.param == param


def test_missing_messages_are_named() -> None:
    with pytest.raises(BodyError, match=r"missing required field `messages` - at `\$\.messages`"):
        parse_body(b"{}", ChatBody)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[1]",
        b'"a"',
        b'{"prompt": NaN}',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b"{} {}",
    ],
)
def test_what_is_no_json_object_is_refused(raw: bytes) -> None:
    with pytest.raises(BodyError, match=r"not valid JSON|must be a JSON object"):
        parse_body(raw, CompletionBody)


@pytest.mark.parametrize("depth", [100, 900, 1000, 100_000])
@pytest.mark.parametrize("name", ["response_format", "logit_bias", "structured_outputs", "prompt", "unknown"])
def test_nesting_without_end_is_refused_or_ignored(name: str, depth: int) -> None:
    raw = b'{"prompt": "a", "' + name.encode() + b'": ' + b"[" * depth + b"]" * depth + b"}"

    with suppress(BodyError):
        completion_params(parse_body(raw, CompletionBody), {})


def test_an_error_does_not_quote_a_long_value_whole() -> None:
    with pytest.raises(BodyError) as caught:
        completion_params(completion(bad_words=["x"] * 10_000), {})

    assert len(str(caught.value)) < 600
    assert str(caught.value).endswith(" - at `$.bad_words`")


BAD_VALUES = {
    "temperature": -1,
    "top_p": 0,
    "top_k": -2,
    "min_p": 2,
    "seed": 2**70,
    "stop": "",
    "stop_token_ids": [-1],
    "max_tokens": 0,
    "min_tokens": -1,
    "logprobs": 21,
    "prompt_logprobs": -1,
    "n": 0,
    "best_of": 0,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.1,
    "logit_bias": {"191222": -100},
    "allowed_token_ids": [1],
    "bad_words": ["a"],
    "truncate_prompt_tokens": 3,
    "spaces_between_special_tokens": False,
}


@pytest.mark.parametrize("name", BAD_VALUES)
def test_a_value_out_of_bounds_is_named_by_its_path(name: str) -> None:
    with pytest.raises(BodyError) as caught:
        completion_params(completion(**{name: BAD_VALUES[name]}), {})

    assert caught.value.param == name
    assert str(caught.value).endswith(f" - at `$.{name}`")


def test_a_bad_max_completion_tokens_is_named_as_the_user_wrote_it() -> None:
    with pytest.raises(BodyError) as caught:
        chat_params(chat(max_completion_tokens=0), {})

    assert caught.value.param == "max_completion_tokens"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BodyError) as caught:
        chat_params(chat(**fields), {})

    assert caught.value.param == param


def test_top_logprobs_out_of_bounds_is_refused() -> None:
    with pytest.raises(BodyError, match=r"<= 20 - at `\$\.top_logprobs`"):
        chat(logprobs=True, top_logprobs=21)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("suffix", "end"),
        ("use_beam_search", True),
        ("structured_outputs", {"regex": "a"}),
        ("guided_json", {}),
        ("guided_regex", "a"),
        ("guided_choice", ["a"]),
        ("guided_grammar", "a"),
        ("response_format", {"type": "json_object"}),
        ("lora_request", {"lora_name": "x"}),
        ("return_token_ids", True),
        ("detokenize", False),
        ("add_special_tokens", False),
    ],
)
def test_what_a_completion_cannot_do_yet_is_refused(name: str, value: Any) -> None:
    with pytest.raises(BodyError, match=f"{name}=.* is not supported yet") as caught:
        completion(**{name: value})

    assert caught.value.param == name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tool_choice", "required"),
        ("parallel_tool_calls", False),
        ("functions", [{"name": "f"}]),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}),
        ("modalities", ["text", "audio"]),
        ("reasoning_effort", "high"),
        ("documents", [{"text": "a"}]),
        ("chat_template", "{{ 1 }}"),
        ("echo", True),
        ("add_special_tokens", True),
    ],
)
def test_what_a_chat_cannot_do_yet_is_refused(name: str, value: Any) -> None:
    with pytest.raises(BodyError, match=f"{name}=.* is not supported yet") as caught:
        chat(**{name: value})

    assert caught.value.param == name


def test_neutral_values_and_unknown_fields_are_accepted() -> None:
    body = completion(
        n=1,
        best_of=1,
        presence_penalty=0,
        frequency_penalty=0.0,
        repetition_penalty=1.0,
        logit_bias={},
        suffix="",
        use_beam_search=False,
        response_format={"type": "text"},
        priority=0,
        user="somebody",
        nobody_defines_this=[1, {"a": None}],
    )
    assert completion_params(body, {}).max_tokens == 16

    answer = chat(
        tools=[],
        tool_choice="auto",
        parallel_tool_calls=True,
        response_format=None,
        modalities=["text"],
        store=True,
    )
    assert answer == chat()


@pytest.mark.parametrize(
    ("prompt", "expected"), [("a", {"prompt": "a"}), ([1, 2], {"prompt_token_ids": [1, 2]})]
)
def test_a_prompt_goes_with_its_salt(prompt: Any, expected: dict[str, Any]) -> None:
    assert salted(prompt, completion(cache_salt="s")) == {**expected, "cache_salt": "s"}
    assert salted(prompt, completion()) == {**expected, "cache_salt": None}


def test_blame_takes_the_field_that_the_message_begins_with() -> None:
    body = completion()

    assert blame(ValueError("min_tokens is 9 but ..."), body, "prompt").param == "min_tokens"
    assert blame(ValueError("the prompt is empty"), body, "prompt").param == "prompt"


def test_content_parts_and_roles_reach_the_template_as_it_knows_them() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = chat(
        messages=[
            {"role": "developer", "content": "be kind"},
            {"role": "user", "content": parts, "name": "Ann"},
            {"role": "assistant", "content": None, "refusal": None},
        ]
    )

    assert [message.for_template() for message in body.messages] == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": parts, "name": "Ann"},
        {"role": "assistant", "content": ""},
    ]
