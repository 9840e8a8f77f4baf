"""Block tables grow and are freed on the pool's arrays alone."""

from cupaged.scheduler.allocator import Blocks, create_blocks, free_table, grow_table


def make_blocks(total: int = 10) -> Blocks:
    return create_blocks(total, block_size=4, num_rows=4, max_blocks=6)


def table(blocks: Blocks, row: int) -> list[int]:
    return [int(block) for block in blocks.block_tables[row, : blocks.num_blocks[row]]]


def test_growing_keeps_the_blocks_a_row_has() -> None:
    blocks = make_blocks()
    grow_table(blocks, 0, 1)
    before = table(blocks, 0)

    assert grow_table(blocks, 0, 2)

    assert table(blocks, 0)[:1] == before
    assert len(set(table(blocks, 0))) == 2


def test_growing_to_what_a_row_has_takes_none() -> None:
    blocks = make_blocks()
    grow_table(blocks, 0, 2)

    assert grow_table(blocks, 0, 2)

    assert blocks.num_free[0] == 8


def test_growing_takes_nothing_when_there_are_too_few() -> None:
    blocks = make_blocks(total=6)
    grow_table(blocks, 0, 5)

    assert not grow_table(blocks, 1, 2)

    assert table(blocks, 1) == []
    assert blocks.num_free[0] == 1


def test_freeing_gives_every_block_back() -> None:
    blocks = make_blocks()
    grow_table(blocks, 0, 3)
    grow_table(blocks, 1, 5)

    free_table(blocks, 0)
    free_table(blocks, 1)

    assert sorted(blocks.free[: blocks.num_free[0]].tolist()) == list(range(10))
    assert not blocks.ref_count.any()
    assert table(blocks, 0) == table(blocks, 1) == []


def test_block_still_referenced_is_not_freed() -> None:
    blocks = make_blocks()
    grow_table(blocks, 0, 1)
    blocks.ref_count[table(blocks, 0)] += 1  # as a second table that holds it would

    free_table(blocks, 0)

    assert blocks.num_free[0] == 9
