"""CudaBackend's operations on an emulated GPU, each as the CPU has it."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cupaged.backend.base import Array, Backend
from cupaged.backend.cpu import CpuBackend
from cupaged.backend.cuda import CudaBackend
from cupaged.batch import Batch, Flag
from tests.backend.cuda_steps import VOCAB_SIZE, copy_batch, create_batch, random
from tests.backend.loaded import CHUNKS, Attention, Build, Operate, load, matrix
from tests.cuda_on_cpu.gpu import EmulatedGpu

ROUNDING = {"bfloat16": 2**-8, "float16": 2**-11}  # relative

MIXED = create_batch([33, 1, 40, 17, 20], [1, 1, 9, 17, 3])


def compare(
    dtype: str, build: Build, operate: Operate, *, batches: Sequence[Batch] = (MIXED,), roundings: int = 2
) -> None:
    """Assert that both backends give the same but for roundings of the largest number of an array."""
    results = []
    for backend in (CpuBackend(dtype, num_threads=2), CudaBackend(EmulatedGpu(), dtype, enforce_eager=True)):
        copies = [copy_batch(batch) for batch in batches]
        step = load(backend, copies, build, operate).step
        results.append([array for batch in copies for array in step(batch)])

    for theirs, padded in zip(*results, strict=True):
        ours = padded[: len(theirs)].astype(theirs.dtype)
        atol = 0 if theirs.dtype == np.int32 else abs(theirs).max() * ROUNDING[dtype] * roundings
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=atol)


@pytest.mark.parametrize("dtype", ROUNDING)
class TestOperations:
    def test_embedding(self, dtype: str) -> None:
        compare(
            dtype,
            lambda backend: (matrix(backend, VOCAB_SIZE, 64),),
            lambda backend, batch, weight: [backend.embedding(batch.input_ids, weight)],
            roundings=0,
        )

    def test_norm_of_rows_of_a_matrix(self, dtype: str) -> None:
        def operate(backend: Backend, batch: Batch, rows: Any, weight: Array) -> list[Array]:
            x, residual = (backend.embedding(ids, rows) for ids in (batch.input_ids, batch.positions))
            return [
                backend.rms_norm(x, weight, 1e-5),
                backend.rms_norm(x, weight, 1e-5, residual),
                residual,
            ]

        compare(
            dtype,
            lambda backend: (matrix(backend, VOCAB_SIZE, 64), backend.prepare_vector(random(64))),
            operate,
        )

    @pytest.mark.parametrize("bias", [None, [random(64) * 9, random(32)]])
    def test_linear_of_stacked_parts(self, dtype: str, bias: list[NDArray[np.float32]] | None) -> None:
        def build(backend: Backend) -> tuple[Any, ...]:
            parts = [{"weight": random(64, 64)}, {"weight": -random(32, 64)}]
            return matrix(backend, VOCAB_SIZE, 64), backend.prepare_linear(parts, bias)

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
            lambda backend: (matrix(backend, VOCAB_SIZE, 64),),
            lambda backend, batch, tied: [backend.logits(backend.embedding(batch.input_ids, tied), tied)],
            roundings=0,
        )

    def test_silu_mul(self, dtype: str) -> None:
        compare(
            dtype,
            lambda backend: (matrix(backend, VOCAB_SIZE, 160),),
            lambda backend, batch, rows: [backend.silu_mul(backend.embedding(batch.input_ids, rows))],
        )

    def test_last_tokens(self, dtype: str) -> None:
        batch = copy_batch(MIXED)
        batch.flags[[1, 3]] |= Flag.INPUT_FROM_LAST_TOKEN
        batch.flags[2] = 0

        batch.sampled_ids[:] = 80 + np.arange(5)

        def operate(backend: Backend, batch: Batch, last: Array) -> list[Array]:
            backend.load_last_tokens(batch, last)
            backend.store_last_tokens(batch, last)
            return [batch.input_ids, last]

        def build(backend: Backend) -> tuple[Any, ...]:
            return (backend.from_host(70 + np.arange(5, dtype=np.int32)),)

        compare(dtype, build, operate, batches=[batch])

    @pytest.mark.parametrize("banned", [[], [96, 3]])
    def test_sample_and_logprobs(self, dtype: str, banned: list[int]) -> None:
        logits = random(5, VOCAB_SIZE)
        logits[0, [96, 3, 50]] = 10, 9, 8
        batch = create_batch([33, 1, 40, 17, 20], [1, 1, 9, 17, 3], banned=banned)
        batch.temperature[[1, 3]] = 0.8
        batch.flags[[0, 1]] |= Flag.SCALED_LOGPROBS
        batch.top_p[:] = 1.0

        def operate(backend: Backend, batch: Batch, logits: Array) -> list[Array]:
            for first, last in ((0, 3), (3, 5)):
                backend.sample(logits[first:last], batch, first)
            arrays = backend.logprobs(logits, batch, 0, 3)
            return [batch.sampled_ids, *arrays]

        def build(backend: Backend) -> tuple[Any, ...]:
            return (backend.from_host(logits.copy()),)

        compare(dtype, build, operate, batches=[batch], roundings=0)


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize(
    "attention",
    [Attention(), Attention(sliding_window=19), Attention(softcap=2.0, with_sinks=True)],
    ids=["plain", "window", "softcap and sinks"],
)
def test_attention_of_chunks_then_decodes(dtype: str, attention: Attention) -> None:
    compare(dtype, attention.build, attention.operate, batches=CHUNKS, roundings=4)
