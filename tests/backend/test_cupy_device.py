"""CudaDevice by a stand-in for CuPy: memory, copies, events, graphs; what is missing or does not fit."""

import sys
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupaged.backend.cupy_device import CudaDevice
from cupaged.backend.device import ALIGNMENT, Device
from cupaged.kernels.nvrtc import CudaUnavailable
from tests.backend.fake_cupy import CUDARuntimeError, FakeCuPy, in_another_thread


@pytest.fixture
def device(fake: FakeCuPy) -> Device:  # noqa: ARG001
    """A device on the second GPU."""
    return CudaDevice()


def pinned(device: Device, values: Any) -> Any:
    """Return the values in pinned memory."""
    values = np.asarray(values)
    host = device.pin(values.nbytes).view(values.dtype).reshape(values.shape)
    host[...] = values
    return host


def test_gpu_is_the_one_that_was_current(device: Device) -> None:
    assert (device.name, device.num_sms) == ("GPU 1", 101)
    assert isinstance(device, CudaDevice)
    assert device.arch == "sm_90"


def test_memory_is_taken_to_the_byte_and_goes_back_with_its_last_view(device: Device, fake: FakeCuPy) -> None:
    memory = device.allocate(1001)
    assert (memory.shape, memory.dtype, device.address(memory) % ALIGNMENT) == ((1001,), np.uint8, 0)
    view = device.view(memory, 8, (3, 2), np.float32)[1:]

    del memory
    assert fake.allocated == [1001]
    del view
    assert fake.allocated == []


def test_memory_that_is_not_there_is_told_in_bytes(device: Device, fake: FakeCuPy) -> None:
    fake.free_bytes = 4096
    held = device.allocate(1024)

    message = r"no room for 5000 bytes of GPU memory, 3072 are free; .*lower gpu_memory_utilization"
    with pytest.raises(ValueError, match=message):
        device.allocate(5000)
    assert device.memory_info() == (3072, 1 << 30)
    assert held.size == 1024


def test_another_error_of_cuda_stays_what_it_is(device: Device, fake: FakeCuPy) -> None:
    fake.error = CUDARuntimeError(700)

    with pytest.raises(CUDARuntimeError, match="CUDA error 700"):
        device.allocate(2 << 20)


def test_pinned_memory_is_exact_writable_and_goes_back(device: Device, fake: FakeCuPy) -> None:
    words = device.pin(1000)[:8].view(np.int32)
    words[...] = 7

    assert fake.pinned == [1000]
    assert words.tolist() == [7, 7]
    del words
    assert fake.pinned == []
    with pytest.raises(ValueError, match=r"2097152 bytes of page-locked host memory, \d+ are free"):
        device.pin(2 << 20)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32, np.int32])
def test_view_is_a_packed_array_at_its_offset(device: Device, dtype: Any) -> None:
    memory = device.allocate(1024)

    view = device.view(memory[256:], 256, (4, 3), dtype)

    assert (view.shape, view.dtype) == ((4, 3), dtype)
    assert device.address(view) == device.address(memory) + 512
    assert device.address(view[1:]) == device.address(view) + 3 * view.dtype.itemsize


@pytest.mark.parametrize(("offset", "count"), [(-4, 1), (0, 257), (1000, 7)])
def test_view_beyond_its_memory_is_refused(device: Device, offset: int, count: int) -> None:
    with pytest.raises(AssertionError, match=f"bytes {offset} to {offset + 4 * count} of 1024"):
        device.view(device.allocate(1024), offset, (count,), np.float32)


def test_copies_run_in_order_once_an_event_behind_them_is_waited_for(device: Device) -> None:
    source, target = pinned(device, np.arange(6.0)), pinned(device, np.zeros(2))
    array = device.view(device.allocate(48), 0, (6,), np.float64)

    device.to_device(array, source)
    device.to_host(target, array[2:4])
    event = device.record()

    assert target.tolist() == [0, 0]
    event.synchronize()
    assert target.tolist() == [2, 3]


def test_copy_of_strided_or_unequal_arrays_is_refused(device: Device) -> None:
    source = pinned(device, np.zeros((4, 4)))
    array = device.view(device.allocate(128), 0, (4, 4), np.float64)

    with pytest.raises(AssertionError, match=r"source of shape \(4, 2\) has strides"):
        device.to_device(array[:2], source[:, :2])
    with pytest.raises(AssertionError, match=r"target of shape \(4, 2\) has strides"):
        device.to_host(source[:, :2], array[:2])
    with pytest.raises(AssertionError, match="64 bytes to 128"):
        device.to_device(array, source[:2])


def test_empty_copy_puts_nothing_on_the_stream(device: Device, fake: FakeCuPy) -> None:
    array, host = device.allocate(16), device.pin(16)

    device.to_device(array[:0], host[:0])

    assert fake.queue == []


def test_events_neither_spin_nor_keep_times(device: Device, fake: FakeCuPy) -> None:
    device.record()

    assert [(event.block, event.disable_timing) for event in fake.events] == [(True, True)]


def test_seconds_are_those_between_two_events_around_the_work(device: Device, fake: FakeCuPy) -> None:
    fake.elapsed_ms = 250.0
    states: list[str] = []

    def work() -> None:
        fake.put(lambda: states.extend(event.state for event in fake.events))

    assert device.seconds(work) == 0.25
    assert states == ["done", "made"]


def test_capture_runs_nothing_and_a_graph_runs_it_as_often_as_launched(
    device: Device, fake: FakeCuPy
) -> None:
    source, target = pinned(device, [1]), pinned(device, [0])
    array = device.view(device.allocate(8), 0, (1,), source.dtype)

    def work() -> None:
        device.to_device(array, source)
        device.to_host(target, array)

    graph = device.capture(work)
    device.record().synchronize()
    assert (target.tolist(), fake.uploads) == ([0], 1)
    for value in (2, 3):
        source[0] = value
        graph.launch()
        device.record().synchronize()
        assert target.tolist() == [value]


def test_work_that_fails_leaves_no_stream_that_captures(device: Device, fake: FakeCuPy) -> None:
    def work() -> None:
        fake.error = CUDARuntimeError(901)  # of the capture that the failure spoiled
        raise KeyError("work")

    with pytest.raises(KeyError, match="work"):
        device.capture(work)
    assert fake.recording is None


def test_graph_that_finds_no_memory_says_so(device: Device, fake: FakeCuPy) -> None:
    fake.error = CUDARuntimeError(2)

    with pytest.raises(ValueError, match=r"one more CUDA graph, \d+ are free; .*enforce_eager"):
        device.capture(lambda: None)


def use_all(device: Device) -> None:
    """Do everything that needs a GPU: the stand-in asserts that it is the stream's."""
    array, host = device.allocate(16), device.pin(16)
    device.to_device(array, host)
    device.to_host(host, array)
    device.record().synchronize()
    device.seconds(lambda: None)
    device.capture(lambda: device.to_device(array, host)).launch()
    device.kernel("rows", "gather_rows", ELEMENT="bf16")
    device.memory_info()


def test_thread_that_never_met_the_gpu_uses_it(device: Device) -> None:
    in_another_thread(lambda: use_all(device))


@pytest.mark.parametrize(
    "use",
    [
        lambda device, _: device.allocate(16),
        lambda device, _: device.pin(16),
        lambda device, _: device.record(),
        lambda device, _: device.seconds(lambda: None),
        lambda device, _: device.capture(lambda: None),
        lambda device, _: device.kernel("rows", "gather_rows", ELEMENT="bf16"),
        lambda device, arrays: device.to_device(*arrays),
        lambda device, arrays: device.to_host(*reversed(arrays)),
    ],
)
def test_gpu_that_something_else_chose_in_this_thread_is_not_taken(
    device: Device, fake: FakeCuPy, use: Callable[[Device, Any], Any]
) -> None:
    arrays = device.allocate(16), device.pin(16)
    fake.set_current(0)

    use(device, arrays)

    assert fake.thread.gpu == 1


def test_cublaslt_is_found_once_the_gpu_is_current(
    device: Device, fake: FakeCuPy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cupaged.backend.cublaslt.load_library", lambda: fake.thread.gpu)
    fake.set_current(0)

    assert device.cublaslt == 1


def test_kernel_is_compiled_for_this_gpu_and_loaded_once(device: Device, fake: FakeCuPy) -> None:
    first, again = (device.kernel("rows", "gather_rows", ELEMENT="bf16", N=64) for _ in range(2))
    other = device.kernel("rows", "gather_rows", ELEMENT="bf16", N=80)

    assert first is again is not other
    assert fake.compiled == [("rows.cu", "sm_90", {"ELEMENT": "bf16", "N": n}) for n in (64, 80)]


@pytest.mark.parametrize(
    ("machine", "message"),
    [
        ({"driver_version": 0}, r"no NVIDIA driver is installed; install one, or use device='cpu'"),
        (
            {"driver_version": 12040},
            r"CuPy is for CUDA 13, but the driver supports CUDA 12.4.*\[cuda12\]",
        ),
        (
            {"driver_version": 12080, "cupy_version": 12090},
            r"NVRTC is for CUDA 13, but the driver supports CUDA 12.8 at most; install.*update the driver",
        ),
        ({"capability": ""}, r"no GPU can be used: cudaErrorNoDevice.*use device='cpu'"),
        ({"capability": "75"}, r"compute capability 7.5, but kernels need 8.0 or newer; use device='cpu'"),
    ],
)
def test_what_does_not_fit_is_said_with_the_way_out(
    fake: FakeCuPy, machine: dict[str, Any], message: str
) -> None:
    vars(fake).update(machine)

    with pytest.raises(CudaUnavailable, match=message):
        CudaDevice()


def test_gpu_without_memory_for_a_context_is_none(fake: FakeCuPy, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Any:
        raise CUDARuntimeError(2)

    monkeypatch.setattr(fake.cupy.cuda.runtime, "memGetInfo", fail)

    with pytest.raises(CudaUnavailable, match=r"no GPU can be used: cudaErrorMemoryAllocation.*device='cpu'"):
        CudaDevice()


def test_newer_minor_version_of_the_compiler_is_fine(fake: FakeCuPy) -> None:
    fake.nvrtc_version = (13, 2)

    assert CudaDevice().arch == "sm_90"


def test_cubin_that_the_driver_does_not_load_says_by_what_it_was_made(device: Device, fake: FakeCuPy) -> None:
    fake.error = RuntimeError("CUDA_ERROR_NO_BINARY_FOR_GPU")

    with pytest.raises(
        CudaUnavailable,
        match=r"gather_rows of rows.cu, compiled by NVRTC 13.0 for sm_90, does not load: CUDA",
    ):
        device.kernel("rows", "gather_rows")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ModuleNotFoundError("No module named 'cupy'", name="cupy"), "CuPy is not installed"),
        (ImportError("libnvrtc.so.13: cannot open", name="cupy._core"), "CuPy does not load: libnvrtc.so.13"),
    ],
)
def test_missing_or_broken_cupy_names_the_extras(
    monkeypatch: pytest.MonkeyPatch, error: ImportError, message: str
) -> None:
    class Finder:
        @staticmethod
        def find_spec(name: str, *_: Any) -> None:
            if name == "cupy":
                raise error

    monkeypatch.setattr("sys.meta_path", [Finder])
    monkeypatch.delitem(sys.modules, "cupy", raising=False)

    with pytest.raises(CudaUnavailable, match=rf"{message}.*; install cupaged\[cuda13\]"):
        CudaDevice()
