"""CudaBackend on an emulated GPU: each operation as the CPU has it, steps, and what loading takes."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from cupaged.backend.base import Array, Backend, KVCacheView, Limits, MemoryUse
from cupaged.backend.cpu import CpuBackend
from cupaged.backend.cuda import MODULES_RESERVE, CudaBackend
from cupaged.backend.staging import PIECE
from cupaged.batch import Batch, Count, Flag, padding_batch
from cupaged.config import ModelConfig
from cupaged.kernels.paged_decode import blocks_at_once
from tests.backend.cuda_steps import LIMITS, VOCAB_SIZE, copy_batch, create_batch, random
from tests.cuda_on_cpu.gpu import EmulatedGpu

CONFIG = ModelConfig(
    model_type="test",
    vocab_size=VOCAB_SIZE,
    hidden_size=64,
    intermediate_size=80,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=64,
    max_position_embeddings=64,
)
NUM_BLOCKS = 16
ROUNDING = {"bfloat16": 2**-8, "float16": 2**-11}  # relative

MIXED = create_batch([33, 1, 40, 17, 20], [1, 1, 9, 17, 3])
CHUNKS = [
    create_batch([4, 10, 8, 9, 2], [4, 10, 8, 9, 2]),
    create_batch([5, 33, 30, 17, 20], [1, 23, 22, 8, 18]),
    create_batch([6, 34, 31, 18, 21], [1] * 5),
]

Build = Callable[[Backend], tuple[Any, ...]]
Operate = Callable[..., Sequence[Array]]
Step = Callable[[Batch], list[NDArray[Any]]]


class Loaded(NamedTuple):
    """A backend that has loaded something, and runs steps with it."""

    use: MemoryUse  # as planned
    step: Step


def load(
    backend: Backend, batches: Sequence[Batch], build: Build, operate: Operate, *, limits: Limits = LIMITS
) -> Loaded:
    """Plan for steps of `batches`, load what `build` does, and return what runs `operate` in a step."""

    def begin(batch: Batch, built: tuple[Any, ...]) -> list[Callable[[], NDArray[Any]]]:
        backend.begin_forward()
        uploaded = backend.upload(batch)
        arrays = backend.run_forward(uploaded, lambda: operate(backend, uploaded, *built))
        return [backend.fetch(array) for array in arrays]

    def rehearse() -> None:
        built = build(backend)
        for batch in batches:
            begin(batch, built)

    use = backend.measure(limits, rehearse)
    backend.allocate(limits, use)
    built = build(backend)

    def step(batch: Batch) -> list[NDArray[Any]]:
        return [fetch() for fetch in begin(batch, built)]

    backend.warm_up(step)
    return Loaded(use, step)


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


def matrix(backend: Backend, *shape: int) -> Any:
    return backend.prepare_linear([{"weight": random(*shape)}])


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

        def operate(backend: Backend, batch: Batch, last: Array, sampled: Array) -> list[Array]:
            backend.load_last_tokens(batch, last)
            backend.store_last_tokens(batch, sampled, last)
            return [batch.input_ids, last]

        def build(backend: Backend) -> tuple[Any, ...]:
            return tuple(backend.from_host(n + np.arange(5, dtype=np.int32)) for n in (70, 80))

        compare(dtype, build, operate, batches=[batch])

    @pytest.mark.parametrize("banned", [[], [96, 3]])
    def test_sample_and_logprobs(self, dtype: str, banned: list[int]) -> None:
        logits = random(5, VOCAB_SIZE)
        logits[0, [96, 3, 50]] = 10, 9, 8
        batch = create_batch([33, 1, 40, 17, 20], [1, 1, 9, 17, 3], banned=banned)
        batch.temperature[[1, 3]] = 0.8
        batch.top_p[:] = 1.0

        def operate(backend: Backend, batch: Batch, logits: Array, ids: Array) -> list[Array]:
            for first, last in ((0, 3), (3, 5)):
                backend.sample(logits[first:last], batch, first, ids)
            arrays = backend.logprobs(logits, batch, 0, ids, 3)
            return [ids, *arrays]

        def build(backend: Backend) -> tuple[Any, ...]:
            return backend.from_host(logits.copy()), backend.from_host(np.zeros(5, np.int32))

        compare(dtype, build, operate, batches=[batch], roundings=0)


class Attention(NamedTuple):
    """Writes keys and values to one layer of a cache and attends to it."""

    sliding_window: int = 0
    softcap: float = 0.0
    with_sinks: bool = False

    def build(self, backend: Backend) -> tuple[Any, ...]:
        rows = matrix(backend, VOCAB_SIZE, 4 * 64)
        norms = (backend.prepare_vector(random(64)), backend.prepare_vector(abs(random(64))))
        sinks = backend.from_host(random(2)) if self.with_sinks else None
        pool = backend.create_pool(NUM_BLOCKS, 16, CONFIG)
        return rows, backend.from_host(random(64, 64)), norms, sinks, KVCacheView(pool, 1)

    def operate(
        self, backend: Backend, batch: Batch, rows: Any, cos_sin: Array, norms: Any, sinks: Any, kv: Any
    ) -> list[Array]:
        if len(batch.copy):
            backend.copy_blocks(kv.pool, kv.pool, batch.copy)
        qkv = backend.embedding(batch.input_ids, rows)
        q, k, v = (
            qkv[:, first:last].reshape(-1, (last - first) // 64, 64)
            for first, last in ((0, 128), (128, 192), (192, 256))
        )
        backend.begin_layer()
        backend.rope_kv_write(q, k, v, kv, batch, cos_sin, norms[0], norms[1], eps=1e-5)
        out = backend.paged_attention(q, kv, batch, 0.125, self.sliding_window, self.softcap, sinks)
        return [backend.gather_rows(out, batch.logit_index)]


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize(
    "attention",
    [Attention(), Attention(sliding_window=19), Attention(softcap=2.0, with_sinks=True)],
    ids=["plain", "window", "softcap and sinks"],
)
def test_attention_of_chunks_then_decodes(dtype: str, attention: Attention) -> None:
    compare(dtype, attention.build, attention.operate, batches=CHUNKS, roundings=4)


class TestSteps:
    """Steps of attention, eager and by graphs."""

    def load(self, gpu: EmulatedGpu, *, enforce_eager: bool = False, limits: Limits = LIMITS) -> Step:
        """Return what runs a step in which nothing new may be made, and returns a row for each sequence."""
        attention = Attention(with_sinks=True)
        backend = CudaBackend(gpu, "bfloat16", enforce_eager=enforce_eager)
        step = load(backend, CHUNKS, attention.build, attention.operate, limits=limits).step
        gpu.freeze()
        return lambda batch: [array[: batch.num_seqs] for array in step(batch)]

    def test_graphs_change_no_bit(self) -> None:
        graphs, eager = self.load(EmulatedGpu()), self.load(EmulatedGpu(), enforce_eager=True)

        for batch in CHUNKS:
            assert np.array_equal(graphs(batch), eager(batch))

    def test_recorded_decodes_have_no_more_blocks_than_the_gpu_holds_at_once(self) -> None:
        class Noting(EmulatedGpu):
            def put_launch(self, kernel: Any, grid: tuple[int, int, int], *args: Any) -> None:
                super().put_launch(kernel, grid, *args)
                if self.is_capturing and self.launches[-1] == "paged_decode":
                    grids.add(grid[0])

        grids: set[int] = set()
        self.load(Noting(num_sms=1))

        assert grids == {1, 2, blocks_at_once(1, 64)}  # of up to 8 splits

    def test_decodes_launch_nothing_where_a_graph_is(self) -> None:
        gpu = EmulatedGpu()
        step = self.load(gpu)
        gpu.launches.clear()

        step(CHUNKS[2])

        assert gpu.launches == []

    def test_rows_to_copy_and_mixed_steps_run_eagerly(self) -> None:
        gpu = EmulatedGpu()
        step = self.load(gpu)
        copied = copy_batch(CHUNKS[2])
        copied.arrays.counts[Count.NUM_ROW_COPY] = 1

        for batch in (CHUNKS[1], copy_batch(copied)):
            gpu.launches.clear()
            step(batch)
            assert "paged_decode" in gpu.launches

    def test_decodes_that_share_too_many_blocks_for_a_graph_run_in_several_launches(self) -> None:
        gpu = EmulatedGpu()
        limits = LIMITS._replace(seq_len=1024)  # two splits each, of 16 for 8 sequences; the cache makes 9
        shared = padding_batch(5, 5, num_decodes=5, num_logits=5, table_width=64)
        shared.seq_lens[:], shared.block_tables[:], shared.logit_index[:] = 1024, 0, range(5)
        step = self.load(gpu, limits=limits)
        gpu.launches.clear()

        step(shared)

        assert gpu.launches.count("paged_decode") == 2

    def test_copied_blocks_hold_what_the_first_ones_do(self) -> None:
        one, other = (self.load(EmulatedGpu(), enforce_eager=True) for _ in range(2))
        copied = copy_batch(CHUNKS[2])
        arrays = copied.arrays
        arrays.counts[Count.NUM_COPY] = 2
        arrays.copy[:2] = [[arrays.block_tables[1, 0], 15], [arrays.block_tables[3, 1], 0]]
        arrays.block_tables[1, 0], arrays.block_tables[3, 1] = 15, 0
        arrays.slot_mapping[3] = 0 * 16 + 1  # the new token's, in a block that was copied

        for step in (one, other):
            step(CHUNKS[0])
            step(CHUNKS[1])

        assert np.array_equal(one(CHUNKS[2]), other(copy_batch(copied)))

    def test_step_that_failed_half_way_leaves_nothing_behind(self) -> None:
        def operate(backend: Backend, batch: Batch, *built: Any) -> Sequence[Array]:
            arrays = Attention().operate(backend, batch, *built)
            if fails:
                raise KeyboardInterrupt
            return arrays

        fails = False
        backend = CudaBackend(EmulatedGpu(), "bfloat16", enforce_eager=True)
        step = load(backend, CHUNKS, Attention().build, operate).step
        expected = step(CHUNKS[0])[0][:5]

        fails = True
        for _ in range(5):
            with pytest.raises(KeyboardInterrupt):
                step(CHUNKS[1])
        fails = False
        backend.synchronize()

        assert np.array_equal(step(CHUNKS[0])[0][:5], expected)


class TestLoad:
    def load(self, backend: Backend) -> Loaded:
        attention = Attention()
        return load(backend, CHUNKS, attention.build, attention.operate)

    def test_allocations_are_the_plans_to_the_byte(self) -> None:
        gpu = EmulatedGpu()
        backend = CudaBackend(gpu, "bfloat16")
        free = backend.available_memory()

        loaded = self.load(backend)

        pool = NUM_BLOCKS * CONFIG.num_layers * 2 * 16 * 64 * 2
        assert gpu.allocations == [*loaded.use[:3], pool] == backend.allocations
        assert free - backend.available_memory() == sum(gpu.allocations)
        assert backend.driver_bytes() == 0

    def test_prefill_has_run_before_the_first_request(self) -> None:
        gpu = EmulatedGpu()
        self.load(CudaBackend(gpu, "bfloat16", enforce_eager=True))

        assert "paged_prefill" in gpu.launches

    def test_pinned_memory_that_weights_came_through_goes_back(self) -> None:
        gpu = EmulatedGpu()
        backend = CudaBackend(gpu, "bfloat16")
        self.load(backend)

        assert gpu.pinned.count(PIECE) == 2
        assert gpu.pinned_bytes == sum(gpu.pinned) - 2 * PIECE

    def test_memory_goes_back(self) -> None:
        gpu = EmulatedGpu()
        backend = CudaBackend(gpu, "bfloat16")
        self.load(backend)
        backend.synchronize()

        del backend

        assert gpu.memory_info() == (1 << 30, 1 << 30)

    def test_driver_that_takes_more_than_its_reserve_is_told_of(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.WARNING)
        modest, greedy = (CudaBackend(EmulatedGpu(driver_bytes=n << 20), "bfloat16") for n in (1, 64))

        for backend in (modest, greedy):
            assert caplog.messages == []
            loaded = self.load(backend)

        assert 1 << 20 < modest.driver_bytes() < modest.reserve
        assert greedy.driver_bytes() > greedy.reserve == loaded.use.reserve > MODULES_RESERVE
        assert f"but {greedy.reserve} were planned" in caplog.text

    def test_shapes_without_kernels_are_refused_before_anything_is_allocated(self) -> None:
        gpu = EmulatedGpu()

        def build(backend: Backend) -> tuple[Any, ...]:
            pool = backend.create_pool(NUM_BLOCKS, 16, replace(CONFIG, head_dim=32))
            return matrix(backend, VOCAB_SIZE, 64), KVCacheView(pool, 0)

        def operate(backend: Backend, batch: Batch, rows: Any, kv: KVCacheView) -> list[Array]:
            q = backend.embedding(batch.input_ids, rows).reshape(-1, 2, 32)
            return [backend.paged_attention(q, kv, batch, 0.125)]

        with pytest.raises(ValueError, match="head_dim 32 has no attention kernels"):
            load(CudaBackend(gpu, "float16"), CHUNKS, build, operate)
        assert gpu.allocations == gpu.pinned == []

    def test_quantised_weights_are_refused(self) -> None:
        with pytest.raises(ValueError, match="scheme 'gptq' is not supported"):
            CudaBackend(EmulatedGpu(), "float16").prepare_linear([{"weight": random(8, 8)}], scheme="gptq")
