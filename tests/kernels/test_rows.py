"""Gathered rows, the last sampled tokens, and whole blocks."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupaged.batch import Flag
from cupaged.jit import specialize
from cupaged.kernels import rows
from cupaged.kernels.rows import (
    GRAIN,
    INPUT_FROM_LAST_TOKEN,
    SAMPLES,
    SIGNATURE,
    copy_blocks_cpu,
    load_last_tokens_cpu,
    store_last_tokens_cpu,
)


def gather_rows_cpu(x: Any, index: Any, out: Any) -> None:
    """Run the twin that reads the type of x and writes the type of out."""
    specialize(rows.gather_rows_cpu, SIGNATURE.format(x.dtype.str[1:], out.dtype.str[1:]))
    rows.gather_rows_cpu(x, index, out)


def ints(*values: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(values, np.int32)


def test_gathered_rows_are_the_indexed_ones() -> None:
    x = np.random.default_rng(0).standard_normal((9, 17), np.float32)
    out = np.empty((4, 17), np.float32)

    gather_rows_cpu(x, ints(8, 0, 3, 3), out)

    assert np.array_equal(out, x[[8, 0, 3, 3]])


@pytest.mark.parametrize("kinds", [(np.float32, np.uint16), (np.uint16, np.uint16)])
def test_gathered_rows_are_rounded_to_bfloat16(kinds: tuple[Any, Any]) -> None:
    rounded = np.random.default_rng(0).standard_normal((9, 17), np.float32).astype(ml_dtypes.bfloat16)
    x = rounded.view(np.uint16) if kinds[0] == np.uint16 else rounded.astype(np.float32) * np.float32(1.0005)
    out = np.empty((4, 17), np.uint16)

    gather_rows_cpu(x, ints(8, 0, 3, 3), out)

    assert np.array_equal(out, rounded.view(np.uint16)[[8, 0, 3, 3]])


def test_more_rows_than_one_thread_moves_are_gathered() -> None:
    x = np.random.default_rng(0).standard_normal((4 * GRAIN // 577, 577), np.float32)
    index = np.arange(len(x), dtype=np.int32)[::-1].copy()
    out = np.empty_like(x)

    gather_rows_cpu(x, index, out)

    assert np.array_equal(out, x[::-1])


def test_padding_of_the_index_gathers_nothing() -> None:
    x, out = np.ones((2, 3), np.float32), np.full((2, 3), 7, np.float32)

    gather_rows_cpu(x, ints(-1, 1), out)

    assert out.tolist() == [[7] * 3, [1] * 3]


def test_last_input_of_a_flagged_sequence_is_its_rows_last_token() -> None:
    input_ids, last_token = ints(1, 2, 3, 4, 5), ints(10, 11, 12, 13)

    load_last_tokens_cpu(ints(3, 0, 1), ints(2, 1, 3), ints(0, 1, 3, 5), last_token, input_ids)

    assert input_ids.tolist() == [13, 2, 3, 4, 11]


def test_only_sequences_that_sampled_store_their_token() -> None:
    last_token = ints(10, 11, 12)

    store_last_tokens_cpu(ints(2, 0), ints(1, 6), ints(7, 8), last_token)

    assert last_token.tolist() == [10, 11, 7]


def test_padding_rows_neither_load_nor_store() -> None:
    input_ids, last_token = ints(1, 2), ints(10, 11)

    load_last_tokens_cpu(ints(-1, -1), ints(3, 3), ints(0, 1, 2), last_token, input_ids)
    store_last_tokens_cpu(ints(-1, -1), ints(1, 1), ints(7, 8), last_token)

    assert input_ids.tolist() == [1, 2]
    assert last_token.tolist() == [10, 11]


def test_blocks_are_copied_whole() -> None:
    pool = np.arange(4 * 35, dtype=np.uint8).reshape(4, 35)
    before = pool.copy()

    copy_blocks_cpu(pool, pool, ints(0, 2, 0, 3).reshape(2, 2))

    assert np.array_equal(pool, before[[0, 1, 0, 0]])


@pytest.mark.parametrize("block_bytes", [1, 35, 4099])
def test_many_blocks_are_copied_at_once(block_bytes: int) -> None:
    rng = np.random.default_rng(0)
    pool = rng.integers(0, 256, (1501, block_bytes), np.uint8)
    pairs = rng.permutation(1501)[:1500].astype(np.int32).reshape(2, 750).T.copy()
    expected = pool.copy()
    expected[pairs[:, 1]] = pool[pairs[:, 0]]

    copy_blocks_cpu(pool, pool, pairs)

    assert np.array_equal(pool, expected)


def test_blocks_go_to_another_pool() -> None:
    pool, host = np.ones((2, 32), np.uint8), np.zeros((5, 32), np.uint8)

    copy_blocks_cpu(pool, host, ints(1, 4).reshape(1, 2))

    assert host.any(1).tolist() == [False, False, False, False, True]


def test_flags_are_those_of_the_batch() -> None:
    assert (SAMPLES, INPUT_FROM_LAST_TOKEN) == (Flag.SAMPLES, Flag.INPUT_FROM_LAST_TOKEN)
