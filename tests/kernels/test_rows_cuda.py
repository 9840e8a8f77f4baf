"""rows.cu: its moves are exact, so each is held to NumPy and to the CPU twin bit for bit."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupaged.kernels.rows import (
    BATCH,
    INPUT_FROM_LAST_TOKEN,
    THREADS,
    copy_blocks_cuda,
    gather_rows_cuda,
    load_last_tokens_cpu,
    load_last_tokens_cuda,
    store_last_tokens_cpu,
    store_last_tokens_cuda,
)
from tests.cuda_on_cpu.device import EmulatedDevice
from tests.kernels.elements import BF16, DTYPES, F32, Array, normal, sparse, strided
from tests.kernels.schedules import identical_under_all_schedules
from tests.kernels.test_rows import gather_rows_cpu


def ints(*values: int) -> Array:
    return np.array(values, np.int32)


def pairs(*values: tuple[int, int]) -> Array:
    return np.array(values, np.int32).reshape(-1, 2)


@pytest.mark.parametrize("size", [8, 136, 4096])  # one unit; idle threads; rows of more than one block
@pytest.mark.parametrize("dtype", DTYPES)
def test_gathered_rows_are_the_indexed_ones(device: EmulatedDevice, dtype: Any, size: int) -> None:
    x = normal(np.random.default_rng(0), (9, size), dtype)
    index, out = ints(8, 0, 3, 3, 5), np.full((5, size), np.nan, dtype)

    gather_rows_cuda(device, strided(x), index, out)

    assert out.tobytes() == x[index].tobytes()


def test_gather_leaves_padding_and_equals_its_twin(device: EmulatedDevice) -> None:
    x = normal(np.random.default_rng(0), (4, 64), F32)
    index, out = ints(-1, 2, -1, 0), np.full((4, 64), 7, F32)
    expected = out.copy()
    gather_rows_cpu(x, index, expected)

    gather_rows_cuda(device, x, index, out)

    assert np.array_equal(out, expected)


def test_gather_of_no_rows_does_nothing(device: EmulatedDevice) -> None:
    gather_rows_cuda(device, np.zeros((4, 64), BF16), ints(), np.zeros((0, 64), BF16))


def test_row_beyond_32_gb_is_reached(tmp_path: Path) -> None:
    last = 2**31 * 8 // 4096  # 2^31 units
    x, out = sparse(tmp_path, (last + 1, 4096), BF16), np.full((1, 4096), np.nan, BF16)
    x[last] = normal(np.random.default_rng(0), (4096,), BF16)

    gather_rows_cuda(EmulatedDevice(), x, ints(last), out)

    assert out.tobytes() == x[last:].tobytes()


@pytest.mark.parametrize("num_seqs", [1, 17, THREADS + 97])
def test_last_tokens_equal_the_twins(device: EmulatedDevice, num_seqs: int) -> None:
    rng = np.random.default_rng(0)
    rows = rng.permutation(num_seqs + 5)[:num_seqs].astype(np.int32)
    rows[num_seqs // 2 + 1 :: 3] = -1
    flags = rng.integers(0, 8, num_seqs).astype(np.int32)
    query_start = np.cumsum([0, *rng.integers(1, 4, num_seqs)]).astype(np.int32)
    last_token, input_ids = (
        rng.integers(0, 1000, n).astype(np.int32) for n in (num_seqs + 5, query_start[-1])
    )
    token_ids = rng.integers(0, 1000, num_seqs).astype(np.int32)
    twin_last_token, twin_input_ids = last_token.copy(), input_ids.copy()
    load_last_tokens_cpu(rows, flags, query_start, twin_last_token, twin_input_ids)

    load_last_tokens_cuda(device, rows, flags, query_start, last_token, input_ids)
    assert np.array_equal(last_token, twin_last_token)
    assert np.array_equal(input_ids, twin_input_ids)

    store_last_tokens_cpu(rows, flags, token_ids, twin_last_token)
    store_last_tokens_cuda(device, rows, flags, token_ids, last_token)
    assert np.array_equal(last_token, twin_last_token)


UNITS = THREADS * BATCH  # that a thread block copies


@pytest.mark.parametrize("num_units", [1, UNITS - 1, UNITS, 2 * UNITS + 17])
def test_blocks_are_copied_whole(device: EmulatedDevice, num_units: int) -> None:
    pool = np.random.default_rng(0).integers(0, 256, (6, 2, 8 * num_units), np.uint8).view(BF16)
    before = pool.copy()

    copy_blocks_cuda(device, pool, pool, pairs((0, 2), (5, 4), (0, 3)))

    assert pool.tobytes() == before[[0, 1, 0, 0, 5, 5]].tobytes()


@pytest.mark.parametrize("num_units", [1, 17])
def test_many_blocks_are_copied_at_once(num_units: int) -> None:
    rng = np.random.default_rng(0)
    pool = rng.integers(0, 256, (1501, 16 * num_units), np.uint8)
    chosen = rng.permutation(1501)[:1500].astype(np.int32).reshape(2, 750).T.copy()
    expected = pool.copy()
    expected[chosen[:, 1]] = pool[chosen[:, 0]]

    copy_blocks_cuda(EmulatedDevice("fast"), pool, pool, chosen)

    assert np.array_equal(pool, expected)


def test_blocks_go_to_another_pool(device: EmulatedDevice) -> None:
    pool, other = np.ones((2, 32), np.uint8), np.zeros((5, 32), np.uint8)

    copy_blocks_cuda(device, pool, other, pairs((1, 4)))

    assert other.any(1).tolist() == [False, False, False, False, True]


def test_copy_of_no_blocks_does_nothing(device: EmulatedDevice) -> None:
    copy_blocks_cuda(device, np.zeros((1, 16), np.uint8), np.zeros((1, 16), np.uint8), pairs())


def test_block_beyond_32_gb_is_reached(tmp_path: Path) -> None:
    pool = sparse(tmp_path, (2**31 * 16 // 65536 + 2, 65536), np.uint8)  # 2^31 units and two blocks
    pool[-1] = 7

    copy_blocks_cuda(EmulatedDevice(), pool, pool, pairs((len(pool) - 1, len(pool) - 2)))

    assert (pool[-2] == 7).all()


def test_order_of_threads_changes_no_bit() -> None:
    rng = np.random.default_rng(0)
    before = rng.integers(0, 1000, 20).astype(np.int32)
    last_token, input_ids, rows = np.empty_like(before), np.empty(20, np.int32), np.arange(20, dtype=np.int32)

    def launch(device: EmulatedDevice) -> None:
        last_token[:], input_ids[:] = before, 0
        flags, query_start = np.full(20, INPUT_FROM_LAST_TOKEN, np.int32), np.arange(21, dtype=np.int32)
        load_last_tokens_cuda(device, rows, flags, query_start, last_token, input_ids)

    assert identical_under_all_schedules(launch, last_token, input_ids)


def test_odd_blocks_and_rows_are_errors() -> None:
    pool = np.zeros((2, 24), np.uint8)

    with pytest.raises(ValueError, match="blocks have 24 bytes"):
        copy_blocks_cuda(EmulatedDevice(), pool, pool, pairs((0, 1)))
    with pytest.raises(ValueError, match=r"hidden_size is 12, .* multiple of 8"):
        gather_rows_cuda(EmulatedDevice(), np.zeros((2, 12), BF16), ints(0), np.zeros((1, 12), BF16))
