"""InputProcessor: from what the user sends to a Request that the scheduler can take, or a clear refusal.

Changes nothing but the source of seeds, so any thread may use it.
"""

from collections.abc import Iterable, Mapping
from numbers import Integral
from random import Random
from time import perf_counter
from typing import Any

import numpy as np

from cupaged.engine.detokenizer import Detokenizer
from cupaged.engine.request import Request
from cupaged.engine.tokenizer import Tokenizer
from cupaged.outputs import RequestMetrics
from cupaged.sampling_params import MAX_STOPS, SamplingParams
from cupaged.sequence import Sequence

# Text, token ids, {"prompt": text} or {"prompt_token_ids": ids}; of both, the ids count, the text is shown.
Prompt = str | list[int] | dict[str, Any]


class InputProcessor:
    """Validates and tokenises for one model."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        vocab_size: int,
        max_model_len: int,
        eos_token_ids: Iterable[int],
        seed: int,
    ) -> None:
        """Take what the model allows and ends with; `seed` draws those of requests that bring none."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        # Checkpoints name ids that the model has no row for, or -1 for none; neither can be sampled.
        self.eos_token_ids = frozenset(i for i in eos_token_ids if 0 <= i < vocab_size)
        if len(self.eos_token_ids) > MAX_STOPS:  # of both kinds a device has room for so many
            raise ValueError(
                f"the model names {len(self.eos_token_ids)} EOS tokens, at most {MAX_STOPS} are allowed; "
                "shorten eos_token_id in config.json or generation_config.json"
            )
        self._seeds = Random(seed % 2**64)

    def make_request(self, request_id: str, prompt: Prompt, params: SamplingParams) -> Request:
        """Return a new request; ValueError says what is wrong with prompt or params."""
        text, token_ids = self._tokenise(prompt)
        self._check_prompt(token_ids)
        sequence = self._make_sequence(request_id, token_ids, params)
        detokenizer = None
        if params.detokenize:
            detokenizer = Detokenizer(
                self._tokenizer,
                token_ids,
                skip_special_tokens=params.skip_special_tokens,
                stop=tuple(params.stop or ()),
                include_stop_str_in_output=params.include_stop_str_in_output,
                min_tokens=params.min_tokens,
            )
        return Request(
            request_id=request_id,
            prompt=text,
            prompt_token_ids=token_ids,
            sequence=sequence,
            params=params,
            tokenizer=self._tokenizer,
            detokenizer=detokenizer,
            eos_token_ids=frozenset() if params.ignore_eos else self.eos_token_ids,
            metrics=RequestMetrics(arrival_time=perf_counter()),
            prompt_logprobs=[None] if params.prompt_logprobs is not None else None,
        )

    def _make_sequence(self, request_id: str, token_ids: list[int], params: SamplingParams) -> Sequence:
        stop_ids = set(params.stop_token_ids or ())
        self._check_token_ids("stop_token_ids", stop_ids)
        banned = stop_ids | self.eos_token_ids if params.min_tokens else set[int]()
        if len(banned) >= self._vocab_size:
            raise ValueError(
                f"stop_token_ids has all {self._vocab_size} tokens, so that min_tokens={params.min_tokens} "
                "leaves none to begin with; drop one of the two"
            )
        room = self._max_model_len - len(token_ids)
        if params.min_tokens > room:
            raise ValueError(
                f"min_tokens is {params.min_tokens} but only {room} tokens fit after a prompt of "
                f"{len(token_ids)} (max_model_len {self._max_model_len}); lower min_tokens or raise "
                "max_model_len"
            )
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        ends = stop_ids if params.ignore_eos else stop_ids | self.eos_token_ids
        return Sequence(
            request_id=request_id,
            prompt_token_ids=np.array(token_ids, np.int32),
            params=params,
            max_total_tokens=len(token_ids) + max_tokens,
            stop_token_ids=tuple(sorted(ends)),
            banned_token_ids=tuple(sorted(banned)),
            seed=self._seeds.getrandbits(64) if params.seed is None else params.seed % 2**64,
        )

    def _tokenise(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """Return the prompt's text, if there is one, and its token ids."""
        if isinstance(prompt, str):
            return prompt, self._tokenizer.encode(prompt)
        if not isinstance(prompt, Mapping):
            return None, _as_ids(prompt, "a prompt is text or a list of token ids")
        given = {key: value for key, value in prompt.items() if value is not None}
        if not given or not given.keys() <= {"prompt", "prompt_token_ids"}:
            raise ValueError(
                "a prompt dict needs 'prompt' or 'prompt_token_ids' and nothing else, got "
                f"{sorted(map(str, given))}"
            )
        text = given.get("prompt")
        if not isinstance(text, (str, type(None))):
            raise ValueError(f"'prompt' is text, got {type(text).__name__}")
        if "prompt_token_ids" in given:
            return text, _as_ids(given["prompt_token_ids"], "'prompt_token_ids' is a list of token ids")
        return self._tokenise(given["prompt"])

    def _check_prompt(self, token_ids: list[int]) -> None:
        if not token_ids:
            raise ValueError("the prompt is empty; give at least one token")
        if len(token_ids) >= self._max_model_len:
            raise ValueError(
                f"the prompt has {len(token_ids)} tokens but max_model_len is {self._max_model_len}, which "
                f"must also hold at least one new token; shorten it or raise max_model_len"
            )
        self._check_token_ids("prompt_token_ids", token_ids)

    def _check_token_ids(self, name: str, token_ids: Iterable[int]) -> None:
        limit = self._vocab_size
        for token_id in token_ids:
            if not 0 <= token_id < limit:
                raise ValueError(f"{name} contains {token_id}, but the model's ids are 0..{limit - 1}")


def _as_ids(source: Any, wanted: str) -> list[int]:
    is_array = isinstance(source, np.ndarray) and source.ndim == 1
    if not is_array and not isinstance(source, (list, tuple, range)):
        raise ValueError(f"{wanted}, got {type(source).__name__}")
    return [_as_id(token_id) for token_id in source]


def _as_id(value: Any) -> int:
    if type(value) is int:
        return value
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ValueError(f"prompt_token_ids must be whole numbers, got {value!r}")
    return int(value)
