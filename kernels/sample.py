"""Pick the next token of each row: bans, temperature, top-k, top-p, min-p, then one Philox number.

Tokens are ranked by logit, the lower id first among equals; every filter keeps a prefix of that ranking.
top-k keeps k; top-p the shortest prefix of those whose share of their probability reaches top_p; min-p
those whose probability is at least min_p times the first's. NaN counts as minus infinity. If all are minus
infinity, the lowest id that is not banned is taken.
"""

from typing import Any

import numpy as np

from cupaged.jit import njit, prange
from cupaged.kernels.philox import uniform

GREEDY_TEMPERATURE = 1e-5  # below it a row takes the most likely token


@njit
def argmax(row: Any) -> int:
    """Return the lowest index of the maximum; NaN never wins."""
    best, index = -np.inf, 0
    for j in range(row.shape[0]):
        if row[j] > best:
            best, index = row[j], j
    return index


@njit
def pick(row: Any, temperature: Any, top_k: int, top_p: Any, min_p: Any, u: float) -> int:
    """Return the token that the uniform number u picks."""
    order = np.argsort(-row, kind="mergesort")
    count = row.shape[0] if top_k <= 0 else min(top_k, row.shape[0])
    weights = np.exp((row.astype(np.float64) - row[order[0]]) / temperature)
    total = 0.0
    for j in range(count):
        total += weights[order[j]]
    mass, keep = 0.0, 0
    while keep < count and (mass < top_p * total or keep == 0) and weights[order[keep]] >= min_p:
        mass += weights[order[keep]]
        keep += 1
    target, mass = u * mass, 0.0
    for j in range(keep):
        mass += weights[order[j]]
        if mass > target:
            return order[j]
    return order[0]


@njit(
    signatures=[
        "void(f4[:,::1],i4[::1],i4[::1],f4[::1],i4[::1],f4[::1],f4[::1],i4[:,::1],i4[::1],i4[::1],"
        "i4[::1],i4[::1],i4[::1])"
    ],
    parallel=True,
)
def sample_cpu(
    logits: Any,  # float32[n, vocab_size], left as they are
    logit_seq: Any,  # int32[n], the sequence of each row
    logit_target: Any,  # int32[n], -1 = sample here
    temperature: Any,  # float32[num_seqs], and so the following
    top_k: Any,
    top_p: Any,
    min_p: Any,
    seed: Any,  # int32[num_seqs, 2]
    group_index: Any,
    output_position: Any,
    banned_start: Any,  # int32[num_seqs + 1]
    banned: Any,
    token_ids: Any,  # int32[num_seqs]
) -> None:
    """Set token_ids of the sequences that sample in these rows."""
    for i in prange(logits.shape[0]):
        if logit_target[i] < 0:
            seq = logit_seq[i]
            row = logits[i].copy()
            for j in range(row.shape[0]):
                if not row[j] >= -np.inf:
                    row[j] = -np.inf
            for j in range(banned_start[seq], banned_start[seq + 1]):
                row[banned[j]] = -np.inf
            token = argmax(row)
            if temperature[seq] >= GREEDY_TEMPERATURE and row[token] > -np.inf:
                u = uniform(seed[seq, 0], seed[seq, 1], output_position[seq], group_index[seq])
                token = pick(row, temperature[seq], top_k[seq], top_p[seq], min_p[seq], u)
            token_ids[seq] = token
