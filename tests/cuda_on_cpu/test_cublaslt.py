"""The stand-in for libcublasLt refuses, and says why, what the real one refuses or a GPU would fault at."""

import ctypes
from collections.abc import Iterator
from ctypes import addressof, byref, c_float, c_int, c_int64, c_uint64, c_void_p
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from tests.cuda_on_cpu import cublaslt

SUCCESS, NOT_INITIALIZED, INVALID_VALUE, NOT_SUPPORTED = 0, 1, 7, 15
TRANSA, EPILOGUE, BIAS_POINTER, BIAS_DATA_TYPE = 3, 7, 8, 26
WORKSPACE_BYTES, REDUCTIONS, ALIGNMENT_A = 1, 3, 5
FLOAT32, BFLOAT16 = 0, 14
ROWS, OUT, IN = 3, 20, 40


class Result(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", c_uint64 * 8),
        ("workspace_bytes", ctypes.c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


def aligned(shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """Return an array of ones that begins at a multiple of 256 bytes."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = np.zeros(size + 256, np.uint8)
    skip = -memory.ctypes.data % 256
    array: NDArray[Any] = memory[skip : skip + size].view(dtype).reshape(shape)
    array[...] = 1
    return array


class Told:
    """A correct call of cublasLtMatmul, of which tests spoil one thing."""

    def __init__(self) -> None:
        self.library = library = cublaslt.load()
        library.cublasLtMatrixLayoutCreate.argtypes = (c_void_p, c_int, c_uint64, c_uint64, c_int64)
        self.weight = aligned((OUT, IN), ml_dtypes.bfloat16)
        self.x = aligned((ROWS, IN), ml_dtypes.bfloat16)
        self.out = aligned((ROWS, OUT), ml_dtypes.bfloat16)
        self.workspace = aligned((1 << 16,), np.uint8)
        self.alpha, self.beta = c_float(1), c_float(0)
        self.handle = self.make("cublasLtCreate")
        self.operation = self.make("cublasLtMatmulDescCreate", 68, FLOAT32)
        self.set("MatmulDesc", self.operation, TRANSA, c_int(1))
        self.preference = self.make("cublasLtMatmulPreferenceCreate")
        self.set("MatmulPreference", self.preference, WORKSPACE_BYTES, c_uint64(1 << 16))
        self.layouts = [self.layout(IN, OUT), self.layout(IN, ROWS), self.layout(OUT, ROWS)]
        self.stream = 0x5EED

    def make(self, name: str, *args: Any) -> c_void_p:
        made = c_void_p()
        assert getattr(self.library, name)(byref(made), *args) == SUCCESS
        return made

    def layout(self, rows: int, columns: int, stride: int | None = None, dtype: int = BFLOAT16) -> c_void_p:
        return self.make(
            "cublasLtMatrixLayoutCreate", dtype, rows, columns, rows if stride is None else stride
        )

    def set(self, kind: str, target: c_void_p, attribute: int, value: Any) -> int:
        set_attribute = getattr(self.library, f"cublasLt{kind}SetAttribute")
        return int(set_attribute(target, attribute, byref(value), ctypes.c_size_t(ctypes.sizeof(value))))

    @property
    def where(self) -> tuple[c_void_p, ...]:
        a, b, d = self.layouts
        return self.handle, self.operation, a, b, d, d

    def heuristics(self) -> tuple[int, list[Result]]:
        """Return the status and what was found."""
        results, found = (Result * 8)(), c_int()
        function = self.library.cublasLtMatmulAlgoGetHeuristic
        status = int(function(*self.where, self.preference, 8, results, byref(found)))
        return status, results[: found.value]

    def prepare(self, algorithm: Any, /, **spoilt: int) -> tuple[int, cublaslt.Matmul | None]:
        """Call cublasLtMatmul's first half, with other arguments by name."""
        a, b, d = (layout.value for layout in self.layouts)
        args: dict[str, Any] = {
            "handle": self.handle.value, "operation": self.operation.value, "alpha": addressof(self.alpha),
            "a": self.weight.ctypes.data, "a_layout": a, "b": self.x.ctypes.data, "b_layout": b,
            "beta": addressof(self.beta), "c": self.out.ctypes.data, "c_layout": d,
            "d": self.out.ctypes.data, "d_layout": d, "algorithm": addressof(algorithm),
            "workspace": self.workspace.ctypes.data, "workspace_bytes": self.workspace.nbytes,
            "stream": self.stream,
        }  # fmt: skip
        assert spoilt.keys() <= args.keys()
        return cublaslt.prepare(self.library, list({**args, **spoilt}.values()))


@pytest.fixture
def told() -> Iterator[Told]:
    """A correct call."""
    told = Told()
    yield told
    told.library.cublasLtDestroy(told.handle)


def first(told: Told) -> Any:
    status, results = told.heuristics()
    assert status == SUCCESS
    return results[0].algorithm


def test_a_correct_call_runs_when_it_is_told_to(told: Told) -> None:
    status, matmul = told.prepare(first(told))

    assert status == SUCCESS
    assert matmul is not None
    assert (matmul.stream, told.out.astype(float).max()) == (0x5EED, 1)
    matmul.run()
    assert (told.out.astype(float) == IN).all()


def test_it_needs_nothing_that_it_was_told_any_more(told: Told) -> None:
    algorithm = first(told)
    _, matmul = told.prepare(algorithm)
    assert matmul is not None

    algorithm[0] = 0
    told.alpha.value = 5
    told.library.cublasLtMatmulDescDestroy(told.operation)
    for layout in told.layouts:
        told.library.cublasLtMatrixLayoutDestroy(layout)
    told.x[...] = 2
    matmul.run()

    assert (told.out.astype(float) == 2 * IN).all()


def test_spans_are_all_memory_that_is_touched(told: Told) -> None:
    bias = aligned((OUT,), ml_dtypes.bfloat16)
    told.set("MatmulDesc", told.operation, EPILOGUE, c_int(4))
    told.set("MatmulDesc", told.operation, BIAS_POINTER, c_void_p(bias.ctypes.data))
    _, results = told.heuristics()
    with_workspace = max(results, key=lambda result: int(result.workspace_bytes))
    _, matmul = told.prepare(with_workspace.algorithm)
    assert matmul is not None

    touched = [(span.address, span.num_bytes) for span in matmul.spans]

    arrays = (told.weight, told.x, told.out)
    assert touched[:3] == [(array.ctypes.data, array.nbytes) for array in arrays]
    assert touched[3] == (told.workspace.ctypes.data, with_workspace.workspace_bytes)
    assert touched[4] == (bias.ctypes.data, bias.nbytes)
    assert [span.is_written for span in matmul.spans] == [False, False, True, True, False]


@pytest.mark.parametrize(
    ("spoilt", "status", "reason"),
    [
        ({"handle": 1}, NOT_INITIALIZED, "the handle 0x1 does not exist"),
        ({"operation": 64}, INVALID_VALUE, "the operation 0x40 does not exist"),
        ({"b_layout": 64}, INVALID_VALUE, "the layout 0x40 of B does not exist"),
        ({"a": 0}, INVALID_VALUE, "A begins at (nil)"),
        ({"b": 0x1002}, INVALID_VALUE, "B begins at 0x1002, not at a multiple of 256"),
        ({"c": 0x1000}, NOT_SUPPORTED, "C is not D"),
        ({"workspace": 0x1010}, INVALID_VALUE, "the workspace begins at 0x1010"),
        ({"alpha": 0}, NOT_SUPPORTED, "alpha is missing, or beta not 0"),
        ({"algorithm": 0}, NOT_SUPPORTED, "no algorithm"),
    ],
)
def test_wrong_argument_is_refused(
    told: Told, capfd: pytest.CaptureFixture[str], spoilt: dict[str, int], status: int, reason: str
) -> None:
    assert told.prepare(first(told), **spoilt) == (status, None)
    assert reason in capfd.readouterr().err


def test_output_on_an_input_is_refused(told: Told, capfd: pytest.CaptureFixture[str]) -> None:
    x = told.x.ctypes.data

    assert told.prepare(first(told), c=x, d=x) == (INVALID_VALUE, None)
    assert "D overlaps" in capfd.readouterr().err


def test_small_workspace_is_refused_by_algorithms_that_need_it(told: Told) -> None:
    _, results = told.heuristics()

    statuses = [told.prepare(each.algorithm, workspace_bytes=each.workspace_bytes - 1)[0] for each in results
                if each.workspace_bytes]  # fmt: skip

    assert statuses == [INVALID_VALUE] * 2


def test_algorithm_of_another_problem_or_nobody_is_refused(
    told: Told, capfd: pytest.CaptureFixture[str]
) -> None:
    algorithm = first(told)
    wider, narrower = told.layout(IN, ROWS + 1), told.layout(OUT, ROWS + 1)

    other = told.prepare(algorithm, b_layout=wider.value or 0, c_layout=narrower.value or 0,
                         d_layout=narrower.value or 0)  # fmt: skip
    algorithm[2] ^= 1
    changed = told.prepare(algorithm)

    assert (other, changed) == ((INVALID_VALUE, None),) * 2
    err = capfd.readouterr().err
    assert "for another problem" in err
    assert "did not come from our heuristics" in err


@pytest.mark.parametrize(
    ("place", "layout", "status", "reason"),
    [
        (1, (IN + 8, ROWS), INVALID_VALUE, "is not D"),
        (1, (IN, ROWS, IN - 1), INVALID_VALUE, "columns of B overlap"),
        (0, (IN, 0), INVALID_VALUE, "A is empty"),
        (2, (OUT, ROWS, OUT, 2), NOT_SUPPORTED, "types 14, 14 to 2"),
        (1, (IN, ROWS, IN, FLOAT32), NOT_SUPPORTED, "types 14, 0 to 14"),
    ],
)
def test_layouts_that_do_not_fit_are_refused(
    told: Told,
    capfd: pytest.CaptureFixture[str],
    place: int,
    layout: tuple[int, ...],
    status: int,
    reason: str,
) -> None:
    told.layouts[place] = told.layout(*layout)

    assert told.heuristics() == (status, [])
    assert reason in capfd.readouterr().err


@pytest.mark.parametrize(
    ("attribute", "value", "status", "reason"),
    [
        (TRANSA, c_int(0), NOT_SUPPORTED, "not A transposed"),
        (EPILOGUE, c_int(2), NOT_SUPPORTED, "epilogue 2"),
        (EPILOGUE, c_int(4), INVALID_VALUE, "the bias begins at 0"),
    ],
)
def test_operations_that_we_never_ask_for_are_refused(
    told: Told, capfd: pytest.CaptureFixture[str], attribute: int, value: Any, status: int, reason: str
) -> None:
    assert told.set("MatmulDesc", told.operation, attribute, value) == SUCCESS

    assert told.heuristics() == (status, [])
    assert reason in capfd.readouterr().err


def test_attribute_of_wrong_size_or_number_is_refused(told: Told) -> None:
    statuses = [
        told.set("MatmulDesc", told.operation, TRANSA, c_int64(1)),
        told.set("MatmulDesc", told.operation, 9, c_int(1)),
        told.set("MatmulPreference", told.preference, WORKSPACE_BYTES, c_int(1)),
        told.set("MatmulPreference", told.operation, WORKSPACE_BYTES, c_uint64(1)),
    ]

    assert statuses == [INVALID_VALUE] * 4


def test_what_was_destroyed_is_gone(told: Told) -> None:
    destroy = told.library.cublasLtMatmulDescDestroy

    assert [destroy(told.operation), destroy(told.operation)] == [SUCCESS, INVALID_VALUE]
    assert told.heuristics()[0] == INVALID_VALUE


def test_heuristics_keep_to_the_preference(told: Told) -> None:
    all_of_them = told.heuristics()[1]
    told.set("MatmulPreference", told.preference, REDUCTIONS, c_int(2))
    in_float = told.heuristics()[1]
    told.set("MatmulPreference", told.preference, WORKSPACE_BYTES, c_uint64(0))
    without_workspace = told.heuristics()[1]

    assert list(map(len, (all_of_them, in_float, without_workspace))) == [4, 3, 2]


def test_bias_of_another_type_than_the_output_is_refused(
    told: Told, capfd: pytest.CaptureFixture[str]
) -> None:
    told.set("MatmulDesc", told.operation, EPILOGUE, c_int(4))
    told.set("MatmulDesc", told.operation, BIAS_POINTER, c_void_p(4096))
    told.set("MatmulDesc", told.operation, BIAS_DATA_TYPE, c_int(BFLOAT16))
    told.layouts[2] = told.layout(OUT, ROWS, dtype=FLOAT32)

    assert told.heuristics() == (NOT_SUPPORTED, [])
    assert "the bias has type 14, but D 0" in capfd.readouterr().err
