"""Streams of server-sent events: framing, usage, text held back, errors in the middle, disconnects."""

import asyncio
import json
import logging
import time

import pytest

from cupaged.engine.async_engine import AsyncEngine
from tests.engine.scripted import next_token
from tests.server.conftest import Client, MakeClient, text_after, usage

TEXT = text_after("abc", 16)


def test_events_are_framed_and_end_with_done(client: Client) -> None:
    reply = client.complete("abc", stream=True, max_tokens=2)

    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = reply.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert [json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events[:-2]] == [
        *TEXT[:2]
    ]


def test_usage_is_the_last_chunk_and_has_no_choices(client: Client) -> None:
    chunks = client.stream(
        "/v1/completions", prompt="abc", max_tokens=2, stream_options={"include_usage": True}
    )

    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == usage(3, 2)
    assert all("usage" not in chunk for chunk in chunks[:-1])


def test_there_is_no_usage_unless_wanted(client: Client) -> None:
    assert all("usage" not in chunk for chunk in client.stream("/v1/completions", prompt="abc"))


def test_continuous_usage_counts_up(client: Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}

    chunks = client.stream("/v1/completions", prompt="abc", max_tokens=2, stream_options=options)

    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 2]


def test_no_chunk_is_empty_while_a_stop_text_may_be_coming(client: Client) -> None:
    chunks = client.stream("/v1/completions", prompt="abc", stop=TEXT[2:9], logprobs=0)

    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["text"] for choice in choices] == [TEXT[0], TEXT[1], ""]
    assert [choice["finish_reason"] for choice in choices] == [None, None, "stop"]
    assert [len(choice["logprobs"]["tokens"]) for choice in choices] == [1, 1, 7]


@pytest.mark.parametrize("length", [6, 10])
def test_text_held_for_a_stop_that_never_comes_is_flushed_once(client: Client, length: int) -> None:
    stop = TEXT[3:6] + "?"

    chunks = client.stream("/v1/completions", prompt="abc", max_tokens=length, stop=stop, logprobs=0)

    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == TEXT[:length]
    assert sum(len(chunk["choices"][0]["logprobs"]["tokens"]) for chunk in chunks) == length


def test_a_choice_ends_when_it_does_though_others_go_on(client: Client) -> None:
    texts = [text_after("abc", 16, index=index) for index in range(3)]
    stop = texts[1][2:5]  # it ends the second choice in a chunk that has no text

    chunks = client.stream("/v1/completions", prompt="abc", n=3, temperature=1, stop=stop)

    choices = [chunk["choices"][0] for chunk in chunks]
    ends = [(choice["index"], choice["finish_reason"]) for choice in choices if choice["finish_reason"]]
    assert ends == [(1, "stop"), (0, "length"), (2, "length")]
    assert "".join(choice["text"] for choice in choices if choice["index"] == 1) == texts[1][:2]


def test_an_engine_that_dies_ends_the_stream_with_an_error(
    make_client: MakeClient, caplog: pytest.LogCaptureFixture
) -> None:
    def follow(token_id: int, position: int) -> int:
        if position > 4:
            raise ArithmeticError("no more tokens")
        return next_token(token_id, position)

    client = make_client(follow=follow)
    with caplog.at_level(logging.CRITICAL, logger="cupaged"):
        reply = client.complete("abc", stream=True)

    events = reply.text.split("\n\n")
    assert reply.status_code == 200
    assert events[-2:] == ["data: [DONE]", ""]
    error = json.loads(events[-3].removeprefix("data: "))["error"]
    assert error["type"] == "server_error"
    assert "no more tokens" in error["message"]
    assert client.complete("abc").status_code == 503
    assert client.request("GET", "/health").status_code == 503


async def hang_up(client: Client, *, stream: bool, after: int) -> int:
    """POST a long completion, hang up after `after` messages of the reply; return how many came in all."""
    body = json.dumps({"prompt": "abc", "max_tokens": 200, "stream": stream}).encode()
    incoming = [{"type": "http.request", "body": body, "more_body": False}]
    hung_up = asyncio.Event()
    num_sent = 0

    async def receive() -> dict[str, object]:
        if incoming:
            return incoming.pop()
        if after > 0:
            await hung_up.wait()
        return {"type": "http.disconnect"}

    async def send(message: object) -> None:  # noqa: ARG001
        nonlocal num_sent
        num_sent += 1
        if num_sent >= after:
            hung_up.set()
        await asyncio.sleep(0)

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b""}
    await asyncio.wait_for(client.app(scope, receive, send), 10)
    return num_sent


def slow_next_token(token_id: int, position: int) -> int:
    time.sleep(0.005)
    return next_token(token_id, position)


async def drained(engine: AsyncEngine) -> bool:
    for _ in range(1000):
        if engine.engine.scheduler.num_used_blocks == 0 and not engine.engine.has_unfinished():
            return True
        await asyncio.sleep(0.005)
    return False


@pytest.mark.parametrize(("stream", "after"), [(False, 0), (True, 0), (True, 3)])
def test_a_client_that_hangs_up_frees_its_blocks(make_client: MakeClient, stream: bool, after: int) -> None:
    client = make_client(follow=slow_next_token)

    async def main() -> None:
        await hang_up(client, stream=stream, after=after)
        assert await drained(client.engine)

    asyncio.run(main())
    assert client.engine.engine.num_steps < 200
    assert client.complete("abc").status_code == 200
