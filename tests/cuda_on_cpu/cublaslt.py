"""The stand-in for libcublasLt, loaded; cublasLtMatmul in two halves, as an emulated stream needs it."""

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.cuda_on_cpu.build import build_library

SOURCE = Path(__file__).parent / "cublaslt.cpp"


class _Matmul(ctypes.Structure):
    """All that a call was told, as struct Matmul of cublaslt_product.h."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("m", "n", "k")),
        *((name, ctypes.c_int64) for name in ("lda", "ldb", "ldd")),
        *((name, ctypes.c_int32) for name in ("type", "out_type", "has_bias")),
        ("alpha", ctypes.c_float),
        *((name, ctypes.c_uint64) for name in ("a", "b", "d", "bias", "workspace", "workspace_bytes")),
        ("stream", ctypes.c_uint64),
        ("key", ctypes.c_uint64),
        ("seconds", ctypes.c_double),
    )


class Span(NamedTuple):
    """Memory that a product touches."""

    address: int
    num_bytes: int
    is_written: bool


class Matmul:
    """A checked call of cublasLtMatmul, by value; it may run any number of times."""

    def __init__(self, library: ctypes.PyDLL, told: _Matmul) -> None:
        self._library, self._told = library, told
        self.stream = int(told.stream)
        self.key = int(told.key)  # of problem and algorithm
        self.seconds = float(told.seconds)  # pretended, always the same
        size = 4 if told.out_type == 0 else 2
        self.spans = [
            Span(told.a, 2 * ((told.m - 1) * told.lda + told.k), False),
            Span(told.b, 2 * ((told.n - 1) * told.ldb + told.k), False),
            Span(told.d, size * ((told.n - 1) * told.ldd + told.m), True),
            Span(told.workspace, told.workspace_bytes, True),
        ]
        if told.has_bias:
            self.spans.append(Span(told.bias, size * told.m, False))

    def run(self) -> None:
        """Compute."""
        self._library.run_matmul(ctypes.byref(self._told))


@functools.cache
def _path() -> Path:
    return build_library(SOURCE)


def load() -> ctypes.PyDLL:
    """Return the library, its functions by name as cuBLAS's."""
    library = ctypes.PyDLL(str(_path()))
    library.prepare_matmul.restype = ctypes.c_int
    library.prepare_matmul.argtypes = (*(ctypes.c_void_p,) * 14, ctypes.c_size_t, *(ctypes.c_void_p,) * 2)
    library.run_matmul.restype = None
    return library


def prepare(library: ctypes.PyDLL, args: Sequence[Any]) -> tuple[int, Matmul | None]:
    """Return the status of cublasLtMatmul(*args) and, if it is 0, what is to be run."""
    told = _Matmul()
    status = int(library.prepare_matmul(*args, ctypes.addressof(told)))
    return status, None if status else Matmul(library, told)
