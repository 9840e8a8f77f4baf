"""Pools: the blocks on the device and in host memory, and what a step moves between and within them."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cupaged.scheduler.allocator import Blocks

SWAP_OUT, SWAP_IN, COPY = 0, 1, 2  # in Moves.num


class Moves(NamedTuple):
    """What the step being planned does with whole blocks before its forward: pairs (from, to)."""

    swap_out: NDArray[np.int32]  # [num_host_blocks, 2], valid below num[SWAP_OUT]
    swap_in: NDArray[np.int32]  # [num_host_blocks, 2], likewise
    copy: NDArray[np.int32]  # [num_rows, 2]
    num: NDArray[np.int64]  # [3]


class Pools(NamedTuple):
    """Where blocks lie, and what moves between there."""

    device: Blocks
    host: Blocks
    moves: Moves


def create_moves(num_rows: int, num_host_blocks: int) -> Moves:
    """Return room for all that can move in one step."""
    return Moves(
        np.zeros((num_host_blocks, 2), np.int32),
        np.zeros((num_host_blocks, 2), np.int32),
        np.zeros((num_rows, 2), np.int32),
        np.zeros(3, np.int64),
    )
