"""Device: what CudaBackend needs of a GPU. CuPy's is in cupy_device.py; the tests emulate one on the CPU.

Kernels, copies and matrix products run in order on one stream, while the host goes on; the host sees what
they did once it has waited for an event recorded behind them. One thread drives a device.
"""

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from cupaged.kernels import launch
from cupaged.kernels.launch import Array

ALIGNMENT = 256  # bytes, of what is allocated and what is cut from it: cuBLAS wants 16, caches 128


class Event(Protocol):
    """A place in the stream."""

    def synchronize(self) -> None:
        """Wait until the device has done all before it."""


class Graph(Protocol):
    """Recorded work."""

    def launch(self) -> None:
        """Put it on the stream, once more."""


class Device(launch.Device, Protocol):
    """A GPU with its memory and its stream."""

    name: str  # of the GPU, such as NVIDIA H200
    num_sms: int
    stream: int  # its address, for libraries that take one

    @property
    def cublaslt(self) -> Any:
        """Return the library, its functions by name as in ctypes.CDLL."""

    def memory_info(self) -> tuple[int, int]:
        """Return the bytes of memory that are free, and all there are."""

    def allocate(self, num_bytes: int) -> Array:
        """Return uint8[num_bytes] of device memory, contents undefined; ValueError if it is not there.

        It begins at a multiple of ALIGNMENT and goes back when nothing refers to it any more.
        """

    def pin(self, num_bytes: int) -> NDArray[np.uint8]:
        """Return page-locked host memory, which copies to and from a device must have."""

    def view(self, memory: Array, offset: int, shape: tuple[int, ...], dtype: Any) -> Array:
        """Return the packed array that lies `offset` bytes into uint8 `memory`."""

    def address(self, array: Array) -> int:
        """Return where an array begins, for libraries that take pointers."""

    def to_device(self, target: Array, source: NDArray[Any]) -> None:
        """Copy packed, pinned `source`, which must stay as it is until the device has done so."""

    def to_host(self, target: NDArray[Any], source: Array) -> None:
        """Copy to packed, pinned `target`, which has the values once the device has done so."""

    def record(self) -> Event:
        """Return the place behind all work so far."""

    def seconds(self, work: Callable[[], None]) -> float:
        """Return how long the device takes for `work`, waiting for it."""

    def capture(self, work: Callable[[], None]) -> Graph:
        """Record what `work` would put on the stream; nothing runs. All it launches must have run before."""
