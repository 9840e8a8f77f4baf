"""paged_attention_cuda: a step of decodes and prefill chunks is served by both kernels, each with its own."""

from typing import Any

import numpy as np
import pytest

from cupaged.kernels.paged_attention import paged_attention_cuda
from cupaged.kernels.paged_decode import SPLIT, cut_decodes, paged_decode_workspace
from tests.cuda_on_cpu.device import EmulatedDevice
from tests.kernels.elements import Array
from tests.kernels.paging_cuda import DTYPES, Chunk, CudaCase, Step

LENS = (97, 700, 1, 60, 333, 17)
DECODES: list[Chunk] = [(0, 96, 97), (1, 699, 700), (2, 0, 1)]
CHUNKS: list[Chunk] = [(3, 0, 60), (4, 300, 333), (5, 15, 17)]


def launch(device: EmulatedDevice, case: CudaCase, decodes: list[Chunk], chunks: list[Chunk]) -> Array:
    return attend(device, case, case.step(*decodes, *chunks), len(decodes))


def attend(
    device: EmulatedDevice, case: CudaCase, step: Step, num_decodes: int, max_splits: int = 100
) -> Array:
    decodes = cut_decodes(step.seq_lens[:num_decodes], case.sliding_window, max_splits)
    splits = max((each.max_splits for each in decodes), default=0)
    num_floats = paged_decode_workspace(splits, num_decodes, case.num_heads, case.head_dim)
    paged_attention_cuda(
        device,
        *step.places,
        query_start=step.query_start,
        **step.options,
        decodes=decodes,
        workspace=np.full(num_floats, np.nan, np.float32),
    )
    return step.out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"softcap": 5.0, "sliding_window": 90, "sinks": np.linspace(-2, 3, 6, dtype=np.float32)}]
)
def test_mixed_step_equals_dense_attention(
    device: EmulatedDevice, options: dict[str, Any], dtype: Any
) -> None:
    case = CudaCase(LENS, 6, 2, 64, dtype=dtype, **options)

    case.assert_close(launch(device, case, DECODES, CHUNKS), *DECODES, *CHUNKS)


def test_step_of_one_kind_equals_dense_attention(device: EmulatedDevice) -> None:
    case = CudaCase(LENS, 6, 2, 64)

    case.assert_close(launch(device, case, DECODES, []), *DECODES)
    case.assert_close(launch(device, case, [], CHUNKS), *CHUNKS)


def test_decodes_of_a_large_group_are_served_like_prefills(device: EmulatedDevice) -> None:
    case = CudaCase(LENS, 17, 1, 64)

    case.assert_close(launch(device, case, DECODES, CHUNKS), *DECODES, *CHUNKS)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(6, 2), (17, 1)])
def test_decodes_that_are_all_padding_write_nothing(
    device: EmulatedDevice, num_heads: int, num_kv_heads: int
) -> None:
    case = CudaCase((1, 40), num_heads, num_kv_heads, 64)
    step = case.step((0, 0, 1), (1, 10, 40))
    step.seq_lens[0] = 0

    out = attend(device, case, step, num_decodes=1)

    assert np.isnan(out[0].astype(np.float32)).all()
    case.assert_close(out[1:], (1, 10, 40))


def test_bits_do_not_depend_on_the_other_kind(device: EmulatedDevice) -> None:
    case = CudaCase(LENS, 6, 2, 64)

    mixed = launch(device, case, DECODES, CHUNKS)

    assert mixed[:3].tobytes() == launch(device, case, DECODES, []).tobytes()
    assert mixed[3:].tobytes() == launch(device, case, [], CHUNKS).tobytes()


def test_decodes_in_several_launches_have_the_same_bits(device: EmulatedDevice) -> None:
    case = CudaCase((SPLIT + 1, 3 * SPLIT, 20, 700, 60), 6, 2, 64)
    step = case.step(*((seq, n - 1, n) for seq, n in enumerate(case.lens[:4])), (4, 0, 60))

    together = attend(device, case, step, 4).tobytes()
    step.out[...] = np.nan

    assert attend(device, case, step, 4, max_splits=3).tobytes() == together
