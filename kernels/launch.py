"""How a launch function meets a device: what it is given, and how its arguments become the kernel's.

A `*_cuda` function asks its Device for a kernel and calls it with grid, block and arguments. On a GPU the
Device is CuPy's (backend/device.py); in the tests it is emulated on the CPU, by the same lines.
"""

import re
from collections.abc import Mapping
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
    is_const: bool  # what a pointer points to is only read


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
        return Parameter(words[-1], "P", words[0] == "const")
    *kind, name = words
    code = _CODES.get(" ".join(kind))
    if code is None:
        raise ValueError(
            f"kernel parameter {text.strip()!r} is neither a pointer nor one of {sorted(_CODES)}"
        )
    return Parameter(name, code, False)


def element_type(array: Array) -> str:
    """Return the C++ type of an array's elements; ValueError if kernels have none for it."""
    try:
        return ELEMENTS[array.dtype.name]
    except KeyError:
        raise ValueError(f"dtype {array.dtype} has no kernels; use one of {sorted(ELEMENTS)}") from None


def ceil_div(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


def row_units(x: Array, name: str) -> int:
    """Return the 16-byte units of a row of x [n, size]; ValueError if rows cannot be moved by such units."""
    itemsize = x.dtype.itemsize
    if x.shape[1] * itemsize % 16:
        raise ValueError(
            f"{name} is {x.shape[1]}, but CUDA kernels take rows by 16 bytes and so need a multiple of "
            f"{16 // itemsize} in {x.dtype}; use device='cpu' for this model"
        )
    assert x.strides[1] == itemsize, f"{name}: elements of a row are {x.strides[1]} bytes apart"
    assert x.strides[0] % 16 == 0, f"{name}: rows are {x.strides[0]} bytes apart"
    return int(x.shape[1]) * int(itemsize) // 16


def row_stride(x: Array) -> int:
    """Return the elements from row to row of x."""
    return int(x.strides[0]) // int(x.dtype.itemsize)
