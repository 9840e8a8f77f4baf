"""How gpu_check times a GPU, with a stand-in for CuPy whose clock is known."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupaged.kernels.compile import Compiled, Resources
from cupaged.kernels.launch import SOURCES
from tests.tools.fake_stream import CALL_SECONDS, Stream
from tools.emulated_machine import EmulatedMachine
from tools.gpu_machine import CHUNK, NUM_LINK_REPEATS, GpuMachine
from tools.kernel_cases import TIMED, TRAFFIC
from tools.kernel_cases.launches import record
from tools.machine import (
    LINK_BYTES,
    NUM_REPEATS,
    calls_of_a_graph,
    launch_overhead,
    summarize,
    time_case,
)


class Array(np.ndarray[Any, Any]):
    """A NumPy array with the few names of a CuPy array that are used."""

    def set(self, values: np.ndarray[Any, Any]) -> None:
        assert values.dtype == self.dtype
        assert values.flags.c_contiguous
        self[...] = values

    def get(self) -> np.ndarray[Any, Any]:
        return np.array(self)

    @property
    def data(self) -> Any:
        return Memory(self)


class Memory:
    """Where an array's elements begin."""

    def __init__(self, array: Array) -> None:
        self.bytes = array.view(np.uint8).reshape(-1)

    def memset(self, value: int, size: int) -> None:
        self.bytes[:size] = value

    def copy_from_device(self, source: "Memory", size: int) -> None:
        self.bytes[:size] = source.bytes[:size]


class Device:
    """A GPU: every launch takes CALL_SECONDS."""

    arch = "sm_90"

    def __init__(self, sources: Path = SOURCES) -> None:
        assert sources == SOURCES
        self.cupy_stream = Stream()
        properties = {"name": b"NVIDIA H200", "multiProcessorCount": 132, "l2CacheSize": 60 << 20}
        runtime = SimpleNamespace(getDeviceProperties=lambda _: properties)
        device = SimpleNamespace(id=0, synchronize=lambda: None)
        cuda = SimpleNamespace(
            runtime=runtime,
            Device=lambda: device,
            get_elapsed_time=lambda start, end: (end.clock - start.clock) * 1e3,
        )
        self.cupy = SimpleNamespace(cuda=cuda, empty=lambda shape, dtype: np.empty(shape, dtype).view(Array))

    def pin(self, num_bytes: int) -> Any:
        return np.empty(num_bytes, np.uint8)

    def allocate(self, num_bytes: int) -> Any:  # noqa: ARG002
        return SimpleNamespace(data=SimpleNamespace(ptr=0))

    def kernel(self, *_: Any, **__: Any) -> Callable[..., None]:
        return lambda *_, **__: self.cupy_stream.work(CALL_SECONDS)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> GpuMachine:
    """An H200 whose every launch takes CALL_SECONDS."""
    monkeypatch.setattr("tools.gpu_machine.CountedGpu", Device)
    return GpuMachine()


def test_case_is_timed_as_a_graph_over_more_inputs_than_l2_holds(machine: GpuMachine) -> None:
    case = next(case for case in TIMED if case.name == "rms_norm-bf16-256x4096")  # 4.2 MB

    times, kernels = time_case(machine, case)

    assert times.seconds == pytest.approx(CALL_SECONDS)
    assert kernels == {}
    assert times.spread == pytest.approx(0.0)
    assert times.num_sets == -(-3 * (60 << 20) // (2 * 256 * 4096 * 2 + 4096 * 2))
    assert times.num_calls % times.num_sets == 0


@pytest.mark.parametrize(
    ("seconds", "num_sets", "num_calls"),
    [(1e-3, 2, 4), (2.5e-5, 2, 200), (2.5e-5, 45, 180), (1e-7, 6, 252), (1, 9, 9)],
)
def test_graph_has_each_input_equally_often(seconds: float, num_sets: int, num_calls: int) -> None:
    assert calls_of_a_graph(seconds, num_sets) == num_calls


def test_median_and_spread_of_the_middle() -> None:
    seconds = [1.0] + [2.0] * (NUM_REPEATS - 3) + [3.0, 9.0]

    times = summarize(seconds, 4, 2)

    assert times.seconds == 0.5
    assert times.spread == 0.0


def test_large_arrays_are_random_and_all_different(machine: GpuMachine) -> None:
    first, second = (machine.maker.normal((CHUNK + 7,), ml_dtypes.bfloat16) for _ in range(2))

    assert first.dtype == ml_dtypes.bfloat16
    assert abs(first.astype(np.float32).std() - 1) < 0.01
    assert (first[:99] != second[:99]).any()
    assert np.isfinite(first.astype(np.float32)).all()


def test_large_array_is_the_same_numbers_again_from_another_one_on(machine: GpuMachine) -> None:
    first, second = (machine.maker.normal((2 * CHUNK,)) for _ in range(2))

    assert (first[:CHUNK] == first[CHUNK:]).all()
    assert (first[7919:CHUNK] == second[: CHUNK - 7919]).all()


def test_resources_are_those_of_the_kernel_as_it_is_launched(
    machine: GpuMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = next(case for case in TIMED if case.name == "paged_decode-bf16-32_8x128-1x8192")
    launches = record(case)
    asked: list[tuple[int, int, int]] = []

    def occupancy(address: int, threads: int, shared_bytes: int) -> int:
        asked.append((address, threads, shared_bytes))
        return 3

    kernel = SimpleNamespace(num_regs=126, local_size_bytes=0, max_dynamic_shared_size_bytes=49152)
    kernel.kernel = SimpleNamespace(ptr=7)
    needs = {launch.kernel: Resources(126, 0, 0, 0) for launch in launches}
    driver = SimpleNamespace(occupancyMaxActiveBlocksPerMultiprocessor=occupancy)
    monkeypatch.setitem(sys.modules, "cupy_backends.cuda.api", SimpleNamespace(driver=driver))
    monkeypatch.setattr("tools.gpu_machine.compile_kernels", lambda *_: Compiled(Path("a.cubin"), needs, ""))
    cupy = machine.device(SOURCES).cupy
    cupy.RawModule = lambda path: SimpleNamespace(get_function=lambda _: kernel)  # noqa: ARG005

    found = machine.resources([case])

    assert asked == [(7, launch.block, launch.shared_bytes) for launch in launches]
    assert kernel.max_dynamic_shared_size_bytes == max(launch.shared_bytes for launch in launches)
    row = found[next(name for name in found if name.startswith("paged_decode of paged_decode-"))]
    assert row == {"registers": 126, "local_bytes": 0, "blocks_per_sm": 3, "predicted_blocks_per_sm": 3}


def test_machine_without_nvidia_smi_has_no_clocks(
    machine: GpuMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")

    assert "says nothing" in machine.clocks()["nvidia-smi"]


def test_arrays_to_write_are_poisoned(machine: GpuMachine) -> None:
    assert np.isnan(machine.maker.unwritten((3, 5))).all()
    assert (machine.maker.unwritten((2,), np.int32) == -1).all()


def test_host_time_is_that_of_all_of_a_cases_launches_and_of_its_first_kernels(
    machine: GpuMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = next(case for case in TRAFFIC if len(record(case)) > 1)
    monkeypatch.setattr("tools.machine.perf_counter", lambda: machine.gpu().cupy_stream.clock)

    function, kernel = launch_overhead(machine, case)

    assert function == pytest.approx(len(record(case)) * CALL_SECONDS)
    assert kernel == pytest.approx(CALL_SECONDS)


def test_time_between_marks_is_that_of_the_work_between_them(machine: GpuMachine) -> None:
    start = machine.mark()
    machine.gpu().cupy_stream.work(3e-3)
    end = machine.mark()

    assert machine.elapsed(start, end) == pytest.approx(3e-3)


def test_link_is_measured_by_single_copies_each_way_and_both(machine: GpuMachine) -> None:
    copies: list[tuple[int, int, int]] = []  # size, kind, stream
    runtime = machine.gpu().cupy.cuda.runtime
    runtime.memcpyDeviceToHost, runtime.memcpyHostToDevice = 2, 1
    runtime.memcpyAsync = lambda *args: copies.append(args[2:])
    machine.gpu().cupy.cuda.Stream = lambda non_blocking: SimpleNamespace(ptr=7)  # noqa: ARG005

    rates = machine.link_bandwidth()

    assert rates.keys() == {"to_host", "to_device", "both"}
    assert set(copies) == {(LINK_BYTES, 1, 7), (LINK_BYTES, 2, 7)}
    assert len(copies) == 4 * NUM_LINK_REPEATS


def test_dry_run_has_the_same_names_as_a_gpu(machine: GpuMachine) -> None:
    names = {name for name in dir(EmulatedMachine) if not name.startswith("_")}

    assert names <= set(dir(machine))
