"""Rows in 8 bits: each number is within half a step, whatever the row has; what is not finite shows."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from cupaged.kernels.quantize import quantize_rows


def quantize(
    x: NDArray[Any], *, zero: int = 0, width: int | None = None
) -> tuple[NDArray[Any], NDArray[Any]]:
    kind = np.int8 if zero == 0 else np.uint8
    quantized, scales = np.full((len(x), width or x.shape[1]), 77, kind), np.full(len(x), np.nan, np.float32)
    quantize_rows(x.view(np.uint16) if x.dtype == ml_dtypes.bfloat16 else x, zero, quantized, scales)
    return quantized, scales


def random(*shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(0).standard_normal(shape, np.float32)


@pytest.mark.parametrize("shape", [(1, 1), (3, 17), (5, 576), (200, 1536)])
@pytest.mark.parametrize("kind", [np.float32, ml_dtypes.bfloat16])
def test_every_number_is_its_rows_scale_times_the_nearest_integer(shape: tuple[int, int], kind: Any) -> None:
    x = random(*shape).astype(kind)

    quantized, scales = quantize(x)

    exact = x.astype(np.float64) / (np.abs(x.astype(np.float64)).max(1, keepdims=True) / 127)
    error = np.abs(quantized - exact)
    assert error.max() < 0.5 + 1e-4, f"max {error.max()}, mean {error.mean()}"
    assert np.abs(quantized.astype(int)).max(1).tolist() == [127] * len(x)
    np.testing.assert_allclose(scales, np.abs(x.astype(np.float64)).max(1) / 127, rtol=1e-6)


def test_halves_go_to_the_even_integer() -> None:
    x = np.array([[127, 0.5, 1.5, 2.5, -0.5, -1.5, -127]], np.float32)

    assert quantize(x)[0].tolist() == [[127, 0, 2, 2, 0, -2, -127]]


def test_zero_may_be_another_number_and_rows_wider() -> None:
    x = random(4, 10)

    signed, unsigned = quantize(x)[0], quantize(x, zero=128, width=12)[0]

    assert np.array_equal(unsigned[:, :10].astype(int) - 128, signed)
    assert (unsigned[:, 10:] == 77).all()


@pytest.mark.parametrize("largest", [0.0, 1e-45, 1e-38, 1e-31])
def test_row_of_next_to_nothing_is_one_of_zeros(largest: float) -> None:
    x = np.zeros((1, 40), np.float32)
    x[0, 3] = largest

    quantized, scales = quantize(x)

    assert not quantized.any()
    assert 0 <= scales[0] <= 1e-30


def test_largest_numbers_do_not_overflow() -> None:
    most = np.finfo(np.float32).max
    quantized, scales = quantize(np.array([[most, -most, most / 2]], np.float32))

    assert quantized.tolist() == [[127, -127, 64]]
    assert np.isfinite(scales).all()


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_row_that_is_not_finite_has_a_scale_that_is_not(bad: float) -> None:
    x = random(3, 33)
    x[1, 20] = bad

    quantized, scales = quantize(x)

    assert np.isfinite(scales).tolist() == [True, False, True]
    assert np.array_equal(quantized[[0, 2]], quantize(x[[0, 2]])[0])


def test_a_row_depends_on_itself_alone() -> None:
    x = random(300, 577)
    quantized, scales = quantize(x)

    for row in (0, 1, 150, 299):
        alone = quantize(x[row : row + 1])
        assert np.array_equal(alone[0][0], quantized[row])
        assert alone[1][0] == scales[row]
