"""Rotation by position, per-head norms, and where keys and values land in the cache."""

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from cupaged.jit import specialize
from cupaged.kernels.rope_kv_write import GRAIN, SIGNATURE, rope_kv_write_cpu

NONE = np.empty(0, np.float32)
BLOCK_SIZE, NUM_BLOCKS, NUM_LAYERS, LAYER = 16, 5, 2, 1


@dataclass
class Step:
    """One step's fused qkv, of which q, k and v are strided views, and an empty cache."""

    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 12
    rotary_dim: int = 12
    num_tokens: int = 6
    kv_dtype: Any = np.float32
    interleaved: bool = False

    def __post_init__(self) -> None:
        rng = np.random.default_rng(0)
        rows = self.num_heads + 2 * self.num_kv_heads
        self.qkv = rng.standard_normal((self.num_tokens, rows, self.head_dim), np.float32)
        self.before = self.qkv.copy()
        self.positions = rng.integers(0, 40, self.num_tokens).astype(np.int32)
        self.slots = rng.permutation(NUM_BLOCKS * BLOCK_SIZE)[: self.num_tokens].astype(np.int32)
        angles = np.outer(np.arange(40), 10.0 ** -np.arange(self.rotary_dim // 2))
        self.cos_sin = np.concatenate([np.cos(angles), np.sin(angles)], 1).astype(np.float32)
        shape = (NUM_BLOCKS, NUM_LAYERS, 2, self.num_kv_heads, BLOCK_SIZE, self.head_dim)
        self.pool = np.full(shape, np.nan, self.kv_dtype)

    def run(
        self,
        q_norm: NDArray[np.float32] = NONE,
        k_norm: NDArray[np.float32] = NONE,
        weight_offset: float = 0.0,
    ) -> None:
        pool = self.pool.view(np.uint16) if self.kv_dtype == ml_dtypes.bfloat16 else self.pool
        specialize(rope_kv_write_cpu, SIGNATURE.format("u2" if pool.dtype == np.uint16 else "f4"))
        q, k, v = np.split(self.qkv, [self.num_heads, self.num_heads + self.num_kv_heads], axis=1)
        place = (pool, LAYER, self.positions, self.slots)
        rope_kv_write_cpu(
            q, k, v, *place, self.cos_sin, q_norm, k_norm, 1e-6, weight_offset, self.interleaved
        )

    def rotated(self, x: NDArray[Any]) -> NDArray[np.float64]:
        """Return the heads x [num_tokens, heads, head_dim] rotated, in float64."""
        out = x.astype(np.float64)
        half = self.rotary_dim // 2
        cos, sin = np.split(self.cos_sin[self.positions, None].astype(np.float64), 2, -1)
        first, second = slice(0, half), slice(half, 2 * half)
        if self.interleaved:
            first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
        a, b = out[..., first].copy(), out[..., second].copy()
        out[..., first], out[..., second] = a * cos - b * sin, b * cos + a * sin
        return out

    def cached(self, token: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return key and value [num_kv_heads, head_dim] in the token's slot."""
        block, offset = divmod(int(self.slots[token]), BLOCK_SIZE)
        keys = self.pool[block, LAYER, 0].reshape(self.num_kv_heads, self.head_dim, BLOCK_SIZE)
        return keys[:, :, offset], self.pool[block, LAYER, 1, :, offset]


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("head_dim", "rotary_dim"), [(12, 12), (12, 8), (12, 2), (64, 64), (64, 40), (80, 80)]
)
def test_q_and_cached_k_are_rotated_by_position(head_dim: int, rotary_dim: int, interleaved: bool) -> None:
    step = Step(head_dim=head_dim, rotary_dim=rotary_dim, interleaved=interleaved)

    step.run()

    assert np.abs(step.qkv[:, :4] - step.rotated(step.before[:, :4])).max() < 1e-6
    keys = np.stack([step.cached(token)[0] for token in range(step.num_tokens)])
    assert np.abs(keys - step.rotated(step.before[:, 4:6])).max() < 1e-6


def test_values_are_written_as_they_are_and_nothing_else_is_touched() -> None:
    step = Step()

    step.run()

    for token in range(step.num_tokens):
        assert np.array_equal(step.cached(token)[1], step.before[token, 6:])
    written = step.num_tokens * 2 * step.num_kv_heads * step.head_dim
    assert np.count_nonzero(~np.isnan(step.pool)) == written


def test_padding_is_not_written() -> None:
    step = Step()
    step.slots[1:] = -1

    step.run()

    assert np.count_nonzero(~np.isnan(step.pool)) == 2 * step.num_kv_heads * step.head_dim


@pytest.mark.parametrize("weight_offset", [0.0, 1.0])
def test_heads_are_normed_before_the_rotation(weight_offset: float) -> None:
    step = Step()
    rng = np.random.default_rng(1)
    q_norm, k_norm = rng.standard_normal((2, 12), np.float32)

    step.run(q_norm, k_norm, weight_offset)

    q_norm, k_norm = q_norm + weight_offset, k_norm + weight_offset
    wide = step.before.astype(np.float64)
    normed = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6)
    assert np.abs(step.qkv[:, :4] - step.rotated(normed[:, :4] * q_norm)).max() < 3e-6
    keys = np.stack([step.cached(token)[0] for token in range(step.num_tokens)])
    assert np.abs(keys - step.rotated(normed[:, 4:6] * k_norm)).max() < 3e-6


def test_bfloat16_cache_holds_the_rounded_float32_result() -> None:
    exact, half = Step(), Step(kv_dtype=ml_dtypes.bfloat16)

    exact.run()
    half.run()

    expected = exact.pool.astype(ml_dtypes.bfloat16).astype(np.float32)
    assert np.array_equal(half.pool.astype(np.float32), expected, equal_nan=True)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_value_that_is_not_finite_makes_its_key_nan(bad: float) -> None:
    step = Step()
    step.qkv[3, -1, 5] = bad

    step.run()

    blocks, offsets = np.divmod(step.slots, BLOCK_SIZE)
    values = step.pool[blocks, LAYER, 1, :, offsets]
    keys = step.pool[:, LAYER, 0].reshape(NUM_BLOCKS, step.num_kv_heads, step.head_dim, BLOCK_SIZE)
    lost = np.isnan(keys[blocks, :, :, offsets])
    assert np.isfinite(values).all()
    assert lost[3, 1].all()
    assert lost.sum() == step.head_dim


def test_single_token_is_accepted_like_many() -> None:
    step = Step(num_tokens=1)

    step.run()

    assert np.abs(step.qkv[:, :4] - step.rotated(step.before[:, :4])).max() < 1e-6


def test_token_has_the_same_bits_alone() -> None:
    num_tokens = BLOCK_SIZE * NUM_BLOCKS
    head_dim = 2 * GRAIN // (4 * num_tokens) // 2 * 2 + 2  # more than one thread's
    together, alone = (
        Step(head_dim=head_dim, rotary_dim=head_dim, num_tokens=num_tokens, kv_dtype=ml_dtypes.bfloat16)
        for _ in range(2)
    )

    together.run()
    qkv, slots, positions = alone.qkv, alone.slots, alone.positions
    for token in range(num_tokens):
        one = slice(token, token + 1)
        alone.qkv, alone.slots, alone.positions = qkv[one], slots[one], positions[one]
        alone.run()

    assert np.array_equal(together.qkv, qkv)
    assert np.array_equal(together.pool, alone.pool, equal_nan=True)
