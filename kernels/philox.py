"""Philox4x32-10: random numbers as a function of key and counter, the same on every device."""

from typing import Any

import numpy as np

from cupaged.jit import njit


@njit
def philox(key_low: Any, key_high: Any, counter_0: Any, counter_1: Any) -> Any:
    """Return the first of the four uint32 of counter (counter_0, counter_1, 0, 0)."""
    mask = np.uint64(0xFFFFFFFF)
    shift = np.uint64(32)
    k0, k1 = np.uint64(key_low) & mask, np.uint64(key_high) & mask
    c0, c1, c2, c3 = np.uint64(counter_0) & mask, np.uint64(counter_1) & mask, np.uint64(0), np.uint64(0)
    for _ in range(10):
        a, b = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (b >> shift) ^ c1 ^ k0, b & mask, (a >> shift) ^ c3 ^ k1, a & mask
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & mask, (k1 + np.uint64(0xBB67AE85)) & mask
    return np.uint32(c0)


@njit
def uniform(key_low: Any, key_high: Any, counter_0: Any, counter_1: Any) -> Any:
    """Return a float64 in (0, 1), never either end."""
    return (np.float64(philox(key_low, key_high, counter_0, counter_1)) + 0.5) / 4294967296.0
