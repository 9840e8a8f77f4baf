"""Faults of an engine, planted in what one sequence of one step is given: what a comparison must find."""

from collections.abc import Callable
from typing import Any

from cupaged.backend.base import Backend
from cupaged.batch import Batch

ROW = 3
OUTPUT_POSITION = 5
Fault = Callable[[Batch, int], None]  # of the host's batch and a decode in it


def wrong_position(batch: Batch, i: int) -> None:
    """Rotate query and key as if the token stood one place further."""
    batch.positions[i] += 1


def lost_block(batch: Batch, i: int) -> None:
    """Read the first block twice, the second not at all."""
    batch.block_tables[i, 1] = batch.block_tables[i, 0]


def lost_key(batch: Batch, i: int) -> None:
    """Leave the token's key and value where they are, in no block."""
    batch.slot_mapping[i] = -1


def stale_token(batch: Batch, i: int) -> None:
    """Take the token before the last."""
    batch.input_ids[i] -= 1  # the last one is mostly one more than that, in the comparisons' checkpoints


FAULTS: list[Fault] = [wrong_position, lost_block, lost_key, stale_token]


class FaultyBackend:
    """A backend that does all right but once."""

    def __init__(self, backend: Backend, fault: Fault) -> None:
        self._backend, self._fault = backend, fault
        self.num_faults = 0

    def __getattr__(self, name: str) -> Any:
        """Return all else as the backend has it."""
        return getattr(self._backend, name)

    def upload(self, batch: Batch) -> Batch:
        """Plant the fault where the row's decode comes."""
        for i in range(batch.num_decodes):
            if batch.rows[i] == ROW and batch.output_position[i] == OUTPUT_POSITION:
                self._fault(batch, i)
                self.num_faults += 1
        return self._backend.upload(batch)
