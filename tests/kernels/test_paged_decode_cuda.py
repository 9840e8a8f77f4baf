"""paged_decode.cu against dense float64 and its twin, and the sameness of a sequence's bits in any company.

Tolerances are CudaCase's, which follow from where the kernel rounds: see assert_close.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupaged.kernels.paged_decode import (
    SPLIT,
    Decodes,
    blocks_at_once,
    cut_decodes,
    most_splits,
    num_splits,
    paged_decode_cuda,
    paged_decode_workspace,
)
from tests.cuda_on_cpu.device import EmulatedDevice
from tests.kernels.elements import BF16, F16, Array
from tests.kernels.paging_cuda import DTYPES, Chunk, CudaCase, Step
from tests.kernels.schedules import identical_under_all_schedules

LENS = (1, 15, 16, 17, 97, SPLIT - 1, SPLIT, SPLIT + 1, 1500)
# Query and KV heads by head_dim: together groups of 1, 3, 4, 5, 7, 8 and 16.
HEADS = [(16, 1, 64), (8, 2, 64), (3, 1, 80), (10, 2, 96), (8, 1, 128), (2, 2, 128), (7, 1, 192), (3, 3, 256)]


def newest(lens: tuple[int, ...]) -> list[Chunk]:
    """Return the last token of each sequence as the step's only one."""
    return [(seq, n - 1, n) for seq, n in enumerate(lens)]


def launch(
    device: EmulatedDevice,
    step: Step,
    *,
    spare_splits: int = 0,
    longer: int = 0,
    max_blocks: int | None = None,
) -> Array:
    """Run the step with room for spare_splits more splits and sequences `longer` than there are."""
    max_splits = num_splits(step.seq_lens, step.sliding_window) + spare_splits
    num_floats = paged_decode_workspace(max_splits, len(step.seq_lens), *step.q.shape[1:])
    paged_decode_cuda(
        device,
        *step.places,
        **step.options,
        workspace=np.full(num_floats, np.nan, np.float32),
        max_splits=max_splits,
        max_seq_len=step.max_seq_len + longer,
        max_blocks=max_blocks,
    )
    return step.out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), HEADS)
def test_equals_dense_attention(
    device: EmulatedDevice, num_heads: int, num_kv_heads: int, head_dim: int, dtype: Any
) -> None:
    case = CudaCase(LENS, num_heads, num_kv_heads, head_dim, dtype=dtype)

    out = launch(device, case.step(*newest(LENS)))

    case.assert_close(out, *newest(LENS))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_its_twin(device: EmulatedDevice, dtype: Any) -> None:
    case = CudaCase(LENS, 8, 2, 64, dtype=dtype, softcap=20.0, sliding_window=700)
    twin = np.concatenate(case.attend(*newest(LENS))).reshape(len(LENS), -1)

    out = launch(device, case.step(*newest(LENS)))

    error = np.abs(out.astype(np.float32) - twin)
    limit = {BF16: 2e-2, F16: 3e-3}[dtype]  # the largest value, 4, times what two roundings are off by
    assert error.max() < limit, f"max error {error.max():.2e}, mean {error.mean():.2e}"


@pytest.mark.parametrize("block_size", [32, 64, 128])
def test_block_of_several_tiles_equals_dense_attention(device: EmulatedDevice, block_size: int) -> None:
    case = CudaCase(LENS, 4, 2, 64, block_size)

    case.assert_close(launch(device, case.step(*newest(LENS))), *newest(LENS))


@pytest.mark.parametrize("sliding_window", [1, 15, 16, 17, 100, SPLIT - 1, SPLIT, SPLIT + 1, 1499, 5000])
def test_sliding_window_cuts_as_dense_attention_does(device: EmulatedDevice, sliding_window: int) -> None:
    case = CudaCase(LENS, 6, 2, 64, 32, sliding_window=sliding_window)

    case.assert_close(launch(device, case.step(*newest(LENS))), *newest(LENS))


@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
@pytest.mark.parametrize(
    ("sliding_window", "max_blocks"), [(17, None), (100, 1), (SPLIT + 5, None), (1100, 3)]
)
def test_blocks_that_left_the_window_are_not_read(
    device: EmulatedDevice, sliding_window: int, max_blocks: int | None, block_size: int
) -> None:
    lens = (2100, 97, 1, SPLIT + 130)
    case = CudaCase(lens, 2, 1, 64, block_size, sliding_window=sliding_window)

    out = launch(device, case.step(*newest(lens)), max_blocks=max_blocks)

    case.assert_close(out, *newest(lens))


def test_softcap_and_sinks_equal_dense_attention(device: EmulatedDevice) -> None:
    sinks = np.array([-1.0, 0.5, 3.0, 20.0, 0.0, -30.0], np.float32)
    case = CudaCase(LENS, 6, 2, 80, softcap=2.5, sinks=sinks, sliding_window=600)

    case.assert_close(launch(device, case.step(*newest(LENS))), *newest(LENS))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_scores_do_not_overflow(device: EmulatedDevice, dtype: Any) -> None:
    case = CudaCase((40, 1100), 2, 2, 64, dtype=dtype)
    case.q = [q * 100 for q in case.q]
    case.place(np.random.default_rng(1))

    out = launch(device, case.step(*newest(case.lens))).astype(np.float32)

    for seq in range(2):
        error = np.abs(out[seq] - case.dense(seq, case.lens[seq] - 1).reshape(-1))
        assert error.max() < 0.05, error.max()


def test_broken_key_shows_in_its_sequence_and_head_alone(device: EmulatedDevice) -> None:
    case = CudaCase((1100, 1100), 4, 2, 64)
    case.k[0][700, 1] = np.nan
    case.place(np.random.default_rng(1))

    out = launch(device, case.step(*newest(case.lens)))

    broken = np.isnan(out.astype(np.float32)).reshape(2, 2, 2, 64)  # sequence, KV head
    assert broken[0, 1].all()
    assert not broken[0, 0].any()
    assert not broken[1].any()


def test_padding_is_not_written(device: EmulatedDevice) -> None:
    case = CudaCase((17, 600), 4, 2, 64)
    step = case.step(*newest(case.lens), padding=3)

    case.assert_close(launch(device, step, spare_splits=5, longer=4000), *newest(case.lens))


def test_a_step_of_padding_alone_writes_nothing(device: EmulatedDevice) -> None:
    case = CudaCase((17,), 4, 2, 64)
    step = case.step(*newest(case.lens))
    step.seq_lens[:] = 0

    assert np.isnan(launch(device, step, spare_splits=2, longer=4000).astype(np.float32)).all()


@pytest.mark.parametrize("options", [{}, {"sliding_window": 900}])
def test_bits_are_the_same_alone_among_neighbours_and_in_a_larger_grid(
    device: EmulatedDevice, options: dict[str, Any]
) -> None:
    lens = (*range(1, 80), 1500, 700, 1, 512, 2000)  # more sequences than a warp has lanes
    case = CudaCase(lens, 2, 1, 64, **options)

    together = launch(device, case.step(*newest(lens), padding=2), spare_splits=9, longer=3000)

    for seq in (0, 40, 79, 80, 82, 83):
        alone = launch(device, case.step((seq, lens[seq] - 1, lens[seq])))
        assert alone.tobytes() == together[seq].tobytes(), seq


def test_bits_are_the_same_for_every_block_size_and_placement(device: EmulatedDevice) -> None:
    outs = set()
    for block_size in (16, 64, 128):
        case = CudaCase((600,), 4, 2, 64, block_size)
        outs.add(launch(device, case.step((0, 599, 600))).tobytes())

    assert len(outs) == 1


def test_blocks_beyond_2_31_elements_are_found(tmp_path: Path) -> None:
    case = CudaCase((97,), 2, 1, 64)
    expected = launch(EmulatedDevice("fast"), case.step((0, 96, 97))).tobytes()
    case.move_apart(tmp_path)

    out = launch(EmulatedDevice("fast"), case.step((0, 96, 97)))

    assert out.tobytes() == expected


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), HEADS)
def test_bits_are_the_same_under_all_schedules(num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    lens = (97, 1500)
    case = CudaCase(lens, num_heads, num_kv_heads, head_dim, sliding_window=1200)
    step = case.step(*newest(lens))

    def run(device: EmulatedDevice) -> None:
        launch(device, step)

    assert identical_under_all_schedules(run, step.out)


@pytest.mark.parametrize(
    ("max_blocks", "spare_splits"), [(1, 0), (2, 7), (5, 0), (21, 0), (22, 7), (1000, 7)]
)
def test_bits_are_the_same_in_any_grid(device: EmulatedDevice, max_blocks: int, spare_splits: int) -> None:
    case = CudaCase((2100, 1, 700, 30, 513), 6, 2, 64, softcap=20.0)  # 11 splits, for 2 KV heads each
    step = case.step(*newest(case.lens), padding=2)
    expected = launch(device, step).tobytes()
    step.out[...] = np.nan

    out = launch(device, step, spare_splits=spare_splits, longer=9000, max_blocks=max_blocks)

    assert out.tobytes() == expected


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), HEADS)
def test_blocks_of_several_items_equal_dense_attention(
    device: EmulatedDevice, num_heads: int, num_kv_heads: int, head_dim: int
) -> None:
    case = CudaCase(LENS, num_heads, num_kv_heads, head_dim, sliding_window=1200)

    case.assert_close(launch(device, case.step(*newest(LENS)), max_blocks=2), *newest(LENS))


@pytest.mark.parametrize("max_blocks", [1, 5])
def test_blocks_of_padding_alone_write_nothing(device: EmulatedDevice, max_blocks: int) -> None:
    case = CudaCase((17,), 4, 2, 64)
    step = case.step(*newest(case.lens))
    step.seq_lens[:] = 0

    out = launch(device, step, spare_splits=9, longer=4000, max_blocks=max_blocks)

    assert np.isnan(out.astype(np.float32)).all()


@pytest.mark.parametrize("head_dim", [64, 256])
def test_bits_of_blocks_of_several_items_are_the_same_under_all_schedules(head_dim: int) -> None:
    case = CudaCase((97, 1500, 5), 4, 2, head_dim)
    step = case.step(*newest(case.lens))

    def run(device: EmulatedDevice) -> None:
        launch(device, step, spare_splits=3, max_blocks=2)

    assert identical_under_all_schedules(run, step.out)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_many_splits_are_merged(dtype: Any) -> None:
    lens = (25_000, 5000)  # more splits than are in flight at a time, and than a warp has lanes
    case = CudaCase(lens, 2, 1, 256, 128, dtype=dtype, softcap=30.0)

    case.assert_close(launch(EmulatedDevice("fast"), case.step(*newest(lens))), *newest(lens))


@pytest.mark.parametrize("position", [3, 600, 19_000])
def test_one_key_may_outweigh_all_others_by_more_than_float_holds(position: int) -> None:
    case = CudaCase((20_000,), 1, 1, 64)
    case.k[0][position] = 40 * case.q[0][-1]  # a score of some 300
    case.place(np.random.default_rng(1))

    out = launch(EmulatedDevice("fast"), case.step((0, 19_999, 20_000)))

    assert np.array_equal(out[0].astype(np.float32), case.v[0][position, 0])


def test_splits_are_counted_as_the_kernel_does() -> None:
    lens = np.array([0, 1, SPLIT, SPLIT + 1, 3 * SPLIT], np.int32)

    assert num_splits(lens, 0) == 0 + 1 + 1 + 2 + 3
    assert num_splits(lens, 1) == 0 + 1 + 1 + 1 + 1
    assert num_splits(lens, SPLIT) == 0 + 1 + 1 + 2 + 1  # a split begins with a tile, here before the window
    assert num_splits(lens, SPLIT + 1) == 0 + 1 + 1 + 2 + 2


def test_decodes_are_cut_where_they_have_more_splits_than_there_is_room_for() -> None:
    lens = np.array([3 * SPLIT, 0, 1, SPLIT + 1, 0], np.int32)

    assert cut_decodes(lens, 0, 6) == [Decodes(0, 5, 6, 3 * SPLIT)]
    assert cut_decodes(lens, 0, 5) == [Decodes(0, 3, 4, 3 * SPLIT), Decodes(3, 5, 2, SPLIT + 1)]
    assert cut_decodes(lens, 0, 3) == [Decodes(0, 2, 3, 3 * SPLIT), Decodes(2, 5, 3, SPLIT + 1)]
    assert cut_decodes(lens, 1, 3) == [Decodes(0, 5, 3, 3 * SPLIT)]
    assert cut_decodes(lens[1:2], 0, 0) == [Decodes(0, 1, 0, 0)]
    assert cut_decodes(lens[:0], 0, 3) == []


@pytest.mark.parametrize("lens", [(1,) * 40, (SPLIT + 1,) * 7, (5 * SPLIT, 1, SPLIT), (2048,)])
@pytest.mark.parametrize("sliding_window", [0, 1, SPLIT, SPLIT + 1])
def test_sequences_have_most_splits_at_most(lens: tuple[int, ...], sliding_window: int) -> None:
    splits = num_splits(np.array(lens, np.int32), sliding_window)

    assert splits <= most_splits(len(lens), max(lens), sum(lens))


@pytest.mark.parametrize("sliding_window", [1, 100, SPLIT, SPLIT + 1])
@pytest.mark.parametrize("block_size", [16, 128])
def test_sequences_without_the_blocks_that_left_the_window_have_most_splits_at_most(
    sliding_window: int, block_size: int
) -> None:
    for first in range(3 * SPLIT, 4 * SPLIT, 37):
        lens = np.arange(first, first + 5, dtype=np.int32)
        held = -(-lens // block_size) - np.maximum(lens - sliding_window, 0) // block_size  # blocks

        splits = num_splits(lens, sliding_window)

        assert splits <= most_splits(len(lens), int(lens.max()), int(held.sum()) * block_size)


def test_most_splits_are_bounded_by_cache_and_by_length() -> None:
    assert most_splits(256, 131_072, 512 * 800) == 800 + 256
    assert most_splits(256, 300, 512 * 800) == 256
    assert most_splits(1, 8192, 512 * 800) == 16


def test_blocks_at_once_are_those_that_an_sm_has_room_for() -> None:
    assert blocks_at_once(132, 64) == 4 * 132  # by registers
    assert blocks_at_once(132, 128) == 3 * 132  # by shared memory
    assert blocks_at_once(132, 256) == 2 * 132


def test_shapes_without_a_kernel_are_refused(device: EmulatedDevice) -> None:
    with pytest.raises(ValueError, match="34 query heads share 2 KV heads, 17 each"):
        launch(device, CudaCase((5,), 34, 2, 64).step((0, 4, 5)))
    with pytest.raises(ValueError, match=r"head_dim 112 has no attention kernels, .* use device='cpu'"):
        launch(device, CudaCase((5,), 2, 2, 112).step((0, 4, 5)))
    with pytest.raises(ValueError, match="dtype float32 has no attention kernels; use bfloat16 or float16"):
        launch(device, CudaCase((5,), 2, 2, 64, dtype=np.dtype(np.float32)).step((0, 4, 5)))
