"""Request: what one user asked for, its group of sequences, and the outputs gathered so far.

Turns sampled ids and log-probabilities into the RequestOutput that the user sees.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter

from cupaged.engine.detokenizer import Detokenizer
from cupaged.engine.tokenizer import Tokenizer
from cupaged.outputs import CompletionOutput, Logprob, Logprobs, RequestMetrics, RequestOutput
from cupaged.sampling_params import RequestOutputKind, SamplingParams
from cupaged.sequence import FinishReason, SequenceGroup


@dataclass(slots=True, eq=False, kw_only=True)
class Completion:
    """What one sequence has generated, and how much of it the user has seen."""

    params: SamplingParams
    detokenizer: Detokenizer | None  # None: the user wants no text
    eos_token_ids: frozenset[int]  # none with ignore_eos
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)  # empty unless asked for
    cumulative_logprob: float = 0.0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_reported: int = 0  # tokens that an earlier output carried

    def append(self, token_ids: list[int], finish_reason: FinishReason | None) -> None:
        """Take newly sampled tokens; a stop string among their text ends the sequence too."""
        self.token_ids += token_ids
        by_token = finish_reason is not None and finish_reason == FinishReason.STOP
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
        self.finish_reason = finish_reason

    @property
    def has_news(self) -> bool:
        """Return whether there are tokens that no output has carried."""
        return self.num_reported < len(self.token_ids)

    @property
    def mean_logprob(self) -> float:
        """Return the mean log-probability of its tokens, by which best_of ranks."""
        return self.cumulative_logprob / len(self.token_ids)

    def output(self, index: int, *, delta: bool) -> CompletionOutput:
        """Return all of it, or with `delta` what is new since the last call, as output `index`."""
        start = self.num_reported if delta else 0
        self.num_reported = len(self.token_ids)
        text = ""
        if self.detokenizer is not None:
            text = self.detokenizer.take_delta() if delta else self.detokenizer.text
        wants_logprobs = self.params.logprobs is not None
        return CompletionOutput(
            index=index,
            text=text,
            token_ids=self.token_ids[start:],
            cumulative_logprob=self.cumulative_logprob if wants_logprobs else None,
            logprobs=self.logprobs[start:] if wants_logprobs else None,
            finish_reason=None if self.finish_reason is None else str(self.finish_reason),
            stop_reason=self.stop_reason,
        )


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """One request, from add to finish."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    group: SequenceGroup  # its params may ask for log-probabilities that the user's do not
    params: SamplingParams
    tokenizer: Tokenizer
    completions: list[Completion]  # by the sequence's index
    metrics: RequestMetrics
    prompt_logprobs: list[Logprobs | None] | None
    prompt_reported: bool = False
    num_unfinished: int = field(init=False)  # sequences
    chooses: bool = field(init=False)  # the best of its sequences
    shows_news_only: bool = field(init=False)
    shows_end_only: bool = field(init=False)

    def __post_init__(self) -> None:
        """Note what every step asks for."""
        params = self.params
        self.num_unfinished = params.num_sequences
        self.chooses = params.chooses
        self.shows_news_only = params.output_kind == RequestOutputKind.DELTA
        self.shows_end_only = self.chooses or params.output_kind == RequestOutputKind.FINAL_ONLY

    @property
    def finished(self) -> bool:
        """Return whether all sequences have ended."""
        return self.num_unfinished == 0

    def append(
        self, index: int, token_ids: list[int], finish_reason: FinishReason | None
    ) -> FinishReason | None:
        """Take tokens that sequence `index` sampled; return why it has ended, if it has."""
        if self.metrics.first_token_time is None:
            self.metrics.first_token_time = perf_counter()
        completion = self.completions[index]
        completion.append(token_ids, finish_reason)
        if completion.finish_reason is not None:
            self.num_unfinished -= 1
            if self.finished:
                self.metrics.finished_time = perf_counter()
                self.metrics.num_preemptions = self.group.num_preemptions
        return completion.finish_reason

    def add_logprobs(
        self, index: int, is_prompt: bool, token_ids: list[int], logprobs: list[float], rank: int
    ) -> None:
        """Take the log-probability of the next prompt token or of the one that sequence `index` samples.

        It comes first, with its `rank`, then the top ones; there may be more of them than this request wants.
        """
        wanted = self.params.prompt_logprobs if is_prompt else self.params.logprobs
        if is_prompt:
            assert self.prompt_logprobs is not None, "prompt log-probabilities nobody asked for"
            self.prompt_logprobs.append(self._entry(wanted or 0, token_ids, logprobs, rank))
            return
        completion = self.completions[index]
        completion.cumulative_logprob += logprobs[0]
        if wanted is not None:
            completion.logprobs.append(self._entry(wanted, token_ids, logprobs, rank))

    def _entry(self, num_top: int, token_ids: list[int], logprobs: list[float], rank: int) -> Logprobs:
        text = self.tokenizer.token_text
        own = token_ids[0]
        entry: Logprobs = {own: Logprob(logprobs[0], rank, text(own))}
        for n in range(1, min(1 + num_top, len(token_ids))):  # a tiny vocabulary has fewer
            if token_ids[n] != own:
                entry[token_ids[n]] = Logprob(logprobs[n], n, text(token_ids[n]))
        return entry

    def output(self) -> RequestOutput | None:
        """Return what the user is to see now by output_kind, or None if that is nothing."""
        finished = self.finished
        if self.shows_end_only and not finished:
            return None
        delta = self.shows_news_only
        show_prompt = not (delta and self.prompt_reported)
        self.prompt_reported = True
        completions: Sequence[Completion] = self.completions
        if self.chooses:
            by_likelihood = sorted(completions, key=lambda completion: -completion.mean_logprob)
            completions = by_likelihood[: self.params.n]
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids if show_prompt else [],
            prompt_logprobs=self.prompt_logprobs if show_prompt else None,
            outputs=[
                completion.output(index, delta=delta)
                for index, completion in enumerate(completions)
                if completion.has_news or not delta
            ],
            finished=finished,
            metrics=self.metrics,
            num_cached_tokens=self.group.num_cached_tokens,
        )
