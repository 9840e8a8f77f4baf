"""What CudaDevice uses of CuPy, over the host's memory: two GPUs, a current one for each thread, one stream.

Copies and graphs wait in the stream until an event is waited for. What needs the stream's GPU to be the
thread's current one asserts so.
"""

import ctypes
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cupaged.kernels.compile import Compiled

STREAM = 0x57
FUNCTION = 0xF00
FIELDS: tuple[Any, ...] = (  # of a kernel of 64 threads; others have none
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_float,
    ctypes.c_int64,
    ctypes.c_int,
)


class CUDARuntimeError(RuntimeError):
    """An error of CUDA, as CuPy raises it."""

    def __init__(self, status: int) -> None:
        super().__init__({2: "cudaErrorMemoryAllocation: out of memory"}.get(status, f"CUDA error {status}"))
        self.status = status


class Thread(threading.local):
    """What CUDA keeps for a thread."""

    gpu = 0
    has_context = False


class DeviceArray(np.ndarray[Any, Any]):
    """A cupy.ndarray: `data` is where it lies, and every view holds its memory."""

    memory: Any = None

    def __array_finalize__(self, obj: Any) -> None:
        self.memory = getattr(obj, "memory", None)

    @property
    def data(self) -> Any:
        return Pointer(self.memory, self.ctypes.data - self.memory.ptr)


class Pointer:
    """A cupy.cuda.MemoryPointer."""

    def __init__(self, memory: Any, offset: int) -> None:
        self.memory, self.ptr = memory, memory.ptr + offset

    def __add__(self, offset: int) -> "Pointer":
        return Pointer(self.memory, self.ptr - self.memory.ptr + offset)


def ndarray(shape: tuple[int, ...], dtype: Any, memptr: Pointer) -> DeviceArray:
    """Return an array over memory."""
    offset = memptr.ptr - memptr.memory.ptr
    array: DeviceArray = np.ndarray(shape, dtype, memptr.memory.values, offset).view(DeviceArray)
    array.memory = memptr.memory
    return array


class FakeCuPy:
    """What a machine has, as CuPy tells it, and what CuPy was asked to do. Tests set the plain attributes."""

    def __init__(self) -> None:
        self.driver_version = 13000
        self.cupy_version = 13000
        self.nvrtc_version = (13, 0)
        self.capability = "90"
        self.thread = Thread()
        self.gpu_of_stream = -1
        self.free_bytes = 1 << 20
        self.error: Exception | None = None  # of loading a module, or of instantiating a graph
        self.allocated: list[int] = []  # bytes, of what is in use
        self.pinned: list[int] = []
        self.compiled: list[tuple[str, str, dict[str, Any]]] = []
        self.attributes: list[tuple[str, int]] = []  # set of the one function, which all kernels are
        self.most_shared = 48 << 10  # bytes, dynamic, that it may have
        self.launches: list[tuple[Any, ...]] = []  # what the driver gets, arguments read from memory
        self.events: list[Any] = []
        self.elapsed_ms = 0.0
        self.uploads = 0
        self.queue: list[Callable[[], None]] = []  # of the stream
        self.recording: list[Callable[[], None]] | None = None
        self.cupy = SimpleNamespace(RawModule=self.raw_module, ndarray=ndarray, cuda=self.cuda())
        self.driver = SimpleNamespace(launchKernel=self.launch)

    def cuda(self) -> Any:
        """Return cupy.cuda."""
        gpu = self
        runtime = SimpleNamespace(
            CUDARuntimeError=CUDARuntimeError,
            driverGetVersion=lambda: gpu.driver_version,
            runtimeGetVersion=lambda: gpu.cupy_version,
            memGetInfo=gpu.memory_info,
            getDeviceProperties=lambda i: {"name": f"GPU {i}".encode(), "multiProcessorCount": 100 + i},
            memcpyAsync=gpu.copy,
            memcpyHostToDevice=1,
            memcpyDeviceToHost=2,
            streamCaptureModeRelaxed=2,
        )
        return SimpleNamespace(
            runtime=runtime,
            Device=gpu.device,
            Stream=lambda non_blocking: Stream(gpu, non_blocking=non_blocking),
            Event=lambda **flags: Event(gpu, **flags),
            Memory=lambda size: Memory(gpu, size),
            MemoryPointer=Pointer,
            PinnedMemory=gpu.pin,
            PinnedMemoryPointer=lambda memory, offset: memory[offset:] if offset else memory,
            get_elapsed_time=gpu.elapsed,
        )

    def device(self) -> Any:
        if not self.capability:
            raise RuntimeError("cudaErrorNoDevice: no CUDA-capable device is detected")
        number = self.thread.gpu
        return SimpleNamespace(
            id=number, compute_capability=self.capability, use=lambda: self.set_current(number)
        )

    def set_current(self, number: int) -> None:
        self.thread.gpu = number

    def memory_info(self) -> tuple[int, int]:
        self.thread.has_context = True
        return self.free_bytes - sum(self.allocated), 1 << 30

    def expect_current(self) -> None:
        """Assert that what is done now is done on the stream's GPU."""
        assert self.thread.gpu == self.gpu_of_stream, f"GPU {self.thread.gpu} is current"

    def pin(self, size: int) -> Any:
        self.expect_current()
        if size > self.free_bytes:
            raise CUDARuntimeError(2)
        gpu = self

        class Pinned(ctypes.c_char * size):  # type: ignore[misc]
            def __del__(self) -> None:
                gpu.pinned.remove(size)

        self.pinned.append(size)
        return Pinned()

    def put(self, work: Callable[[], None]) -> None:
        """Put work on the stream, or into the graph that is recorded."""
        (self.queue if self.recording is None else self.recording).append(work)

    def copy(self, target: int, source: int, size: int, kind: int, stream: int) -> None:
        assert (size > 0, kind in (1, 2), stream) == (True, True, STREAM)
        self.expect_current()
        self.put(lambda: (ctypes.memmove(target, source, size), None)[1])

    def elapsed(self, start: Any, end: Any) -> float:
        assert [start.state, end.state] == ["done", "done"], "both events were waited for"
        assert [start.disable_timing, end.disable_timing] == [False, False]
        return self.elapsed_ms

    def launch(self, *call: Any) -> None:
        self.expect_current()
        assert self.thread.has_context, "CUDA_ERROR_INVALID_CONTEXT"
        *placed, args, extra = call
        assert placed[7] <= self.most_shared, "CUDA_ERROR_INVALID_VALUE"
        fields = FIELDS if placed[4] == 64 else ()
        addresses = (ctypes.c_void_p * len(fields)).from_address(args)
        pairs = zip(fields, addresses, strict=True)
        values = [field.from_address(address).value for field, address in pairs]
        self.launches.append((*placed, values, extra))

    def raw_module(self, path: str) -> Any:
        gpu = self

        class RawKernel:
            kernel = SimpleNamespace(ptr=FUNCTION)

            @property
            def max_dynamic_shared_size_bytes(self) -> int:
                return gpu.most_shared

            def __setattr__(self, name: str, value: int) -> None:
                gpu.expect_current()
                gpu.attributes.append((name, value))
                if name == "max_dynamic_shared_size_bytes":
                    gpu.most_shared = value

        def get_function(_: str) -> Any:
            if gpu.error:  # a module is loaded when the first function is asked for
                raise gpu.error
            gpu.expect_current()
            return RawKernel()

        assert path == "some.cubin"
        return SimpleNamespace(get_function=get_function)

    def compile(self, path: Path, arch: str, constants: dict[str, Any]) -> Compiled:
        self.compiled.append((path.name, arch, constants))
        return Compiled(Path("some.cubin"), {}, "")


class Memory:
    """A cupy.cuda.Memory."""

    def __init__(self, gpu: FakeCuPy, size: int) -> None:
        gpu.expect_current()
        self.gpu, self.size = gpu, 0
        if size > gpu.memory_info()[0]:
            raise gpu.error or CUDARuntimeError(2)
        whole = np.empty(size + 256, np.uint8)
        skip = -whole.ctypes.data % 256
        self.values = whole[skip : skip + size]
        self.ptr, self.size = self.values.ctypes.data, size
        gpu.allocated.append(size)

    def __del__(self) -> None:
        if self.size:
            self.gpu.allocated.remove(self.size)


class Event:
    """A cupy.cuda.Event."""

    def __init__(self, gpu: FakeCuPy, *, block: bool = False, disable_timing: bool = False) -> None:
        gpu.expect_current()
        self.gpu, self.block, self.disable_timing = gpu, block, disable_timing
        self.state = "made"
        gpu.events.append(self)

    def finish(self) -> None:
        self.state = "done"

    def synchronize(self) -> None:
        """Do what is on the stream, up to here."""
        while self.state != "done":
            self.gpu.queue.pop(0)()


class Stream:
    """The one cupy.cuda.Stream."""

    ptr = STREAM

    def __init__(self, gpu: FakeCuPy, *, non_blocking: bool) -> None:
        assert non_blocking
        self.gpu = gpu
        gpu.gpu_of_stream = gpu.thread.gpu

    def record(self, event: Event) -> Event:
        self.gpu.expect_current()
        self.gpu.put(event.finish)
        return event

    def begin_capture(self, mode: int) -> None:
        assert (mode, self.gpu.recording) == (2, None)
        self.gpu.expect_current()
        self.gpu.recording = []

    def end_capture(self) -> Any:
        gpu, work = self.gpu, self.gpu.recording
        assert work is not None
        gpu.recording = None
        if gpu.error:
            raise gpu.error

        def launch(stream: Stream) -> None:
            assert stream is self
            gpu.expect_current()
            gpu.queue.extend(work)

        def upload(stream: Stream) -> None:
            assert stream is self
            gpu.uploads += 1

        return SimpleNamespace(launch=launch, upload=upload)


def install(monkeypatch: pytest.MonkeyPatch) -> FakeCuPy:
    """Put the stand-in where CuPy is imported from, and return it."""
    fake = FakeCuPy()
    monkeypatch.setitem(sys.modules, "cupy", fake.cupy)
    monkeypatch.setitem(sys.modules, "cupy_backends.cuda.api", SimpleNamespace(driver=fake.driver))
    monkeypatch.setattr("cupaged.backend.cupy_device.compile_kernels", fake.compile)
    nvrtc = lambda: SimpleNamespace(version=fake.nvrtc_version)  # noqa: E731
    monkeypatch.setattr("cupaged.backend.cupy_device.nvrtc", nvrtc)
    return fake


def in_another_thread(work: Callable[[], Any]) -> Any:
    """Return what work() does in a thread of its own, whose current GPU is the first one."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(work).result()
