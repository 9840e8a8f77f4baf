"""RMS norm, with the addition to the residual stream in front of it."""

from typing import Any

import numpy as np

from cupaged.jit import njit, prange


@njit(fastmath={"reassoc", "nsz", "contract"})
def inverse_rms(x: Any, eps: Any) -> Any:
    """Return 1 / sqrt(mean(x * x) + eps) of one row."""
    total = np.float32(0.0)
    for j in range(x.shape[0]):
        total += x[j] * x[j]
    return np.float32(1.0) / np.sqrt(total / np.float32(x.shape[0]) + eps)


@njit(signatures=["void(f4[:,::1],f4[::1],f4,f4[:,::1])"], parallel=True)
def rms_norm_cpu(x: Any, weight: Any, eps: Any, out: Any) -> None:
    """Set out to x * weight / rms(x), by rows. x, out [n, hidden]."""
    for i in prange(x.shape[0]):
        scale = inverse_rms(x[i], eps)
        for j in range(x.shape[1]):
            out[i, j] = x[i, j] * scale * weight[j]


@njit(signatures=["void(f4[:,::1],f4[::1],f4,f4[:,::1],f4[:,::1])"], parallel=True)
def add_rms_norm_cpu(x: Any, weight: Any, eps: Any, residual: Any, out: Any) -> None:
    """Do residual += x, then set out to the norm of residual."""
    for i in prange(x.shape[0]):
        for j in range(x.shape[1]):
            residual[i, j] += x[i, j]
        scale = inverse_rms(residual[i], eps)
        for j in range(x.shape[1]):
            out[i, j] = residual[i, j] * scale * weight[j]
