"""Arena: one allocation that a forward's arrays are cut from, in the host's memory or a device's.

base    made before the first layer: lives for the whole forward
even    ) the layers take turns: a layer's arrays live until the layer after the next begins
odd     )
"""

from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Array = Any  # of the memory: NumPy's, or the device's


class Memory(Protocol):
    """Where an arena lies."""

    alignment: int  # bytes, of each array

    def allocate(self, num_bytes: int) -> Array:
        """Return uint8[num_bytes], contents undefined; it begins at a multiple of the alignment."""

    def view(self, memory: Array, offset: int, shape: tuple[int, ...], dtype: Any) -> Array:
        """Return the packed array that lies `offset` bytes into uint8 `memory`."""

    def outline(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Return what stands for such an array while sizes are counted: it has no memory."""


def no_memory(shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """Return an array that has a shape and next to no memory."""
    return np.broadcast_to(np.zeros((), dtype), shape)


class HostMemory:
    """The host's own memory, for NumPy arrays."""

    alignment = 64  # a cache line and the widest vector
    outline = staticmethod(no_memory)

    def allocate(self, num_bytes: int) -> NDArray[np.uint8]:
        """Return memory that is touched only as far as it is used."""
        return self._aligned(np.empty(num_bytes + self.alignment, np.uint8))

    def zeros(self, num_bytes: int) -> NDArray[np.uint8]:
        """Return the like, but zeros."""
        return self._aligned(np.zeros(num_bytes + self.alignment, np.uint8))

    def _aligned(self, memory: NDArray[np.uint8]) -> NDArray[np.uint8]:
        skip = -memory.ctypes.data % self.alignment
        return memory[skip : skip + len(memory) - self.alignment]

    def view(
        self, memory: NDArray[np.uint8], offset: int, shape: tuple[int, ...], dtype: Any
    ) -> NDArray[Any]:
        """Return an array over a part of `memory`."""
        array: NDArray[Any] = np.ndarray(shape, dtype, memory, offset)
        return array


class ArenaState(NamedTuple):
    """How far a forward has come: the region that arrays are cut from, in bytes, and the layer."""

    start: int  # [start, used) are cut off, [used, end) are free
    used: int
    end: int
    base: int  # bytes before the first layer
    layer: int  # -1 before the first


class Arena:
    """Cuts aligned arrays off; counts instead of cutting while it measures."""

    def __init__(self, memory: Memory) -> None:
        self.memory: Array = None  # uint8[num_bytes], all of it, once it is created
        self.num_bytes = 0
        self.measuring = False
        self._allocate, self._view, self._outline = memory.allocate, memory.view, memory.outline
        self._alignment = memory.alignment
        self._largest_base = 0
        self._largest_layer = 0
        self.begin_forward()

    def create(self, num_bytes: int) -> None:
        """Allocate `num_bytes`, at once and for good."""
        self.memory = self._allocate(num_bytes)
        self.num_bytes = num_bytes
        self.begin_forward()

    def measure(self, run: Callable[[], Any]) -> int:
        """Return the bytes that `run` cuts off at most."""
        self.measuring = True
        self._largest_base = self._largest_layer = 0
        self.begin_forward()
        try:
            run()
        finally:
            self.measuring = False
            self.begin_forward()
        return self._largest_base + 2 * self._largest_layer

    def begin_forward(self) -> None:
        """Rewind everything."""
        self._start = self._used = self._base = 0
        self._end = self.num_bytes
        self._layer = -1

    def begin_layer(self) -> None:
        """Rewind the half that the layer before the last one used."""
        if self._layer < 0:
            self._base = self._used
        self._layer += 1
        half = (self.num_bytes - self._base) // 2 // self._alignment * self._alignment
        self._start = self._used = self._base + half * (self._layer % 2)
        self._end = self._start + half

    def rewind_layer(self) -> None:
        """Free what was made since the last begin_layer."""
        self._used = self._start

    def state(self) -> ArenaState:
        """Return where the forward stands."""
        return ArenaState(self._start, self._used, self._end, self._base, self._layer)

    def restore(self, state: ArenaState) -> None:
        """Go on from there, as if the arrays up to `state` had just been cut off, at the same places."""
        self._start, self._used, self._end, self._base, self._layer = state

    def take(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Return an array of `shape`, its contents undefined."""
        kind = np.dtype(dtype)
        first = self._used
        self._used += -(-prod(shape) * kind.itemsize // self._alignment) * self._alignment
        if self.measuring:
            if self._layer < 0:
                self._largest_base = max(self._largest_base, self._used)
            else:
                self._largest_layer = max(self._largest_layer, self._used - self._start)
            return self._outline(shape, kind)
        assert self._used <= self._end, (
            f"arena: {shape} {kind} ends at byte {self._used}, its region at {self._end} of {self.num_bytes}"
        )
        return self._view(self.memory, first, shape, kind)
