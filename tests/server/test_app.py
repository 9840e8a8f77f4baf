"""Routes, statuses and error shapes."""

import logging
from typing import Any

import pytest

from cupaged import __version__
from cupaged.engine.request import Request
from cupaged.server import app as server_app
from cupaged.server.connection import MAX_BODY_BYTES
from tests.server.conftest import Client, MakeClient, text_after


def error_of(reply: Any, status: int) -> dict[str, Any]:
    assert reply.status_code == status, reply.text
    assert reply.headers["content-type"] == "application/json"
    assert list(reply.json()) == ["error"]
    error: dict[str, Any] = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == ("server_error" if status >= 500 else "invalid_request_error")
    return error


def test_models_are_listed_by_every_name(client: Client) -> None:
    reply = client.request("GET", "/v1/models").json()

    assert reply["object"] == "list"
    assert [card["id"] for card in reply["data"]] == ["tiny", "alias"]
    assert {card["object"] for card in reply["data"]} == {"model"}
    assert {card["max_model_len"] for card in reply["data"]} == {256}
    assert client.request("GET", "/v1/models/tiny").json() == reply["data"][0]


@pytest.mark.parametrize("path", ["/health", "/ping"])
def test_a_healthy_server_says_so(client: Client, path: str) -> None:
    reply = client.request("GET", path)

    assert (reply.status_code, reply.content) == (200, b"")


def test_version(client: Client) -> None:
    assert client.request("GET", "/version").json() == {"version": __version__}


def test_every_served_name_is_accepted(client: Client) -> None:
    assert client.complete(model="alias").status_code == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_an_unknown_model_is_a_404(client: Client, path: str) -> None:
    body = {"model": "other", "prompt": "a", "messages": [{"role": "user", "content": "a"}]}

    error = error_of(client.request("POST", path, json=body), 404)

    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert "'tiny'" in error["message"]


def test_an_unknown_model_cannot_be_retrieved(client: Client) -> None:
    assert error_of(client.request("GET", "/v1/models/org/other"), 404)["code"] == "model_not_found"


def test_an_unknown_route_is_a_404(client: Client) -> None:
    assert "/v1/nothing" in error_of(client.request("POST", "/v1/nothing", json={}), 404)["message"]


def test_a_wrong_method_is_a_405_that_says_which_are_right(client: Client) -> None:
    reply = client.request("GET", "/v1/completions")

    error_of(reply, 405)
    assert reply.headers["allow"] == "POST"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_bad_json_is_a_400(client: Client, path: str) -> None:
    assert error_of(client.request("POST", path, content=b"{"), 400)["param"] is None


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"temperature": -1}, "temperature", ">= 0"),
        ({"top_p": "x"}, "top_p", "Expected `float"),
        ({"stop_token_ids": [5000]}, "stop_token_ids", "0..63"),
        ({"min_tokens": 300, "max_tokens": 400}, "min_tokens", "max_model_len 256"),
        ({"prompt": "a" * 300}, "prompt", "300 tokens but max_model_len is 256"),
        ({"prompt": ""}, "prompt", "empty"),
        ({"prompt": [1, 5000]}, "prompt", "0..63"),
        ({"prompt": [[1], [5000]]}, "prompt[1]", "0..63"),
        ({"prompt": ["a", ""]}, "prompt[1]", "empty"),
        ({"max_tokens": 0}, "max_tokens", "must be >= 1"),
        ({"n": 0}, "n", "must be in 1..2147483647"),
        ({"n": 9}, "n", "max_num_seqs is 8"),
        ({"n": 9, "best_of": 9}, "best_of", "max_num_seqs is 8"),
        ({"n": 3, "best_of": 2}, "best_of", ">= n, which is 3"),
        ({"priority": 1}, "priority", "fcfs"),
        ({"cache_salt": ""}, "cache_salt", "1..1024"),
        ({"suffix": "x"}, "suffix", "not supported yet"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_field_is_a_400_that_names_it(
    client: Client, body: dict[str, Any], param: str, words: str, stream: bool
) -> None:
    error = error_of(client.complete(**{"prompt": "abc", "stream": stream, **body}), 400)

    assert error["param"] == param
    assert words in error["message"]
    assert error["message"].endswith(f" - at `$.{param}`")


@pytest.mark.parametrize("stream", [False, True])
def test_a_group_that_can_never_fit_is_a_400_with_the_numbers(make_client: MakeClient, stream: bool) -> None:
    client = make_client(num_blocks=6, max_model_len=96)

    error = error_of(client.complete("abc", n=8, max_tokens=90, stream=stream), 400)

    assert all(number in error["message"] for number in ("8", "6", "blocks"))
    assert client.complete("abc").json()["choices"][0]["text"] == text_after("abc", 16)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_priority_is_taken_where_priorities_count(
    make_client: MakeClient, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    client = make_client(scheduling_policy="priority")
    engine, made = client.engine.engine, []
    make_request = engine.make_request

    def note(*args: Any) -> Request:
        made.append(make_request(*args))
        return made[-1]

    monkeypatch.setattr(engine, "make_request", note)
    body = {"prompt": "abc", "messages": [{"role": "user", "content": "a"}], "priority": -3}

    reply = client.request("POST", path, json=body)

    assert reply.status_code == 200
    assert [request.group.priority for request in made] == [-3]


def test_a_chat_longer_than_the_window_blames_the_messages(client: Client) -> None:
    error = error_of(client.chat([{"role": "user", "content": "a" * 300}]), 400)

    assert error["param"] == "messages"


def test_the_server_lives_on_after_a_bad_request(client: Client) -> None:
    client.complete([1, 5000])
    client.complete(logit_bias={"191222": -100})

    assert client.complete("abc").json()["choices"][0]["text"] == text_after("abc", 16)


def test_one_bad_prompt_of_several_runs_none(client: Client) -> None:
    error_of(client.complete(["abc", ""]), 400)

    assert client.engine.engine.num_steps == 0


def test_a_request_id_of_the_users_own_is_kept(client: Client) -> None:
    assert client.complete(request_id="mine").json()["id"] == "cmpl-mine"


def test_a_body_that_is_too_large_is_a_413(client: Client) -> None:
    content = b'{"prompt": "' + b"a" * MAX_BODY_BYTES + b'"}'

    assert (
        str(MAX_BODY_BYTES)
        in error_of(client.request("POST", "/v1/completions", content=content), 413)["message"]
    )


def test_without_the_key_v1_is_closed_and_health_open(make_client: MakeClient) -> None:
    client = make_client(api_key="secret")

    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
        reply = client.request("GET", "/v1/models", headers=headers)
        assert error_of(reply, 401)["code"] == "invalid_api_key"
        assert reply.headers["www-authenticate"] == "Bearer"
    assert client.request("GET", "/health").status_code == 200


def test_with_the_key_v1_is_open(make_client: MakeClient) -> None:
    client = make_client(api_key="secret")

    assert client.request("GET", "/v1/models", headers={"Authorization": "Bearer secret"}).status_code == 200


def test_a_dead_engine_is_a_503_for_all_who_wait_and_come(
    make_client: MakeClient, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_token_id: int, _position: int) -> int:
        raise ArithmeticError("no more tokens")

    client = make_client(follow=fail)

    with caplog.at_level(logging.CRITICAL, logger="cupaged"):
        assert "no more tokens" in error_of(client.complete(), 503)["message"]
    error_of(client.complete(), 503)
    error_of(client.chat(), 503)
    error_of(client.request("GET", "/health"), 503)
    assert client.request("GET", "/v1/models").status_code == 200


def test_a_bug_in_the_server_is_a_500_without_its_details(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise KeyError("a secret of the house")

    monkeypatch.setattr(server_app, "completion_params", broken)

    assert "secret" not in error_of(client.complete(), 500)["message"]
