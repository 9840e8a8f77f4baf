"""rope_kv_write.cu against float64 in every combination of its options, and against the CPU twin."""

from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupaged.jit import specialize
from cupaged.kernels.rope_kv_write import SIGNATURE, rope_kv_write_cpu, rope_kv_write_cuda
from tests.cuda_on_cpu.device import EmulatedDevice
from tests.kernels.elements import BF16, DTYPES, F16, F32, Array, assert_rounded_once, normal, sparse
from tests.kernels.schedules import identical_under_all_schedules

EPS = 1e-6
NUM_BLOCKS, NUM_LAYERS, LAYER, MAX_POSITIONS = 5, 2, 1, 60


@dataclass
class CudaStep:
    """One step's fused qkv, of which q, k and v are views by token, and a cache of NaN."""

    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    rotary_dim: int = 64
    num_tokens: int = 5
    block_size: int = 16
    dtype: Any = BF16
    interleaved: bool = False
    has_q_norm: bool = False
    has_k_norm: bool = False
    weight_offset: float = 0.0

    def __post_init__(self) -> None:
        rng = np.random.default_rng(0)
        width = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        self.qkv = normal(rng, (self.num_tokens, width), self.dtype)
        self.before = self.qkv.copy()
        self.positions = rng.integers(0, MAX_POSITIONS, self.num_tokens).astype(np.int32)
        slots = rng.permutation(NUM_BLOCKS * self.block_size)[: self.num_tokens]
        self.slots = slots.astype(np.int32)
        frequencies = 10.0 ** -np.linspace(0, 3, self.rotary_dim // 2)
        angles = np.outer(np.arange(MAX_POSITIONS), frequencies)
        self.cos_sin = np.concatenate([np.cos(angles), np.sin(angles)], 1).astype(np.float32)
        self.q_norm = normal(rng, (self.head_dim,), self.dtype) if self.has_q_norm else None
        self.k_norm = normal(rng, (self.head_dim,), self.dtype) if self.has_k_norm else None
        shape = (NUM_BLOCKS, NUM_LAYERS, 2, self.num_kv_heads, self.block_size, self.head_dim)
        self.pool = np.full(shape, np.nan, self.dtype)

    def split(self, qkv: Array) -> tuple[Array, Array, Array]:
        """Return q, k, v [num_tokens, heads, head_dim] of fused qkv [num_tokens, width]."""
        heads = qkv.reshape(len(qkv), -1, self.head_dim)
        q_end, k_end = self.num_heads, self.num_heads + self.num_kv_heads
        return heads[:, :q_end], heads[:, q_end:k_end], heads[:, k_end:]

    def run(self, device: EmulatedDevice) -> None:
        rope_kv_write_cuda(
            device,
            *self.split(self.qkv),
            self.pool,
            LAYER,
            self.positions,
            self.slots,
            self.cos_sin,
            self.q_norm,
            self.k_norm,
            EPS,
            self.weight_offset,
            self.interleaved,
        )

    def normed(self, x: Array, weight: Array | None) -> Array:
        """Return the heads x in float64, normed if there is a weight."""
        wide: Array = x.astype(np.float64)
        if weight is None:
            return wide
        wide /= np.sqrt((wide**2).mean(-1, keepdims=True) + EPS)
        wide *= self.weight_offset + weight.astype(np.float64)
        return wide

    def rotated(self, x: Array) -> tuple[Array, Array]:
        """Return the heads x [num_tokens, heads, head_dim] rotated, and |a cos| + |b sin| of each element."""
        out, magnitude = x.copy(), np.abs(x)
        half = self.rotary_dim // 2
        first, second = slice(0, half), slice(half, 2 * half)
        if self.interleaved:
            first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
        cos, sin = np.split(self.cos_sin[self.positions, None].astype(np.float64), 2, -1)
        a, b = x[..., first], x[..., second]
        out[..., first], out[..., second] = a * cos - b * sin, b * cos + a * sin
        magnitude[..., first] = np.abs(a * cos) + np.abs(b * sin)
        magnitude[..., second] = np.abs(b * cos) + np.abs(a * sin)
        return out, magnitude

    def cached(self, which: int) -> Array:
        """Return the keys (0) or values (1) [num_tokens, num_kv_heads, head_dim] in the step's slots."""
        blocks, offsets = np.divmod(self.slots, self.block_size)
        return self.pool[blocks, LAYER, which, :, offsets]

    def check(self) -> None:
        """Hold q, the written keys and values, and all that must not be written to what is expected."""
        q, k, v = self.split(self.before)
        real = self.slots >= 0
        assert_rounded_once(self.split(self.qkv)[0], *self.rotated(self.normed(q, self.q_norm)))
        expected, magnitude = self.rotated(self.normed(k, self.k_norm))
        assert_rounded_once(self.cached(0)[real], expected[real], magnitude[real])
        assert np.array_equal(self.cached(1)[real], v[real])
        num_written = np.count_nonzero(real) * 2 * self.num_kv_heads * self.head_dim
        assert np.count_nonzero(~np.isnan(self.pool.astype(np.float32))) == num_written


# Whole heads; part of one; and pairs that lie in different lanes, as in 20 of 80 and 24 of 96 dimensions.
DIMS = [
    (64, 64),
    (128, 128),
    (256, 256),
    (80, 80),
    (96, 48),
    (192, 192),
    (128, 32),
    (80, 20),
    (96, 24),
    (16, 2),
]


@pytest.mark.parametrize(("head_dim", "rotary_dim"), DIMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_options_equal_float64(
    device: EmulatedDevice, dtype: Any, head_dim: int, rotary_dim: int
) -> None:
    for interleaved, has_norms, weight_offset in product((False, True), (False, True), (0.0, 1.0)):
        step = CudaStep(
            head_dim=head_dim,
            rotary_dim=rotary_dim,
            dtype=dtype,
            interleaved=interleaved,
            has_q_norm=has_norms,
            has_k_norm=has_norms,
            weight_offset=weight_offset,
        )

        step.run(device)

        step.check()


@pytest.mark.parametrize(("has_q_norm", "has_k_norm"), [(True, False), (False, True)])
def test_one_norm_leaves_the_other_heads_alone(
    device: EmulatedDevice, has_q_norm: bool, has_k_norm: bool
) -> None:
    step = CudaStep(has_q_norm=has_q_norm, has_k_norm=has_k_norm)

    step.run(device)

    step.check()


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (9, 3), (16, 1)])
@pytest.mark.parametrize("num_tokens", [1, 17])
def test_any_number_of_heads_and_tokens(
    device: EmulatedDevice, num_tokens: int, num_heads: int, num_kv_heads: int
) -> None:
    step = CudaStep(num_tokens=num_tokens, num_heads=num_heads, num_kv_heads=num_kv_heads, block_size=32)

    step.run(device)

    step.check()


@pytest.mark.parametrize("rotary_dim", [64, 20])
def test_padding_writes_no_cache(device: EmulatedDevice, rotary_dim: int) -> None:
    step = CudaStep(rotary_dim=rotary_dim)
    step.slots[1:] = -1
    step.positions[1:] = 0

    step.run(device)

    step.check()


def test_keys_and_values_are_only_read(device: EmulatedDevice) -> None:
    step = CudaStep(has_k_norm=True)

    step.run(device)

    for now, before in zip(step.split(step.qkv)[1:], step.split(step.before)[1:], strict=True):
        assert np.array_equal(now, before)


def test_nan_stays_in_its_head(device: EmulatedDevice) -> None:
    step = CudaStep(has_q_norm=True, has_k_norm=True)
    step.split(step.qkv)[0][2, 1] = np.nan

    step.run(device)

    assert np.isnan(step.split(step.qkv)[0][2, 1].astype(np.float32)).all()
    step.split(step.qkv)[0][2, 1] = expected = np.zeros(64, BF16)
    step.split(step.before)[0][2, 1] = expected
    step.check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_value_that_is_not_finite_makes_its_key_nan(device: EmulatedDevice, bad: float, dtype: Any) -> None:
    step = CudaStep(num_tokens=66, block_size=32, dtype=dtype)
    for d in range(64):  # wherever it stands
        step.split(step.qkv)[2][d, 1, d] = bad
    step.split(step.qkv)[2][64] = np.finfo(np.float16).max

    step.run(device)

    lost = np.zeros((66, 2), bool)
    lost[:64, 1] = True
    assert np.array_equal(np.isnan(step.cached(0).astype(np.float32)).all(-1), lost)
    assert np.array_equal(np.isnan(step.cached(0).astype(np.float32)).any(-1), lost)
    assert np.isfinite(step.cached(1).astype(np.float32)).all()
    assert np.array_equal(step.cached(1)[~lost], step.split(step.qkv)[2][~lost])


def test_block_beyond_2_to_the_31_elements_is_reached(tmp_path: Path) -> None:
    step = CudaStep(num_tokens=1, num_heads=1, num_kv_heads=1)
    last = 2**31 // step.pool[0].size
    step.slots[:] = last * step.block_size + 5
    step.pool = sparse(tmp_path, (last + 1, *step.pool.shape[1:]), BF16)

    step.run(EmulatedDevice())

    assert np.array_equal(step.cached(1), step.split(step.before)[2])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (80, 20)])
def test_twins_agree(device: EmulatedDevice, head_dim: int, rotary_dim: int, interleaved: bool) -> None:
    step = CudaStep(
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        dtype=F32,
        interleaved=interleaved,
        has_q_norm=True,
        has_k_norm=True,
        weight_offset=1.0,
    )
    twin_q, twin_k, twin_v = step.split(step.qkv.copy())
    pool = np.full_like(step.pool, np.nan)
    specialize(rope_kv_write_cpu, SIGNATURE.format("f4"))
    place = (pool, LAYER, step.positions, step.slots, step.cos_sin)
    rope_kv_write_cpu(twin_q, twin_k, twin_v, *place, step.q_norm, step.k_norm, EPS, 1.0, interleaved)

    step.run(device)

    assert np.abs(step.split(step.qkv)[0] - twin_q).max() < 4e-6
    keys = pool[:, :, 0].reshape(*pool.shape[:2], -1, head_dim, step.block_size).swapaxes(-1, -2)
    assert np.allclose(step.pool[:, :, 0], keys, rtol=0, atol=4e-6, equal_nan=True)
    assert np.array_equal(step.pool[:, :, 1], pool[:, :, 1], equal_nan=True)


@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (80, 20)])
def test_order_of_threads_changes_no_bit(head_dim: int, rotary_dim: int) -> None:
    step = CudaStep(head_dim=head_dim, rotary_dim=rotary_dim, has_q_norm=True, has_k_norm=True)

    def launch(device: EmulatedDevice) -> None:
        step.qkv[:] = step.before
        step.run(device)

    assert identical_under_all_schedules(launch, step.qkv, step.pool)


@pytest.mark.parametrize(("dtype", "head_dim"), [(F16, 72), (BF16, 1024), (F32, 260)])
def test_head_dim_without_a_kernel_is_an_error_that_names_it(dtype: Any, head_dim: int) -> None:
    step = CudaStep(head_dim=head_dim, dtype=dtype)

    with pytest.raises(ValueError, match=f"head_dim is {head_dim}, .* use device='cpu'"):
        step.run(EmulatedDevice())
