"""Work of an emulated GPU is done in order, and later; what the host must not touch meanwhile is watched."""

from functools import partial

import numpy as np
import pytest

from cupaged.backend.device import Device
from tests.cuda_on_cpu.gpu import EmulatedGpu
from tests.cuda_on_cpu.planted import complaint, line
from tests.cuda_on_cpu.planted_gpu import I32, append, device, gpu, ints, pinned

__all__ = ["device"]


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


def test_launch_of_no_blocks_is_nothing(device: EmulatedGpu) -> None:
    device.kernel("gpu", "append")((0, 1, 1), 32, (ints(device, 0), ints(device, 0), 1))

    assert device.launches == []


def test_seconds_are_the_same_in_every_run_and_more_for_more(device: EmulatedGpu) -> None:
    out, x, host = ints(device, 0), ints(device, 1), pinned(device, 1)

    def work(times: int) -> None:
        for _ in range(times):
            append(device, out, x)
            device.to_device(x, host)

    once, again, twice = (device.seconds(partial(work, times)) for times in (1, 1, 2))

    assert 0 < once == again < twice
    assert device.read(out)[0] == 1111


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

    assert "copy of 128 bytes to device, asked for at test_gpu_stream.py:" in message
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


def test_kernel_that_fails_is_found_when_it_runs_and_the_device_is_lost(device: EmulatedGpu) -> None:
    bad, good = ints(device, -1), ints(device, 1)

    device.kernel("gpu", "traps")((1, 1, 1), 32, (bad,))
    append(device, good, good)
    failed = complaint(device.synchronize)
    lost = complaint(lambda: append(device, good, good))
    assert lost == complaint(device.synchronize) == complaint(device.capture, lambda: None)

    assert failed.startswith(f"{line('gpu', 'trap')}: __trap()")
    assert lost.startswith("the device was lost: gpu.cu:")
