"""Beam search: BeamSearch, the selection by transformers' rules, and BeamRequest, which the engine advances.

Says which beams go on and with which tokens; their blocks are the scheduler's affair, their log-probabilities
the worker's.
"""

from collections.abc import Set
from dataclasses import dataclass, field
from time import perf_counter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cupaged.engine.detokenizer import Detokenizer
from cupaged.engine.tokenizer import Tokenizer
from cupaged.outputs import CompletionOutput, RequestMetrics, RequestOutput
from cupaged.sampling_params import MAX_CANDIDATES, BeamSearchParams, SamplingParams
from cupaged.sequence import FinishReason, SequenceGroup


class Beam(NamedTuple):
    """An output that goes on."""

    token_ids: list[int]
    logprob: float  # of all of them together


class Ended(NamedTuple):
    """An output that has ended, by EOS, which it includes, or by its length."""

    token_ids: list[int]
    logprob: float
    score: float  # logprob / length ** length_penalty
    reason: FinishReason


class Continuation(NamedTuple):
    """The beams after a step: new beam i is the old beam parents[i] and then token_ids[i]."""

    parents: list[int]
    token_ids: list[int]


class BeamSearch:
    """The beams of one prompt between steps, and the best outputs that have ended."""

    def __init__(self, params: BeamSearchParams, max_tokens: int, eos_token_ids: Set[int]) -> None:
        """Begin with one beam that has no token; outputs have at most `max_tokens`."""
        self.beams = [Beam([], 0.0)]
        self.ended: list[Ended] = []  # best first, at most beam_width
        self._width = params.beam_width
        self._max_tokens = max_tokens
        self._eos_token_ids = eos_token_ids
        self._penalty = params.length_penalty
        # One beam is greedy search: it ends with its first EOS token.
        self._stops_when_full = params.early_stopping is True or params.beam_width == 1
        self._hopes_for_longest = params.early_stopping == "never" and params.length_penalty > 0

    def advance(self, token_ids: NDArray[np.int32], logprobs: NDArray[np.float32]) -> Continuation | None:
        """Take each beam's most likely next tokens, [num_beams, beam_width + EOS tokens]; None: finished.

        So many of each are enough: whatever is among the best beam_width candidates of all that do not end,
        or among the best beam_width of all, is among the best so many of its own beam.
        """
        num_tokens = len(self.beams[0].token_ids) + 1  # of every candidate
        is_last = num_tokens == self._max_tokens
        before = np.array([[beam.logprob] for beam in self.beams])
        sums = before + logprobs  # float64[num_beams, k]
        beams: list[Beam] = []
        going_on = Continuation([], [])
        # Best first; of equals the earlier beam's, then its own better one.
        for rank, place in enumerate(np.argsort(-sums, axis=None, kind="stable").tolist()):
            parent, column = divmod(place, sums.shape[1])
            token_id, logprob = int(token_ids[parent, column]), float(sums[parent, column])
            is_eos = token_id in self._eos_token_ids
            if is_eos or is_last:
                # Further down are only understudies of those that end.
                if rank < self._width:
                    reason = FinishReason.STOP if is_eos else FinishReason.LENGTH
                    score = logprob / num_tokens**self._penalty
                    self.ended.append(
                        Ended([*self.beams[parent].token_ids, token_id], logprob, score, reason)
                    )
            elif len(beams) < self._width:
                beams.append(Beam([*self.beams[parent].token_ids, token_id], logprob))
                going_on.parents.append(parent)
                going_on.token_ids.append(token_id)
            if rank + 1 >= self._width and (is_last or len(beams) == self._width):
                break
        self.ended.sort(key=lambda ended: -ended.score)
        del self.ended[self._width :]
        self.beams = beams
        return None if is_last or self._is_settled(num_tokens) else going_on

    def _is_settled(self, num_tokens: int) -> bool:
        """Return whether beam_width outputs have ended and no beam is expected to beat one of them."""
        if len(self.ended) < self._width or self._stops_when_full:
            return len(self.ended) == self._width
        length = self._max_tokens if self._hopes_for_longest else num_tokens
        return not self.beams[0].logprob / length**self._penalty > self.ended[-1].score


def beam_group(
    request_id: str,
    prompt_token_ids: list[int],
    params: BeamSearchParams,
    *,
    eos_token_ids: Set[int],
    vocab_size: int,
    max_model_len: int,
    cache_salts: tuple[tuple[str, str], ...],
    priority: int,
) -> SequenceGroup:
    """Return what the scheduler runs; ValueError if each beam needs more log-probabilities than there are."""
    num_candidates = params.beam_width + len(eos_token_ids)
    if num_candidates > min(MAX_CANDIDATES, vocab_size):
        raise ValueError(
            f"beam_width is {params.beam_width} and there are {len(eos_token_ids)} EOS tokens, so that each "
            f"beam needs the {num_candidates} most likely tokens, but at most "
            f"{min(MAX_CANDIDATES, vocab_size)} can be had (vocabulary {vocab_size}); lower beam_width"
            + (" or set ignore_eos" if eos_token_ids else "")
        )
    return SequenceGroup(
        request_id=request_id,
        prompt_token_ids=np.array(prompt_token_ids, np.int32),
        params=SamplingParams(temperature=params.temperature),
        max_total_tokens=min(len(prompt_token_ids) + params.max_tokens, max_model_len),
        num_sequences=params.beam_width,
        is_beam=True,
        num_candidates=num_candidates,
        cache_salts=cache_salts,
        priority=priority,
    )


@dataclass(slots=True, eq=False, kw_only=True)
class BeamRequest:
    """One beam search from add to finish."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    group: SequenceGroup
    params: BeamSearchParams
    tokenizer: Tokenizer
    eos_token_ids: Set[int]  # none with ignore_eos
    metrics: RequestMetrics
    _search: BeamSearch = field(init=False)
    # By beam: its most likely next tokens and their log-probabilities, since the last advance.
    _reported: dict[int, tuple[list[int], list[float]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Begin the search."""
        max_tokens = self.group.max_total_tokens - len(self.prompt_token_ids)
        self._search = BeamSearch(self.params, max_tokens, self.eos_token_ids)

    def add_logprobs(
        self, index: int, is_prompt: bool, token_ids: list[int], logprobs: list[float], _rank: int
    ) -> None:
        """Take a beam's log-probabilities: first the sampled token's, which counts for nothing, then the top.

        A beam that was preempted between its step and its siblings' reports again.
        """
        assert not is_prompt, "prompt log-probabilities nobody asked for"
        top = slice(1, 1 + self.group.num_candidates)  # there may be more, for others
        self._reported[index] = token_ids[top], logprobs[top]

    @property
    def is_ready(self) -> bool:
        """Return whether every beam has reported since the last advance."""
        return len(self._reported) == len(self._search.beams)

    def advance(self) -> Continuation | None:
        """Choose how the beams go on, None if the search has finished."""
        now = perf_counter()
        if self.metrics.first_token_time is None:
            self.metrics.first_token_time = now
        reported = [self._reported[index] for index in range(len(self._search.beams))]
        self._reported.clear()
        token_ids, logprobs = zip(*reported, strict=True)
        going_on = self._search.advance(np.array(token_ids, np.int32), np.array(logprobs, np.float32))
        if going_on is None:
            self.metrics.finished_time = now
            self.metrics.num_preemptions = self.group.num_preemptions
        return going_on

    def output(self) -> RequestOutput:
        """Return the outputs of a search that has finished, best first."""
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            prompt_logprobs=None,
            outputs=[
                CompletionOutput(
                    index=index,
                    text=self._text(ended),
                    token_ids=ended.token_ids,
                    cumulative_logprob=ended.logprob,
                    finish_reason=str(ended.reason),
                )
                for index, ended in enumerate(self._search.ended)
            ],
            finished=True,
            metrics=self.metrics,
            num_cached_tokens=self.group.num_cached_tokens,
        )

    def _text(self, ended: Ended) -> str:
        hides_last = ended.reason == FinishReason.STOP and not self.params.include_stop_str_in_output
        detokenizer = Detokenizer(self.tokenizer, self.prompt_token_ids)
        detokenizer.append(ended.token_ids[:-1] if hides_last else ended.token_ids)
        detokenizer.finish()
        return detokenizer.text
