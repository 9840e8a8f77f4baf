"""The int8 linear layers: float64's result of the same integers, and a row's bits whatever else is there."""

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from cupaged.jit import specialize
from cupaged.kernels import linear_int8
from cupaged.kernels.intrinsics import HAS_BF16
from cupaged.kernels.linear import PACKED_ROWS
from cupaged.kernels.linear_int8 import (
    QuantizedLinear,
    embedding_int8_cpu,
    linear_w8a8_cpu,
    linear_w8a16_cpu,
    pack_quantized,
    quantize_outputs,
    quantized_shapes,
)

# (in, out): SmolLM2-135M's five, then odd ones, two deeper than a tile's part in the cache.
SHAPES = [
    (576, 960),
    (576, 576),
    (576, 3072),
    (1536, 576),
    (576, 4100),
    (7, 5),
    (33, 31),
    (64, 97),
    (2501, 40),
    (4099, 21),
]
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


class Path(NamedTuple):
    """One arithmetic: how many inputs' weights lie together, and the type of x."""

    group: int
    x: Any

    @property
    def name(self) -> str:
        return f"w8a{8 if self.group == 4 else 16}-{np.dtype(self.x)}"


PATHS = [Path(2, np.float32), Path(4, np.float32), Path(4, BFLOAT16)]
if HAS_BF16:
    PATHS.append(Path(2, BFLOAT16))


@pytest.fixture(params=PATHS, ids=lambda path: path.name)
def path(request: pytest.FixtureRequest) -> Path:
    chosen: Path = request.param
    prepare(chosen)
    return chosen


def prepare(path: Path) -> None:
    """Compile what a path needs, wherever else that has been done for other types."""
    code = "u2" if path.x == BFLOAT16 else "f4"
    if path.group == 2:
        specialize(linear_w8a16_cpu, linear_int8.SIGNATURE_W8A16.format(code))
    else:
        specialize(linear_w8a8_cpu, linear_int8.SIGNATURE_W8A8.format(code))
    specialize(embedding_int8_cpu, linear_int8.EMBEDDING_SIGNATURE)
    for stored in ("f4", "u2"):
        specialize(quantize_outputs, linear_int8.QUANTIZE_SIGNATURE.format(stored, f"u{path.group}"))


def pack(path: Path, *parts: NDArray[Any], bias: list[NDArray[Any]] | None = None) -> QuantizedLinear:
    out_features, in_features = sum(map(len, parts)), parts[0].shape[1]
    shapes = quantized_shapes(out_features, in_features, path.group)
    panels, scales, padded, begin = (np.full(shape, 99, kind) for shape, kind in shapes)
    packed = QuantizedLinear(panels, scales, padded, begin, out_features, in_features)
    pack_quantized(parts, bias, packed)
    return packed


def weights(packed: QuantizedLinear) -> NDArray[np.float64]:
    """Return the integers, [out_features, in_features]."""
    rows: NDArray[Any] = packed.panels.transpose(0, 2, 1, 3).reshape(len(packed.scales), -1)
    return rows[: packed.out_features, : packed.in_features].astype(np.float64)


class Product(NamedTuple):
    """What a layer returns, and what it took x for."""

    out: NDArray[np.float32]
    x: NDArray[np.float64]


def multiply(path: Path, x: NDArray[Any], packed: QuantizedLinear) -> Product:
    x = np.ascontiguousarray(x.astype(path.x))
    out = np.full((len(x), packed.out_features), np.nan, np.float32)
    given = x.view(np.uint16) if path.x == BFLOAT16 else x
    if path.group == 2:
        linear_w8a16_cpu(given, packed.panels, packed.scales, packed.bias, out)
        return Product(out, x.astype(np.float64))
    room = np.full((len(x), packed.panels.shape[1] * 4), 77, np.uint8)
    scales = np.full(len(x), np.nan, np.float32)
    linear_w8a8_cpu(given, room, scales, packed.panels, packed.scales, packed.begin, packed.bias, out)
    integers = room[:, : packed.in_features].astype(np.float64) - 128
    with np.errstate(invalid="ignore"):
        return Product(out, integers * scales.astype(np.float64)[:, None])


def random(seed: int, *shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


@pytest.mark.parametrize("shape", SHAPES)
def test_result_is_float64s_of_the_same_integers(path: Path, shape: tuple[int, int]) -> None:
    packed = pack(path, random(0, *shape[::-1]), bias=[random(2, shape[1])])

    out, x = multiply(path, random(1, 13, shape[0]), packed)

    scales, bias = packed.scales[: shape[1]].astype(np.float64), packed.bias[: shape[1]]
    error = np.abs(out - (x @ weights(packed).T * scales + bias))
    assert error.max() < 1e-5 * shape[0] ** 0.5, f"max error {error.max():.2e}, mean {error.mean():.2e}"


@pytest.mark.parametrize("shape", SHAPES)
def test_result_is_near_that_of_the_weights_as_they_were(path: Path, shape: tuple[int, int]) -> None:
    weight, x = random(0, *shape[::-1]), random(1, 13, shape[0])

    out = multiply(path, x, pack(path, weight)).out

    exact = x.astype(np.float64) @ weight.T.astype(np.float64)
    assert np.sqrt(np.mean((out - exact) ** 2)) < 0.02 * np.sqrt(np.mean(exact**2))


@pytest.mark.parametrize("shape", [*SHAPES, (576, 49152)])
def test_row_has_the_same_bits_for_every_number_of_rows(path: Path, shape: tuple[int, int]) -> None:
    packed = pack(path, random(0, *shape[::-1]))
    x = random(1, 130, shape[0])
    whole = multiply(path, x, packed).out

    for num_rows in range(1, 130) if shape[1] < 4000 else (1, 2, 3, 7, 8, 9, 64):
        assert np.array_equal(multiply(path, x[:num_rows], packed).out, whole[:num_rows]), num_rows


def test_row_has_the_same_bits_at_every_position_and_among_any_neighbours(path: Path) -> None:
    packed = pack(path, random(0, 960, 577))
    x = random(1, 40, 577)
    alone = multiply(path, x[:1], packed).out[0]

    for position in range(40):
        moved = np.full((40, 577), np.nan, np.float32)
        moved[position] = x[0]
        assert np.array_equal(multiply(path, moved, packed).out[position], alone), position


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_in_a_row_shows_in_all_its_outputs(path: Path, bad: float) -> None:
    x = random(1, 3, 64)
    x[1, 7] = bad

    out = multiply(path, x, pack(path, random(0, 50, 64))).out

    assert np.isfinite(out).all(1).tolist() == [True, False, True]
    assert not np.isfinite(out[1]).any()


def test_parts_of_any_type_and_layout_are_stacked(path: Path) -> None:
    first, second, third = random(0, 5, 70).astype(np.float16), random(1, 40, 70), random(2, 9, 70)
    second = second.astype(ml_dtypes.bfloat16)
    x, bias = random(3, 4, 70), random(4, 54)
    stacked = np.concatenate([part.astype(np.float32) for part in (first, second, third)])

    packed = pack(path, first, np.asfortranarray(second), third, bias=[bias[:5], bias[5:]])

    out = multiply(path, x, packed).out
    assert np.array_equal(out, multiply(path, x, pack(path, stacked, bias=[bias])).out)


def test_parts_of_more_rows_than_are_packed_at_a_time_are_stacked(path: Path) -> None:
    parts, x = (random(0, PACKED_ROWS + 1, 5), random(1, 2, 5)), random(2, 3, 5)

    out = multiply(path, x, pack(path, *parts)).out

    assert np.array_equal(out, np.hstack([multiply(path, x, pack(path, part)).out for part in parts]))


def test_what_no_output_and_no_input_has_is_zero(path: Path) -> None:
    packed = pack(path, random(0, 21, 33))

    rows = packed.panels.transpose(0, 2, 1, 3).reshape(-1, packed.panels.shape[1] * packed.panels.shape[3])
    assert rows[:21, :33].any(axis=1).all()
    assert not rows[21:].any()
    assert not rows[:, 33:].any()
    assert not packed.scales[21:].any()
    assert not packed.begin[21:].any()


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_weights_that_are_not_finite_are_refused(path: Path, bad: float) -> None:
    weight = random(0, 40, 33)
    weight[39, 32] = bad

    with pytest.raises(ValueError, match="inf or NaN"):
        pack(path, weight)


def test_no_rows_give_no_rows(path: Path) -> None:
    assert multiply(path, random(0, 0, 7), pack(path, random(0, 5, 7))).out.shape == (0, 5)


@pytest.mark.parametrize("vocab_size", [96, 97])
def test_embedding_returns_the_rows_of_the_same_weight(path: Path, vocab_size: int) -> None:
    packed = pack(path, random(0, vocab_size, 33))
    ids = np.resize(np.array([0, vocab_size - 1, 31, 32, 31], np.int32), 300)  # in several pieces
    out = np.empty((300, 33), np.float32)

    embedding_int8_cpu(ids, packed.panels, packed.scales, out)

    expected = weights(packed)[ids].astype(np.float32) * packed.scales[ids][:, None]
    assert np.array_equal(out, expected)


def test_largest_integers_of_many_inputs_do_not_overflow() -> None:
    path = next(path for path in PATHS if path.group == 4)
    prepare(path)
    weight = np.ones((16, 1 << 17), np.float32)

    out = multiply(path, np.concatenate([weight[:1], -weight[:1]]), pack(path, weight)).out

    np.testing.assert_allclose(out, np.array([[1.0], [-1.0]]) * np.full((1, 16), 1 << 17), rtol=1e-6)
