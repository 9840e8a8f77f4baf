"""AsyncEngine: the step loop in its own thread, one stream of outputs per caller on the event loop.

Commands go to the thread through a queue and outputs come back once per step; nothing else is shared. The
thread sleeps while there is no work. Never looks into a request.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from contextlib import aclosing, suppress
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any

from cupaged.engine.llm_engine import LLMEngine, Prompt
from cupaged.engine.request import Request
from cupaged.outputs import RequestOutput
from cupaged.sampling_params import SamplingParams

logger = logging.getLogger("cupaged")

LAST_STEP_S = 30.0  # how long shutdown waits for the step that is running, which cannot be interrupted


class EngineDeadError(RuntimeError):
    """The engine takes no requests: a step failed, or it has been shut down."""


class _Stream:
    """Outputs on their way to one caller."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.outputs: asyncio.Queue[RequestOutput | None] = asyncio.Queue()  # None: see error
        self.error: Exception | None = None

    def fail(self, error: Exception) -> None:
        """End the stream; any thread may call it."""
        self.error = error
        _post(self.loop, self.outputs.put_nowait, None)


class AsyncEngine:
    """An LLMEngine for asyncio; it owns the engine from here on."""

    def __init__(self, engine: LLMEngine) -> None:
        """Start the engine's thread."""
        self.engine = engine
        self._failure: str | None = None  # why no requests are taken
        self._draining = False
        self._stopped = False
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._streams: dict[str, _Stream] = {}  # by request id; the engine's thread's own
        self._thread = Thread(target=self._run, name="cupaged-engine", daemon=True)
        self._thread.start()

    # For callers on an event loop.

    def check_health(self) -> None:
        """Raise EngineDeadError if the engine takes no requests."""
        if self._failure is not None:
            raise EngineDeadError(self._failure)

    async def make_request(
        self, request_id: str, prompt: Prompt, params: SamplingParams, priority: int = 0
    ) -> Request:
        """Validate and tokenise off the event loop; ValueError says what is wrong."""
        self.check_health()
        return await asyncio.to_thread(self.engine.make_request, request_id, prompt, params, priority)

    async def generate(
        self, prompt: Prompt, params: SamplingParams, request_id: str, priority: int = 0
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the outputs of one request; closing the iterator aborts it."""
        request = await self.make_request(request_id, prompt, params, priority)
        async with aclosing(self.stream([request])) as outputs:
            async for output in outputs:
                yield output

    async def stream(self, requests: Sequence[Request]) -> AsyncGenerator[RequestOutput, None]:
        """Run requests together, yield their outputs as they come; closing the iterator aborts the rest."""
        self.check_health()
        stream = _Stream()
        unfinished = {request.request_id for request in requests}
        for request in requests:
            self._commands.put(partial(self._add, request, stream))
        try:
            # Once more: a thread that ends from here on finds our commands and fails them.
            self.check_health()
            while unfinished:
                output = await stream.outputs.get()
                if output is None:
                    assert stream.error is not None, "a stream was ended for nothing"
                    raise stream.error
                if output.finished:
                    unfinished.remove(output.request_id)
                yield output
        finally:
            for request_id in unfinished:
                self._commands.put(partial(self._abort, request_id, stream))

    async def reset_prefix_cache(self) -> None:
        """Have nothing that is cached so far found again; running requests keep their blocks."""
        self.check_health()
        done: Future[None] = Future()
        self._commands.put(partial(self._reset_prefix_cache, done))
        self.check_health()  # once more, as in stream()
        await asyncio.wrap_future(done)

    async def shutdown(self, timeout: float) -> None:
        """Refuse new requests, give those in flight `timeout` seconds, abort the rest, close the engine."""
        self._failure = self._failure or "the engine is shutting down and takes no new requests"
        self._commands.put(self._drain)
        await asyncio.to_thread(self._thread.join, timeout)
        self._commands.put(self._stop)
        await asyncio.to_thread(self._thread.join, LAST_STEP_S)

    # In the engine's thread.

    def _run(self) -> None:
        try:
            while not self._stopped:
                if not self.engine.has_unfinished() and self._commands.empty():
                    if self._draining:
                        break
                    self._commands.get()()  # sleeps until there is one
                self._run_commands()
                if self.engine.has_unfinished() and not self._stopped:
                    self._deliver(self.engine.step())
        except Exception as error:
            logger.exception("the engine died")
            self._failure = reason = f"the engine died: {type(error).__name__}: {error}"
        else:
            reason = "the engine was shut down before the request had finished"
        self._stopped = True
        self._run_commands()
        for stream in set(self._streams.values()):
            stream.fail(EngineDeadError(reason))
        try:
            self.engine.close()
        except Exception:  # as a device's that is lost; its memory has been let go all the same
            logger.exception("the engine failed while it was closed")

    def _run_commands(self) -> None:
        while not self._commands.empty():
            self._commands.get()()

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        """Hand a step's outputs to their streams, waking each event loop once."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Stream, RequestOutput]]] = {}
        for output in outputs:
            stream = self._streams[output.request_id]
            by_loop.setdefault(stream.loop, []).append((stream, output))
            if output.finished:
                del self._streams[output.request_id]
        for loop, items in by_loop.items():
            _post(loop, _put_all, items)

    def _add(self, request: Request, stream: _Stream) -> None:
        if self._stopped:
            stream.fail(EngineDeadError(self._failure))
            return
        try:
            self.engine.add(request)
        except ValueError as error:  # this request's fault, no other's
            stream.fail(error)
        except BaseException:
            self._streams[request.request_id] = stream  # to fail with all the others
            raise
        else:
            self._streams[request.request_id] = stream

    def _abort(self, request_id: str, stream: _Stream) -> None:
        # A request of another caller may have the same id: then this one was refused.
        if self._streams.get(request_id) is stream and not self._stopped:
            del self._streams[request_id]
            self.engine.abort(request_id)

    def _reset_prefix_cache(self, done: Future[None]) -> None:
        if not done.set_running_or_notify_cancel():
            return  # nobody waits for it any more
        if self._stopped:
            done.set_exception(EngineDeadError(self._failure))
        else:
            try:
                self.engine.reset_prefix_cache()
            except BaseException as error:
                done.set_exception(error)
                raise
            done.set_result(None)

    def _drain(self) -> None:
        self._draining = True

    def _stop(self) -> None:
        self._stopped = True


def _put_all(items: list[tuple[_Stream, RequestOutput]]) -> None:
    for stream, output in items:
        stream.outputs.put_nowait(output)


def _post(loop: asyncio.AbstractEventLoop, call: Callable[..., None], *args: Any) -> None:
    """Have `loop` call; on a loop that is closed nobody waits for it."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(call, *args)
