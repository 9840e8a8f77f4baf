"""CudaKernel: one kernel on a GPU, launched through CuPy with little more than the driver's call."""

import ctypes
import struct
import threading
from typing import Any

from cupaged.kernels.launch import Grid, Parameter


class CurrentGpu(threading.local):
    """Makes a GPU the current one of the thread that calls: CUDA keeps one for each thread.

    `__init__` runs once more in every thread that asks for an attribute; so a thread has `launch` only after
    the GPU was made its own. What else runs in a thread may choose another GPU: hence `use`.
    """

    def __init__(self, gpu: Any, memory_info: Any, launch: Any) -> None:
        self.use = gpu.use  # of a cupy.cuda.Device
        self.launch = launch  # the driver's
        self.use()
        memory_info()  # the driver, unlike the runtime, wants the GPU's context bound by an earlier call


class CudaKernel:
    """One loaded kernel."""

    def __init__(
        self, function: Any, declared: tuple[Parameter, ...], stream: int, current: CurrentGpu
    ) -> None:
        self._function = function  # a cupy.RawKernel, which keeps its module loaded
        self._address = function.kernel.ptr
        self._current = current
        self._stream = stream
        self._shared_bytes = 0  # dynamic, that we saw to it that it may have
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
        launch = self._current.launch  # first: CuPy looks a kernel up by the thread's current GPU
        if shared_bytes > self._shared_bytes:
            self._allow_shared(shared_bytes)
        values = list(args)
        for i, parameter in self._pointers:
            array = values[i]
            values[i] = address = 0 if array is None else array.data.ptr
            assert address % parameter.alignment == 0, f"{parameter} begins at {address:#x}"
        self._pack_into(self._values, 0, *values)
        launch(self._address, *grid, block, 1, 1, shared_bytes, self._stream, self._args, 0)

    def _allow_shared(self, shared_bytes: int) -> None:
        """Let a block have so much dynamic shared memory: more than 48 KiB only if the kernel may have it.

        CuPy loads a cubin once, so another device of this process may have the same kernel, and need more.
        """
        function = self._function
        self._shared_bytes = max(shared_bytes, function.max_dynamic_shared_size_bytes)
        function.max_dynamic_shared_size_bytes = self._shared_bytes
        # Percent of what L1 and shared memory have together: the blocks an SM holds must not be fewer because
        # the driver left more of it to L1.
        function.preferred_shared_memory_carveout = 100
