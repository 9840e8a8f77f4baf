"""Staging: page-locked host memory that everything on its way to a device or back passes through.

A copy of it runs while the host goes on, so each piece is used anew only behind the event that its copy is
done. All of it is made at load.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupaged.backend.device import Device, Event
from cupaged.kernels.launch import Array, ceil_div

PIECE = 16 << 20  # bytes, of weights under way at a time; two of them take turns
ALIGNMENT = 64  # bytes, of each fetched array


class Uploads:
    """Copies to a device that leave their source free at once; pieces take turns."""

    def __init__(self, device: Device, num_bytes: int, num_pieces: int) -> None:
        """Make room for copies of at most `num_bytes`, `num_pieces` of them under way."""
        self.num_bytes = num_bytes
        self._device = device
        self._pieces = [device.pin(num_bytes) for _ in range(num_pieces)]
        self._events: list[Event | None] = [None] * num_pieces
        self._next = 0

    def copy(self, target: Array, source: NDArray[Any]) -> None:
        """Copy to packed `target` of the same shape, converting to its type."""
        piece = self._next
        self._next = (piece + 1) % len(self._pieces)
        event = self._events[piece]
        if event is not None:
            event.synchronize()
        assert target.nbytes <= self.num_bytes, f"{target.nbytes} bytes, in pieces of {self.num_bytes}"
        staged = self._pieces[piece][: target.nbytes].view(target.dtype).reshape(target.shape)
        np.copyto(staged, source, casting="unsafe")  # float types of either side are those of checkpoints
        self._device.to_device(target, staged)
        self._events[piece] = self._device.record()

    def copy_rows(self, target: Array, source: NDArray[Any]) -> None:
        """Copy an array of any size by as many rows at a time as fit, or elements of a vector."""
        row_bytes = max(1, target.nbytes // max(1, len(target)))
        rows = max(1, self.num_bytes // row_bytes)
        for first in range(0, len(target), rows):
            self.copy(target[first : first + rows], source[first : first + rows])

    def finish(self) -> None:
        """Wait for all copies."""
        for event in self._events:
            if event is not None:
                event.synchronize()


class Fetches:
    """Copies to the host, of the last few steps: a step's memory is used anew `num_steps` steps later."""

    def __init__(self, device: Device, step_bytes: int, num_steps: int) -> None:
        """Make room for `step_bytes` of each step, as fetched_bytes counts them."""
        self._device = device
        self._pieces = [device.pin(step_bytes) for _ in range(num_steps)]
        self._step = self._used = 0

    def begin_step(self) -> None:
        """Use the memory of the oldest step anew."""
        self._step += 1
        self._used = 0

    def fetch(self, array: Array) -> Callable[[], NDArray[Any]]:
        """Start copying; the call waits and returns a copy. It must come before the memory's next use."""
        step, piece = self._step, self._pieces[self._step % len(self._pieces)]
        first = self._used
        self._used += fetched_bytes(array)
        assert self._used <= len(piece), f"a step fetches {self._used} bytes, planned were {len(piece)}"
        staged = piece[first : first + array.nbytes].view(array.dtype).reshape(array.shape)
        self._device.to_host(staged, array)
        event = self._device.record()

        def result() -> NDArray[Any]:
            late = self._step - step
            assert late < len(self._pieces), f"{late} steps began since; {len(self._pieces)} are kept"
            event.synchronize()
            copy: NDArray[Any] = staged.copy()
            return copy

        return result


def fetched_bytes(array: Array) -> int:
    """Return the bytes that a fetched array takes of its step's memory."""
    return ceil_div(int(array.nbytes), ALIGNMENT) * ALIGNMENT
