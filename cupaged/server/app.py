"""The HTTP server's routes: OpenAI's API over an AsyncEngine.

Every failure has OpenAI's error shape and the status that says whose fault it is.
"""

import asyncio
import secrets
import time
from collections.abc import Sequence
from uuid import uuid4

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from cupaged import __version__
from cupaged.engine.async_engine import AsyncEngine, EngineDeadError
from cupaged.sampling_params import SamplingParams
from cupaged.server.answer import Format, answer, answer_events
from cupaged.server.chat import ChatFormat, chat_prompt
from cupaged.server.completions import CompletionFormat
from cupaged.server.connection import EventStream, read_body, until_disconnect
from cupaged.server.protocol import (
    BodyError,
    ChatBody,
    CompletionBody,
    SamplingBody,
    StreamOptions,
    blame,
    chat_params,
    completion_params,
    parse_body,
    prompts_of,
    salted,
)
from cupaged.server.replies import error_reply

CLIENT_CLOSED_REQUEST = 499  # nginx's word for a client that hung up; nobody reads it


def create_app(engine: AsyncEngine, model_names: Sequence[str], api_key: str | None = None) -> Starlette:
    """Return the ASGI app that serves `engine` under `model_names`, the first of which it answers with."""
    api = Api(engine, model_names)
    return Starlette(
        routes=[
            Route("/v1/completions", api.completions, methods=["POST"]),
            Route("/v1/chat/completions", api.chat, methods=["POST"]),
            Route("/v1/models", api.models),
            Route("/v1/models/{name:path}", api.model),
            Route("/health", api.health),
            Route("/ping", api.health),
            Route("/version", api.version),
        ],
        middleware=[Middleware(RequireKey, key=api_key)] if api_key is not None else [],
        exception_handlers={
            BodyError: _bad_body,
            UnknownModelError: _unknown_model,
            EngineDeadError: _unavailable,
            HTTPException: _http_error,
            ClientDisconnect: _client_closed,
            Exception: _internal_error,
        },
    )


class Api:
    """The endpoints."""

    def __init__(self, engine: AsyncEngine, model_names: Sequence[str]) -> None:
        """Serve `engine`; every name means its one model."""
        self.engine = engine
        self.model_names = model_names
        self.created = int(time.time())

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        body = parse_body(await read_body(request), CompletionBody)
        self._check_model(body)
        params = completion_params(body, self.engine.engine.default_sampling_params)
        prompts = prompts_of(body)
        form = CompletionFormat(
            body=body,
            id=f"cmpl-{body.request_id or uuid4().hex}",
            created=int(time.time()),
            model=self.model_names[0],
            tokenizer=self.engine.engine.tokenizer,
        )
        return await self._answer(request, body, prompts, params, form)

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        body = parse_body(await read_body(request), ChatBody)
        self._check_model(body)
        params = chat_params(body, self.engine.engine.default_sampling_params)
        tokenizer = self.engine.engine.tokenizer
        try:
            prompt = await asyncio.to_thread(chat_prompt, body, tokenizer)
        except ValueError as error:
            raise blame(error, body, "messages") from None
        form = ChatFormat(
            body=body,
            id=f"chatcmpl-{body.request_id or uuid4().hex}",
            created=int(time.time()),
            model=self.model_names[0],
            tokenizer=tokenizer,
        )
        return await self._answer(request, body, [prompt], params, form)

    async def models(self, request: Request) -> Response:  # noqa: ARG002
        """GET /v1/models."""
        return _json({"object": "list", "data": [self._card(name) for name in self.model_names]})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/{name}."""
        name = request.path_params["name"]
        self._check_name(name)
        return _json(self._card(name))

    async def health(self, request: Request) -> Response:  # noqa: ARG002
        """GET /health and /ping: 200 while requests are taken, else 503."""
        self.engine.check_health()
        return Response()

    async def version(self, request: Request) -> Response:  # noqa: ARG002
        """GET /version."""
        return _json({"version": __version__})

    async def _answer(
        self,
        request: Request,
        body: SamplingBody,
        prompts: Sequence[str | list[int]],
        params: SamplingParams,
        form: Format,
    ) -> Response:
        """Run the prompts; every one is valid before any runs."""
        requests = []
        for i, prompt in enumerate(prompts):
            try:
                made = await self.engine.make_request(
                    f"{form.id}-{i}", salted(prompt, body), params, body.priority or 0
                )
            except ValueError as error:
                source = "messages" if isinstance(body, ChatBody) else "prompt"
                raise blame(error, body, source if len(prompts) == 1 else f"{source}[{i}]") from None
            requests.append(made)
        if body.stream:
            options = body.stream_options or StreamOptions()
            return EventStream(answer_events(self.engine, requests, form, options))
        try:
            whole = await until_disconnect(request.receive, answer(self.engine, requests, form))
        except ValueError as error:
            raise blame(error, body, None) from None
        return Response(status_code=CLIENT_CLOSED_REQUEST) if whole is None else _json(whole)

    def _card(self, name: str) -> dict[str, str | int]:
        return {
            "id": name,
            "object": "model",
            "created": self.created,
            "owned_by": "cupaged",
            "max_model_len": self.engine.engine.max_model_len,
        }

    def _check_model(self, body: SamplingBody) -> None:
        if body.model is not None:
            self._check_name(body.model)

    def _check_name(self, name: str) -> None:
        if name not in self.model_names:
            raise UnknownModelError(f"there is no model {name!r}; this server has {list(self.model_names)}")


class UnknownModelError(LookupError):
    """A model that this server does not have."""


class RequireKey:
    """ASGI middleware: /v1 needs `Authorization: Bearer KEY`."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        """Guard `app`."""
        self.app = app
        self.expected = f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 401."""
        if scope["type"] == "http" and scope["path"].startswith("/v1/"):
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not secrets.compare_digest(given, self.expected):
                message = "wrong or missing API key; send it as 'Authorization: Bearer KEY'"
                refusal = _error(401, message, code="invalid_api_key")
                refusal.headers["WWW-Authenticate"] = "Bearer"
                await refusal(scope, receive, send)
                return
        await self.app(scope, receive, send)


def _json(content: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status_code=status, media_type="application/json")


def _error(status: int, message: str, *, param: str | None = None, code: str | None = None) -> Response:
    return _json(error_reply(message, status=status, param=param, code=code), status)


async def _bad_body(request: Request, error: Exception) -> Response:  # noqa: ARG001
    assert isinstance(error, BodyError)
    return _error(400, str(error), param=error.param)


async def _unknown_model(request: Request, error: Exception) -> Response:  # noqa: ARG001
    return _error(404, str(error), param="model", code="model_not_found")


async def _unavailable(request: Request, error: Exception) -> Response:  # noqa: ARG001
    return _error(503, str(error))


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    response = _error(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
    response.headers.update(error.headers or {})
    return response


async def _client_closed(request: Request, error: Exception) -> Response:  # noqa: ARG001
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _internal_error(request: Request, error: Exception) -> Response:  # noqa: ARG001
    return _error(500, "internal error; the server's log has the details")
