"""DecodeLaunches: how the decodes of a step are cut into launches of paged_decode, and the room they need.

An eager launch is as large as the step's lengths, which the host knows. A recorded one must do for all
lengths that its block tables hold.
"""

from collections.abc import Sequence

from cupaged.backend.base import Limits
from cupaged.backend.gemm import bucket
from cupaged.batch import Batch
from cupaged.kernels.paged_decode import (
    Decodes,
    cut_decodes,
    most_splits,
    num_splits,
    paged_decode_workspace,
)


class DecodeLaunches:
    """Knows the lengths of the step's decodes."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._max_seqs = bucket(limits.num_seqs)
        self._max_splits = most_splits(self._max_seqs, limits.seq_len, limits.num_slots)
        self._of_step: dict[int, Sequence[Decodes]] = {}  # by sliding window

    def begin_step(self, host: Batch, num_decodes: int) -> None:
        """Take the lengths of the decodes, padding included."""
        self._seq_lens = host.arrays.seq_lens[:num_decodes]  # int32[num_decodes], 0 = padding
        self._of_step.clear()

    def workspace(self, num_heads: int, head_dim: int) -> int:
        """Return the floats that any launch needs."""
        return paged_decode_workspace(self._max_splits, self._max_seqs, num_heads, head_dim)

    def of_step(self, sliding_window: int) -> Sequence[Decodes]:
        """Return the launches of this step: one, unless sequences share very many blocks."""
        launches = self._of_step.get(sliding_window)
        if launches is None:
            launches = cut_decodes(self._seq_lens, sliding_window, self._max_splits)
            self._of_step[sliding_window] = launches
        return launches

    def of_any(self, batch: Batch, *, longest: bool = False) -> Sequence[Decodes]:
        """Return a launch for whatever lengths the batch's block tables hold, or for the longest of all."""
        limits = self._limits
        seq_len = limits.seq_len if longest else self._table_tokens(batch)
        splits = most_splits(batch.num_decodes, seq_len, limits.num_slots)
        return [Decodes(0, batch.num_decodes, splits, seq_len)] if batch.num_decodes else []

    def fits_any(self, batch: Batch) -> bool:
        """Return whether of_any has room for this step; sequences that share blocks may have more splits."""
        limits = self._limits
        splits = most_splits(batch.num_decodes, self._table_tokens(batch), limits.num_slots)
        return num_splits(self._seq_lens, limits.sliding_window) <= splits

    def _table_tokens(self, batch: Batch) -> int:
        return min(self._limits.seq_len, batch.bucket.table_width * self._limits.block_size)
