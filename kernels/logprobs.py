"""Log-probabilities of chosen tokens and of the most likely ones, from the raw logits."""

from typing import Any

import numpy as np

from cupaged.jit import njit, prange


@njit(signatures=["void(f4[:,::1],i4[::1],i4[::1],i4[::1],i4[:,::1],f4[:,::1],i4[::1])"], parallel=True)
def logprobs_cpu(
    logits: Any,  # float32[n, vocab_size]
    logit_seq: Any,  # int32[n], the sequence of each row
    logit_target: Any,  # int32[n], the token of column 0, -1 = the sampled one
    sampled: Any,  # int32[num_seqs]
    token_ids: Any,  # int32[n, 1 + num_top]
    logprobs: Any,  # float32[n, 1 + num_top]
    ranks: Any,  # int32[n], 1 + how many tokens have a greater logit
) -> None:
    """Fill token_ids, logprobs and ranks; among equal logits the lower id comes first."""
    for i in prange(logits.shape[0]):
        row = logits[i]
        top = -np.inf
        for j in range(row.shape[0]):
            top = max(top, row[j])
        total = 0.0
        for j in range(row.shape[0]):
            total += np.exp(np.float64(row[j]) - top)
        offset = top + np.log(total)
        target = logit_target[i] if logit_target[i] >= 0 else sampled[logit_seq[i]]
        token_ids[i, 0] = target
        logprobs[i, 0] = row[target] - offset
        rank = 1
        for j in range(row.shape[0]):
            rank += row[j] > row[target]
        ranks[i] = rank
        order = np.argsort(-row, kind="mergesort")
        for n in range(1, token_ids.shape[1]):
            token_ids[i, n] = order[n - 1]
            logprobs[i, n] = row[order[n - 1]] - offset
