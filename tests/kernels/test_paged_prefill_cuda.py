"""paged_prefill.cu against dense float64 and its twin, and the sameness of a query's bits in any company.

Tolerances are CudaCase's, which follow from where the kernel rounds: see assert_close.
"""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupaged.kernels.paged_prefill import MAX_SLOTS, paged_prefill_cuda
from tests.cuda_on_cpu.device import EmulatedDevice
from tests.kernels.elements import BF16, F16, Array
from tests.kernels.paging_cuda import DTYPES, Chunk, CudaCase, Step
from tests.kernels.schedules import identical_under_all_schedules

LENS = (1, 15, 16, 17, 63, 64, 65, 97)
# Query and KV heads by head_dim: together groups of 1, 3, 4, 5, 8 and 24.
HEADS = [(4, 1, 64), (24, 1, 64), (3, 1, 80), (10, 2, 96), (8, 1, 128), (2, 2, 128), (4, 1, 192), (3, 3, 256)]


def whole(lens: tuple[int, ...]) -> list[Chunk]:
    """Return each sequence as one chunk."""
    return [(seq, 0, n) for seq, n in enumerate(lens)]


def launch(device: EmulatedDevice, step: Step, first_seq: int = 0) -> Array:
    paged_prefill_cuda(
        device,
        *step.places,
        query_start=step.query_start,
        first_seq=first_seq,
        **step.options,
    )
    return step.out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), HEADS)
def test_equals_dense_attention(
    device: EmulatedDevice, num_heads: int, num_kv_heads: int, head_dim: int, dtype: Any
) -> None:
    case = CudaCase(LENS, num_heads, num_kv_heads, head_dim, dtype=dtype)

    out = launch(device, case.step(*whole(LENS)))

    case.assert_close(out, *whole(LENS))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_its_twin(device: EmulatedDevice, dtype: Any) -> None:
    case = CudaCase(LENS, 8, 2, 64, dtype=dtype, softcap=20.0, sliding_window=70)
    twin = np.concatenate(case.attend(*whole(LENS)))

    out = launch(device, case.step(*whole(LENS)))

    error = np.abs(out.astype(np.float32).reshape(twin.shape) - twin)
    limit = {BF16: 4e-2, F16: 6e-3}[dtype]  # the largest value, over 4, times what two roundings are off by
    assert error.max() < limit, f"max error {error.max():.2e}, mean {error.mean():.2e}"


@pytest.mark.parametrize("block_size", [32, 64, 128])
def test_every_block_size_equals_dense_attention(device: EmulatedDevice, block_size: int) -> None:
    case = CudaCase((300, 97), 4, 2, 64, block_size)

    case.assert_close(launch(device, case.step(*whole(case.lens))), *whole(case.lens))


@pytest.mark.parametrize("head_dim", [64, 256])
def test_chunks_that_begin_anywhere_equal_dense_attention(device: EmulatedDevice, head_dim: int) -> None:
    case = CudaCase((300, 97, 65, 16, 200, 130), 6, 2, head_dim)
    chunks = [(0, 250, 300), (1, 64, 97), (2, 1, 65), (3, 15, 16), (4, 0, 33), (5, 127, 129)]

    case.assert_close(launch(device, case.step(*chunks)), *chunks)


def test_decodes_in_front_are_left_alone(device: EmulatedDevice) -> None:
    case = CudaCase((40, 17, 97, 130), 4, 2, 64)
    chunks = [(0, 39, 40), (1, 16, 17), (2, 20, 97), (3, 100, 130)]

    out = launch(device, case.step(*chunks, padding=2), first_seq=2)

    assert np.isnan(out[:2].astype(np.float32)).all()
    case.assert_close(out[2:], *chunks[2:])


@pytest.mark.parametrize("sliding_window", [1, 15, 16, 17, 63, 64, 65, 129, 5000])
def test_sliding_window_cuts_as_dense_attention_does(device: EmulatedDevice, sliding_window: int) -> None:
    case = CudaCase((300, 17), 3, 1, 64, 32, sliding_window=sliding_window)
    chunks = [(0, 130, 300), (1, 0, 17)]

    case.assert_close(launch(device, case.step(*chunks)), *chunks)


@pytest.mark.parametrize("head_dim", [64, 256])  # KV tiles of 64 and of 32 tokens
@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
@pytest.mark.parametrize("sliding_window", [1, 17, 70, 150])
def test_blocks_that_left_the_window_are_not_read(
    device: EmulatedDevice, sliding_window: int, block_size: int, head_dim: int
) -> None:
    case = CudaCase((400, 300, 257), 2, 1, head_dim, block_size, sliding_window=sliding_window)
    chunks = [(0, 330, 400), (1, 299, 300), (2, 250, 255)]

    case.assert_close(launch(device, case.step(*chunks)), *chunks)


def test_softcap_and_sinks_equal_dense_attention(device: EmulatedDevice) -> None:
    sinks = np.array([-1.0, 0.5, 3.0, 20.0, 0.0, -30.0], np.float32)
    case = CudaCase((97, 150), 6, 2, 80, softcap=2.5, sinks=sinks, sliding_window=100)

    case.assert_close(launch(device, case.step(*whole(case.lens))), *whole(case.lens))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_scores_do_not_overflow(device: EmulatedDevice, dtype: Any) -> None:
    case = CudaCase((140,), 2, 2, 64, dtype=dtype)
    case.q = [q * 100 for q in case.q]
    case.place(np.random.default_rng(1))

    out = launch(device, case.step(*whole(case.lens))).astype(np.float32)

    error = np.abs(out - case.dense().reshape(out.shape))
    assert error.max() < 0.05, error.max()


def test_broken_key_shows_in_every_query_that_sees_it_and_in_no_other(device: EmulatedDevice) -> None:
    case = CudaCase((140, 50), 2, 1, 64, sliding_window=40)
    case.k[0][70] = np.nan
    case.place(np.random.default_rng(1))

    out = launch(device, case.step(*whole(case.lens)))

    broken = np.isnan(out.astype(np.float32))
    assert np.flatnonzero(broken.all(1)).tolist() == list(range(70, 110))
    assert np.array_equal(broken.all(1), broken.any(1))


def test_padding_is_not_written(device: EmulatedDevice) -> None:
    case = CudaCase((17, 150), 4, 2, 64)
    step = case.step(
        *whole(case.lens), padding=40
    )  # more than a warp of sequences, and tokens that are of none

    case.assert_close(launch(device, step), *whole(case.lens))


def test_a_step_of_padding_alone_writes_nothing(device: EmulatedDevice) -> None:
    case = CudaCase((17,), 4, 2, 64)
    step = case.step(*whole(case.lens))
    step.seq_lens[:] = 0
    step.query_start[:] = 0

    assert np.isnan(launch(device, step).astype(np.float32)).all()


@pytest.mark.parametrize("options", [{}, {"sliding_window": 50}, {"softcap": 3.0, "sliding_window": 100}])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(6, 2, 64), (5, 1, 128), (4, 2, 256)])
def test_query_has_the_same_bits_for_every_chunk_size(
    num_heads: int, num_kv_heads: int, head_dim: int, options: dict[str, Any]
) -> None:
    device = EmulatedDevice("fast")
    case = CudaCase((200,), num_heads, num_kv_heads, head_dim, **options)
    expected = launch(device, case.step((0, 0, 200))).tobytes()

    for size in (7, 64, 97):
        starts = range(0, 200, size)
        parts = [launch(device, case.step((0, start, min(start + size, 200)))) for start in starts]
        assert b"".join(part.tobytes() for part in parts) == expected, size


@pytest.mark.parametrize("options", [{}, {"sliding_window": 90}])
def test_query_has_the_same_bits_among_neighbours(device: EmulatedDevice, options: dict[str, Any]) -> None:
    lens = (*range(1, 40), 150, 97, 64)  # more sequences than a warp has lanes
    case = CudaCase(lens, 4, 2, 64, **options)
    step = case.step(*whole(lens), padding=2)

    together = launch(device, step)

    for seq in (0, 31, 32, 38, 39, 40, 41):
        alone = launch(device, case.step((seq, 0, lens[seq])))
        assert alone.tobytes() == together[step.query_start[seq] :][: lens[seq]].tobytes(), seq


def test_bits_are_the_same_for_every_block_size_and_placement(device: EmulatedDevice) -> None:
    outs = set()
    for block_size in (16, 64, 128):
        case = CudaCase((200,), 4, 2, 64, block_size)
        outs.add(launch(device, case.step((0, 30, 200))).tobytes())

    assert len(outs) == 1


def test_blocks_beyond_2_31_elements_are_found(tmp_path: Path) -> None:
    case = CudaCase((97,), 2, 1, 64)
    expected = launch(EmulatedDevice("fast"), case.step((0, 30, 97))).tobytes()
    case.move_apart(tmp_path)

    out = launch(EmulatedDevice("fast"), case.step((0, 30, 97)))

    assert out.tobytes() == expected


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), HEADS)
def test_bits_are_the_same_under_all_schedules(num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    case = CudaCase((97, 70), num_heads, num_kv_heads, head_dim, sliding_window=80)
    step = case.step((0, 20, 97), (1, 0, 70))

    def run(device: EmulatedDevice) -> None:
        launch(device, step)

    assert identical_under_all_schedules(run, step.out)


def test_a_step_without_prefills_launches_nothing(device: EmulatedDevice) -> None:
    case = CudaCase((40, 17), 4, 2, 64)

    out = launch(device, case.step((0, 39, 40), (1, 16, 17)), first_seq=2)

    assert np.isnan(out.astype(np.float32)).all()


def test_shapes_without_a_kernel_are_refused(device: EmulatedDevice) -> None:
    with pytest.raises(ValueError, match=r"head_dim 112 has no attention kernels, .* use device='cpu'"):
        launch(device, CudaCase((5,), 2, 2, 112).step((0, 0, 5)))
    with pytest.raises(ValueError, match="dtype float32 has no attention kernels"):
        launch(device, CudaCase((5,), 2, 2, 64, dtype=np.dtype(np.float32)).step((0, 0, 5)))
    step = CudaCase((5,), 2, 2, 64).step((0, 0, 5))
    num_tokens = MAX_SLOTS * 128
    many = np.broadcast_to(np.zeros((), ml_dtypes.bfloat16), (num_tokens, 2, 64))
    with pytest.raises(ValueError, match=f"a step of {num_tokens} tokens .* lower --max-num-batched-tokens"):
        launch(device, step._replace(q=many))
