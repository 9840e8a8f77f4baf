"""A token whose keys and values are in the cache already may be computed once more, with slot -1.

Forks and prompts that are cached whole do. rope_kv_write and attention, one after the other, twins and CUDA
kernels.
"""

from typing import Any, NamedTuple

import numpy as np
import pytest

from cupaged.jit import specialize
from cupaged.kernels import paged_attention, rope_kv_write
from cupaged.kernels.paged_attention import paged_attention_cpu, paged_attention_cuda
from cupaged.kernels.paged_decode import cut_decodes, paged_decode_workspace
from cupaged.kernels.rope_kv_write import rope_kv_write_cpu, rope_kv_write_cuda
from tests.cuda_on_cpu.device import EmulatedDevice
from tests.kernels.elements import BF16, F32, Array

NUM_TOKENS, BLOCK_SIZE, WINDOW = 97, 16, 70
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 64
NUM_BLOCKS = 12
NONE = np.empty(0, np.float32)


class Step(NamedTuple):
    """New tokens of one sequence; q, k and v are views of qkv."""

    qkv: Array  # T[num_tokens, num_heads + 2 * num_kv_heads, head_dim]
    positions: Array  # int32[num_tokens]
    slots: Array  # int32[num_tokens]
    table: Array  # int32[1, table_width]

    @property
    def heads(self) -> list[Array]:
        return np.split(self.qkv, [NUM_HEADS, NUM_HEADS + NUM_KV_HEADS], axis=1)

    @property
    def lens(self) -> tuple[Array, Array]:
        """query_start and seq_lens."""
        ends = np.array([0, len(self.positions)], np.int32)
        return ends, self.positions[-1:] + 1


class Layer:
    """Both kernels, on the CPU or on a device."""

    def __init__(self, device: EmulatedDevice | None) -> None:
        rng = np.random.default_rng(0)
        self._device = device
        self.dtype = F32 if device is None else BF16
        self._cos_sin = rng.standard_normal((NUM_TOKENS, HEAD_DIM), np.float32)
        shape = (NUM_TOKENS, NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM)
        self._qkv = rng.standard_normal(shape, np.float32).astype(self.dtype)
        self.pool = np.full((NUM_BLOCKS, 1, 2, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM), np.nan, self.dtype)
        self._table = rng.permutation(NUM_BLOCKS)[:7].astype(np.int32)

    def step(self, start: int, stop: int, stored: int = 0) -> Step:
        """Return the tokens [start, stop), of which those below `stored` are in the cache already."""
        positions = np.arange(start, stop, dtype=np.int32)
        slots = self._table[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        table = np.where(np.arange(7) < (start + 1 - WINDOW) // BLOCK_SIZE, -1, self._table)
        own_slots = np.where(positions < stored, -1, slots).astype(np.int32)
        return Step(self._qkv[start:stop].copy(), positions, own_slots, table.astype(np.int32)[None])

    def run(self, step: Step) -> Array:
        """Return what attention gives, T[num_tokens, num_heads * head_dim]."""
        q, k, v = step.heads
        out = np.full((len(q), NUM_HEADS * HEAD_DIM), np.nan, self.dtype)
        place = (self.pool, 0, step.positions, step.slots, self._cos_sin)
        query_start, seq_lens = step.lens
        scale = HEAD_DIM**-0.5
        if self._device is None:
            specialize(rope_kv_write_cpu, rope_kv_write.SIGNATURE.format("f4"))
            rope_kv_write_cpu(q, k, v, *place, NONE, NONE, 1e-6, 0.0, False)
            specialize(paged_attention_cpu, paged_attention.SIGNATURE.format("f4", "f4"))
            to = out.reshape(len(q), NUM_HEADS, HEAD_DIM)
            tokens = (step.table, query_start, seq_lens)
            paged_attention_cpu(q, self.pool, 0, *tokens, scale, WINDOW, 0.0, NONE, to)
            return out
        rope_kv_write_cuda(self._device, q, k, v, *place)
        decodes = cut_decodes(seq_lens, WINDOW, 1) if len(q) == 1 else []
        options: dict[str, Any] = {"scale": scale, "sliding_window": WINDOW, "softcap": 0.0, "sinks": None}
        paged_attention_cuda(
            self._device,
            q,
            self.pool,
            0,
            step.table,
            query_start=query_start,
            seq_lens=seq_lens,
            out=out,
            decodes=decodes,
            workspace=np.full(paged_decode_workspace(1, 1, NUM_HEADS, HEAD_DIM), np.nan, np.float32),
            **options,
        )
        return out


@pytest.fixture(params=["cpu", "fast", "check"])
def layer(request: pytest.FixtureRequest) -> Layer:
    return Layer(None if request.param == "cpu" else EmulatedDevice(request.param))


# A decode; a whole chunk; one whose last tokens are new; where a block begins.
STEPS = pytest.mark.parametrize(
    ("start", "stop", "stored"),
    [(96, 97, 97), (0, 1, 1), (80, 97, 97), (70, 97, 90), (0, 97, 96), (64, 65, 65)],
)


@STEPS
def test_stored_token_gets_the_same_bits_again(layer: Layer, start: int, stop: int, stored: int) -> None:
    layer.run(layer.step(0, max(start, 1)))
    expected = layer.run(layer.step(start, stop))

    again = layer.run(layer.step(start, stop, stored))

    assert again.tobytes() == expected.tobytes()
    assert not np.isnan(again.astype(np.float32)).any()


@STEPS
def test_new_tokens_alone_are_written(layer: Layer, start: int, stop: int, stored: int) -> None:
    layer.run(layer.step(0, stored))
    before = layer.pool.copy()
    if stored < stop:
        layer.run(layer.step(stored, stop))
    expected = layer.pool.copy()
    layer.pool[...] = before
    step = layer.step(start, stop, stored)
    step.qkv[: stored - start, NUM_HEADS:] += 1  # other keys and values than are stored

    layer.run(step)

    assert layer.pool.tobytes() == expected.tobytes()
