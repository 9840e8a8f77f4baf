"""Arithmetic of sampling that CPU and GPU do alike to the last bit; exact.cuh is the same for CUDA.

A token's mass is exp of its distance from the greatest logit, over the temperature, in units of 2**-40.
Masses are integers: their sums, and all that is decided by comparing them, depend on no order and no device.
"""

from typing import Any

import numpy as np

from cupaged.jit import njit
from cupaged.kernels.bits import exp

ONE = 2**40  # the mass of the most likely token; 2**22 of them add up to 2**62
KEY_OF_MINUS_INFINITY = np.uint32(0x007FFFFF)
KEY_OF_INFINITY = np.uint32(0xFF800000)
GREEDY_TEMPERATURE = np.float32(1e-5)  # below it a row takes the most likely token, as in vLLM
SMALLEST_EXPONENT = np.float32(-28.0)  # e**-28 is less than a unit of mass
LARGEST_TEMPERATURE = np.float32(2.0**126)  # its reciprocal is a normal number

_WORD = np.uint64(32)  # bits
_LN_2 = np.uint64(186065279)  # in units of 2**-28


@njit
def inverse(temperature: Any) -> Any:
    """Return what logits are multiplied with."""
    return np.float32(1.0) / min(temperature, LARGEST_TEMPERATURE)


@njit
def to_mass(x: Any) -> Any:
    """Return floor(e**x * ONE) as int64, by the float32 polynomial of `exp`, for x <= 0; 0 of NaN."""
    y = x if x > SMALLEST_EXPONENT else SMALLEST_EXPONENT
    return np.int64(exp(y) * np.float32(ONE))


@njit
def rank_key(bits: Any) -> Any:
    """Return a uint32 that orders like the float32 of these bits: -0 as 0, NaN as minus infinity."""
    magnitude = bits & np.uint32(0x7FFFFFFF)
    ordered = bits ^ (np.uint32(0xFFFFFFFF) if bits >> np.uint32(31) else np.uint32(0x80000000))
    ordered = np.uint32(0x80000000) if magnitude == np.uint32(0) else ordered
    return KEY_OF_MINUS_INFINITY if magnitude > np.uint32(0x7F800000) else ordered


@njit
def portion(total: int, word: Any) -> Any:
    """Return floor(total * word / 2**32), for a total below 2**63 and a word of 32 bits."""
    wide, factor = np.uint64(total), np.uint64(word)
    low = (wide & np.uint64(0xFFFFFFFF)) * factor
    return np.int64((wide >> _WORD) * factor + (low >> _WORD))


@njit
def goal(total: int, fraction: Any) -> Any:
    """Return total * fraction, rounded up, for a fraction in (0, 1), itself rounded up to 2**-32."""
    wide, factor = np.uint64(total), np.uint64(max(np.ceil(fraction * np.float32(2.0**32)), np.float32(1.0)))
    low = (wide & np.uint64(0xFFFFFFFF)) * factor + np.uint64(0xFFFFFFFF)
    return np.int64((wide >> _WORD) * factor + (low >> _WORD))


@njit
def log_of(total: int) -> Any:
    """Return log(total / ONE) in units of 2**-32, within 300 of them, for a total in [ONE, 2**62]."""
    power = 0
    while (total >> power) >= 2 * ONE:
        power += 1
    m = np.uint64(total >> power) >> np.uint64(9)  # [1, 2) in units of 2**-31
    log2 = np.uint64(power)
    for _ in range(32):  # squaring doubles the logarithm; its next bit is whether 2 is passed
        m = (m * m) >> np.uint64(31)
        bit = m >> _WORD
        log2 = (log2 << np.uint64(1)) | bit
        m >>= bit
    return np.int64((log2 * _LN_2) >> np.uint64(28))
