"""KVCache: the pool's shape, a layer's view of it, and whole blocks copied before a forward."""

import numpy as np
import pytest

from cupaged.backend.cpu import CpuBackend
from cupaged.batch import Batch, Bucket, Count, buffer_size, view
from cupaged.worker.kv_cache import KVCache, block_bytes
from tests.worker.test_memory_plan import MODEL


@pytest.fixture(params=["float32", "bfloat16"])
def cache(request: pytest.FixtureRequest) -> KVCache:
    made = KVCache(CpuBackend(request.param, num_threads=1), MODEL, num_blocks=5, block_size=16)
    made.pool[:] = np.arange(5).reshape(-1, 1, 1, 1, 1, 1)
    return made


def batch_with_copies(pairs: list[tuple[int, int]]) -> Batch:
    bucket = Bucket(16, 8, 1)
    buffer = np.zeros(buffer_size(bucket, 0), np.int32)
    arrays = view(buffer, bucket)
    arrays.copy[: len(pairs)] = np.array(pairs, np.int32).reshape(-1, 2)
    arrays.counts[Count.NUM_COPY] = len(pairs)
    return Batch(buffer, bucket, np.zeros(0, np.int64))


def blocks(cache: KVCache) -> list[list[float]]:
    return [np.unique(block.astype(np.float32)).tolist() for block in cache.pool]


def test_pool_is_one_block_after_the_other(cache: KVCache) -> None:
    assert cache.pool.shape == (5, 3, 2, 2, 16, 8)
    assert cache.pool[0].nbytes == block_bytes(MODEL, 16, cache.pool.dtype.itemsize)
    assert cache.pool.flags.c_contiguous


def test_layer_names_its_place_in_the_same_pool(cache: KVCache) -> None:
    assert cache.layer(2).layer == 2
    assert cache.layer(2).pool is cache.pool


def test_apply_copies_whole_blocks(cache: KVCache) -> None:
    cache.apply(batch_with_copies([(4, 0), (1, 3)]))

    assert blocks(cache) == [[4], [1], [2], [1], [4]]


def test_apply_without_copies_changes_nothing(cache: KVCache) -> None:
    cache.apply(batch_with_copies([]))

    assert blocks(cache) == [[0], [1], [2], [3], [4]]
