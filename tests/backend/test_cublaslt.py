"""The cublasLt binding, by the stand-in: what is asked for, what is kept, and what errors say."""

import builtins
import ctypes
import gc
from typing import Any

import pytest

from cupaged.backend import cublaslt
from cupaged.backend.cublaslt import CublasLt, Product, load_library
from cupaged.kernels.nvrtc import CudaUnavailable
from tests.cuda_on_cpu import cublaslt as stand_in

WORKSPACE_BYTES = 1 << 20
PRODUCT = Product(24, 40, "bfloat16", "bfloat16", False)


class Library:
    """The stand-in with some functions replaced."""

    def __init__(self, **replaced: Any) -> None:
        self._library = stand_in.load()
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)


def answering(status: int) -> Any:
    """Return a C function that only returns a status."""
    return ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(lambda _: status)


@pytest.fixture
def opened() -> CublasLt:
    """The stand-in, opened."""
    return CublasLt(stand_in.load(), WORKSPACE_BYTES)


def test_structures_have_the_sizes_of_the_header() -> None:
    assert ctypes.sizeof(cublaslt._Algorithm) == 64
    assert ctypes.sizeof(cublaslt._HeuristicResult) == 96


def test_algorithms_that_round_partial_sums_or_need_more_workspace_are_left_out(opened: CublasLt) -> None:
    small = CublasLt(stand_in.load(), 0)

    found = [each.heuristics(each.operation(None), each.layouts(PRODUCT, 3), 8) for each in (opened, small)]

    assert list(map(len, found)) == [3, 2]  # of 4
    assert len({*found[0]}) == 3


def test_at_most_as_many_algorithms_as_are_asked_for(opened: CublasLt) -> None:
    assert len(opened.heuristics(opened.operation(None), opened.layouts(PRODUCT, 3), 2)) == 2


def test_algorithm_that_was_kept_is_checked_against_the_problem(opened: CublasLt) -> None:
    operation, layouts = opened.operation(None), opened.layouts(PRODUCT, 3)
    words = opened.heuristics(operation, layouts, 8)

    other = opened.layouts(PRODUCT, 4)

    assert [opened.workspace_bytes(operation, layouts, each) for each in words] == [0, 4 * 24 * 3 * 4, 0]
    assert [opened.workspace_bytes(operation, other, each) for each in words] == [None] * 3
    for no_words in (bytes(64), words[0][:-1], words[0] + bytes(1)):
        assert opened.workspace_bytes(operation, layouts, no_words) is None


def test_product_that_is_not_supported_has_no_algorithms(
    opened: CublasLt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cublaslt, "DATA_TYPES", {"float32": 0, "int8": 3})
    layouts = opened.layouts(Product(16, 16, "int8", "float32", False), 1)

    assert opened.heuristics(opened.operation(None), layouts, 8) == []


def test_bias_of_another_type_than_the_output_is_not_asked_for(opened: CublasLt) -> None:
    with pytest.raises(AssertionError, match="a bias is of the output's type"):
        opened.layouts(PRODUCT._replace(has_bias=True, out_dtype="float32"), 1)


def test_what_was_created_is_destroyed_with_its_owner(capfd: pytest.CaptureFixture[str]) -> None:
    library = stand_in.load()
    opened = CublasLt(library, WORKSPACE_BYTES)
    operation, handle = opened.operation(None), opened.handle
    del opened
    gc.collect()

    assert library.cublasLtMatmulDescDestroy(operation) != cublaslt.SUCCESS
    assert library.cublasLtDestroy(handle) != cublaslt.SUCCESS
    assert capfd.readouterr().err.count("does not exist, or no more") == 2


def test_failure_names_function_status_problem_and_remedy(opened: CublasLt) -> None:
    with pytest.raises(
        RuntimeError,
        match=r"^cublasLtMatmul failed with CUBLAS_STATUS_NOT_SUPPORTED \(15\) for bfloat16 weight\[24, 40\] "
        r"to bfloat16; a newer cuBLAS may: install .*; or use device='cpu'$",
    ):
        opened.check("cublasLtMatmul", 15, PRODUCT)


def test_gpu_that_cannot_be_used_is_unavailable() -> None:
    with pytest.raises(
        CudaUnavailable, match=r"cublasLtCreate failed with .*NOT_INITIALIZED \(1\); see that"
    ):
        CublasLt(Library(cublasLtCreate=answering(cublaslt.NOT_INITIALIZED)), WORKSPACE_BYTES)


def test_library_that_lacks_a_function_is_too_old() -> None:
    with pytest.raises(CudaUnavailable, match="too old, it has no cublasLtMatmul; install"):
        CublasLt(Library(cublasLtMatmul=None), WORKSPACE_BYTES)


def test_missing_finder_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import_module = builtins.__import__

    def without_pathfinder(name: str, *args: Any) -> Any:
        if name.startswith("cuda"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return import_module(name, *args)

    monkeypatch.setattr(builtins, "__import__", without_pathfinder)

    with pytest.raises(
        CudaUnavailable, match=r"no cuBLAS: cuda.pathfinder is not installed; install cupaged"
    ):
        load_library()


def test_missing_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    pathfinder = pytest.importorskip("cuda.pathfinder")

    def load(name: str) -> Any:
        raise RuntimeError(f"Failure finding {name}\nmore lines")

    monkeypatch.setattr(pathfinder, "load_nvidia_dynamic_lib", load)

    with pytest.raises(
        CudaUnavailable, match=r"no cuBLAS, which .*: Failure finding cublasLt; install cupaged"
    ):
        load_library()
