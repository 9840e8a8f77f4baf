"""The gate of a gated MLP: activation(gate) * up."""

from typing import Any

import numpy as np

from cupaged.jit import njit, njit_inner
from cupaged.kernels import simd
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
from cupaged.kernels.simd import LANES

THREADS = 128  # a block
GRAIN = 1 << 13  # results, 3 us of a CPU's work


@njit_inner
def activate(x: Any, is_gelu: bool) -> Any:
    """Return x / (1 + e**-u) of a vector: silu where u is x, else GELU by its tanh approximation."""
    u = x
    if is_gelu:  # x / 2 * (1 + tanh(u / 2)) without cancellation; 2 sqrt(2 / pi) = 1.5957691
        u = simd.splat(np.float32(1.5957691)) * (x + simd.splat(np.float32(0.044715)) * x * x * x)
    zero, e = simd.splat(np.float32(0.0)), simd.exp(-abs(u))  # e is at most 1, so nothing overflows
    return simd.select_less(u, zero, x * e, x) / (simd.splat(np.float32(1.0)) + e)


@njit_inner
def gate_rows(gate_up: Any, out: Any, is_gelu: bool, rows: Any) -> None:
    """Set the rows [first, last) of out to activation(gate) * up."""
    size = out.shape[1]
    whole = size // LANES * LANES
    for i in range(*rows):
        gate, up, to = 2 * i * size, (2 * i + 1) * size, i * size
        for j in range(0, whole, LANES):
            x = simd.load(gate_up, gate + j)
            simd.store(out, to + j, activate(x, is_gelu) * simd.load(gate_up, up + j))
        if whole < size:
            rest = size - whole
            x = simd.load_part(gate_up, gate + whole, rest)
            product = activate(x, is_gelu) * simd.load_part(gate_up, up + whole, rest)
            simd.store_part(out, to + whole, rest, product)


# For jit.specialize; {} is the type of out, f4 or u2 (the bits of bfloat16).
SIGNATURE = "void(f4[:,::1],{}[:,::1])"


@njit
def silu_mul_cpu(gate_up: Any, out: Any) -> None:
    """Set out [n, size] to silu(gate) * up of gate_up [n, 2 * size]."""
    parallel_for(gate_rows, out.shape[0], num_chunks(out.size, GRAIN), (gate_up, out, False))


def silu_mul_cuda(device: Device, gate_up: Array, out: Array) -> None:
    """Set out T[n, size] to silu(gate) * up of gate_up T[n, 2 * size]."""
    _launch(device, "silu_mul", gate_up, out)


@njit
def gelu_tanh_mul_cpu(gate_up: Any, out: Any) -> None:
    """Set out [n, size] to gelu(gate) * up of gate_up [n, 2 * size], GELU by its tanh approximation."""
    parallel_for(gate_rows, out.shape[0], num_chunks(out.size, GRAIN), (gate_up, out, True))


def gelu_tanh_mul_cuda(device: Device, gate_up: Array, out: Array) -> None:
    """Set out T[n, size] to gelu(gate) * up of gate_up T[n, 2 * size], GELU by its tanh approximation."""
    _launch(device, "gelu_tanh_mul", gate_up, out)


def _launch(device: Device, name: str, gate_up: Array, out: Array) -> None:
    num_units = row_units(out, "intermediate_size")
    require_packed("out", out)
    kernel = device.kernel("gated_mul", name, ELEMENT=element_type(gate_up, out), THREADS=THREADS)
    grid = (out.shape[0], ceil_div(num_units, THREADS), 1)
    kernel(grid, THREADS, (out, gate_up, out.shape[1], row_stride(gate_up, unit=16)))
