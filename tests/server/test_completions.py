"""What answers to /v1/completions look like, whole and streamed."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from msgspec import UNSET

from cupaged.engine.tokenizer import REPLACEMENT, Tokenizer
from cupaged.outputs import CompletionOutput, Logprob, RequestOutput
from cupaged.server.completions import CompletionFormat
from cupaged.server.protocol import CompletionBody
from cupaged.server.replies import Usage
from tests.engine.conftest import ALPHABET, MakeEngine
from tests.engine.scripted import continuation
from tests.engine.tiny_tokenizers import KINDS, write_directory
from tests.server.conftest import Client, MakeClient, text_after, usage


def test_a_completion_has_the_models_text_and_its_usage(client: Client) -> None:
    reply = client.complete("abc", max_tokens=5).json()

    assert reply["object"] == "text_completion"
    assert reply["id"].startswith("cmpl-")
    assert reply["model"] == "tiny"
    assert reply["choices"] == [
        {
            "index": 0,
            "text": text_after("abc", 5),
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
        }
    ]
    assert reply["usage"] == usage(3, 5)


def test_sixteen_tokens_unless_the_body_says_more(client: Client) -> None:
    assert client.complete().json()["usage"]["completion_tokens"] == 16


def test_token_ids_give_the_same_text(client: Client) -> None:
    assert client.complete([1, 2, 3]).json()["choices"] == client.complete("abc").json()["choices"]


def test_choices_are_in_the_order_of_the_prompts_whoever_ends_first(make_client: MakeClient) -> None:
    client = make_client(follow=lambda _, position: 0 if position == 12 else 9)
    reply = client.complete([[9] * 4, [9] * 10, [9] * 7], max_tokens=30).json()

    texts = [ALPHABET[9] * length for length in (9, 3, 6)]
    assert [(choice["index"], choice["text"]) for choice in reply["choices"]] == list(enumerate(texts))
    assert {choice["finish_reason"] for choice in reply["choices"]} == {"stop"}
    assert reply["usage"] == usage(21, 10 + 4 + 7)


def index_texts(length: int = 16) -> list[str]:
    """Return the texts of three choices for each of "abc" and "xyz"."""
    return [text_after(prompt, length, index=index) for prompt in ("abc", "xyz") for index in range(3)]


def test_n_choices_of_a_prompt_stand_side_by_side_and_the_prompt_counts_once(client: Client) -> None:
    reply = client.complete(["abc", "xyz"], n=3, temperature=1).json()

    assert [choice["index"] for choice in reply["choices"]] == list(range(6))
    assert [choice["text"] for choice in reply["choices"]] == index_texts()
    assert reply["usage"] == usage(6, 6 * 16)


def test_n_choices_are_streamed_by_index(client: Client) -> None:
    chunks = client.stream(
        "/v1/completions",
        prompt=["abc", "xyz"],
        n=3,
        temperature=1,
        stream_options={"include_usage": True},
    )

    texts, ends = [""] * 6, [0] * 6
    for chunk in chunks[:-1]:
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["text"]
        ends[choice["index"]] += choice["finish_reason"] is not None
    assert texts == index_texts()
    assert ends == [1] * 6
    assert chunks[-1]["usage"] == usage(6, 6 * 16)


@pytest.mark.parametrize("stream", [False, True])
def test_every_one_of_n_choices_echoes_and_scores_its_prompt(client: Client, stream: bool) -> None:
    body = {"echo": True, "logprobs": 0, "n": 2, "max_tokens": 2, "temperature": 1}
    parts: list[list[dict[str, Any]]] = [[], []]
    if stream:
        for chunk in client.stream("/v1/completions", prompt="abc", **body):
            parts[chunk["choices"][0]["index"]] += chunk["choices"]
    else:
        for choice in client.complete("abc", **body).json()["choices"]:
            parts[choice["index"]].append(choice)

    for index, own in enumerate(parts):
        assert "".join(part["text"] for part in own) == "abc" + text_after("abc", 2, index=index)
        ids = continuation([1, 2, 3], 2, index=index)
        assert [value for part in own for value in part["logprobs"]["token_logprobs"]] == [
            None,
            *(-i / 8 for i in [2, 3, *ids]),
        ]
        assert [at for part in own for at in part["logprobs"]["text_offset"]] == [0, 1, 2, 3, 4]


def test_the_best_of_more_are_the_choices(client: Client) -> None:
    ids = sorted((continuation([1, 2, 3], 4, index=index) for index in range(4)), key=sum)

    reply = client.complete("abc", n=2, best_of=4, max_tokens=4, temperature=1).json()

    assert [choice["text"] for choice in reply["choices"]] == [
        "".join(ALPHABET[i] for i in own) for own in ids[:2]
    ]
    assert reply["usage"] == usage(3, 8)


def test_prompt_tokens_found_in_the_cache_are_in_the_usage_and_salts_keep_them_apart(client: Client) -> None:
    prompt = "abcd" * 10

    found = [
        client.complete(prompt, max_tokens=1, **salt).json()["usage"]
        for salt in ({}, {}, {"cache_salt": "s"}, {"cache_salt": "s"})
    ]
    chunks = client.stream(
        "/v1/completions", prompt=prompt, max_tokens=3, stream_options={"include_usage": True}
    )

    assert found == [usage(40, 1, cached) for cached in (0, 32, 0, 32)]
    assert chunks[-1]["usage"] == usage(40, 3, 32)


def test_stop_text_cuts_and_is_the_stop_reason(client: Client) -> None:
    text = text_after("abc", 8)

    choice = client.complete("abc", stop=[text[3:5]]).json()["choices"][0]

    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (text[:3], "stop", text[3:5])


def test_logprobs_are_four_lists_with_the_chosen_token_among_the_top(client: Client) -> None:
    choice = client.complete("abc", max_tokens=2, logprobs=1).json()["choices"][0]

    first, second = continuation([1, 2, 3], 2)
    assert choice["logprobs"] == {
        "tokens": [ALPHABET[first], ALPHABET[second]],
        "token_logprobs": [-first / 8, -second / 8],
        "top_logprobs": [
            {"<eos>": 0.0, ALPHABET[first]: -first / 8},
            {"<eos>": 0.0, ALPHABET[second]: -second / 8},
        ],
        "text_offset": [0, 1],
    }


def test_logprobs_0_gives_the_chosen_token_alone(client: Client) -> None:
    logprobs = client.complete("abc", max_tokens=1, logprobs=0).json()["choices"][0]["logprobs"]

    (first,) = continuation([1, 2, 3], 1)
    assert logprobs["top_logprobs"] == [{ALPHABET[first]: -first / 8}]


def test_echo_begins_with_the_prompt(client: Client) -> None:
    for prompt in ("abc", [1, 2, 3]):
        assert client.complete(prompt, echo=True).json()["choices"][0]["text"] == "abc" + text_after(
            "abc", 16
        )


def test_echo_with_logprobs_scores_every_token_but_the_first(client: Client) -> None:
    choice = client.complete("abc", echo=True, logprobs=1, max_tokens=1).json()["choices"][0]

    (first,) = continuation([1, 2, 3], 1)
    assert choice["text"] == "abc" + ALPHABET[first]
    assert choice["logprobs"] == {
        "tokens": ["a", "b", "c", ALPHABET[first]],
        "token_logprobs": [None, -2 / 8, -3 / 8, -first / 8],
        "top_logprobs": [
            None,
            {"<eos>": 0.0, "b": -2 / 8},
            {"<eos>": 0.0, "c": -3 / 8},
            {"<eos>": 0.0, ALPHABET[first]: -first / 8},
        ],
        "text_offset": [0, 1, 2, 3],
    }


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_max_tokens_0_scores_the_prompt_alone(client: Client, stream: bool) -> None:
    body = {"prompt": "abc", "echo": True, "logprobs": 0, "max_tokens": 0}
    if stream:
        reply, end = client.stream("/v1/completions", **body, stream_options={"include_usage": True})
    else:
        reply = end = client.complete(**body).json()

    (choice,) = reply["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("abc", "length")
    assert choice["logprobs"]["token_logprobs"] == [None, -2 / 8, -3 / 8]
    assert end["usage"] == usage(3, 0)


def test_prompt_logprobs_are_by_token_id_and_null_first(client: Client) -> None:
    choice = client.complete("ab", prompt_logprobs=0).json()["choices"][0]

    assert choice["prompt_logprobs"] == [None, {"2": {"logprob": -0.25, "rank": 3, "decoded_token": "b"}}]


def test_streamed_pieces_make_the_whole(client: Client) -> None:
    whole = client.complete("abc", echo=True, logprobs=1).json()["choices"][0]

    chunks = client.stream("/v1/completions", prompt="abc", echo=True, logprobs=1)

    pieces = [choice for chunk in chunks for choice in chunk["choices"]]
    assert "".join(piece["text"] for piece in pieces) == whole["text"]
    for name, values in whole["logprobs"].items():
        assert [value for piece in pieces for value in piece["logprobs"][name]] == values
    assert [piece["finish_reason"] for piece in pieces] == [None] * 15 + ["length"]


def test_streamed_choices_of_several_prompts_carry_their_index(client: Client) -> None:
    chunks = client.stream("/v1/completions", prompt=["abc", "d"], max_tokens=4)

    for index, prompt in enumerate(["abc", "d"]):
        own = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        assert "".join(choice["text"] for choice in own) == text_after(prompt, 4)


@pytest.fixture
def form(make_engine: MakeEngine) -> CompletionFormat:
    return CompletionFormat(
        body=CompletionBody(prompt="abc", logprobs=2),
        id="cmpl-1",
        created=0,
        model="tiny",
        tokenizer=make_engine().tokenizer,
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("cuts", [(), (1, 2, 5)])
def test_offsets_are_those_of_the_text(
    tmp_path: Path, kind: str, adds_bos: bool, cuts: tuple[int, ...]
) -> None:
    tokenizer = Tokenizer.from_directory(write_directory(tmp_path, KINDS[kind](), add_bos_token=adds_bos))
    prompt, answer = "Paris 🙂 ж", " and 🙃 Rome"
    ids = tokenizer.encode(prompt)
    whole = tokenizer.encode(prompt + answer)[len(ids) :]
    form = CompletionFormat(
        body=CompletionBody(prompt=prompt, echo=True, logprobs=0),
        id="1",
        created=0,
        model="",
        tokenizer=tokenizer,
    )

    offsets = []
    for begin, end in pairwise((0, *cuts, len(whole))):
        part = CompletionOutput(0, "", whole[begin:end], logprobs=entries(whole[begin:end]))
        shown = ids if begin == 0 else []
        output = RequestOutput("1", prompt, shown, [None, *entries(ids[1:])] if shown else None, [part])
        (choice,) = form.chunk(0, output, is_first=begin == 0, usage=UNSET).choices
        assert choice.logprobs is not None
        offsets += choice.logprobs.text_offset

    text = prompt + answer
    for token_id, begin in zip(ids + whole, offsets, strict=True):
        piece = tokenizer.token_text(token_id)
        if REPLACEMENT not in piece and token_id != tokenizer.bos_token_id:
            assert text.startswith(piece.lstrip() if begin == 0 else piece, begin)
    inside = [
        begin for begin, i in zip(offsets, ids + whole, strict=True) if REPLACEMENT in tokenizer.token_text(i)
    ]
    assert {text[begin] for begin in inside} == {"🙂", "ж", "🙃"}


def entries(token_ids: list[int]) -> list[dict[int, Logprob]]:
    return [{token_id: Logprob(-1.0, 1, "")} for token_id in token_ids]


def output_with(entry: dict[int, Logprob], token_id: int) -> RequestOutput:
    completion = CompletionOutput(index=0, text="x", token_ids=[token_id], logprobs=[entry])
    return RequestOutput("cmpl-1-0", "abc", [1, 2, 3], None, [completion])


def test_minus_infinity_becomes_a_finite_floor(form: CompletionFormat) -> None:
    entry = {5: Logprob(-float("inf"), 3, "e"), 6: Logprob(0.0, 1, "f"), 7: Logprob(-float("inf"), 2, "g")}

    logprobs = form.whole([output_with(entry, 5)], Usage()).choices[0].logprobs

    assert logprobs is not None
    assert logprobs.token_logprobs == [-9999.0]
    assert logprobs.top_logprobs == [{"f": 0.0, "g": -9999.0, "e": -9999.0}]


def test_of_tokens_with_equal_texts_the_likelier_counts(form: CompletionFormat) -> None:
    entry = {5: Logprob(-2.0, 2, "\ufffd"), 6: Logprob(-0.5, 1, "\ufffd")}

    logprobs = form.whole([output_with(entry, 5)], Usage()).choices[0].logprobs

    assert logprobs is not None
    assert (logprobs.token_logprobs, logprobs.top_logprobs) == ([-2.0], [{"\ufffd": -0.5}])
