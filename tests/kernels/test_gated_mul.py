"""activation(gate) * up."""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from cupaged.jit import specialize
from cupaged.kernels import gated_mul
from cupaged.kernels.gated_mul import GRAIN, SIGNATURE

Array = NDArray[Any]


def silu_mul_cpu(gate_up: Array, out: Array) -> None:
    """Run the twin that writes the type of `out`."""
    specialize(gated_mul.silu_mul_cpu, SIGNATURE.format(out.dtype.str[1:]))
    gated_mul.silu_mul_cpu(gate_up, out)


def gelu_tanh_mul_cpu(gate_up: Array, out: Array) -> None:
    """Run the twin that writes the type of `out`."""
    specialize(gated_mul.gelu_tanh_mul_cpu, SIGNATURE.format(out.dtype.str[1:]))
    gated_mul.gelu_tanh_mul_cpu(gate_up, out)


def silu(x: Array) -> Array:
    """Return silu in float64."""
    wide: Array = x.astype(np.float64)
    wide /= 1 + np.exp(-np.clip(wide, -700, 700))
    return wide


def gelu_tanh(x: Array) -> Array:
    """Return GELU's tanh approximation in float64."""
    wide: Array = x.astype(np.float64)
    wide *= (1 + np.tanh(np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3))) / 2
    return wide


Twin = Callable[[Array, Array], None]
Activation = Callable[[Array], Array]
CASES = [(silu_mul_cpu, silu), (gelu_tanh_mul_cpu, gelu_tanh)]


@pytest.mark.parametrize(("twin", "activation"), CASES)
def test_result_equals_float64(twin: Twin, activation: Activation) -> None:
    gate_up = np.random.default_rng(0).standard_normal((17, 2 * 97), np.float32) * 10
    out = np.empty((17, 97), np.float32)

    twin(gate_up, out)

    gate, up = np.split(gate_up, 2, 1)
    assert np.allclose(out, activation(gate) * up, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("twin", [silu_mul_cpu, gelu_tanh_mul_cpu])
def test_extreme_gates_neither_overflow_nor_vanish(twin: Twin) -> None:
    gate_up = np.array([[1e4, -1e4, 0, 3e38, -3e38, 2, 2, 2, 1, 1]], np.float32)
    out = np.empty((1, 5), np.float32)

    twin(gate_up, out)

    assert out.tolist() == [[2e4, 0, 0, np.float32(3e38), 0]]


@pytest.mark.parametrize("twin", [silu_mul_cpu, gelu_tanh_mul_cpu])
def test_bfloat16_result_is_the_rounded_float32_one(twin: Twin) -> None:
    gate_up = np.random.default_rng(0).standard_normal((17, 2 * 97), np.float32) * 10
    exact, half = np.empty((17, 97), np.float32), np.empty((17, 97), np.uint16)

    twin(gate_up, exact)
    twin(gate_up, half)

    assert np.array_equal(half, exact.astype(ml_dtypes.bfloat16).view(np.uint16))


@pytest.mark.parametrize("twin", [silu_mul_cpu, gelu_tanh_mul_cpu])
def test_row_has_the_same_bits_alone(twin: Twin) -> None:
    size = 97
    num_rows = 2 * GRAIN // size + 1  # more than one thread's
    gate_up = np.random.default_rng(0).standard_normal((num_rows, 2 * size), np.float32) * 10
    out, alone = np.empty((num_rows, size), np.float32), np.empty((1, size), np.float32)

    twin(gate_up, out)

    for row in range(0, num_rows, 5):
        twin(gate_up[row : row + 1], alone)
        assert np.array_equal(alone[0], out[row])
