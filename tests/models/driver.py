"""Run a model on a paged cache with batches made by hand: no scheduler, no worker."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupaged.backend.base import Backend, Communicator, KVCacheView, Limits
from cupaged.backend.comm import SingleRank
from cupaged.backend.cpu import CpuBackend
from cupaged.batch import Batch, Bucket, Count, buffer_size, view
from cupaged.models import load_model_class, load_model_config
from cupaged.worker.kv_cache import pool_shape
from cupaged.worker.weights import Checkpoint

NUM_BLOCKS = 32
Logits = NDArray[np.float32]


class Driver:
    """One model, a few sequences, each by its index in `tokens`."""

    def __init__(
        self,
        directory: Path,
        *,
        max_model_len: int,
        block_size: int = 16,
        communicator: Communicator | None = None,
        dtype: str = "float32",
    ) -> None:
        comm = communicator or SingleRank()
        self.config = config = load_model_config(directory)
        self.backend: Backend = CpuBackend(dtype, num_threads=2)
        family = load_model_class(config.model_type)
        weights = Checkpoint(directory, family.weights(config), rank=comm.rank, size=comm.size)
        self.model = family.Model(config, self.backend, comm, weights, max_model_len=max_model_len)
        self._block_size = block_size
        shard = replace(
            config, num_heads=config.num_heads // comm.size, num_kv_heads=config.num_kv_heads // comm.size
        )
        self._pool = self.backend.create_pool(pool_shape(shard, NUM_BLOCKS, block_size))
        self._pool[:] = np.nan  # what is read before it was written shows
        self._free = np.random.Generator(np.random.PCG64(0)).permutation(NUM_BLOCKS).tolist()
        self._tables: dict[int, list[int]] = {}
        self._lengths: dict[int, int] = {}

    def layer(self, layer: int) -> KVCacheView:
        """Return the cache as `layer` sees it."""
        return KVCacheView(self._pool, layer)

    def step(self, new_tokens: dict[int, Sequence[int]]) -> dict[int, Logits]:
        """Append each sequence's new tokens; return the logits after each, [new tokens, vocab_size]."""
        order = sorted(new_tokens, key=lambda seq: len(new_tokens[seq]) > 1)  # decodes first
        batch = self._batch(order, new_tokens)
        backend = self.backend
        logits: list[Logits] = []

        def run() -> None:
            backend.begin_forward()
            hidden = self.model.forward(batch, self)
            backend.begin_layer()
            rows = backend.gather_rows(hidden, batch.logit_index)
            logits[:] = [backend.fetch(self.model.logits(rows))()]

        limits = Limits(batch.num_tokens, len(order), max(self._lengths.values()), self._block_size, 0)
        backend.allocate(limits, backend.measure(limits, run))
        run()
        ends = np.cumsum([len(new_tokens[seq]) for seq in order])
        return dict(zip(order, np.split(logits[0], ends[:-1]), strict=True))

    def prefill(self, seq: int, tokens: Sequence[int], chunk: int) -> Logits:
        """Append the tokens in chunks; return the logits after each of them."""
        chunks = [tokens[i : i + chunk] for i in range(0, len(tokens), chunk)]
        return np.concatenate([self.step({seq: part})[seq] for part in chunks])

    def _batch(self, order: Sequence[int], new_tokens: dict[int, Sequence[int]]) -> Batch:
        num_tokens = sum(len(new_tokens[seq]) for seq in order)
        bucket = Bucket(num_tokens, len(order), NUM_BLOCKS)
        buffer = np.zeros(buffer_size(bucket, 0), np.int32)
        arrays: Any = view(buffer, bucket)
        arrays.block_tables[:] = -1
        at, width = 0, 0
        for i, seq in enumerate(order):
            tokens = new_tokens[seq]
            begin = self._lengths.get(seq, 0)
            end = self._lengths[seq] = begin + len(tokens)
            table = self._tables.setdefault(seq, [])
            while len(table) * self._block_size < end:
                table.append(self._free.pop())
            positions = np.arange(begin, end)
            blocks = np.array(table)[positions // self._block_size]
            step = slice(at, at + len(tokens))
            arrays.input_ids[step], arrays.positions[step] = tokens, positions
            arrays.slot_mapping[step] = blocks * self._block_size + positions % self._block_size
            arrays.logit_seq[step], arrays.rows[i], arrays.seq_lens[i] = i, i, end
            arrays.block_tables[i, : len(table)] = table
            at, width = at + len(tokens), max(width, len(table))
            arrays.query_start[i + 1] = at
        arrays.logit_index[:] = np.arange(num_tokens)
        counts = arrays.counts
        counts[[Count.NUM_TOKENS, Count.NUM_SEQS, Count.TABLE_WIDTH]] = num_tokens, len(order), width
        counts[Count.NUM_LOGITS] = num_tokens
        counts[Count.NUM_DECODES] = sum(len(new_tokens[seq]) == 1 for seq in order)
        return Batch(buffer, bucket, np.zeros(len(order), np.int64))
