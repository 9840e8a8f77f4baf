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
from cupaged.outputs import CompletionOutput, RequestOutput
from cupaged.server.protocol import StreamOptions
from cupaged.server.replies import DONE, Usage, error_reply, sse

logger = logging.getLogger("cupaged")


class Format(Protocol):
    """How the outputs of one request are shown, each cut down to the one completion that its choice is of.

    Choice `prompt * n + j` is completion j of a prompt.
    """

    id: str

    @property
    def generates(self) -> bool:
        """Return whether there is more to show than the prompt."""

    def whole(self, choices: list[RequestOutput], usage: Usage) -> Struct:
        """Return the answer to a request that is not streamed."""

    def chunk(self, index: int, output: RequestOutput, *, is_first: bool, usage: Usage | UnsetType) -> Struct:
        """Return the chunk that carries what is new of choice `index`, and usage so far if wanted.

        The first of a choice has the prompt.
        """

    def usage_chunk(self, usage: Usage) -> Struct:
        """Return the last chunk of a stream with include_usage; it has no choices."""


async def answer(engine: AsyncEngine, requests: Sequence[Request], form: Format) -> Struct:
    """Return the answer once every request has finished, in the order of the requests."""
    finished: dict[str, RequestOutput] = {}
    async with aclosing(_outputs(engine, requests, form)) as outputs:
        async for output in outputs:
            finished[output.request_id] = output
    usage = Usage()
    choices = []
    for request in requests:
        output = finished[request.request_id]
        usage.add(output)
        choices += [replace(output, outputs=[completion]) for completion in output.outputs]
    return form.whole(choices, usage)


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
    """Yield a chunk for every choice's new text; one without waits for the next, so that none is empty."""
    begins = {request.request_id: i * request.params.n for i, request in enumerate(requests)}
    prompts: dict[str, RequestOutput] = {}  # the first output of each request
    begun: set[int] = set()
    held: dict[int, CompletionOutput] = {}
    usage = Usage()
    running_usage = usage if options.continuous_usage_stats else UNSET
    async with aclosing(_outputs(engine, requests, form)) as outputs:
        async for output in outputs:
            usage.add(output)
            prompt = prompts.setdefault(output.request_id, output)
            for completion in output.outputs:
                index = begins[output.request_id] + completion.index
                new = _join(held.pop(index), completion) if index in held else completion
                if not new.text and new.finish_reason is None:
                    held[index] = new
                    continue
                is_first = index not in begun
                shown = replace(prompt if is_first else output, outputs=[new])
                yield form.chunk(index, shown, is_first=is_first, usage=running_usage)
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
    return replace(output, outputs=list(map(_emptied, output.outputs)))


def _emptied(completion: CompletionOutput) -> CompletionOutput:
    logprobs = None if completion.logprobs is None else completion.logprobs[:0]
    return replace(
        completion, text="", token_ids=[], logprobs=logprobs, finish_reason="length", stop_reason=None
    )


def _join(held: CompletionOutput, new: CompletionOutput) -> CompletionOutput:
    """Return two deltas of one choice as one; the first has no text."""
    logprobs = None if new.logprobs is None else [*(held.logprobs or ()), *new.logprobs]
    return replace(new, token_ids=held.token_ids + new.token_ids, logprobs=logprobs)
