"""exp and the conversions to and from bfloat16, against NumPy and ml_dtypes."""

from typing import Any

import ml_dtypes
import numpy as np

from cupaged.jit import njit
from cupaged.kernels.bits import exp, load, store


@njit
def exp_all(x: Any, out: Any) -> None:
    for i in range(x.shape[0]):
        out[i] = exp(x[i])


@njit
def store_all(x: Any, out: Any) -> None:
    for i in range(x.shape[0]):
        out[i] = store(out[i], x[i])


@njit
def load_all(x: Any, out: Any) -> None:
    for i in range(x.shape[0]):
        out[i] = load(x[i])


def test_exp_is_within_two_units_in_the_last_place() -> None:
    x = np.concatenate([np.linspace(-86.9, 0, 100_001), -np.logspace(-12, 0, 101)]).astype(np.float32)
    out = np.empty_like(x)

    exp_all(x, out)

    exact = np.exp(x.astype(np.float64))
    assert (np.abs(out - exact) <= 2 * np.spacing(exact.astype(np.float32))).all()


def test_exp_of_zero_is_one_and_of_minus_infinity_is_zero() -> None:
    out = np.empty(4, np.float32)

    exp_all(np.array([0, -np.inf, -88, -1e30], np.float32), out)

    assert out.tolist() == [1, 0, 0, 0]


def test_exp_of_nan_is_nan() -> None:
    out = np.zeros(33, np.float32)

    exp_all(np.full(33, np.nan, np.float32), out)

    assert np.isnan(out).all()


def test_store_rounds_to_bfloat16_as_ml_dtypes_does() -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, 100_000, np.uint32)
    ties = (np.arange(2000, dtype=np.uint32) << 16) | 0x8000
    x = np.concatenate([bits, ties]).view(np.float32)
    x = x[~np.isnan(x)]
    out = np.empty(len(x), np.uint16)

    store_all(x, out)

    assert np.array_equal(out, x.astype(ml_dtypes.bfloat16).view(np.uint16))


def test_store_keeps_nan() -> None:
    x = np.array([0x7F800001, 0xFFFFFFFF], np.uint32).view(np.float32)
    out = np.empty(2, np.uint16)

    store_all(x, out)

    assert np.isnan(out.view(ml_dtypes.bfloat16).astype(np.float32)).all()


def test_load_gives_the_bfloat16_as_float32() -> None:
    x = np.arange(0, 2**16, 7, dtype=np.uint16)
    x = x[~np.isnan(x.view(ml_dtypes.bfloat16).astype(np.float32))]
    out = np.empty(len(x), np.float32)

    load_all(x, out)

    assert np.array_equal(out, x.view(ml_dtypes.bfloat16).astype(np.float32))


def test_plain_functions_agree_with_the_compiled_ones() -> None:
    x = np.float32(-3.14159)
    half = store(np.uint16(0), x)

    assert np.float32(x).astype(ml_dtypes.bfloat16).view(np.uint16) == half
    assert load(half) == np.float32(x).astype(ml_dtypes.bfloat16).astype(np.float32)
