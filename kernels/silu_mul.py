"""The gate of a gated MLP: silu(gate) * up."""

from typing import Any

import numpy as np

from cupaged.jit import njit, prange
from cupaged.kernels.bits import exp


@njit(signatures=["void(f4[:,::1],f4[:,::1])"], parallel=True)
def silu_mul_cpu(gate_up: Any, out: Any) -> None:
    """Set out [n, size] to silu(gate) * up of gate_up [n, 2 * size]."""
    size = out.shape[1]
    one = np.float32(1.0)
    for i in prange(out.shape[0]):
        for j in range(size):
            gate = gate_up[i, j]
            e = exp(-abs(gate))  # at most 1, so nothing overflows
            sigmoid = (one if gate >= 0 else e) / (one + e)
            out[i, j] = gate * sigmoid * gate_up[i, size + j]
