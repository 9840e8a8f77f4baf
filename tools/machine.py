"""What gpu_check needs of the machine that it runs on, and how it times there what it is given."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple, Protocol

from numpy.typing import NDArray

from cupaged.backend.device import Device
from cupaged.kernels import launch
from cupaged.kernels.launch import Array, ceil_div
from tools.kernel_cases.case import Attention, Case, Maker
from tools.kernel_cases.launches import record

NUM_LAUNCHES = 300  # whose host time is taken
NUM_WARM_UPS = 10  # repeats before those that count, 50 ms in which the clocks rise
NUM_REPEATS = 20  # the median counts
GRAPH_SECONDS = 5e-3  # about as long a graph is made; a gap of some us before it does not matter
MAX_CALLS = 256  # in a graph
LINK_BYTES = 512 << 20  # of a copy between host and device

Mark = Any  # a place in the stream of the machine's GPU
Generate = Callable[[int, int, int], float]  # (num_seqs, prompt_length, output_length) -> seconds


class Times(NamedTuple):
    """How long a call takes."""

    seconds: float  # the median
    spread: float  # of the middle 80 % of the repeats, as a share of the median
    num_calls: int  # of a repeat
    num_sets: int  # of arrays, used in turn


class CountedDevice(Device, Protocol):
    """A device that notes the bytes of each allocation, in order."""

    allocations: list[int]


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

    def device(self, sources: Path) -> launch.Device:
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

    def link_bandwidth(self) -> Mapping[str, float]:
        """Return the bytes a second of one copy of LINK_BYTES between pinned and device memory.

        "to_host", "to_device", and "both" at once on two streams.
        """

    def gpu(self) -> CountedDevice:
        """Return the device that an engine may run on, with all its memory."""

    def gpu_maker(self) -> Maker:
        """Return the maker of arrays on gpu()."""

    def mark(self) -> Mark:
        """Note a place in the stream of gpu()."""

    def elapsed(self, start: Mark, end: Mark) -> float:
        """Return the seconds from one mark to another, which the device has passed."""

    def sdpa(self, attention: Attention) -> Times | None:
        """Return the time of torch's scaled_dot_product_attention; None where torch is not installed."""

    def transformers(self, config: Mapping[str, Any]) -> Generate | None:
        """Return generate of a model by config.json, with random weights; None where there is no torch."""


def summarize(seconds: Sequence[float], num_calls: int, num_sets: int) -> Times:
    """Return the times of repeats, each of num_calls calls."""
    ordered = sorted(seconds)
    tenth = len(ordered) // 10
    median = statistics.median(ordered)
    return Times(median / num_calls, (ordered[-1 - tenth] - ordered[tenth]) / median, num_calls, num_sets)


def repeat(
    work: Callable[[], Any],
    record: Callable[[], Any],  # puts an event behind the work so far, and returns it
    elapsed: Callable[[Any, Any], float],  # ms between two events
    num_repeats: int = NUM_REPEATS,
) -> list[float]:
    """Return the GPU's seconds for each of so many repeats of `work`, one right behind the other."""
    for _ in range(NUM_WARM_UPS):
        work()
    events = [record()]
    for _ in range(num_repeats):
        work()
        events.append(record())
    events[-1].synchronize()
    return [elapsed(start, end) / 1e3 for start, end in pairwise(events)]


def calls_of_a_graph(seconds: float, num_sets: int) -> int:
    """Return how many calls of so many seconds make a graph, each set of arrays equally often."""
    rounds = min(MAX_CALLS // num_sets, round(GRAPH_SECONDS / max(seconds * num_sets, 1e-9)))
    return max(1, rounds) * num_sets


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
    for call in calls:
        call()
        machine.synchronize()
        start = perf_counter()
        for _ in range(NUM_LAUNCHES):
            call()
        found.append((perf_counter() - start) / NUM_LAUNCHES)
        machine.synchronize()
    return found[0], found[1]
