"""The forms in which the CPU backend keeps a matrix: how it is packed, and which kernels multiply by it.

A form is chosen once for each matrix, by its types and the CPU, never by the size of a batch.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from cupaged.config import QuantizationName
from cupaged.kernels import amx, linear, linear_amx, linear_int8
from cupaged.kernels.emit import LANES
from cupaged.kernels.linear import PackedLinear
from cupaged.kernels.linear_int8 import QuantizedLinear
from cupaged.kernels.linear_tile import WIDTH

Array = Any
Take = Callable[[tuple[int, ...], Any], Array]  # room that is free again after a step
Kernel = tuple[Callable[..., None], str]  # a function and a signature it is wanted for
Launch = tuple[Any, ...]  # a kernel, then its arguments
CODES = {np.dtype(np.float32): "f4", np.dtype(ml_dtypes.bfloat16): "u2"}  # in the kernels' signatures


class Form(Protocol):
    """A way to keep matrices."""

    def arrays(self, out_features: int, in_features: int) -> Sequence[tuple[tuple[int, ...], Any]]:
        """Return the shapes and types of the arrays that a matrix takes."""

    def kernels(self, weights: Sequence[NDArray[Any]]) -> list[Kernel]:
        """Return what packs such weights, and what multiplies by them as packed."""

    def pack(self, weights: Sequence[NDArray[Any]], bias: Any, packed: Any) -> None:
        """Pack the weights, stacked along the output, into the arrays of `packed`."""

    def name(self, arrays: Sequence[Array], out_features: int, in_features: int) -> Any:
        """Return the arrays under their names."""

    def multiply(self, x: Array, packed: Any, out: Array, take: Take) -> Launch:
        """Return the call that sets out to x @ weight.T + bias."""

    def embed(self, ids: Array, packed: Any, out: Array) -> Launch:
        """Return the call that sets out to the rows `ids`."""


class Matrix(NamedTuple):
    """A matrix [out_features, in_features] in its form."""

    form: Form
    packed: PackedLinear | QuantizedLinear
    out_features: int
    in_features: int


def choose_form(
    weights: Sequence[NDArray[Any]], weight: Any, inputs: Any, quantization: QuantizationName | None
) -> Form:
    """Return the form for a matrix; `weight` and `inputs` are the types of what is multiplied.

    In float32 the weights of a bfloat16 checkpoint stay bfloat16, which loses nothing.
    """
    half = np.dtype(ml_dtypes.bfloat16)
    is_w8a8 = quantization == "int8_w8a8"
    row = amx.ROW_BYTES if is_w8a8 else amx.ROW_BYTES // 2  # inputs; a matrix of no whole rows goes without
    tiles = amx.HAS_AMX and (is_w8a8 or inputs == half) and weights[0].shape[1] % row == 0
    if is_w8a8:
        return Bytes(CODES[inputs], 4, tiles)
    if quantization == "int8":
        return Bytes(CODES[inputs], 2, tiles)
    exact = all(part.dtype == half for part in weights)
    return Floats(CODES[inputs], half if exact else weight, tiles)


def _width(tiles: bool) -> int:
    """Return how many outputs make a panel."""
    return LANES if tiles else WIDTH


def _stored(weights: Sequence[NDArray[Any]]) -> list[str]:
    """Return the types in which kernels read the weights, as signatures spell them."""
    return sorted({"u2" if part.dtype == ml_dtypes.bfloat16 else "f4" for part in weights})


class Floats(NamedTuple):
    """Weights of float32 or bfloat16; `inputs` is the type of x, as signatures spell it."""

    inputs: str
    dtype: Any
    tiles: bool  # of AMX

    def arrays(self, out_features: int, in_features: int) -> Sequence[tuple[tuple[int, ...], Any]]:
        panels, bias = linear.packed_shapes(out_features, in_features, self.dtype, _width(self.tiles))
        return [(panels, self.dtype), (bias, np.float32)]

    def kernels(self, weights: Sequence[NDArray[Any]]) -> list[Kernel]:
        code = CODES[self.dtype]
        multiply = (
            (linear_amx.linear_amx, linear_amx.SIGNATURE)
            if self.tiles
            else (linear.linear_cpu, linear.SIGNATURE.format(self.inputs, code))
        )
        pack = [(linear.pack_rows, linear.PACK_SIGNATURE.format(stored, code)) for stored in _stored(weights)]
        return [multiply, (linear.embedding_cpu, linear.EMBEDDING_SIGNATURE.format(code)), *pack]

    def pack(self, weights: Sequence[NDArray[Any]], bias: Any, packed: Any) -> None:
        linear.pack_linear(weights, bias, packed.panels, packed.bias)

    def name(self, arrays: Sequence[Array], out_features: int, in_features: int) -> PackedLinear:
        panels, bias = arrays
        is_half = panels.dtype == ml_dtypes.bfloat16
        return PackedLinear(panels.view(np.uint16) if is_half else panels, bias, out_features, in_features)

    def multiply(self, x: Array, packed: Any, out: Array, take: Take) -> Launch:  # noqa: ARG002
        kernel = linear_amx.linear_amx if self.tiles else linear.linear_cpu
        return kernel, x, packed.panels, packed.bias, out

    def embed(self, ids: Array, packed: Any, out: Array) -> Launch:
        return linear.embedding_cpu, ids, packed.panels, out


_BYTES: dict[tuple[int, bool], Kernel] = {  # what multiplies in a form of Bytes, by its group and tiles
    (2, False): (linear_int8.linear_w8a16_cpu, linear_int8.SIGNATURE_W8A16),
    (2, True): (linear_amx.linear_w8a16_amx, linear_amx.SIGNATURE_W8A16),
    (4, False): (linear_int8.linear_w8a8_cpu, linear_int8.SIGNATURE_W8A8),
    (4, True): (linear_amx.linear_w8a8_amx, linear_amx.SIGNATURE_W8A8),
}


class Bytes(NamedTuple):
    """Weights of 8 bits with a scale for each output; x as it is, or of 8 bits with a scale for each row."""

    inputs: str
    group: int  # inputs whose weights lie together: 2, or 4 if x has 8 bits
    tiles: bool  # of AMX

    def arrays(self, out_features: int, in_features: int) -> Sequence[tuple[tuple[int, ...], Any]]:
        return linear_int8.quantized_shapes(out_features, in_features, self.group, _width(self.tiles))

    def kernels(self, weights: Sequence[NDArray[Any]]) -> list[Kernel]:
        multiply, signature = _BYTES[self.group, self.tiles]
        words = f"u{self.group}"
        return [
            (multiply, signature.format(self.inputs)),
            (linear_int8.embedding_int8_cpu, linear_int8.EMBEDDING_SIGNATURE),
            *(
                (linear_int8.quantize_outputs, linear_int8.QUANTIZE_SIGNATURE.format(stored, words))
                for stored in _stored(weights)
            ),
        ]

    def pack(self, weights: Sequence[NDArray[Any]], bias: Any, packed: Any) -> None:
        linear_int8.pack_quantized(weights, bias, packed)

    def name(self, arrays: Sequence[Array], out_features: int, in_features: int) -> QuantizedLinear:
        return QuantizedLinear._make((*arrays, out_features, in_features))

    def multiply(self, x: Array, packed: Any, out: Array, take: Take) -> Launch:
        kernel, _ = _BYTES[self.group, self.tiles]
        if self.group == 2:
            return kernel, x, packed.panels, packed.scales, packed.bias, out
        num_rows, groups = x.shape[0], packed.panels.shape[1]
        kind = np.int8 if self.tiles else np.uint8
        room = take((num_rows, self.group * groups), kind), take((num_rows,), np.float32)
        begin = () if self.tiles else (packed.begin,)
        return kernel, x, *room, packed.panels, packed.scales, *begin, packed.bias, out

    def embed(self, ids: Array, packed: Any, out: Array) -> Launch:
        return linear_int8.embedding_int8_cpu, ids, packed.panels, packed.scales, out
