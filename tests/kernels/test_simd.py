"""Vectors of 16 floats: what compiled code does is what the plain functions say, and that is right."""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupaged.jit import njit
from cupaged.kernels import simd
from cupaged.kernels.simd import LANES

NAN, INF = np.nan, np.inf


@njit
def exp_all(x: Any, out: Any) -> None:
    for i in range(0, x.shape[0], LANES):
        simd.store(out, i, simd.exp(simd.load(x, i)))


@njit
def copy_part(x: Any, out: Any, at: int, count: int) -> None:
    simd.store_part(out, at, count, simd.load_part(x, at, count))


@njit
def copy_all(x: Any, out: Any) -> None:
    for i in range(0, x.size, LANES):
        simd.store(out, i, simd.load(x, i))


@njit
def keep_lanes(x: Any, begin: int, end: int, out: Any) -> None:
    simd.store(out, 0, simd.keep(simd.load(x, 0), begin, end, simd.splat(-1.0)))


@njit
def fold(x: Any) -> Any:
    simd.prefetch(x, x.size)
    return simd.sum_lanes(simd.load(x, 0)), simd.max_lanes(simd.load(x, 0))


@njit
def fma_all(a: Any, b: Any, c: Any, out: Any) -> None:
    simd.store(out, 0, simd.fma(simd.load(a, 0), simd.load(b, 0), simd.load(c, 0)))


@njit
def combine(a: Any, b: Any, out: Any) -> None:
    x, y = simd.load(a, 0), simd.load(b, 0)
    simd.store(out, 0, -(x + y) * (x - y) / y)
    simd.store(out, LANES, simd.maximum(x, y))
    simd.store(out, 2 * LANES, simd.select_less(x, y, abs(x), y))
    total = simd.splat(0.5)
    for _ in range(3):
        total += x
        total *= y
    simd.store(out, 3 * LANES, total)


def with_and_without_compiler(function: Any) -> list[Callable[..., Any]]:
    return [function, getattr(function, "py_func", function)]


def halves(x: Any) -> Any:
    return np.asarray(x, np.float32).astype(ml_dtypes.bfloat16).view(np.uint16)


def test_exp_is_within_a_unit_in_the_last_place() -> None:
    x = np.concatenate([np.linspace(-86.99, 0, 100_000), -np.logspace(-12, 0, 96)]).astype(np.float32)
    out = np.empty_like(x)

    exp_all(x, out)

    exact = np.exp(x.astype(np.float64))
    assert (np.abs(out - exact) <= np.spacing(exact.astype(np.float32))).all()


@pytest.mark.parametrize("run", with_and_without_compiler(exp_all))
def test_exp_of_what_is_no_ordinary_number(run: Any) -> None:
    x = np.array([0, -0.0, -87, -87.01, -1e30, -INF, NAN, -NAN] * 2, np.float32)
    out = np.empty_like(x)

    run(x, out)

    assert out[:6].tolist() == [1, 1, np.exp(np.float32(-87)), 0, 0, 0]
    assert np.isnan(out[6:8]).all()


@pytest.mark.parametrize("run", with_and_without_compiler(copy_all))
def test_store_rounds_to_bfloat16_as_ml_dtypes_does(run: Any) -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, 16_000, np.uint32)
    ties = (np.arange(2000, dtype=np.uint32) << 16) | 0x8000
    x = np.concatenate([bits, ties]).view(np.float32)
    x[np.isnan(x)] = INF
    out = np.empty(len(x), np.uint16)

    if run is copy_all:
        run(x, out)
    else:
        run(x[:64], out[:64])
        x, out = x[:64], out[:64]

    assert np.array_equal(out, halves(x))


@pytest.mark.parametrize("run", with_and_without_compiler(copy_all))
def test_store_keeps_nan(run: Any) -> None:
    x = np.array([0x7F800001, 0xFFFFFFFF, 0x7FFFFFFF, 0xFF800001] * 4, np.uint32).view(np.float32)
    out = np.empty(LANES, np.uint16)

    run(x, out)

    assert np.isnan(out.view(ml_dtypes.bfloat16).astype(np.float32)).all()


@pytest.mark.parametrize("run", with_and_without_compiler(copy_all))
def test_loads_and_stores_count_elements_of_any_contiguous_array(run: Any) -> None:
    x = halves(np.arange(6 * LANES)).reshape(2, 3, LANES)
    out = np.zeros((6, LANES), np.float32)

    run(x, out)

    assert np.array_equal(out.reshape(-1), np.arange(6 * LANES))


@pytest.mark.parametrize("run", with_and_without_compiler(copy_part))
@pytest.mark.parametrize("count", [0, 1, 7, LANES - 1, LANES])
@pytest.mark.parametrize("kind", [np.float32, np.uint16])
def test_part_of_a_vector_touches_nothing_else(run: Any, count: int, kind: Any) -> None:
    x = np.arange(40).astype(np.float32)
    x = halves(x) if kind == np.uint16 else x
    out = np.full(40, 99, kind)

    run(x, out, 3, count)

    assert np.array_equal(out[3 : 3 + count], x[3 : 3 + count])
    assert (out[:3] == 99).all()
    assert (out[3 + count :] == 99).all()


@pytest.mark.parametrize("run", with_and_without_compiler(keep_lanes))
@pytest.mark.parametrize(
    ("begin", "end"), [(0, 16), (3, 9), (-100, 5), (7, 1 << 20), (5, 5), (16, 40), (-9, 0)]
)
def test_keep_replaces_what_lies_outside(run: Any, begin: int, end: int) -> None:
    x = np.arange(LANES).astype(np.float32)
    out = np.empty(LANES, np.float32)

    run(x, begin, end, out)

    assert out.tolist() == [i if begin <= i < end else -1 for i in range(LANES)]


@pytest.mark.parametrize("run", with_and_without_compiler(fold))
def test_lanes_are_added_by_halves(run: Any) -> None:
    x = np.random.default_rng(0).standard_normal(LANES, np.float32) * 1000

    total, greatest = run(x)

    by_halves = x
    while len(by_halves) > 1:
        by_halves = by_halves[: len(by_halves) // 2] + by_halves[len(by_halves) // 2 :]
    assert (total, greatest) == (by_halves[0], x.max())


@pytest.mark.parametrize("run", with_and_without_compiler(fma_all))
def test_fma_rounds_once(run: Any) -> None:
    a = np.full(LANES, 1 + 2.0**-12, np.float32)
    out = np.empty(LANES, np.float32)

    run(a, a, np.full(LANES, -1, np.float32), out)

    assert (out == np.float32(2.0**-11 + 2.0**-24)).all()  # the product alone would lose the last bit


def test_arithmetic_is_that_of_arrays() -> None:
    rng = np.random.default_rng(1)
    a, b = rng.standard_normal((2, LANES)).astype(np.float32)
    a[:3], b[:3] = (NAN, 1, NAN), (1, NAN, NAN)
    compiled, plain = np.empty(4 * LANES, np.float32), np.empty(4 * LANES, np.float32)

    for out, run in zip((compiled, plain), with_and_without_compiler(combine), strict=True):
        run(a, b, out)

    assert np.array_equal(compiled, plain, equal_nan=True)
    assert np.array_equal(plain[:LANES], -(a + b) * (a - b) / b, equal_nan=True)
    assert np.array_equal(plain[LANES : 2 * LANES], np.where(a > b, a, b), equal_nan=True)
    assert np.array_equal(plain[2 * LANES : 3 * LANES], np.where(a < b, np.abs(a), b), equal_nan=True)
