"""What gpu_check needs of the machine that it runs on, and a dry run's machine: the emulator on the CPU."""

import platform
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from cupaged.kernels.launch import Array, Device, ceil_div
from tools.kernel_cases.case import Attention, Case, HostArrays, Maker
from tools.kernel_cases.launches import record

NUM_LAUNCHES = 300  # whose host time is taken


class Times(NamedTuple):
    """How long a call takes."""

    seconds: float  # the median
    spread: float  # of the middle 80 % of the repeats, as a share of the median
    num_calls: int  # of a repeat
    num_sets: int  # of arrays, used in turn


class Machine(Protocol):
    """Runs and times kernels."""

    l2_bytes: int

    @property
    def maker(self) -> Maker:
        """Return the maker of large arrays."""

    def versions(self) -> dict[str, str]: ...

    def prepare(self, cases: Sequence[Case]) -> int:
        """Compile what the cases launch, many at a time; return how many. Errors come where they are run."""

    def resources(self, cases: Sequence[Case]) -> dict[str, dict[str, int]]:
        """Return what the driver says of each kernel of the cases, as it is loaded and launched."""

    def clocks(self) -> dict[str, str]:
        """Return the GPU's state: clocks, power, temperature, and what holds the clocks down."""

    def device(self, sources: Path) -> Device:
        """Return the device for the .cu files of a folder."""

    def to_device(self, array: NDArray[Any]) -> Array: ...

    def to_host(self, array: Array) -> NDArray[Any]: ...

    def synchronize(self) -> None: ...

    def time(self, launch: Callable[[int], Any], sources: Path, num_sets: int) -> Times:
        """Return the time of launch(i), for i = 0, 1, ... in turn; what it launches is of `sources`."""

    def copy_bandwidth(self) -> float:
        """Return the bytes a second, read + write, of a large copy."""

    def matmul_flops(self) -> float:
        """Return the FLOPs a second of a large bf16 product."""

    def sdpa(self, attention: Attention) -> Times | None:
        """Return the time of torch's scaled_dot_product_attention; None where torch is not installed."""


def summarize(seconds: Sequence[float], num_calls: int, num_sets: int) -> Times:
    """Return the times of repeats, each of num_calls calls."""
    ordered = sorted(seconds)
    tenth = len(ordered) // 10
    median = statistics.median(ordered)
    return Times(median / num_calls, (ordered[-1 - tenth] - ordered[tenth]) / median, num_calls, num_sets)


def time_case(machine: Machine, case: Case) -> tuple[Times, dict[str, float]]:
    """Return the time of a case, and the seconds of each of its kernels alone if it has several.

    It has so many sets of arrays that no call finds its own in L2.
    """
    sets = [case.make(machine.maker)]
    num_bytes = sum(array.nbytes for array in sets[0].values())
    num_sets = max(2, ceil_div(3 * machine.l2_bytes, num_bytes))
    sets += [case.make(machine.maker) for _ in range(num_sets - 1)]
    device, launches = machine.device(case.sources), [record(case, arrays) for arrays in sets]

    def launch_one(place: int, i: int) -> None:
        launch = launches[i % num_sets][place]
        kernel = device.kernel(launch.file, launch.kernel, **launch.constants)
        kernel(launch.grid, launch.block, launch.args, launch.shared_bytes)

    whole = machine.time(lambda i: case.launch(device, sets[i % num_sets]), case.sources, num_sets)
    several = launches[0] if len(launches[0]) > 1 else []
    return whole, {
        launch.kernel: machine.time(partial(launch_one, place), case.sources, num_sets).seconds
        for place, launch in enumerate(several)
    }


def launch_overhead(machine: Machine, case: Case) -> tuple[float, float]:
    """Return the host's seconds for a case's launch function, and for its first kernel's launch alone."""
    device, arrays = machine.device(case.sources), case.make(machine.maker)
    first = record(case, arrays)[0]
    kernel = device.kernel(first.file, first.kernel, **first.constants)
    calls: tuple[Callable[[], None], ...] = (
        lambda: case.launch(device, arrays),
        lambda: kernel(first.grid, first.block, first.args, first.shared_bytes),
    )
    found = []
    for launch in calls:
        launch()
        machine.synchronize()
        start = perf_counter()
        for _ in range(NUM_LAUNCHES):
            launch()
        found.append((perf_counter() - start) / NUM_LAUNCHES)
        machine.synchronize()
    return found[0], found[1]


class EmulatedMachine:
    """The CPU, for a dry run: everything happens as on a GPU, but times say nothing of one."""

    l2_bytes = 0
    maker: Maker = HostArrays("dry run")

    def versions(self) -> dict[str, str]:
        return {"machine": f"emulator on {platform.machine()}: times say nothing of a GPU"}

    def prepare(self, cases: Sequence[Case]) -> int:  # noqa: ARG002
        return 0

    def resources(self, cases: Sequence[Case]) -> dict[str, dict[str, int]]:  # noqa: ARG002
        return {}

    def clocks(self) -> dict[str, str]:
        return {}

    def device(self, sources: Path) -> Device:
        from tests.cuda_on_cpu.device import EmulatedDevice

        return EmulatedDevice(sources=sources)

    def to_device(self, array: NDArray[Any]) -> Array:
        return array.copy()

    def to_host(self, array: Array) -> NDArray[Any]:
        return np.array(array)

    def synchronize(self) -> None: ...

    def time(self, launch: Callable[[int], Any], sources: Path, num_sets: int) -> Times:  # noqa: ARG002
        return summarize([_seconds(partial(launch, i)) for i in range(num_sets)], 1, num_sets)

    def copy_bandwidth(self) -> float:
        source = np.ones(1 << 22, np.float32)
        return 2 * source.nbytes / _seconds(source.copy)

    def matmul_flops(self) -> float:
        a = np.ones((256, 256), np.float32)
        return 2 * len(a) ** 3 / _seconds(lambda: a @ a)

    def sdpa(self, attention: Attention) -> Times | None:  # noqa: ARG002
        return None


def _seconds(work: Callable[[], Any]) -> float:
    start = perf_counter()
    work()
    return perf_counter() - start
