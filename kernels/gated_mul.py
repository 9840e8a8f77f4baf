"""The gate of a gated MLP: activation(gate) * up."""

from typing import Any

import numpy as np

from cupaged.jit import njit, njit_inner
from cupaged.kernels.bits import exp, store
from cupaged.kernels.chunks import num_chunks
from cupaged.kernels.launch import (
    Array,
    Device,
    ceil_div,
    element_type,
    require_packed,
    row_stride,
    row_units,
)
from cupaged.kernels.parallel import parallel_for

THREADS = 128  # a block
GRAIN = 1 << 14  # results, 5 us of a CPU's work


@njit(error_model="numpy")  # or a test for division by zero would keep the loop from being vectorised
def sigmoid(x: Any) -> Any:
    """Return 1 / (1 + e**-x)."""
    one = np.float32(1.0)
    e = exp(-abs(x))  # at most 1, so nothing overflows
    return (one if x >= 0 else e) / (one + e)


@njit_inner
def silu_mul_rows(gate_up: Any, out: Any, rows: Any) -> None:
    """Set the rows [first, last) of out."""
    size = out.shape[1]
    for i in range(*rows):
        gates, ups, products = gate_up[i, :size], gate_up[i, size:], out[i]
        for j in range(size):
            products[j] = store(products[j], gates[j] * sigmoid(gates[j]) * ups[j])


# For jit.specialize; {} is the type of out, f4 or u2 (the bits of bfloat16).
SIGNATURE = "void(f4[:,::1],{}[:,::1])"


@njit
def silu_mul_cpu(gate_up: Any, out: Any) -> None:
    """Set out [n, size] to silu(gate) * up of gate_up [n, 2 * size]."""
    parallel_for(silu_mul_rows, out.shape[0], num_chunks(out.size, GRAIN), (gate_up, out))


def silu_mul_cuda(device: Device, gate_up: Array, out: Array) -> None:
    """Set out T[n, size] to silu(gate) * up of gate_up T[n, 2 * size]."""
    _launch(device, "silu_mul", gate_up, out)


@njit_inner
def gelu_tanh_mul_rows(gate_up: Any, out: Any, rows: Any) -> None:
    """Set the rows [first, last) of out."""
    size = out.shape[1]
    for i in range(*rows):
        gates, ups, products = gate_up[i, :size], gate_up[i, size:], out[i]
        for j in range(size):
            gate = gates[j]
            # gate / 2 * (1 + tanh(u)) is gate * sigmoid(2 u) without cancellation; 2 sqrt(2 / pi) = 1.5957691
            doubled = np.float32(1.5957691) * (gate + np.float32(0.044715) * gate * gate * gate)
            products[j] = store(products[j], gate * sigmoid(doubled) * ups[j])


@njit
def gelu_tanh_mul_cpu(gate_up: Any, out: Any) -> None:
    """Set out [n, size] to gelu(gate) * up of gate_up [n, 2 * size], GELU by its tanh approximation."""
    parallel_for(gelu_tanh_mul_rows, out.shape[0], num_chunks(out.size, GRAIN), (gate_up, out))


def gelu_tanh_mul_cuda(device: Device, gate_up: Array, out: Array) -> None:
    """Set out T[n, size] to gelu(gate) * up of gate_up T[n, 2 * size], GELU by its tanh approximation."""
    _launch(device, "gelu_tanh_mul", gate_up, out)


def _launch(device: Device, name: str, gate_up: Array, out: Array) -> None:
    num_units = row_units(out, "intermediate_size")
    require_packed("out", out)
    kernel = device.kernel("gated_mul", name, ELEMENT=element_type(gate_up, out), THREADS=THREADS)
    grid = (out.shape[0], ceil_div(num_units, THREADS), 1)
    kernel(grid, THREADS, (out, gate_up, out.shape[1], row_stride(gate_up, unit=16)))
