"""The GPU that gpu_check runs kernels on, through CuPy. It has not met one yet.

Times are of many calls in one CUDA graph, with nothing between them but the GPU's own gaps.
"""

import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupaged.backend.device import CudaDevice
from cupaged.kernels.compile import compile_kernels
from cupaged.kernels.launch import SOURCES, Array, ceil_div
from cupaged.kernels.nvrtc import nvrtc
from tools.kernel_cases.case import Attention, Case, HostArrays, Shape
from tools.kernel_cases.launches import instances
from tools.machine import Times, summarize

NUM_REPEATS = 20  # the median counts
GRAPH_SECONDS = 2e-3  # about as long a graph is made
MAX_CALLS = 256  # in a graph
COPY_BYTES = 4 << 30
MATMUL_SIZE = 8192  # rows and columns, as the 790 TFLOP/s of FACTS 4 were measured
CHUNK = 1 << 22  # random numbers that all large arrays are made of


def import_torch() -> Any:
    """Return torch, or None where it is not installed."""
    try:
        import torch
    except ImportError:
        return None
    return torch


class DeviceArrays:
    """Large arrays on the GPU: the same random numbers over and over, in each array from another one on."""

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        self._chunks: dict[Any, NDArray[Any]] = {}
        self._num_made = 0

    def normal(self, shape: Shape, dtype: Any = np.float32, spread: float = 1.0) -> Array:
        key = (np.dtype(dtype), spread)
        if key not in self._chunks:
            self._chunks[key] = HostArrays("gpu_check").normal((CHUNK,), dtype, spread)
        self._num_made += 1
        chunk = np.roll(self._chunks[key], 7919 * self._num_made)
        array = self._cupy.empty(shape, dtype)
        flat = array.reshape(-1)
        for start in range(0, flat.size, CHUNK):
            part = flat[start : start + CHUNK]
            part.set(chunk[: part.size])
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


class GpuMachine:
    """CuPy's current GPU."""

    def __init__(self) -> None:
        device = CudaDevice()
        self._devices = {SOURCES: device}
        self._cupy = device.cupy
        self.maker = DeviceArrays(device.cupy)
        self._properties = device.cupy.cuda.runtime.getDeviceProperties(device.cupy.cuda.Device().id)
        self.l2_bytes = int(self._properties["l2CacheSize"])

    def versions(self) -> dict[str, str]:
        runtime, torch = self._cupy.cuda.runtime, import_torch()
        name, num_sms = self._properties["name"].decode(), self._properties["multiProcessorCount"]
        return {
            "GPU": f"{name}, {self._devices[SOURCES].arch}, {num_sms} SMs, {self.l2_bytes >> 20} MiB of L2",
            "driver": f"CUDA {runtime.driverGetVersion()}",
            "CuPy": f"{self._cupy.__version__}, CUDA {runtime.runtimeGetVersion()}",
            "NVRTC": ".".join(map(str, nvrtc().version)),
            "torch": torch.__version__ if torch else "not installed",
        }

    def prepare(self, cases: Sequence[Case]) -> int:
        arch, wanted = self._devices[SOURCES].arch, instances(cases)
        with ThreadPoolExecutor() as threads:
            for instance in wanted:
                threads.submit(compile_kernels, instance.path, arch, dict(instance.constants))
        return len(wanted)

    def device(self, sources: Path) -> CudaDevice:
        if sources not in self._devices:
            self._devices[sources] = CudaDevice(sources)
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
        stream = self.device(sources).stream

        def launch_all(num_calls: int) -> None:
            for i in range(num_calls):
                launch(i)

        launch_all(num_sets)  # compiles, loads, warms up
        once = self._elapsed(stream, lambda: launch_all(num_sets)) / num_sets
        num_calls = calls_of_a_graph(once, num_sets)
        stream.begin_capture()
        launch_all(num_calls)
        graph = stream.end_capture()
        self._elapsed(stream, lambda: graph.launch(stream))
        seconds = [self._elapsed(stream, lambda: graph.launch(stream)) for _ in range(NUM_REPEATS)]
        return summarize(seconds, num_calls, num_sets)

    def _elapsed(self, stream: Any, work: Callable[[], Any]) -> float:
        """Return the GPU's seconds for what `work` puts on the stream."""
        start, end = self._cupy.cuda.Event(), self._cupy.cuda.Event()
        start.record(stream)
        work()
        end.record(stream)
        end.synchronize()
        return float(self._cupy.cuda.get_elapsed_time(start, end)) / 1e3

    def copy_bandwidth(self) -> float:
        runtime, stream = self._cupy.cuda.runtime, self._devices[SOURCES].stream
        source = self.maker.normal((COPY_BYTES // 4,))
        target = self.maker.unwritten(source.shape)
        kind = runtime.memcpyDeviceToDevice

        def copy() -> None:
            runtime.memcpyAsync(target.data.ptr, source.data.ptr, COPY_BYTES, kind, stream.ptr)

        self._elapsed(stream, copy)
        return 2 * COPY_BYTES / statistics.median(self._elapsed(stream, copy) for _ in range(NUM_REPEATS))

    def matmul_flops(self) -> float:
        import ml_dtypes

        shape, stream = (MATMUL_SIZE, MATMUL_SIZE), self._devices[SOURCES].stream
        a, b = (self.maker.normal(shape, ml_dtypes.bfloat16) for _ in range(2))
        with stream:  # cuBLAS runs on CuPy's current stream
            self._elapsed(stream, lambda: a @ b)
            seconds = [self._elapsed(stream, lambda: a @ b) for _ in range(NUM_REPEATS)]
        return 2 * MATMUL_SIZE**3 / statistics.median(seconds)

    def sdpa(self, attention: Attention) -> Times | None:
        torch = import_torch()
        return time_sdpa(torch, attention, self.l2_bytes) if torch else None


def calls_of_a_graph(seconds: float, num_sets: int) -> int:
    """Return how many calls of so many seconds make a graph, each set of arrays equally often."""
    rounds = min(MAX_CALLS // num_sets, round(GRAPH_SECONDS / max(seconds * num_sets, 1e-9)))
    return max(1, rounds) * num_sets


def time_sdpa(torch: Any, attention: Attention, l2_bytes: int) -> Times:
    """Return the time of torch's attention, in a CUDA graph over several sets of inputs too."""
    dtype = {"bf16": torch.bfloat16, "f16": torch.float16}[attention.element]
    q_shape = (attention.num_seqs, attention.num_heads, attention.num_queries, attention.head_dim)
    kv_shape = (attention.num_seqs, attention.num_kv_heads, attention.length, attention.head_dim)
    num_bytes = 2 * (np.prod(q_shape, dtype=int) + 2 * np.prod(kv_shape, dtype=int))
    num_sets = max(2, ceil_div(3 * l2_bytes, int(num_bytes)))
    sets = [
        [torch.randn(shape, dtype=dtype, device="cuda") for shape in (q_shape, kv_shape, kv_shape)]
        for _ in range(num_sets)
    ]

    def launch(num_calls: int) -> None:
        for i in range(num_calls):
            torch.nn.functional.scaled_dot_product_attention(
                *sets[i % num_sets], is_causal=attention.num_queries > 1, enable_gqa=True
            )

    def elapsed(work: Callable[[], Any]) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    launch(num_sets)
    num_calls = calls_of_a_graph(elapsed(lambda: launch(num_sets)) / num_sets, num_sets)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(num_calls)
    elapsed(graph.replay)
    return summarize([elapsed(graph.replay) for _ in range(NUM_REPEATS)], num_calls, num_sets)
