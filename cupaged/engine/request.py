"""Request: what one user asked for, its sequence, and the output gathered so far.

Turns sampled ids and log-probabilities into the RequestOutput that the user sees.
"""

from dataclasses import dataclass, field
from time import perf_counter

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
    prompt_token_ids: list[int]
    sequence: Sequence
    params: SamplingParams
    tokenizer: Tokenizer
    detokenizer: Detokenizer | None  # None: the user wants no text
    eos_token_ids: frozenset[int]  # none with ignore_eos
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
        by_token = finish_reason == FinishReason.STOP
        if by_token and token_ids[-1] not in self.eos_token_ids:
            self.stop_reason = token_ids[-1]
        detokenizer = self.detokenizer
        if detokenizer is not None:
            hide_last = by_token and not self.params.include_stop_str_in_output
            detokenizer.append(token_ids[:-1] if hide_last else token_ids)
            if finish_reason is not None:
                detokenizer.finish()
            if detokenizer.stop_string is not None:
                finish_reason, self.stop_reason = FinishReason.STOP, detokenizer.stop_string
        if finish_reason is not None:
            self.finish_reason = finish_reason
            self.metrics.finished_time = perf_counter()
            self.metrics.num_preemptions = self.sequence.num_preemptions

    def add_logprobs(self, is_prompt: bool, token_ids: list[int], logprobs: list[float], rank: int) -> None:
        """Take the next prompt token's or sampled token's log-probability, which is first, and the top ones.

        `rank` is the first one's; there may be more top ones than this request wants.
        """
        num_top = (self.params.prompt_logprobs if is_prompt else self.params.logprobs) or 0
        text = self.tokenizer.token_text
        own = token_ids[0]
        entry: Logprobs = {own: Logprob(logprobs[0], rank, text(own))}
        for n in range(1, min(1 + num_top, len(token_ids))):  # a tiny vocabulary has fewer
            if token_ids[n] != own:
                entry[token_ids[n]] = Logprob(logprobs[n], n, text(token_ids[n]))
        if is_prompt:
            assert self.prompt_logprobs is not None, "prompt log-probabilities nobody asked for"
            self.prompt_logprobs.append(entry)
        else:
            self.logprobs.append(entry)
            self.cumulative_logprob += logprobs[0]

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
            prompt_token_ids=self.prompt_token_ids if show_prompt else [],
            prompt_logprobs=self.prompt_logprobs if show_prompt else None,
            outputs=[completion],
            finished=finished,
            metrics=self.metrics,
        )
