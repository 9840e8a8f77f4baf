"""Log-probabilities of chosen tokens and of the most likely ones, from the raw logits or, for beams, from
logits / temperature.

Tokens are ranked by logit, the lower id first among equals; NaN counts as minus infinity. The sum of the
exponentials is one of integers (exact.py), so the twin and logprobs.cu give the same bits.
"""

from typing import Any

import numpy as np

from cupaged.jit import njit, prange
from cupaged.kernels.exact import GREEDY_TEMPERATURE, inverse, log_of, to_mass
from cupaged.kernels.launch import Array, Device, row_stride

SCALED_LOGPROBS = 8  # a bit of a sequence's flags, as in batch.Flag
UNIT = 2.0**-32  # of log_of
THREADS = 1024  # of a CUDA block, which has one row
SHARED_BYTES = 32 << 10  # a counter of each lane and step
MAX_TOP = 128  # tokens


@njit
def number(x: Any) -> Any:
    """Return x, minus infinity for NaN, 0 for -0."""
    return x + np.float32(0.0) if x == x else np.float32(-np.inf)


@njit
def scale_of(target: int, flags: int, temperature: Any) -> Any:
    """Return what the logits of a row are multiplied with: not 1 only where a flagged sequence samples."""
    if target < 0 and flags & SCALED_LOGPROBS and temperature >= GREEDY_TEMPERATURE:
        return inverse(temperature)
    return np.float32(1.0)


@njit
def log_sum_exp(row: Any, scale: Any) -> Any:
    """Return the greatest logit and log(sum(exp((row - greatest) * scale))), 0 where that is not finite."""
    top, total = np.float32(-np.inf), 0
    for j in range(row.shape[0]):
        if row[j] > top:
            top = row[j]
    if not abs(top) < np.inf:
        return np.float64(top), 0.0
    for j in range(row.shape[0]):
        total += to_mass((row[j] - top) * scale)
    return np.float64(top), log_of(total) * UNIT


@njit
def find_top(row: Any, token_ids: Any, logits: Any) -> None:
    """Fill token_ids and their logits with the greatest of the row, the lower id first among equals."""
    filled, limit = 0, token_ids.shape[0]
    for j in range(row.shape[0] if limit > 0 else 0):
        x = number(row[j])
        if filled == limit and not x > logits[limit - 1]:
            continue
        place = min(filled, limit - 1)
        while place > 0 and x > logits[place - 1]:
            token_ids[place], logits[place] = token_ids[place - 1], logits[place - 1]
            place -= 1
        token_ids[place], logits[place] = j, x
        filled = min(filled + 1, limit)


_SIGNATURE = "void(f4[:,::1],i4[::1],i4[::1],i4[::1],i4[::1],f4[::1],i4[:,::1],f4[:,::1],i4[::1])"


@njit(signatures=[_SIGNATURE], parallel=True)
def logprobs_cpu(
    logits: Any,  # float32[n, vocab_size]
    logit_seq: Any,  # int32[n], the sequence of each row
    logit_target: Any,  # int32[n], the token of column 0, -1 = the sampled one
    sampled: Any,  # int32[num_seqs], and so flags
    flags: Any,
    temperature: Any,  # float32[num_seqs]
    token_ids: Any,  # int32[n, 1 + num_top]
    logprobs: Any,  # float32[n, 1 + num_top]
    ranks: Any,  # int32[n], 1 + how many tokens have a greater logit
) -> None:
    """Fill token_ids, logprobs and ranks.

    Where a sequence flagged SCALED_LOGPROBS samples, logits count divided by its temperature, if that is one.
    """
    for i in prange(logits.shape[0]):
        row = logits[i]
        target = logit_target[i] if logit_target[i] >= 0 else sampled[logit_seq[i]]
        token_ids[i, 0], logprobs[i, 0] = target, number(row[target])
        find_top(row, token_ids[i, 1:], logprobs[i, 1:])
        rank = 1
        for j in range(row.shape[0]):
            rank += row[j] > logprobs[i, 0]
        ranks[i] = rank
        scale = scale_of(logit_target[i], flags[logit_seq[i]], temperature[logit_seq[i]])
        top, log_total = log_sum_exp(row, scale)
        for n in range(logprobs.shape[1]):
            logprobs[i, n] = (np.float64(logprobs[i, n]) - top) * np.float64(scale) - log_total


def logprobs_cuda(
    device: Device,
    logits: Array,
    logit_seq: Array,
    logit_target: Array,
    sampled: Array,
    flags: Array,
    temperature: Array,
    token_ids: Array,
    logprobs: Array,
    ranks: Array,
) -> None:
    """Fill token_ids, logprobs and ranks; arguments as logprobs_cpu has them."""
    num_rows, vocab_size = logits.shape
    num_top = token_ids.shape[1] - 1
    if num_top > MAX_TOP:
        raise ValueError(f"{num_top} top tokens are wanted but kernels give {MAX_TOP}; ask for fewer")
    assert num_top <= vocab_size, f"{num_top} top tokens of {vocab_size}"
    kernel = device.kernel("logprobs", "logprobs", THREADS=THREADS, MAX_TOP=MAX_TOP)
    outputs = (token_ids, logprobs, ranks)
    inputs = (logits, logit_seq, logit_target, sampled, flags, temperature)
    args = (*outputs, *inputs, vocab_size, num_top, row_stride(logits))
    kernel((num_rows, 1, 1), THREADS, args, shared_bytes=SHARED_BYTES)
