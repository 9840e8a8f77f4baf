"""How a launch function meets a device: what it is given, and how its arguments become the kernel's.

A `*_cuda` function asks its Device for a kernel and calls it with grid, block and arguments. On a GPU the
Device is CuPy's (backend/cupy_device.py); in the tests it is emulated on the CPU, by the same lines.
"""

import re
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, Protocol

SOURCES = Path(__file__).parent  # of the .cu and .cuh files

Array = Any  # of the device, with shape, dtype and strides
Constant = int | str  # a -D of the compiler
Grid = tuple[int, int, int]

ELEMENTS = {"bfloat16": "bf16", "float16": "f16", "float32": "float"}  # -D ELEMENT of a dtype


class Kernel(Protocol):
    """One compiled kernel."""

    def __call__(self, grid: Grid, block: int, args: tuple[Any, ...], shared_bytes: int = 0) -> None:
        """Launch: args are arrays (None = no pointer) and Python numbers, one for each parameter.

        A grid of no blocks launches nothing: CUDA refuses one, and a step may have no rows.
        """


class Device(Protocol):
    """What runs kernels, in order."""

    def kernel(self, file: str, name: str, **constants: Constant) -> Kernel:
        """Return kernel `name` of `file`.cu compiled with -D constants; compiled and loaded once."""


class Parameter(NamedTuple):
    """One parameter of a kernel."""

    name: str
    code: str  # of struct: P a pointer, i an int, q an int64_t, f a float
    is_const: bool = False  # what a pointer points to is only read
    alignment: int = 1  # bytes: a pointer is a multiple of it, or the GPU faults and is lost to the process


_UNITS = {"T", "uint4", "float4"}  # kernels read and write these by 16 bytes at a time
_CODES = {"int": "i", "int32_t": "i", "int64_t": "q", "float": "f"}
_KERNEL = re.compile(r"^KERNEL\([^)]*\)\s*(\w+)\s*\(([^)]*)\)", re.MULTILINE)


def parameters(source: str) -> Mapping[str, tuple[Parameter, ...]]:
    """Return the parameters of each kernel in the text of a .cu file, by name."""
    return {
        name: tuple(_parameter(text) for text in declared.split(",") if text.strip())
        for name, declared in _KERNEL.findall(re.sub(r"//.*", "", source))
    }


def _parameter(text: str) -> Parameter:
    words = text.replace("*", " * ").replace("__restrict__", " ").split()
    if "*" in words:
        is_const = words[0] == "const"
        return Parameter(words[-1], "P", is_const, 16 if words[is_const] in _UNITS else 1)
    *kind, name = words
    code = _CODES.get(" ".join(kind))
    if code is None:
        raise ValueError(
            f"kernel parameter {text.strip()!r} is neither a pointer nor one of {sorted(_CODES)}"
        )
    return Parameter(name, code)


def element_type(array: Array, *others: Array | None) -> str:
    """Return the C++ type of the arrays' elements, one for all; ValueError if kernels have none for it."""
    dtype = array.dtype
    for other in others:
        assert other is None or other.dtype == dtype, f"arrays of {dtype} and of {other.dtype}"
    try:
        return ELEMENTS[dtype.name]
    except KeyError:
        raise ValueError(f"dtype {dtype} has no kernels; use one of {sorted(ELEMENTS)}") from None


def ceil_div(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


def is_packed(x: Array, inner: int | None = None) -> bool:
    """Return whether the last `inner` axes of x, or all, lie in one piece."""
    expected = x.dtype.itemsize
    for axis in range(-1, -1 - (len(x.shape) if inner is None else inner), -1):
        if x.strides[axis] != expected and x.shape[axis] > 1:
            return bool(x.size == 0)
        expected *= x.shape[axis]
    return True


def require_packed(name: str, x: Array) -> None:
    """Assert that x lies in one piece, as kernels take it that are given no stride for it."""
    assert is_packed(x), f"{name} of shape {x.shape} has strides {x.strides}"


def row_stride(x: Array, inner: int = 1, unit: int = 1) -> int:
    """Return the elements from row to row of x, whose last `inner` axes make a row and lie in one piece.

    Rows lie a multiple of `unit` bytes apart.
    """
    stride = x.strides[-1 - inner]
    assert is_packed(x, inner), f"a row of shape {x.shape[-inner:]} has strides {x.strides[-inner:]}"
    assert stride % unit == 0 or x.shape[-1 - inner] <= 1, f"rows lie {stride} bytes apart"
    return int(stride) // int(x.dtype.itemsize)


def layer_place(pool: Array, layer: int) -> tuple[int, int]:
    """Return block_stride and layer_offset, in elements, by which kernels find a layer in the KV cache.

    pool T[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim].
    """
    num_layers = pool.shape[1]
    assert 0 <= layer < num_layers, f"layer {layer} of {num_layers}"
    return row_stride(pool, inner=5, unit=16), layer * prod(pool.shape[2:])


def row_units(x: Array, name: str) -> int:
    """Return the 16-byte units of a row of x [n, size]; ValueError if rows cannot be moved by such units."""
    itemsize = x.dtype.itemsize
    if x.shape[1] * itemsize % 16:
        raise ValueError(
            f"{name} is {x.shape[1]}, but CUDA kernels take rows by 16 bytes and so need a multiple of "
            f"{16 // itemsize} in {x.dtype}; use device='cpu' for this model"
        )
    return int(x.shape[1]) * int(itemsize) // 16
