"""Sampler: from a step's hidden states to its StepOutput, logits in chunks of bounded memory."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cupaged.backend.base import Array, Backend
from cupaged.batch import Batch, Flag, StepOutput, TokenLogprobs
from cupaged.models import Model

SAMPLES = np.int32(Flag.SAMPLES)  # 1: as a number, the tokens that a sequence samples
LOGITS_CHUNK = 256  # rows of logits alive at once; each chunk reads the head's weights anew

Fetch = Callable[[], NDArray[Any]]


class LogprobChunk(NamedTuple):
    """The log-probabilities of a chunk of logits rows, on their way to the host."""

    keep: NDArray[np.bool_]  # [at most LOGITS_CHUNK], the rows that somebody asked for
    token_ids: Fetch
    logprobs: Fetch
    ranks: Fetch


class SampledStep(NamedTuple):
    """A step whose last operation has begun; the device may still be at it."""

    host: Batch
    token_ids: Fetch  # int32[num_seqs or more]
    chunks: list[LogprobChunk]

    def result(self) -> StepOutput:
        """Wait for the step and return what it gives back; the batch's buffer must be as it was."""
        host = self.host
        num_tokens = host.flags & SAMPLES
        token_ids = np.where(num_tokens, self.token_ids()[: host.num_seqs], -1)
        return StepOutput(token_ids.reshape(-1, 1), num_tokens, self._logprobs() if self.chunks else None)

    def _logprobs(self) -> TokenLogprobs:
        host, asked = self.host, _num_top(self.host) >= 0
        parts = [[fetch()[: len(keep)][keep] for fetch in fetches] for keep, *fetches in self.chunks]
        columns = map(np.concatenate, zip(*parts, strict=True))  # token_ids, logprobs, ranks
        return TokenLogprobs(host.logit_seq[asked], host.logit_target[asked] >= 0, *columns)


class Sampler:
    """Owns each row's last token, on the device."""

    def __init__(self, backend: Backend, model: Model, max_num_seqs: int) -> None:
        """Allocate what outlives a step."""
        self._backend = backend
        self._model = model
        self.last_token: Array = backend.from_host(np.zeros(max_num_seqs, np.int32))  # [rows]

    def sample(self, hidden: Array, batch: Batch, host: Batch) -> SampledStep:
        """Sample the rows of logit_index; `host` is `batch` on the host. hidden [num_tokens, hidden_size]."""
        sample = partial(self._sample, hidden, batch, host)
        chunks = self._backend.run_sampling(batch, hidden, sample)
        return SampledStep(host, self._backend.fetch(batch.sampled_ids), chunks)

    def _sample(self, hidden: Array, batch: Batch, host: Batch) -> list[LogprobChunk]:
        """Set sampled_ids and last_token where a sequence samples; return the log-probabilities asked for."""
        backend, wanted = self._backend, _num_top(host)
        num_top = int(wanted.max(initial=-1))
        chunks: list[LogprobChunk] = []
        backend.begin_layer()
        for first in range(0, host.num_logits, LOGITS_CHUNK):
            backend.rewind_layer()
            rows = backend.gather_rows(hidden, batch.logit_index[first : first + LOGITS_CHUNK])
            logits = self._model.logits(rows)
            backend.sample(logits, batch, first)
            keep = wanted[first : first + LOGITS_CHUNK] >= 0
            if keep.any():
                arrays = backend.logprobs(logits, batch, first, min(num_top, logits.shape[1]))
                chunks.append(LogprobChunk(keep, *map(backend.fetch, arrays)))
        backend.store_last_tokens(batch, self.last_token)
        return chunks


def _num_top(host: Batch) -> NDArray[np.int32]:
    """Return the top n that each logits row must report, -1 where none."""
    is_prompt = host.logit_target >= 0
    seq = host.logit_seq
    wanted: NDArray[np.int32] = np.where(is_prompt, host.num_prompt_logprobs[seq], host.num_logprobs[seq])
    return wanted
