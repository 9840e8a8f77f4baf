"""A paged cache as CUDA kernels have it, with known contents, and what a launch of attention is given.

It is a PagedCase, so dense float64 and the CPU twin are there for the same sequences. Blocks that no table
names, what lies around the queries, and outputs are NaN; tables are -1 past the end and before the window.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tests.kernels.elements import BF16, F16, ROUNDING, Array, sparse
from tests.kernels.paging import LAYER, PagedCase

Chunk = tuple[int, int, int]  # sequence, first position, position after the last

DTYPES = [BF16, F16]  # that there are attention kernels for


class Step(NamedTuple):
    """One launch: the twin's arguments as the device has them, and what the host knows of the batch."""

    q: Array  # T[num_tokens, num_heads, head_dim], a view into rows of qkv
    pool: Array  # T[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]
    layer: int
    block_tables: Array  # int32[num_seqs, table_width]
    query_start: Array  # int32[num_seqs + 1]
    seq_lens: Array  # int32[num_seqs]
    scale: float
    sliding_window: int
    softcap: float
    sinks: Array | None  # float32[num_heads]
    out: Array  # T[num_tokens, num_heads * head_dim], NaN
    max_seq_len: int

    @property
    def places(self) -> tuple[Array, Array, int, Array]:
        """The positional arguments of every launch of attention."""
        return self.q, self.pool, self.layer, self.block_tables

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments that every launch of attention takes."""
        names = ("seq_lens", "scale", "sliding_window", "softcap", "sinks", "out")
        return {name: getattr(self, name) for name in names}


@dataclass
class CudaCase(PagedCase):
    """Sequences as PagedCase draws them, rounded to `dtype`, in a pool of it with K not transposed."""

    dtype: Any = BF16

    def place(self, rng: np.random.Generator) -> None:
        """Round, write keys and values to blocks drawn by `rng`, and copy the pool to the CUDA layout."""
        for arrays in (self.q, self.k, self.v):
            arrays[:] = [x.astype(self.dtype).astype(np.float32) for x in arrays]
        super().place(rng)
        self.cuda_pool = self.pool.astype(self.dtype)
        keys = self.pool[:, :, 0].reshape(*self.pool.shape[:2], -1, self.head_dim, self.block_size)
        self.cuda_pool[:, :, 0] = keys.swapaxes(-1, -2)

    def step(self, *chunks: Chunk, padding: int = 0) -> Step:
        """Return the step whose new tokens are `chunks`; behind them some padding sequences of one token."""
        queries = np.concatenate([self.q[seq][start:stop] for seq, start, stop in chunks])
        num_tokens = len(queries) + padding
        qkv = np.full((num_tokens, self.num_heads + 2 * self.num_kv_heads, self.head_dim), np.nan, self.dtype)
        qkv[: len(queries), : self.num_heads] = queries
        tables = self.cut_tables(*chunks)
        ends = np.cumsum([0, *(stop - start for _, start, stop in chunks)], dtype=np.int32)
        lens = np.array([stop for *_, stop in chunks], np.int32)
        return Step(
            q=qkv[:, : self.num_heads],
            pool=self.hide_others(self.cuda_pool, tables),
            layer=LAYER,
            block_tables=np.pad(tables, ((0, padding), (0, 0)), constant_values=-1),
            query_start=np.pad(ends, (0, padding), mode="edge"),
            seq_lens=np.pad(lens, (0, padding)),
            scale=self.scale,
            sliding_window=self.sliding_window,
            softcap=self.softcap,
            sinks=self.sinks if len(self.sinks) else None,
            out=np.full((num_tokens, self.num_heads * self.head_dim), np.nan, self.dtype),
            max_seq_len=int(lens.max()),
        )

    def move_apart(self, folder: Path) -> None:
        """Move the blocks of cuda_pool so far apart that the last one lies beyond 2^31 elements."""
        near = self.cuda_pool
        stride = (2**31 // int(self.tables.max()) // 16 + 1) * 16  # elements from block to block
        memory = sparse(folder, ((len(near) - 1) * stride + near[0].size,), self.dtype)
        strides = (stride * near.itemsize, *near.strides[1:])
        self.cuda_pool = np.lib.stride_tricks.as_strided(memory, near.shape, strides)
        self.cuda_pool[...] = near

    def assert_close(self, out: Array, *chunks: Chunk) -> None:
        """Hold out T[num_tokens, num_heads * head_dim] of a step to dense float64; rows behind must be NaN.

        Kernels round a weight to T before it meets its value, and the sum once more: each of the two is off
        by at most ROUNDING of sum(weight * |value|). To that come 2 ulp of exp2 and the order of float32 sums
        (a quarter of ROUNDING is allowed) and float16's weights under 2^-14, whose rounding is absolute.
        """
        row = 0
        for seq, start, stop in chunks:
            size = stop - start
            expected = self.dense(seq, start)[:size]
            bound = 2.25 * ROUNDING[self.dtype] * self.weigh(np.abs(self.v[seq]), seq, start)[:size]
            if self.dtype == F16:
                bound += 2.0**-25 * np.abs(self.v[seq]).sum(0).repeat(self.num_heads // self.num_kv_heads, 0)
            error = np.abs(out[row : row + size].astype(np.float64).reshape(expected.shape) - expected)
            assert (error <= bound).all(), (
                f"sequence {seq}: max error {np.nanmax(error):.2e}, mean {np.nanmean(error):.2e}, "
                f"{np.isnan(error).sum()} not numbers; allowed {bound.min():.2e} to {bound.max():.2e}"
            )
            row += size
        assert np.isnan(out[row:].astype(np.float32)).all(), "padding rows were written"
