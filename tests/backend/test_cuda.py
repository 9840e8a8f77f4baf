"""CudaBackend on an emulated GPU: each operation as the CPU has it, memory to the byte, nothing allocated later."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from cupaged.backend.base import Array, Backend, KVCacheView, Limits
from cupaged.backend.cpu import CpuBackend
from cupaged.backend.cuda import DTYPES, CudaBackend, choose_dtype, create_cuda_backend
from cupaged.batch import Batch, Count, Flag, bucket_for, buffer_size, padding_batch, view
from cupaged.config import EngineConfig, ModelConfig
from tests.cuda_on_cpu.gpu import EmulatedGpu, EmulatorError

CONFIG = ModelConfig(
    model_type="test",
    vocab_size=97,
    hidden_size=64,
    intermediate_size=80,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=64,
    max_position_embeddings=64,
)
LIMITS = Limits(num_tokens=80, num_seqs=5, seq_len=64, block_size=16, num_slots=512)
NUM_BLOCKS = 16
STEPS = {"bfloat16": 2**-8, "float16": 2**-11}  # relative, of rounding

Build = Callable[[Backend], tuple[Any, ...]]
Operate = Callable[..., Sequence[Array]]


def random(*shape: int) -> NDArray[np.float32]:
    """Return numbers that every dtype has."""
    numbers = np.random.default_rng(len(shape)).standard_normal(shape, np.float32)
    return (np.round(numbers * 64) / 64).clip(-3.875, 3.875)


def put(backend: Backend, values: NDArray[np.float32]) -> Array:
    """Return activations on the backend."""
    return backend.from_host(values.astype(backend.dtype))


def create_batch(lens: Sequence[int], new: Sequence[int], *, banned: Sequence[int] = ()) -> Batch:
    """Return a step that brings sequence i to lens[i] tokens by new[i]; the first may not sample `banned`.

    All sample, greedily; sequence i has rows and blocks of its own.
    """
    total, num_seqs = sum(new), len(lens)
    bucket = bucket_for(total, num_seqs, 4)
    padded = padding_batch(
        total, num_seqs, num_decodes=list(new).count(1), num_logits=num_seqs, table_width=4
    )
    buffer = np.zeros(buffer_size(bucket, len(banned)), np.int32)
    buffer[: len(padded.buffer)] = padded.buffer
    arrays = view(buffer, bucket)
    arrays.counts[Count.NUM_BANNED] = len(banned)
    arrays.tail[:] = banned
    arrays.banned_start[1:] = len(banned)
    arrays.query_start[1:] = total
    arrays.query_start[1 : num_seqs + 1] = np.cumsum(new)
    arrays.rows[:num_seqs] = np.arange(num_seqs)[::-1]
    arrays.flags[:num_seqs] = Flag.SAMPLES
    arrays.seq_lens[:num_seqs] = lens
    arrays.block_tables[:num_seqs, :3] = np.arange(3 * num_seqs)[::-1].reshape(num_seqs, 3)
    positions = np.concatenate([np.arange(end - n, end) for end, n in zip(lens, new, strict=True)])
    seqs = np.repeat(np.arange(num_seqs), new)
    arrays.positions[:total] = positions
    arrays.input_ids[:total] = (positions * 7 + seqs) % CONFIG.vocab_size
    arrays.slot_mapping[:total] = arrays.block_tables[seqs, positions // 16] * 16 + positions % 16
    arrays.logit_index[:num_seqs] = arrays.query_start[1 : num_seqs + 1] - 1
    arrays.logit_seq[:num_seqs] = np.arange(num_seqs)
    arrays.logit_target[:num_seqs] = -1
    return Batch(buffer, bucket, np.zeros(num_seqs, np.int64), arrays=arrays)


MIXED = create_batch([33, 1, 40, 17, 20], [1, 1, 9, 17, 3])


def prepare(backend: Backend, batches: Sequence[Batch], build: Build, operate: Operate) -> Any:
    """Load `build` and return what starts a step of `operate` on a batch; its result, what fetches the arrays."""

    def step(batch: Batch, built: tuple[Any, ...]) -> list[Callable[[], NDArray[Any]]]:
        backend.begin_forward()
        uploaded = backend.upload(batch)
        arrays = backend.run_forward(uploaded, lambda: operate(backend, uploaded, *built))
        return [backend.fetch(array) for array in arrays]

    def rehearse() -> None:
        built = build(backend)
        for batch in batches:
            step(batch, built)

    backend.allocate(LIMITS, backend.measure(LIMITS, rehearse))
    built = build(backend)
    backend.warm_up(lambda batch: None)
    return lambda batch: step(batch, built)


def run(backend: Backend, batches: Sequence[Batch], build: Build, operate: Operate) -> list[NDArray[Any]]:
    """Return what operate's arrays hold after a step of each batch, rows of padding cut off."""
    copies = [Batch(batch.buffer.copy(), batch.bucket, batch.serials) for batch in batches]
    start = prepare(backend, copies, build, operate)
    found = []
    for batch in copies:
        found += [fetch() for fetch in start(batch)]
    return found


def compare(
    dtype: str, build: Build, operate: Operate, *, batches: Sequence[Batch] = (MIXED,), ulps: int = 2
) -> None:
    """Assert that both backends give the same but for roundings: `ulps` of the result's largest magnitude."""
    expected = run(CpuBackend(dtype, num_threads=2), batches, build, operate)
    found = run(CudaBackend(EmulatedGpu(), dtype), batches, build, operate)

    for theirs, ours in zip(expected, found, strict=True):
        ours = ours[: len(theirs)]
        if theirs.dtype == np.int32:
            assert np.array_equal(ours, theirs)
        else:
            atol = float(abs(theirs).max()) * STEPS[dtype] * ulps
            np.testing.assert_allclose(ours.astype(np.float32), theirs, rtol=0, atol=atol)


@pytest.mark.parametrize("dtype", STEPS)
class TestOperations:
    def test_embedding(self, dtype: str) -> None:
        compare(
            dtype,
            lambda backend: (backend.prepare_linear([{"weight": random(97, 64)}]),),
            lambda backend, batch, weight: [backend.embedding(batch.input_ids, weight)],
            ulps=0,
        )

    def test_rms_norm(self, dtype: str) -> None:
        compare(
            dtype,
            lambda backend: (put(backend, random(5, 64)), backend.prepare_vector(random(64))),
            lambda backend, batch, x, weight: [backend.rms_norm(x, weight, 1e-5)],
        )

    def test_add_and_rms_norm(self, dtype: str) -> None:
        def operate(backend: Backend, batch: Batch, rows: Any, weight: Array) -> list[Array]:
            x, residual = (backend.embedding(ids, rows) for ids in (batch.input_ids, batch.positions))
            return [backend.rms_norm(x, weight, 1e-5, residual), residual]

        def build(backend: Backend) -> tuple[Any, ...]:
            return backend.prepare_linear([{"weight": random(97, 64)}]), backend.prepare_vector(random(64))

        compare(dtype, build, operate)

    @pytest.mark.parametrize("bias", [None, [random(64) * 9, random(32)]])
    def test_linear_of_stacked_parts(self, dtype: str, bias: list[NDArray[np.float32]] | None) -> None:
        def build(backend: Backend) -> tuple[Any, ...]:
            parts = [{"weight": random(64, 64)}, {"weight": -random(32, 64)}]
            return backend.prepare_linear([{"weight": random(97, 64)}]), backend.prepare_linear(parts, bias)

        compare(
            dtype,
            build,
            lambda backend, batch, rows, weight: [
                backend.linear(backend.embedding(batch.input_ids, rows), weight)
            ],
        )

    def test_logits_are_float32(self, dtype: str) -> None:
        compare(
            dtype,
            lambda backend: (backend.prepare_linear([{"weight": random(97, 64)}]),),
            lambda backend, batch, tied: [backend.logits(backend.embedding(batch.input_ids, tied), tied)],
            ulps=0,
        )

    def test_silu_mul(self, dtype: str) -> None:
        compare(
            dtype,
            lambda backend: (put(backend, random(5, 160)),),
            lambda backend, batch, gate_up: [backend.silu_mul(gate_up)],
        )

    def test_last_tokens(self, dtype: str) -> None:
        batch = create_batch([33, 1, 40, 17, 20], [1, 1, 9, 17, 3])
        batch.flags[[1, 3]] |= Flag.INPUT_FROM_LAST_TOKEN
        batch.flags[2] = 0

        def operate(backend: Backend, batch: Batch, last: Array, sampled: Array) -> list[Array]:
            backend.load_last_tokens(batch, last)
            backend.store_last_tokens(batch, sampled, last)
            return [batch.input_ids, last]

        def build(backend: Backend) -> tuple[Any, ...]:
            return tuple(backend.from_host(n + np.arange(5, dtype=np.int32)) for n in (70, 80))

        compare(dtype, build, operate, batches=[batch])

    @pytest.mark.parametrize("banned", [[], [96, 3]])
    def test_sample_and_logprobs(self, dtype: str, banned: list[int]) -> None:
        logits = random(5, 97)
        logits[0, [96, 3, 50]] = 10, 9, 8

        def operate(backend: Backend, batch: Batch, logits: Array, ids: Array) -> list[Array]:
            backend.sample(logits[:3], batch, 0, ids)
            backend.sample(logits[3:], batch, 3, ids)
            arrays = backend.logprobs(logits, batch, 0, ids, 3)
            return [ids, arrays.token_ids, arrays.ranks]

        batch = create_batch([33, 1, 40, 17, 20], [1, 1, 9, 17, 3], banned=banned)
        batch.temperature[[1, 3]] = 0.8
        batch.top_p[:] = 1.0

        def build(backend: Backend) -> tuple[Any, ...]:
            return backend.from_host(logits.copy()), backend.from_host(np.zeros(5, np.int32))

        compare(dtype, build, operate, batches=[batch])


class Attention:
    """Writes keys and values to one layer and attends to it."""

    def __init__(self, sliding_window: int = 0, *, softcap: float = 0.0, with_sinks: bool = False) -> None:
        self._mask = (0.125, sliding_window, softcap)
        self._with_sinks = with_sinks

    def build(self, backend: Backend) -> tuple[Any, ...]:
        table = backend.prepare_linear([{"weight": random(97, 4 * 64)}])
        norms = (backend.prepare_vector(random(64)), backend.prepare_vector(abs(random(64))))
        sinks = backend.from_host(random(2)) if self._with_sinks else None
        pool = backend.create_pool(NUM_BLOCKS, 16, CONFIG)
        return table, backend.from_host(random(64, 64)), norms, sinks, KVCacheView(pool, 1)

    def operate(
        self, backend: Backend, batch: Batch, table: Any, cos_sin: Array, norms: Any, sinks: Any, kv: Any
    ) -> list[Array]:
        backend.begin_layer()
        qkv = backend.embedding(batch.input_ids, table)
        q, k, v = (
            qkv[:, first:last].reshape(-1, (last - first) // 64, 64)
            for first, last in ((0, 128), (128, 192), (192, 256))
        )
        backend.rope_kv_write(q, k, v, kv, batch, cos_sin, *norms, 1e-5)
        out = backend.paged_attention(q, kv, batch, *self._mask, sinks)
        return [backend.gather_rows(out, batch.logit_index)]


CHUNKS = [
    create_batch([4, 10, 8, 9, 2], [4, 10, 8, 9, 2]),
    create_batch([5, 33, 30, 17, 20], [1, 23, 22, 8, 18]),
    create_batch([6, 34, 31, 18, 21], [1] * 5),
]


@pytest.mark.parametrize("dtype", STEPS)
@pytest.mark.parametrize(
    "attention",
    [Attention(), Attention(19), Attention(softcap=2.0, with_sinks=True)],
    ids=["plain", "window", "softcap, sinks"],
)
def test_attention_of_chunks_then_decodes(dtype: str, attention: Attention) -> None:
    compare(dtype, attention.build, attention.operate, batches=CHUNKS, ulps=4)
