"""CUDA's functions of numbers, held to NumPy and Python."""

from typing import Any

import numpy as np

from tests.cuda_on_cpu.planted import device, zeros

F32 = np.float32


def test_rounding_is_as_the_name_says_whatever_the_compiler_contracts() -> None:
    rng = np.random.default_rng(0)
    a, b, c = (rng.standard_normal(256).astype(F32) for _ in range(3))
    c = -(a * b) * (1 + 2.0**-20 * rng.integers(-4, 4, 256)).astype(F32)  # almost all cancels
    rounded, fused = zeros(4, 256, dtype=F32), zeros(256, dtype=F32)

    device("fast").kernel("numbers", "rounding")((1, 1, 1), 256, (rounded, fused, a, b, c))

    np.testing.assert_array_equal(rounded[0], a * b + c)
    np.testing.assert_array_equal(rounded[1], a * b - c)
    np.testing.assert_array_equal(rounded[2], a * b - c)
    np.testing.assert_array_equal(rounded[3], a * b + c)
    np.testing.assert_array_equal(fused, (a.astype(np.float64) * b + c).astype(F32))
    assert (fused != rounded[0]).any()


def test_rounding_of_doubles_is_as_the_name_says() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 256))
    c = a * b * (1 + 2.0**-40 * rng.integers(-4, 4, 256))  # almost all cancels
    out = zeros(256, dtype=np.float64)

    device("fast").kernel("numbers", "rounding_of_doubles")((1, 1, 1), 256, (out, a, b, c))

    np.testing.assert_array_equal(out, a * b - c)


def bits_of(a: int, b: int) -> list[int]:
    """Return what each function of numbers.cu's kernel `bits` gives."""
    wide = a << 32 | b
    pair = (b << 32 | a).to_bytes(8, "little")

    def signed(x: int) -> int:
        return x - 2**32 if x >= 2**31 else x

    def int8s(x: int) -> list[int]:
        return [byte - 256 if byte >= 128 else byte for byte in x.to_bytes(4, "little")]

    return [
        bin(a).count("1"),
        32 - a.bit_length(),
        (a & -a).bit_length(),
        int(f"{a:032b}"[::-1], 2),
        a * b >> 32,
        wide * wide >> 96,
        int.from_bytes(bytes(pair[i] for i in (2, 4, 0, 6)), "little"),
        int.from_bytes(bytes(255 if pair[i] >= 128 else 0 for i in (0, 1, 2, 3)), "little"),
        (b << 32 | a) << 12 >> 32,
        (b << 32 | a) >> 12,
        1 + sum(x * y for x, y in zip(int8s(a), int8s(b), strict=True)),
        1,
        max(signed(a), signed(b)),
        min(a, b),
    ]


def test_bits_equal_python() -> None:
    rng = np.random.default_rng(0)
    x, y = (rng.integers(0, 2**32, 256, dtype=np.uint64).astype(np.uint32) for _ in range(2))
    x[:4], y[:4] = [0, 1, 2**31, 2**32 - 1], [2**32 - 1, 2**31, 0, 7]
    out = zeros(14, 256)

    device("fast").kernel("numbers", "bits")((1, 1, 1), 256, (out, x, y))

    expected = np.array([bits_of(int(a), int(b)) for a, b in zip(x, y, strict=True)]).T
    np.testing.assert_array_equal(out.astype(np.int64) & 0xFFFFFFFF, expected & 0xFFFFFFFF)


def test_floats_become_the_nearest_integer_there_is() -> None:
    x = np.linspace(-9, 9, 256).astype(F32)
    x[:8] = [2.5, 3.5, -2.5, -0.5, 3e9, -3e9, 5e9, np.nan]
    out = zeros(6, 256)

    device("fast").kernel("numbers", "to_integers")((1, 1, 1), 256, (out, x))

    def clipped(rounded: Any, low: int, high: int) -> Any:
        return np.nan_to_num(np.clip(rounded.astype(np.float64), low, high)).astype(np.int64)

    for row, rounding in enumerate((np.rint, np.trunc, np.floor, np.ceil)):
        np.testing.assert_array_equal(out[row], clipped(rounding(x), -(2**31), 2**31 - 1))
    for row, rounding in ((4, np.rint), (5, np.trunc)):
        np.testing.assert_array_equal(out[row].view(np.uint32), clipped(rounding(x), 0, 2**32 - 1))
