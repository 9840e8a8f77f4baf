"""CudaMemory: what was measured is what is taken, and what goes to the device and back arrives."""

from typing import Any

import numpy as np
import pytest

from cupaged.backend.base import MemoryUse
from cupaged.backend.cuda_memory import CudaMemory
from cupaged.batch import Batch
from tests.backend.cuda_steps import LIMITS, copy_batch, create_batch, random
from tests.cuda_on_cpu.gpu import EmulatedGpu

STEP = create_batch([33, 1, 40], [1, 1, 40])


def keep_parts(memory: CudaMemory) -> Any:
    """Return float16[5, 3] of two parts, with something in front of it."""
    memory.keep([random(7)], (7,), np.dtype(np.float16))
    return memory.keep([random(2, 3), -random(3, 3)], (5, 3), np.dtype(np.float16))


def run_step(memory: CudaMemory, batch: Batch = STEP) -> tuple[Batch, list[Any]]:
    """Return the batch on the device and what fetches two of its arrays, one by way of a result."""
    memory.begin_step()
    uploaded = memory.upload(batch)
    memory.arena.take((50,), np.float32)
    return uploaded, [memory.fetch(uploaded.input_ids), memory.fetch(uploaded.temperature)]


def load(gpu: EmulatedGpu) -> tuple[CudaMemory, MemoryUse]:
    """Return memory that is ready for run_step, and its plan."""
    memory = CudaMemory(gpu, max_in_flight=2)

    def rehearse() -> None:
        keep_parts(memory)
        run_step(memory)

    use = memory.measure(LIMITS, rehearse)
    memory.allocate(LIMITS, use)
    return memory, use


def test_plan_and_allocations_agree_to_the_byte() -> None:
    gpu = EmulatedGpu()
    memory, use = load(gpu)

    keep_parts(memory)
    memory.create_pool((2, 3), np.dtype(np.float32))
    memory.finish_weights()

    assert gpu.allocations == memory.allocations == [*use[:3], 24]
    assert (use.weights, use.activations) == (2 * 256, 256)


def test_step_takes_nothing_new() -> None:
    gpu = EmulatedGpu()
    memory, _ = load(gpu)
    gpu.freeze()

    for _ in range(5):
        run_step(memory)


def test_parts_lie_one_behind_the_other() -> None:
    gpu = EmulatedGpu()
    memory, _ = load(gpu)

    kept = keep_parts(memory)
    memory.finish_weights()

    assert np.array_equal(gpu.read(kept), np.concatenate([random(2, 3), -random(3, 3)]))


def test_weights_that_were_not_rehearsed_are_noticed() -> None:
    memory, _ = load(EmulatedGpu())

    keep_parts(memory)
    with pytest.raises(AssertionError, match="ends at byte 768"):
        keep_parts(memory)


def test_weights_that_are_missing_are_noticed() -> None:
    memory, _ = load(EmulatedGpu())

    memory.keep([random(7)], (7,), np.dtype(np.float16))
    with pytest.raises(AssertionError, match="weights take 256 bytes, planned were 512"):
        memory.finish_weights()


def test_uploaded_batch_has_the_hosts_values_with_padding_behind() -> None:
    gpu = EmulatedGpu()
    memory, _ = load(gpu)

    uploaded, _ = run_step(memory)

    for name, host in STEP.arrays._asdict().items():
        assert np.array_equal(gpu.read(getattr(uploaded.arrays, name))[: len(host)], host), name
    assert (uploaded.num_tokens, uploaded.num_logits, uploaded.num_seqs) == (48, 4, 3)
    assert np.array_equal(gpu.read(uploaded.slot_mapping)[STEP.num_tokens :], [-1] * 6)


def test_hosts_batch_may_change_once_it_is_uploaded() -> None:
    gpu = EmulatedGpu()
    memory, _ = load(gpu)
    batch = copy_batch(STEP)

    uploaded, fetches = run_step(memory, batch)
    batch.buffer[:] = 0

    assert np.array_equal(fetches[0]()[: STEP.num_tokens], STEP.input_ids)
    assert np.array_equal(gpu.read(uploaded.seq_lens), STEP.seq_lens)


def test_fetches_of_steps_in_flight_are_kept_apart() -> None:
    memory, _ = load(EmulatedGpu())
    fetches = []

    for n in range(3):
        batch = copy_batch(STEP)
        batch.input_ids[:] = n
        fetches.append(run_step(memory, batch)[1][0])

    assert [fetch()[0] for fetch in fetches] == [0, 1, 2]


def test_step_that_fetches_more_than_rehearsed_is_noticed() -> None:
    memory, _ = load(EmulatedGpu())
    uploaded, _ = run_step(memory)

    with pytest.raises(AssertionError, match="planned were"):
        memory.fetch(uploaded.input_ids)


def test_memory_that_is_not_there_is_refused_with_a_remedy() -> None:
    with pytest.raises(ValueError, match="lower"):
        load(EmulatedGpu(memory=1 << 20))


def test_drivers_memory_is_what_is_not_ours() -> None:
    gpu = EmulatedGpu(driver_bytes=1 << 20)
    memory, _ = load(gpu)
    assert memory.driver_bytes() == 0

    gpu.kernel("rows", "gather_rows", THREADS=256)

    assert memory.driver_bytes() == 1 << 20
