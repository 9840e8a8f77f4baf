"""x @ weight.T + bias where weights are whole numbers of 8 bits, times a scale for each output.

w8a16: x is what it is in other linear layers; a weight is exact in its type
w8a8: a row of x becomes whole numbers too, with a scale of its own; sums are exact in any order

The scale is applied once, to the complete sum. A row's bits depend on that row alone, as in linear.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cupaged.jit import njit, njit_inner
from cupaged.kernels.chunks import num_chunks
from cupaged.kernels.linear import (
    EMBEDDED_NUMBERS,
    PACKED_NUMBERS,
    as_words,
    multiply,
    pack_bias,
    place_row,
    rows_of,
)
from cupaged.kernels.linear_tile import WIDTH
from cupaged.kernels.parallel import parallel_for
from cupaged.kernels.quantize import quantize_row, quantize_rows

ZERO = 128  # what stands for 0 in a quantised x: the CPUs multiply unsigned bytes by signed ones


class QuantizedLinear(NamedTuple):
    """A weight matrix [out_features, in_features] of int8 in panels of `width` outputs."""

    panels: NDArray[np.int8]  # [num_panels, ceil(in_features / group), width, group]; group 2, or 4 of w8a8
    scales: NDArray[np.float32]  # [num_panels * width]
    bias: NDArray[np.float32]  # [num_panels * width]
    begin: NDArray[np.int32]  # [num_panels * width] of w8a8, else [0]; -ZERO * the sum of an output's weights
    out_features: int
    in_features: int


def quantized_shapes(
    out_features: int, in_features: int, group: int, width: int = WIDTH
) -> list[tuple[tuple[int, ...], type[np.generic]]]:
    """Return the shapes and types of a QuantizedLinear's arrays, in their order."""
    num_panels = -(-out_features // width)
    by_output = (num_panels * width,)
    return [
        ((num_panels, -(-in_features // group), width, group), np.int8),
        (by_output, np.float32),
        (by_output, np.float32),
        (by_output if group == 4 else (0,), np.int32),
    ]


def pack_quantized(
    parts: Sequence[NDArray[Any]], bias: Sequence[NDArray[Any]] | None, packed: QuantizedLinear
) -> None:
    """Quantise the parts [n, in_features], stacked along the outputs; ValueError if any is not finite."""
    words = as_words(packed.panels)
    packed.scales[packed.out_features :] = packed.begin[packed.out_features :] = 0
    for first, rows in rows_of(parts):
        quantize_outputs(rows, first, words, packed.scales, packed.begin)
    if not np.isfinite(packed.scales).all():
        raise ValueError("weights that are inf or NaN have no form of 8 bits; leave quantization out")
    pack_bias(bias, packed.bias)


@njit
def quantize_range(rows: Any, first: int, words: Any, scales: Any, begin: Any, bounds: Any) -> None:
    """Quantise the rows [bounds[0], bounds[1]) and put them to the outputs from `first` on."""
    quantized = np.zeros(words.shape[1] * words.itemsize, np.int8)  # zeros past in_features
    for i in range(*bounds):
        scales[first + i] = quantize_row(rows[i], 0, quantized[: rows.shape[1]])
        if begin.size > 0:
            total = np.int32(0)
            for k in range(quantized.shape[0]):
                total += np.int32(quantized[k])
            begin[first + i] = -ZERO * total
        place_row(quantized.view(words.dtype), first + i, words)


# For jit.specialize: rows, which may be read-only, and words, u2 or u4.
QUANTIZE_SIGNATURE = "void(Array({}, 2, 'C', True), i8, {}[:,:,::1], f4[::1], i4[::1])"


@njit
def quantize_outputs(rows: Any, first: int, words: Any, scales: Any, begin: Any) -> None:
    """Quantise rows [n, in_features], the weights of the outputs from `first` on."""
    args = (rows, first, words, scales, begin)
    parallel_for(quantize_range, rows.shape[0], num_chunks(rows.size, PACKED_NUMBERS), args)


# For jit.specialize: x, f4 or u2 (the bits of bfloat16).
SIGNATURE_W8A16 = "void({}[:,::1],i1[:,:,:,::1],f4[::1],f4[::1],f4[:,::1])"


@njit
def linear_w8a16_cpu(x: Any, panels: Any, scales: Any, bias: Any, out: Any) -> None:
    """Set out [n, out_features] to x [n, in_features] @ weight.T * scales + bias."""
    multiply(x, panels, (bias, scales), out)


SIGNATURE_W8A8 = "void({}[:,::1],u1[:,::1],f4[::1],i1[:,:,:,::1],f4[::1],i4[::1],f4[::1],f4[:,::1])"


@njit
def linear_w8a8_cpu(
    x: Any, quantized: Any, row_scales: Any, panels: Any, scales: Any, begin: Any, bias: Any, out: Any
) -> None:
    """Set out [n, out_features] to x [n, in_features] @ weight.T + bias, x and weight of 8 bits.

    quantized, uint8[n, in_features rounded up to a multiple of 4], and row_scales [n] are room for x.
    """
    quantize_rows(x, ZERO, quantized, row_scales)
    multiply(quantized, panels, (bias, scales, begin, row_scales), out)


@njit_inner
def embed_rows(ids: Any, panels: Any, scales: Any, out: Any, rows: Any) -> None:
    """Set the rows [first, last) of out: the first input of every group, then the others."""
    group, width = panels.shape[3], out.shape[1]
    for i in range(*rows):
        weights, lane, target, scale = (
            panels[ids[i] // panels.shape[2]],
            ids[i] % panels.shape[2],
            out[i],
            scales[ids[i]],
        )
        for j in range(group):
            for k in range((width - j + group - 1) // group):
                target[k * group + j] = np.float32(weights[k, lane, j]) * scale


EMBEDDING_SIGNATURE = "void(i4[::1],i1[:,:,:,::1],f4[::1],f4[:,::1])"


@njit
def embedding_int8_cpu(ids: Any, panels: Any, scales: Any, out: Any) -> None:
    """Set out [n, in_features] to the rows `ids` of a packed weight."""
    parallel_for(embed_rows, ids.shape[0], num_chunks(out.size, EMBEDDED_NUMBERS), (ids, panels, scales, out))
