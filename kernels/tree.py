"""Sums and maxima of blocks of BLOCK numbers by halving: vectorised, in an order no compiler may change."""

from typing import Any

import numpy as np

from cupaged.jit import njit

BLOCK = 128  # numbers


@njit
def _fold_sum(x: Any, width: int) -> None:
    for j in range(width):
        x[j] += x[width + j]


@njit
def _fold_max(x: Any, width: int) -> None:
    for j in range(width):
        x[j] = x[j] if x[j] > x[width + j] else x[width + j]


@njit
def tree_sum(values: Any, scratch: Any) -> Any:
    """Return the sum of values [BLOCK]; scratch is float32[BLOCK / 2]."""
    for j in range(BLOCK // 2):
        scratch[j] = values[j] + values[BLOCK // 2 + j]
    _fold_sum(scratch, 32)
    _fold_sum(scratch, 16)
    _fold_sum(scratch, 8)
    _fold_sum(scratch, 4)
    _fold_sum(scratch, 2)
    return scratch[0] + scratch[1]


@njit
def tree_max(values: Any, scratch: Any) -> Any:
    """Return the greatest of values [BLOCK], none of which is NaN; scratch is float32[BLOCK / 2]."""
    for j in range(BLOCK // 2):
        scratch[j] = values[j] if values[j] > values[BLOCK // 2 + j] else values[BLOCK // 2 + j]
    _fold_max(scratch, 32)
    _fold_max(scratch, 16)
    _fold_max(scratch, 8)
    _fold_max(scratch, 4)
    _fold_max(scratch, 2)
    return np.float32(max(scratch[0], scratch[1]))
