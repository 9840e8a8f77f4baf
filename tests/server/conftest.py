"""The app over a real engine with a scripted model, called in-process."""

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from cupaged.engine.async_engine import AsyncEngine
from cupaged.server.app import create_app
from tests.engine.conftest import ALPHABET, MakeEngine, make_engine, scripted_dir
from tests.engine.scripted import continuation

__all__ = ["make_engine", "scripted_dir"]

TEMPLATE = (
    "{% for message in messages %}{{ message.role[0] }}{{ message.content }}{% endfor %}"
    "{% if tone is defined %}{{ tone }}{% endif %}{% if add_generation_prompt %}A{% endif %}"
)


def text_after(prompt: str, length: int, *, index: int = 0) -> str:
    """Return the text that the scripted model gives after `prompt`."""
    ids = continuation([ALPHABET.index(character) for character in prompt], length, index=index)
    return "".join(ALPHABET[i] for i in ids)


def usage(prompt: int, completion: int, cached: int = 0) -> dict[str, Any]:
    """Return the usage of an answer."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


class Client:
    """Calls the app without a socket."""

    def __init__(self, engine: AsyncEngine, api_key: str | None = None) -> None:
        self.engine = engine
        self.app = create_app(engine, ["tiny", "alias"], api_key)

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                return await client.request(method, path, **options)

        return asyncio.run(send())

    def complete(self, prompt: Any = "abc", **body: Any) -> httpx.Response:
        """POST a greedy completion."""
        return self.request("POST", "/v1/completions", json={"prompt": prompt, "temperature": 0, **body})

    def chat(self, messages: Any = None, **body: Any) -> httpx.Response:
        """POST a greedy chat."""
        messages = [{"role": "user", "content": "hi"}] if messages is None else messages
        body = {"messages": messages, "temperature": 0, **body}
        return self.request("POST", "/v1/chat/completions", json=body)

    def stream(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """POST a greedy body with stream=true; return its chunks after checking the frame."""
        reply = self.request("POST", path, json={"temperature": 0, "stream": True, **body})
        events = reply.text.split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""], reply.text
        return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


MakeClient = Callable[..., Client]


@pytest.fixture(scope="session")
def template_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file with a chat template."""
    path = tmp_path_factory.mktemp("template") / "chat.jinja"
    path.write_text(TEMPLATE)
    return path


@pytest.fixture
def make_client(make_engine: MakeEngine, template_file: Path) -> Iterator[MakeClient]:
    """Return a function that serves an engine over the scripted model."""
    engines: list[AsyncEngine] = []

    def make(api_key: str | None = None, **options: Any) -> Client:
        options = {"chat_template": str(template_file), **options}
        engines.append(AsyncEngine(make_engine(**options)))
        return Client(engines[-1], api_key)

    yield make
    for engine in engines:
        asyncio.run(engine.shutdown(0))


@pytest.fixture
def client(make_client: MakeClient) -> Client:
    """Return a client of an engine with default options."""
    return make_client()
