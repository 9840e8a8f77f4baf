"""Blocks that go to the host and come back, on the CPU and on an emulated GPU."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cupaged.backend.base import Array, Backend
from cupaged.backend.cpu import CpuBackend
from cupaged.backend.cuda import CudaBackend
from cupaged.worker.kv_cache import pool_shape
from tests.backend.cuda_steps import LIMITS
from tests.backend.loaded import CONFIG
from tests.cuda_on_cpu.gpu import EmulatedGpu, EmulatorError

NUM_BLOCKS, NUM_HOST_BLOCKS = 6, 4
SHAPE = pool_shape(CONFIG, NUM_BLOCKS, 16)
HOST_SHAPE = pool_shape(CONFIG, NUM_HOST_BLOCKS, 16)
BLOCK_BYTES = 2 * 2 * 16 * 64 * 2


def pairs(*each: tuple[int, int]) -> NDArray[np.int32]:
    return np.array(each, np.int32).reshape(-1, 2)


def numbered(num_blocks: int) -> NDArray[Any]:
    """Return the bytes of a pool whose blocks differ, and within a block all pieces of 16 bytes."""
    words: NDArray[np.int32] = np.arange(num_blocks * BLOCK_BYTES // 4, dtype=np.int32)
    return words.view(np.uint8).reshape(num_blocks, BLOCK_BYTES)


FORGET = pairs((1, 3), (1, 4), (1, 5))


class CpuPools:
    """The pools of a CPU, blocks numbered."""

    def __init__(self) -> None:
        self.backend: Backend = CpuBackend("bfloat16", num_threads=1)
        self.pool, self.host_pool = self.backend.create_pool(SHAPE), self.backend.create_host_pool(HOST_SHAPE)
        self.bytes_of(self.pool)[...] = numbered(NUM_BLOCKS)

    def bytes_of(self, pool: Array) -> NDArray[np.uint8]:
        """Return a pool's bytes, by block."""
        found: NDArray[np.uint8] = pool.reshape(len(pool), -1).view(np.uint8)
        return found

    def forget(self) -> None:
        """Overwrite the last three blocks of the device by block 1."""
        self.backend.copy_blocks(self.pool, FORGET)


class CudaPools(CpuPools):
    """The pools of an emulated GPU, in a step whose path makes nothing new."""

    def __init__(self) -> None:
        self.gpu = EmulatedGpu("check")
        self.backend = CudaBackend(self.gpu, "bfloat16")
        use = self.backend.measure(LIMITS, lambda: self.backend.create_pool(SHAPE))
        self.backend.allocate(LIMITS, use)
        self.pool, self.host_pool = self.backend.create_pool(SHAPE), self.backend.create_host_pool(HOST_SHAPE)
        self.words = self.pool.reshape(NUM_BLOCKS, -1).view(np.uint8)
        self.gpu.write(self.words, numbered(NUM_BLOCKS))
        self.forget_pairs = self.gpu.array(FORGET)
        self.gpu.freeze()

    def bytes_of(self, pool: Array) -> NDArray[np.uint8]:
        """Return a pool's bytes, by block, once all is done."""
        self.backend.synchronize()
        return self.gpu.read(self.words) if pool is self.pool else super().bytes_of(pool)

    def forget(self) -> None:
        """Likewise, on the stream."""
        self.backend.copy_blocks(self.pool, self.forget_pairs)


@pytest.fixture(params=[CpuPools, CudaPools], ids=["cpu", "cuda"])
def pools(request: pytest.FixtureRequest) -> CpuPools:
    made: CpuPools = request.param()
    return made


@pytest.fixture
def cuda() -> CudaPools:
    return CudaPools()


def test_blocks_come_back_as_they_went_wherever_they_go(pools: CpuPools) -> None:
    expected = numbered(NUM_BLOCKS).copy()
    expected[[2, 5, 0]] = expected[[5, 3, 4]]

    pools.backend.swap_out(pools.pool, pools.host_pool, pairs((5, 0), (3, 2), (4, 1)))
    pools.forget()
    pools.backend.swap_in(pools.host_pool, pools.pool, pairs((0, 2), (2, 5), (1, 0)))

    found = pools.bytes_of(pools.pool)
    assert np.array_equal(found[[0, 1, 2, 5]], expected[[0, 1, 2, 5]])


def test_host_holds_whole_blocks(pools: CpuPools) -> None:
    pools.backend.swap_out(pools.pool, pools.host_pool, pairs((5, 0), (3, 2)))

    assert np.array_equal(pools.bytes_of(pools.host_pool)[[0, 2]], numbered(NUM_BLOCKS)[[5, 3]])


def test_no_pairs_move_nothing(pools: CpuPools) -> None:
    before = pools.bytes_of(pools.pool).copy()

    pools.backend.swap_out(pools.pool, pools.host_pool, pairs())
    pools.backend.swap_in(pools.host_pool, pools.pool, pairs())

    assert np.array_equal(pools.bytes_of(pools.pool), before)


def test_host_place_may_be_taken_again_by_the_next_step(cuda: CudaPools) -> None:
    backend, pool, host_pool = cuda.backend, cuda.pool, cuda.host_pool

    for first, second in ((0, 1), (2, 3)):  # nobody waits in between
        backend.swap_out(pool, host_pool, pairs((first, 0)))
        backend.swap_in(host_pool, pool, pairs((0, second)))

    found = cuda.bytes_of(pool)
    assert np.array_equal(found[[1, 3]], numbered(NUM_BLOCKS)[[0, 2]])


def test_block_is_one_copy_on_the_stream(cuda: CudaPools) -> None:
    cuda.gpu.num_to_device = cuda.gpu.num_to_host = 0
    cuda.gpu.launches.clear()

    cuda.backend.swap_out(cuda.pool, cuda.host_pool, pairs((5, 0), (4, 1), (3, 2)))
    cuda.backend.swap_in(cuda.host_pool, cuda.pool, pairs((0, 3), (2, 5)))

    assert not cuda.gpu.is_idle
    assert (cuda.gpu.num_to_host, cuda.gpu.num_to_device, cuda.gpu.launches) == (3, 2, [])


def test_host_pool_is_pinned_to_the_byte_and_not_while_sizes_are_counted() -> None:
    gpu = EmulatedGpu()
    backend = CudaBackend(gpu, "bfloat16")
    shapes = []

    use = backend.measure(LIMITS, lambda: shapes.append(backend.create_host_pool(HOST_SHAPE).shape))
    assert (shapes, gpu.pinned, gpu.allocations) == ([HOST_SHAPE], [], [])

    backend.allocate(LIMITS, use)
    pool = backend.create_host_pool(HOST_SHAPE)
    assert gpu.pinned[-1] == NUM_HOST_BLOCKS * BLOCK_BYTES
    assert gpu.allocations == list(use[:3])
    assert (pool.shape, pool.dtype) == (HOST_SHAPE, backend.kv_dtype)


def test_host_pool_that_is_not_pinned_is_found(cuda: CudaPools) -> None:
    host_pool = np.zeros(HOST_SHAPE, cuda.backend.kv_dtype)

    with pytest.raises(EmulatorError, match="is not pinned"):
        cuda.backend.swap_out(cuda.pool, host_pool, pairs((0, 0)))
    with pytest.raises(EmulatorError, match="is not pinned"):
        cuda.backend.swap_in(host_pool, cuda.pool, pairs((0, 0)))


def test_host_pool_that_goes_too_early_is_found(cuda: CudaPools) -> None:
    cuda.backend.swap_out(cuda.pool, cuda.host_pool, pairs((0, 0)))

    del cuda.host_pool

    with pytest.raises(EmulatorError, match=r"to host, .*: the pinned memory was freed too early"):
        cuda.backend.synchronize()


def test_host_that_writes_to_a_block_under_way_is_found(cuda: CudaPools) -> None:
    cuda.backend.swap_out(cuda.pool, cuda.host_pool, pairs((0, 0)))

    cuda.host_pool[0, 1] = 0

    with pytest.raises(EmulatorError, match="the host wrote to the pinned memory before the copy was done"):
        cuda.backend.synchronize()
