"""Bias, penalties, bans, and the counts behind them."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cupaged.batch import Flag
from cupaged.kernels.adjust_logits import (
    BANNED,
    IN_PROMPT,
    RESET,
    SAMPLES,
    adjust_logits_cpu,
    count_history_cpu,
    count_sampled_cpu,
)
from tests.kernels.penalties import adjusted_one_by_one, make_histories, make_step

NO_FLOATS, NO_IDS = np.empty(0, np.float32), np.empty(0, np.int32)
NO_PENALTIES = (np.empty((0, 0), np.int32), NO_FLOATS, NO_FLOATS, NO_FLOATS)
NO_BIAS = (NO_IDS, NO_IDS, NO_FLOATS)
NO_BANS = (NO_IDS, NO_IDS)
ONE_ROW = (np.array([0], np.int32), np.array([-1], np.int32), np.array([0], np.int32))


def floats(*values: float) -> NDArray[np.float32]:
    return np.array(values, np.float32)


def ints(*values: int) -> NDArray[np.int32]:
    return np.array(values, np.int32)


def adjust(logits: NDArray[np.float32], *args: Any) -> list[float]:
    """Return the adjusted logits of one row."""
    adjusted = np.full((1, logits.size), 77, np.float32)
    adjust_logits_cpu(*[logits[None], *ONE_ROW, *args, adjusted])
    return list(map(float, adjusted[0]))


@pytest.mark.parametrize("vocab_size", [1, 2, 31, 1000])
def test_adjusted_logits_are_those_of_the_definition(vocab_size: int) -> None:
    step = make_step(vocab_size)
    adjusted = np.full_like(step.logits, np.nan)

    adjust_logits_cpu(*step, adjusted)

    expected = adjusted_one_by_one(step)
    assert np.array_equal(adjusted, expected, equal_nan=True)
    assert np.array_equal(adjusted.view(np.uint32) == BANNED, expected.view(np.uint32) == BANNED)


def test_nothing_asked_for_leaves_logits_but_nan() -> None:
    assert adjust(floats(1, np.nan, -np.inf), *NO_PENALTIES, *NO_BIAS, *NO_BANS) == [1, -np.inf, -np.inf]


def test_repetition_penalty_makes_seen_tokens_less_likely_whatever_their_sign() -> None:
    penalties = (ints(IN_PROMPT, 1, 0, IN_PROMPT)[None], floats(2), floats(0), floats(0))

    assert adjust(floats(4, -4, 4, 0), *penalties, *NO_BIAS, *NO_BANS) == [2, -8, 4, 0]


def test_frequency_and_presence_penalties_count_the_output_only() -> None:
    penalties = (ints(IN_PROMPT, 3, 0, IN_PROMPT | 2)[None], floats(1), floats(0.5), floats(0.25))

    assert adjust(floats(4, 4, 4, 4), *penalties, *NO_BIAS, *NO_BANS) == [4, 2.25, 4, 2.75]


def test_bias_comes_before_penalties_and_bans_last() -> None:
    penalties = (ints(1, 1, 0)[None], floats(2), floats(0), floats(0))
    bias = (ints(0, 2), ints(0, 1), floats(6, 6))

    adjusted = adjust(floats(-4, -4, 1), *penalties, *bias, ints(0, 1), ints(1))

    assert adjusted[0] == 1
    assert np.isnan(adjusted[1])
    assert adjusted[2] == 1


def test_counts_tell_prompt_from_output() -> None:
    counts = np.full((2, 5), 9, np.int32)

    count_history_cpu(ints(1), ints(4), ints(3), ints(0, 7), ints(0, 2, 2, 3, 2, 4, 4), counts)

    assert counts.tolist() == [[9] * 5, [IN_PROMPT, 0, IN_PROMPT | 1, IN_PROMPT, 2]]


def test_only_rows_that_enter_with_a_history_are_counted_anew() -> None:
    *args, counts = make_histories(50)
    before = counts.copy()

    count_history_cpu(*[*args, counts])

    assert [row for row in range(7) if not np.array_equal(counts[row], before[row])] == [3, 6]
    assert (counts[3] & 0x7FFFFFFF).sum() == 12
    assert (counts[6] & 0x7FFFFFFF).sum() == 0


def test_sampled_tokens_are_added_to_the_output() -> None:
    counts = np.zeros((3, 4), np.int32)
    counts[2, 1] = IN_PROMPT | 1

    count_sampled_cpu(ints(2, 0, 1), ints(1, 4, 5), ints(1, 3, 0), counts)

    assert counts.tolist() == [[0, 0, 0, 0], [1, 0, 0, 0], [0, IN_PROMPT | 2, 0, 0]]


def test_flags_are_those_of_the_batch() -> None:
    assert (SAMPLES, RESET) == (Flag.SAMPLES, Flag.RESET)
