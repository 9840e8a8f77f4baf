"""EmulatedGpu: backend/device.py's Device on the CPU; kernels run as in EmulatedDevice.

It is as asynchronous as a GPU is: what the host asks for waits in a queue until the host waits for it. What
a GPU would punish in silence, or now and then, is an EmulatorError here (README.md lists it).
"""

import threading
from collections.abc import Callable
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupaged.backend.device import ALIGNMENT
from cupaged.kernels.launch import Constant, Grid, is_packed
from tests.cuda_on_cpu.build import EmulatorError
from tests.cuda_on_cpu.device import EmulatedDevice, EmulatedKernel
from tests.cuda_on_cpu.gpu_memory import DeviceArray, Memory, Piece
from tests.cuda_on_cpu.gpu_stream import Copy, Launch, Recorded, Stream, Work, calling_place

__all__ = ["DeviceArray", "EmulatedGpu", "EmulatorError"]

STREAM = 0x5EED  # its address; not 0, which is CUDA's default stream
SECONDS = 1e-6  # of a launch, in the stream's own time, and of each of its blocks a hundredth


class OneThread:
    """What a thread is inside while it uses the device; a second one may not enter."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise EmulatorError("two threads use the device at once")

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class GpuKernel:
    """A kernel whose launches go to the stream."""

    def __init__(self, gpu: "EmulatedGpu", kernel: EmulatedKernel) -> None:
        self._gpu, self._kernel = gpu, kernel
        self._pointers = [(i, each) for i, each in enumerate(kernel.parameters) if each.code == "P"]
        self._was_launched = False

    def __call__(self, grid: Grid, block: int, args: tuple[Any, ...], shared_bytes: int = 0) -> None:
        """Put a launch on the stream: arguments are taken now, contents of arrays when it runs."""
        self._gpu.put_launch(self, grid, block, args, shared_bytes)

    def prepare(self, grid: Grid, block: int, args: tuple[Any, ...], shared_bytes: int) -> Launch | None:
        """Return the launch; None if it has no blocks."""
        gpu, kernel = self._gpu, self._kernel
        values, pieces = list(args), []
        for i, parameter in self._pointers:
            if i < len(args) and args[i] is not None:
                pieces.append(gpu.piece_of(args[i], f"{kernel.name}: argument {parameter.name!r}"))
                values[i] = args[i].memory
        run = kernel.prepare(grid, block, tuple(values), shared_bytes)
        if run is None:
            return None
        if gpu.is_capturing and not self._was_launched:
            raise EmulatorError(
                f"{kernel.name} is first launched in a capture, where no module can be loaded"
            )
        self._was_launched = True
        gpu.launches.append(kernel.name)
        return Launch(run, tuple(pieces), SECONDS * (1 + prod(grid) / 100))


class EmulatedEvent:
    """A place in the stream of an emulated GPU."""

    def __init__(self, gpu: "EmulatedGpu", number: int) -> None:
        self._gpu, self._number = gpu, number

    def synchronize(self) -> None:
        """Have the device do all before it, and nothing behind it."""
        self._gpu.wait(self._number)


class EmulatedGraph:
    """Recorded work of an emulated GPU."""

    def __init__(self, gpu: "EmulatedGpu", recorded: Recorded) -> None:
        self._gpu, self._recorded = gpu, recorded

    def __len__(self) -> int:
        return len(self._recorded)

    def launch(self) -> None:
        """Put the work on the stream; EmulatorError if memory that it touches was freed since."""
        self._gpu.put_graph(self._recorded)


class EmulatedGpu:
    """A GPU with `memory` bytes, of which its driver takes some for each kernel and graph.

    Other options are EmulatedDevice's.
    """

    def __init__(
        self,
        mode: str = "fast",
        *,
        memory: int = 1 << 30,
        driver_bytes: int = 0,
        deferred: bool = True,
        name: str = "emulated GPU",
        num_sms: int = 4,
        **options: Any,
    ) -> None:
        self.name, self.num_sms, self.stream = name, num_sms, STREAM
        self.allocations: list[int] = []  # bytes of each so far, in order
        self.pinned: list[int] = []  # likewise
        self.launches: list[str] = []  # kernels that the host launched; a test may clear it
        self.num_to_device = self.num_to_host = 0  # copies that the host asked for; a test may set them
        self._one_thread = OneThread()
        self._device = EmulatedDevice(mode, **options)
        self._memory, self._host = Memory(memory), Memory()
        self._driver_bytes = driver_bytes
        self._stream = Stream(deferred=deferred)
        self._is_frozen = False
        self._kernels: dict[tuple[object, ...], GpuKernel] = {}

    @property
    def is_capturing(self) -> bool:
        """Return whether a graph is being recorded."""
        return self._stream.is_capturing

    @cached_property
    def cublaslt(self) -> Any:
        """Return the stand-in for cuBLASLt, whose products go to the stream."""
        from tests.cuda_on_cpu.gpu_matmul import Cublaslt

        return Cublaslt(self)

    # ---- Memory.
    def memory_info(self) -> tuple[int, int]:
        """Return the bytes that are free, and all there are."""
        return self._memory.free, self._memory.num_bytes

    @property
    def is_idle(self) -> bool:
        """Return whether all work on the stream is done."""
        return self._stream.num_put == self._stream.num_done

    @property
    def pinned_bytes(self) -> int:
        """Return how much of the host's memory is page-locked now."""
        return self._host.num_bytes - self._host.free

    def allocate(self, num_bytes: int) -> DeviceArray:
        """Return uint8[num_bytes] of 0xFF; ValueError if it is not there."""
        with self._one_thread:
            self._forbid(f"allocating {num_bytes} bytes")
            memory = DeviceArray(self._memory.allocate(num_bytes))
            self.allocations.append(num_bytes)
            return memory

    def pin(self, num_bytes: int) -> NDArray[np.uint8]:
        """Return page-locked uint8[num_bytes] of 0xFF."""
        with self._one_thread:
            self._forbid(f"pinning {num_bytes} bytes")
            self.pinned.append(num_bytes)
            return self._host.allocate(num_bytes)

    def view(self, memory: DeviceArray, offset: int, shape: tuple[int, ...], dtype: Any) -> DeviceArray:
        """Return the packed array that lies `offset` bytes into uint8 `memory`."""
        kind = np.dtype(dtype)
        num_bytes = int(np.prod(shape)) * kind.itemsize
        if memory.dtype != np.uint8 or not 0 <= offset <= memory.size - num_bytes:
            raise EmulatorError(f"{kind}{list(shape)} at byte {offset} is not within {memory}")
        if self.address(memory) + offset & min(kind.itemsize, ALIGNMENT) - 1:
            raise EmulatorError(f"{kind}{list(shape)} at byte {offset} of {memory} is misaligned")
        return memory[offset : offset + num_bytes].view(kind).reshape(shape)

    def address(self, array: DeviceArray) -> int:
        """Return where an array begins."""
        self.piece_of(array, "array")
        return int(array.memory.ctypes.data)

    def piece_of(self, array: Any, what: str) -> Piece:
        """Return the allocation that an array lies in; EmulatorError if it is not on this device."""
        if not isinstance(array, DeviceArray):
            raise EmulatorError(f"{what}: {type(array).__name__} is not on the device")
        return self.piece_at(array.memory.ctypes.data, min(array.nbytes, 1), what)

    def piece_at(self, address: int, num_bytes: int, what: str) -> Piece:
        """Return the allocation that has these bytes; EmulatorError if none has."""
        piece = self._memory.piece(address, num_bytes)
        if piece is None:
            raise EmulatorError(f"{what}: {num_bytes} bytes at {address:#x} are not allocated on this device")
        return piece

    # ---- Work.
    def kernel(self, file: str, name: str, **constants: Constant) -> GpuKernel:
        """Return kernel `name` of `file`.cu compiled with -D constants; compiled and loaded once."""
        with self._one_thread:
            key = (file, name, *sorted(constants.items()))
            if key not in self._kernels:
                self._forbid(f"loading kernel {name}")
                self._memory.take(self._driver_bytes)
                self._kernels[key] = GpuKernel(self, self._device.kernel(file, name, **constants))
            return self._kernels[key]

    def put_launch(
        self, kernel: GpuKernel, grid: Grid, block: int, args: tuple[Any, ...], shared_bytes: int
    ) -> None:
        """Put a kernel's launch on the stream."""
        with self._one_thread:
            launch = kernel.prepare(grid, block, args, shared_bytes)
            if launch is not None:
                self.put(launch)

    def put(self, work: Work) -> None:
        """Put other work on the stream."""
        with self._one_thread:
            self._stream.put(work)

    def put_graph(self, recorded: Recorded) -> None:
        """Put a graph's work on the stream."""
        with self._one_thread:
            self._forbid_in_capture("launching a graph")
            self._stream.put(recorded)

    def to_device(self, target: DeviceArray, source: NDArray[Any]) -> None:
        """Copy packed, pinned `source`, which must stay as it is until the device has done so."""
        with self._one_thread:
            self._copy(target, source, is_to_host=False)
            self.num_to_device += 1

    def to_host(self, target: NDArray[Any], source: DeviceArray) -> None:
        """Copy to packed, pinned `target`, which has the values once the device has done so."""
        with self._one_thread:
            self._copy(source, target, is_to_host=True)
            self.num_to_host += 1

    def _copy(self, device: DeviceArray, host: NDArray[Any], *, is_to_host: bool) -> None:
        of_device = self.piece_of(device, "copy")
        address, num_bytes = host.ctypes.data, host.nbytes
        of_host = self._host.piece(address, num_bytes)
        if of_host is None:
            raise EmulatorError(f"copy: the host's {host.dtype}{list(host.shape)} is not pinned")
        if not is_packed(host) or not is_packed(device):
            raise EmulatorError(f"copy: strides {host.strides} and {device.strides}, but both must be packed")
        if num_bytes != device.nbytes:
            raise EmulatorError(f"copy: {num_bytes} bytes on the host, {device.nbytes} on the device")
        begin = device.memory.ctypes.data
        copy = Copy(
            is_to_host=is_to_host,
            device=of_device,
            device_offset=begin - of_device.begin,
            host=of_host,
            host_offset=address - of_host.begin,
            num_bytes=num_bytes,
            place=calling_place(),
        )
        self._stream.put(copy)

    def record(self) -> EmulatedEvent:
        """Return the place behind all work so far."""
        with self._one_thread:
            self._forbid_in_capture("recording an event")
            return EmulatedEvent(self, self._stream.num_put)

    def wait(self, number: int) -> None:
        """Have the device do the first `number` pieces of work."""
        with self._one_thread:
            self._forbid_in_capture("waiting for the device")
            self._stream.finish(number)

    def seconds(self, work: Callable[[], None]) -> float:
        """Return how long `work` takes in the stream's own time, the same in every run."""
        with self._one_thread:
            self.synchronize()
            self._stream.seconds = 0.0
            work()
            self.synchronize()
            return self._stream.seconds

    def capture(self, work: Callable[[], None]) -> EmulatedGraph:
        """Record what `work` would put on the stream; nothing runs."""
        with self._one_thread:
            self._forbid_in_capture("capturing")
            graph = EmulatedGraph(self, self._stream.capture(work))
            self._memory.take(self._driver_bytes)
            return graph

    # ---- For tests.
    def synchronize(self) -> None:
        """Have the device do all work so far."""
        self.wait(self._stream.num_put)

    def freeze(self) -> None:
        """From now on refuse to allocate, to pin and to load kernels, as on a step's path."""
        self._is_frozen = True

    def thaw(self) -> None:
        """Allow it again."""
        self._is_frozen = False

    def array(self, values: Any) -> DeviceArray:
        """Return the values in new memory of the device."""
        host = np.ascontiguousarray(values)
        array = self.view(self.allocate(host.nbytes), 0, host.shape, host.dtype)
        self.write(array, host)
        return array

    def write(self, array: DeviceArray, values: Any) -> None:
        """Set an array, once all work so far is done."""
        self.synchronize()
        array.memory[...] = values

    def read(self, array: DeviceArray) -> NDArray[Any]:
        """Return an array's values once all work so far is done."""
        self.synchronize()
        values: NDArray[Any] = array.memory.copy()
        return values

    def _forbid(self, what: str) -> None:
        """Raise EmulatorError where nothing new may be made."""
        self._forbid_in_capture(what)
        if self._is_frozen:
            raise EmulatorError(f"{what} on a step's path, where all must have been made before")

    def _forbid_in_capture(self, what: str) -> None:
        if self.is_capturing:
            raise EmulatorError(f"{what} inside a capture")
