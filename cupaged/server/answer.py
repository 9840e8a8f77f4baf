"""From the outputs of a request's prompts to one answer, or to a stream of server-sent events.

The same for completions and chat; a Format says what they look like.
"""

import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Protocol

from msgspec import UNSET, Struct, UnsetType

from cupaged.engine.async_engine import AsyncEngine, EngineDeadError
from cupaged.engine.request import Request
from cupaged.outputs import RequestOutput
from cupaged.server.protocol import StreamOptions
from cupaged.server.replies import DONE, Usage, error_reply, sse

logger = logging.getLogger("cupaged")


class Format(Protocol):
    """How the outputs of one request are shown; choice `index` belongs to prompt `index`."""

    id: str

    @property
    def generates(self) -> bool:
        """Return whether there is more to show than the prompt."""

    def whole(self, outputs: list[RequestOutput], usage: Usage) -> Struct:
        """Return the answer to a request that is not streamed."""

    def chunk(self, index: int, output: RequestOutput, *, is_first: bool, usage: Usage | UnsetType) -> Struct:
        """Return the chunk that carries what is new of choice `index`, and usage so far if wanted."""

    def usage_chunk(self, usage: Usage) -> Struct:
        """Return the last chunk of a stream with include_usage; it has no choices."""


async def answer(engine: AsyncEngine, requests: Sequence[Request], form: Format) -> Struct:
    """Return the answer once every request has finished, in the order of the requests."""
    finished: dict[str, RequestOutput] = {}
    async with aclosing(_outputs(engine, requests, form)) as outputs:
        async for output in outputs:
            finished[output.request_id] = output
    ordered = [finished[request.request_id] for request in requests]
    usage = Usage()
    for output in ordered:
        usage.add(len(output.prompt_token_ids), len(output.outputs[0].token_ids))
    return form.whole(ordered, usage)


async def answer_events(
    engine: AsyncEngine, requests: Sequence[Request], form: Format, options: StreamOptions
) -> AsyncGenerator[bytes, None]:
    """Yield the answer as server-sent events; an error becomes the last but one."""
    try:
        async with aclosing(_chunks(engine, requests, form, options)) as chunks:
            async for chunk in chunks:
                yield sse(chunk)
    except EngineDeadError as error:
        yield sse(error_reply(str(error), status=503))
    except ValueError as error:
        yield sse(error_reply(str(error), status=400))
    except Exception:
        logger.exception("a stream failed")
        yield sse(error_reply("internal error; the server's log has the details", status=500))
    yield DONE


async def _chunks(
    engine: AsyncEngine, requests: Sequence[Request], form: Format, options: StreamOptions
) -> AsyncGenerator[Struct, None]:
    """Yield a chunk for every output with text; one without waits for the next, so that none is empty."""
    index_of = {request.request_id: i for i, request in enumerate(requests)}
    begun: set[int] = set()
    held: dict[int, RequestOutput] = {}
    usage = Usage()
    running_usage = usage if options.continuous_usage_stats else UNSET
    async with aclosing(_outputs(engine, requests, form)) as outputs:
        async for output in outputs:
            index = index_of[output.request_id]
            usage.add(len(output.prompt_token_ids), len(output.outputs[0].token_ids))
            if index in held:
                output = _join(held.pop(index), output)
            if not output.outputs[0].text and not output.finished:
                held[index] = output
                continue
            yield form.chunk(index, output, is_first=index not in begun, usage=running_usage)
            begun.add(index)
    if options.include_usage:
        yield form.usage_chunk(usage)


async def _outputs(
    engine: AsyncEngine, requests: Sequence[Request], form: Format
) -> AsyncGenerator[RequestOutput, None]:
    """Yield the engine's outputs, without the one token it must generate where none is wanted."""
    async with aclosing(engine.stream(requests)) as outputs:
        async for output in outputs:
            yield output if form.generates else _without_answer(output)


def _without_answer(output: RequestOutput) -> RequestOutput:
    part = output.outputs[0]
    logprobs = None if part.logprobs is None else part.logprobs[:0]
    empty = replace(part, text="", token_ids=[], logprobs=logprobs, finish_reason="length", stop_reason=None)
    return replace(output, outputs=[empty])


def _join(held: RequestOutput, new: RequestOutput) -> RequestOutput:
    """Return two deltas of one request as one; the first has no text, and only a first one has the prompt."""
    old, delta = held.outputs[0], new.outputs[0]
    logprobs = None if delta.logprobs is None else [*(old.logprobs or ()), *delta.logprobs]
    return replace(
        new,
        prompt_token_ids=held.prompt_token_ids + new.prompt_token_ids,
        prompt_logprobs=held.prompt_logprobs or new.prompt_logprobs,
        outputs=[replace(delta, token_ids=old.token_ids + delta.token_ids, logprobs=logprobs)],
    )
