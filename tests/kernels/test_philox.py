"""Philox4x32-10 against the published answers of its authors (Random123's kat_vectors)."""

from typing import Any

import numpy as np
import pytest

from cupaged.jit import njit
from cupaged.kernels.philox import philox, random_word

PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0)
ANSWERS = [
    ((0, 0), (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((2**32 - 1,) * 2, (2**32 - 1,) * 4, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (PI[4:], PI[:4], (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
]


@njit
def random_words(seed: Any, out: Any) -> None:
    for i in range(out.shape[0]):
        out[i] = random_word(seed, i, 0)


@pytest.mark.parametrize(("key", "counter", "words"), ANSWERS)
def test_words_are_the_published_ones(key: Any, counter: Any, words: Any) -> None:
    assert tuple(int(word) for word in philox(key, counter)) == words


def test_negative_words_are_taken_as_their_bits() -> None:
    minus = np.array([-1, -1, -1, -1], np.int32)

    assert tuple(map(int, philox(minus, minus))) == ANSWERS[1][2]


def test_random_words_are_uniform() -> None:
    out = np.empty(100_000, np.uint32)

    random_words(np.array([12345, -7], np.int32), out)

    counts = np.histogram(out, 100, (0, 2**32))[0]
    assert ((counts - 1000) ** 2 / 1000).sum() < 150  # chi-square, 99 degrees of freedom: 0.1 %


def test_random_word_depends_on_seed_position_and_group() -> None:
    seeds = np.array([[1, 0], [0, 1]], np.int32)

    drawn = {
        int(random_word(seed, position, group)) for seed in seeds for position in (0, 1) for group in (0, 1)
    }

    assert len(drawn) == 8
