"""What a GPU would punish in silence an emulated GPU finds: graphs, steps that allocate, threads."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from tests.cuda_on_cpu.gpu import EmulatedGpu
from tests.cuda_on_cpu.planted import complaint
from tests.cuda_on_cpu.planted_gpu import append, device, gpu, ints, pinned

__all__ = ["device"]


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


def test_fault_of_a_kernel_that_was_captured_is_found_at_each_launch() -> None:
    device = gpu("check")
    out, x = ints(device, 0), ints(device, 1)
    append(device, out, x)

    graph = device.capture(lambda: append(device, out, x[16:]))
    graph.launch()

    assert "illegal read of 4 bytes at byte 64 of 'x', which has 64 bytes" in complaint(device.synchronize)
