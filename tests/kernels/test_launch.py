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
    is_packed,
    parameters,
    require_packed,
    row_stride,
    row_units,
)

SOURCE = """
// two.cu: KERNEL(32) commented(int x) { is none.
#include "gpu.cuh"

KERNEL(THREADS, 2) first(T* __restrict__ out, const float* __restrict__ x,  // float[n], or null
                         const uint4* units,
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
            Parameter("out", "P", alignment=16),
            Parameter("x", "P", is_const=True),
            Parameter("units", "P", is_const=True, alignment=16),
            Parameter("n", "i"),
            Parameter("stride", "q"),
            Parameter("eps", "f"),
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


def test_arrays_of_two_dtypes_are_no_launch() -> None:
    x, y = np.empty(1, np.float16), np.empty(1, np.float32)

    assert element_type(x, None, x) == "f16"
    with pytest.raises(AssertionError, match="arrays of float16 and of float32"):
        element_type(x, None, y)


def test_packed_is_what_lies_in_one_piece() -> None:
    x = np.zeros((4, 6, 8), np.float32)
    packed = [x, x[2], x[:, :1, :][:1], x[1:3], x[:, 6:], x[0, 3:4, 2:5], np.broadcast_to(x[:0, 0], (0, 8))]
    others = [x[:, :3], x[..., :4], x[:, 1], x.swapaxes(1, 2), np.broadcast_to(x[0, 0, 0], (2, 2))]

    assert [is_packed(each) for each in packed] == [True] * 7
    assert [is_packed(each) for each in others] == [False] * 5
    assert is_packed(x[:, :3], inner=2)
    assert not is_packed(x[:, :, :4], inner=2)
    with pytest.raises(AssertionError, match=r"out of shape \(4, 6, 4\) has strides \(192, 32, 4\)"):
        require_packed("out", x[..., :4])


def test_ceil_div_rounds_up() -> None:
    assert [ceil_div(n, 16) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]


def test_rows_are_counted_in_units_of_16_bytes_at_their_own_stride() -> None:
    x = np.zeros((3, 40), np.float16)[:, :24]

    assert row_units(x, "size") == 3
    assert row_stride(x) == 40


def test_rows_that_kernels_would_misread_are_no_launch() -> None:
    x = np.zeros((6, 5, 8), np.float16)

    assert row_stride(x[:, 1:3], inner=2, unit=16) == 40
    with pytest.raises(AssertionError, match=r"a row of shape \(5, 4\) has strides \(16, 2\)"):
        row_stride(x[..., :4], inner=2)
    with pytest.raises(AssertionError, match="rows lie 40 bytes apart"):
        row_stride(np.zeros((6, 20), np.float16), unit=16)


def test_row_of_odd_bytes_is_an_error_that_names_size_and_remedy() -> None:
    with pytest.raises(ValueError, match=r"size is 9, .* multiple of 4 in float32; use device='cpu'"):
        row_units(np.zeros((3, 9), np.float32), "size")
