"""The packed linear twin: NumPy's result, and a row's bits whatever else is in the batch."""

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from cupaged.kernels.linear import PackedLinear, embedding_cpu, linear_cpu, pack_linear

# (in, out): SmolLM2-135M's five, then odd ones, one deeper than a panel's part in the cache.
SHAPES = [
    (576, 960),
    (576, 576),
    (576, 3072),
    (1536, 576),
    (576, 4100),
    (7, 5),
    (33, 31),
    (64, 97),
    (2500, 40),
]


def pack(weight: NDArray[np.float32], bias: NDArray[np.float32] | None = None) -> PackedLinear:
    return pack_linear(lambda first, last: weight[first:last], bias, len(weight))


def multiply(x: NDArray[np.float32], packed: PackedLinear) -> NDArray[np.float32]:
    out = np.full((len(x), packed.out_features), np.nan, np.float32)
    linear_cpu(np.ascontiguousarray(x), packed.panels, packed.bias, out)
    return out


def random(seed: int, *shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


@pytest.mark.parametrize("shape", SHAPES)
def test_result_equals_float64(shape: tuple[int, int]) -> None:
    weight, x, bias = random(0, *shape[::-1]), random(1, 13, shape[0]), random(2, shape[1])

    out = multiply(x, pack(weight, bias))

    error = np.abs(out - (x.astype(np.float64) @ weight.T.astype(np.float64) + bias))
    assert error.max() < 1e-5 * shape[0] ** 0.5, f"max error {error.max():.2e}, mean {error.mean():.2e}"


@pytest.mark.parametrize("shape", [*SHAPES, (576, 49152)])
def test_row_has_the_same_bits_for_every_number_of_rows(shape: tuple[int, int]) -> None:
    packed = pack(random(0, *shape[::-1]))
    x = random(1, 130, shape[0])
    whole = multiply(x, packed)

    for num_rows in range(1, 130) if shape[1] < 4000 else (1, 2, 3, 7, 8, 9, 64):
        assert np.array_equal(multiply(x[:num_rows], packed), whole[:num_rows]), num_rows


def test_row_has_the_same_bits_at_every_position_and_among_any_neighbours() -> None:
    packed = pack(random(0, 960, 576))
    x = random(1, 40, 576)
    alone = multiply(x[:1], packed)[0]

    for position in range(40):
        moved = np.full((40, 576), np.nan, np.float32)
        moved[position] = x[0]
        assert np.array_equal(multiply(moved, packed)[position], alone), position


def test_no_rows_give_no_rows() -> None:
    assert multiply(np.empty((0, 7), np.float32), pack(random(0, 5, 7))).shape == (0, 5)


@pytest.mark.parametrize("vocab_size", [96, 97])
def test_embedding_returns_the_rows_of_the_same_weight(vocab_size: int) -> None:
    weight = random(0, vocab_size, 33).astype(ml_dtypes.bfloat16).astype(np.float32)
    packed = pack(weight)
    ids = np.array([0, vocab_size - 1, 31, 32, 31], np.int32)
    out = np.empty((5, 33), np.float32)

    embedding_cpu(ids, packed.panels, out)

    assert np.array_equal(out, weight[ids])
