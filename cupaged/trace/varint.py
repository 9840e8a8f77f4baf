"""Whole numbers as bytes: zigzag, then 7 bits a byte, so that what is near 0 takes one byte."""

import numpy as np
from numpy.typing import NDArray

from cupaged.jit import njit, njit_inner

MAX_BYTES = 10  # of one number


@njit_inner
def put(out: NDArray[np.uint8], at: int, number: int) -> int:
    """Write a number at `at`; return where the next one goes."""
    value = np.int64(number)
    word = np.uint64((value << 1) ^ (value >> 63))
    while word >= np.uint64(128):
        out[at] = np.uint8((word & np.uint64(127)) | np.uint64(128))
        word >>= np.uint64(7)
        at += 1
    out[at] = np.uint8(word)
    return at + 1


@njit
def _encode(values: NDArray[np.int64], out: NDArray[np.uint8]) -> int:
    at = 0
    for i in range(values.size):
        at = put(out, at, values[i])
    return at


@njit
def _decode(data: NDArray[np.uint8], out: NDArray[np.int64]) -> int:
    """Return how many numbers `data` holds, -1 if its last one has no end."""
    count = 0
    word = np.uint64(0)
    shift = np.uint64(0)
    for byte in data:
        word |= np.uint64(byte & 127) << shift
        shift += np.uint64(7)
        if byte < 128:
            out[count] = np.int64(word >> np.uint64(1)) ^ -np.int64(word & np.uint64(1))
            count += 1
            word = shift = np.uint64(0)
    return count if shift == 0 else -1


def encode_ints(values: list[int]) -> bytes:
    """Return 64-bit numbers as bytes."""
    array = np.array(values, np.int64)
    out = np.empty(MAX_BYTES * array.size, np.uint8)
    return out[: _encode(array, out)].tobytes()


def decode_ints(data: bytes) -> list[int]:
    """Return the numbers that `encode_ints` wrote; ValueError if the last one is cut off."""
    out = np.empty(len(data), np.int64)
    count = _decode(np.frombuffer(data, np.uint8), out)
    if count < 0:
        raise ValueError("its last number is cut off")
    values: list[int] = out[:count].tolist()
    return values
