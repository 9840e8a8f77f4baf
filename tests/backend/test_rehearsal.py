"""Rehearsal: arrays without memory look like real ones, and kernels are loaded once they are known."""

import numpy as np
import pytest

from cupaged.backend.rehearsal import Rehearsal, outline
from cupaged.kernels.launch import is_packed, row_stride
from cupaged.kernels.rows import gather_rows_cuda
from tests.cuda_on_cpu.gpu import EmulatedGpu


@pytest.mark.parametrize("shape", [(), (5,), (0, 3), (3, 5, 7), (1 << 20, 1 << 20)])
def test_outline_looks_packed(shape: tuple[int, ...]) -> None:
    array = outline(shape, np.float16)

    assert array.shape == shape
    assert array.dtype == np.float16
    assert is_packed(array)


def test_outline_can_be_cut_as_a_real_array() -> None:
    array, real = outline((6, 40), np.float32), np.zeros((6, 40), np.float32)

    for x, y in ((array[:, 8:24].reshape(6, 2, 8), real[:, 8:24].reshape(6, 2, 8)), (array[2:], real[2:])):
        assert (x.shape, x.strides) == (y.shape, y.strides)
    assert row_stride(array[:, 8:24]) == 40


def test_what_was_asked_for_is_loaded() -> None:
    rehearsal, gpu = Rehearsal(), EmulatedGpu()

    x, index = gpu.array(np.ones((9, 8), np.float16)), gpu.array(np.arange(4, dtype=np.int32))
    out = gpu.array(np.zeros((4, 8), np.float16))
    gather_rows_cuda(
        rehearsal, outline(x.shape, x.dtype), outline(index.shape, index.dtype), outline(out.shape, out.dtype)
    )

    rehearsal.load(gpu)

    gpu.freeze()
    gather_rows_cuda(gpu, x, index, out)
    assert (gpu.read(out) == 1).all()


def test_rehearsed_launch_is_checked_as_a_real_one() -> None:
    with pytest.raises(ValueError, match="hidden_size is 9, but CUDA kernels"):
        gather_rows_cuda(
            Rehearsal(), outline((9, 9), np.float16), outline((4,), np.int32), outline((4, 9), np.float16)
        )
