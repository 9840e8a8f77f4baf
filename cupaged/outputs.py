"""What a user gets back: RequestOutput and its parts, in vLLM's names."""

from dataclasses import dataclass, field
from typing import NamedTuple


class Logprob(NamedTuple):
    """Log-probability of one token, its rank among all (1 = most likely) and its text."""

    logprob: float
    rank: int
    decoded_token: str


Logprobs = dict[int, Logprob]  # by token id: the token itself and the top n


@dataclass(slots=True)
class CompletionOutput:
    """One generated sequence; with output_kind DELTA, text, token_ids and logprobs are only the new part."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[Logprobs] | None = None
    finish_reason: str | None = None  # "stop", "length", "abort"
    stop_reason: int | str | None = None  # the stop token id or stop string; None for EOS


@dataclass(slots=True)
class RequestMetrics:
    """Times of one request in seconds of time.perf_counter, None until they have happened."""

    arrival_time: float
    first_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0


@dataclass(slots=True)
class RequestOutput:
    """The state of a request after a step."""

    request_id: str
    prompt: str | None  # None if it came as token ids
    prompt_token_ids: list[int]  # with output_kind DELTA, empty after the first output
    prompt_logprobs: list[Logprobs | None] | None  # one a prompt token, None first; DELTA: first output only
    outputs: list[CompletionOutput] = field(default_factory=list)  # n by index; DELTA: those with news
    finished: bool = False  # all of them
    metrics: RequestMetrics | None = None
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache


@dataclass(slots=True)
class BeamSearchSequence:
    """One output of a beam search."""

    tokens: list[int]  # prompt and output, and the EOS token that ended it
    text: str  # of all of them, that EOS token's only with include_stop_str_in_output
    cum_logprob: float  # of the output, without length penalty
    finish_reason: str | None  # "stop" by EOS, "length"
    stop_reason: int | str | None = None  # None for EOS


@dataclass(slots=True)
class BeamSearchOutput:
    """The outputs of one beam search."""

    sequences: list[BeamSearchSequence]  # best first
