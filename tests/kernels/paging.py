"""A paged cache with known contents, and dense float64 attention over them.

Tables are -1 past the end and before the window, and all blocks that a step's tables do not name are NaN, so
that reading what must not be read shows.
"""

from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from cupaged.jit import specialize
from cupaged.kernels.paged_attention import SIGNATURE, paged_attention_cpu
from cupaged.threads import ParallelRunner

LAYER, NUM_LAYERS = 1, 2
Floats = NDArray[np.float32]


class Table(np.ndarray[Any, np.dtype[np.int32]]):
    """Block tables that notice that a -1 is read; in the interpreter alone (test_interpreter.py)."""

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        assert np.ndim(found) > 0 or found >= 0, f"entry {index} of a block table is read: {found}"
        return found


@dataclass
class PagedCase:
    """Sequences of `lens` tokens with random queries, keys and values, in shuffled blocks."""

    lens: tuple[int, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int = 16
    kv_dtype: Any = np.float32
    seed: int = 0
    sliding_window: int = 0
    softcap: float = 0.0
    sinks: Floats = field(default_factory=lambda: np.empty(0, np.float32))

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        shape = (self.num_kv_heads, self.head_dim)
        self.scale = self.head_dim**-0.5
        self.q = [rng.standard_normal((n, self.num_heads, self.head_dim), np.float32) for n in self.lens]
        self.k, self.v = (
            [rng.standard_normal((n, *shape), np.float32).astype(self.kv_dtype) for n in self.lens]
            for _ in "kv"
        )
        self.place(rng)

    def place(self, rng: np.random.Generator) -> None:
        """Write keys and values to blocks drawn by `rng`."""
        num_blocks = [-(-n // self.block_size) for n in self.lens]
        total = sum(num_blocks) + 3
        pool = np.full(
            (total, NUM_LAYERS, 2, self.num_kv_heads, self.block_size, self.head_dim), np.nan, self.kv_dtype
        )
        # Neither the first nor the last, which a -1 would name if it were counted from the end.
        free = iter((1 + rng.permutation(total - 2)).tolist())
        self.tables = np.full((len(self.lens), max(num_blocks) + 2), -1, np.int32)
        for seq, count in enumerate(num_blocks):
            self.tables[seq, :count] = [next(free) for _ in range(count)]
            for token in range(self.lens[seq]):
                block, offset = self.tables[seq, token // self.block_size], token % self.block_size
                keys = pool[block, LAYER, 0].reshape(self.num_kv_heads, self.head_dim, self.block_size)
                keys[:, :, offset] = self.k[seq][token]
                pool[block, LAYER, 1, :, offset] = self.v[seq][token]
        self.pool = pool.view(np.uint16) if self.kv_dtype == ml_dtypes.bfloat16 else pool

    def cut_tables(self, *chunks: tuple[int, int, int]) -> NDArray[np.int32]:
        """Return the tables of chunks (seq, start, stop): -1 past the end and before the first's window."""
        tables = np.full((len(chunks), self.tables.shape[1]), -1, np.int32)
        for i, (seq, start, stop) in enumerate(chunks):
            last = -(-stop // self.block_size)
            window = self.sliding_window or stop
            first = max(0, start + 1 - window) // self.block_size
            tables[i, first:last] = self.tables[seq, first:last]
        return tables

    def hide_others(self, pool: NDArray[Any], tables: NDArray[np.int32]) -> NDArray[Any]:
        """Return the pool with NaN in all blocks that `tables` do not name."""
        hidden = np.setdiff1d(self.tables, tables)
        if len(hidden) == 0:
            return pool
        pool = pool.copy()
        pool[hidden] = np.nan
        return pool

    def attend(
        self, *chunks: tuple[int, int, int], out_dtype: Any = np.float32, num_threads: int = 1
    ) -> list[NDArray[Any]]:
        """Run one step whose chunks (seq, start, stop) are its new tokens; return each one's output."""
        lengths = [stop - start for _, start, stop in chunks]
        tables = self.cut_tables(*chunks)
        queries = np.concatenate([self.q[seq][start:stop] for seq, start, stop in chunks])
        fused = np.full((len(queries), self.num_heads + 2, self.head_dim), np.nan, np.float32)
        fused[:, : self.num_heads] = queries  # the heads of one token lie in a longer row, as in qkv
        out = np.full_like(queries, np.nan, out_dtype)
        words = out.view(np.uint16) if out_dtype == ml_dtypes.bfloat16 else out
        args = (
            fused[:, : self.num_heads],
            self.hide_others(self.pool.view(self.kv_dtype), tables).view(self.pool.dtype),
            LAYER,
            tables.view(Table),
            np.cumsum([0, *lengths], dtype=np.int32),
            np.array([stop for *_, stop in chunks], np.int32),
            self.scale,
            self.sliding_window,
            self.softcap,
            self.sinks,
            words,
        )
        codes = ("u2" if array.dtype == np.uint16 else "f4" for array in (self.pool, words))
        specialize(paged_attention_cpu, SIGNATURE.format(*codes))
        ParallelRunner(num_threads).run([(paged_attention_cpu, args)])
        return np.split(out, np.cumsum(lengths)[:-1])

    def prefill(self, seq: int = 0) -> Floats:
        """Return all positions of a sequence, as one chunk."""
        return self.attend((seq, 0, self.lens[seq]))[0]

    def dense(self, seq: int = 0, start: int = 0) -> NDArray[np.float64]:
        """Return the positions of a sequence from `start` on in float64, by the textbook."""
        return self.weigh(self.v[seq], seq, start)

    def weigh(self, values: Any, seq: int = 0, start: int = 0) -> NDArray[np.float64]:
        """Return the float64 sums of values [num_tokens, num_kv_heads, head_dim] by the softmax's weights."""
        q, k, v = (x.astype(np.float64) for x in (self.q[seq], self.k[seq], values))
        group = self.num_heads // self.num_kv_heads
        scores = np.einsum("qhd,khd->hqk", q[start:], np.repeat(k, group, 1)) * self.scale
        if self.softcap:
            scores = self.softcap * np.tanh(scores / self.softcap)
        distance = np.subtract.outer(np.arange(start, len(q)), np.arange(len(k)))
        seen = (distance >= 0) & (distance < (self.sliding_window or len(k)))
        scores = np.where(seen, scores, -np.inf)
        sinks = self.sinks.astype(np.float64) if len(self.sinks) else np.full(self.num_heads, -np.inf)
        top = np.maximum(scores.max(-1), sinks[:, None])
        weights = np.exp(scores - top[..., None])
        total = weights.sum(-1) + np.exp(sinks[:, None] - top)
        out: NDArray[np.float64] = np.einsum(
            "hqk,khd->qhd", weights / total[..., None], np.repeat(v, group, 1)
        )
        return out
