"""What a plan is compared with, so that only what nobody could foretell takes room in a trace.

Both ends keep a PlanState: each sequence's columns and block table as its row's last step had them. A row's
next step is foretold from them; the record says where the plan is otherwise.
"""

from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cupaged.batch import Count
from cupaged.scheduler.scheduler_config import SchedulerConfig


class Column(IntEnum):
    """A sequence's numbers in a plan, and their bits in the mask of what was not foretold."""

    ROW = 0  # foretold: the row that came after the one before, last time
    TABLE = 1  # the block table; it is compared block by block
    NUM_NEW = 2  # foretold: 1 for a decode, else as last time
    SEQ_LEN = 3  # foretold: num_new more
    FLAGS = 4  # foretold: the same without RESET
    OUTPUT_POSITION = 5  # foretold: one more if it sampled
    NUM_BANNED = 6
    NUM_HISTORY = 7  # foretold: 0
    GROUP_INDEX = 8  # foretold from here on: the same
    TEMPERATURE = 9  # float32's bits, like the next two
    TOP_P = 10
    MIN_P = 11
    TOP_K = 12
    SEED_LOW = 13
    SEED_HIGH = 14
    NUM_LOGPROBS = 15
    NUM_PROMPT_LOGPROBS = 16


NUM_COLUMNS = len(Column)
CONTEXT = len(Count)  # behind a batch's counts: the sum of seq_lens, the KV that the step reads at most
NUM_TOTALS = CONTEXT + 1


class PlanState(NamedTuple):
    """The last steps as far as they foretell the next one."""

    counts: NDArray[np.int64]  # [NUM_TOTALS], of the last step
    row_after: NDArray[np.int32]  # [num_rows + 1], in the last step that had the row; [num_rows]: the first
    columns: NDArray[np.int32]  # [num_rows, NUM_COLUMNS], ROW and TABLE unused
    tables: NDArray[np.int32]  # [num_rows, max_blocks], block id + 1: untouched pages hold no block
    table_ends: NDArray[np.int32]  # [num_rows], behind which there never was a block
    block_size: int


def create_plan_state(config: SchedulerConfig) -> PlanState:
    """Return the state before any step."""
    num_rows, block_size = config.max_num_seqs, config.block_size
    max_blocks = -(-config.max_model_len // block_size)
    return PlanState(
        counts=np.zeros(NUM_TOTALS, np.int64),
        row_after=np.zeros(num_rows + 1, np.int32),
        columns=np.zeros((num_rows, NUM_COLUMNS), np.int32),
        tables=np.zeros((num_rows, max_blocks), np.int32),
        table_ends=np.zeros(num_rows, np.int32),
        block_size=block_size,
    )
