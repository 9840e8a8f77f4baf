"""rms_norm.cu against float64 and the CPU twin."""

from typing import Any

import numpy as np
import pytest

from cupaged.kernels.rms_norm import add_rms_norm_cuda, rms_norm_cuda
from tests.cuda_on_cpu.device import EmulatedDevice
from tests.kernels.elements import BF16, DTYPES, F32, Array, assert_rounded_once, normal, strided
from tests.kernels.schedules import identical_under_all_schedules
from tests.kernels.test_rms_norm import add_rms_norm_cpu, rms_norm_cpu

EPS = 1e-5
SHAPES = [(1, 8), (17, 64), (3, 576), (2, 1096)]  # one unit; a block with idle threads; two units for some


def norm(x: Array, weight: Array, weight_offset: float = 0.0) -> Array:
    """Return the norm of rows in float64."""
    wide = x.astype(np.float64)
    rms = np.sqrt((wide**2).mean(-1, keepdims=True) + EPS)
    out: Array = wide / rms * (weight_offset + weight.astype(np.float64))
    return out


def arrays(shape: tuple[int, int], dtype: Any) -> tuple[Array, Array, Array, Array]:
    """Return x, weight, residual and out (NaN) of n rows."""
    rng = np.random.default_rng(0)
    x, residual = normal(rng, shape, dtype, 3), normal(rng, shape, dtype)
    return x, normal(rng, shape[1:], dtype), residual, np.full(shape, np.nan, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_norm_equals_float64(device: EmulatedDevice, shape: tuple[int, int], dtype: Any) -> None:
    x, weight, _, out = arrays(shape, dtype)

    rms_norm_cuda(device, strided(x), weight, EPS, out)

    assert_rounded_once(out, norm(x, weight))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_norm_is_that_of_the_rounded_sum(device: EmulatedDevice, shape: tuple[int, int], dtype: Any) -> None:
    x, weight, residual, out = arrays(shape, dtype)
    total = (residual.astype(np.float32) + x.astype(np.float32)).astype(dtype)

    add_rms_norm_cuda(device, strided(x), weight, EPS, residual, out)

    assert np.array_equal(residual, total)
    assert_rounded_once(out, norm(total, weight))


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_row_longer_than_the_registers_is_read_again(device: EmulatedDevice, dtype: Any) -> None:
    x, weight, residual, out = arrays((2, 8208), dtype)

    rms_norm_cuda(device, x, weight, EPS, out)
    assert_rounded_once(out, norm(x, weight))

    total = (residual.astype(np.float32) + x.astype(np.float32)).astype(dtype)
    add_rms_norm_cuda(device, x, weight, EPS, residual, out)
    assert np.array_equal(residual, total)
    assert_rounded_once(out, norm(total, weight))


def test_weight_offset_is_added_without_rounding(device: EmulatedDevice) -> None:
    x, weight, residual, out = arrays((3, 64), BF16)
    weight = (weight.astype(np.float32) / 64).astype(BF16)  # 1 + weight has no room in bfloat16

    rms_norm_cuda(device, x, weight, EPS, out, weight_offset=1.0)
    assert_rounded_once(out, norm(x, weight, 1.0))

    add_rms_norm_cuda(device, x, weight, EPS, residual, out, weight_offset=1.0)
    assert_rounded_once(out, norm(residual, weight, 1.0))


def test_twins_agree(device: EmulatedDevice) -> None:
    x, weight, residual, out = arrays((17, 100), F32)
    expected, twin_residual = np.empty_like(out), residual.copy()
    rms_norm_cpu(x, weight, EPS, expected, 1.0)

    rms_norm_cuda(device, x, weight, EPS, out, weight_offset=1.0)
    assert np.abs(out - expected).max() < 4e-6

    add_rms_norm_cpu(x, weight, EPS, twin_residual, expected, 0.0)
    add_rms_norm_cuda(device, x, weight, EPS, residual, out)
    assert np.array_equal(residual, twin_residual)
    assert np.abs(out - expected).max() < 4e-6


def test_nan_and_infinity_stay_in_their_row(device: EmulatedDevice) -> None:
    x, weight, _, out = arrays((4, 64), BF16)
    x[0, 5], x[2, 63], x[3] = np.nan, np.inf, 0

    rms_norm_cuda(device, x, weight, EPS, out)

    assert np.isnan(out[0].astype(np.float32)).all()
    assert_rounded_once(out[1], norm(x[1], weight))
    assert (out[3] == 0).all()


def test_row_has_the_same_bits_alone(device: EmulatedDevice) -> None:
    x, weight, _, out = arrays((17, 576), BF16)
    rms_norm_cuda(device, x, weight, EPS, out)

    alone = np.full((1, 576), np.nan, BF16)
    rms_norm_cuda(device, x[16:], weight, EPS, alone)

    assert alone.tobytes() == out[16:].tobytes()


def test_order_of_threads_changes_no_bit() -> None:
    x, weight, before, out = arrays((2, 1096), BF16)
    residual = np.empty_like(before)

    def launch(device: EmulatedDevice) -> None:
        residual[:] = before
        add_rms_norm_cuda(device, x, weight, EPS, residual, out)

    assert identical_under_all_schedules(launch, residual, out)


def test_odd_hidden_size_is_an_error_that_names_it() -> None:
    x, weight, _, out = arrays((1, 12), BF16)

    with pytest.raises(
        ValueError, match=r"hidden_size is 12, .* multiple of 8 in bfloat16; use device='cpu'"
    ):
        rms_norm_cuda(EmulatedDevice(), x, weight, EPS, out)
