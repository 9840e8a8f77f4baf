"""KVCache: the pools of KV blocks, on the device and the host, and what a batch does with whole blocks."""

from math import prod

from cupaged.backend.base import Array, Backend, KVCacheView, Limits
from cupaged.batch import Batch
from cupaged.config import ModelConfig


class KVCache:
    """T[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim] of the backend's kv_dtype, twice."""

    def __init__(self, backend: Backend, config: ModelConfig, limits: Limits, num_blocks: int) -> None:
        """Allocate the pools; the host's, of blocks that are swapped out, only if it has any."""
        self._backend = backend
        self.pool: Array = backend.create_pool(pool_shape(config, num_blocks, limits.block_size))
        self.host_pool: Array = None
        if limits.num_host_blocks:
            shape = pool_shape(config, limits.num_host_blocks, limits.block_size)
            self.host_pool = backend.create_host_pool(shape)

    def layer(self, layer: int) -> KVCacheView:
        """Return the cache as `layer` sees it."""
        return KVCacheView(self.pool, layer)

    def apply(self, batch: Batch, host: Batch) -> None:
        """Do what the batch asks of whole blocks, before its forward; `host` is `batch` on the host.

        In this order: blocks that go make room for those that come back, and either may be copied on write.
        """
        backend = self._backend
        if len(host.swap_out):
            backend.swap_out(self.pool, self.host_pool, host.swap_out)
        if len(host.swap_in):
            backend.swap_in(self.host_pool, self.pool, host.swap_in)
        if len(host.copy):
            backend.copy_blocks(self.pool, batch.copy)


def pool_shape(config: ModelConfig, num_blocks: int, block_size: int) -> tuple[int, ...]:
    """Return the shape of a pool: a block's keys and values of all layers lie in one piece."""
    return (num_blocks, config.num_layers, 2, config.num_kv_heads, block_size, config.head_dim)


def block_bytes(config: ModelConfig, block_size: int, itemsize: int) -> int:
    """Return the bytes of one block."""
    return prod(pool_shape(config, 1, block_size)) * itemsize
