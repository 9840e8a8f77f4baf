"""Where groups lie in the paged cache."""

from typing import Any

import numpy as np
import pytest

from cupaged.jit import njit
from cupaged.kernels.attention_plan import Heads, Mask, plan_units
from cupaged.kernels.groups import PLACES, Cache, place_groups
from cupaged.kernels.simd import LANES
from cupaged.kernels.tile import GROUPS, SPLIT

HEADS = Heads(2, 3, 64)


@njit
def place(groups: Any, units: Any, unit: int, split: int, cache: Cache, tables: Any, mask: Mask) -> None:
    place_groups(groups, PLACES, units, unit, split, cache, HEADS, tables, mask)


@pytest.mark.parametrize("block_size", [16, 32, 128])
@pytest.mark.parametrize("window", [0, 1, 20, 70, 300])
@pytest.mark.parametrize("length", [1, 16, 17, SPLIT, SPLIT + 100])
def test_each_group_has_the_place_of_one_that_is_seen(block_size: int, window: int, length: int) -> None:
    mask, split = Mask(1.0, window, 0.0), (length - 1) // SPLIT
    units = plan_units(np.array([0, 1], np.int32), np.array([length], np.int32), mask, HEADS).units
    begin = max(length - (window or length), split * SPLIT)
    table = np.random.default_rng(0).permutation(1000)[: -(-length // block_size)].astype(np.int32)
    table[: begin // block_size] = -(10**9)  # must not be read
    cache = Cache(100_000, 7, 50_000, block_size)
    groups = np.full(2 * PLACES, -1, np.int64)

    place(groups, units, 1, split, cache, table[None], mask)

    keys, values = np.split(groups[PLACES:], [GROUPS])
    for g in range(GROUPS):
        first = min(max(split * SPLIT + g * LANES, begin // LANES * LANES), (length - 1) // LANES * LANES)
        block, offset = int(table[first // block_size]) * 100_000, first % block_size
        head = block_size * 64  # the second one
        assert keys[g] == block + 7 + head + offset
        assert values[g] == block + 50_000 + head + offset * 64
