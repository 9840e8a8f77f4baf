"""Request: what one user asked for, its sequence, and the output gathered so far.

Turns sampled ids and log-probabilities into the RequestOutput that the user sees.
"""

from dataclasses import dataclass, field
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from cupaged.batch import TokenLogprobs
from cupaged.engine.detokenizer import Detokenizer
from cupaged.engine.tokenizer import Tokenizer
from cupaged.outputs import CompletionOutput, Logprob, Logprobs, RequestMetrics, RequestOutput
from cupaged.sampling_params import RequestOutputKind, SamplingParams
from cupaged.sequence import FinishReason, Sequence


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """One request with one sequence, from add to finish."""

    request_id: str
    prompt: str | None
    sequence: Sequence
    params: SamplingParams
    tokenizer: Tokenizer
    detokenizer: Detokenizer | None  # None: the user wants no text
    eos_token_ids: frozenset[int]
    metrics: RequestMetrics
    prompt_logprobs: list[Logprobs | None] | None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_reported: int = 0  # tokens that an earlier DELTA output carried
    prompt_reported: bool = False

    def append(self, token_ids: list[int], finish_reason: FinishReason | None) -> None:
        """Take newly sampled tokens; a stop string among their text ends the request too."""
        if self.metrics.first_token_time is None:
            self.metrics.first_token_time = perf_counter()
        self.token_ids += token_ids
        self.finish_reason = finish_reason
        by_token = finish_reason == FinishReason.STOP
        last = token_ids[-1]
        if by_token:
            self.stop_reason = None if last in self.eos_token_ids else last
        if self.detokenizer is not None:
            hide_last = by_token and not self.params.include_stop_str_in_output
            stop = self.detokenizer.append(token_ids[:-1] if hide_last else token_ids)
            if stop is not None:
                self.finish_reason, self.stop_reason = FinishReason.STOP, stop
        if self.finish_reason is not None:
            self.finish()

    def finish(self) -> None:
        """Release the text held back and take the time."""
        if self.detokenizer is not None:
            self.detokenizer.finish()
        self.metrics.finished_time = perf_counter()
        self.metrics.num_preemptions = self.sequence.num_preemptions

    def add_logprobs(self, tokens: TokenLogprobs, at: NDArray[np.intp]) -> None:
        """Take the entries `at` of the step's log-probabilities, which are this request's, in order."""
        for i in at.tolist():
            prompt = bool(tokens.is_prompt[i])
            num_top = self.params.prompt_logprobs if prompt else self.params.logprobs
            entry = self._entry(tokens, i, num_top or 0)
            if prompt:
                assert self.prompt_logprobs is not None, "prompt log-probabilities nobody asked for"
                self.prompt_logprobs.append(entry)
            else:
                self.logprobs.append(entry)
                self.cumulative_logprob += float(tokens.logprobs[i, 0])

    def _entry(self, tokens: TokenLogprobs, i: int, num_top: int) -> Logprobs:
        ids = tokens.token_ids[i, : 1 + num_top].tolist()
        values = tokens.logprobs[i, : 1 + num_top].tolist()
        ranks = [int(tokens.ranks[i]), *range(1, 1 + num_top)]
        entry: Logprobs = {}
        for token_id, logprob, rank in zip(ids, values, ranks, strict=True):
            entry.setdefault(token_id, Logprob(logprob, rank, self.tokenizer.token_text(token_id)))
        return entry

    def output(self) -> RequestOutput | None:
        """Return what the user is to see now by output_kind, or None if that is nothing."""
        kind = self.params.output_kind
        finished = self.finish_reason is not None
        if kind == RequestOutputKind.FINAL_ONLY and not finished:
            return None
        delta = kind == RequestOutputKind.DELTA
        start = self.num_reported if delta else 0
        text = ""
        if self.detokenizer is not None:
            text = self.detokenizer.take_delta() if delta else self.detokenizer.text
        self.num_reported = len(self.token_ids)
        show_prompt = not (delta and self.prompt_reported)
        self.prompt_reported = True
        wants_logprobs = self.params.logprobs is not None
        completion = CompletionOutput(
            index=self.sequence.index,
            text=text,
            token_ids=self.token_ids[start:],
            cumulative_logprob=self.cumulative_logprob if wants_logprobs else None,
            logprobs=self.logprobs[start:] if wants_logprobs else None,
            finish_reason=str(self.finish_reason) if finished else None,
            stop_reason=self.stop_reason,
        )
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.sequence.prompt_token_ids.tolist() if show_prompt else [],
            prompt_logprobs=self.prompt_logprobs if show_prompt else None,
            outputs=[completion],
            finished=finished,
            metrics=self.metrics,
        )
