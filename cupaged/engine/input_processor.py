"""InputProcessor: from what the user sends to a request that the scheduler can take, or a clear refusal.

Changes nothing but the source of seeds, so any thread may use it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from numbers import Integral
from random import Random
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from cupaged.engine.beam_search import BeamRequest, beam_group
from cupaged.engine.detokenizer import Detokenizer
from cupaged.engine.request import Completion, Request
from cupaged.engine.tokenizer import Tokenizer
from cupaged.outputs import RequestMetrics
from cupaged.sampling_params import MAX_STOPS, BeamSearchParams, SamplingParams, as_plain
from cupaged.sequence import SequenceGroup

# Text, token ids, {"prompt": text} or {"prompt_token_ids": ids}; of both, the ids count, the text is shown.
# Beside them "cache_salt": only prompts of the same salt share cached prefixes.
Prompt = str | list[int] | dict[str, Any]

MAX_SALT = 1024  # characters of a cache_salt


class _Prompt(NamedTuple):
    """A prompt as it was read."""

    text: str | None  # None if it came as token ids
    token_ids: list[int]
    cache_salts: tuple[tuple[str, str], ...]


class InputProcessor:
    """Validates and tokenises for one model."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        vocab_size: int,
        max_model_len: int,
        max_num_seqs: int,
        eos_token_ids: Iterable[int],
        seed: int,
    ) -> None:
        """Take what the model allows and ends with; `seed` draws those of requests that bring none."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._max_num_seqs = max_num_seqs
        # Checkpoints name ids that the model has no row for, or -1 for none; neither can be sampled.
        self.eos_token_ids = frozenset(i for i in eos_token_ids if 0 <= i < vocab_size)
        if len(self.eos_token_ids) > MAX_STOPS:  # of both kinds a device has room for so many
            raise ValueError(
                f"the model names {len(self.eos_token_ids)} EOS tokens, at most {MAX_STOPS} are allowed; "
                "shorten eos_token_id in config.json or generation_config.json"
            )
        self._seeds = Random(seed % 2**64)

    def make_request(
        self, request_id: str, prompt: Prompt, params: SamplingParams, priority: int = 0
    ) -> Request:
        """Return a new request; ValueError says what is wrong with prompt, params or priority."""
        read = self._read(prompt)
        if params.num_sequences > self._max_num_seqs:  # here, before so many are made
            name = "n" if params.best_of is None else "best_of"
            raise ValueError(
                f"{name} is {params.num_sequences} but max_num_seqs is {self._max_num_seqs}, and all of them "
                f"run at once; lower {name} or raise max_num_seqs"
            )
        eos_token_ids = self._ends(params.ignore_eos)
        group = self._make_group(request_id, read, params, eos_token_ids, _as_priority(priority))
        return Request(
            request_id=request_id,
            prompt=read.text,
            prompt_token_ids=read.token_ids,
            group=group,
            params=params,
            tokenizer=self._tokenizer,
            completions=[
                Completion(
                    params=params,
                    detokenizer=self._make_detokenizer(read.token_ids, params),
                    eos_token_ids=eos_token_ids,
                )
                for _ in range(params.num_sequences)
            ],
            metrics=RequestMetrics(arrival_time=perf_counter()),
            prompt_logprobs=[None] if params.prompt_logprobs is not None else None,
        )

    def make_beam_request(
        self, request_id: str, prompt: Prompt, params: BeamSearchParams, priority: int = 0
    ) -> BeamRequest:
        """Return a new beam search; ValueError says what is wrong with prompt, params or priority."""
        read = self._read(prompt)
        eos_token_ids = self._ends(params.ignore_eos)
        group = beam_group(
            request_id,
            read.token_ids,
            params,
            eos_token_ids=eos_token_ids,
            vocab_size=self._vocab_size,
            max_model_len=self._max_model_len,
            cache_salts=read.cache_salts,
            priority=_as_priority(priority),
        )
        return BeamRequest(
            request_id=request_id,
            prompt=read.text,
            prompt_token_ids=read.token_ids,
            group=group,
            params=params,
            tokenizer=self._tokenizer,
            eos_token_ids=eos_token_ids,
            metrics=RequestMetrics(arrival_time=perf_counter()),
        )

    def _make_detokenizer(self, token_ids: list[int], params: SamplingParams) -> Detokenizer | None:
        if not params.detokenize:
            return None
        return Detokenizer(
            self._tokenizer,
            token_ids,
            skip_special_tokens=params.skip_special_tokens,
            stop=tuple(params.stop or ()),
            include_stop_str_in_output=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )

    def _ends(self, ignore_eos: bool) -> frozenset[int]:
        return frozenset() if ignore_eos else self.eos_token_ids

    def _make_group(
        self,
        request_id: str,
        prompt: _Prompt,
        params: SamplingParams,
        eos_token_ids: frozenset[int],
        priority: int,
    ) -> SequenceGroup:
        stop_ids = set(params.stop_token_ids or ())
        self._check_token_ids("stop_token_ids", stop_ids)
        banned = stop_ids | self.eos_token_ids if params.min_tokens else set[int]()
        if len(banned) >= self._vocab_size:
            raise ValueError(
                f"stop_token_ids has all {self._vocab_size} tokens, so that min_tokens={params.min_tokens} "
                "leaves none to begin with; drop one of the two"
            )
        num_prompt = len(prompt.token_ids)
        room = self._max_model_len - num_prompt
        if params.min_tokens > room:
            raise ValueError(
                f"min_tokens is {params.min_tokens} but only {room} tokens fit after a prompt of "
                f"{num_prompt} (max_model_len {self._max_model_len}); lower min_tokens or raise max_model_len"
            )
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        if params.chooses and params.logprobs is None:
            params = replace(params, logprobs=0)  # to find the best of them
        return SequenceGroup(
            request_id=request_id,
            prompt_token_ids=np.array(prompt.token_ids, np.int32),
            params=params,
            max_total_tokens=num_prompt + max_tokens,
            stop_token_ids=tuple(sorted(stop_ids | eos_token_ids)),
            banned_token_ids=tuple(sorted(banned)),
            seed=self._seeds.getrandbits(64) if params.seed is None else params.seed % 2**64,
            num_sequences=params.num_sequences,
            priority=priority,
            cache_salts=prompt.cache_salts,
        )

    def _read(self, prompt: Prompt) -> _Prompt:
        """Return the prompt's text, if there is one, its token ids and its salts."""
        salt = None
        if isinstance(prompt, Mapping):
            prompt = {key: value for key, value in prompt.items() if value is not None}
            salt = prompt.pop("cache_salt", None)
        text, token_ids = self._tokenise(prompt)
        self._check_prompt(token_ids)
        return _Prompt(text, token_ids, () if salt is None else (("cache_salt", _as_salt(salt)),))

    def _tokenise(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, str):
            return prompt, self._tokenizer.encode(prompt)
        if not isinstance(prompt, Mapping):
            return None, _as_ids(prompt, "a prompt is text or a list of token ids")
        if not prompt or not prompt.keys() <= {"prompt", "prompt_token_ids"}:
            raise ValueError(
                "a prompt dict needs 'prompt' or 'prompt_token_ids', may have 'cache_salt' and nothing else, "
                f"got {sorted(map(str, prompt))}"
            )
        text = prompt.get("prompt")
        if not isinstance(text, (str, type(None))):
            raise ValueError(f"'prompt' is text, got {type(text).__name__}")
        if "prompt_token_ids" in prompt:
            return text, _as_ids(prompt["prompt_token_ids"], "'prompt_token_ids' is a list of token ids")
        return self._tokenise(prompt["prompt"])

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


def _as_salt(value: Any) -> str:
    if not isinstance(value, str) or not 1 <= len(value) <= MAX_SALT:
        shown = f"{len(value)} characters" if isinstance(value, str) else repr(value)
        raise ValueError(f"cache_salt must be text of 1..{MAX_SALT} characters, got {shown}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        bad = value[error.start]
        raise ValueError(f"cache_salt has half a surrogate pair, {bad!r}; remove it") from None
    return str(value)


def _as_priority(value: Any) -> int:
    value = as_plain(value)
    if type(value) is not int or not -(2**63) <= value < 2**63:
        raise ValueError(f"priority must be a whole number of 64 bits, got {value!r}")
    return value


def _as_id(value: Any) -> int:
    if type(value) is int:
        return value
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ValueError(f"prompt_token_ids must be whole numbers, got {value!r}")
    return int(value)
