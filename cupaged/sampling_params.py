"""SamplingParams: how the next token of one request is chosen and when it ends; BeamSearchParams: a search.

Field names, defaults and meaning are vLLM's. Fields that a later version brings are accepted at
their neutral value and refused otherwise, so nothing that a user asks for is ignored in silence.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from numbers import Integral, Real
from typing import Any, Literal

MAX_LOGPROBS = 20
MAX_CANDIDATES = 128  # log-probabilities of one token that kernels give: beam_width and the EOS tokens
MAX_STOPS = 1024  # stop strings, or stop token ids, of one request: all others wait while they are searched


class RequestOutputKind(IntEnum):
    """What each RequestOutput of a running request carries."""

    CUMULATIVE = 0  # everything so far, every step
    DELTA = 1  # only what is new since the last output
    FINAL_ONLY = 2  # one output, when the request has finished


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request; raises ValueError naming field, value, limit and remedy."""

    temperature: float = 1.0  # 0 = greedy
    top_p: float = 1.0  # (0, 1]
    top_k: int = 0  # 0 or -1 = all tokens
    min_p: float = 0.0  # [0, 1], relative to the most likely token
    seed: int | None = None  # any 64-bit integer; None = drawn from the engine's seed
    stop: str | Sequence[str] | None = None  # texts that end the output; kept as a tuple
    stop_token_ids: Sequence[int] | None = None  # kept as a tuple
    max_tokens: int | None = 16  # None, or more than fit = up to max_model_len
    min_tokens: int = 0  # no EOS and no stop token before this many
    ignore_eos: bool = False
    logprobs: int | None = None  # top-n of each generated token, 0..MAX_LOGPROBS
    prompt_logprobs: int | None = None  # top-n of each prompt token, 0..MAX_LOGPROBS
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    n: int = 1  # outputs for one prompt; each draws its own random numbers
    best_of: int | None = None  # run so many, >= n, return the n most likely by mean log-probability a token

    # Accepted at these values only, until the feature exists.
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    structured_outputs: Any = None
    truncate_prompt_tokens: int | None = None
    spaces_between_special_tokens: bool = True
    extra_args: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        """Normalise numbers, stop, stop_token_ids and top_k, then validate every field."""
        for item in fields(self):
            object.__setattr__(self, item.name, as_plain(getattr(self, item.name)))
        object.__setattr__(self, "stop", _as_tuple(self, "stop"))
        object.__setattr__(self, "stop_token_ids", _as_tuple(self, "stop_token_ids"))
        if _is_int(self.top_k) and self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        _validate(self)
        for name in ("temperature", "top_p", "min_p"):
            object.__setattr__(self, name, float(getattr(self, name)))
        object.__setattr__(self, "top_p", max(self.top_p, _SMALLEST))

    @property
    def num_sequences(self) -> int:
        """Return how many sequences are run."""
        return self.n if self.best_of is None else self.best_of

    @property
    def chooses(self) -> bool:
        """Return whether more sequences are run than returned (best_of)."""
        return self.num_sequences > self.n


# The sampler computes in float32: the smallest normal number and the largest one.
_SMALLEST, _LARGEST = 2.0**-126, (2 - 2.0**-23) * 2.0**127

_LISTS = {"stop": "a non-empty string or a list of them", "stop_token_ids": "a list of token ids"}

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "repetition_penalty": (1.0,),
    "logit_bias": (None, {}),
    "allowed_token_ids": (None,),
    "bad_words": (None, [], ()),
    "structured_outputs": (None,),
    "truncate_prompt_tokens": (None,),
    "spaces_between_special_tokens": (True,),
    "extra_args": (None, {}),
}


def as_plain(value: Any) -> Any:
    """Return another library's scalar, such as NumPy's, as Python's own; all else as it is."""
    if value is None or isinstance(value, int) or type(value) in (float, str):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    return str(value) if isinstance(value, str) else value


def _as_tuple(params: SamplingParams, name: str) -> tuple[Any, ...]:
    value = getattr(params, name)
    if value is None:
        return ()
    try:
        items = (value,) if isinstance(value, (str, bytes)) else tuple(value)
    except TypeError:
        raise ValueError(f"{name} must be {_LISTS[name]}, got {value!r}") from None
    return tuple(map(as_plain, items))


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_neutral(value: object, neutral: tuple[Any, ...]) -> bool:
    """Return whether value is one of those that ask for nothing; True is not 1, and 0 is 0.0."""
    if _is_int(value):
        return any(type(n) in (int, float) and value == n for n in neutral)
    return any(type(value) is type(n) and value == n for n in neutral)


def _check(ok: bool, name: str, value: object, limit: str) -> None:
    if not ok:
        raise ValueError(f"{name} must be {limit}, got {value!r}")


def _check_number(params: object, name: str, limit: str, low: float, high: float) -> None:
    value = getattr(params, name)
    _check((_is_int(value) or isinstance(value, float)) and low <= value <= high, name, value, limit)


def _validate(params: SamplingParams) -> None:
    for name, neutral in _NEUTRAL.items():
        value = getattr(params, name)
        if not is_neutral(value, neutral):
            raise ValueError(f"{name}={value!r} is not supported yet; leave it at {neutral[0]!r}")
    _check_number(params, "temperature", "a finite float32 >= 0 (0 is greedy)", 0, _LARGEST)
    _check_number(params, "top_p", "in (0, 1]", 5e-324, 1)
    _check_number(params, "min_p", "in [0, 1]", 0, 1)
    top_k = params.top_k
    _check(_is_int(top_k) and 0 <= top_k < 2**31, "top_k", top_k, ">= 1, or 0 or -1 for all")
    seed = params.seed
    _check(
        seed is None or (_is_int(seed) and -(2**63) <= seed < 2**64), "seed", seed, "a 64-bit integer or None"
    )
    most, least = params.max_tokens, params.min_tokens
    _check(most is None or (_is_int(most) and most >= 1), "max_tokens", most, ">= 1 or None")
    _check(_is_int(least) and least >= 0, "min_tokens", least, ">= 0")
    if most is not None and least > most:
        raise ValueError(f"min_tokens is {least} but max_tokens is {most}; lower min_tokens")
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(params, name)
        ok = value is None or (_is_int(value) and 0 <= value <= MAX_LOGPROBS)
        _check(ok, name, value, f"in 0..{MAX_LOGPROBS} or None")
    _validate_stops(params)
    _validate_number_of_outputs(params)


def _validate_number_of_outputs(params: SamplingParams) -> None:
    n, best_of = params.n, params.best_of
    _check(_is_int(n) and 1 <= n < 2**31, "n", n, f"in 1..{2**31 - 1}")
    ok = best_of is None or (_is_int(best_of) and n <= best_of < 2**31)
    _check(ok, "best_of", best_of, f">= n, which is {n}, and below 2**31, or None")
    if params.chooses and params.output_kind == RequestOutputKind.DELTA:
        raise ValueError(
            f"best_of is {best_of} but n is {n}: which are the best is known at the end only; do not stream "
            "(output_kind DELTA), or leave best_of out"
        )


def _validate_stops(params: SamplingParams) -> None:
    for name in _LISTS:
        count = len(getattr(params, name))
        if count > MAX_STOPS:
            raise ValueError(f"{name} has {count} entries, at most {MAX_STOPS} are allowed; give fewer")
    for text in params.stop or ():
        _check(isinstance(text, str) and text != "", "stop", text, _LISTS["stop"])
    name = "stop_token_ids"
    for token_id in params.stop_token_ids or ():
        _check(_is_int(token_id) and 0 <= token_id < 2**31, name, token_id, _LISTS[name])
    if params.stop and not params.detokenize:
        raise ValueError("stop needs text: set detokenize=True, or use stop_token_ids")
    for name in ("ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output"):
        _check(isinstance(getattr(params, name), bool), name, getattr(params, name), "True or False")
    kind = params.output_kind
    _check(isinstance(kind, RequestOutputKind), "output_kind", kind, "a RequestOutputKind")


EarlyStopping = bool | Literal["never"]

_MAX_LENGTH_PENALTY = 16  # of a length of 2**31 tokens, a score is still far from the largest float


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """How one prompt's beams are searched, by transformers' rules; raises ValueError as SamplingParams."""

    beam_width: int  # beams that run at once, and outputs; 1 = greedy
    max_tokens: int  # more than fit = up to max_model_len
    ignore_eos: bool = False
    temperature: float = 0.0  # logits are divided by it; 0 (below 1e-5) and 1 leave them as they are
    length_penalty: float = 1.0  # a score is the log-probability / length ** length_penalty; > 0 favours long
    # When beam_width outputs have ended: True = stop, False = go on while the best beam beats the worst of
    # them at its present length, "never" = while it could at any length.
    early_stopping: EarlyStopping = False
    include_stop_str_in_output: bool = False  # the EOS token in the text

    def __post_init__(self) -> None:
        """Normalise numbers, then validate every field."""
        for item in fields(self):
            object.__setattr__(self, item.name, as_plain(getattr(self, item.name)))
        width, most, stopping = self.beam_width, self.max_tokens, self.early_stopping
        ok = _is_int(width) and 1 <= width <= MAX_CANDIDATES
        _check(ok, "beam_width", width, f"in 1..{MAX_CANDIDATES}")
        _check(_is_int(most) and most >= 1, "max_tokens", most, ">= 1")
        _check_number(self, "temperature", "a finite float32 >= 0", 0, _LARGEST)
        limit = f"in -{_MAX_LENGTH_PENALTY}..{_MAX_LENGTH_PENALTY}"
        _check_number(self, "length_penalty", limit, -_MAX_LENGTH_PENALTY, _MAX_LENGTH_PENALTY)
        ok = isinstance(stopping, bool) or stopping == "never"
        _check(ok, "early_stopping", stopping, "True, False or 'never'")
        for name in ("ignore_eos", "include_stop_str_in_output"):
            _check(isinstance(getattr(self, name), bool), name, getattr(self, name), "True or False")
        for name in ("temperature", "length_penalty"):
            object.__setattr__(self, name, float(getattr(self, name)))
