"""What the scheduler counts over its life, as one array that njit functions add to; nothing resets it."""

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray


class Counter(IntEnum):
    """Places in the array of counters, int64[NUM_COUNTERS]."""

    PREEMPTIONS = 0  # of groups
    SWAPPED_OUT_BLOCKS = 1
    SWAPPED_IN_BLOCKS = 2
    RECOMPUTED_TOKENS = 3  # computed once more because of a preemption: the recompute tax
    COPIED_BLOCKS = 4  # by copy-on-write
    FORKS = 5
    PREFIX_QUERIED_TOKENS = 6  # of the prompts that were looked up
    PREFIX_HIT_TOKENS = 7
    EVICTED_BLOCKS = 8  # cached prefixes that gave way to new blocks


NUM_COUNTERS = len(Counter)


def create_counters() -> NDArray[np.int64]:
    """Return all counters at 0."""
    return np.zeros(NUM_COUNTERS, np.int64)
