"""Conversions and exp2 as PTX has them, held to ml_dtypes and NumPy over all 16-bit numbers."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.cuda_on_cpu.planted import device, zeros

BF16, F16, F32 = ml_dtypes.bfloat16, np.float16, np.float32
ALL = np.arange(65536, dtype=np.uint16)
NAN = 0x7FFF  # every NaN becomes it


def narrowed(x: np.ndarray[Any, Any]) -> dict[Any, np.ndarray[Any, Any]]:
    """Return the bits that pack_bf16 and pack_f16 make of x (low) and -x (high), uint16[len(x), 2] a type."""
    bf16s, f16s = zeros(len(x), dtype=np.uint32), zeros(len(x), dtype=np.uint32)
    kernel = device("fast").kernel("numbers", "narrow")
    kernel((-(-len(x) // 256), 1, 1), 256, (bf16s, f16s, x, len(x)))
    return {BF16: bf16s.view(np.uint16).reshape(-1, 2), F16: f16s.view(np.uint16).reshape(-1, 2)}


def widened() -> dict[Any, np.ndarray[Any, Any]]:
    """Return what to_float makes of all 16-bit numbers."""
    outs = {BF16: zeros(65536, dtype=F32), F16: zeros(65536, dtype=F32)}
    kernel = device("fast").kernel("numbers", "widen")
    kernel((256, 1, 1), 256, (outs[BF16], outs[F16], ALL.view(BF16), ALL.view(F16)))
    return outs


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_every_16_bit_number_widens_exactly(dtype: Any) -> None:
    with np.errstate(invalid="ignore"):  # of signalling NaN
        exact = ALL.view(dtype).astype(F32)

    np.testing.assert_array_equal(widened()[dtype], exact)
    assert (np.signbit(widened()[dtype]) == (ALL >= 0x8000)).all()


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_every_16_bit_number_comes_back(dtype: Any) -> None:
    wide = widened()[dtype]

    back = narrowed(wide)[dtype][:, 0]

    np.testing.assert_array_equal(back, np.where(np.isnan(wide), NAN, ALL))


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_floats_round_to_nearest_even(dtype: Any) -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, 200_000, dtype=np.uint64).astype(np.uint32)
    wide = widened()[dtype]
    finite = np.sort(wide[np.isfinite(wide)])
    ties = ((finite[:-1].astype(np.float64) + finite[1:]) / 2).astype(F32)  # exact: one bit more
    beside = [np.nextafter(ties, F32(side)) for side in (np.inf, -np.inf)]
    edges = np.array([np.inf, 65519.99, 65520, 65536, 3.4e38, 2.0**-25, 2.0**-24], F32)
    x = np.concatenate([bits.view(F32), ties, *beside, edges])

    got = narrowed(x)[dtype]

    with np.errstate(over="ignore", invalid="ignore"):
        for column, value in enumerate((x, -x)):
            rounded = value.astype(dtype).view(np.uint16)
            np.testing.assert_array_equal(got[:, column], np.where(np.isnan(value), NAN, rounded))


def test_exp2_flushes_subnormals_to_zero() -> None:
    below = np.nextafter(F32(-126), F32(-200))
    x = np.array([-126, below, -140, -np.inf, 0, 1, 0.5, 127, 128, np.inf, np.nan], F32)
    out = zeros(len(x), dtype=F32)

    device("fast").kernel("numbers", "exp2_of")((1, 1, 1), 256, (out, x, len(x)))

    exact = np.exp2(x.astype(np.float64))
    exact[[1, 2]] = 0
    np.testing.assert_allclose(out[:8], exact[:8], rtol=2.0**-22)
    np.testing.assert_array_equal(out[8:], [np.inf, np.inf, np.nan])
