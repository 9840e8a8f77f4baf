"""CudaDevice: a GPU through CuPy. Everything runs in order on its one stream.

CuPy is imported when a device is made, not before. What is missing or does not fit is one CudaUnavailable.
Memory is CUDA's own, to the byte: CuPy's pools round up and keep what is freed. Neither CuPy's current stream
nor the thread's current GPU is relied on: the thread that loads need not be the one that steps.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupaged.backend.cupy_kernel import CudaKernel, CurrentGpu
from cupaged.backend.device import ALIGNMENT, Event
from cupaged.backend.host_memory import available_memory
from cupaged.kernels.compile import compile_kernels
from cupaged.kernels.launch import SOURCES, Array, Constant, parameters, require_packed
from cupaged.kernels.nvrtc import INSTALL, CudaUnavailable, nvrtc

OLDEST = 80  # compute capability: cp.async, and mma of bfloat16
OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation
LESS = "close other programs on the GPU, or lower gpu_memory_utilization"


class CudaGraph:
    """Recorded work on the GPU."""

    def __init__(self, graph: Any, stream: Any, current: CurrentGpu) -> None:
        self._graph = graph  # a cupy.cuda.Graph
        self._stream = stream  # a cupy.cuda.Stream: without one, it would be launched on CuPy's current one
        self._current = current

    def launch(self) -> None:
        """Put it on the stream, once more."""
        self._current.use()
        self._graph.launch(self._stream)


class CudaDevice:
    """device.Device on CuPy's current GPU."""

    def __init__(self, sources: Path = SOURCES) -> None:
        self.cupy, driver = _import_cupy()
        gpu = _find_gpu(self.cupy)
        self._cuda = cuda = self.cupy.cuda
        self._runtime = runtime = cuda.runtime
        self._current = CurrentGpu(gpu, runtime.memGetInfo, driver.launchKernel)
        properties = runtime.getDeviceProperties(gpu.id)
        self.arch = f"sm_{gpu.compute_capability}"
        self.name: str = properties["name"].decode()
        self.num_sms: int = properties["multiProcessorCount"]
        self.cupy_stream = cuda.Stream(non_blocking=True)  # work on the default stream does not hold it up
        self.stream: int = self.cupy_stream.ptr
        self._sources = sources
        self._kernels: dict[Any, CudaKernel] = {}

    @property
    def cublaslt(self) -> Any:
        """Return the library; the thread's current GPU, which it takes at its calls, is then this one."""
        from cupaged.backend.cublaslt import load_library

        self._current.use()
        return load_library()

    def memory_info(self) -> tuple[int, int]:
        """Return the bytes of memory that are free, and all there are."""
        self._current.use()
        free, total = self._runtime.memGetInfo()
        return free, total

    def _free(self) -> int:
        return self.memory_info()[0]

    def allocate(self, num_bytes: int) -> Array:
        """Return uint8[num_bytes] of device memory, see device.Device."""
        with self._no_memory(f"{num_bytes} bytes of GPU memory", self._free, LESS):
            memory = self._cuda.Memory(num_bytes)  # cudaMalloc, and cudaFree when nothing refers to it
        assert memory.ptr % ALIGNMENT == 0, f"cudaMalloc returned {memory.ptr:#x}"
        return self.cupy.ndarray((num_bytes,), np.uint8, self._cuda.MemoryPointer(memory, 0))

    def pin(self, num_bytes: int) -> NDArray[np.uint8]:
        """Return page-locked host memory, see device.Device."""
        what = f"{num_bytes} bytes of page-locked host memory"
        with self._no_memory(what, available_memory, "close other programs, or lower swap_space"):
            memory = self._cuda.PinnedMemory(num_bytes)  # cudaHostAlloc, and cudaFreeHost as above
        return np.frombuffer(self._cuda.PinnedMemoryPointer(memory, 0), np.uint8, num_bytes)

    @contextmanager
    def _no_memory(self, what: str, free: Callable[[], int], remedy: str) -> Iterator[None]:
        """Turn CUDA's bare "out of memory" into a ValueError that says what was wanted."""
        self._current.use()
        try:
            yield
        except self._runtime.CUDARuntimeError as error:
            if error.status != OUT_OF_MEMORY:
                raise
            raise ValueError(f"no room for {what}, {free()} are free; {remedy}") from None

    def view(self, memory: Array, offset: int, shape: tuple[int, ...], dtype: Any) -> Array:
        """Return the packed array that lies `offset` bytes into uint8 `memory`."""
        kind = np.dtype(dtype)
        end = offset + prod(shape) * kind.itemsize
        assert 0 <= offset <= end <= memory.size, f"bytes {offset} to {end} of {memory.size}"
        return self.cupy.ndarray(shape, kind, memory.data + offset)  # CuPy takes any dtype over a pointer

    def address(self, array: Array) -> int:
        """Return where an array begins."""
        address: int = array.data.ptr
        return address

    def to_device(self, target: Array, source: NDArray[Any]) -> None:
        """Copy packed, pinned `source`, see device.Device."""
        to_device = self._runtime.memcpyHostToDevice
        self._copy(target.data.ptr, source.ctypes.data, _copied_bytes(target, source), to_device)

    def to_host(self, target: NDArray[Any], source: Array) -> None:
        """Copy to packed, pinned `target`, see device.Device."""
        to_host = self._runtime.memcpyDeviceToHost
        self._copy(target.ctypes.data, source.data.ptr, _copied_bytes(target, source), to_host)

    def _copy(self, target: int, source: int, num_bytes: int, kind: int) -> None:
        self._current.use()
        if num_bytes:  # an empty copy is nothing to a stream, but an error in a capture
            self._runtime.memcpyAsync(target, source, num_bytes, kind, self.stream)

    def record(self) -> Event:
        """Return the place behind all work so far.

        Waiting for it sleeps, with the interpreter lock given away. The default would spin on a core that
        the server's other threads may need; while this one wakes up, the next step runs.
        """
        self._current.use()  # an event belongs to the GPU that is current when it is made
        event: Event = self.cupy_stream.record(self._cuda.Event(block=True, disable_timing=True))
        return event

    def seconds(self, work: Callable[[], None]) -> float:
        """Return how long the device takes for `work`, or the host to put it there if that is longer."""
        self._current.use()
        start, end = self._cuda.Event(block=True), self._cuda.Event(block=True)
        self.cupy_stream.record(start)
        work()
        self.cupy_stream.record(end)
        end.synchronize()
        return float(self._cuda.get_elapsed_time(start, end)) / 1e3  # of ms

    def capture(self, work: Callable[[], None]) -> CudaGraph:
        """Record what `work` would put on the stream, see device.Device."""
        self._current.use()
        # Relaxed: memory that Python frees meanwhile, or that another thread asks for, does not spoil it.
        self.cupy_stream.begin_capture(self._runtime.streamCaptureModeRelaxed)
        try:
            work()
        except BaseException:
            with suppress(RuntimeError):  # what went wrong first is what counts
                self.cupy_stream.end_capture()
            raise
        remedy = f"{LESS}, or set enforce_eager"
        with self._no_memory("the bytes of one more CUDA graph", self._free, remedy):
            graph = self.cupy_stream.end_capture()
            graph.upload(self.cupy_stream)  # takes its memory now, not at the first launch
        return CudaGraph(graph, self.cupy_stream, self._current)

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
        self._current.use()  # a module is loaded into the current GPU
        try:
            function = self.cupy.RawModule(path=str(cubin)).get_function(name)
            return CudaKernel(function, declared, self.stream, self._current)
        except RuntimeError as error:  # as CuPy's errors of the driver are
            raise CudaUnavailable(
                f"{name} of {path.name}, compiled by NVRTC {_dotted(nvrtc().version)} for {self.arch}, does "
                f"not load: {error}. If the driver is older than the compiler, update it"
            ) from error


def _copied_bytes(target: Array, source: Array) -> int:
    for name, array in (("target", target), ("source", source)):
        require_packed(name, array)
    assert target.nbytes == source.nbytes, f"{source.nbytes} bytes to {target.nbytes}"
    return int(source.nbytes)


def _import_cupy() -> tuple[Any, Any]:
    """Return cupy and its binding of the driver."""
    try:
        import cupy
        from cupy_backends.cuda.api import driver
    except ImportError as error:
        reason = f"CuPy does not load: {error}" if error.name != "cupy" else "CuPy is not installed"
        raise CudaUnavailable(f"{reason}; {INSTALL}") from None
    return cupy, driver


def _find_gpu(cupy: Any) -> Any:
    """Return the current GPU, a cupy.cuda.Device; CudaUnavailable if something does not fit."""
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
        gpu = cupy.cuda.Device()
        arch = int(gpu.compute_capability)
        runtime.memGetInfo()  # makes CUDA's context: the GPU may be another's alone, or its memory all taken
    except RuntimeError as error:
        raise CudaUnavailable(f"no GPU can be used: {error}; use device='cpu'") from None
    if arch < OLDEST:
        raise CudaUnavailable(
            f"the GPU has compute capability {arch // 10}.{arch % 10}, but kernels need {OLDEST // 10}.0 or "
            "newer; use device='cpu'"
        )
    return gpu


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
