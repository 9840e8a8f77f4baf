"""gated_mul.cu against float64 and the CPU twins."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cupaged.kernels.gated_mul import gelu_tanh_mul_cuda, silu_mul_cuda
from tests.cuda_on_cpu.device import EmulatedDevice
from tests.kernels.elements import BF16, DTYPES, F32, Array, assert_rounded_once, normal, strided
from tests.kernels.schedules import identical_under_all_schedules
from tests.kernels.test_gated_mul import Activation, Twin, gelu_tanh, gelu_tanh_mul_cpu, silu, silu_mul_cpu

Launch = Callable[[EmulatedDevice, Array, Array], None]
LAUNCHES = [silu_mul_cuda, gelu_tanh_mul_cuda]
CASES = [(silu_mul_cuda, silu), (gelu_tanh_mul_cuda, gelu_tanh)]


@pytest.mark.parametrize("shape", [(1, 8), (17, 136), (3, 1032)])  # one unit; idle threads; two blocks a row
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("launch", "activation"), CASES)
def test_result_equals_float64(
    device: EmulatedDevice,
    launch: Launch,
    activation: Activation,
    dtype: Any,
    shape: tuple[int, int],
) -> None:
    num_rows, size = shape
    gate_up = normal(np.random.default_rng(0), (num_rows, 2 * size), dtype, 3)
    out = np.full(shape, np.nan, dtype)

    launch(device, strided(gate_up), out)

    gate, up = np.split(gate_up, 2, 1)
    # The exponent is rounded before the exponential is taken, so its error grows with the gate.
    assert_rounded_once(
        out, activation(gate) * up.astype(np.float64), np.abs(3 * gate.astype(np.float64) * up)
    )


@pytest.mark.parametrize(
    ("launch", "twin"), [(silu_mul_cuda, silu_mul_cpu), (gelu_tanh_mul_cuda, gelu_tanh_mul_cpu)]
)
def test_twins_agree(device: EmulatedDevice, launch: Launch, twin: Twin) -> None:
    gate_up = normal(np.random.default_rng(0), (5, 2 * 100), F32, 10)
    out, expected = np.full((2, 5, 100), np.nan, F32)
    twin(gate_up, expected)

    launch(device, gate_up, out)

    assert np.allclose(out, expected, rtol=4e-6, atol=1e-6)


@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_extreme_gates_stay_numbers(device: EmulatedDevice, launch: Launch, dtype: Any) -> None:
    gate = np.array([1e4, -1e4, 0, 3e38, -3e38, np.inf, np.nan, 1e-30], dtype)
    gate_up, out = np.concatenate([gate, np.ones(8, dtype)])[None], np.full((1, 8), np.inf, dtype)

    launch(device, gate_up, out)

    expected = np.array([gate[0], 0, 0, gate[3], 0, np.inf, np.nan, gate[7] * dtype.type(0.5)], dtype)
    assert np.array_equal(out[0].astype(np.float64), expected.astype(np.float64), equal_nan=True)


def test_order_of_threads_changes_no_bit() -> None:
    gate_up = normal(np.random.default_rng(0), (3, 2 * 136), BF16)
    out = np.empty((3, 136), BF16)

    assert identical_under_all_schedules(lambda device: silu_mul_cuda(device, gate_up, out), out)


def test_odd_size_is_an_error_that_names_it() -> None:
    with pytest.raises(ValueError, match=r"intermediate_size is 97, .* multiple of 8 in bfloat16"):
        silu_mul_cuda(EmulatedDevice(), np.zeros((1, 194), BF16), np.zeros((1, 97), BF16))
