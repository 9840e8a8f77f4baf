"""Sampler: from a step's hidden states to its StepOutput, logits in chunks of bounded memory."""

import numpy as np
from numpy.typing import NDArray

from cupaged.backend.base import Array, Backend, LogprobArrays
from cupaged.batch import Batch, Flag, StepOutput, TokenLogprobs
from cupaged.models import Model

LOGITS_CHUNK = 128  # rows of logits alive at once


class Sampler:
    """Owns the step's sampled ids and each row's last token, both on the device."""

    def __init__(self, backend: Backend, model: Model, max_num_seqs: int) -> None:
        """Allocate the arrays that outlive a step."""
        self._backend = backend
        self._model = model
        self.last_token: Array = backend.from_host(np.zeros(max_num_seqs, np.int32))  # [rows]
        self._token_ids: Array = backend.from_host(np.full(max_num_seqs, -1, np.int32))

    def sample(self, hidden: Array, batch: Batch, host: Batch) -> StepOutput:
        """Sample the rows of logit_index; `host` is `batch` on the host. hidden [num_tokens, hidden_size]."""
        backend = self._backend
        token_ids = self._token_ids[: batch.num_seqs]
        token_ids[:] = -1
        wanted = _num_top(host)  # [num_logits]
        num_top = int(wanted.max(initial=-1))
        chunks: list[LogprobArrays] = []
        backend.begin_layer()
        for first in range(0, batch.num_logits, LOGITS_CHUNK):
            backend.rewind_layer()
            rows = backend.gather_rows(hidden, batch.logit_index[first : first + LOGITS_CHUNK])
            logits = self._model.logits(rows)
            backend.sample(logits, batch, first, token_ids)
            keep = wanted[first : first + LOGITS_CHUNK] >= 0
            if keep.any():
                arrays = backend.logprobs(logits, batch, first, token_ids, min(num_top, logits.shape[1]))
                chunks.append(LogprobArrays(*(backend.to_host(array)[keep] for array in arrays)))
        backend.store_last_tokens(batch, token_ids, self.last_token)
        return StepOutput(
            token_ids=backend.to_host(token_ids).reshape(-1, 1),
            num_tokens=((host.flags & Flag.SAMPLES) != 0).astype(np.int32),
            logprobs=_collect(chunks, wanted, host) if chunks else None,
        )


def _num_top(host: Batch) -> NDArray[np.int32]:
    """Return the top n that each logits row must report, -1 where none."""
    is_prompt = host.logit_target >= 0
    seq = host.logit_seq
    wanted: NDArray[np.int32] = np.where(is_prompt, host.num_prompt_logprobs[seq], host.num_logprobs[seq])
    return wanted


def _collect(chunks: list[LogprobArrays], wanted: NDArray[np.int32], host: Batch) -> TokenLogprobs:
    keep = wanted >= 0
    return TokenLogprobs(
        seq=host.logit_seq[keep],
        is_prompt=host.logit_target[keep] >= 0,
        token_ids=np.concatenate([chunk.token_ids for chunk in chunks]),
        logprobs=np.concatenate([chunk.logprobs for chunk in chunks]),
        ranks=np.concatenate([chunk.ranks for chunk in chunks]),
    )
