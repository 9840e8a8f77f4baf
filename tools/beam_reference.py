"""transformers' beam search, spelled out over whole vocabularies, and how near to a tie any choice is."""

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tools.beam_cases import BeamCase

Logprobs = NDArray[np.float64]  # [vocab_size]


class Output(NamedTuple):
    """One of the outputs, best first."""

    token_ids: tuple[int, ...]
    logprob: float
    score: float


class Candidate(NamedTuple):
    """A beam and one more token."""

    token_ids: tuple[int, ...]
    logprob: float
    ends: bool


def log_softmax(logits: NDArray[np.float32]) -> Logprobs:
    """Return the log-probabilities of one row of logits."""
    shifted = logits.astype(np.float64) - logits.max()
    logprobs: Logprobs = shifted - np.log(np.exp(shifted).sum())
    return logprobs


class Reference:
    """A search over `logprobs_after`, the log-probabilities of what follows an output."""

    def __init__(self, logprobs_after: Callable[[tuple[int, ...]], Logprobs], case: BeamCase) -> None:
        """Run the search."""
        self._logprobs_after = logprobs_after
        self._width, self._max_tokens, self._eos = case.beam_width, case.max_tokens, case.eos_token_ids
        self._penalty, self._early_stopping = case.length_penalty, case.early_stopping
        self.least_gap = float(
            "inf"
        )  # between a value that was chosen, or above another, and one that was not
        self.outputs: list[Output] = []
        self.num_steps = 0
        beams: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
        while beams:
            self.num_steps += 1
            beams = self._step(beams)

    def _step(self, beams: list[tuple[tuple[int, ...], float]]) -> list[tuple[tuple[int, ...], float]]:
        """Return the next beams, none if the search is over."""
        length = self.num_steps
        candidates = sorted(
            (
                Candidate(
                    (*token_ids, token_id),
                    logprob + float(more),
                    token_id in self._eos or length == self._max_tokens,
                )
                for token_ids, logprob in beams
                for token_id, more in enumerate(self._logprobs_after(token_ids))
            ),
            key=lambda candidate: -candidate.logprob,
        )
        first, rest = candidates[: self._width], candidates[self._width :]
        if any(candidate.ends for candidate in (*first, *rest[:1])):
            self._note_gap(first[-1].logprob, rest[0].logprob)
        ended = [
            Output(candidate.token_ids, candidate.logprob, candidate.logprob / length**self._penalty)
            for candidate in first
            if candidate.ends
        ]
        merged = sorted((*self.outputs, *ended), key=lambda output: -output.score)
        for better, worse in pairwise(merged[: self._width + 1]):
            self._note_gap(better.score, worse.score)
        self.outputs = merged[: self._width]
        going_on = [candidate for candidate in candidates if not candidate.ends]
        if not going_on:
            return []
        self._note_gap(going_on[self._width - 1].logprob, going_on[self._width].logprob)
        if self._is_over(going_on[0].logprob):
            return []
        return [(candidate.token_ids, candidate.logprob) for candidate in going_on[: self._width]]

    def _is_over(self, best: float) -> bool:
        if len(self.outputs) < self._width:
            return False
        if self._early_stopping is True or self._width == 1:
            return True
        length = self.num_steps
        if self._early_stopping == "never" and self._penalty > 0:
            length = self._max_tokens
        hope: float = best / length**self._penalty
        worst = self.outputs[-1].score
        self._note_gap(hope, worst)
        return hope <= worst

    def _note_gap(self, one: float, other: float) -> None:
        """Keep the least, as a share of the values where they are large."""
        self.least_gap = min(self.least_gap, abs(one - other) / max(1.0, abs(one)))
