"""BlockManager: admission, its limits, and that its invariants catch what they should."""

import numpy as np
import pytest

from cupaged.scheduler.block_manager import BlockManager


def make_manager(num_blocks: int = 10, block_size: int = 4, max_model_len: int = 24) -> BlockManager:
    return BlockManager(num_blocks=num_blocks, block_size=block_size, num_rows=4, max_model_len=max_model_len)


def table(manager: BlockManager, row: int) -> list[int]:
    blocks = manager.blocks
    return [int(block) for block in blocks.block_tables[row, : blocks.num_blocks[row]]]


@pytest.mark.parametrize(("num_tokens", "expected"), [(1, 1), (3, 1), (4, 1), (5, 2), (17, 5), (24, 6)])
def test_tokens_take_whole_blocks(num_tokens: int, expected: int) -> None:
    manager = make_manager()

    manager.allocate(0, num_tokens)

    assert len(table(manager, 0)) == expected
    assert manager.num_free == 10 - expected


def test_rows_get_different_blocks() -> None:
    manager = make_manager()

    manager.allocate(0, 9)
    manager.allocate(1, 20)

    assert not set(table(manager, 0)) & set(table(manager, 1))
    manager.check_invariants()


def test_watermark_is_a_hundredth_of_the_pool_but_at_least_one_block() -> None:
    assert make_manager(num_blocks=1000).watermark == 10
    assert make_manager(num_blocks=10).watermark == 1


def test_watermark_counts_at_admission_only_if_asked_for() -> None:
    manager = make_manager(num_blocks=6)

    assert not manager.can_allocate(24, keep_watermark=True)
    assert manager.can_allocate(24, keep_watermark=False)
    assert manager.can_allocate(20, keep_watermark=True)


def test_pool_smaller_than_max_model_len_is_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match=r"max_model_len is 41 .* holds 40 tokens \(10 blocks of 4\)"):
        make_manager(max_model_len=41)


def test_pool_with_more_tokens_than_slots_can_number_is_refused() -> None:
    with pytest.raises(ValueError, match=r"2147483664 tokens .* no more than 2147483648 can be numbered"):
        make_manager(num_blocks=2**27 + 1, block_size=16)


@pytest.mark.parametrize("block_size", [1, 3, 16, 1000])
def test_any_block_size_works(block_size: int) -> None:
    manager = make_manager(block_size=block_size, max_model_len=10)

    manager.allocate(0, 10)

    assert len(table(manager, 0)) == -(-10 // block_size)
    manager.check_invariants()


class TestInvariants:
    def test_lost_block_is_found(self) -> None:
        manager = make_manager()
        manager.blocks.num_free[0] -= 1

        with pytest.raises(AssertionError, match="9 free"):
            manager.check_invariants()

    def test_block_in_two_tables_is_found(self) -> None:
        manager = make_manager()
        manager.allocate(0, 4)
        manager.allocate(1, 4)
        manager.blocks.block_tables[1, 0] = manager.blocks.block_tables[0, 0]
        manager.blocks.ref_count[:] = np.bincount([table(manager, 0)[0]] * 2, minlength=10)

        with pytest.raises(AssertionError, match="two places"):
            manager.check_invariants()

    def test_unexplained_reference_is_found(self) -> None:
        manager = make_manager()
        manager.blocks.ref_count[3] = 1

        with pytest.raises(AssertionError, match="no table explains"):
            manager.check_invariants()

    def test_block_twice_on_the_free_stack_is_found(self) -> None:
        manager = make_manager()
        manager.blocks.free[0] = manager.blocks.free[1]

        with pytest.raises(AssertionError, match="twice on the free stack"):
            manager.check_invariants()

    def test_free_block_in_a_table_is_found(self) -> None:
        manager = make_manager()
        manager.allocate(0, 4)
        manager.blocks.free[0] = table(manager, 0)[0]

        with pytest.raises(AssertionError, match="a free block is in a table"):
            manager.check_invariants()
