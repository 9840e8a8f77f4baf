"""The packed linear layers: float64's result, and a row's bits whatever else is in the batch."""

import inspect
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from cupaged.jit import specialize
from cupaged.kernels import linear
from cupaged.kernels.intrinsics import HAS_BF16
from cupaged.kernels.linear import (
    DEPTH,
    PACKED_ROWS,
    PackedLinear,
    embedding_cpu,
    linear_cpu,
    multiply_panels,
    pack_linear,
    pack_rows,
    packed_shapes,
)
from cupaged.kernels.linear_tile import NEAR, WIDTH

# (in, out): SmolLM2-135M's five, then odd ones, one deeper than a tile's part in the cache.
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
]


class Path(NamedTuple):
    """One arithmetic of the linear layers: the types of x and of the packed weight."""

    x: Any
    weight: Any

    @property
    def codes(self) -> list[str]:
        """Return the types as signatures spell them."""
        return [{np.uint16: "u2", np.float32: "f4"}[kind] for kind in self]


PATHS = [Path(np.float32, np.float32), Path(np.float32, np.uint16)]
if HAS_BF16:
    PATHS.append(Path(np.uint16, np.uint16))


@pytest.fixture(params=PATHS, ids=lambda path: "*".join(path.codes))
def path(request: pytest.FixtureRequest) -> Path:
    chosen: Path = request.param
    prepare(chosen)
    return chosen


def prepare(path: Path) -> None:
    """Compile what a path needs, wherever else that has been done for other types."""
    specialize(linear_cpu, linear.SIGNATURE.format(*path.codes))
    specialize(embedding_cpu, linear.EMBEDDING_SIGNATURE.format(path.codes[1]))
    for stored in ("f4", "u2"):
        specialize(pack_rows, linear.PACK_SIGNATURE.format(stored, path.codes[1]))


def pack(path: Path, *parts: NDArray[Any], bias: list[NDArray[Any]] | None = None) -> PackedLinear:
    shapes = packed_shapes(sum(map(len, parts)), parts[0].shape[1], path.weight)
    panels, padded = np.full(shapes[0], 99, path.weight), np.full(shapes[1], np.nan, np.float32)
    pack_linear(parts, bias, panels, padded)
    return PackedLinear(panels, padded, sum(map(len, parts)), parts[0].shape[1])


def multiply(path: Path, x: NDArray[Any], packed: PackedLinear) -> NDArray[np.float32]:
    out = np.full((len(x), packed.out_features), np.nan, np.float32)
    x = x.view(np.uint16) if path.x is np.uint16 else x.astype(np.float32)
    linear_cpu(np.ascontiguousarray(x), packed.panels, packed.bias, out)
    return out


def random(seed: int, *shape: int) -> NDArray[Any]:
    """Return bfloat16 numbers, which all paths take without rounding."""
    return np.random.default_rng(seed).standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16)


@pytest.mark.parametrize("shape", SHAPES)
def test_result_equals_float64(path: Path, shape: tuple[int, int]) -> None:
    weight, x, bias = random(0, *shape[::-1]), random(1, 13, shape[0]), random(2, shape[1])

    out = multiply(path, x, pack(path, weight, bias=[bias]))

    error = np.abs(out - (x.astype(np.float64) @ weight.T.astype(np.float64) + bias.astype(np.float64)))
    assert error.max() < 1e-5 * shape[0] ** 0.5, f"max error {error.max():.2e}, mean {error.mean():.2e}"


@pytest.mark.parametrize("shape", [*SHAPES, (576, 49152)])
def test_row_has_the_same_bits_for_every_number_of_rows(path: Path, shape: tuple[int, int]) -> None:
    packed = pack(path, random(0, *shape[::-1]))
    x = random(1, 130, shape[0])
    whole = multiply(path, x, packed)

    for num_rows in range(1, 130) if shape[1] < 4000 else (1, 2, 3, 7, 8, 9, 64):
        assert np.array_equal(multiply(path, x[:num_rows], packed), whole[:num_rows]), num_rows


def test_row_has_the_same_bits_at_every_position_and_among_any_neighbours(path: Path) -> None:
    packed = pack(path, random(0, 960, 577))
    x = random(1, 40, 577)
    alone = multiply(path, x[:1], packed)[0]

    for position in range(40):
        moved = np.full((40, 577), np.nan, ml_dtypes.bfloat16)
        moved[position] = x[0]
        assert np.array_equal(multiply(path, moved, packed)[position], alone), position


def test_bfloat16_weights_lose_nothing_beside_float32_inputs() -> None:
    exact, half = PATHS[:2]
    weight, x = random(0, 100, 333), np.random.default_rng(1).standard_normal((9, 333), np.float32)
    prepare(exact)
    prepare(half)

    assert np.array_equal(
        multiply(exact, x, pack(exact, weight)),
        multiply(half, x, pack(half, weight)),
    )


def test_parts_of_any_type_and_layout_are_stacked(path: Path) -> None:
    first, second, third = random(0, 5, 70), random(1, 40, 70), random(2, 9, 70)
    x, bias = random(3, 4, 70), random(4, 54)
    parts = (first.astype(np.float16), np.asfortranarray(second), third.astype(np.float32)[:, :70])
    stacked = np.concatenate([first.astype(np.float16).astype(ml_dtypes.bfloat16), second, third])

    out = multiply(path, x, pack(path, *parts, bias=[bias[:5], bias[5:].astype(np.float32)]))

    assert np.array_equal(out, multiply(path, x, pack(path, stacked, bias=[bias])))


def test_parts_of_more_rows_than_are_packed_at_a_time_are_stacked(path: Path) -> None:
    parts = random(0, PACKED_ROWS + 1, 5), random(1, 2, 5), random(2, PACKED_ROWS, 5), random(3, 1, 5)
    x = random(4, 3, 5)

    out = multiply(path, x, pack(path, *parts))

    assert np.array_equal(out, np.hstack([multiply(path, x, pack(path, part)) for part in parts]))


def test_weights_are_rounded_to_even() -> None:
    prepare(PATHS[1])
    weight = np.array([[1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8 - 2**-20, 3e38]], np.float32)

    packed = pack(PATHS[1], weight)

    assert packed.panels.view(ml_dtypes.bfloat16)[0, :, 0].reshape(-1).tolist() == (
        weight.astype(ml_dtypes.bfloat16)[0].tolist()
    )


def test_no_rows_give_no_rows(path: Path) -> None:
    assert multiply(path, random(0, 0, 7), pack(path, random(0, 5, 7))).shape == (0, 5)


@pytest.mark.parametrize("vocab_size", [96, 97])
def test_embedding_returns_the_rows_of_the_same_weight(path: Path, vocab_size: int) -> None:
    weight = random(0, vocab_size, 33)
    packed = pack(path, weight)
    ids = np.resize(np.array([0, vocab_size - 1, 31, 32, 31], np.int32), 300)  # in several pieces
    out = np.empty((300, 33), np.float32)

    embedding_cpu(ids, packed.panels, out)

    assert np.array_equal(out, weight[ids].astype(np.float32))


def test_each_panel_fetches_what_its_thread_multiplies_next(monkeypatch: pytest.MonkeyPatch) -> None:
    panels = np.zeros((12, 3 * DEPTH, WIDTH, 1), np.float32)
    panel, part, found = panels[0].size, panels[0].size // 3, []
    monkeypatch.setattr(linear, "num_team_threads", lambda: 3)
    monkeypatch.setattr(linear, "claim_ahead", lambda num_bytes: panels.ctypes.data + 4 * 10**9 + num_bytes)
    monkeypatch.setattr(linear, "multiply_panel", lambda *args: found.append((args[4].weight, args[4].ahead)))

    for rows, first in ((1, 0), (1, 2), (4, 10)):  # two pieces a thread
        x, out = np.zeros((rows, 3 * DEPTH), np.float32), np.zeros((rows, 12 * WIDTH), np.float32)
        inspect.unwrap(multiply_panels)(x, panels, (), out, 6, (first, first + 2))

    assert [weight for weight, _ in found] == [
        p * panel + k * part for p in (0, 1, 2, 3, 10, 11) for k in (0, 1, 2)
    ]
    ahead = [place for _, place in found]
    assert ahead[:11] == [k * part for k in range(1, 12)]
    assert ahead[11] == 10**9 + NEAR // 4  # what follows is another thread's
    assert ahead[17] == 10**9 + part
