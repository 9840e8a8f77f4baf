"""The GPU that gpu_check runs kernels on, through CuPy. It has not met one yet.

Times are of many calls in one CUDA graph, with nothing between them but the GPU's own gaps. Graphs are put on
the stream one behind the other, so that the GPU is never idle between the events around one.
"""

import statistics
import subprocess
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupaged.backend.cupy_device import CudaDevice
from cupaged.kernels.compile import compile_kernels
from cupaged.kernels.launch import SOURCES, Array
from cupaged.kernels.nvrtc import nvrtc
from tools.gpu_peers import import_torch, load_transformers, time_sdpa, version_of
from tools.gpu_specs import ARCHITECTURES, blocks_per_sm
from tools.kernel_cases.case import Attention, Case, HostArrays, Maker, Shape
from tools.kernel_cases.launches import instances
from tools.machine import (
    LINK_BYTES,
    NUM_REPEATS,
    Generate,
    Mark,
    Times,
    calls_of_a_graph,
    repeat,
    summarize,
)

COPY_BYTES = 4 << 30
MATMUL_SIZE = 8192  # rows and columns, of which an H200 was seen to do 790 TFLOP/s through PyTorch
NUM_LINK_REPEATS = 5  # the best counts
CHUNK = 1 << 22  # random numbers that all large arrays are made of
PACKAGES = ("nvidia-cublas", "numpy", "numba", "torch", "transformers")  # whose versions may matter
STATE = (  # that nvidia-smi tells of
    "driver_version",
    "clocks.sm",
    "clocks.mem",
    "power.draw",
    "temperature.gpu",
    "clocks_event_reasons.active",
)


class DeviceArrays:
    """Large arrays on the GPU: the same random numbers over and over, in each array from another one on."""

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        self._chunks: dict[Any, Array] = {}
        self._num_made = 0

    def normal(self, shape: Shape, dtype: Any = np.float32, spread: float = 1.0) -> Array:
        key = (np.dtype(dtype), spread)
        if key not in self._chunks:
            self._chunks[key] = self.array(HostArrays("gpu_check").normal((CHUNK,), dtype, spread))
        self._num_made += 1
        chunk, array = self._chunks[key], self._cupy.empty(shape, dtype)
        flat, done = array.reshape(-1), 0
        while done < flat.size:
            first = (done + 7919 * self._num_made) % CHUNK
            part = flat[done : done + CHUNK - first]
            part.data.copy_from_device(chunk[first:].data, part.nbytes)
            done += part.size
        return self._ready(array)

    def integers(self, low: int, high: int, shape: Shape) -> Array:
        self._num_made += 1
        return self.array(HostArrays(f"gpu_check {self._num_made}").integers(low, high, shape))

    def unwritten(self, shape: Shape, dtype: Any = np.float32) -> Array:
        array = self._cupy.empty(shape, dtype)
        array.data.memset(0xFF, array.nbytes)
        return self._ready(array)

    def array(self, values: NDArray[Any]) -> Array:
        array = self._cupy.empty(values.shape, values.dtype)
        array.set(np.ascontiguousarray(values))
        return self._ready(array)

    def cache(self, shape: Shape, dtype: Any, used: NDArray[np.bool_]) -> Array:  # noqa: ARG002
        return self.normal(shape, dtype)

    def _ready(self, array: Array) -> Array:
        self._cupy.cuda.Device().synchronize()  # kernels run on a stream that waits for no other
        return array


class CountedGpu(CudaDevice):
    """A GPU that notes the bytes of each allocation."""

    def __init__(self, sources: Path = SOURCES) -> None:
        super().__init__(sources)
        self.allocations: list[int] = []

    def allocate(self, num_bytes: int) -> Array:
        self.allocations.append(num_bytes)
        return super().allocate(num_bytes)


class GpuMachine:
    """CuPy's current GPU."""

    def __init__(self) -> None:
        device = CountedGpu()
        self._devices = {SOURCES: device}
        self._cupy = device.cupy
        self.maker = DeviceArrays(device.cupy)
        self._properties = device.cupy.cuda.runtime.getDeviceProperties(device.cupy.cuda.Device().id)
        self.l2_bytes = int(self._properties["l2CacheSize"])

    def versions(self) -> dict[str, str]:
        runtime = self._cupy.cuda.runtime
        name, num_sms = self._properties["name"].decode(), self._properties["multiProcessorCount"]
        return {
            "GPU": f"{name}, {self._devices[SOURCES].arch}, {num_sms} SMs, {self.l2_bytes >> 20} MiB of L2",
            "driver": f"CUDA {runtime.driverGetVersion()}",
            "CuPy": f"{self._cupy.__version__}, CUDA {runtime.runtimeGetVersion()}",
            "NVRTC": ".".join(map(str, nvrtc().version)),
            **{package: version_of(package) for package in PACKAGES},
        }

    def prepare(self, cases: Sequence[Case]) -> int:
        arch, wanted = self._devices[SOURCES].arch, instances(cases)
        with ThreadPoolExecutor() as threads:
            for instance in wanted:
                threads.submit(compile_kernels, instance.path, arch, dict(instance.constants))
        return len(wanted)

    def resources(self, cases: Sequence[Case]) -> dict[str, dict[str, int]]:
        from cupy_backends.cuda.api import driver

        arch = self._devices[SOURCES].arch
        found: dict[str, dict[str, int]] = {}
        for instance in instances(cases):
            compiled = compile_kernels(instance.path, arch, dict(instance.constants))
            module = self._cupy.RawModule(path=str(compiled.path))
            for _, launch in instance.launches:
                function, shared_bytes = module.get_function(launch.kernel), launch.shared_bytes
                if shared_bytes > function.max_dynamic_shared_size_bytes:
                    function.max_dynamic_shared_size_bytes = shared_bytes
                needs = compiled.resources[launch.kernel]
                total = needs.shared_bytes + shared_bytes
                row = found[f"{launch.kernel} of {instance}, {total} bytes shared"] = {
                    "registers": function.num_regs,
                    "local_bytes": function.local_size_bytes,  # a thread's spills and stack
                    "blocks_per_sm": driver.occupancyMaxActiveBlocksPerMultiprocessor(
                        function.kernel.ptr, launch.block, shared_bytes
                    ),
                }
                if arch in ARCHITECTURES:
                    row["predicted_blocks_per_sm"] = blocks_per_sm(arch, launch.block, needs.registers, total)
        return found

    def clocks(self) -> dict[str, str]:
        command = ["nvidia-smi", f"--query-gpu={','.join(STATE)}", "--format=csv,noheader", "--id=0"]
        try:
            said = subprocess.run(command, capture_output=True, text=True, timeout=15, check=True).stdout
        except (OSError, subprocess.SubprocessError) as error:
            return {"nvidia-smi": f"says nothing: {error}"}
        return dict(zip(STATE, (value.strip() for value in said.split(",")), strict=False))

    def device(self, sources: Path) -> CountedGpu:
        if sources not in self._devices:
            self._devices[sources] = CountedGpu(sources)
        return self._devices[sources]

    def to_device(self, array: NDArray[Any]) -> Array:
        return self.maker.array(array)

    def to_host(self, array: Array) -> NDArray[Any]:
        self.synchronize()
        host: NDArray[Any] = array.get()
        return host

    def synchronize(self) -> None:
        self._cupy.cuda.Device().synchronize()

    def time(self, launch: Callable[[int], Any], sources: Path, num_sets: int) -> Times:
        stream = self.device(sources).cupy_stream

        def launch_all(num_calls: int) -> None:
            for i in range(num_calls):
                launch(i)

        launch_all(num_sets)  # compiles, loads, warms up
        once = min(self._seconds(stream, lambda: launch_all(num_sets), 2)) / num_sets
        num_calls = calls_of_a_graph(once, num_sets)
        stream.begin_capture()
        launch_all(num_calls)
        graph = stream.end_capture()
        return summarize(self._seconds(stream, lambda: graph.launch(stream)), num_calls, num_sets)

    def _seconds(self, stream: Any, work: Callable[[], Any], num_repeats: int = NUM_REPEATS) -> list[float]:
        """Return the GPU's seconds for what `work` puts on the stream, for each of so many repeats."""
        cuda = self._cupy.cuda
        return repeat(work, lambda: stream.record(), cuda.get_elapsed_time, num_repeats)

    def copy_bandwidth(self) -> float:
        runtime, stream = self._cupy.cuda.runtime, self._devices[SOURCES].cupy_stream
        source = self.maker.normal((COPY_BYTES // 4,))
        target = self.maker.unwritten(source.shape)
        kind = runtime.memcpyDeviceToDevice

        def copy() -> None:
            runtime.memcpyAsync(target.data.ptr, source.data.ptr, COPY_BYTES, kind, stream.ptr)

        return 2 * COPY_BYTES / statistics.median(self._seconds(stream, copy))

    def matmul_flops(self) -> float:
        import ml_dtypes

        shape, stream = (MATMUL_SIZE, MATMUL_SIZE), self._devices[SOURCES].cupy_stream
        a, b = (self.maker.normal(shape, ml_dtypes.bfloat16) for _ in range(2))
        with stream:  # cuBLAS runs on CuPy's current stream
            return 2 * MATMUL_SIZE**3 / statistics.median(self._seconds(stream, lambda: a @ b))

    def link_bandwidth(self) -> dict[str, float]:
        runtime, gpu = self._cupy.cuda.runtime, self.gpu()
        kinds = {"to_host": runtime.memcpyDeviceToHost, "to_device": runtime.memcpyHostToDevice}
        places = {name: (gpu.pin(LINK_BYTES), gpu.allocate(LINK_BYTES)) for name in kinds}
        streams = {name: self._cupy.cuda.Stream(non_blocking=True) for name in kinds}

        def seconds(*names: str) -> float:
            self.synchronize()
            start = perf_counter()
            for name in names:
                host, memory = places[name][0].ctypes.data, places[name][1].data.ptr
                ends = (host, memory) if name == "to_host" else (memory, host)
                runtime.memcpyAsync(*ends, LINK_BYTES, kinds[name], streams[name].ptr)
            self.synchronize()
            return perf_counter() - start

        asked = {name: (name,) for name in kinds} | {"both": tuple(kinds)}
        return {
            name: len(names) * LINK_BYTES / min(seconds(*names) for _ in range(NUM_LINK_REPEATS))
            for name, names in asked.items()
        }

    def gpu(self) -> CountedGpu:
        return self._devices[SOURCES]

    def gpu_maker(self) -> Maker:
        return self.maker

    def mark(self) -> Mark:
        return self.gpu().cupy_stream.record()

    def elapsed(self, start: Mark, end: Mark) -> float:
        return float(self._cupy.cuda.get_elapsed_time(start, end)) / 1e3

    def sdpa(self, attention: Attention) -> Times | None:
        torch = import_torch()
        return time_sdpa(torch, attention, self.l2_bytes) if torch else None

    def transformers(self, config: Mapping[str, Any]) -> Generate | None:
        torch = import_torch()
        return load_transformers(torch, config) if torch else None
