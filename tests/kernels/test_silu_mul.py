"""silu(gate) * up."""

import numpy as np

from cupaged.kernels.silu_mul import silu_mul_cpu


def test_result_equals_float64() -> None:
    gate_up = np.random.default_rng(0).standard_normal((17, 2 * 97), np.float32) * 10
    out = np.empty((17, 97), np.float32)

    silu_mul_cpu(gate_up, out)

    gate, up = np.split(gate_up.astype(np.float64), 2, 1)
    assert np.allclose(out, gate / (1 + np.exp(-gate)) * up, rtol=1e-6, atol=1e-6)


def test_extreme_gates_neither_overflow_nor_vanish() -> None:
    gate_up = np.array([[1e4, -1e4, 0, 3e38, 2, 2, 2, 1]], np.float32)
    out = np.empty((1, 4), np.float32)

    silu_mul_cpu(gate_up, out)

    assert out.tolist() == [[2e4, 0, 0, np.float32(3e38)]]
