"""A step in which sequences have penalties, biases and bans of their own, and what must come of it."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cupaged.kernels.adjust_logits import BANNED, IN_PROMPT

Array = NDArray[Any]
NUM_ROWS = 7  # of counts


class Step(NamedTuple):
    """The arguments of adjust_logits, but the last."""

    logits: Array
    logit_seq: Array
    logit_target: Array
    rows: Array
    counts: Array
    repetition_penalty: Array
    frequency_penalty: Array
    presence_penalty: Array
    bias_start: Array
    bias_ids: Array
    bias: Array
    banned_start: Array
    banned: Array


def make_step(vocab_size: int, num_seqs: int = 4, seed: int = 0) -> Step:
    """Return a step whose first sequence asks for nothing; the second row of logits is not sampled from."""
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((num_seqs + 1, vocab_size), np.float32) * 5
    logits[rng.random(logits.shape) < 0.1] = np.nan
    logits[rng.random(logits.shape) < 0.1] = -np.inf
    counts = rng.choice([0, 0, 1, 2, 70], (NUM_ROWS, vocab_size)).astype(np.int32)
    counts[rng.random(counts.shape) < 0.3] |= IN_PROMPT
    biased = [rng.permutation(vocab_size)[: rng.integers(0, vocab_size)] for _ in range(num_seqs)]
    banned = [rng.permutation(vocab_size)[: rng.integers(0, vocab_size)] for _ in range(num_seqs)]
    biased[0], banned[0] = biased[0][:0], banned[0][:0]
    neutral = np.arange(num_seqs) == 0
    ids = np.concatenate(biased).astype(np.int32)
    return Step(
        logits=logits,
        logit_seq=np.array([0, 0, *range(1, num_seqs)], np.int32),
        logit_target=np.array([-1, 3, *[-1] * (num_seqs - 1)], np.int32),
        rows=rng.permutation(NUM_ROWS)[:num_seqs].astype(np.int32),
        counts=counts,
        repetition_penalty=np.where(neutral, 1, rng.choice([1, 1.3, 0.7], num_seqs)).astype(np.float32),
        frequency_penalty=np.where(neutral, 0, rng.choice([0, 0.3, -1.1], num_seqs)).astype(np.float32),
        presence_penalty=np.where(neutral, 0, rng.choice([0, 0.6, -2], num_seqs)).astype(np.float32),
        bias_start=np.cumsum([0, *map(len, biased)], dtype=np.int32),
        bias_ids=ids,
        bias=rng.uniform(-100, 100, ids.size).astype(np.float32),
        banned_start=np.cumsum([0, *map(len, banned)], dtype=np.int32),
        banned=np.concatenate(banned).astype(np.int32),
    )


def adjusted_one_by_one(step: Step) -> Array:
    """Return the adjusted logits by plain float32 NumPy, by the definition; NaN in rows not sampled from."""
    out = np.full_like(step.logits, np.nan)
    for i, seq in enumerate(step.logit_seq):
        if step.logit_target[i] >= 0:
            continue
        z = np.where(np.isnan(step.logits[i]), np.float32(-np.inf), step.logits[i])
        mine = slice(step.bias_start[seq], step.bias_start[seq + 1])
        z[step.bias_ids[mine]] += step.bias[mine]
        count = step.counts[step.rows[seq]]
        num_output = (count & np.int32(0x7FFFFFFF)).astype(np.float32)
        repetition = step.repetition_penalty[seq]
        z = np.where(count != 0, np.where(z > 0, z / repetition, z * repetition), z)
        frequency, presence = step.frequency_penalty[seq], step.presence_penalty[seq]
        out[i] = np.where(num_output > 0, z - frequency * num_output - presence, z)
        mine = slice(step.banned_start[seq], step.banned_start[seq + 1])
        out[i].view(np.uint32)[step.banned[mine]] = BANNED
    return out


def make_histories(vocab_size: int) -> tuple[Array, ...]:
    """Return rows, flags, output_position, history_start, history; and counts that hold something else."""
    rng = np.random.default_rng(1)
    lengths = (40, 0, 9, 25)
    flags = np.array([5, 4, 0, 4], np.int32)  # the third does not enter, the second has no history
    return (
        np.array([3, 1, 0, 6], np.int32),
        flags,
        np.array([12, 5, 4, 0], np.int32),
        np.cumsum([0, *lengths], dtype=np.int32),
        rng.integers(0, vocab_size, sum(lengths)).astype(np.int32),
        rng.integers(0, 9, (NUM_ROWS, vocab_size)).astype(np.int32),
    )
