"""RowTable: which sequence has which row of the scheduler's arrays, and what enters and leaves them."""

import numpy as np
from numpy.typing import NDArray

from cupaged.scheduler.state import (
    NO_SERIAL,
    begin_group,
    create_rows,
    create_sampling_rows,
    load_row,
    load_sampling_row,
    unload_row,
)
from cupaged.sequence import Sequence, SequenceGroup


class RowTable:
    """Rows and SamplingRows, and who they belong to."""

    def __init__(self, num_rows: int, max_model_len: int) -> None:
        """Start with every row free."""
        self.rows = create_rows(num_rows, max_model_len)
        self.sampling = create_sampling_rows(num_rows)
        self._num_running = self.rows.num_running.data  # quicker to read than the array
        self.by_row: NDArray[np.object_] = np.full(num_rows, None, np.object_)  # Sequence or None
        self.free = list(range(num_rows - 1, -1, -1))
        self._last_serial = NO_SERIAL

    @property
    def num_running(self) -> int:
        """Return how many rows run."""
        return self._num_running[0]

    def of_group(self, group: SequenceGroup) -> NDArray[np.int32]:
        """Return the rows of a group's unfinished sequences, by index."""
        return np.array([seq.row for seq in group.unfinished], np.int32)

    def load(self, group: SequenceGroup, salt: int) -> NDArray[np.int32]:
        """Give the group's unfinished sequences a row each; return the rows."""
        for seq in group.unfinished:
            seq.row = self.free.pop()
            self.by_row[seq.row] = seq
            self.rows = load_row(self.rows, seq.row, seq, salt=salt)
            self.sampling = load_sampling_row(self.sampling, seq.row, seq)
        rows = self.of_group(group)
        begin_group(self.rows, rows, self.new_serial())
        return rows

    def new_serial(self) -> int:
        """Return a serial that no row has had: what steps in flight bring back for others is nobody's."""
        self._last_serial += 1
        return self._last_serial

    def unload(self, group: SequenceGroup) -> None:
        """Keep in a group's unfinished sequences what their rows knew, and free the rows."""
        for seq in group.unfinished:
            unload_row(self.rows, seq.row, seq)
            self.rows.at[seq.row].serial = NO_SERIAL
            self.drop(seq)

    def drop(self, seq: Sequence) -> None:
        """Free the row of a sequence whose blocks and serial are gone."""
        self.by_row[seq.row] = None
        self.free.append(seq.row)
        seq.row = -1
