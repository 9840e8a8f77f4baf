"""The linear layers on AMX: right, and a row's bits whatever else there is.

Everywhere the functions run as they stand, on the stand-in for the tiles, and are compiled for a CPU with
AMX; where there is one, they also run compiled.
"""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from cupaged.kernels import amx, linear_amx
from cupaged.kernels.quantize import quantize_rows
from tests.kernels.plain_amx import plain

KERNELS = [plain, *([linear_amx] if amx.HAS_AMX else [])]
# (in, out): one block and less, odd numbers of blocks, wider than a square, deeper than a part of the inputs.
SHAPES = [(64, 16), (64, 1), (64, 15), (128, 17), (192, 33), (64, 48), (320, 65), (64, 97), (2112, 20)]


def random(seed: int, *shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def halves(x: NDArray[np.float32]) -> NDArray[Any]:
    return x.astype(ml_dtypes.bfloat16)


def padded(vector: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.concatenate([vector, np.zeros(-len(vector) % 16, np.float32)])


def pack(weight: NDArray[Any], group: int) -> NDArray[Any]:
    """Return [outputs, inputs] as [blocks of 16 outputs, inputs / group, 16, group]."""
    whole = np.concatenate([weight, np.zeros((-len(weight) % 16, weight.shape[1]), weight.dtype)])
    blocks = whole.reshape(len(whole) // 16, 16, -1, group)
    return np.ascontiguousarray(blocks.transpose(0, 2, 1, 3))


class Layer:
    """Random weights of one of the three kinds, and rows for them."""

    def __init__(self, kind: str, in_features: int, out_features: int, num_rows: int) -> None:
        rng = np.random.default_rng(in_features + out_features)
        self.kind = kind
        self.bias, self.scale = random(2, out_features), random(3, out_features)
        self.weight = random(0, out_features, in_features)
        self.x = random(1, num_rows, in_features)
        if kind != "bf16":
            self.weight = rng.integers(-128, 128, self.weight.shape).astype(np.int8)

    def quantized(self) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
        """Return the rows as they are multiplied where they have 8 bits, and their scales."""
        x, row_scale = np.empty(self.x.shape, np.int8), np.empty(len(self.x), np.float32)
        quantize_rows(self.x, 0, x, row_scale)
        return x, row_scale

    def exact(self) -> NDArray[np.float64]:
        is_byte = self.weight.dtype == np.int8
        weight = (self.weight if is_byte else halves(self.weight)).astype(np.float64)
        rows, row_scale = self.quantized() if self.kind == "w8a8" else (halves(self.x), np.ones(len(self.x)))
        product: NDArray[np.float64] = rows.astype(np.float64) @ weight.T * row_scale[:, None]
        return product * (self.scale if is_byte else 1.0) + self.bias

    def run(self, kernels: Any, rows: Any = slice(None)) -> NDArray[np.float32]:
        """Return the result for some of the rows."""
        x, scale, bias = np.ascontiguousarray(self.x[rows]), padded(self.scale), padded(self.bias)
        out = np.full((len(x), len(self.bias)), np.nan, np.float32)
        if self.kind == "bf16":
            bits = pack(halves(self.weight).view(np.uint16), 2)
            kernels.linear_amx(halves(x).view(np.uint16), bits, bias, out)
        elif self.kind == "w8a16":
            kernels.linear_w8a16_amx(halves(x).view(np.uint16), pack(self.weight, 2), scale, bias, out)
        else:
            room = np.empty(x.shape, np.int8), np.empty(len(x), np.float32)
            kernels.linear_w8a8_amx(x, *room, pack(self.weight, 4), scale, bias, out)
        return out


@pytest.mark.parametrize("num_rows", [1, 16, 17, 40])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["bf16", "w8a16", "w8a8"])
@pytest.mark.parametrize("kernels", KERNELS)
def test_result_equals_float64(kernels: Any, kind: str, shape: tuple[int, int], num_rows: int) -> None:
    layer = Layer(kind, *shape, num_rows)
    expected = layer.exact()

    error = np.abs(layer.run(kernels) - expected) / np.abs(expected).max()

    assert error.max() < 2e-6, f"max error {error.max():.2e}, mean {error.mean():.2e}"


@pytest.mark.parametrize("kind", ["bf16", "w8a16", "w8a8"])
@pytest.mark.parametrize("kernels", KERNELS)
def test_row_has_the_same_bits_for_every_number_of_rows(kernels: Any, kind: str) -> None:
    layer = Layer(kind, *((64, 17) if kind == "w8a16" else (128, 33)), 130)
    whole = layer.run(kernels)

    for num_rows in range(1, 130):
        assert np.array_equal(layer.run(kernels, slice(num_rows)), whole[:num_rows]), num_rows


@pytest.mark.parametrize("kind", ["bf16", "w8a16", "w8a8"])
@pytest.mark.parametrize("kernels", KERNELS)
def test_row_has_the_same_bits_in_a_second_slab_and_with_inputs_in_parts(kernels: Any, kind: str) -> None:
    inputs = 64 if kind == "w8a8" else 32  # of a tile
    layer = Layer(kind, inputs * (plain.DEPTH + 2), 5, plain.SLAB + 33)
    rows = [0, 31, 40, plain.SLAB - 1, plain.SLAB, plain.SLAB + 32]

    whole = layer.run(kernels)

    assert np.array_equal(whole[rows], layer.run(kernels, rows))


@pytest.mark.parametrize("position", [0, 15, 16, 31, 32, 47, 49])
@pytest.mark.parametrize("kernels", KERNELS)
def test_row_has_the_same_bits_among_any_neighbours(kernels: Any, position: int) -> None:
    layer = Layer("bf16", 64, 20, 50)
    alone = layer.run(kernels, slice(position, position + 1))[0]

    layer.x[np.arange(50) != position] = np.nan

    assert np.array_equal(layer.run(kernels)[position], alone)


@pytest.mark.parametrize("num_rows", [3, 40])
@pytest.mark.parametrize("kind", ["bf16", "w8a16", "w8a8"])
def test_parts_of_the_inputs_slabs_and_pieces_change_no_bit(
    kind: str, num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = Layer(kind, 320, 97, num_rows)
    whole = layer.run(plain)

    for name, value in (("DEPTH", 2), ("SHALLOW", 1), ("SLAB", 32), ("GRAIN", 1)):
        monkeypatch.setattr(plain, name, value)

    assert np.array_equal(layer.run(plain), whole)


@pytest.mark.parametrize("kernels", KERNELS)
def test_int8_sums_are_exact_and_scaled_in_one_order(kernels: Any) -> None:
    layer = Layer("w8a8", 320, 33, 40)
    x, row_scale = layer.quantized()
    sums = x.astype(np.int32) @ layer.weight.astype(np.int32).T

    expected = sums.astype(np.float32) * (row_scale[:, None] * layer.scale) + layer.bias

    assert np.array_equal(layer.run(kernels), expected)


@pytest.mark.parametrize("kind", ["bf16", "w8a16", "w8a8"])
@pytest.mark.parametrize("kernels", KERNELS)
def test_no_rows_give_no_rows(kernels: Any, kind: str) -> None:
    assert Layer(kind, 64, 5, 0).run(kernels).shape == (0, 5)


@pytest.mark.parametrize("x", [np.zeros((70, 64), np.uint16), np.zeros((33, 192), np.int8)])
def test_many_rows_are_laid_out_as_tiles_that_begin_on_a_cache_line(x: Any) -> None:
    width = 64 // x.itemsize
    x[:] = np.random.default_rng(0).integers(0, 100, x.shape)

    for kernels in (plain, linear_amx):
        packed = kernels.lay_out(x)
        tiles = packed.reshape(-1, x.shape[1] // width, 16, width)
        rows = tiles.transpose(0, 2, 1, 3).reshape(-1, x.shape[1])

        assert np.array_equal(rows[: len(x)], x)
        assert packed.ctypes.data % 64 == 0


COMPILE = """
import json
from cupaged.jit import specialize
from cupaged.kernels import amx, linear_amx

amx.HAS_AMX = True
kernels = {
    "linear_amx": linear_amx.SIGNATURE,
    "linear_w8a16_amx": linear_amx.SIGNATURE_W8A16,
    "linear_w8a8_amx": linear_amx.SIGNATURE_W8A8.format("f4"),
}
found = {}
for name, signature in kernels.items():
    kernel = getattr(linear_amx, name)
    specialize(kernel, signature)
    text = kernel.inspect_asm(kernel.signatures[0])
    found[name] = [line.split()[0] for line in text.splitlines() if line.startswith("\\t")]
print(json.dumps(found))
"""


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="LLVM's x86 code, on an x86 CPU")
def test_kernels_compile_to_the_instructions_for_a_cpu_that_has_them(tmp_path: Path) -> None:
    target = {"NUMBA_CPU_NAME": "sapphirerapids", "NUMBA_CPU_FEATURES": "+amx-tile,+amx-bf16,+amx-int8"}
    environment = os.environ | target | {"XDG_CACHE_HOME": str(tmp_path), "NUMBA_DISABLE_JIT": "0"}

    result = subprocess.run(
        [sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, check=False
    )

    assert result.returncode == 0, result.stderr
    always = {"ldtilecfg", "tileloadd", "tilestored", "tilerelease", "prefetcht0"}
    dots = {"linear_amx": "tdpbf16ps", "linear_w8a16_amx": "tdpbf16ps", "linear_w8a8_amx": "tdpbssd"}
    for name, instructions in json.loads(result.stdout).items():
        assert {*always, dots[name]} <= set(instructions), name
        assert instructions.count("tileloadd") >= 8, name  # one of each tile
