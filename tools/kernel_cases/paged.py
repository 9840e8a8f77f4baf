"""A paged KV cache and its block tables, for the cases of several families."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cupaged.kernels.launch import Array, ceil_div
from tools.kernel_cases.case import DTYPES, Maker

NUM_SPARE_BLOCKS = 2  # that no table names


class Heads(NamedTuple):
    """The shape of attention."""

    element: str
    num_heads: int
    num_kv_heads: int
    head_dim: int

    def __str__(self) -> str:
        return f"{self.element}-{self.num_heads}_{self.num_kv_heads}x{self.head_dim}"


class Paging(NamedTuple):
    """Where the tokens of some sequences lie: blocks far from each other, the rest of each table -1."""

    seq_lens: tuple[int, ...]
    block_size: int = 16
    window: int = 0  # tokens; what lies before the last token's is not in the tables

    @property
    def num_blocks(self) -> int:
        """Blocks of the cache."""
        return sum(ceil_div(n, self.block_size) for n in self.seq_lens) + NUM_SPARE_BLOCKS

    def tables(self, num_new: tuple[int, ...]) -> NDArray[np.int32]:
        """Return int32[num_seqs, table_width] for a step in which each sequence has so many new tokens."""
        width = max(ceil_div(n, self.block_size) for n in self.seq_lens) + 1
        tables = np.full((len(self.seq_lens), width), -1, np.int32)
        stride = next(n for n in range(self.num_blocks * 3 // 5, 0, -1) if np.gcd(n, self.num_blocks) == 1)
        start = 0
        for table, length, new in zip(tables, self.seq_lens, num_new, strict=True):
            count = ceil_div(length, self.block_size)
            table[:count] = np.arange(start, start + count) * stride % self.num_blocks
            if self.window:
                table[: max(0, length - new + 1 - self.window) // self.block_size] = -1
            start += count
        return tables

    def slots(self, num_new: tuple[int, ...]) -> NDArray[np.int32]:
        """Return the slots of the new tokens, int32[num_tokens]."""
        tables = self.tables(num_new).astype(np.int64)
        found = []
        for table, length, new in zip(tables, self.seq_lens, num_new, strict=True):
            positions = np.arange(length - new, length)
            found.append(table[positions // self.block_size] * self.block_size + positions % self.block_size)
        return np.concatenate(found).astype(np.int32)

    def cache(self, maker: Maker, heads: Heads, num_layers: int, num_new: tuple[int, ...]) -> Array:
        """Return T[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim] with these tokens in it."""
        used = np.zeros((self.num_blocks, self.block_size), np.bool_)
        for table, length in zip(self.tables(num_new), self.seq_lens, strict=True):
            positions = np.arange(length)
            blocks = table[positions // self.block_size]
            used[blocks[blocks >= 0], (positions % self.block_size)[blocks >= 0]] = True
        shape = (self.num_blocks, num_layers, 2, heads.num_kv_heads, self.block_size, heads.head_dim)
        dtype: Any = DTYPES[heads.element]
        return maker.cache(shape, dtype, used)
