"""LLMEngine: requests in, one step at a time, outputs out. All calls come from one thread, but make_request.

Owns the scheduler and the executor and carries batches from one to the other; knows text only
through the tokenizer, and nothing of models or kernels.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from cupaged.batch import Batch, StepOutput, TokenLogprobs
from cupaged.compile_ahead import Compilation, Task, count_functions
from cupaged.config import EngineConfig
from cupaged.engine.beam_search import BeamRequest
from cupaged.engine.generation_config import GenerationConfig, read_generation_config
from cupaged.engine.input_processor import InputProcessor
from cupaged.engine.input_processor import Prompt as Prompt
from cupaged.engine.request import Request
from cupaged.engine.tokenizer import Tokenizer
from cupaged.hub import resolve_model
from cupaged.outputs import RequestOutput
from cupaged.sampling_params import BeamSearchParams, SamplingParams
from cupaged.scheduler.counters import Counter, create_counters
from cupaged.scheduler.scheduler import Scheduler, Update
from cupaged.scheduler.scheduler_config import SchedulerConfig
from cupaged.scheduler.warm_up import warm_up
from cupaged.sequence import NOT_FINISHED, FinishReason
from cupaged.trace.recorder import TraceRecorder
from cupaged.trace.records import TraceFile
from cupaged.worker.executor import Executor, StepHandle, UniprocExecutor


def scheduler_config(config: EngineConfig, executor: Executor) -> SchedulerConfig:
    """Return what a scheduler for `executor` plans with."""
    plan = executor.plan
    return SchedulerConfig(
        num_blocks=plan.num_blocks,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=plan.max_model_len,
        num_batches=executor.max_in_flight,
        num_host_blocks=plan.num_host_blocks,
        sliding_window=executor.model_config.max_sliding_window,
        enable_prefix_caching=config.enable_prefix_caching,
        policy=config.scheduling_policy,
        preemption_mode=config.preemption_mode,
        block_bytes=plan.block_bytes,
        swap_bandwidth=executor.swap_rates.bandwidth,
        prefill_rate=executor.swap_rates.prefill_rate,
    )


class LLMEngine:
    """The engine behind LLM, generate and serve."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        create_executor: Callable[[EngineConfig, Path], Executor] = UniprocExecutor,
    ) -> None:
        """Load tokenizer and model; ValueError or OSError says what is wrong with them."""
        self.config = config
        model_dir = resolve_model(config.model, with_weights=config.load_format != "dummy")
        tokenizer_dir = model_dir
        if config.tokenizer:
            tokenizer_dir = resolve_model(config.tokenizer, with_weights=False)
        self.tokenizer = Tokenizer.from_directory(tokenizer_dir, config.chat_template)
        generation = GenerationConfig({}, ())
        if config.generation_config == "auto":
            generation = read_generation_config(model_dir)
        self._trace = None if config.trace is None else TraceFile(config.trace, with_text=config.trace_text)
        planning = Task(warm_up, num_functions=count_functions("cupaged.scheduler"))
        with Compilation([planning], num_processes=1) as compilation:  # while the model is loaded
            self.executor = create_executor(config, model_dir)
            compilation.wait("Compiling the scheduler")
        self.model_config = self.executor.model_config
        self.max_model_len = self.executor.plan.max_model_len
        self.num_kv_blocks = self.executor.plan.num_blocks
        self.kv_block_bytes = self.executor.plan.block_bytes
        self.default_sampling_params = generation.sampling_params
        eos = self.tokenizer.eos_token_id
        self._inputs = InputProcessor(
            self.tokenizer,
            vocab_size=self.model_config.vocab_size,
            max_model_len=self.max_model_len,
            max_num_seqs=config.max_num_seqs,
            eos_token_ids=(
                *self.model_config.eos_token_ids,
                *generation.eos_token_ids,
                *(() if eos is None else (eos,)),
            ),
            seed=config.seed,
        )
        self.counters = create_counters()  # int64[NUM_COUNTERS], by Counter; they outlive a scheduler
        self.scheduler = self._create_scheduler()
        self.num_steps = 0
        self.peak_kv_blocks = 0
        self._requests: dict[str, Request] = {}
        self._beam_requests: dict[str, BeamRequest] = {}
        self._in_flight: deque[tuple[Batch, StepHandle | None]] = deque()  # None: to be submitted in its turn

    # Requests.

    def make_request(
        self, request_id: str, prompt: Prompt, params: SamplingParams, priority: int = 0
    ) -> Request:
        """Validate and tokenise, changing nothing; ValueError says what is wrong. Any thread may call it."""
        request = self._inputs.make_request(request_id, prompt, params, priority)
        self.scheduler.check(request.group)
        return request

    def make_beam_request(
        self, request_id: str, prompt: Prompt, params: BeamSearchParams, priority: int = 0
    ) -> BeamRequest:
        """Do as make_request for a beam search."""
        request = self._inputs.make_beam_request(request_id, prompt, params, priority)
        self.scheduler.check(request.group)
        return request

    def add(self, request: Request | BeamRequest) -> None:
        """Queue a request; ValueError if its id is in use or it can never run. Interrupted, do as step()."""
        request_id = request.request_id
        if request_id in self._requests or request_id in self._beam_requests:
            raise ValueError(f"request_id {request_id!r} is in use by a running request; choose another")
        self.scheduler.check(request.group)
        with self._or_anew():
            self.scheduler.add(request.group)
            if isinstance(request, BeamRequest):
                self._beam_requests[request_id] = request
            else:
                self._requests[request_id] = request

    def add_request(self, request_id: str, prompt: Prompt, params: SamplingParams, priority: int = 0) -> None:
        """Validate, tokenise and queue."""
        self.add(self.make_request(request_id, prompt, params, priority))

    def abort(self, request_id: str) -> None:
        """Drop a request and free its blocks; an id that is not running is ignored."""
        with self._or_anew():
            request = self._requests.pop(request_id, None) or self._beam_requests.pop(request_id, None)
            if request is not None:
                self.scheduler.finish_group(request.group, FinishReason.ABORT)

    def has_unfinished(self) -> bool:
        """Return whether step() still has work."""
        return bool(self._requests or self._beam_requests or self._in_flight)

    def reset_prefix_cache(self) -> None:
        """Have nothing that is cached so far found again; running requests keep their blocks."""
        with self._or_anew():
            self.scheduler.reset_prefix_cache()

    def get_metrics(self) -> dict[str, int]:
        """Return what was counted since the engine was made, and how things stand."""
        counted = {counter.name.lower(): int(self.counters[counter]) for counter in Counter}
        scheduler = self.scheduler
        return counted | {
            "num_steps": self.num_steps,
            "num_waiting": scheduler.num_waiting,
            "num_running": scheduler.num_running,
            "num_used_blocks": scheduler.num_used_blocks,
            "num_free_blocks": scheduler.num_free_blocks,
            "num_stored_tokens": scheduler.num_stored_tokens,
            "peak_used_blocks": self.peak_kv_blocks,
        }

    # Steps.

    def step(self) -> list[RequestOutput]:
        """Run one iteration; return an output for each request with news, by its output_kind.

        If a step fails, or is interrupted, all requests are dropped and the engine is as new.
        """
        try:  # not _or_anew: a step of a small model is short
            return self._step()
        except BaseException as error:
            self._start_anew(error)
            raise

    def close(self) -> None:
        """Drop all requests and release all memory."""
        if self._trace is not None:
            self._trace.close()
        self._drop_all()
        self.executor.close()

    @contextmanager
    def _or_anew(self) -> Iterator[None]:
        """Start anew if what is done within fails or is interrupted: half of it may have happened."""
        try:
            yield
        except BaseException as error:
            self._start_anew(error)
            raise

    def _start_anew(self, error: BaseException) -> None:
        """Drop all requests after `error`, and wait for what the device still does for them."""
        self._drop_all()
        try:
            self.executor.synchronize()  # a step in flight still writes to the KV cache and its results
        except Exception as failure:  # a device that is lost fails again: what was first is what counts
            raise error from failure

    def _drop_all(self) -> None:
        """Drop all requests and steps; half a step may have gone into the scheduler, so make a new one."""
        self._requests.clear()
        self._beam_requests.clear()
        self._in_flight.clear()
        self.scheduler = self._create_scheduler()

    def _create_scheduler(self) -> Scheduler:
        planned_with = scheduler_config(self.config, self.executor)
        if self._trace is None:
            return Scheduler(planned_with, self.counters)
        return TraceRecorder(planned_with, self.counters, self._trace)

    def _step(self) -> list[RequestOutput]:
        self._begin_steps()
        self.peak_kv_blocks = max(self.peak_kv_blocks, self.scheduler.num_used_blocks)
        if not self._in_flight:
            num_left = len(self._requests) + len(self._beam_requests)
            assert num_left == 0, f"{num_left} requests wait and none of them can run"
            return []
        batch, handle = self._in_flight.popleft()
        if handle is None:
            handle = self.executor.submit(batch)
        output = handle.result()
        update = self.scheduler.update(batch, output)
        self.num_steps += 1
        return self._outputs(update, output)

    def _begin_steps(self) -> None:
        """Plan as many steps as may be in flight and submit them.

        One that will have run when submit returns waits for its turn, or the results of those before it would
        wait for it; nothing goes ahead of it.
        """
        executor, steps = self.executor, self._in_flight
        while len(steps) < executor.max_in_flight and not (steps and steps[-1][1] is None):
            batch = self.scheduler.schedule()
            if batch is None:
                break
            steps.append((batch, executor.submit(batch) if executor.is_async(batch) else None))

    def _outputs(self, update: Update, output: StepOutput) -> list[RequestOutput]:
        """Hand the step's log-probabilities and tokens to their requests."""
        if output.logprobs is not None:
            self._add_logprobs(update, output.logprobs)
        touched: dict[str, Request] = {}  # in the step's order
        columns = (output.token_ids, update.num_tokens, update.finish_reasons)
        each = zip(update.sequences, *(column.tolist() for column in columns), strict=True)
        for seq, token_ids, num_tokens, reason in each:
            if seq is None or num_tokens == 0:  # beams have none: they choose theirs by log-probabilities
                continue
            request = touched[seq.group.request_id] = self._requests[seq.group.request_id]
            sampled = None if reason == NOT_FINISHED else FinishReason(reason)
            ended = request.append(seq.index, token_ids[:num_tokens], sampled)
            if ended is not None:
                self.scheduler.finish(seq, ended)  # a stop string: it does not know yet
        for request_id, request in touched.items():
            if request.finished:
                del self._requests[request_id]
        shown = [request.output() for request in touched.values()]
        return [output for output in shown if output is not None] + self._advance_beams()

    def _add_logprobs(self, update: Update, tokens: TokenLogprobs) -> None:
        columns = (tokens.seq, tokens.is_prompt, tokens.token_ids, tokens.logprobs, tokens.ranks)
        for i, *entry in zip(*(column.tolist() for column in columns), strict=True):
            seq = update.sequences[i]
            if seq is None:
                continue
            requests = self._beam_requests if seq.group.is_beam else self._requests
            requests[seq.group.request_id].add_logprobs(seq.index, *entry)

    def _advance_beams(self) -> list[RequestOutput]:
        """Choose the next beams of each search that has all log-probabilities; return those that ended."""
        ended = []
        for request in [request for request in self._beam_requests.values() if request.is_ready]:
            chosen = request.advance()
            if chosen is None:
                self.scheduler.finish_group(request.group, FinishReason.STOP)
                del self._beam_requests[request.request_id]
                ended.append(request.output())
            else:
                self.scheduler.continue_beams(request.group, *chosen)
        return ended
