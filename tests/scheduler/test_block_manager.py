"""BlockManager: its limits, and that its invariants catch what they should."""

import numpy as np
import pytest

from cupaged.scheduler.block_manager import BlockManager
from cupaged.scheduler.counters import create_counters
from cupaged.scheduler.scheduler_config import SchedulerConfig
from tests.scheduler import compiled

NONE = np.empty(0, np.int32)


def make_manager(num_blocks: int = 10, block_size: int = 4, max_model_len: int = 24) -> BlockManager:
    config = SchedulerConfig(
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_model_len=max_model_len,
        num_host_blocks=4,
    )
    return BlockManager(config, create_counters())


def cached() -> BlockManager:
    """Return a pool with a row of 3 cached blocks and 2 more that are evictable."""
    manager = make_manager()
    for row, number in ((0, 3), (1, 2)):
        compiled.allocate(manager.blocks, row, NONE, number)
        tokens = np.arange(100 * row, 100 * row + 4 * number, dtype=np.int32)
        compiled.register(manager.blocks, row, tokens, 0)
    compiled.free(manager.blocks, 1)
    manager.check_invariants()
    return manager


@pytest.mark.parametrize(("num_tokens", "expected"), [(1, 1), (3, 1), (4, 1), (5, 2), (17, 5), (24, 6)])
def test_tokens_take_whole_blocks(num_tokens: int, expected: int) -> None:
    assert make_manager().blocks_for(num_tokens) == expected


@pytest.mark.parametrize(
    ("num_prompt", "num_total", "num_sequences", "expected"),
    [(8, 12, 1, 3), (8, 12, 3, 2 + 3), (9, 12, 3, 2 + 3), (7, 12, 3, 1 + 3 * 2), (3, 4, 4, 4)],
)
def test_group_takes_its_prompts_full_blocks_once(
    num_prompt: int, num_total: int, num_sequences: int, expected: int
) -> None:
    assert make_manager().most_blocks(num_prompt, num_total, num_sequences) == expected


def test_watermark_is_a_hundredth_of_the_pool_but_at_least_one_block() -> None:
    assert make_manager(num_blocks=1000).watermark == 10
    assert make_manager(num_blocks=10).watermark == 1


def test_pool_smaller_than_max_model_len_is_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match=r"max_model_len is 41 .* holds 40 tokens \(10 blocks of 4\)"):
        make_manager(max_model_len=41)


def test_pool_with_more_tokens_than_slots_can_number_is_refused() -> None:
    with pytest.raises(ValueError, match=r"2147483664 tokens .* no more than 2147483648 can be numbered"):
        make_manager(num_blocks=2**27 + 1, block_size=16)


def test_blocks_with_cached_content_count_as_free() -> None:
    manager = cached()

    assert manager.num_free == 7
    manager.reset_prefix_cache()
    assert manager.num_free == manager.blocks.num.free[0] == 7
    manager.check_invariants()


class TestInvariants:
    def test_lost_block_is_found(self) -> None:
        manager = make_manager()
        manager.blocks.num.free[0] -= 1

        with pytest.raises(AssertionError, match="9 free"):
            manager.check_invariants()

    def test_lost_host_block_is_found(self) -> None:
        manager = make_manager()
        manager.host_blocks.num.free[0] -= 1

        with pytest.raises(AssertionError, match="3 free"):
            manager.check_invariants()

    def test_unexplained_reference_is_found(self) -> None:
        manager = make_manager()
        manager.blocks.at.ref_count[3] = 1

        with pytest.raises(AssertionError, match="no table explains"):
            manager.check_invariants()

    def test_block_twice_on_the_free_stack_is_found(self) -> None:
        manager = make_manager()
        manager.blocks.free[0] = manager.blocks.free[1]

        with pytest.raises(AssertionError, match="twice among the free"):
            manager.check_invariants()

    def test_free_block_in_a_table_is_found(self) -> None:
        manager = make_manager()
        compiled.grow(manager.blocks, 0, 1)
        manager.blocks.free[0] = manager.blocks.block_tables[0, 0]

        with pytest.raises(AssertionError, match="a free block is in a table"):
            manager.check_invariants()

    def test_hole_behind_a_block_is_found(self) -> None:
        manager = make_manager()
        compiled.grow(manager.blocks, 0, 2)
        manager.blocks.block_tables[0, 1] = -1

        with pytest.raises(AssertionError, match="no block of the pool"):
            manager.check_invariants()

    def test_row_in_both_pools_is_found(self) -> None:
        manager = make_manager()
        compiled.grow(manager.blocks, 2, 1)
        compiled.grow(manager.host_blocks, 2, 1)

        with pytest.raises(AssertionError, match="row 2 has a table in both pools"):
            manager.check_invariants()

    def test_broken_ring_is_found(self) -> None:
        manager = cached()
        manager.blocks.at.older[10] = 10

        with pytest.raises(AssertionError, match="ring of evictable blocks is broken"):
            manager.check_invariants()

    def test_miscounted_ring_is_found(self) -> None:
        manager = cached()
        manager.blocks.num.evictable[0] += 1

        with pytest.raises(AssertionError, match="miscounted"):
            manager.check_invariants()

    def test_entry_that_nobody_finds_is_found(self) -> None:
        manager = cached()
        cache = manager.blocks.cache
        cache.slots[cache.slots == manager.blocks.block_tables[0, 0]] = -1

        with pytest.raises(AssertionError, match="disagree on the entries"):
            manager.check_invariants()

    def test_entry_behind_a_gap_is_found(self) -> None:
        manager = cached()
        cache = manager.blocks.cache
        block = int(manager.blocks.block_tables[0, 0])
        place = int(np.flatnonzero(cache.slots == block)[0])
        far = next(p for p in range(cache.slots.size) if cache.slots[p] < 0 and cache.slots[p - 1] < 0)
        cache.slots[place], cache.slots[far] = -1, block

        with pytest.raises(AssertionError, match=f"block {block} cannot be found"):
            manager.check_invariants()

    def test_entries_of_one_serial_are_found(self) -> None:
        manager = cached()
        first, second, _ = manager.blocks.block_tables[0, :3]
        manager.blocks.cache.at.serial[second] = manager.blocks.cache.at.serial[first]

        with pytest.raises(AssertionError, match="two entries have one serial"):
            manager.check_invariants()

    def test_free_block_that_is_an_entry_is_found(self) -> None:
        manager = cached()
        blocks = manager.blocks
        block = blocks.at.newer[10]
        blocks.at.newer[10], blocks.at.older[blocks.at.newer[block]] = blocks.at.newer[block], 10
        blocks.num.evictable[0] -= 1
        blocks.free[blocks.num.free[0]] = block
        blocks.num.free[0] += 1

        with pytest.raises(AssertionError, match="a free entry is not evictable"):
            manager.check_invariants()
