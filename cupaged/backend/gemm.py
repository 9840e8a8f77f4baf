"""Gemm: y = x @ weight.T + bias on a Device, by the algorithm of cublasLt's that was fastest at load.

A step's rows are rounded up to a bucket, so that each number of rows that is ever multiplied has been tried.
What was chosen is kept: another algorithm may sum in another order, and so a start would give other bits.
A call allocates nothing and waits for nothing: it may be captured.
"""

import ctypes
import logging
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cupaged.backend.cublaslt import (
    ALIGNMENT,
    NOT_SUPPORTED,
    SUCCESS,
    WORKSPACE_ALIGNMENT,
    CublasLt,
    Layouts,
    Product,
)
from cupaged.backend.device import ALIGNMENT as ARRAY_ALIGNMENT
from cupaged.backend.device import Device
from cupaged.backend.gemm_choices import Choice, ChoiceFile, fastest
from cupaged.kernels.launch import Array, ceil_div, require_packed
from cupaged.paths import user_cache_dir

logger = logging.getLogger("cupaged")

WORKSPACE_BYTES = 32 * 2**20  # as much as cuBLAS itself takes on Hopper
NUM_HEURISTICS = 8
COLD_BYTES = 256 * 2**20  # of weights that a timing reads in turn: twice the largest L2


def bucket(n: int) -> int:
    """Return n rounded up to 1, 2, 4, 8 or a multiple of an eighth of the next power of two, at least of 8.

    So 8, 16, 24, .. 64, 80, .. 128, 160, .. 256, 320: past 64, less than a fifth is padding.
    """
    power = 1 << (n - 1).bit_length() if n else 0
    if n <= 8:
        return power
    step = max(8, power // 8)
    return ceil_div(n, step) * step


def buckets(limit: int) -> list[int]:
    """Return all buckets, up to the one of `limit`."""
    found = [1]
    while found[-1] < limit:
        found.append(bucket(found[-1] + 1))
    return found


class Call(NamedTuple):
    """What cublasLtMatmul takes beside the arrays, for one product and number of rows."""

    x: tuple[Any, ...]  # its shape and strides
    out: tuple[Any, ...]
    layouts: Layouts
    algorithm: int  # address of its words
    words: Any  # which live here


class Weight(NamedTuple):
    """A matrix on the device and how it is multiplied; in a rehearsal just the arrays, to be noted."""

    matrix: Array  # T[out_features, in_features], packed
    bias: Array | None = None  # T[out_features]
    address: int = 0  # of the matrix
    operation: int = 0  # address of cublasLt's descriptor
    calls: dict[tuple[int, int], Call] | None = None  # of this shape, by rows and bytes of an output element

    def product(self, out_dtype: str) -> Product:
        """Return what it is multiplied as, for an output of that type."""
        out_features, in_features = self.matrix.shape
        dtype = self.matrix.dtype.name
        return Product(out_features, in_features, dtype, out_dtype, self.bias is not None)


class Trial(NamedTuple):
    """A product and a number of rows, with memory to try algorithms on."""

    layouts: Layouts
    weights: list[Weight]  # of one shape; more than the L2 holds, if there are so many
    x: Array  # T[rows, in_features]
    out: Array  # T or float32[rows, out_features]

    def call(self, algorithm: bytes) -> Call:
        """Return the call that uses an algorithm."""
        words = ctypes.create_string_buffer(algorithm, len(algorithm))
        places = _place(self.x), _place(self.out)
        return Call(*places, self.layouts, ctypes.addressof(words), words)


class Gemm:
    """Owns cublasLt's handle and descriptors, and the choice of algorithms."""

    def __init__(self, device: Device, folder: Path | None = None) -> None:
        """Open cublasLt; choices are kept in `folder`, by default in the user's cache folder."""
        self._device = device
        self._folder = user_cache_dir() / "gemm" if folder is None else folder
        self._cublaslt = CublasLt(device.cublaslt, WORKSPACE_BYTES)
        self._stream = device.stream
        self._matmul, self._handle = self._cublaslt.matmul, self._cublaslt.handle
        self._scalars = (ctypes.c_float * 2)(0.0, 1.0)
        self._zero = ctypes.addressof(self._scalars)
        self._one = self._zero + ctypes.sizeof(ctypes.c_float)
        self._workspace = 0  # its address
        self._unbiased = self._cublaslt.operation(None)
        self._most_rows: dict[Product, int] = {}
        self._weights: dict[tuple[Any, ...], list[Weight]] = {}  # by shape and has_bias

    def note(self, x: Array, weight: Weight, out: Array) -> None:
        """Remember, in a rehearsal, that such a product will be asked for, with so many rows at most."""
        product = weight.product(out.dtype.name)
        if product.has_bias and product.dtype != product.out_dtype:
            raise ValueError(f"{product}: cublasLt adds a bias of the output's type only; use device='cpu'")
        self._most_rows[product] = max(self._most_rows.get(product, 0), x.shape[0])

    def prepare(self, matrix: Array, bias: Array | None = None) -> Weight:
        """Return a weight that can be multiplied once the products noted have been tuned."""
        require_packed("matrix", matrix)
        operation = self._unbiased
        if bias is not None:
            require_packed("bias", bias)
            operation = self._cublaslt.operation(self._address(bias))
        weights = self._weights.setdefault((*matrix.shape, bias is not None), [])
        calls = weights[0].calls if weights else {}
        weight = Weight(matrix, bias, self._address(matrix), operation, calls)
        weights.append(weight)
        return weight

    def multiply(self, x: Array, weight: Weight, out: Array) -> None:
        """Set out to x @ weight.T + bias. x T[n, in_features], out T or float32[n, out_features], packed."""
        assert weight.calls is not None, "the weight is one of a rehearsal"
        call = weight.calls.get((x.shape[0], out.dtype.itemsize))
        if call is None or _place(x) != call.x or _place(out) != call.out:
            where = f"x, out of shapes and strides {_place(x)}, {_place(out)}"
            raise AssertionError(f"{where} were not tuned for {weight.product(out.dtype.name)}")
        address = self._device.address
        status = self._run(call, weight, address(x), address(out))
        if status != SUCCESS:
            what = f"{x.shape[0]} rows and {weight.product(out.dtype.name)}"
            self._cublaslt.check("cublasLtMatmul", status, what)

    def tune(self, workspace: Array, memory: Array, max_rows: int) -> None:
        """Choose an algorithm for each product noted and each bucket of rows up to max_rows, and log it.

        workspace uint8[WORKSPACE_BYTES] serves all calls from now on; memory uint8[], which is overwritten,
        has room for x and out of each product. Every algorithm chosen has run once.
        """
        self._workspace = self._device.address(workspace)
        assert workspace.nbytes == WORKSPACE_BYTES, f"a workspace of {workspace.nbytes} bytes"
        assert self._workspace % WORKSPACE_ALIGNMENT == 0, f"the workspace begins at {self._workspace:#x}"
        for product, most in self._most_rows.items():
            start = time.perf_counter()
            file = ChoiceFile(self._folder, self._key(product))
            kept = file.load()
            choices: dict[int, Choice] = {}
            for rows in buckets(min(most, bucket(max_rows))):
                trial = self._trial(product, rows, memory)
                choice = kept.get(rows)
                if choice is None or not self._is_possible(trial, choice.algorithm):
                    choice = self._choose(product, trial)
                choices[rows] = choice
                calls = trial.weights[0].calls
                assert calls is not None
                calls[rows, trial.out.dtype.itemsize] = trial.call(choice.algorithm)
            is_new = any(kept.get(rows) is not choice for rows, choice in choices.items())
            if is_new:
                file.store(choices)
            source = f"timed in {time.perf_counter() - start:.2f} s" if is_new else "as timed before"
            logger.info("matrix products, %s: %s, %s", product, _summary(choices), source)

    def _run(self, call: Call, weight: Weight, x: int, out: int) -> int:
        """Put the product of arrays at addresses on the stream; return cublasLt's status."""
        layouts = call.layouts
        status: int = self._matmul(
            self._handle, weight.operation,
            self._one, weight.address, layouts.weight, x, layouts.x,
            self._zero, out, layouts.out, out, layouts.out,
            call.algorithm, self._workspace, WORKSPACE_BYTES, self._stream,
        )  # fmt: skip
        return status

    def _address(self, array: Array) -> int:
        address = self._device.address(array)
        assert address % ALIGNMENT == 0, f"an array begins at {address:#x}, not at a multiple of {ALIGNMENT}"
        return address

    def _key(self, product: Product) -> dict[str, Any]:
        """Return what the best algorithms depend on, beside the rows."""
        gpu = {"gpu": self._device.name, "num_sms": self._device.num_sms, "cublaslt": self._cublaslt.version}
        return {**gpu, "workspace_bytes": WORKSPACE_BYTES, **product._asdict()}

    def _trial(self, product: Product, rows: int, memory: Array) -> Trial:
        """Return a trial on the first bytes of memory."""
        weights = self._weights[product.out_features, product.in_features, product.has_bias]
        matrix = weights[0].matrix
        out_dtype = matrix.dtype if product.out_dtype == product.dtype else np.dtype(product.out_dtype)
        x = self._device.view(memory, 0, (rows, product.in_features), matrix.dtype)
        behind = ceil_div(x.nbytes, ARRAY_ALIGNMENT) * ARRAY_ALIGNMENT
        out = self._device.view(memory, behind, (rows, product.out_features), out_dtype)
        cold = weights[: ceil_div(COLD_BYTES, matrix.nbytes)]
        return Trial(self._cublaslt.layouts(product, rows), cold, x, out)

    def _is_possible(self, trial: Trial, algorithm: bytes) -> bool:
        """Return whether an algorithm that was kept works here; if so, it has run."""
        operation = trial.weights[0].operation
        needed = self._cublaslt.workspace_bytes(operation, trial.layouts, algorithm)
        return needed is not None and needed <= WORKSPACE_BYTES and self._try(trial, algorithm) == SUCCESS

    def _try(self, trial: Trial, algorithm: bytes) -> int:
        """Run a call once; return cublasLt's status."""
        x, out = self._address(trial.x), self._address(trial.out)
        return self._run(trial.call(algorithm), trial.weights[0], x, out)

    def _choose(self, product: Product, trial: Trial) -> Choice:
        """Return the fastest of the first heuristics."""
        operation = trial.weights[0].operation
        found = self._cublaslt.heuristics(operation, trial.layouts, NUM_HEURISTICS)
        statuses = [self._try(trial, algorithm) for algorithm in found]
        what = f"{trial.x.shape[0]} rows and {product}"
        if SUCCESS not in statuses:
            for status in statuses:
                if status != NOT_SUPPORTED:  # it is not the algorithm then: the GPU may be lost
                    self._cublaslt.check("cublasLtMatmul", status, what)
            raise ValueError(
                f"cublasLt {self._cublaslt.version} has no algorithm for {what}; use device='cpu' for this "
                "model"
            )
        algorithms = [each for each, status in zip(found, statuses, strict=True) if status == SUCCESS]
        works = [partial(self._run_cold, trial, trial.call(each), what) for each in algorithms]
        best, gain = fastest(self._device, works)
        return Choice(algorithms[best], gain)

    def _run_cold(self, trial: Trial, call: Call, what: str) -> None:
        """Run a call with one weight after the other."""
        x, out = self._address(trial.x), self._address(trial.out)
        for weight in trial.weights:  # captured, one that fails would leave nothing and seem fast
            self._cublaslt.check("cublasLtMatmul", self._run(call, weight, x, out), what)


def _place(x: Array) -> tuple[Any, ...]:
    return x.shape, x.strides


def _summary(choices: dict[int, Choice]) -> str:
    """Return in words where something else than cublasLt's first choice is used."""
    gains = [f"{choice.gain:.2f}x at {rows}" for rows, choice in choices.items() if choice.gain > 1]
    text = f"{len(choices)} numbers of rows up to {max(choices)}, cublasLt's first choice for "
    if not gains:
        return f"{text}all"
    return f"{text}{len(choices) - len(gains)}, faster ones for others ({', '.join(gains)})"
