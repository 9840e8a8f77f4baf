"""The element types that CUDA kernels are compiled for, and how near to float64 a result in one must be."""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

BF16, F16, F32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16), np.dtype(np.float32)
DTYPES = [BF16, F16, F32]
ROUNDING = {BF16: 2.0**-8, F16: 2.0**-11, F32: 2.0**-24}  # of a number to T, relative to it
SMALLEST = {BF16: 2.0**-126, F16: 2.0**-24, F32: 2.0**-126}  # below it a result may be off by all of itself


def normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any, spread: float = 1.0) -> Array:
    """Return random numbers of standard deviation `spread`, rounded to dtype."""
    x: Array = rng.standard_normal(shape, np.float32) * np.float32(spread)
    return x.astype(dtype)


def strided(x: Array, gap: int = 16) -> Array:
    """Return x [n, size] as a view of rows that lie `gap` elements of NaN apart."""
    wide = np.full((len(x), x.shape[1] + gap), np.nan, x.dtype)
    wide[:, : x.shape[1]] = x
    return wide[:, : x.shape[1]]


def sparse(folder: Path, shape: tuple[int, ...], dtype: Any) -> Array:
    """Return zeros, of which only what is touched takes memory or disk."""
    return np.memmap(folder / "sparse", dtype, "w+", shape=shape)


def assert_rounded_once(out: Array, expected: Array, magnitude: Array | None = None) -> None:
    """Hold out, T of any shape, to float64: some float32 operations, then one rounding to T.

    `magnitude` is that of the numbers which were added to give a result, if they may cancel.
    """
    magnitude = np.abs(expected) if magnitude is None else magnitude
    bound = ROUNDING[out.dtype] * np.abs(expected) + 2.0**-20 * magnitude + SMALLEST[out.dtype]
    error = np.abs(out.astype(np.float64) - expected)
    wrong = ~(error <= bound)  # NaN is wrong, too
    assert not wrong.any(), (
        f"{np.count_nonzero(wrong)} of {wrong.size} wrong, first at {np.argwhere(wrong)[0]}: "
        f"max error {np.nanmax(error):.2e}, mean {np.nanmean(error):.2e}, {np.isnan(error).sum()} not numbers"
    )
