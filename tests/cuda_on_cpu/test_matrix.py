"""ldmatrix and mma, laid out as the PTX ISA says; not yet compared with a GPU."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.cuda_on_cpu.planted import complaint, device, line, threads_in, zeros

MODES = ("fast", "check")
DTYPES = {"bf16": ml_dtypes.bfloat16, "f16": np.float16}


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_ldmatrix_gives_each_lane_two_neighbours_of_each_matrix(mode: str, transposed: bool) -> None:
    x = np.arange(4 * 8 * 8, dtype=np.uint16).reshape(4, 8, 8)
    out = zeros(32, 4, dtype=np.uint32)

    device(mode).kernel("matrix", "load", ELEMENT="f16")(
        (1, 1, 1), 32, (out, x.view(np.float16), int(transposed))
    )

    matrices = x.transpose(0, 2, 1) if transposed else x
    pairs = matrices.reshape(4, 32, 2).astype(np.uint32)  # lane 4 r + c: row r, columns 2 c and 2 c + 1
    np.testing.assert_array_equal(out, (pairs[..., 0] | pairs[..., 1] << 16).T)


@pytest.mark.parametrize("name", ["multiply", "load_and_multiply"])
@pytest.mark.parametrize("element", DTYPES)
@pytest.mark.parametrize("mode", MODES)
def test_mma_equals_matrix_product(mode: str, element: str, name: str) -> None:
    rng = np.random.default_rng(1)
    a, b = (rng.standard_normal(shape).astype(DTYPES[element]) for shape in ((16, 16), (16, 8)))
    before = rng.standard_normal((16, 8)).astype(np.float32)
    c = before.copy()

    device(mode).kernel("matrix", name, ELEMENT=element)((1, 1, 1), 32, (c, a, b))

    exact = before + a.astype(np.float64) @ b.astype(np.float64)
    np.testing.assert_allclose(c, exact, rtol=0, atol=2e-6)


def test_mma_of_small_integers_is_exact() -> None:
    a = np.arange(256).reshape(16, 16) % 13 - 6
    b = np.arange(128).reshape(16, 8) % 7 - 3
    c = zeros(16, 8, dtype=np.float32)

    kernel = device("fast").kernel("matrix", "multiply", ELEMENT="bf16")
    kernel((1, 1, 1), 32, (c, a.astype(ml_dtypes.bfloat16), b.astype(ml_dtypes.bfloat16)))

    np.testing.assert_array_equal(c, a @ b)


def test_mma_adds_even_columns_then_odd_ones_then_c() -> None:
    a = np.zeros((16, 16), ml_dtypes.bfloat16)
    a[0, :4] = [2.0**24, 1.0, 1.0, -(2.0**24)]  # even: 2^24 + 1 is 2^24 in float32; odd: 1 - 2^24 is exact
    c = np.full((16, 8), 0.25, np.float32)

    kernel = device("fast").kernel("matrix", "multiply", ELEMENT="bf16")
    kernel((1, 1, 1), 32, (c, a, np.ones((16, 8), ml_dtypes.bfloat16)))

    assert c[0, 0] == np.float32(2.0**24) + np.float32(1.0) - np.float32(2.0**24) + 0.25


@pytest.mark.parametrize("element", DTYPES)
def test_nan_and_infinity_go_through_mma(element: str) -> None:
    a = np.zeros((16, 16), DTYPES[element])
    a[1, 3], a[2, 4] = np.nan, np.inf
    b = np.ones((16, 8), DTYPES[element])
    c = zeros(16, 8, dtype=np.float32)

    device("fast").kernel("matrix", "multiply", ELEMENT=element)((1, 1, 1), 32, (c, a, b))

    assert np.isnan(c[1]).all()
    assert (c[2] == np.inf).all()
    assert (np.delete(c, (1, 2), 0) == 0).all()


@pytest.mark.parametrize("mode", MODES)
def test_misaligned_row_is_found(mode: str) -> None:
    kernel = device(mode).kernel("matrix", "load_misaligned", ELEMENT="f16")

    message = complaint(kernel, (1, 1, 1), 32, (zeros(32, dtype=np.uint32),))

    assert f"{line('matrix', 'load_misaligned')}: misaligned row of ldmatrix at byte 152 of 's'" in message
    assert threads_in(message) == (0, 9)


def test_row_in_global_memory_is_found() -> None:
    kernel = device().kernel("matrix", "load_from_global", ELEMENT="f16")
    args: tuple[Any, ...] = (zeros(32, dtype=np.uint32), np.zeros(256, np.float16))

    message = complaint(kernel, (1, 1, 1), 32, args)

    assert line("matrix", "load_from_global") in message
    assert "global-memory read by ldmatrix of 16 bytes at byte 0 of 'x'" in message
