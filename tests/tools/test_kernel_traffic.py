"""What a kernel's call moves and computes, counted by hand."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cupaged.kernels.linear import embedding_cpu, linear_cpu
from cupaged.kernels.linear_int8 import embedding_int8_cpu
from cupaged.kernels.paged_attention import paged_attention_cpu
from cupaged.kernels.rms_norm import add_rms_norm_cpu
from cupaged.kernels.rope_kv_write import rope_kv_write_cpu
from cupaged.kernels.rows import gather_rows_cpu
from tools.kernel_traffic import Traffic, arrays_of, label_of, traffic

NONE = np.empty(0, np.float32)
POOL = np.zeros((9, 3, 2, 2, 16, 8), np.uint16)  # [blocks, layers, 2, KV heads, block size, head_dim]


def floats(*shape: int) -> NDArray[np.float32]:
    return np.zeros(shape, np.float32)


def ints(*values: int) -> NDArray[np.int32]:
    return np.array(values, np.int32)


def test_matrix_product_moves_each_array_once() -> None:
    args = (floats(5, 48), np.zeros((2, 24, 16, 2), np.uint16), floats(32), floats(5, 32))

    assert traffic(linear_cpu, args) == Traffic(
        4 * 5 * 48 + 2 * 48 * 32 + 4 * 32 + 4 * 5 * 32, 2 * 5 * 48 * 32
    )
    assert label_of(linear_cpu, args) == "linear 32x48"


def test_embedding_reads_the_lines_of_its_rows_only() -> None:
    args = (ints(3, 1), np.zeros((50, 24, 16, 2), np.uint16), floats(2, 48))

    assert traffic(embedding_cpu, args) == Traffic(4 * 2 + 2 * 24 * 64 + 4 * 2 * 48, 0)
    assert label_of(embedding_cpu, args) == "embedding"


@pytest.mark.parametrize("group", [2, 4])
def test_embedding_of_bytes_reads_a_line_for_each_group_of_inputs(group: int) -> None:
    panels, scales = np.zeros((50, 48 // group, 48, group), np.int8), floats(2400)

    moved = traffic(embedding_int8_cpu, (ints(3, 1), panels, scales, floats(2, 48))).num_bytes

    assert moved == 4 * 2 + 2 * 48 // group * 64 + 4 * 2 * 48


def test_gather_reads_the_rows_that_it_writes() -> None:
    assert traffic(gather_rows_cpu, (floats(100, 8), ints(1, 5), floats(2, 8))).num_bytes == 8 + 2 * 64


def test_residual_is_read_and_written() -> None:
    args = (floats(3, 8), floats(8), 1e-5, floats(3, 8), np.zeros((3, 8), np.uint16), 0.0)

    assert traffic(add_rms_norm_cpu, args).num_bytes == 96 + 32 + 2 * 96 + 48


def test_keys_and_values_are_written_where_there_is_a_slot() -> None:
    q, k, v = floats(3, 4, 8), floats(3, 2, 8), floats(3, 2, 8)
    slots = (ints(0, 1, 2), ints(5, -1, 7))
    args = (q, k, v, POOL, 1, *slots, floats(99, 8), NONE, NONE, 1e-5, 0.0, False)

    read = q.nbytes + k.nbytes + v.nbytes + 24
    assert traffic(rope_kv_write_cpu, args).num_bytes == read + q.nbytes + 2 * 2 * (2 * 8) * 2


@pytest.mark.parametrize(
    ("new", "lengths", "pairs"),
    [((1, 1), (7, 20), 27), ((4,), (4,), 10), ((3,), (10,), 7 * 3 + 6)],
    ids=["decodes", "prefill", "chunk"],
)
def test_attention_reads_what_is_cached(new: Any, lengths: Any, pairs: int) -> None:
    q, out = floats(sum(new), 4, 8), floats(sum(new), 4, 8)
    sequences = (np.zeros((2, 99), np.int32), np.cumsum([0, *new]).astype(np.int32), ints(*lengths))
    args = (q, POOL, 1, *sequences, 0.3, 0, 0.0, NONE, out)

    numbers = 4 * (len(new) + 1 + len(lengths))
    cached = sum(lengths) * 2 * (2 * 8) * 2
    assert traffic(paged_attention_cpu, args) == Traffic(2 * q.nbytes + numbers + cached, 4 * 4 * 8 * pairs)


def test_arrays_of_a_tuple_are_told_apart() -> None:
    def kernel(x: Any, pair: Any, number: int) -> None: ...

    assert list(arrays_of(kernel, (floats(1), (floats(2), floats(3)), 4))) == ["x", "pair.0", "pair.1"]
