"""LLM: the offline front door. Prompts in, finished outputs out, in order."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from tqdm import tqdm

from cupaged.config import EngineConfig
from cupaged.engine.llm_engine import LLMEngine, Prompt
from cupaged.engine.tokenizer import Tokenizer
from cupaged.outputs import RequestOutput
from cupaged.sampling_params import RequestOutputKind, SamplingParams

Message = dict[str, Any]  # {"role": ..., "content": ...}


class LLM:
    """A model ready to generate; a context manager that frees its memory."""

    def __init__(self, model: str | Path, **options: Any) -> None:
        """Load the checkpoint in directory `model`; `options` are the fields of EngineConfig.

        dtype="auto", device="auto", max_model_len, block_size=16, max_num_seqs=256,
        max_num_batched_tokens=2048, gpu_memory_utilization=0.9, kv_cache_memory (bytes), seed=0, ...
        """
        self.engine = LLMEngine(EngineConfig.create(model, **options))
        self._num_requests = 0
        self._is_closed = False

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Return one finished RequestOutput for each prompt, in order.

        A prompt is a str, a list of token ids, {"prompt": str} or {"prompt_token_ids": [...]}; one or a list.
        sampling_params: one for all, one for each, or None for the model's own defaults. ValueError names
        the first bad prompt or parameter, before anything has run.
        """
        if self._is_closed:
            raise RuntimeError("the LLM is closed; make a new one")
        prompt_list = _as_list(prompts)
        params_list = self._params(sampling_params, len(prompt_list))
        first = self._num_requests
        self._num_requests += len(prompt_list)
        ids = [str(first + i) for i in range(len(prompt_list))]
        each = zip(ids, prompt_list, params_list, strict=True)
        requests = [self.engine.make_request(*args) for args in each]
        try:
            for request in requests:
                self.engine.add(request)
            finished = self._run(len(requests), use_tqdm)
        except BaseException:  # also KeyboardInterrupt: leave nothing running behind
            for request_id in ids:
                self.engine.abort(request_id)
            raise
        return [finished[request_id] for request_id in ids]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Generate the answer to one conversation, or to each of a list, by the model's chat template."""
        conversations: Sequence[Any] = [messages] if messages and isinstance(messages[0], dict) else messages
        tokenizer = self.engine.tokenizer
        prompts: list[Prompt] = []
        for conversation in conversations:
            text = tokenizer.render_chat(
                list(conversation),
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                chat_template=chat_template,
                **(chat_template_kwargs or {}),
            )
            prompts.append(tokenizer.encode(text, add_special_tokens=False))
        return self.generate(prompts, sampling_params, use_tqdm)

    def get_tokenizer(self) -> Tokenizer:
        """Return the tokenizer."""
        return self.engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return what the model's generation_config.json says, else SamplingParams()."""
        return SamplingParams(**self.engine.default_sampling_params)

    def close(self) -> None:
        """Free weights and KV cache; the object is of no use afterwards."""
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
        self, params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
    ) -> list[SamplingParams]:
        if params is None:
            params = self.get_default_sampling_params()
        each = [params] * num_prompts if isinstance(params, SamplingParams) else list(params)
        if len(each) != num_prompts:
            raise ValueError(
                f"there are {num_prompts} prompts but {len(each)} sampling_params; give one, or one each"
            )
        return [replace(p, output_kind=RequestOutputKind.FINAL_ONLY) for p in each]

    def _run(self, num_requests: int, use_tqdm: bool) -> dict[str, RequestOutput]:
        """Step until all have finished."""
        finished: dict[str, RequestOutput] = {}
        num_tokens = 0
        with tqdm(total=num_requests, desc="requests", disable=not use_tqdm, dynamic_ncols=True) as bar:
            while len(finished) < num_requests:
                for output in self.engine.step():
                    finished[output.request_id] = output
                    num_tokens += len(output.outputs[0].token_ids)
                    bar.update()
                    rate = num_tokens / max(bar.format_dict["elapsed"], 1e-9)
                    bar.set_postfix_str(f"{rate:.1f} output tokens/s", refresh=False)
        return finished


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return a list of prompts; a list of whole numbers is one prompt of token ids."""
    if isinstance(prompts, (str, dict)):
        return [prompts]
    each = list(prompts)
    if each and all(isinstance(item, int) for item in each):
        return [[int(item) for item in each if isinstance(item, int)]]
    return [item for item in each if not isinstance(item, int)] if each else []
