"""Block tables grow, are shared, moved and freed on the pools' arrays alone."""

import numpy as np
import pytest

from cupaged.scheduler.allocator import HOLE, Blocks, create_blocks, create_host_blocks
from cupaged.scheduler.block_manager import evictable
from cupaged.scheduler.counters import create_counters
from cupaged.scheduler.prefix_cache import create_prefix_cache, lookup_prefix
from tests.scheduler import compiled

NONE = np.empty(0, np.int32)


def make_blocks(total: int = 10, hash_bits: int = 64) -> Blocks:
    cache = create_prefix_cache(total, 4, enabled=True)
    cache = cache._replace(hash_mask=np.uint64((1 << hash_bits) - 1))
    return create_blocks(total, 4, table_shape=(4, 6), cache=cache, counters=create_counters())


def table(blocks: Blocks, row: int) -> list[int]:
    return [int(block) for block in blocks.block_tables[row, : blocks.held.num_blocks[row]]]


def cached(*numbers: int) -> Blocks:
    """Return a pool in which row i has cached `numbers[i]` blocks."""
    blocks = make_blocks()
    for row, number in enumerate(numbers):
        compiled.allocate(blocks, row, NONE, number)
        compiled.register(blocks, row, np.arange(100 * row, 100 * row + 4 * number, dtype=np.int32), 0)
    return blocks


def test_growing_keeps_the_blocks_a_row_has() -> None:
    blocks = make_blocks()
    compiled.grow(blocks, 0, 1)
    before = table(blocks, 0)

    compiled.grow(blocks, 0, 3)
    compiled.grow(blocks, 0, 2)

    assert table(blocks, 0)[:1] == before
    assert len(set(table(blocks, 0))) == 3


def test_freeing_gives_every_block_back() -> None:
    blocks = make_blocks()
    compiled.grow(blocks, 0, 3)
    compiled.grow(blocks, 1, 5)

    compiled.free(blocks, 0)
    compiled.free(blocks, 1)

    assert sorted(blocks.free[: blocks.num.free[0]].tolist()) == list(range(10))
    assert not blocks.at.ref_count.any()
    assert table(blocks, 0) == table(blocks, 1) == []


def test_block_still_referenced_is_not_freed() -> None:
    blocks = make_blocks()
    compiled.grow(blocks, 0, 2)
    compiled.fork(blocks, 0, 1, 1)

    compiled.free(blocks, 0)

    assert blocks.num.free[0] == 9
    assert blocks.at.ref_count[table(blocks, 1)].tolist() == [1]


def test_cached_blocks_are_taken_after_all_free_ones_and_oldest_first() -> None:
    blocks = cached(2, 1)
    first, second = table(blocks, 0), table(blocks, 1)
    compiled.free(blocks, 1)
    compiled.free(blocks, 0)

    assert evictable(blocks) == [*second, *reversed(first)]
    compiled.grow(blocks, 2, 5)
    compiled.grow(blocks, 3, 4)

    assert table(blocks, 3)[2:] == [*second, first[1]]
    assert blocks.cache.at.serial[second].tolist() == [0]
    assert blocks.cache.at.serial[first[0]] > 0


def test_found_block_is_evictable_no_more() -> None:
    blocks = cached(2)
    found = table(blocks, 0)
    compiled.free(blocks, 0)

    compiled.allocate(blocks, 1, np.array(found[:1], np.int32), 1)

    assert evictable(blocks) == found[1:]


def test_entry_does_not_continue_another_that_has_its_parents_block_by_now() -> None:
    blocks = make_blocks(2, hash_bits=0)
    first, second, third = (np.arange(n, n + 4, dtype=np.int32) for n in (0, 10, 20))
    compiled.allocate(blocks, 0, NONE, 2)
    compiled.register(blocks, 0, np.concatenate([first, second]), 0)
    compiled.free_before(blocks, 0, 1)  # so that the parent's block goes first
    compiled.free(blocks, 0)

    compiled.allocate(blocks, 1, NONE, 1)
    compiled.register(blocks, 1, third, 0)

    found = np.empty(2, np.int32)
    assert table(blocks, 1) == [0]
    assert lookup_prefix(blocks.cache, np.concatenate([third, second]), 0, found) == 1


@pytest.mark.parametrize("holders", [1, 2])
def test_shared_block_is_copied_before_it_is_written(holders: int) -> None:
    blocks, pair = make_blocks(), np.zeros(2, np.int32)
    compiled.grow(blocks, 0, 2)
    before = table(blocks, 0)
    if holders == 2:
        compiled.fork(blocks, 0, 1, 2)

    copies = compiled.write(blocks, 0, 1, pair)

    assert copies == (holders == 2)
    if copies:
        assert table(blocks, 1) == before
        assert pair.tolist() == [before[1], table(blocks, 0)[1]]
        assert blocks.at.ref_count[pair].tolist() == [1, 1]


def test_cached_block_of_a_single_holder_is_found_no_more_once_it_is_written() -> None:
    blocks = cached(2)

    assert not compiled.write(blocks, 0, 1, np.zeros(2, np.int32))

    assert blocks.cache.at.serial[table(blocks, 0)].tolist() == [1, 0]


def test_blocks_before_the_window_become_holes() -> None:
    blocks = make_blocks()
    compiled.grow(blocks, 0, 4)
    before = table(blocks, 0)

    compiled.free_before(blocks, 0, 2)

    assert table(blocks, 0) == [HOLE, HOLE, *before[2:]]
    assert blocks.num.free[0] == 8


def test_moved_tables_share_what_they_shared_and_keep_holes() -> None:
    blocks, host = make_blocks(), create_host_blocks(6, 4, table_shape=(4, 6))
    compiled.grow(blocks, 0, 3)
    compiled.free_before(blocks, 0, 1)
    compiled.fork(blocks, 0, 1, 3)
    compiled.grow(blocks, 1, 4)
    pairs = np.zeros((6, 2), np.int32)

    count = compiled.move(blocks, host, np.array([0, 1], np.int32), pairs)

    assert count == 3
    assert table(host, 0)[0] == HOLE
    assert table(host, 0) == table(host, 1)[:3]
    assert sorted(pairs[:3, 1].tolist()) == sorted(table(host, 1)[1:])
    assert blocks.num.free[0] == 10
    compiled.free(host, 0)
    compiled.free(host, 1)
    assert sorted(host.free[: host.num.free[0]].tolist()) == list(range(6))


def test_beams_take_the_tables_of_their_parents() -> None:
    blocks = make_blocks()
    for row in range(3):
        compiled.grow(blocks, row, row + 1)
    before = [table(blocks, row) for row in range(3)]
    written = np.array([4, 8, 12], np.int32)

    compiled.reorder(blocks, np.array([0, 1, 2], np.int32), np.array([2, 1], np.int32), written)

    assert [table(blocks, row) for row in range(3)] == [before[2], before[1], []]
    assert blocks.num.free[0] == 5


def test_beams_do_not_share_blocks_that_nobody_has_written() -> None:
    blocks = make_blocks()
    for row in range(2):
        compiled.grow(blocks, row, 3)
    before = table(blocks, 1)

    compiled.reorder(
        blocks, np.array([0, 1], np.int32), np.array([1, 1], np.int32), np.array([12, 5], np.int32)
    )

    assert table(blocks, 0) == table(blocks, 1) == before[:2]
    assert blocks.num.free[0] == 8
