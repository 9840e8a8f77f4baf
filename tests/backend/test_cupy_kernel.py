"""CudaKernel: what of a launch reaches the driver, by a stand-in for CuPy."""

import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cupaged.backend.cupy_device import CudaDevice
from tests.backend.fake_cupy import FUNCTION, STREAM, FakeCuPy, in_another_thread

SOURCE = """
KERNEL(64) one(const T* x, int n, T* out, float scale, int64_t stride, int last) {
}
KERNEL(32) two() {
}
"""


@pytest.fixture
def device(fake: FakeCuPy, tmp_path: Path) -> CudaDevice:  # noqa: ARG001
    """A device whose kernels are those of SOURCE, in two.cu."""
    (tmp_path / "two.cu").write_text(SOURCE)
    return CudaDevice(tmp_path)


def array(address: int) -> Any:
    return SimpleNamespace(data=SimpleNamespace(ptr=address))


def test_arguments_reach_the_driver_as_the_kernel_declares_them(device: CudaDevice, fake: FakeCuPy) -> None:
    kernel = device.kernel("two", "one", ELEMENT="bf16")

    kernel((7, 2, 1), 64, (array(0x7F00_0000_0010), -3, array(0x20), 0.25, 2**40, 9), 1024)
    kernel((1, 1, 1), 64, (array(0x30), 1, None, 0.0, 0, 0))

    placed = (FUNCTION, 7, 2, 1, 64, 1, 1, 1024, STREAM)
    assert fake.launches[0] == (*placed, [0x7F00_0000_0010, -3, 0x20, 0.25, 2**40, 9], 0)
    assert fake.launches[1][-2] == [0x30, 1, None, 0.0, 0, 0]


def test_grid_of_no_blocks_launches_nothing(device: CudaDevice, fake: FakeCuPy) -> None:
    kernel = device.kernel("two", "two")

    for grid in ((0, 1, 1), (1, 0, 1)):
        kernel(grid, 32, ())

    assert fake.launches == []


def test_pointer_that_would_fault_on_the_gpu_is_refused(device: CudaDevice, fake: FakeCuPy) -> None:
    kernel = device.kernel("two", "one")

    with pytest.raises(AssertionError, match=r"'out'.* alignment=16\) begins at 0x38"):
        kernel((1, 1, 1), 64, (array(0x30), 1, array(0x38), 0.0, 0, 0))
    assert fake.launches == []


def test_wrong_number_or_kind_of_arguments_is_an_error(device: CudaDevice, fake: FakeCuPy) -> None:
    kernel = device.kernel("two", "one")

    for args in (
        (),
        (array(0x30), 2**31, array(0x30), 0.0, 0, 0),
        (array(0x30), 0.5, array(0x30), 0.0, 0, 0),
    ):
        with pytest.raises((IndexError, ValueError, TypeError, OverflowError, struct.error)):
            kernel((1, 1, 1), 64, args)
    assert fake.launches == []


def test_kernel_may_have_as_much_shared_memory_as_it_ever_asked_for(
    device: CudaDevice, fake: FakeCuPy
) -> None:
    kernel = device.kernel("two", "two")

    for shared_bytes in (0, 60_000, 50_000, 60_000, 70_000):
        kernel((1, 1, 1), 32, (), shared_bytes)

    carveout = ("preferred_shared_memory_carveout", 100)
    limits = [("max_dynamic_shared_size_bytes", shared_bytes) for shared_bytes in (60_000, 70_000)]
    assert fake.attributes == [limits[0], carveout, limits[1], carveout]


def test_kernel_that_two_devices_have_keeps_what_the_one_with_more_needs(
    device: CudaDevice, fake: FakeCuPy, tmp_path: Path
) -> None:
    kernel, same = device.kernel("two", "two"), CudaDevice(tmp_path).kernel("two", "two")

    for each, shared_bytes in ((kernel, 60_000), (same, 50_000), (kernel, 60_000), (same, 1000)):
        each((1, 1, 1), 32, (), shared_bytes)

    assert [launch[7] for launch in fake.launches] == [60_000, 50_000, 60_000, 1000]


def test_thread_that_never_met_the_gpu_launches(device: CudaDevice, fake: FakeCuPy) -> None:
    kernel = device.kernel("two", "two")

    in_another_thread(lambda: kernel((1, 1, 1), 32, (), 60_000))

    assert len(fake.launches) == 1
