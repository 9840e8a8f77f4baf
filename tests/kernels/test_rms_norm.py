"""RMS norm, alone and behind the residual add."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from cupaged.jit import specialize
from cupaged.kernels import rms_norm
from cupaged.kernels.rms_norm import ADD_SIGNATURE, GRAIN, SIGNATURE

EPS = 1e-5


def rms_norm_cpu(x: Any, weight: Any, eps: float, out: Any, weight_offset: float) -> None:
    """Run the twin that writes the type of `out`."""
    specialize(rms_norm.rms_norm_cpu, SIGNATURE.format(out.dtype.str[1:]))
    rms_norm.rms_norm_cpu(x, weight, eps, out, weight_offset)


def add_rms_norm_cpu(x: Any, weight: Any, eps: float, residual: Any, out: Any, weight_offset: float) -> None:
    """Run the twin that writes the type of `out`."""
    specialize(rms_norm.add_rms_norm_cpu, ADD_SIGNATURE.format(out.dtype.str[1:]))
    rms_norm.add_rms_norm_cpu(x, weight, eps, residual, out, weight_offset)


def expected(x: NDArray[np.float32], weight: NDArray[np.float32]) -> NDArray[np.float64]:
    wide = x.astype(np.float64)
    out: NDArray[np.float64] = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + EPS) * weight
    return out


@pytest.mark.parametrize("shape", [(1, 1), (3, 15), (17, 576), (97, 64), (113, 600)])
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


def test_bfloat16_result_is_the_rounded_float32_one() -> None:
    rng = np.random.default_rng(0)
    x, residual = rng.standard_normal((2, 17, 577), np.float32)
    weight, exact, half = rng.standard_normal(577, np.float32), np.empty_like(x), np.empty(x.shape, np.uint16)

    rms_norm_cpu(x, weight, EPS, exact, 0.0)
    rms_norm_cpu(x, weight, EPS, half, 0.0)
    assert np.array_equal(half, exact.astype(ml_dtypes.bfloat16).view(np.uint16))

    add_rms_norm_cpu(x, weight, EPS, residual.copy(), exact, 0.0)
    add_rms_norm_cpu(x, weight, EPS, residual, half, 0.0)
    assert np.array_equal(half, exact.astype(ml_dtypes.bfloat16).view(np.uint16))


def test_row_has_the_same_bits_alone() -> None:
    rng = np.random.default_rng(0)
    shape = (2 * GRAIN // 577 + 1, 577)  # more than one thread's
    x, residual = rng.standard_normal((2, *shape), np.float32)
    weight, out, alone = (
        rng.standard_normal(577, np.float32),
        np.empty_like(x),
        np.empty((1, 577), np.float32),
    )
    before = residual.copy()

    rms_norm_cpu(x, weight, EPS, out, 0.0)
    for row in range(0, len(x), 7):
        rms_norm_cpu(x[row : row + 1], weight, EPS, alone, 0.0)
        assert np.array_equal(alone[0], out[row])

    add_rms_norm_cpu(x, weight, EPS, residual, out, 0.0)
    for row in range(0, len(x), 7):
        add_rms_norm_cpu(x[row : row + 1], weight, EPS, before[row : row + 1], alone, 0.0)
        assert np.array_equal(alone[0], out[row])


def test_zeros_stay_finite() -> None:
    out = np.full((1, 8), np.nan, np.float32)

    rms_norm_cpu(np.zeros((1, 8), np.float32), np.ones(8, np.float32), EPS, out, 0.0)

    assert (out == 0).all()
