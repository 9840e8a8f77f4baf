"""RMS norm, alone and behind the residual add."""

import numpy as np
import pytest
from numpy.typing import NDArray

from cupaged.kernels.rms_norm import add_rms_norm_cpu, rms_norm_cpu

EPS = 1e-5


def expected(x: NDArray[np.float32], weight: NDArray[np.float32]) -> NDArray[np.float64]:
    wide = x.astype(np.float64)
    out: NDArray[np.float64] = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + EPS) * weight
    return out


@pytest.mark.parametrize("shape", [(1, 1), (3, 15), (17, 576), (97, 64)])
def test_norm_equals_float64(shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal(shape, np.float32), rng.standard_normal(shape[1], np.float32)
    out = np.empty_like(x)

    rms_norm_cpu(x, weight, EPS, out, 0.0)

    assert np.abs(out - expected(x, weight)).max() < 2e-6


def test_residual_is_added_in_place_before_the_norm() -> None:
    rng = np.random.default_rng(0)
    x, residual = rng.standard_normal((2, 17, 33), np.float32)
    total, weight, out = x + residual, rng.standard_normal(33, np.float32), np.empty_like(x)

    add_rms_norm_cpu(x, weight, EPS, residual, out, 0.0)

    assert np.array_equal(residual, total)
    assert np.abs(out - expected(total, weight)).max() < 2e-6


def test_weight_may_be_stored_less_one() -> None:
    rng = np.random.default_rng(0)
    x, residual = rng.standard_normal((2, 5, 33), np.float32)
    total, weight, out = x + residual, rng.standard_normal(33, np.float32), np.empty_like(x)

    rms_norm_cpu(x, weight, EPS, out, 1.0)
    assert np.abs(out - expected(x, weight + 1)).max() < 2e-6

    add_rms_norm_cpu(x, weight, EPS, residual, out, 1.0)
    assert np.abs(out - expected(total, weight + 1)).max() < 2e-6


def test_row_has_the_same_bits_alone() -> None:
    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal((40, 577), np.float32), rng.standard_normal(577, np.float32)
    out, alone = np.empty_like(x), np.empty((1, 577), np.float32)
    rms_norm_cpu(x, weight, EPS, out, 0.0)

    for row in (0, 1, 39):
        rms_norm_cpu(x[row : row + 1], weight, EPS, alone, 0.0)
        assert np.array_equal(alone[0], out[row])


def test_zeros_stay_finite() -> None:
    out = np.full((1, 8), np.nan, np.float32)

    rms_norm_cpu(np.zeros((1, 8), np.float32), np.ones(8, np.float32), EPS, out, 0.0)

    assert (out == 0).all()
