"""The server on a real socket: the official client, a client that cuts the line, and how it stops."""

import asyncio
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import openai
import pytest
import uvicorn

from cupaged.server.runner import bind
from tests.engine.scripted import next_token
from tests.server.conftest import Client, MakeClient, text_after

MESSAGES: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]

# What cupaged.serve does after its flags, over the scripted model at SECONDS a step.
PROGRAM = """
import sys, time
from pathlib import Path
from cupaged.config import EngineConfig
from cupaged.engine.async_engine import AsyncEngine
from cupaged.engine.llm_engine import LLMEngine
from cupaged.server.runner import bind, serve
from tests.engine.scripted import next_token, scripted

def follow(token_id, position):
    time.sleep(0.02)
    return next_token(token_id, position)

engine = LLMEngine(EngineConfig(model=sys.argv[1]), create_executor=scripted(follow=follow))
serve(AsyncEngine(engine), bind("127.0.0.1", 0), model_names=["tiny"], shutdown_timeout=float(sys.argv[2]))
"""


def until(condition: Callable[[], bool]) -> None:
    deadline = time.perf_counter() + 20
    while not condition():
        assert time.perf_counter() < deadline, "it did not happen in 20 s"
        time.sleep(0.01)


def listens(url: str) -> bool:
    try:
        httpx.get(f"{url}/version")
    except (httpx.NetworkError, httpx.RemoteProtocolError):  # not only refused: connected, but never accepted
        return False
    return True


@contextmanager
def on_a_socket(client: Client) -> Iterator[str]:
    """Serve the client's app on a free port in a thread; yield its URL."""
    listener = bind("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(client.app, log_level="warning", lifespan="off", ws="none"))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
    thread.start()
    try:
        until(lambda: server.started)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


@pytest.fixture
def api(make_client: MakeClient) -> Iterator[openai.OpenAI]:
    """Return the official client of a served engine."""
    with (
        on_a_socket(make_client(api_key="secret")) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0) as client,
    ):
        yield client


def test_the_official_client_completes(api: openai.OpenAI) -> None:
    completion = api.completions.create(model="tiny", prompt="abc", temperature=0, max_tokens=5, logprobs=1)

    assert completion.choices[0].text == text_after("abc", 5)
    assert completion.choices[0].logprobs is not None
    assert completion.choices[0].logprobs.text_offset == [0, 1, 2, 3, 4]
    assert completion.usage is not None
    assert completion.usage.total_tokens == 8


def test_the_official_client_streams_completions(api: openai.OpenAI) -> None:
    options: openai.types.chat.ChatCompletionStreamOptionsParam = {"include_usage": True}
    with api.completions.create(
        model="tiny", prompt="abc", temperature=0, max_tokens=5, stream=True, stream_options=options
    ) as stream:
        chunks = list(stream)

    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == text_after("abc", 5)
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 5


def test_the_official_client_chats(api: openai.OpenAI) -> None:
    completion = api.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        temperature=0,
        max_completion_tokens=5,
        logprobs=True,
        extra_body={"top_k": 3, "ignore_eos": True},
    )

    choice = completion.choices[0]
    assert (choice.message.role, choice.message.content) == ("assistant", text_after("uhiA", 5))
    assert choice.finish_reason == "length"
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert [token.top_logprobs for token in choice.logprobs.content] == [[]] * 5


def test_the_official_client_streams_chats(api: openai.OpenAI) -> None:
    with api.chat.completions.create(
        model="tiny", messages=MESSAGES, temperature=0, max_completion_tokens=5, stream=True
    ) as stream:
        choices = [chunk.choices[0] for chunk in stream]

    assert "".join(choice.delta.content or "" for choice in choices) == text_after("uhiA", 5)
    assert [choice.delta.role for choice in choices] == ["assistant", None, None, None, None]
    assert [choice.finish_reason for choice in choices] == [None] * 4 + ["length"]


def test_the_official_client_lists_the_models(api: openai.OpenAI) -> None:
    assert [model.id for model in api.models.list()] == ["tiny", "alias"]
    assert api.models.retrieve("tiny").object == "model"


def test_the_official_client_reads_our_errors(api: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        api.completions.create(model="tiny", prompt="abc", top_p=7)
    assert caught.value.param == "top_p"
    with pytest.raises(openai.NotFoundError) as missing:
        api.completions.create(model="other", prompt="abc")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.AuthenticationError):
        api.with_options(api_key="wrong").models.list()


def slow_next_token(token_id: int, position: int) -> int:
    time.sleep(0.01)
    return next_token(token_id, position)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_cuts_the_line_frees_its_blocks(make_client: MakeClient, stream: bool) -> None:
    client = make_client(follow=slow_next_token)
    engine = client.engine.engine

    with on_a_socket(client) as url, httpx.Client() as http:
        body = {"prompt": "abc", "max_tokens": 200, "stream": stream}
        request = http.build_request("POST", f"{url}/v1/completions", json=body)
        with socket.create_connection((request.url.host, request.url.port or 0)) as line:
            head = f"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: {len(request.content)}"
            line.sendall(head.encode() + b"\r\n\r\n" + request.content)
            until(lambda: engine.num_steps > 1)
        until(lambda: engine.scheduler.num_used_blocks == 0)

        assert engine.num_steps < 150
        assert http.get(f"{url}/health").status_code == 200


@contextmanager
def program(scripted_dir: Path, shutdown_timeout: float) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run PROGRAM; yield it and its URL once it is ready."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(scripted_dir), str(shutdown_timeout)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline().split()[-1]
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_the_stream_finish_and_takes_no_more(
    scripted_dir: Path, number: signal.Signals
) -> None:
    with program(scripted_dir, 20) as (process, url):
        body = {"prompt": "abc", "temperature": 0, "max_tokens": 80, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body) as reply:
            lines = (line for line in reply.iter_lines() if line)
            events = [next(lines)]
            process.send_signal(number)
            until(lambda: not listens(url))
            events += lines

        assert events.pop() == "data: [DONE]"
        choices = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
        assert "".join(choice["text"] for choice in choices) == text_after("abc", 80)
        assert choices[-1]["finish_reason"] == "length"
        assert process.wait(20) == 0
        assert process.communicate()[1] == ""


def test_what_has_not_finished_in_time_ends_with_an_error(scripted_dir: Path) -> None:
    with program(scripted_dir, 0.1) as (process, url):
        body = {"prompt": "abc", "max_tokens": 200, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body) as reply:
            lines = reply.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]

        assert "the engine was shut down before the request had finished" in rest[-2]
        assert rest[-1] == "data: [DONE]"
        assert process.wait(20) == 0
        assert process.communicate()[1] == ""


def test_a_second_interrupt_ends_at_once(scripted_dir: Path) -> None:
    with program(scripted_dir, 60) as (process, url):
        body = {"prompt": "abc", "max_tokens": 250, "ignore_eos": True, "stream": True}
        text = ""
        with (
            suppress(httpx.NetworkError, httpx.RemoteProtocolError),
            httpx.stream("POST", f"{url}/v1/completions", json=body) as reply,
        ):
            for line in reply.iter_lines():
                if not text:
                    process.send_signal(signal.SIGINT)
                    until(lambda: not listens(url))
                    process.send_signal(signal.SIGINT)
                text += line

        assert '"finish_reason":"length"' not in text
        assert process.wait(20) == 0


def test_a_reserved_port_refuses_connections_until_it_is_served() -> None:
    with bind("127.0.0.1", 0) as listener, pytest.raises(ConnectionRefusedError):
        socket.create_connection(listener.getsockname(), timeout=5)


def test_a_port_in_use_is_an_error() -> None:
    with bind("127.0.0.1", 0) as listener:
        listener.listen()
        with pytest.raises(OSError, match="in use"):
            bind("127.0.0.1", listener.getsockname()[1])
