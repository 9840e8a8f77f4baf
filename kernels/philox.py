"""Philox4x32-10: random numbers as a function of key and counter, the same on every device."""

from typing import Any

import numpy as np

from cupaged.jit import njit

ROUNDS = 10


@njit
def philox(key: Any, counter: Any) -> Any:
    """Return the four uint32 of a key of two and a counter of four 32-bit words."""
    mask, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    k0, k1 = np.uint64(key[0]) & mask, np.uint64(key[1]) & mask
    c0, c1 = np.uint64(counter[0]) & mask, np.uint64(counter[1]) & mask
    c2, c3 = np.uint64(counter[2]) & mask, np.uint64(counter[3]) & mask
    for _ in range(ROUNDS):
        a, b = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (b >> shift) ^ c1 ^ k0, b & mask, (a >> shift) ^ c3 ^ k1, a & mask
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & mask, (k1 + np.uint64(0xBB67AE85)) & mask
    return np.uint32(c0), np.uint32(c1), np.uint32(c2), np.uint32(c3)


@njit
def random_word(seed: Any, output_position: int, group_index: int) -> Any:
    """Return the uniform uint32 of one token of one sequence."""
    return philox((seed[0], seed[1]), (output_position, group_index, 0, 0))[0]
