"""CudaBackend on an emulated GPU: what loading takes, and steps, eager and by graphs."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cupaged.backend.base import Array, Backend, KVCacheView, Limits
from cupaged.backend.cuda import MODULES_RESERVE, CudaBackend
from cupaged.backend.staging import PIECE
from cupaged.batch import Batch, Count, padding_batch
from cupaged.kernels.paged_decode import blocks_at_once
from cupaged.worker.kv_cache import pool_shape
from tests.backend.cuda_steps import LIMITS, VOCAB_SIZE, copy_batch
from tests.backend.loaded import CHUNKS, CONFIG, NUM_BLOCKS, Attention, Loaded, Step, load, matrix
from tests.cuda_on_cpu.gpu import EmulatedGpu


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

    def test_mixed_steps_run_eagerly(self) -> None:
        gpu = EmulatedGpu()
        step = self.load(gpu)
        gpu.launches.clear()

        step(CHUNKS[1])

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

    def test_all_that_is_left_goes_to_the_kv_cache(self) -> None:
        assert CudaBackend(EmulatedGpu(), "bfloat16").kv_cache_share(12_345) == 12_345

    def test_steps_that_nobody_fetches_from_are_waited_for(self) -> None:
        gpu = EmulatedGpu()
        backend = CudaBackend(gpu, "bfloat16")
        self.load(backend)
        backend.begin_forward()
        backend.upload(CHUNKS[0])
        assert not gpu.is_idle

        backend.synchronize()

        assert gpu.is_idle

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
            pool = backend.create_pool(pool_shape(replace(CONFIG, head_dim=32), NUM_BLOCKS, 16))
            return matrix(backend, VOCAB_SIZE, 64), KVCacheView(pool, 0)

        def operate(backend: Backend, batch: Batch, rows: Any, kv: KVCacheView) -> list[Array]:
            q = backend.embedding(batch.input_ids, rows).reshape(-1, 2, 32)
            return [backend.paged_attention(q, kv, batch, 0.125)]

        with pytest.raises(ValueError, match="head_dim 32 has no attention kernels"):
            load(CudaBackend(gpu, "float16"), CHUNKS, build, operate)
        assert gpu.allocations == gpu.pinned == []
