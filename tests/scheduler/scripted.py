"""A worker without a model: it keeps the KV cache as a dictionary and refuses every wrong slot.

What a token leaves in the cache names all tokens before it, and the next token is a pure function of
that: so what a sequence must generate is known beforehand, whatever the scheduler does to it on the way,
and KV that was computed after anything else than the sequence's own tokens does not go unnoticed.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cupaged.batch import Batch, Flag, StepOutput
from cupaged.scheduler.scheduler_config import SchedulerConfig

VOCAB_SIZE = 97


class Cell(NamedTuple):
    """What one token leaves in the KV cache."""

    position: int
    token: int
    prefix: int  # stands for all tokens up to this one

    def follow(self, token: int) -> "Cell":
        """Return what `token` leaves behind this one."""
        return Cell(self.position + 1, token, (self.prefix * 1_000_003 + token + 1) % (2**61 - 1))


BEFORE_ALL = Cell(-1, -1, 0)


def cells(tokens: list[int]) -> list[Cell]:
    """Return what `tokens` leave in the cache."""
    made = [BEFORE_ALL]
    for token in tokens:
        made.append(made[-1].follow(token))
    return made[1:]


def next_token(last: Cell, index: int = 0, banned: tuple[int, ...] = ()) -> int:
    """Return what the scripted model says after `last`; a banned token gives way to the next one."""
    token = (last.prefix + 31 * index) % VOCAB_SIZE
    while token in banned:
        token = (token + 1) % VOCAB_SIZE
    return token


class ScriptedWorker:
    """Runs a batch the way a device does: it believes the batch, and nothing else."""

    def __init__(self, config: SchedulerConfig) -> None:
        # With a window of 1 no cell could be told from its predecessor's prefix.
        assert config.sliding_window != 1
        self.config = config
        self.cache: dict[int, Cell] = {}  # by slot
        self.host_cache: dict[int, Cell] = {}
        self.last_token: dict[int, int] = {}  # by row

    def run(self, batch: Batch, lost: set[int] | None = None) -> StepOutput:
        """Move blocks, write the step's tokens to their slots, then sample where the batch says so.

        `lost` are the device blocks whose content nobody may rely on once swap_out has saved what it saves.
        """
        self._move_blocks(batch, lost or set())
        self._check_slots(batch)
        for i in range(batch.num_seqs):
            self._write(batch, i)
        token_ids = np.zeros((batch.num_seqs, 1), np.int32)
        num_tokens = np.zeros(batch.num_seqs, np.int32)
        for i in range(batch.num_seqs):
            last = self.read(batch, i)[-1]
            if batch.flags[i] & Flag.SAMPLES:
                banned = batch.banned[batch.banned_start[i] : batch.banned_start[i + 1]]
                index = int(batch.group_index[i]) if batch.temperature[i] > 0 else 0
                token_ids[i] = next_token(last, index, tuple(banned.tolist()))
                num_tokens[i] = 1
                self.last_token[int(batch.rows[i])] = int(token_ids[i, 0])
        return StepOutput(token_ids, num_tokens)

    def read(self, batch: Batch, i: int) -> list[Cell]:
        """Return what sequence i attends to in this step, all of it through its block table."""
        first_query, window = int(batch.positions[batch.query_start[i]]), self.config.sliding_window
        first = max(0, first_query + 1 - window) if window else 0
        return [self._cell(batch, i, position) for position in range(first, int(batch.seq_lens[i]))]

    def _cell(self, batch: Batch, i: int, position: int) -> Cell:
        """Return the cell of a position of sequence i."""
        block_size = self.config.block_size
        block = int(batch.block_tables[i, position // block_size])
        assert block >= 0, f"sequence {i} has no block at position {position}"
        cell = self.cache.get(block * block_size + position % block_size)
        assert cell is not None, f"sequence {i} finds nothing at position {position}"
        assert cell.position == position, f"position {position} finds what position {cell.position} wrote"
        return cell

    def _check_slots(self, batch: Batch) -> None:
        """Refuse slots outside the sequence's own blocks, and blocks that two sequences touch."""
        block_size = self.config.block_size
        written: dict[int, int] = {}  # block -> sequence
        for i in range(batch.num_seqs):
            for t in range(*batch.query_start[i : i + 2].tolist()):
                slot, position = int(batch.slot_mapping[t]), int(batch.positions[t])
                if slot == -1:
                    continue
                block = int(batch.block_tables[i, position // block_size])
                assert 0 <= block < self.config.num_blocks, f"block {block} of {self.config.num_blocks}"
                assert slot == block * block_size + position % block_size, f"slot {slot} at {position}"
                assert written.setdefault(block, i) == i, f"two sequences write to block {block}"
        for i in range(batch.num_seqs):
            for block in batch.block_tables[i].tolist():
                assert written.get(block, i) == i, f"a sequence writes to block {block}, which {i} holds too"

    def _write(self, batch: Batch, i: int) -> None:
        """Write the new tokens of sequence i; one without a slot must be there already."""
        first, end = batch.query_start[i : i + 2].tolist()
        for t in range(first, end):
            position, slot, token = (
                int(batch.positions[t]),
                int(batch.slot_mapping[t]),
                int(batch.input_ids[t]),
            )
            if t == end - 1 and batch.flags[i] & Flag.INPUT_FROM_LAST_TOKEN:
                token = self.last_token[int(batch.rows[i])]
            before = self._cell(batch, i, position - 1) if position else BEFORE_ALL
            cell = before.follow(token)
            if slot >= 0:
                self.cache[slot] = cell
            else:
                assert self._cell(batch, i, position) == cell, f"slot -1, but {position} is not there"

    def _move_blocks(self, batch: Batch, lost: set[int]) -> None:
        """Swap out, swap in, copy, in this order; each reads all its sources before it writes."""
        num_blocks, num_host_blocks = self.config.num_blocks, self.config.num_host_blocks
        out, back, copy = batch.swap_out, batch.swap_in, batch.copy
        _check_pairs(out, num_blocks, num_host_blocks, "swap_out")
        _check_pairs(back, num_host_blocks, num_blocks, "swap_in")
        _check_pairs(copy, num_blocks, num_blocks, "copy")
        assert len(copy) <= batch.num_seqs, "more copies than sequences"
        assert not set(out[:, 1].tolist()) & set(back[:, 0].tolist()), (
            f"a host block comes and goes at once: {out} {back}"
        )
        targets = set(copy[:, 1].tolist())
        assert not targets & set(copy[:, 0].tolist()), "the target of a copy is the source of another"
        assert not targets & set(back[:, 1].tolist()), "the target of a copy is swapped in"
        self._copy_blocks(out, self.cache, self.host_cache)
        for block in lost:
            self._forget(self.cache, block)
        self._copy_blocks(back, self.host_cache, self.cache)
        for block in back[:, 0].tolist():
            self._forget(self.host_cache, block)
        self._copy_blocks(copy, self.cache, self.cache)

    def _copy_blocks(
        self, pairs: NDArray[np.int32], source: dict[int, Cell], target: dict[int, Cell]
    ) -> None:
        """Give each target block all that its source block holds."""
        moved: dict[int, Cell] = {}
        for from_block, to_block in pairs.tolist():
            for offset in range(self.config.block_size):
                cell = source.get(from_block * self.config.block_size + offset)
                if cell is not None:
                    moved[to_block * self.config.block_size + offset] = cell
        for block in pairs[:, 1].tolist():
            self._forget(target, block)
        target.update(moved)

    def _forget(self, cache: dict[int, Cell], block: int) -> None:
        for offset in range(self.config.block_size):
            cache.pop(block * self.config.block_size + offset, None)


def _check_pairs(pairs: NDArray[np.int32], num_sources: int, num_targets: int, name: str) -> None:
    """Refuse ids outside the pools and targets that are written twice."""
    for column, total in enumerate((num_sources, num_targets)):
        assert ((pairs[:, column] >= 0) & (pairs[:, column] < total)).all(), f"{name} outside the pool"
    assert len(set(pairs[:, 1].tolist())) == len(pairs), f"{name} writes to a block twice"
