"""Log-probabilities of chosen tokens and of the most likely ones, from the raw logits or, for beams, from
logits / temperature.

Tokens are ranked by logit, the lower id first among equals; NaN counts as minus infinity. The sum of the
exponentials is one of integers (exact.py), so the twin and logprobs.cu give the same bits.
"""

from typing import Any

import numpy as np

from cupaged.jit import njit
from cupaged.kernels.chunks import num_chunks
from cupaged.kernels.exact import GREEDY_TEMPERATURE, inverse, log_of, rank_key
from cupaged.kernels.launch import Array, Device, row_stride
from cupaged.kernels.parallel import parallel_for
from cupaged.kernels.ranking import BLOCK, find_first, find_tops, lowest_key, weigh_blocks

SCALED_LOGPROBS = 8  # a bit of a sequence's flags, as in batch.Flag
UNIT = 2.0**-32  # of log_of
GRAIN = 1 << 14  # logits, 10 us of a CPU's work
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
def log_sum_exp(row: Any, tops: Any, top: Any, scale: Any) -> Any:
    """Return log(sum(exp((row - top) * scale))) of the greatest logit `top`; 0 where that is not finite."""
    if not abs(top) < np.inf:
        return 0.0
    softmax = (top, scale)
    return log_of(weigh_blocks(row, tops, softmax, lowest_key(softmax, 0.0), 1).sum()) * UNIT


@njit
def find_top(row: Any, tops: Any, token_ids: Any, logits: Any) -> None:
    """Fill token_ids and their logits with the greatest of the row, the lower id first among equals."""
    filled, limit = 0, token_ids.shape[0]
    keys = logits.view(np.uint32)
    for b in range(tops.shape[0]):
        if filled == limit and (limit == 0 or tops[b] <= rank_key(keys[limit - 1])):
            continue
        for j in range(b * BLOCK, min((b + 1) * BLOCK, row.shape[0])):
            x = number(row[j])
            if filled == limit and not x > logits[limit - 1]:
                continue
            place = min(filled, limit - 1)
            while place > 0 and x > logits[place - 1]:
                token_ids[place], logits[place] = token_ids[place - 1], logits[place - 1]
                place -= 1
            token_ids[place], logits[place] = j, x
            filled = min(filled + 1, limit)


@njit
def find_rank(row: Any, tops: Any, logit: Any) -> int:
    """Return 1 + how many logits are greater; logit is of [1]."""
    rank, key = 1, rank_key(logit.view(np.uint32)[0])
    for b in range(tops.shape[0]):
        if tops[b] > key:
            part = row[b * BLOCK : (b + 1) * BLOCK]
            for j in range(part.shape[0]):
                rank += part[j] > logit[0]
    return rank


@njit
def rank_row(row: Any, scale: Any, token_ids: Any, logprobs: Any) -> int:
    """Fill logprobs of token_ids[0] and of the top ones, which go behind it; return the first one's rank."""
    tops = find_tops(row.view(np.uint32))
    logprobs[0] = number(row[token_ids[0]])
    find_top(row, tops, token_ids[1:], logprobs[1:])
    rank = find_rank(row, tops, logprobs[:1])
    top = number(row[find_first(row.view(np.uint32), tops)])
    log_total = log_sum_exp(row, tops, top, scale)
    for n in range(logprobs.shape[0]):
        logprobs[n] = (np.float64(logprobs[n]) - np.float64(top)) * np.float64(scale) - log_total
    return rank


@njit
def rank_rows(
    logits: Any,
    logit_seq: Any,
    logit_target: Any,
    by_seq: Any,
    token_ids: Any,
    logprobs: Any,
    ranks: Any,
    rows: Any,
) -> None:
    """Fill the rows [first, last) of token_ids, logprobs and ranks."""
    sampled, flags, temperature = by_seq
    for i in range(*rows):
        seq, target = logit_seq[i], logit_target[i]
        token_ids[i, 0] = target if target >= 0 else sampled[seq]
        scale = scale_of(target, flags[seq], temperature[seq])
        ranks[i] = rank_row(logits[i], scale, token_ids[i], logprobs[i])


SIGNATURE = "void(f4[:,::1],i4[::1],i4[::1],i4[::1],i4[::1],f4[::1],i4[:,::1],f4[:,::1],i4[::1])"


@njit
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
    by_seq = (sampled, flags, temperature)
    args = (logits, logit_seq, logit_target, by_seq, token_ids, logprobs, ranks)
    parallel_for(rank_rows, logits.shape[0], num_chunks(logits.size, GRAIN), args)


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
