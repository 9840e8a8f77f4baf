"""Mode count on kernels whose counts are known by hand."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cuda_on_cpu.count import Count, CountingDevice, Event, KernelCounts

SOURCE = """
#include "gpu.cuh"

KERNEL(32) read_strided(float* out, const float* x, int stride, int offset) {
  out[threadIdx.x] = x[threadIdx.x * stride + offset];
}

KERNEL(64) copy_units(uint4* out, const uint4* x) {
  const int unit = blockIdx.x * 64 + threadIdx.x;
  store16(out + unit, load16(x + unit));
}

KERNEL(32) share_floats(float* out, int stride) {
  SHARED_ARRAY(float, s, [33 * 32]);
  s[threadIdx.x * stride] = 1.0f;
  __syncthreads();
  out[threadIdx.x] = s[threadIdx.x * stride];
}

KERNEL(32) share_pairs(float* out, int stride) {
  SHARED_ARRAY(float2, s, [33 * 32]);
  s[threadIdx.x * stride] = make_float2(1.0f, 2.0f);
  __syncthreads();
  out[threadIdx.x] = s[threadIdx.x * stride].x;
}

KERNEL(32) share_units(uint4* out, const uint4* x, int stride) {
  SHARED_ARRAY(uint4, s, [4 * 32]);
  store16(s + threadIdx.x * stride, load16(x + threadIdx.x));
  __syncthreads();
  store16(out + threadIdx.x, *(s + threadIdx.x * stride));
}

KERNEL(32) load_rows(uint32_t* out, const bf16* x, int row_stride) {
  SHARED_ARRAY(bf16, s, [16 * 72]);
  for (int i = threadIdx.x; i < 16 * 8; i += WARP)
    copy_async(s + i / 8 * row_stride + i % 8 * 8, x + i * 8, i / 8 >= 5);  // the first time no lane reads
  commit_copies();
  wait_copies<0>();
  __syncwarp();
  uint32_t r[4];
  load_matrices(r, s + threadIdx.x % 16 * row_stride + threadIdx.x / 16 * 8);
  float c[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  multiply_bf16(c, r, r[0], r[1]);
  out[threadIdx.x] = __float_as_uint(warp_sum(c[0]));
}

KERNEL(32) leave_early(int* out, const int* x) {
  int sum = 0;
  for (int i = 0; i <= threadIdx.x; i++) sum += x[i * 32 + threadIdx.x];
  out[threadIdx.x] = sum;
}

KERNEL(32) skip_one(int* out, const int* x, int n, int whole_block) {
  int sum = 0;
  for (int i = 0; i < n; i++) {
    if (i > 0 || threadIdx.x > 0) sum += x[i * 32 + threadIdx.x];
    if (whole_block) {
      __syncthreads();
    } else {
      __syncwarp();
    }
  }
  out[threadIdx.x] = sum;
}

KERNEL(32) read_twice(float* out, float* x) {
  const float first = x[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = first + x[threadIdx.x];
}

KERNEL(32) copy_rounds(const uint4* x, int n) {
  SHARED_ARRAY(uint4, s, [32]);
  for (int i = 0; i < n; i++) {
    copy_async(s + threadIdx.x, x + threadIdx.x, true);
    commit_copies();
    wait_copies<0>();
  }
}

struct Eight { float x[8]; };

KERNEL(32) copy_structs(Eight* out, const Eight* x) { out[threadIdx.x] = x[threadIdx.x]; }

KERNEL(48) count_up(int* out, const int* x) {
  if (__any_sync(threadIdx.x < 32 ? ALL_LANES : 0xffffu, x[threadIdx.x] > 0)) atomicAdd(out, 1);
  __syncthreads();
}
"""


def line_of(text: str) -> str:
    """Return where the first line of SOURCE that has `text` is."""
    return f"hand.cu:{[text in line for line in SOURCE.splitlines()].index(True) + 1}"


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sources")
    (folder / "hand.cu").write_text(SOURCE)
    return folder


@pytest.fixture
def device(sources: Path) -> CountingDevice:
    return CountingDevice(sources=sources)


def launch(device: CountingDevice, kernel: str, block: int, *args: Any, grid: int = 1) -> KernelCounts:
    """Launch a kernel and return its counts."""
    device.kernel("hand", kernel)((grid, 1, 1), block, args)
    return device.counts[kernel]


def floats(size: int) -> np.ndarray[Any, Any]:
    return np.ones(size, np.float32)


@pytest.mark.parametrize(
    ("stride", "offset", "sectors", "ideal"),
    [(1, 0, 4, 4), (2, 0, 8, 4), (32, 0, 32, 4), (0, 0, 1, 1), (1, 1, 5, 4), (1, 8, 4, 4), (-1, 31, 4, 4)],
)
def test_sectors_of_a_read(
    device: CountingDevice, stride: int, offset: int, sectors: int, ideal: int
) -> None:
    counts = launch(device, "read_strided", 32, floats(32), floats(1024), stride, offset)

    read = counts.total(Event.GLOBAL_LOAD)
    assert read == Count(1, 128, sectors, ideal, frozenset({4}))
    assert read.efficiency == ideal / sectors
    assert counts.bytes_moved == 32 * (sectors + 4)


def test_a_part_of_an_array_counts_where_it_lies_in_the_whole(device: CountingDevice) -> None:
    whole = floats(1024)

    aligned = launch(device, "read_strided", 32, floats(32), whole[8:], 1, 0).total(Event.GLOBAL_LOAD).moved
    device.reset_counts()
    misaligned = (
        launch(device, "read_strided", 32, floats(32), whole[9:], 1, 0).total(Event.GLOBAL_LOAD).moved
    )

    assert (aligned, misaligned) == (4, 5)


def test_units_of_16_bytes_are_one_access_each_at_the_line_that_calls(device: CountingDevice) -> None:
    x = np.zeros((3 * 64, 4), np.uint32)

    counts = launch(device, "copy_units", 64, x.copy(), x, grid=3)

    for event in (Event.GLOBAL_LOAD, Event.GLOBAL_STORE):
        [(source, found)] = counts.at(event).items()
        assert source.endswith(f" < {line_of('load16(x + unit)')}")
        assert found == Count(6, 3072, 96, 96, frozenset({16}))


def test_what_is_read_again_can_be_told_from_what_is_read_once(device: CountingDevice) -> None:
    counts = launch(device, "read_twice", 32, floats(32), floats(32), grid=5)

    assert counts.bytes_moved == 5 * 3 * 128
    assert counts.block_read_bytes == 5 * 128
    assert counts.launch_bytes == 2 * 128


@pytest.mark.parametrize(
    ("kernel", "stride", "wavefronts", "ideal"),
    [
        ("share_floats", 1, 1, 1),
        ("share_floats", 2, 2, 1),
        ("share_floats", 32, 32, 1),
        ("share_floats", 33, 1, 1),
        ("share_pairs", 1, 2, 2),
        ("share_pairs", 2, 4, 2),
        ("share_pairs", 32, 32, 2),
    ],
)
def test_wavefronts_of_a_shared_store(
    device: CountingDevice, kernel: str, stride: int, wavefronts: int, ideal: int
) -> None:
    counts = launch(device, kernel, 32, floats(32), stride).total(Event.SHARED_STORE)

    assert (counts.requests, counts.moved, counts.ideal) == (1, wavefronts, ideal)


def test_lanes_that_want_the_same_word_share_it(device: CountingDevice) -> None:
    counts = launch(device, "share_floats", 32, floats(32), 0)

    assert counts.total(Event.SHARED_LOAD) == Count(1, 128, 1, 1, frozenset({4}))


@pytest.mark.parametrize(("stride", "wavefronts"), [(1, 4), (2, 8), (3, 4), (4, 16)])
def test_shared_units_go_by_the_quarter_warp(device: CountingDevice, stride: int, wavefronts: int) -> None:
    x = np.zeros((32, 4), np.uint32)

    counts = launch(device, "share_units", 32, x.copy(), x, stride)

    for event in (Event.SHARED_STORE, Event.SHARED_LOAD):
        assert counts.total(event) == Count(1, 512, wavefronts, 4, frozenset({16}))


@pytest.mark.parametrize(("row_stride", "wavefronts"), [(64, 32), (72, 4)])
def test_matrix_rows_conflict_unless_padded(device: CountingDevice, row_stride: int, wavefronts: int) -> None:
    x = np.zeros((16, 64), np.uint16)

    counts = launch(device, "load_rows", 32, np.zeros(32, np.uint32), x, row_stride)

    assert counts.at(Event.LOAD_MATRICES) == {
        line_of("load_matrices(r"): Count(1, 512, wavefronts, 4, frozenset({16}))
    }


def test_async_copies_read_sectors_and_write_banks(device: CountingDevice) -> None:
    x = np.zeros((16, 64), np.uint16)

    counts = launch(device, "load_rows", 32, np.zeros(32, np.uint32), x, 72)

    assert counts.total(Event.COPY_SOURCE) == Count(
        3, 11 * 128, 44, 44, frozenset({16})
    )  # of 16 rows 5 are zeros
    assert counts.total(Event.COPY_DESTINATION) == Count(4, 16 * 128, 16, 16, frozenset({16}))
    assert counts.copy_bytes == 16 * 128


def test_async_copies_are_under_way_until_waited_for(device: CountingDevice) -> None:
    x = np.zeros((32, 4), np.uint32)

    counts = launch(device, "copy_rounds", 32, x, 3)
    launch(device, "copy_rounds", 32, x, 0)

    assert counts.copy_bytes == 512


def test_operations_of_a_warp(device: CountingDevice) -> None:
    counts = launch(device, "load_rows", 32, np.zeros(32, np.uint32), np.zeros((16, 64), np.uint16), 72)

    found = {event: counts.total(event).requests for event in Event}
    assert found[Event.MULTIPLY] == 1
    assert counts.flops == 4096
    assert found[Event.SHUFFLE] == 5
    assert found[Event.WARP_BARRIER] == 1
    assert found[Event.BARRIER] == 0
    [source] = counts.at(Event.SHUFFLE)
    assert source.startswith("gpu.cuh:")
    assert source.endswith(f" < {line_of('warp_sum')}")


def test_lanes_that_leave_a_loop_are_idle_in_its_later_requests(device: CountingDevice) -> None:
    x = np.zeros((32, 32), np.int32)

    counts = launch(device, "leave_early", 32, np.zeros(32, np.int32), x).total(Event.GLOBAL_LOAD)

    assert counts.requests == 32
    assert counts.bytes == 4 * 32 * 33 // 2
    assert counts.moved == 4 * 8 + 3 * 8 + 2 * 8 + 8


@pytest.mark.parametrize("whole_block", [0, 1])
def test_requests_begin_anew_where_the_warp_meets(device: CountingDevice, whole_block: int) -> None:
    x, out = np.zeros((2, 32), np.int32), np.zeros(32, np.int32)

    counts = launch(device, "skip_one", 32, out, x, 2, whole_block).total(Event.GLOBAL_LOAD)

    assert counts == Count(2, 4 * 63, 8, 8, frozenset({4}))  # paired across iterations: 9 sectors


def test_a_struct_goes_by_16_bytes(device: CountingDevice) -> None:
    x = floats(8 * 32).reshape(32, 8)

    counts = launch(device, "copy_structs", 32, x.copy(), x).total(Event.GLOBAL_LOAD)

    assert counts == Count(2, 1024, 64, 32, frozenset({16}))


def test_barriers_count_by_block_and_votes_and_atomics_by_warp(device: CountingDevice) -> None:
    counts = launch(device, "count_up", 48, np.zeros(1, np.int32), np.ones(48, np.int32), grid=2)

    assert counts.total(Event.BARRIER).requests == 2
    assert counts.total(Event.VOTE).requests == 4
    assert counts.total(Event.GLOBAL_ATOMIC) == Count(4, 4 * 48 * 2, 0, 0, frozenset({4}))


def test_launches_add_up_until_reset(device: CountingDevice) -> None:
    once = launch(device, "read_strided", 32, floats(32), floats(32), 1, 0).total(Event.GLOBAL_LOAD)
    twice = launch(device, "read_strided", 32, floats(32), floats(32), 1, 0)

    assert twice.launches == 2
    assert twice.total(Event.GLOBAL_LOAD) == once + once
    device.reset_counts()
    assert device.counts == {}
