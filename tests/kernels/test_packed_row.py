"""A token's heads as one row of the longer one in which they lie."""

from typing import Any

import numpy as np

from cupaged.jit import njit
from cupaged.kernels.packed_row import packed_row


@njit
def double(x: Any, i: int) -> None:
    row = packed_row(x, i)
    for j in range(row.shape[0]):
        row[j] = 2 * row[j]


def test_row_is_the_token_itself_and_nothing_beside_it() -> None:
    whole = np.random.default_rng(0).standard_normal((5, 9, 4), np.float32)
    expected = whole.copy()
    expected[3, 2:6] *= 2

    double(whole[:, 2:6], 3)

    assert np.array_equal(whole, expected)


def test_plain_function_gives_the_same_row() -> None:
    whole = np.arange(60, dtype=np.float32).reshape(3, 5, 4)

    row = packed_row(whole[:, 1:3], 2)
    row += 100

    assert row.tolist() == [144 + j for j in range(8)]
    assert whole[2, 1:3].reshape(-1).tolist() == row.tolist()
