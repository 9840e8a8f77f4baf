"""CudaDevice against stand-ins of CuPy: what reaches the driver, what is missing or does not fit."""

import ctypes
import struct
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cupaged.backend.cupy_device import CudaDevice
from cupaged.kernels.compile import Compiled
from cupaged.kernels.nvrtc import CudaUnavailable

SOURCE = """
KERNEL(64) one(const T* x, int n, T* out, float scale, int64_t stride, int last) {
}
KERNEL(32) two() {
}
"""
FIELDS: tuple[Any, ...] = (
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_float,
    ctypes.c_int64,
    ctypes.c_int,
)


class Gpu:
    """What a machine has, as CuPy tells it, and what CuPy was asked to do."""

    def __init__(self) -> None:
        self.driver_version = 13000
        self.cupy_version = 13000
        self.nvrtc_version = (13, 0)
        self.capability = "90"
        self.load_error: Exception | None = None
        self.compiled: list[tuple[str, str, dict[str, Any]]] = []
        self.shared_limits: list[int] = []
        self.carveouts: list[int] = []
        self.launches: list[tuple[Any, ...]] = []  # what the driver gets, arguments read from memory

    def launch(self, *call: Any) -> None:
        *placed, args, extra = call
        fields = FIELDS if placed[4] == 64 else ()  # one has 64 threads, two none of the arguments
        addresses = (ctypes.c_void_p * len(fields)).from_address(args)
        pairs = zip(fields, addresses, strict=True)
        values = [field.from_address(address).value for field, address in pairs]
        self.launches.append((*placed, values, extra))

    def raw_module(self, path: str) -> Any:
        gpu = self

        class RawKernel:
            kernel = SimpleNamespace(ptr=0xF00)

            def __setattr__(self, name: str, value: int) -> None:
                if name == "preferred_shared_memory_carveout":
                    gpu.carveouts.append(value)
                else:
                    assert name == "max_dynamic_shared_size_bytes"
                    gpu.shared_limits.append(value)

        def get_function(_: str) -> Any:
            if gpu.load_error:  # a module is loaded when the first function is asked for
                raise gpu.load_error
            return RawKernel()

        assert path == "some.cubin"
        return SimpleNamespace(get_function=get_function)

    def device(self) -> Any:
        if not self.capability:
            raise RuntimeError("cudaErrorNoDevice: no CUDA-capable device is detected")
        return SimpleNamespace(compute_capability=self.capability)

    def compile(self, path: Path, arch: str, constants: dict[str, Any]) -> Compiled:
        self.compiled.append((path.name, arch, constants))
        return Compiled(Path("some.cubin"), {}, "")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """A GPU that CuPy's stand-in speaks of."""
    gpu = Gpu()
    runtime = SimpleNamespace(
        driverGetVersion=lambda: gpu.driver_version, runtimeGetVersion=lambda: gpu.cupy_version
    )
    stream = SimpleNamespace(ptr=0x57)
    cupy = SimpleNamespace(
        RawModule=gpu.raw_module,
        cuda=SimpleNamespace(runtime=runtime, Device=gpu.device, Stream=lambda **_: stream),
    )
    api = SimpleNamespace(driver=SimpleNamespace(launchKernel=gpu.launch))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setitem(sys.modules, "cupy_backends.cuda.api", api)
    monkeypatch.setattr("cupaged.backend.cupy_device.compile_kernels", gpu.compile)
    monkeypatch.setattr("cupaged.backend.cupy_device.nvrtc", lambda: SimpleNamespace(version=gpu.nvrtc_version))
    return gpu


@pytest.fixture
def device(gpu: Gpu, tmp_path: Path) -> CudaDevice:  # noqa: ARG001
    """A device whose kernels are those of SOURCE, in two.cu."""
    (tmp_path / "two.cu").write_text(SOURCE)
    return CudaDevice(tmp_path)


def array(address: int) -> Any:
    return SimpleNamespace(data=SimpleNamespace(ptr=address))


def test_arguments_reach_the_driver_as_the_kernel_declares_them(device: CudaDevice, gpu: Gpu) -> None:
    kernel = device.kernel("two", "one", ELEMENT="bf16")

    kernel((7, 2, 1), 64, (array(0x7F00_0000_0010), -3, array(0x20), 0.25, 2**40, 9), 1024)
    kernel((1, 1, 1), 64, (array(0x30), 1, None, 0.0, 0, 0))

    placed = (0xF00, 7, 2, 1, 64, 1, 1, 1024, 0x57)
    assert gpu.launches[0] == (*placed, [0x7F00_0000_0010, -3, 0x20, 0.25, 2**40, 9], 0)
    assert gpu.launches[1][-2] == [0x30, 1, None, 0.0, 0, 0]


def test_grid_of_no_blocks_launches_nothing(device: CudaDevice, gpu: Gpu) -> None:
    kernel = device.kernel("two", "two")

    for grid in ((0, 1, 1), (1, 0, 1)):
        kernel(grid, 32, ())

    assert gpu.launches == []


def test_pointer_that_would_fault_on_the_gpu_is_refused(device: CudaDevice, gpu: Gpu) -> None:
    kernel = device.kernel("two", "one")

    with pytest.raises(AssertionError, match=r"'out'.* alignment=16\) begins at 0x38"):
        kernel((1, 1, 1), 64, (array(0x30), 1, array(0x38), 0.0, 0, 0))
    assert gpu.launches == []


def test_wrong_number_or_kind_of_arguments_is_an_error(device: CudaDevice, gpu: Gpu) -> None:
    kernel = device.kernel("two", "one")

    for args in (
        (),
        (array(0x30), 2**31, array(0x30), 0.0, 0, 0),
        (array(0x30), 0.5, array(0x30), 0.0, 0, 0),
    ):
        with pytest.raises((IndexError, ValueError, TypeError, OverflowError, struct.error)):
            kernel((1, 1, 1), 64, args)
    assert gpu.launches == []


def test_kernel_is_compiled_for_this_gpu_and_loaded_once(device: CudaDevice, gpu: Gpu) -> None:
    first, again = (device.kernel("two", "one", ELEMENT="bf16", HEAD_DIM=64) for _ in range(2))
    other = device.kernel("two", "one", ELEMENT="bf16", HEAD_DIM=80)

    assert first is again is not other
    assert gpu.compiled == [("two.cu", "sm_90", {"ELEMENT": "bf16", "HEAD_DIM": dim}) for dim in (64, 80)]


def test_kernel_may_have_as_much_shared_memory_as_it_ever_asked_for(device: CudaDevice, gpu: Gpu) -> None:
    kernel = device.kernel("two", "two")

    for shared_bytes in (0, 60_000, 50_000, 60_000, 70_000):
        kernel((1, 1, 1), 32, (), shared_bytes)

    assert gpu.shared_limits == [60_000, 70_000]
    assert set(gpu.carveouts) == {100}


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
def test_what_does_not_fit_is_said_with_the_way_out(gpu: Gpu, machine: dict[str, Any], message: str) -> None:
    vars(gpu).update(machine)

    with pytest.raises(CudaUnavailable, match=message):
        CudaDevice()


def test_newer_minor_version_of_the_compiler_is_fine(gpu: Gpu) -> None:
    gpu.nvrtc_version = (13, 2)

    assert CudaDevice().arch == "sm_90"


def test_cubin_that_the_driver_does_not_load_says_by_what_it_was_made(device: CudaDevice, gpu: Gpu) -> None:
    gpu.load_error = RuntimeError("CUDA_ERROR_NO_BINARY_FOR_GPU")

    with pytest.raises(
        CudaUnavailable, match=r"two of two.cu, compiled by NVRTC 13.0 for sm_90, does not load: CUDA"
    ):
        device.kernel("two", "two")


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
