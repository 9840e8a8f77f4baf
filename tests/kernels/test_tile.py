"""The register tile: what the compiled code does is what the plain function says."""

from typing import Any

import numpy as np
import pytest

from cupaged.jit import njit
from cupaged.kernels.tile import ROWS, VECTOR, Places, multiply_rows, vector_tile


@njit
def run_vector_tile(c: Any, a: Any, b: Any, at: Places, rows: int, depth: int) -> None:
    vector_tile(c, a, b, at, rows, depth)


@pytest.mark.parametrize("rows", range(1, ROWS + 1))
@pytest.mark.parametrize("kind", [np.float32, np.uint16])
def test_compiled_tile_equals_the_plain_one(rows: int, kind: Any) -> None:
    rng = np.random.default_rng(rows)
    a, b = (rng.integers(-4, 4, 400).astype(np.float32) for _ in "ab")  # small integers: exact sums
    if kind == np.uint16:
        b = (b.view(np.uint32) >> 16).astype(np.uint16)
    at = Places(3, 20, 5, 11, 7, 18)
    compiled, plain = np.ones(300, np.float32), np.ones(300, np.float32)

    run_vector_tile(compiled, a, b, at, rows, 9)
    vector_tile(plain, a, b, at, rows, 9)

    assert np.array_equal(compiled, plain)


@pytest.mark.parametrize("columns", [1, VECTOR - 1, VECTOR, VECTOR + 1, 3 * VECTOR, 4 * VECTOR + 5])
@pytest.mark.parametrize("rows", [1, ROWS - 1, ROWS, ROWS + 1, 3 * ROWS])
def test_any_rows_and_columns_equal_a_matrix_product(rows: int, columns: int) -> None:
    rng = np.random.default_rng(columns)
    a, b, c = (rng.integers(-4, 4, shape).astype(np.float32) for shape in ((30, 5), (5, 80), (30, 80)))
    expected = c.copy()
    expected[:rows, :columns] += a[:rows] @ b[:, :columns]

    multiply_rows(c.reshape(-1), a.reshape(-1), b.reshape(-1), Places(0, 80, 0, 5, 0, 80), rows, columns, 5)

    assert np.array_equal(c, expected)
