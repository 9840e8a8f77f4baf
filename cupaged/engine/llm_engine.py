"""LLMEngine: requests in, one step at a time, outputs out. All calls come from one thread, but make_request.

Owns the scheduler and the executor and carries batches from one to the other; knows text only
through the tokenizer, and nothing of models or kernels.
"""

import json
import logging
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Any

import numpy as np

from cupaged.batch import Batch, StepOutput
from cupaged.config import EngineConfig
from cupaged.engine.detokenizer import Detokenizer
from cupaged.engine.request import Request
from cupaged.engine.tokenizer import Tokenizer
from cupaged.hub import resolve_model
from cupaged.outputs import RequestMetrics, RequestOutput
from cupaged.sampling_params import SamplingParams
from cupaged.scheduler.scheduler import Scheduler, Update
from cupaged.sequence import NOT_FINISHED, FinishReason, Sequence
from cupaged.worker.executor import Executor, StepHandle, UniprocExecutor

logger = logging.getLogger("cupaged")

Prompt = str | list[int] | dict[str, Any]  # text, token ids, {"prompt": ...} or {"prompt_token_ids": ...}

_SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")


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
        model_dir = resolve_model(config.model)
        tokenizer_dir = resolve_model(config.tokenizer) if config.tokenizer else model_dir
        self.tokenizer = Tokenizer.from_directory(tokenizer_dir, config.chat_template)
        self.executor = create_executor(config, model_dir)
        self.model_config = self.executor.model_config
        self.max_model_len = self.executor.plan.max_model_len
        self.num_kv_blocks = self.executor.plan.num_blocks
        self.kv_block_bytes = self.executor.plan.block_bytes
        generation = _read_generation_config(model_dir) if config.generation_config == "auto" else {}
        self.default_sampling_params = _sampling_defaults(generation)
        self.eos_token_ids = frozenset(
            [
                *self.model_config.eos_token_ids,
                *_as_ids(generation.get("eos_token_id")),
                *_as_ids(self.tokenizer.eos_token_id),
            ]
        )
        self.scheduler = Scheduler(
            num_blocks=self.num_kv_blocks,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            num_batches=self.executor.max_in_flight,
        )
        self.num_steps = 0
        self.peak_kv_blocks = 0
        self._requests: dict[str, Request] = {}
        self._in_flight: deque[tuple[Batch, StepHandle]] = deque()
        self._seeds = Random(config.seed)

    # Requests.

    def make_request(self, request_id: str, prompt: Prompt, params: SamplingParams) -> Request:
        """Validate and tokenise, changing nothing; ValueError says what is wrong. Any thread may call it."""
        text, token_ids = self._tokenise(prompt)
        num_prompt = len(token_ids)
        self._check_prompt(token_ids)
        self._check_token_ids("stop_token_ids", params.stop_token_ids or ())
        stop_ids = {*(params.stop_token_ids or ()), *(() if params.ignore_eos else self.eos_token_ids)}
        room = self.max_model_len - num_prompt
        if params.min_tokens > room:
            raise ValueError(
                f"min_tokens is {params.min_tokens} but only {room} tokens fit after a prompt of "
                f"{num_prompt} (max_model_len {self.max_model_len}); lower min_tokens or raise max_model_len"
            )
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        banned = {*(params.stop_token_ids or ()), *self.eos_token_ids} if params.min_tokens else set()
        seed = self._seeds.getrandbits(64) if params.seed is None else params.seed % 2**64
        sequence = Sequence(
            request_id=request_id,
            prompt_token_ids=np.array(token_ids, np.int32),
            params=params,
            max_total_tokens=num_prompt + max_tokens,
            stop_token_ids=tuple(sorted(stop_ids)),
            banned_token_ids=tuple(sorted(banned)),
            seed=seed,
        )
        detokenizer = None
        if params.detokenize:
            detokenizer = Detokenizer(
                self.tokenizer,
                token_ids,
                skip_special_tokens=params.skip_special_tokens,
                stop=tuple(params.stop or ()),
                include_stop_str_in_output=params.include_stop_str_in_output,
                min_tokens=params.min_tokens,
            )
        return Request(
            request_id=request_id,
            prompt=text,
            sequence=sequence,
            params=params,
            tokenizer=self.tokenizer,
            detokenizer=detokenizer,
            eos_token_ids=self.eos_token_ids,
            metrics=RequestMetrics(arrival_time=perf_counter()),
            prompt_logprobs=[None] if params.prompt_logprobs is not None else None,
        )

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
        """Run one iteration; return an output for each request with news, by its output_kind."""
        while len(self._in_flight) < self.executor.max_in_flight:
            batch = self.scheduler.schedule()
            if batch is None:
                break
            self._in_flight.append((batch, self.executor.submit(batch)))
        self.peak_kv_blocks = max(self.peak_kv_blocks, self.scheduler.num_used_blocks)
        if not self._in_flight:
            return []
        batch, handle = self._in_flight.popleft()
        output = handle.result()
        update = self.scheduler.update(batch, output)
        self.num_steps += 1
        return self._outputs(update, output)

    def close(self) -> None:
        """Drop all requests and release all memory."""
        for request_id in list(self._requests):
            self.abort(request_id)
        self._in_flight.clear()
        self.executor.close()

    def _outputs(self, update: Update, output: StepOutput) -> list[RequestOutput]:
        """Hand the step's tokens to their requests."""
        if output.logprobs is not None:
            for i in np.unique(output.logprobs.seq).tolist():
                sequence = update.sequences[i]
                if sequence is not None:
                    at = np.flatnonzero(output.logprobs.seq == i)
                    self._requests[sequence.request_id].add_logprobs(output.logprobs, at)
        outputs = []
        counts, reasons = update.num_tokens.tolist(), update.finish_reasons.tolist()
        for i, sequence in enumerate(update.sequences):
            if sequence is None or counts[i] == 0:
                continue
            request = self._requests[sequence.request_id]
            reason = None if reasons[i] == NOT_FINISHED else FinishReason(reasons[i])
            request.append(output.token_ids[i, : counts[i]].tolist(), reason)
            if request.finish_reason is not None:
                self.scheduler.finish(sequence, request.finish_reason)  # a stop string: it does not know yet
                del self._requests[sequence.request_id]
            shown = request.output()
            if shown is not None:
                outputs.append(shown)
        return outputs

    # Validation.

    def _tokenise(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, dict):
            if ("prompt" in prompt) == ("prompt_token_ids" in prompt):
                raise ValueError(
                    f"a prompt dict needs one of 'prompt' and 'prompt_token_ids', got {sorted(prompt)}"
                )
            prompt = prompt["prompt"] if "prompt" in prompt else prompt["prompt_token_ids"]
        if isinstance(prompt, str):
            return prompt, self.tokenizer.encode(prompt)
        if isinstance(prompt, (list, tuple, np.ndarray)):
            return None, [_as_id(token_id) for token_id in prompt]
        raise ValueError(f"a prompt is text or a list of token ids, got {type(prompt).__name__}")

    def _check_prompt(self, token_ids: list[int]) -> None:
        if not token_ids:
            raise ValueError("the prompt is empty; give at least one token")
        if len(token_ids) >= self.max_model_len:
            raise ValueError(
                f"the prompt has {len(token_ids)} tokens but max_model_len is {self.max_model_len}, which "
                f"must also hold at least one new token; shorten it or raise max_model_len"
            )
        self._check_token_ids("prompt_token_ids", token_ids)

    def _check_token_ids(self, name: str, token_ids: Iterable[int]) -> None:
        limit = self.model_config.vocab_size
        for token_id in token_ids:
            if not 0 <= token_id < limit:
                raise ValueError(f"{name} contains {token_id}, but the model's ids are 0..{limit - 1}")


def _as_id(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise ValueError(f"prompt_token_ids must be whole numbers, got {value!r}")
    return int(value)


def _as_ids(value: int | list[int] | None) -> list[int]:
    if value is None:
        return []
    return [value] if isinstance(value, int) else list(value)


def _read_generation_config(model_dir: Path) -> dict[str, Any]:
    path = model_dir / "generation_config.json"
    if not path.exists():
        return {}
    values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return values


def _sampling_defaults(generation: dict[str, Any]) -> dict[str, Any]:
    """Return the SamplingParams fields that generation_config.json sets, less those not supported yet."""
    defaults = {name: generation[name] for name in _SAMPLING_DEFAULTS if generation.get(name) is not None}
    if "max_new_tokens" in defaults:
        defaults["max_tokens"] = defaults.pop("max_new_tokens")
    for name in list(defaults):
        try:
            SamplingParams(**{name: defaults[name]})
        except ValueError as error:
            logger.warning("generation_config.json: %s; requests run without it", error)
            del defaults[name]
    return defaults
