"""Arena: one allocation that a forward's arrays are cut from.

base    made before the first layer: lives for the whole forward
even    ) the layers take turns: a layer's arrays live until the layer after the next begins
odd     )
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

ALIGNMENT = 64  # bytes, a cache line and the widest vector


def no_memory(shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """Return an array that has a shape and next to no memory."""
    return np.broadcast_to(np.zeros((), dtype), shape)


class Arena:
    """Cuts aligned arrays off; counts instead of cutting while it measures."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.measuring = False
        self._memory: NDArray[np.uint8] = np.empty(0, np.uint8)
        self._largest_base = 0
        self._largest_layer = 0
        self.begin_forward()

    def create(self, num_bytes: int) -> None:
        """Allocate `num_bytes`, at once and for good."""
        memory = np.empty(num_bytes + ALIGNMENT, np.uint8)
        skip = -memory.ctypes.data % ALIGNMENT
        self._memory = memory[skip : skip + num_bytes]
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
        half = (self.num_bytes - self._base) // 2 // ALIGNMENT * ALIGNMENT
        self._start = self._used = self._base + half * (self._layer % 2)
        self._end = self._start + half

    def rewind_layer(self) -> None:
        """Free what was made since the last begin_layer."""
        self._used = self._start

    def take(self, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        """Return an array of `shape`, its contents undefined."""
        kind = np.dtype(dtype)
        count = 1
        for size in shape:
            count *= size
        first = self._used
        self._used += -(-count * kind.itemsize // ALIGNMENT) * ALIGNMENT
        if self.measuring:
            if self._layer < 0:
                self._largest_base = max(self._largest_base, self._used)
            else:
                self._largest_layer = max(self._largest_layer, self._used - self._start)
            return no_memory(shape, kind)
        assert self._used <= self._end, (
            f"arena: {shape} {kind} ends at byte {self._used}, its region at {self._end} of {self.num_bytes}"
        )
        memory: NDArray[Any] = self._memory[first : first + count * kind.itemsize].view(kind)
        return memory.reshape(shape)
