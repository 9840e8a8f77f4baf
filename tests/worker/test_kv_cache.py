"""KVCache: the pools' shape, a layer's view, and whole blocks swapped and copied before a forward."""

from collections.abc import Sequence

import numpy as np
import pytest

from cupaged.backend.base import Array, Limits
from cupaged.backend.cpu import CpuBackend
from cupaged.batch import Batch, Bucket, Count, buffer_size, view
from cupaged.worker.kv_cache import KVCache, block_bytes
from tests.worker.test_memory_plan import MODEL

Pairs = Sequence[tuple[int, int]]

LIMITS = Limits(num_tokens=16, num_seqs=8, seq_len=64, block_size=16, num_slots=80, num_host_blocks=3)


@pytest.fixture(params=["float32", "bfloat16"])
def cache(request: pytest.FixtureRequest) -> KVCache:
    """Blocks 0 to 4 hold their number, those of the host 10 to 12."""
    made = KVCache(CpuBackend(request.param, num_threads=1), MODEL, LIMITS, num_blocks=5)
    made.pool[:] = np.arange(5).reshape(-1, 1, 1, 1, 1, 1)
    made.host_pool[:] = np.arange(10, 13).reshape(-1, 1, 1, 1, 1, 1)
    return made


def apply(cache: KVCache, *, out: Pairs = (), back: Pairs = (), copy: Pairs = ()) -> None:
    """Have the cache do what a batch asks that swaps `out`, swaps `back` in, and copies."""
    bucket = Bucket(16, 8, 1)
    buffer = np.zeros(buffer_size(bucket, 2 * len([*out, *back])), np.int32)
    arrays = view(buffer, bucket)
    arrays.tail[:] = np.array([*out, *back], np.int32).reshape(-1)
    arrays.copy[: len(copy)] = np.array(copy, np.int32).reshape(-1, 2)
    counts = {Count.NUM_SWAP_OUT: out, Count.NUM_SWAP_IN: back, Count.NUM_COPY: copy}
    for place, pairs in counts.items():
        arrays.counts[place] = len(pairs)
    batch = Batch(buffer, bucket, np.zeros(0, np.int64))
    cache.apply(batch, batch)


def blocks(pool: Array) -> list[list[float]]:
    """Return the numbers that each block holds."""
    return [np.unique(block.astype(np.float32)).tolist() for block in pool]


def test_pools_are_one_block_after_the_other(cache: KVCache) -> None:
    assert (cache.pool.shape, cache.host_pool.shape) == ((5, 3, 2, 2, 16, 8), (3, 3, 2, 2, 16, 8))
    for pool in (cache.pool, cache.host_pool):
        assert pool[0].nbytes == block_bytes(MODEL, 16, pool.dtype.itemsize)
        assert pool.flags.c_contiguous


def test_layer_names_its_place_in_the_same_pool(cache: KVCache) -> None:
    assert cache.layer(2).layer == 2
    assert cache.layer(2).pool is cache.pool


def test_copy_is_of_whole_blocks(cache: KVCache) -> None:
    apply(cache, copy=[(4, 0), (1, 3)])

    assert blocks(cache.pool) == [[4], [1], [2], [1], [4]]


def test_swap_is_of_whole_blocks_out_and_in(cache: KVCache) -> None:
    apply(cache, out=[(3, 2), (0, 1)])
    assert blocks(cache.host_pool) == [[10], [0], [3]]

    apply(cache, back=[(2, 0), (1, 4)])
    assert blocks(cache.pool) == [[3], [1], [2], [3], [0]]


def test_block_goes_out_before_its_place_is_taken_and_is_copied_once_it_is_back(cache: KVCache) -> None:
    apply(cache, out=[(1, 0)], back=[(2, 1)], copy=[(1, 4)])

    assert blocks(cache.pool) == [[0], [12], [2], [3], [12]]
    assert blocks(cache.host_pool) == [[1], [11], [12]]


def test_apply_without_pairs_changes_nothing(cache: KVCache) -> None:
    apply(cache)

    assert blocks(cache.pool) == [[0], [1], [2], [3], [4]]
    assert blocks(cache.host_pool) == [[10], [11], [12]]


def test_without_swap_space_there_is_no_second_pool() -> None:
    backend = CpuBackend("float32", num_threads=1)

    assert KVCache(backend, MODEL, LIMITS._replace(num_host_blocks=0), num_blocks=5).host_pool is None
