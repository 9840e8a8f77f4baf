"""What a kernel case is, and how its arrays are made, on any device.

A case names one call of a launch function: on small arrays to compare what comes out (goldens.py), on large
ones to time it (gpu_check), on arrays without memory to learn what it launches (launches.py).
"""

import mmap
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from cupaged.kernels.launch import SOURCES, Array, Device

Arrays = Mapping[str, Array]  # of a case, by name
Shape = tuple[int, ...]
DTYPES: dict[str, Any] = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "float": np.float32}  # by -D ELEMENT


class Tolerance(NamedTuple):
    """How far a result may be from the emulator's: relative * magnitude + absolute."""

    relative: float
    absolute: float


EXACT = Tolerance(0.0, 0.0)
# float32 results that differ in their last bits may round to neighbours: one unit in the last place of T.
ROUNDED = {
    "bf16": Tolerance(2**-7, 2**-20),
    "f16": Tolerance(2**-10, 2**-20),
    "float": Tolerance(2**-18, 2**-20),
}

# Attention rounds its weights to T as well, so now and then a weight, too, is rounded the other way.
ATTENTION = {"bf16": Tolerance(2**-7, 2**-9), "f16": Tolerance(2**-10, 2**-12)}


class Maker(Protocol):
    """Makes a case's arrays, all C-contiguous; views of them are taken where they are launched."""

    def normal(self, shape: Shape, dtype: Any = np.float32, spread: float = 1.0) -> Array:
        """Return random numbers, nearly normal, of standard deviation `spread`."""

    def integers(self, low: int, high: int, shape: Shape) -> Array:
        """Return random int32 in [low, high)."""

    def unwritten(self, shape: Shape, dtype: Any = np.float32) -> Array:
        """Return what a kernel is to write: bytes of 0xFF, which are NaN or -1."""

    def array(self, values: NDArray[Any]) -> Array:
        """Return these values, small ones such as block tables."""

    def cache(self, shape: Shape, dtype: Any, used: NDArray[np.bool_]) -> Array:
        """Return a KV cache of random numbers; slots not in used [num_blocks, block_size] may hold NaN."""


class Attention(NamedTuple):
    """The attention that a case computes, as another library may be asked for it."""

    element: str
    num_seqs: int
    num_queries: int  # a sequence
    length: int  # tokens of a sequence, the queries' own included
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def flops(self) -> int:
        """2 a multiply-add, of what a query sees: causal, each pair of query and key once."""
        seen = self.num_queries * self.length - self.num_queries * (self.num_queries - 1) // 2
        return self.num_seqs * self.num_heads * seen * 4 * self.head_dim

    @property
    def num_bytes(self) -> int:
        """Each query, output, key and value once, which no kernel can do without."""
        heads = 2 * self.num_queries * self.num_heads + 2 * self.length * self.num_kv_heads
        return self.num_seqs * heads * self.head_dim * int(np.dtype(DTYPES[self.element]).itemsize)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One call of a launch function."""

    name: str  # family, then what sets it apart: "rms_norm-bf16-17x4096"
    make: Callable[[Maker], dict[str, Array]]
    launch: Callable[[Device, Arrays], None]
    outputs: tuple[str, ...]  # the arrays that it writes, workspaces left out
    variables: Mapping[str, Any]  # of its kernels' data sheets
    tolerance: Tolerance = EXACT  # of outputs that are floats, on a GPU against the emulator
    sources: Path = SOURCES  # the folder of its .cu file
    attention: Attention | None = None


class HostArrays:
    """NumPy arrays with contents, the same bits for a name on every platform and NumPy version."""

    def __init__(self, name: str) -> None:
        self._seed = zlib.crc32(name.encode())
        self._num_made = 0

    def normal(self, shape: Shape, dtype: Any = np.float32, spread: float = 1.0) -> Array:
        quarters = self._words(shape).view(np.uint16).reshape(*shape, 4)
        total = quarters.astype(np.int64).sum(axis=-1) - 2 * 65535
        return (total * (spread / 37837.2)).astype(np.float32).astype(dtype)  # 37837.2 = 65536 / sqrt(3)

    def integers(self, low: int, high: int, shape: Shape) -> Array:
        spans = (self._words(shape) >> np.uint64(32)) * np.uint64(high - low)
        return (low + (spans >> np.uint64(32)).astype(np.int64)).astype(np.int32)

    def unwritten(self, shape: Shape, dtype: Any = np.float32) -> Array:
        return (
            np.full((int(np.prod(shape)) * np.dtype(dtype).itemsize,), 0xFF, np.uint8)
            .view(dtype)
            .reshape(shape)
        )

    def array(self, values: NDArray[Any]) -> Array:
        return np.ascontiguousarray(values)

    def cache(self, shape: Shape, dtype: Any, used: NDArray[np.bool_]) -> Array:
        return np.where(used[:, None, None, None, :, None], self.normal(shape), np.nan).astype(dtype)

    def _words(self, shape: Shape) -> NDArray[np.uint64]:
        """Return raw Philox words, whose stream is fixed, others for each array."""
        self._num_made += 1
        key = (self._seed << 32) + self._num_made
        return np.random.Philox(key=key).random_raw(int(np.prod(shape))).reshape(shape)


class ShapeArrays:
    """NumPy arrays of any size, of zeros that take no memory until somebody reads them: to look at only."""

    def normal(self, shape: Shape, dtype: Any = np.float32, spread: float = 1.0) -> Array:  # noqa: ARG002
        return self.unwritten(shape, dtype)

    def integers(self, low: int, high: int, shape: Shape) -> Array:  # noqa: ARG002
        return self.unwritten(shape, np.int32)

    def unwritten(self, shape: Shape, dtype: Any = np.float32) -> Array:
        num_bytes = prod(shape) * np.dtype(dtype).itemsize
        pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ)
        return np.frombuffer(pages, np.uint8).view(dtype).reshape(shape)

    def array(self, values: NDArray[Any]) -> Array:
        return np.ascontiguousarray(values)

    def cache(self, shape: Shape, dtype: Any, used: NDArray[np.bool_]) -> Array:  # noqa: ARG002
        return self.unwritten(shape, dtype)
