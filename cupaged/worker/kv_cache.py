"""KVCache: the pool of KV blocks on the device, and what a batch asks to be done with whole blocks."""

from math import prod

from cupaged.backend.base import Array, Backend, KVCacheView
from cupaged.batch import Batch
from cupaged.config import ModelConfig


class KVCache:
    """T[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim] of the backend's kv_dtype."""

    def __init__(self, backend: Backend, config: ModelConfig, num_blocks: int, block_size: int) -> None:
        """Allocate the pool."""
        self._backend = backend
        self.pool: Array = backend.create_pool(pool_shape(config, num_blocks, block_size))

    def layer(self, layer: int) -> KVCacheView:
        """Return the cache as `layer` sees it."""
        return KVCacheView(self.pool, layer)

    def apply(self, batch: Batch) -> None:
        """Copy the blocks that the batch's copy-on-write asks for, before its forward."""
        if len(batch.copy):
            self._backend.copy_blocks(self.pool, self.pool, batch.copy)


def pool_shape(config: ModelConfig, num_blocks: int, block_size: int) -> tuple[int, ...]:
    """Return the shape of a pool: a block's keys and values of all layers lie in one piece."""
    return (num_blocks, config.num_layers, 2, config.num_kv_heads, block_size, config.head_dim)


def block_bytes(config: ModelConfig, block_size: int, itemsize: int) -> int:
    """Return the bytes of one block."""
    return prod(pool_shape(config, 1, block_size)) * itemsize
