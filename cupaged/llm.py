"""LLM: the offline front door. Prompts in, finished outputs out, in order."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from numbers import Number
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Any, cast

from tqdm import tqdm

from cupaged.config import EngineConfig
from cupaged.engine.beam_search import BeamRequest
from cupaged.engine.llm_engine import LLMEngine, Prompt
from cupaged.engine.request import Request
from cupaged.engine.tokenizer import Tokenizer
from cupaged.outputs import BeamSearchOutput, BeamSearchSequence, RequestOutput
from cupaged.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams

Message = Mapping[str, Any]  # {"role": ..., "content": ...}
MakeRequest = Callable[[str], Request | BeamRequest]  # of the request_id


class LLM:
    """A model ready to generate; a context manager that frees its memory."""

    def __init__(self, model: str | Path, **options: Any) -> None:
        """Load the checkpoint in directory `model`; `options` are the fields of EngineConfig.

        dtype="auto", device="auto", max_model_len, block_size=16, max_num_seqs=256,
        max_num_batched_tokens=2048, gpu_memory_utilization=0.9, kv_cache_memory (bytes), seed=0, ...
        """
        self.engine = LLMEngine(EngineConfig.create(model, **options))
        self._lock = Lock()  # calls from several threads take turns
        self._num_requests = 0
        self._is_closed = False

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        priority: Iterable[int] | None = None,
    ) -> list[RequestOutput]:
        """Return one finished RequestOutput for each prompt, in order, with n outputs each.

        A prompt is a str, a list of token ids, {"prompt": str} or {"prompt_token_ids": [...]}; one or a list.
        A dict may also have "cache_salt": str; then only prompts of the same salt share cached prefixes.
        sampling_params: one for all, one for each, or None for the model's own defaults. priority: one for
        each, lower goes first, where scheduling_policy is "priority". ValueError names the first bad prompt
        or parameter, before anything has run.
        """
        prompt_list = _as_prompts(prompts)
        params_list = self._params(sampling_params, len(prompt_list))
        priorities = _as_priorities(priority, len(prompt_list))
        makers = [
            partial(self.engine.make_request, prompt=prompt, params=params, priority=each)
            for prompt, params, each in zip(prompt_list, params_list, priorities, strict=True)
        ]
        return self._run(makers, use_tqdm)

    def chat(
        self,
        messages: Iterable[Message] | Iterable[Iterable[Message]],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        priority: Iterable[int] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Generate the answer to one conversation, or to each of a list, by the model's chat template."""
        tokenizer = self.engine.tokenizer
        prompts: list[Prompt] = []
        for conversation in _as_conversations(messages):
            text = tokenizer.render_chat(
                conversation,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                chat_template=chat_template,
                **(chat_template_kwargs or {}),
            )
            ids = tokenizer.encode(text, add_special_tokens=False)
            prompts.append({"prompt": text, "prompt_token_ids": ids})
        return self.generate(prompts, sampling_params, use_tqdm, priority=priority)

    def beam_search(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: BeamSearchParams,
        use_tqdm: bool = True,
        *,
        priority: Iterable[int] | None = None,
    ) -> list[BeamSearchOutput]:
        """Return for each prompt, in order, the beam_width best outputs that a beam search finds, best first.

        Prompts and priority as in generate. What is found is what transformers finds with num_beams.
        """
        if not isinstance(params, BeamSearchParams):
            raise ValueError(f"params must be BeamSearchParams, got {params!r}")
        prompt_list = _as_prompts(prompts)
        priorities = _as_priorities(priority, len(prompt_list))
        makers = [
            partial(self.engine.make_beam_request, prompt=prompt, params=params, priority=each)
            for prompt, each in zip(prompt_list, priorities, strict=True)
        ]
        return [self._as_beam_search_output(output, params) for output in self._run(makers, use_tqdm)]

    def reset_prefix_cache(self) -> None:
        """Have no prefix that is cached so far found again."""
        with self._lock:
            self.engine.reset_prefix_cache()

    def get_metrics(self) -> dict[str, int]:
        """Return counters by name (preemptions, prefix_hit_tokens, ...) and gauges (num_running, ...)."""
        return self.engine.get_metrics()

    def get_tokenizer(self) -> Tokenizer:
        """Return the tokenizer."""
        return self.engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return what the model's generation_config.json says, else SamplingParams()."""
        return SamplingParams(**self.engine.default_sampling_params)

    def close(self) -> None:
        """Free weights and KV cache; the object is of no use afterwards."""
        with self._lock:
            self._is_closed = True
            self.engine.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _params(
        self, params: SamplingParams | Iterable[SamplingParams] | None, num_prompts: int
    ) -> list[SamplingParams]:
        if params is None:
            params = self.get_default_sampling_params()
        is_list = isinstance(params, Iterable) and not isinstance(params, Mapping)
        given: list[Any] = [params]
        if is_list:
            given = list(_iterate("sampling_params", "SamplingParams or a list of them", params))
        for item in given:
            if not isinstance(item, SamplingParams):
                raise ValueError(f"sampling_params must be SamplingParams, got {item!r}")
        if is_list and len(given) != num_prompts:
            raise ValueError(
                f"there are {num_prompts} prompts but {len(given)} sampling_params; give one, or one each"
            )
        final = [replace(item, output_kind=RequestOutputKind.FINAL_ONLY) for item in given]
        return final if is_list else final * num_prompts

    def _as_beam_search_output(self, output: RequestOutput, params: BeamSearchParams) -> BeamSearchOutput:
        sequences = []
        for completion in output.outputs:
            tokens = [*output.prompt_token_ids, *completion.token_ids]
            hides_last = completion.finish_reason == "stop" and not params.include_stop_str_in_output
            assert completion.cumulative_logprob is not None, "a beam search has log-probabilities"
            sequences.append(
                BeamSearchSequence(
                    tokens=tokens,
                    text=self.engine.tokenizer.decode(tokens[:-1] if hides_last else tokens),
                    cum_logprob=completion.cumulative_logprob,
                    finish_reason=completion.finish_reason,
                    stop_reason=completion.stop_reason,
                )
            )
        return BeamSearchOutput(sequences)

    def _run(self, makers: Sequence[MakeRequest], use_tqdm: bool) -> list[RequestOutput]:
        """Make a request by each maker, before any runs; return the output of each when all have finished."""
        with self._lock:
            if self._is_closed:
                raise RuntimeError("the LLM is closed; make a new one")
            requests = self._make_requests(makers)
            added: list[str] = []
            try:
                for request in requests:
                    added.append(request.request_id)
                    try:
                        self.engine.add(request)
                    except ValueError:  # the id is that of a request of the user's own
                        added.pop()
                        raise
                finished = self._step_until_finished(set(added), use_tqdm)
            except BaseException:  # also KeyboardInterrupt: leave nothing running behind
                for request_id in added:
                    self.engine.abort(request_id)
                raise
        return [finished[request_id] for request_id in added]

    def _make_requests(self, makers: Sequence[MakeRequest]) -> list[Request | BeamRequest]:
        requests = []
        for i, make in enumerate(makers):
            try:
                requests.append(make(str(self._num_requests)))
            except ValueError as error:
                if len(makers) == 1:
                    raise
                raise ValueError(f"prompts[{i}]: {error}") from error
            self._num_requests += 1
        return requests

    def _step_until_finished(self, pending: set[str], use_tqdm: bool) -> dict[str, RequestOutput]:
        finished: dict[str, RequestOutput] = {}
        num_tokens = 0
        with tqdm(total=len(pending), desc="requests", disable=not use_tqdm, dynamic_ncols=True) as bar:
            while len(finished) < len(pending):
                for output in self.engine.step():
                    if output.request_id not in pending:  # the user's own, added to the engine
                        continue
                    finished[output.request_id] = output
                    num_tokens += sum(len(completion.token_ids) for completion in output.outputs)
                    bar.update()
                    rate = num_tokens / max(bar.format_dict["elapsed"], 1e-9)
                    bar.set_postfix_str(f"{rate:.1f} output tokens/s", refresh=False)
        return finished


def _as_prompts(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    """Return a list of prompts; numbers, which are token ids, are one prompt."""
    if isinstance(prompts, (str, bytes, Mapping)):
        return [cast(Any, prompts)]
    each: list[Any] = list(_iterate("prompts", "a prompt or a list of them", prompts))
    return [each] if any(isinstance(item, Number) for item in each) else each


def _as_priorities(priority: Iterable[int] | None, num_prompts: int) -> list[int]:
    if priority is None:
        return [0] * num_prompts
    given = list(_iterate("priority", "a list of whole numbers, one for each prompt", priority))
    if len(given) != num_prompts:
        raise ValueError(f"there are {num_prompts} prompts but {len(given)} priorities; give one for each")
    return given


def _as_conversations(messages: Iterable[Message] | Iterable[Iterable[Message]]) -> list[list[Message]]:
    wanted = "a list of messages, or of such lists"
    each: list[Any] = list(_iterate("messages", wanted, messages))
    if each and isinstance(each[0], Mapping):
        each = [each]
    conversations = [list(_iterate("messages", wanted, conversation)) for conversation in each]
    for message in chain.from_iterable(conversations):
        if not isinstance(message, Mapping):
            raise ValueError(f"a message is a dict with 'role' and 'content', got {message!r}")
    return conversations


def _iterate(name: str, wanted: str, values: Any) -> Iterator[Any]:
    try:
        return iter(values)
    except TypeError:
        raise ValueError(f"{name} must be {wanted}, got {values!r}") from None
