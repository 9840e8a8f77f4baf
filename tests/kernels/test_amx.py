"""AMX's instructions: what the plain functions compute and refuse, and that compiled ones do the same."""

import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numba.core.errors import TypingError
from numpy.typing import NDArray

from cupaged.jit import njit
from cupaged.kernels import amx
from cupaged.kernels.amx import CONFIG_BYTES, ROW_BYTES, ROWS


@njit
def multiply_bfloat16(config: Any, c: Any, a: Any, b: Any) -> None:
    """Do c += a @ b on tiles 0, 4 and 6; b in pairs."""
    tiles = amx.create_tiles()
    amx.load_config(tiles, config)
    amx.fetch_lines(tiles, b, 1 << 20, 16)
    amx.load_tile(tiles, 0, c, 0, c.size // int(config[48]))
    amx.load_tile(tiles, 4, a, 0, a.size // int(config[52]))
    amx.load_tile(tiles, 6, b, 0, b.size // int(config[54]))
    amx.dot_bfloat16(tiles, 0, 4, 6)
    amx.store_tile(tiles, 0, c, 0, c.size // int(config[48]))
    amx.release_tiles(tiles)


@njit
def multiply_int8(config: Any, c: Any, a: Any, b: Any) -> None:
    """Do c += a @ b on tiles 0, 4 and 6; b in quads."""
    tiles = amx.create_tiles()
    amx.load_config(tiles, config)
    amx.load_tile(tiles, 0, c, 0, c.size // int(config[48]))
    amx.load_tile(tiles, 4, a, 0, a.size // int(config[52]))
    amx.load_tile(tiles, 6, b, 0, b.size // int(config[54]))
    amx.dot_int8(tiles, 0, 4, 6)
    amx.store_tile(tiles, 0, c, 0, c.size // int(config[48]))
    amx.release_tiles(tiles)


def paths(function: Any) -> list[Any]:
    """Return the function as it stands and, where there is AMX, compiled."""
    return [getattr(function, "py_func", function), *([function] if amx.HAS_AMX else [])]


def config_of(rows: int, columns: int, quads: int) -> NDArray[np.uint8]:
    """Return the configuration for C = tile 0 [rows, columns], A = 4 and B = 6."""
    config = np.zeros(CONFIG_BYTES, np.uint8)
    config[0] = 1
    for tile, shape in {0: (rows, 4 * columns), 4: (rows, 4 * quads), 6: (quads, 4 * columns)}.items():
        config[48 + tile], config[16 + 2 * tile] = shape
    return config


def configured(rows: int = 2, columns: int = 2, quads: int = 2) -> Any:
    tiles = amx.create_tiles()
    amx.load_config(tiles, config_of(rows, columns, quads))
    return tiles


def in_groups(weight: NDArray[Any], group: int) -> NDArray[Any]:
    """Return [inputs, columns] as [inputs / group, columns, group], flat."""
    return np.ascontiguousarray(weight.reshape(-1, group, weight.shape[1]).transpose(0, 2, 1)).reshape(-1)


def dot_bits(multiply: Any, c: Any, x: Any, weight: Any) -> NDArray[np.float32]:
    """Return c + x @ weight, of float32 that bfloat16 holds."""
    total = np.array(c, np.float32)
    halves = [np.array(part, np.float32).astype(ml_dtypes.bfloat16).view(np.uint16) for part in (x, weight)]
    rows, columns = total.shape
    config = config_of(rows, columns, halves[0].shape[1] // 2)
    multiply(config, total.reshape(-1), halves[0].reshape(-1), in_groups(halves[1], 2))
    return total


@pytest.mark.parametrize("shape", [(16, 16, 16), (1, 16, 16), (16, 1, 16), (5, 3, 7), (1, 1, 1)])
@pytest.mark.parametrize("multiply", paths(multiply_bfloat16))
def test_bfloat16_product_equals_float64(multiply: Any, shape: tuple[int, int, int]) -> None:
    rows, columns, pairs = shape
    rng = np.random.default_rng(rows)
    x, weight = (
        rng.standard_normal(size).astype(ml_dtypes.bfloat16).astype(np.float32)
        for size in ((rows, 2 * pairs), (2 * pairs, columns))
    )
    c = rng.standard_normal((rows, columns)).astype(np.float32)

    out = dot_bits(multiply, c, x, weight)

    error = np.abs(out - (c + x.astype(np.float64) @ weight.astype(np.float64)))
    assert error.max() < 4e-6, f"max error {error.max():.2e}, mean {error.mean():.2e}"


@pytest.mark.parametrize("multiply", paths(multiply_bfloat16))
def test_bfloat16_sums_first_and_second_numbers_apart_ascending_and_adds_them_to_c(multiply: Any) -> None:
    big, ones = 2.0**25, [[1.0]] * 4  # to which 1 adds nothing

    assert dot_bits(multiply, [[0.0]], [[big, 1, -big, 1]], ones) == 2  # in order: 1
    assert dot_bits(multiply, [[0.0]], [[big, -big, 1, 1]], ones) == 0  # in order: 2
    assert dot_bits(multiply, [[0.0]], [[1, 0, big, 0, -big, 0]], [[1.0]] * 6) == 0  # descending: 1
    assert dot_bits(multiply, [[big]], [[2, 0, 0, 2]], ones) == big + 4  # in order: big


@pytest.mark.parametrize("multiply", paths(multiply_bfloat16))
def test_bfloat16_rounds_to_even_and_takes_denormals_for_zero(multiply: Any) -> None:
    ulp, tiny, denormal = 2.0**-23, 2.0**-126, 2.0**-130

    assert dot_bits(multiply, [[1.0]], [[ulp / 2, 0]], [[1.0]] * 2) == 1
    assert dot_bits(multiply, [[1 + ulp]], [[ulp / 2, 0]], [[1.0]] * 2) == 1 + 2 * ulp
    assert dot_bits(multiply, [[0.0]], [[denormal, 0]], [[2.0**100]] * 2) == 0
    assert dot_bits(multiply, [[denormal]], [[tiny, 0]], [[1.0]] * 2) == tiny
    assert dot_bits(multiply, [[0.0]], [[1.5 * tiny, -tiny]], [[1.0]] * 2) == 0  # a denormal sum


@pytest.mark.parametrize("shape", [(16, 16, 16), (1, 16, 16), (16, 1, 16), (5, 3, 7)])
@pytest.mark.parametrize("multiply", paths(multiply_int8))
def test_int8_product_is_exact(multiply: Any, shape: tuple[int, int, int]) -> None:
    rows, columns, quads = shape
    rng = np.random.default_rng(rows)
    x, weight = (
        rng.choice(np.array([-128, -1, 3, 127], np.int8), size)
        for size in ((rows, 4 * quads), (4 * quads, columns))
    )
    c = rng.integers(-1000, 1000, (rows, columns), np.int32)
    expected = c + x.astype(np.int32) @ weight.astype(np.int32)

    multiply(config_of(rows, columns, quads), c.reshape(-1), x.reshape(-1), in_groups(weight, 4))

    assert np.array_equal(c, expected)


def test_tile_is_loaded_and_stored_row_by_row() -> None:
    tiles = configured(rows=3, columns=2)
    source, target = np.arange(40, dtype=np.float32), np.zeros(40, np.float32)

    amx.load_tile(tiles, 0, source, 5, 10)
    amx.store_tile(tiles, 0, target, 1, 4)

    assert np.flatnonzero(target).tolist() == [1, 2, 5, 6, 9, 10]
    assert target[target > 0].tolist() == [5, 6, 15, 16, 25, 26]


def test_stride_of_zero_repeats_a_row() -> None:
    tiles = configured(rows=3, columns=2)
    target = np.zeros(6, np.float32)

    amx.load_tile(tiles, 0, np.arange(9, dtype=np.float32), 7, 0)
    amx.store_tile(tiles, 0, target, 0, 2)

    assert target.tolist() == [7, 8] * 3


def test_configuration_zeroes_the_tiles_and_release_forgets_it() -> None:
    tiles = configured()
    amx.load_tile(tiles, 0, np.ones(4, np.float32), 0, 2)

    amx.load_config(tiles, config_of(2, 2, 2))

    assert not tiles.data.any()
    amx.release_tiles(tiles)
    with pytest.raises(AssertionError, match="not configured"):
        amx.load_tile(tiles, 0, np.ones(4, np.float32), 0, 2)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (0, 0, "palette"),
        (2, 1, "reserved"),
        (60, 1, "reserved"),
        (16, ROW_BYTES + 4, "bytes of a row"),
        (48, ROWS + 1, "rows"),
        (48, 0, "without rows"),
        (20, 4, "without rows"),
    ],
)
def test_configuration_that_traps_is_refused(place: int, value: int, message: str) -> None:
    config = config_of(2, 2, 2)
    config[place] = value

    with pytest.raises(AssertionError, match=message):
        amx.load_config(amx.create_tiles(), config)


@pytest.mark.parametrize(("start", "stride"), [(-1, 2), (1, 2), (0, 3), (2, -3)])
def test_row_outside_the_array_is_refused(start: int, stride: int) -> None:
    for move in (amx.load_tile, amx.store_tile):
        with pytest.raises(AssertionError, match=r"(before|past) the array"):
            move(configured(), 0, np.zeros(4, np.float32), start, stride)


@pytest.mark.parametrize(
    ("operands", "sizes", "message"),
    [
        ((0, 4, 4), {}, "not three"),
        ((0, 4, 5), {}, "differ in columns"),
        ((1, 4, 6), {}, "not configured"),
        ((0, 4, 6), {48: 1}, "differ in rows"),
        ((0, 4, 6), {16: 4}, "differ in columns"),
        ((0, 4, 6), {54: 1}, "differ in inputs"),
    ],
)
def test_operands_that_trap_are_refused(
    operands: tuple[int, int, int], sizes: dict[int, int], message: str
) -> None:
    config = config_of(2, 2, 2)
    for place, value in sizes.items():
        config[place] = value
    tiles = amx.create_tiles()
    amx.load_config(tiles, config)

    for dot in (amx.dot_bfloat16, amx.dot_int8):
        with pytest.raises(AssertionError, match=message):
            dot(tiles, *operands)


def test_compiling_for_a_cpu_without_amx_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(amx, "HAS_AMX", False)

    @njit
    def release() -> None:
        amx.release_tiles(amx.create_tiles())

    with pytest.raises(TypingError, match="for CPUs with AMX only"):
        release()


def test_amx_is_asked_for_only_where_the_cpu_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    features = dict.fromkeys(("amx-tile", "amx-bf16", "amx-int8"), True)
    asked: list[list[int]] = []

    class System:
        def __init__(self, _name: None) -> None:
            pass

        def syscall(self, *args: Any) -> int:
            asked.append([arg.value for arg in args])
            return -1 if len(asked) > 1 else 0

    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr("ctypes.CDLL", System)
    monkeypatch.setattr("llvmlite.binding.get_host_cpu_features", lambda: features)

    answers = [amx._has_amx(), amx._has_amx()]
    features["amx-int8"] = False
    answers.append(amx._has_amx())

    assert answers == [True, False, False]
    assert asked == [[158, 0x1023, 18]] * 2
