"""Rows of logits that are hard to rank: ties, infinities, NaN, both zeros, numbers of every size."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

KINDS = ("normal", "rounded", "few", "strange", "wide")
SPECIAL = (0.0, -0.0, 1e30, -1e30, 1e-40, -1e-40, np.nan, -np.inf)


def logits_of(rng: np.random.Generator, kind: str, shape: tuple[int, int]) -> NDArray[np.float32]:
    """Return rows of logits."""
    z = rng.standard_normal(shape, np.float32) * rng.choice([0.1, 3, 10], (shape[0], 1)).astype(np.float32)
    if kind == "rounded":
        z = z.astype(np.float16).astype(np.float32)
    elif kind == "few":
        z = rng.choice(np.array([-3, -0.0, 0.0, 0.5, -np.inf], np.float32), shape)
    elif kind == "strange":
        z = np.where(rng.random(shape) < 0.3, rng.choice(np.array(SPECIAL, np.float32), shape), z)
    elif kind == "wide":
        z = rng.integers(0, 2**32, shape, np.uint32).view(np.float32)  # any float32 there is
        z[1::2] = np.where(np.isinf(z[1::2]), np.float32(0), z[1::2])
    return z


def greatest(row: NDArray[np.float32]) -> Any:
    """Return the greatest number of a row; not by nanmax, which a signalling NaN confuses."""
    return np.where(np.isnan(row), np.float32(-np.inf), row).max()


def finite_rows(rng: np.random.Generator, kind: str, shape: tuple[int, int]) -> NDArray[np.float32]:
    """Return those rows of logits whose greatest number is finite."""
    rows = logits_of(rng, kind, shape)
    return rows[[bool(np.isfinite(greatest(row))) for row in rows]]
