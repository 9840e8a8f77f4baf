"""A dry run's machine: the emulator on the CPU. All happens as on a GPU, but times say nothing of one."""

import platform
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupaged.kernels import launch
from cupaged.kernels.launch import Array
from tools.kernel_cases.case import Attention, Case, HostArrays, Maker, Shape
from tools.machine import CountedDevice, Generate, Mark, Times, summarize

SMALL_COPY = 2 << 20  # bytes


class GpuArrays(HostArrays):
    """Arrays of an emulated GPU, for what launches through it."""

    def __init__(self, gpu: Any) -> None:
        super().__init__("dry run")
        self._gpu = gpu

    def normal(self, shape: Shape, dtype: Any = np.float32, spread: float = 1.0) -> Array:
        return self._gpu.array(super().normal(shape, dtype, spread))

    def unwritten(self, shape: Shape, dtype: Any = np.float32) -> Array:
        return self._gpu.array(super().unwritten(shape, dtype))


class EmulatedMachine:
    """The CPU."""

    l2_bytes = 0
    maker: Maker = HostArrays("dry run")
    _gpu: Any = None  # the last one that was asked for

    def versions(self) -> dict[str, str]:
        return {"machine": f"emulator on {platform.machine()}: times say nothing of a GPU"}

    def prepare(self, cases: Sequence[Case]) -> int:  # noqa: ARG002
        return 0

    def resources(self, cases: Sequence[Case]) -> dict[str, dict[str, int]]:  # noqa: ARG002
        return {}

    def clocks(self) -> dict[str, str]:
        return {}

    def device(self, sources: Path) -> launch.Device:
        from tests.cuda_on_cpu.device import EmulatedDevice

        return EmulatedDevice(sources=sources)

    def to_device(self, array: NDArray[Any]) -> Array:
        return array.copy()

    def to_host(self, array: Array) -> NDArray[Any]:
        return np.array(array)

    def synchronize(self) -> None:
        if self._gpu is not None:
            self._gpu.synchronize()

    def time(self, launch: Callable[[int], Any], sources: Path, num_sets: int) -> Times:  # noqa: ARG002
        def work(i: int) -> None:
            launch(i)
            self.synchronize()

        return summarize([_seconds(partial(work, i)) for i in range(num_sets)], 1, num_sets)

    def copy_bandwidth(self) -> float:
        source = np.ones(1 << 22, np.float32)
        return 2 * source.nbytes / _seconds(source.copy)

    def matmul_flops(self) -> float:
        a = np.ones((256, 256), np.float32)
        return 2 * len(a) ** 3 / _seconds(lambda: a @ a)

    def link_bandwidth(self) -> dict[str, float]:
        gpu: Any = self.gpu()
        host, memory = gpu.pin(SMALL_COPY), gpu.allocate(SMALL_COPY)
        return {
            "to_host": SMALL_COPY / gpu.seconds(lambda: gpu.to_host(host, memory)),
            "to_device": SMALL_COPY / gpu.seconds(lambda: gpu.to_device(memory, host)),
        }

    def gpu(self) -> CountedDevice:
        from tests.cuda_on_cpu.gpu import EmulatedGpu

        self._gpu = EmulatedGpu()
        device: CountedDevice = self._gpu
        return device

    def gpu_maker(self) -> Maker:
        return GpuArrays(self._gpu)

    def mark(self) -> Mark:
        return perf_counter()

    def elapsed(self, start: Mark, end: Mark) -> float:
        return float(end - start)

    def sdpa(self, attention: Attention) -> Times | None:  # noqa: ARG002
        return None

    def transformers(self, config: Mapping[str, Any]) -> Generate | None:  # noqa: ARG002
        return None


def _seconds(work: Callable[[], Any]) -> float:
    start = perf_counter()
    work()
    return perf_counter() - start
