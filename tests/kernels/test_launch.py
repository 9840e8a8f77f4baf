"""What is read out of a .cu file, and out of an array, for a launch."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from cupaged.kernels.launch import (
    SOURCES,
    Parameter,
    ceil_div,
    element_type,
    parameters,
    row_stride,
    row_units,
)

SOURCE = """
// two.cu: KERNEL(32) commented(int x) { is none.
#include "gpu.cuh"

KERNEL(THREADS, 2) first(T* __restrict__ out, const float* __restrict__ x,  // float[n], or null
                         int n, int64_t stride, float eps) {
}

KERNEL(256)
second() {
}
"""


def test_parameters_are_read_from_the_declaration() -> None:
    found = parameters(SOURCE)

    assert found == {
        "first": (
            Parameter("out", "P", False),
            Parameter("x", "P", True),
            Parameter("n", "i", False),
            Parameter("stride", "q", False),
            Parameter("eps", "f", False),
        ),
        "second": (),
    }


def test_parameter_of_another_type_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'double x' is neither a pointer nor one of \['float', 'int'"):
        parameters("KERNEL(32) foo(double x) {")


@pytest.mark.parametrize("path", sorted(SOURCES.glob("*.cu")), ids=lambda path: path.stem)
def test_every_kernel_has_parameters_that_can_be_read(path: Path) -> None:
    text = path.read_text(encoding="utf-8")

    assert text.count("\nKERNEL(") == len(parameters(text)) > 0


def test_dtypes_have_the_names_that_kernels_use() -> None:
    dtypes = (ml_dtypes.bfloat16, np.float16, np.float32)

    assert [element_type(np.empty(1, dtype)) for dtype in dtypes] == ["bf16", "f16", "float"]
    with pytest.raises(ValueError, match=r"dtype float64 has no kernels; use one of \['bfloat16', 'float16'"):
        element_type(np.empty(1))


def test_ceil_div_rounds_up() -> None:
    assert [ceil_div(n, 16) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]


def test_rows_are_counted_in_units_of_16_bytes_at_their_own_stride() -> None:
    x = np.zeros((3, 40), np.float16)[:, :24]

    assert row_units(x, "size") == 3
    assert row_stride(x) == 40


def test_row_of_odd_bytes_is_an_error_that_names_size_and_remedy() -> None:
    with pytest.raises(ValueError, match=r"size is 9, .* multiple of 4 in float32; use device='cpu'"):
        row_units(np.zeros((3, 9), np.float32), "size")
