"""An emulated GPU does what a GPU does, and what a GPU would punish in silence it finds: each is planted."""

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from cupaged.backend.device import ALIGNMENT, Device
from tests.cuda_on_cpu.gpu import DeviceArray, EmulatedGpu, EmulatorError
from tests.cuda_on_cpu.planted import KERNELS, line

I32 = np.int32
Values = np.ndarray[Any, Any]


def gpu(mode: str = "fast", **options: Any) -> EmulatedGpu:
    """Return a GPU that runs the kernels of this folder."""
    return EmulatedGpu(mode, sources=KERNELS, **options)


@pytest.fixture
def device() -> EmulatedGpu:
    """Return a GPU whose stream waits."""
    return gpu()


def ints(device: EmulatedGpu, value: int) -> DeviceArray:
    """Return int32[32] of one value."""
    return device.array(np.full(32, value, I32))


def append(device: EmulatedGpu, out: DeviceArray, x: Any, base: int = 10) -> None:
    """Do out = base * out + x, one digit more."""
    device.kernel("gpu", "append")((1, 1, 1), 32, (out, x, base))


def pinned(device: EmulatedGpu, value: int) -> Values:
    """Return pinned int32[32] of one value."""
    array: Values = device.pin(128).view(I32)
    array[:] = value
    return array


# ---- What it does.
@pytest.mark.parametrize("mode", ["fast", "check"])
@pytest.mark.parametrize("deferred", [False, True])
def test_work_is_done_in_order(mode: str, deferred: bool) -> None:
    device: Device = (emulated := gpu(mode, deferred=deferred))
    out, x, host = ints(emulated, 0), ints(emulated, 1), pinned(emulated, 2)

    append(emulated, out, x)
    device.to_device(x, host)
    append(emulated, out, x)
    device.to_host(host, out)
    device.record().synchronize()

    assert host.tolist() == [12] * 32


def test_nothing_runs_before_an_event_is_waited_for_and_nothing_behind_it(device: EmulatedGpu) -> None:
    out, x, first, second = ints(device, 0), ints(device, 1), pinned(device, 5), pinned(device, 5)

    append(device, out, x)
    device.to_host(first, out)
    event = device.record()
    append(device, out, x)
    device.to_host(second, out)

    assert {*first, *second} == {-1}
    event.synchronize()
    assert ({*first}, {*second}) == ({1}, {-1})
    device.synchronize()
    assert {*second} == {11}


def test_work_is_done_at_once_if_the_stream_is_not_deferred() -> None:
    device = gpu(deferred=False)
    host = pinned(device, 0)

    device.to_host(host, ints(device, 7))

    assert {*host} == {7}


def test_parts_of_arrays_are_copied(device: EmulatedGpu) -> None:
    x, host = ints(device, 0), pinned(device, 0)
    host[:] = range(32)

    device.to_device(x[4:6], host[8:10])
    device.to_host(host[2:6], x[3:7])
    values = device.read(x)

    assert values[3:7].tolist() == [0, 8, 9, 0]
    assert host[:7].tolist() == [0, 1, 0, 8, 9, 0, 6]


def test_numbers_are_taken_at_the_launch_and_contents_when_it_runs(device: EmulatedGpu) -> None:
    out, x, host = ints(device, 1), ints(device, 0), pinned(device, 4)
    args = [out, x, 10]

    device.to_device(x, host)
    device.kernel("gpu", "append")((1, 1, 1), 32, tuple(args))
    args[2] = 100

    assert {*device.read(out)} == {14}


def test_new_memory_is_aligned_and_holds_nothing_useful(device: EmulatedGpu) -> None:
    memory, host = device.allocate(1000), device.pin(100)

    assert device.address(memory) % ALIGNMENT == 0
    assert {*device.read(memory), *host} == {0xFF}
    assert np.isnan(device.read(device.view(memory, 8, (3, 2), np.float16))).all()


def test_memory_is_counted_and_comes_back(device: EmulatedGpu) -> None:
    before = device.memory_info()

    memory = device.allocate(1000)
    view = device.view(memory, 256, (2,), I32)
    held = device.memory_info()
    del memory
    kept = device.memory_info()
    del view

    assert before == device.memory_info() == (1 << 30, 1 << 30)
    assert held == kept == (before[0] - 1000, before[1])
    assert device.allocations == [1000]


def test_memory_that_is_not_there_is_refused() -> None:
    device = gpu(memory=1000)
    held = device.allocate(600)

    with pytest.raises(ValueError, match="401 bytes of GPU memory are wanted but 400 are free; lower"):
        device.allocate(401)
    del held
    device.allocate(1000)


def test_driver_takes_memory_for_kernels_and_graphs() -> None:
    device = gpu(memory=1000, driver_bytes=300)

    device.kernel("gpu", "append")
    device.kernel("gpu", "append")
    graph = device.capture(lambda: None)

    assert device.memory_info() == (400, 1000)
    assert device.allocations == [] and len(graph) == 0
    with pytest.raises(ValueError, match="500 bytes of GPU memory are wanted but 400 are free"):
        device.allocate(500)


def test_seconds_are_the_same_in_every_run_and_more_for_more(device: EmulatedGpu) -> None:
    out, x, host = ints(device, 0), ints(device, 1), pinned(device, 1)

    def work(times: int) -> None:
        for _ in range(times):
            append(device, out, x)
            device.to_device(x, host)

    once, again, twice = (device.seconds(partial(work, times)) for times in (1, 1, 2))

    assert 0 < once == again < twice
    assert device.read(out)[0] == 1111


def test_graph_does_again_what_was_recorded(device: EmulatedGpu) -> None:
    out, x, host, result = ints(device, 0), ints(device, 1), pinned(device, 2), pinned(device, 0)
    append(device, out, x)

    def work() -> None:
        device.to_device(x, host)
        append(device, out, x)
        device.to_host(result, out)

    graph = device.capture(work)

    assert len(graph) == 3
    assert device.read(out)[0] == 1
    graph.launch()
    device.synchronize()
    host[:] = 3
    graph.launch()
    device.synchronize()
    assert {*result} == {123}


def test_capture_that_fails_leaves_the_device_as_it_was(device: EmulatedGpu) -> None:
    out, x = ints(device, 0), ints(device, 1)
    append(device, out, x)

    def work() -> None:
        append(device, out, x)
        raise KeyError("planted")

    with pytest.raises(KeyError):
        device.capture(work)
    append(device, out, x)

    assert device.read(out)[0] == 11


def test_launch_of_no_blocks_is_nothing(device: EmulatedGpu) -> None:
    device.kernel("gpu", "append")((0, 1, 1), 32, (ints(device, 0), ints(device, 0), 1))

    assert device.launches == []


def test_arrays_are_cut_as_numpy_cuts_them(device: EmulatedGpu) -> None:
    values = np.arange(48, dtype=I32).reshape(4, 12)
    array = device.array(values)

    cuts: list[Callable[[Any], Any]] = [
        lambda x: x[1:3, 4:8],
        lambda x: x[1:3, 4:8].reshape(2, 2, 2),
        lambda x: x[::2],
        lambda x: x[..., -1],
        lambda x: x[3, 2],
        lambda x: x[2].view(np.int16),
        lambda x: x.reshape(-1, 6)[:0],
    ]
    for cut in cuts:
        mine, numpys = cut(array), cut(values)
        assert np.array_equal(device.read(mine), numpys)
        assert (mine.shape, mine.dtype, mine.size, mine.nbytes, mine.ndim) == (
            *(numpys.shape, numpys.dtype, numpys.size, numpys.nbytes, numpys.ndim),
        )
    assert array[:, 1:].strides == values[:, 1:].strides
    assert len(array) == 4


# ---- What it finds.
def complaint(act: Callable[[], Any]) -> str:
    """Return what the GPU says against an act."""
    with pytest.raises(EmulatorError) as raised:
        act()
    return str(raised.value)


FORBIDDEN: dict[str, Callable[[Any], Any]] = {
    "+": lambda x: x + 1,
    "numpy +": lambda x: np.float32(1) + x,
    "sum": lambda x: np.sum(x),
    "==": lambda x: x == x,
    "bool": bool,
    "asarray": np.asarray,
    "iter": list,
    "set": lambda x: x.__setitem__(0, 1),
    "fancy": lambda x: x[[0, 1]],
    "mask": lambda x: x[np.ones(4, np.bool_)],
    "backwards": lambda x: x[::-1],
    "reshape that copies": lambda x: x[:, 1:].reshape(-1),
}


@pytest.mark.parametrize("name", FORBIDDEN)
def test_host_that_touches_a_device_array_is_found(device: EmulatedGpu, name: str) -> None:
    array = device.array(np.zeros((4, 4), I32))

    with pytest.raises(TypeError):
        FORBIDDEN[name](array)


@pytest.mark.parametrize("name", ["copy", "astype", "fill", "T", "tolist", "item"])
def test_device_array_has_no_more_than_the_seam_may_use(device: EmulatedGpu, name: str) -> None:
    assert not hasattr(ints(device, 0), name)


def test_argument_that_is_not_on_the_device_is_found(device: EmulatedGpu) -> None:
    out, foreign = ints(device, 0), ints(gpu(), 0)

    host = complaint(lambda: append(device, out, pinned(device, 0)))
    other = complaint(lambda: append(device, out, foreign))

    assert "append: argument 'x': ndarray is not on the device" in host
    assert "append: argument 'x': 1 bytes at" in other
    assert "are not allocated on this device" in other


def test_copy_of_memory_that_is_not_pinned_is_found(device: EmulatedGpu) -> None:
    x, host = ints(device, 0), np.zeros(32, I32)

    assert "not pinned" in complaint(lambda: device.to_device(x, host))
    assert "not pinned" in complaint(lambda: device.to_host(host, x))


def test_copy_that_does_not_fit_or_is_not_packed_is_found(device: EmulatedGpu) -> None:
    x, host = device.array(np.zeros((4, 8), I32)), pinned(device, 0).reshape(4, 8)

    assert "64 bytes on the host, 128 on the device" in complaint(lambda: device.to_device(x, host[:2]))
    assert "must be packed" in complaint(lambda: device.to_host(host[:, :4], x[:2]))
    assert "must be packed" in complaint(lambda: device.to_host(host[:2], x[:, :4]))


def test_source_that_the_host_changes_too_early_is_found(device: EmulatedGpu) -> None:
    x, host = ints(device, 0), pinned(device, 1)

    device.to_device(x, host)
    host[31] = 2
    message = complaint(device.synchronize)

    assert "copy of 128 bytes to device, asked for at test_gpu.py:" in message
    assert "the host wrote to the pinned memory before the copy was done" in message


def test_target_that_the_host_writes_too_early_is_found(device: EmulatedGpu) -> None:
    x, host = ints(device, 0), pinned(device, 1)

    device.to_host(host, x)
    host[0] = 2

    assert "the host wrote" in complaint(device.synchronize)


def test_target_that_the_host_writes_while_its_neighbour_is_copied_is_found(device: EmulatedGpu) -> None:
    x, host = ints(device, 0), pinned(device, 1)

    device.to_host(host[:16], x[:16])
    device.to_host(host[16:], x[16:])
    host[16] = 2

    assert "the host wrote" in complaint(device.synchronize)


def test_memory_that_begins_where_other_memory_ends_is_told_apart(device: EmulatedGpu) -> None:
    pages = [device.allocate(4096) for _ in range(64)]
    places = [device.address(page) for page in pages]
    freed = places.index(next(place for place in places if place + 4096 in places))
    append(device, ints(device, 0), ints(device, 0))
    follower = places.index(places[freed] + 4096)
    x = device.view(pages[follower], 0, (32,), I32)
    graph = device.capture(lambda: append(device, x, x))

    pages[freed] = device.allocate(0)

    graph.launch()


def test_source_that_is_changed_once_its_copy_is_done_is_right(device: EmulatedGpu) -> None:
    x, host = ints(device, 0), pinned(device, 1)

    device.to_device(x, host)
    event = device.record()
    append(device, x, x)
    event.synchronize()
    host[:] = 2
    device.to_device(x, host)

    assert {*device.read(x)} == {2}


def test_copies_that_follow_each_other_through_one_pinned_piece_are_right(device: EmulatedGpu) -> None:
    x, y, host = ints(device, 3), ints(device, 4), pinned(device, 0)

    device.to_host(host, x)
    device.to_host(host, y)
    device.to_device(x, host)

    assert {*device.read(x)} == {4}


def test_pinned_memory_that_is_freed_too_early_is_found(device: EmulatedGpu) -> None:
    x = ints(device, 0)

    device.to_device(x, pinned(device, 1))

    assert "the pinned memory was freed too early" in complaint(device.synchronize)


def test_device_memory_stays_until_its_work_is_done(device: EmulatedGpu) -> None:
    out = ints(device, 0)

    append(device, out, ints(device, 5))

    assert {*device.read(out)} == {5}


MAKING: dict[str, Callable[[EmulatedGpu], Any]] = {
    "allocating 8 bytes": lambda device: device.allocate(8),
    "pinning 8 bytes": lambda device: device.pin(8),
    "loading kernel last_block": lambda device: device.kernel("launches", "last_block"),
}
WAITING: dict[str, Callable[[EmulatedGpu], Any]] = {
    "waiting for the device": lambda device: device.synchronize(),
    "recording an event": lambda device: device.record(),
    "capturing": lambda device: device.capture(lambda: None),
    "timing": lambda device: device.seconds(lambda: None),
    "launching a graph": lambda device: device.capture(lambda: None).launch(),
}


@pytest.mark.parametrize("what", [*MAKING, *WAITING])
def test_what_a_capture_may_not_do_is_found(device: EmulatedGpu, what: str) -> None:
    act = (MAKING | WAITING)[what]

    assert "inside a capture" in complaint(lambda: device.capture(lambda: act(device)))
    device.synchronize()


def test_wait_inside_a_capture_for_an_event_before_it_is_found(device: EmulatedGpu) -> None:
    event = device.record()

    assert "waiting for the device inside a capture" in complaint(lambda: device.capture(event.synchronize))


def test_launch_of_a_graph_inside_a_capture_is_found(device: EmulatedGpu) -> None:
    graph = device.capture(lambda: None)

    assert "launching a graph inside a capture" in complaint(lambda: device.capture(graph.launch))


@pytest.mark.parametrize("what", MAKING)
def test_what_is_made_on_a_steps_path_is_found(device: EmulatedGpu, what: str) -> None:
    out, x = ints(device, 0), ints(device, 1)
    append(device, out, x)
    device.freeze()

    append(device, out, x)
    assert f"{what} on a step's path" in complaint(lambda: MAKING[what](device))

    device.thaw()
    MAKING[what](device)


def test_kernel_that_is_first_launched_in_a_capture_is_found(device: EmulatedGpu) -> None:
    out, x = ints(device, 0), ints(device, 1)
    device.kernel("gpu", "append")

    message = complaint(lambda: device.capture(lambda: append(device, out, x)))

    assert "append is first launched in a capture" in message


@pytest.mark.parametrize("freed", ["x", "host"])
def test_graph_of_memory_that_was_freed_is_found(device: EmulatedGpu, freed: str) -> None:
    arrays: dict[str, Any] = {"x": ints(device, 1), "host": pinned(device, 2)}
    out = ints(device, 0)
    append(device, out, arrays["x"])

    def work() -> None:
        device.to_device(out, arrays["host"])
        append(device, out, arrays["x"])

    graph = device.capture(work)
    graph.launch()
    device.synchronize()
    del arrays[freed]

    assert "freed" in complaint(graph.launch)


def test_second_thread_is_found(device: EmulatedGpu) -> None:
    x, found = ints(device, 0), list[str]()

    def second() -> None:
        found.append(complaint(lambda: device.array([1])))
        found.append(complaint(lambda: append(device, x, x)))

    def work() -> None:
        thread = threading.Thread(target=second)
        thread.start()
        thread.join()

    append(device, x, x)
    device.capture(work)

    assert found == ["two threads use the device at once"] * 2


def test_threads_that_take_turns_are_right(device: EmulatedGpu) -> None:
    x = ints(device, 1)
    thread = threading.Thread(target=lambda: append(device, x, x))

    thread.start()
    thread.join()

    assert {*device.read(x)} == {11}


def test_view_that_is_not_within_the_memory_or_misaligned_is_found(device: EmulatedGpu) -> None:
    memory = device.allocate(64)

    assert device.view(memory, 60, (1,), I32).shape == (1,)
    assert "is not within" in complaint(lambda: device.view(memory, 60, (2,), I32))
    assert "is not within" in complaint(lambda: device.view(memory, -4, (1,), I32))
    assert "is not within" in complaint(lambda: device.view(device.view(memory, 0, (4,), I32), 0, (1,), I32))
    assert "is misaligned" in complaint(lambda: device.view(memory, 2, (1,), I32))


def test_kernel_that_fails_is_found_when_it_runs_and_the_device_is_lost(device: EmulatedGpu) -> None:
    bad, good = ints(device, -1), ints(device, 1)

    device.kernel("gpu", "traps")((1, 1, 1), 32, (bad,))
    append(device, good, good)
    failed = complaint(device.synchronize)
    lost = complaint(lambda: append(device, good, good))
    assert lost == complaint(device.synchronize)

    assert failed.startswith(f"{line('gpu', 'trap')}: __trap()")
    assert lost.startswith("the device was lost: gpu.cu:")


def test_fault_of_a_kernel_that_was_captured_is_found_at_each_launch() -> None:
    device = gpu("check")
    out, x = ints(device, 0), ints(device, 1)
    append(device, out, x)

    graph = device.capture(lambda: append(device, out, x[16:]))
    graph.launch()

    assert "illegal read of 4 bytes at byte 64 of 'x', which has 64 bytes" in complaint(device.synchronize)
