"""CudaDevice: kernels on a GPU, through CuPy. One thread drives it; everything runs in order on its stream.

CuPy is imported when a device is made, not before. What is missing or does not fit is one CudaUnavailable.
"""

import ctypes
import struct
from pathlib import Path
from typing import Any

from cupaged.kernels.compile import compile_kernels
from cupaged.kernels.launch import SOURCES, Constant, Grid, Parameter, parameters
from cupaged.kernels.nvrtc import INSTALL, CudaUnavailable, nvrtc

OLDEST = 80  # compute capability: cp.async, and mma of bfloat16


class CudaKernel:
    """One loaded kernel; launches it with little more than the driver's call."""

    def __init__(self, function: Any, declared: tuple[Parameter, ...], stream: int, launch: Any) -> None:
        self._function = function  # a cupy.RawKernel, which keeps its module loaded
        self._address = function.kernel.ptr
        self._launch = launch
        self._stream = stream
        self._shared_bytes = 0  # dynamic, that it may have so far
        self._pointers = [(i, each) for i, each in enumerate(declared) if each.code == "P"]
        # The driver reads a kernel's arguments where an array of addresses says, and is done with them when
        # the call returns; so one buffer, laid out as a C struct, serves all launches.
        codes = "@" + "".join(parameter.code for parameter in declared)
        self._pack_into = struct.Struct(codes).pack_into
        self._values = ctypes.create_string_buffer(struct.calcsize(codes) or 1)
        starts = [struct.calcsize(f"{codes[: i + 1]}0{codes[i + 1]}") for i in range(len(declared))]
        base = ctypes.addressof(self._values)
        self._addresses = (ctypes.c_void_p * len(declared))(*(base + start for start in starts))
        self._args = ctypes.addressof(self._addresses)

    def __call__(self, grid: Grid, block: int, args: tuple[Any, ...], shared_bytes: int = 0) -> None:
        """Launch on the device's stream; see launch.Kernel."""
        if 0 in grid:
            return
        if shared_bytes > self._shared_bytes:  # a block gets more than 48 KiB only if the kernel may have it
            self._function.max_dynamic_shared_size_bytes = shared_bytes
            # Percent of what L1 and shared memory have together: the blocks an SM holds must not be fewer
            # because the driver left more of it to L1.
            self._function.preferred_shared_memory_carveout = 100
            self._shared_bytes = shared_bytes
        values = list(args)
        for i, parameter in self._pointers:
            array = values[i]
            values[i] = address = 0 if array is None else array.data.ptr
            assert address % parameter.alignment == 0, f"{parameter} begins at {address:#x}"
        self._pack_into(self._values, 0, *values)
        self._launch(self._address, *grid, block, 1, 1, shared_bytes, self._stream, self._args, 0)


class CudaDevice:
    """launch.Device on CuPy's current GPU, with a stream of its own."""

    def __init__(self, sources: Path = SOURCES) -> None:
        self.cupy, driver = _import_cupy()
        self.arch = _check_versions(self.cupy)
        self.stream = self.cupy.cuda.Stream(non_blocking=True)
        self._launch = driver.launchKernel
        self._sources = sources
        self._kernels: dict[Any, CudaKernel] = {}

    def kernel(self, file: str, name: str, **constants: Constant) -> CudaKernel:
        """Return kernel `name` of `file`.cu compiled with -D constants; compiled and loaded once."""
        key = (file, name, *constants.items())
        kernel = self._kernels.get(key)
        if kernel is None:
            kernel = self._kernels[key] = self._load(self._sources / f"{file}.cu", name, constants)
        return kernel

    def _load(self, path: Path, name: str, constants: dict[str, Constant]) -> CudaKernel:
        cubin = compile_kernels(path, self.arch, constants).path
        declared = parameters(path.read_text(encoding="utf-8"))[name]
        try:
            function = self.cupy.RawModule(path=str(cubin)).get_function(name)
            return CudaKernel(function, declared, self.stream.ptr, self._launch)
        except RuntimeError as error:  # as CuPy's errors of the driver are
            raise CudaUnavailable(
                f"{name} of {path.name}, compiled by NVRTC {_dotted(nvrtc().version)} for {self.arch}, does "
                f"not load: {error}. If the driver is older than the compiler, update it"
            ) from error


def _import_cupy() -> tuple[Any, Any]:
    """Return cupy and its binding of the driver."""
    try:
        import cupy
        from cupy_backends.cuda.api import driver
    except ImportError as error:
        reason = f"CuPy does not load: {error}" if error.name != "cupy" else "CuPy is not installed"
        raise CudaUnavailable(f"{reason}; {INSTALL}") from None
    return cupy, driver


def _check_versions(cupy: Any) -> str:
    """Return the current GPU's architecture, such as sm_90; CudaUnavailable if something does not fit."""
    runtime = cupy.cuda.runtime
    newest = runtime.driverGetVersion()  # of CUDA, as 1000 * major + 10 * minor; 0 without a driver
    if newest == 0:
        raise CudaUnavailable("no NVIDIA driver is installed; install one, or use device='cpu'")
    driver = (newest // 1000, newest % 1000 // 10)
    of_cupy, of_nvrtc = runtime.runtimeGetVersion() // 1000, nvrtc().version[0]
    for name, major in (("CuPy", of_cupy), ("NVRTC", of_nvrtc)):
        if major > driver[0]:
            raise CudaUnavailable(
                f"{name} is for CUDA {major}, but the driver supports CUDA {_dotted(driver)} at most; "
                f"{INSTALL}, or update the driver"
            )
    try:
        arch = int(cupy.cuda.Device().compute_capability)
    except RuntimeError as error:
        raise CudaUnavailable(f"no GPU can be used: {error}; use device='cpu'") from None
    if arch < OLDEST:
        raise CudaUnavailable(
            f"the GPU has compute capability {arch // 10}.{arch % 10}, but kernels need {OLDEST // 10}.0 or "
            "newer; use device='cpu'"
        )
    return f"sm_{arch}"


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
