"""RMS norm, with the addition to the residual stream in front of it."""

from typing import Any

import numpy as np

from cupaged.jit import njit, njit_inner
from cupaged.kernels.bits import store
from cupaged.kernels.chunks import num_chunks
from cupaged.kernels.launch import Array, Device, element_type, require_packed, row_stride, row_units
from cupaged.kernels.parallel import parallel_for

MAX_THREADS = 512  # of a block, which has one row
HELD = 2  # 16-byte units of a row that each thread keeps in registers
GRAIN = 1 << 14  # numbers, 2 us of a CPU's work


@njit(fastmath={"reassoc", "nsz", "contract"})
def inverse_rms(x: Any, eps: Any) -> Any:
    """Return 1 / sqrt(mean(x * x) + eps) of one row."""
    total = np.float32(0.0)
    for j in range(x.shape[0]):
        total += x[j] * x[j]
    return np.float32(1.0) / np.sqrt(total / np.float32(x.shape[0]) + eps)


@njit_inner
def norm_rows(x: Any, weight: Any, eps: Any, out: Any, weight_offset: Any, rows: Any) -> None:
    """Norm the rows [first, last) of x."""
    for i in range(*rows):
        scale = inverse_rms(x[i], eps)
        for j in range(x.shape[1]):
            out[i, j] = store(out[i, j], x[i, j] * scale * (weight_offset + weight[j]))


# For jit.specialize; {} is the type of out, f4 or u2 (the bits of bfloat16).
SIGNATURE = "void(f4[:,::1],f4[::1],f4,{}[:,::1],f4)"


@njit
def rms_norm_cpu(x: Any, weight: Any, eps: Any, out: Any, weight_offset: Any) -> None:
    """Set out to x / rms(x) * (weight_offset + weight), by rows. x, out [n, hidden]; the offset is 0 or 1."""
    parallel_for(norm_rows, x.shape[0], num_chunks(x.size, GRAIN), (x, weight, eps, out, weight_offset))


def rms_norm_cuda(
    device: Device, x: Array, weight: Array, eps: float, out: Array, *, weight_offset: float = 0.0
) -> None:
    """Set out to x / rms(x) * (weight_offset + weight), by rows. x, out T[n, hidden], weight T[hidden]."""
    kernel, threads = _kernel(device, "rms_norm", x, weight, out)
    args = (out, x, weight, x.shape[1], row_stride(x, unit=16), eps, weight_offset)
    kernel((x.shape[0], 1, 1), threads, args)


@njit_inner
def add_norm_rows(
    x: Any, weight: Any, eps: Any, residual: Any, out: Any, weight_offset: Any, rows: Any
) -> None:
    """Do residual += x and norm the sum in the rows [first, last)."""
    for i in range(*rows):
        for j in range(x.shape[1]):
            residual[i, j] += x[i, j]
        norm_rows(residual, weight, eps, out, weight_offset, (i, i + 1))


# As SIGNATURE, for add_rms_norm_cpu.
ADD_SIGNATURE = "void(f4[:,::1],f4[::1],f4,f4[:,::1],{}[:,::1],f4)"


@njit
def add_rms_norm_cpu(x: Any, weight: Any, eps: Any, residual: Any, out: Any, weight_offset: Any) -> None:
    """Do residual += x, then set out to the norm of residual."""
    args = (x, weight, eps, residual, out, weight_offset)
    parallel_for(add_norm_rows, x.shape[0], num_chunks(x.size, GRAIN), args)


def add_rms_norm_cuda(
    device: Device,
    x: Array,
    weight: Array,
    eps: float,
    residual: Array,
    out: Array,
    *,
    weight_offset: float = 0.0,
) -> None:
    """Do residual += x, rounded to T, then set out to the norm of residual."""
    kernel, threads = _kernel(device, "add_rms_norm", x, weight, out, residual)
    args = (out, residual, x, weight, x.shape[1], row_stride(x, unit=16), eps, weight_offset)
    kernel((x.shape[0], 1, 1), threads, args)


def _kernel(device: Device, name: str, x: Array, weight: Array, *written: Array) -> tuple[Any, int]:
    """Return the kernel for rows of x, and its threads a block: the fewest that hold a row, to a limit."""
    for array in written:
        require_packed("out or residual", array)
    element = element_type(x, weight, *written)
    num_units = row_units(x, "hidden_size")
    threads = 64
    while threads < MAX_THREADS and threads * HELD < num_units:
        threads *= 2
    return device.kernel("rms_norm", name, ELEMENT=element, THREADS=threads), threads
