"""CudaMemory: all memory of a CudaBackend, of the device and pinned, and what passes between them.

Device memory is allocated in four pieces, of the sizes that `measure` told of to the byte:

    weights      one behind the other, with tables and what else is made once
    workspace    of matrix products, then the batch of the step
    arena        what operations return their results in
    KV cache

Blocks that are swapped out go to one piece of pinned memory, beside what staging.py has.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupaged.backend.arena import Arena
from cupaged.backend.base import Array, Limits, MemoryUse
from cupaged.backend.device import ALIGNMENT, Device
from cupaged.backend.device_batch import DeviceBatches, batch_words
from cupaged.backend.gemm import WORKSPACE_BYTES
from cupaged.backend.rehearsal import outline
from cupaged.backend.staging import PIECE, Fetches, Uploads, fetched_bytes
from cupaged.batch import Batch
from cupaged.kernels.launch import ceil_div


class DeviceMemory:
    """arena.Memory of a device; keeps account of what is allocated."""

    alignment = ALIGNMENT
    outline = staticmethod(outline)

    def __init__(self, device: Device) -> None:
        self.allocations: list[int] = []  # bytes of each so far
        self._device = device
        self.view = device.view

    def allocate(self, num_bytes: int) -> Array:
        """Return uint8[num_bytes] of device memory."""
        memory = self._device.allocate(num_bytes)
        self.allocations.append(num_bytes)
        return memory


class CudaMemory:
    """Measures and allocates; after that a step takes what is there."""

    def __init__(self, device: Device, max_in_flight: int) -> None:
        """Allocate nothing yet."""
        self._device = device
        self._kept = max_in_flight + 1  # steps that have pinned memory of their own
        self._memory = DeviceMemory(device)
        self._weights, self.arena = Arena(self._memory), Arena(self._memory)
        self._most_fetched = self._fetched = 0  # bytes of a step, counted while measuring

    @property
    def measuring(self) -> bool:
        """Return whether arrays have no memory now."""
        return self.arena.measuring

    def measure(self, limits: Limits, rehearse: Callable[[], Any]) -> MemoryUse:
        """Return what has to be allocated for `rehearse`; the reserve is not ours to know."""
        num_words = batch_words(limits)
        self._batches = DeviceBatches(outline((num_words,), np.int32))
        activations = 0

        def run() -> None:
            nonlocal activations
            activations = self.arena.measure(rehearse)

        weights = self._weights.measure(run)
        words = ceil_div(4 * num_words, ALIGNMENT) * ALIGNMENT
        return MemoryUse(weights, workspace=WORKSPACE_BYTES + words, activations=activations, reserve=0)

    def allocate(self, limits: Limits, use: MemoryUse) -> None:
        """Take the memory; ValueError if it is not there."""
        num_words = batch_words(limits)
        self._free_before = self.free()
        self._weights.create(use.weights)
        workspace = self._memory.allocate(use.workspace)
        self.gemm_workspace: Array = self._device.view(workspace, 0, (WORKSPACE_BYTES,), np.uint8)
        self._words = self._device.view(workspace, WORKSPACE_BYTES, (num_words,), np.int32)
        self._batches = DeviceBatches(self._words)
        self.arena.create(use.activations)
        self._uploads = Uploads(self._device, 4 * num_words, self._kept)
        self._fetches = Fetches(self._device, self._most_fetched, self._kept)
        self._loads: Uploads | None = Uploads(self._device, PIECE, 2)

    def create_pool(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Allocate the KV cache."""
        if self.measuring:
            return outline(shape, dtype)
        return self._device.view(self._memory.allocate(prod(shape) * dtype.itemsize), 0, shape, dtype)

    def create_host_pool(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Pin the blocks that are swapped out; the steps' stream alone touches them."""
        if self.measuring:
            return outline(shape, dtype)
        return self._device.pin(prod(shape) * dtype.itemsize).view(dtype).reshape(shape)

    # What the account says.
    @property
    def allocations(self) -> list[int]:
        """Return the bytes of each piece of device memory."""
        return list(self._memory.allocations)

    def free(self) -> int:
        """Return the bytes that are free on the device."""
        return self._device.memory_info()[0]

    def driver_bytes(self) -> int:
        """Return what went since `allocate` began and is not ours."""
        return self._free_before - self.free() - sum(self._memory.allocations)

    # Weights.
    def keep(self, parts: Sequence[NDArray[Any]], shape: tuple[int, ...], dtype: Any) -> Array:
        """Return the parts, one behind the other along the first axis, as one array that stays."""
        kept = self._weights.take(shape, dtype)
        if self.measuring:
            return kept
        assert self._loads is not None, "all weights are loaded before the first step"
        first = 0
        for part in parts:
            self._loads.copy_rows(kept[first : first + len(part)], part)
            first += len(part)
        return kept

    def finish_weights(self) -> None:
        """Wait for them and free what they came through."""
        assert self._loads is not None, "weights are finished once"
        self._loads.finish()
        self._loads = None
        taken, planned = self._weights.state().used, self._weights.num_bytes
        assert taken == planned, f"weights take {taken} bytes, planned were {planned}"

    # A step.
    def begin_step(self) -> None:
        """Free all results, and for what this step fetches the memory of the oldest."""
        self.arena.begin_forward()
        if self.measuring:
            self._fetched = 0
        else:
            self._fetches.begin_step()

    def upload(self, host: Batch) -> Batch:
        """Return the batch on the device, by one copy; it replaces the one of the step before."""
        if not self.measuring:
            words = host.words
            self._uploads.copy(self._words[: len(words)], words)
        return self._batches.cut(host)

    def fetch(self, array: Array) -> Callable[[], NDArray[Any]]:
        """Start copying to pinned memory; the call waits for it and returns what the caller owns."""
        if not self.measuring:
            return self._fetches.fetch(array)
        self._fetched += fetched_bytes(array)
        self._most_fetched = max(self._most_fetched, self._fetched)
        return lambda: array
