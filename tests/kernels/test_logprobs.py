"""Log-probabilities, the top tokens and ranks."""

from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from cupaged.batch import Flag
from cupaged.kernels.logprobs import SCALED_LOGPROBS, logprobs_cpu


class Result(NamedTuple):
    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    ranks: NDArray[np.int32]


def run(
    logits: NDArray[np.float32],
    targets: list[int],
    num_top: int,
    sampled: list[int] | None = None,
    temperatures: dict[int, float] | None = None,
) -> Result:
    """Return the results of rows, each of a sequence; those with a temperature are flagged, to be scaled."""
    n = len(logits)
    flags, temperature = np.full(n, 7, np.int32), np.full(n, 0.3, np.float32)
    for seq, value in (temperatures or {}).items():
        flags[seq] |= SCALED_LOGPROBS
        temperature[seq] = value
    out = Result(
        np.empty((n, 1 + num_top), np.int32), np.empty((n, 1 + num_top), np.float32), np.empty(n, np.int32)
    )
    seqs = np.arange(n, dtype=np.int32)
    chosen = np.array(targets, np.int32), np.array(sampled or [0] * n, np.int32)
    logprobs_cpu(logits, seqs, *chosen, flags, temperature, *out)
    return out


def log_softmax(logits: NDArray[np.floating[Any]]) -> NDArray[np.float64]:
    shifted: NDArray[np.float64] = logits.astype(np.float64) - logits.max(1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(1, keepdims=True))
    return shifted


@pytest.mark.parametrize("vocab_size", [1, 97, 128, 1000])
def test_logprobs_equal_a_float64_log_softmax(vocab_size: int) -> None:
    logits = np.random.default_rng(0).standard_normal((5, vocab_size), np.float32) * 8
    targets = [0, vocab_size - 1, vocab_size // 2, 0, 0]

    result = run(logits, targets, min(7, vocab_size))

    expected = np.take_along_axis(log_softmax(logits), result.token_ids.astype(np.int64), 1)
    assert result.token_ids[:, 0].tolist() == targets
    assert np.abs(result.logprobs - expected).max() < 1e-5


def test_top_tokens_come_in_order_of_logit_then_id() -> None:
    logits = np.array([[1, 3, 2, 3, -np.inf, 2]], np.float32)

    assert run(logits, [0], 5).token_ids.tolist() == [[0, 1, 3, 2, 5, 0]]


def test_rank_counts_greater_logits() -> None:
    logits = np.array([[1, 3, 2, 3, 0]] * 4, np.float32)

    assert run(logits, [1, 3, 2, 4], 0).ranks.tolist() == [1, 1, 3, 5]


def test_ranks_and_top_tokens_of_near_equals_are_those_of_a_sort() -> None:
    rng = np.random.default_rng(0)
    bits = np.float32(1).view(np.int32) + rng.integers(0, 9, (20, 1500), np.int32)  # neighbouring floats
    logits = bits.view(np.float32)
    targets = rng.integers(0, 1500, 20).tolist()

    result = run(logits, targets, 9)

    for row, target, token_ids, rank in zip(logits, targets, result.token_ids, result.ranks, strict=True):
        assert token_ids[1:].tolist() == np.argsort(-row, kind="stable")[:9].tolist()
        assert rank == 1 + np.count_nonzero(row > row[target])


def test_top_token_may_be_greater_than_those_before_it_by_the_last_bit() -> None:
    logits = np.zeros((1, 600), np.float32)
    logits[0, [3, 300]] = 1, np.nextafter(np.float32(1), np.float32(2))

    result = run(logits, [3], 1)

    assert result.token_ids.tolist() == [[3, 300]]
    assert result.ranks.tolist() == [2]


def test_missing_target_means_the_sampled_token() -> None:
    logits = np.array([[1, 3, 2]] * 2, np.float32)

    assert run(logits, [-1, 0], 0, sampled=[2, 2]).token_ids.tolist() == [[2], [0]]


def test_token_has_the_same_logprob_as_target_and_among_the_top() -> None:
    logits = np.random.default_rng(0).standard_normal((1, 1000), np.float32) * 5

    result = run(logits, [int(logits.argmax())], 3)

    assert result.logprobs[0, 0] == result.logprobs[0, 1]


def test_infinities_and_nan_are_unlikely_not_contagious() -> None:
    logits = np.array([[0, -np.inf, np.nan, 0]], np.float32)

    result = run(logits, [1], 4)

    assert result.token_ids.tolist() == [[1, 0, 3, 1, 2]]
    assert result.logprobs[0].tolist() == [
        -np.inf,
        np.log(np.float32(0.5)),
        np.log(np.float32(0.5)),
        -np.inf,
        -np.inf,
    ]


def test_flagged_sequence_that_samples_has_its_logits_divided_by_the_temperature() -> None:
    logits = np.random.default_rng(0).standard_normal((4, 1000), np.float32) * 8
    temperature = np.array([0.5, 1.7, 40.0, 0.01], np.float32)

    result = run(logits, [-1] * 4, 9, [3, 1, 4, 1], dict(enumerate(temperature.tolist())))

    exact = log_softmax(logits / temperature[:, None].astype(np.float64))
    expected = np.take_along_axis(exact, result.token_ids.astype(np.int64), 1)
    assert np.allclose(result.logprobs, expected, rtol=2e-7, atol=1e-6)
    assert np.array_equal(result.token_ids, run(logits, [-1] * 4, 9, [3, 1, 4, 1]).token_ids)


@pytest.mark.parametrize(
    ("target", "temperature"),
    [(5, 0.5), (-1, 1.0), (-1, 0.0), (-1, 1e-30)],
    ids=["of a prompt", "one", "greedy", "nearly greedy"],
)
def test_otherwise_logits_are_taken_as_they_are(target: int, temperature: float) -> None:
    logits = np.random.default_rng(0).standard_normal((1, 1000), np.float32) * 8

    result = run(logits, [target], 9, [7], {0: temperature})

    assert np.array_equal(result.logprobs, run(logits, [target], 9, [7]).logprobs)


def test_scaled_infinities_and_nan_are_unlikely_not_contagious() -> None:
    logits = np.array([[0, -np.inf, np.nan, 0]] * 2, np.float32)

    result = run(logits, [-1, -1], 4, [1, 1], {0: 2e-5, 1: 1e38})

    half = np.log(np.float32(0.5))
    assert result.logprobs.tolist() == [[-np.inf, half, half, -np.inf, -np.inf]] * 2


def test_flag_is_that_of_the_batch() -> None:
    assert SCALED_LOGPROBS == Flag.SCALED_LOGPROBS
