"""cublasLt by ctypes: descriptors, layouts, heuristics and the call, as y = x @ weight.T + bias needs them.

cublasLt's matrices are column-major. A row-major y [rows, out] is its D [out, rows], which is op(A) @ B of
A = weight [in, out], transposed, and B = x [in, rows]: nothing is copied to be turned.

The same inputs give the same bits from run to run: cuBLAS says so of all its routines on one kind of GPU, as
long as streams share no workspace, and ours is our own. Of the ways to sum parts of a split dot product only
those in float32 are let in: in the output's type they would be rounded in between.
"""

import ctypes
import weakref
from collections.abc import Mapping
from ctypes import POINTER, addressof, byref, c_char_p, c_float, c_int, c_int64, c_size_t, c_uint64, c_void_p
from typing import Any, NamedTuple

from cupaged.kernels.nvrtc import INSTALL, CudaUnavailable

ALIGNMENT = 16  # bytes, of every array: as much as any of its kernels asks for
WORKSPACE_ALIGNMENT = 256  # bytes

# Values and sizes in bytes as in cublasLt.h, cublas_api.h and library_types.h.
DATA_TYPES: Mapping[str, int] = {"float32": 0, "float16": 2, "bfloat16": 14}
_COMPUTE_32F = 68
_TRANSPOSE = 1
_EPILOGUE_BIAS = 4
_REDUCE_IN_COMPUTE_TYPE = 2  # a mask; no reduction at all is always let in
_DESC_TRANSA, _DESC_EPILOGUE, _DESC_BIAS_POINTER = 3, 7, 8
_PREF_MAX_WORKSPACE_BYTES, _PREF_REDUCTION_SCHEME_MASK = 1, 3
_PREF_MIN_ALIGNMENTS = (5, 6, 7, 8)  # of A, B, C, D

SUCCESS, NOT_INITIALIZED, ALLOC_FAILED, ARCH_MISMATCH, EXECUTION_FAILED, NOT_SUPPORTED = 0, 1, 3, 8, 13, 15
_REMEDIES: Mapping[int, str] = {
    NOT_INITIALIZED: "see that the driver runs (nvidia-smi), or use device='cpu'",
    ALLOC_FAILED: "leave the GPU more memory: lower gpu_memory_utilization",
    ARCH_MISMATCH: f"this cuBLAS is too old for the GPU; {INSTALL}",
    EXECUTION_FAILED: "the GPU may have failed in a kernel before it; start again",
    NOT_SUPPORTED: f"a newer cuBLAS may: {INSTALL}; or use device='cpu'",
}


class _Algorithm(ctypes.Structure):
    """cublasLtMatmulAlgo_t: opaque, but may be kept for the same version of the library."""

    _fields_ = (("words", c_uint64 * 8),)


class _HeuristicResult(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", _Algorithm),
        ("workspace_bytes", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


_MATRICES = (c_void_p,) * 4  # layouts of A, B, C, D
_SIGNATURES: Mapping[str, tuple[Any, tuple[Any, ...]]] = {
    "cublasLtGetVersion": (c_size_t, ()),
    "cublasLtGetStatusName": (c_char_p, (c_int,)),
    "cublasLtCreate": (c_int, (POINTER(c_void_p),)),
    "cublasLtDestroy": (c_int, (c_void_p,)),
    "cublasLtMatmulDescCreate": (c_int, (POINTER(c_void_p), c_int, c_int)),
    "cublasLtMatmulDescSetAttribute": (c_int, (c_void_p, c_int, c_void_p, c_size_t)),
    "cublasLtMatmulDescDestroy": (c_int, (c_void_p,)),
    "cublasLtMatrixLayoutCreate": (c_int, (POINTER(c_void_p), c_int, c_uint64, c_uint64, c_int64)),
    "cublasLtMatrixLayoutDestroy": (c_int, (c_void_p,)),
    "cublasLtMatmulPreferenceCreate": (c_int, (POINTER(c_void_p),)),
    "cublasLtMatmulPreferenceSetAttribute": (c_int, (c_void_p, c_int, c_void_p, c_size_t)),
    "cublasLtMatmulPreferenceDestroy": (c_int, (c_void_p,)),
    "cublasLtMatmulAlgoGetHeuristic": (
        c_int,
        (c_void_p, c_void_p, *_MATRICES, c_void_p, c_int, POINTER(_HeuristicResult), POINTER(c_int)),
    ),
    "cublasLtMatmulAlgoCheck": (
        c_int,
        (c_void_p, c_void_p, *_MATRICES, POINTER(_Algorithm), POINTER(_HeuristicResult)),
    ),
    # handle, operation; alpha, A, its layout, B, ..; beta, C, .., D, ..; algorithm, workspace, bytes, stream
    "cublasLtMatmul": (c_int, (*(c_void_p,) * 14, c_size_t, c_void_p)),
}


class Product(NamedTuple):
    """The product of a weight [out_features, in_features] with any number of rows x."""

    out_features: int
    in_features: int
    dtype: str  # of x, weight and bias; sums are float32
    out_dtype: str
    has_bias: bool

    def __str__(self) -> str:
        bias = " + bias" if self.has_bias else ""
        return f"{self.dtype} weight[{self.out_features}, {self.in_features}]{bias} to {self.out_dtype}"


class Layouts(NamedTuple):
    """Addresses of the layouts of a product of some number of rows."""

    weight: int
    x: int
    out: int  # of C, which is not read, as well


class CublasLt:
    """One library with a handle on the current GPU. What it creates lives as long as it does."""

    def __init__(self, library: Any, workspace_bytes: int) -> None:
        """Take a library, its functions by name as load_library's; CudaUnavailable if it does not serve."""
        for name, (result, argtypes) in _SIGNATURES.items():
            function = getattr(library, name, None)
            if function is None:
                raise CudaUnavailable(f"the cuBLAS found is too old, it has no {name}; {INSTALL}")
            function.restype, function.argtypes = result, argtypes
        self._library = library
        self.version: int = library.cublasLtGetVersion()
        self._owned: list[tuple[Any, int]] = []  # how to destroy what
        # Not at exit: then the driver may be gone before.
        weakref.finalize(self, _destroy, self._owned).atexit = False
        self.handle = self._create("cublasLtCreate", "cublasLtDestroy")
        self._preference = self._create("cublasLtMatmulPreferenceCreate", "cublasLtMatmulPreferenceDestroy")
        self._prefer(_PREF_MAX_WORKSPACE_BYTES, c_uint64(workspace_bytes))
        self._prefer(_PREF_REDUCTION_SCHEME_MASK, c_int(_REDUCE_IN_COMPUTE_TYPE))
        for attribute in _PREF_MIN_ALIGNMENTS:
            self._prefer(attribute, c_int(ALIGNMENT))
        self.matmul = library.cublasLtMatmul  # returns a status; takes the addresses of all that has one

    def operation(self, bias: int | None) -> int:
        """Return the address of a descriptor of x @ weight.T, plus the bias at an address if there is one."""
        create = ("cublasLtMatmulDescCreate", "cublasLtMatmulDescDestroy")
        operation = self._create(*create, _COMPUTE_32F, DATA_TYPES["float32"])
        attributes: dict[int, Any] = {_DESC_TRANSA: c_int(_TRANSPOSE)}
        if bias is not None:
            attributes |= {_DESC_EPILOGUE: c_int(_EPILOGUE_BIAS), _DESC_BIAS_POINTER: c_void_p(bias)}
        for attribute, value in attributes.items():
            self._set("cublasLtMatmulDescSetAttribute", operation, attribute, value)
        return operation

    def layouts(self, product: Product, rows: int) -> Layouts:
        """Return where the matrices' layouts are."""
        out_features, in_features, dtype, out_dtype, has_bias = product
        assert not has_bias or dtype == out_dtype, f"{product}: a bias is of the output's type"
        return Layouts(
            self._layout(dtype, in_features, out_features),
            self._layout(dtype, in_features, rows),
            self._layout(out_dtype, out_features, rows),
        )

    def heuristics(self, operation: int, layouts: Layouts, count: int) -> list[bytes]:
        """Return the words of up to `count` algorithms, those first that cublasLt thinks are fastest."""
        results = (_HeuristicResult * count)()
        found = c_int()
        where = (self.handle, operation, *_matrices(layouts), self._preference)
        status = self._library.cublasLtMatmulAlgoGetHeuristic(*where, count, results, byref(found))
        if status == NOT_SUPPORTED:  # so it says that there are none
            return []
        self.check("cublasLtMatmulAlgoGetHeuristic", status)
        return [bytes(each.algorithm) for each in results[: found.value] if each.state == SUCCESS]

    def workspace_bytes(self, operation: int, layouts: Layouts, words: bytes) -> int | None:
        """Return what an algorithm that was kept would need; None if it is none for this."""
        if len(words) != ctypes.sizeof(_Algorithm):
            return None
        result = _HeuristicResult()
        algorithm = _Algorithm.from_buffer_copy(words)
        where = (self.handle, operation, *_matrices(layouts))
        status = self._library.cublasLtMatmulAlgoCheck(*where, byref(algorithm), byref(result))
        return int(result.workspace_bytes) if status == SUCCESS else None

    def check(self, name: str, status: int, what: object = "") -> None:
        """Raise RuntimeError if a function's status says that it failed."""
        if status == SUCCESS:
            return
        text = self._library.cublasLtGetStatusName(status).decode()
        remedy = _REMEDIES.get(status)
        subject = f" for {what}" if what else ""
        message = f"{name} failed with {text} ({status}){subject}{'' if remedy is None else f'; {remedy}'}"
        raise CudaUnavailable(message) if name == "cublasLtCreate" else RuntimeError(message)

    def _layout(self, dtype: str, rows: int, columns: int) -> int:
        """Return a layout of packed columns."""
        create = ("cublasLtMatrixLayoutCreate", "cublasLtMatrixLayoutDestroy")
        return self._create(*create, DATA_TYPES[dtype], rows, columns, rows)

    def _create(self, name: str, destroy: str, *args: int) -> int:
        made = c_void_p()
        self.check(name, getattr(self._library, name)(byref(made), *args))
        assert made.value is not None, f"{name} returned nothing"
        self._owned.append((getattr(self._library, destroy), made.value))
        return made.value

    def _prefer(self, attribute: int, value: Any) -> None:
        self._set("cublasLtMatmulPreferenceSetAttribute", self._preference, attribute, value)

    def _set(self, name: str, target: int, attribute: int, value: Any) -> None:
        status = getattr(self._library, name)(target, attribute, addressof(value), ctypes.sizeof(value))
        self.check(name, status)


def _matrices(layouts: Layouts) -> tuple[int, int, int, int]:
    return layouts.weight, layouts.x, layouts.out, layouts.out


def _destroy(owned: list[tuple[Any, int]]) -> None:
    for function, address in reversed(owned):
        function(address)


def load_library() -> Any:
    """Return this machine's cublasLt, found by cuda-pathfinder; CudaUnavailable if there is none.

    Its functions keep Python's lock: a call takes 2 us, but who gives the lock away for it may wait 5 ms to
    have it back from a busy thread.
    """
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib

        return ctypes.PyDLL(load_nvidia_dynamic_lib("cublasLt").abs_path)
    except ImportError as error:
        raise CudaUnavailable(f"no cuBLAS: {error.name or error} is not installed; {INSTALL}") from None
    except (RuntimeError, OSError) as error:  # pathfinder found none, or it does not load
        reason = str(error).strip().split("\n")[0]
        raise CudaUnavailable(f"no cuBLAS, which multiplies matrices: {reason}; {INSTALL}") from None
