"""LLMEngine: requests in, one step at a time, outputs out. All calls come from one thread, but make_request.

Owns the scheduler and the executor and carries batches from one to the other; knows text only
through the tokenizer, and nothing of models or kernels.
"""

from collections import deque
from collections.abc import Callable
from pathlib import Path

from cupaged.batch import Batch, StepOutput, TokenLogprobs
from cupaged.config import EngineConfig
from cupaged.engine.generation_config import GenerationConfig, read_generation_config
from cupaged.engine.input_processor import InputProcessor
from cupaged.engine.input_processor import Prompt as Prompt
from cupaged.engine.request import Request
from cupaged.engine.tokenizer import Tokenizer
from cupaged.hub import resolve_model
from cupaged.outputs import RequestOutput
from cupaged.sampling_params import SamplingParams
from cupaged.scheduler.scheduler import Scheduler, Update
from cupaged.sequence import NOT_FINISHED, FinishReason
from cupaged.worker.executor import Executor, StepHandle, UniprocExecutor


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
        self.executor = create_executor(config, model_dir)
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
            eos_token_ids=(
                *self.model_config.eos_token_ids,
                *generation.eos_token_ids,
                *(() if eos is None else (eos,)),
            ),
            seed=config.seed,
        )
        self.scheduler = self._create_scheduler()
        self.scheduler.warm_up()
        self.num_steps = 0
        self.peak_kv_blocks = 0
        self._requests: dict[str, Request] = {}
        self._in_flight: deque[tuple[Batch, StepHandle]] = deque()

    # Requests.

    def make_request(self, request_id: str, prompt: Prompt, params: SamplingParams) -> Request:
        """Validate and tokenise, changing nothing; ValueError says what is wrong. Any thread may call it."""
        return self._inputs.make_request(request_id, prompt, params)

    def add(self, request: Request) -> None:
        """Queue a request; ValueError if its id is in use or it can never run."""
        if request.request_id in self._requests:
            raise ValueError(
                f"request_id {request.request_id!r} is in use by a running request; choose another"
            )
        self.scheduler.add(request.sequence)
        self._requests[request.request_id] = request

    def add_request(self, request_id: str, prompt: Prompt, params: SamplingParams) -> None:
        """Validate, tokenise and queue."""
        self.add(self.make_request(request_id, prompt, params))

    def abort(self, request_id: str) -> None:
        """Drop a request and free its blocks; an id that is not running is ignored."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            self.scheduler.finish(request.sequence, FinishReason.ABORT)

    def has_unfinished(self) -> bool:
        """Return whether step() still has work."""
        return bool(self._requests) or bool(self._in_flight)

    # Steps.

    def step(self) -> list[RequestOutput]:
        """Run one iteration; return an output for each request with news, by its output_kind.

        If a step fails, or is interrupted, all requests are dropped and the engine is as new.
        """
        try:
            return self._step()
        except BaseException as error:
            self._drop_all()
            try:
                self.executor.synchronize()  # a step in flight still writes to the KV cache and its results
            except Exception as failure:  # a device that is lost fails again: what was first is what counts
                raise error from failure
            raise

    def close(self) -> None:
        """Drop all requests and release all memory."""
        self._drop_all()
        self.executor.close()

    def _drop_all(self) -> None:
        """Drop all requests and steps; half a step may have gone into the scheduler, so make a new one."""
        self._requests.clear()
        self._in_flight.clear()
        self.scheduler = self._create_scheduler()

    def _create_scheduler(self) -> Scheduler:
        return Scheduler(
            num_blocks=self.num_kv_blocks,
            block_size=self.config.block_size,
            max_num_seqs=self.config.max_num_seqs,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            num_batches=self.executor.max_in_flight,
        )

    def _step(self) -> list[RequestOutput]:
        while len(self._in_flight) < self.executor.max_in_flight:
            batch = self.scheduler.schedule()
            if batch is None:
                break
            self._in_flight.append((batch, self.executor.submit(batch)))
        self.peak_kv_blocks = max(self.peak_kv_blocks, self.scheduler.num_used_blocks)
        if not self._in_flight:
            assert not self._requests, f"{len(self._requests)} requests wait and none of them can run"
            return []
        batch, handle = self._in_flight.popleft()
        output = handle.result()
        update = self.scheduler.update(batch, output)
        self.num_steps += 1
        return self._outputs(update, output)

    def _outputs(self, update: Update, output: StepOutput) -> list[RequestOutput]:
        """Hand the step's tokens to their requests."""
        if output.logprobs is not None:
            self._add_logprobs(update, output.logprobs)
        outputs = []
        columns = (output.token_ids, update.num_tokens, update.finish_reasons)
        each = zip(update.sequences, *(column.tolist() for column in columns), strict=True)
        for sequence, token_ids, num_tokens, reason in each:
            if sequence is None or num_tokens == 0:
                continue
            request = self._requests[sequence.request_id]
            request.append(token_ids[:num_tokens], None if reason == NOT_FINISHED else FinishReason(reason))
            if request.finish_reason is not None:
                self.scheduler.finish(sequence, request.finish_reason)  # a stop string: it does not know yet
                del self._requests[sequence.request_id]
            shown = request.output()
            if shown is not None:
                outputs.append(shown)
        return outputs

    def _add_logprobs(self, update: Update, tokens: TokenLogprobs) -> None:
        columns = (tokens.seq, tokens.is_prompt, tokens.token_ids, tokens.logprobs, tokens.ranks)
        for i, *entry in zip(*(column.tolist() for column in columns), strict=True):
            sequence = update.sequences[i]
            if sequence is not None:
                self._requests[sequence.request_id].add_logprobs(*entry)
