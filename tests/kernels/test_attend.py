"""What one thread does: which rows share a tile; the rest is in test_paged_attention."""

from typing import Any

import numpy as np
import pytest

from cupaged.jit import njit
from cupaged.kernels.attend import rows_together
from cupaged.kernels.tile import ROWS


@njit
def tiles_of(rows: int, group: int) -> Any:
    """Return how many rows each tile has."""
    tiles, row = np.zeros(rows, np.int64), 0
    while row < rows:
        few = rows_together(row, rows, group)
        tiles[row] = few
        row += few
    return tiles


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 71])
def test_rows_of_a_tile_are_of_one_query_unless_those_are_few(group: int) -> None:
    tiles = tiles_of(4 * group, group)

    first = np.flatnonzero(tiles)
    assert tiles.max() <= ROWS
    assert np.array_equal(first[1:], (first + tiles[first])[:-1])
    if group > ROWS // 2:
        assert (first // group == (first + tiles[first] - 1) // group).all()
        assert tiles[first].min() >= tiles.max() // 2
