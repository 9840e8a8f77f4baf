"""Threads meet at barriers, or the emulator says where they are; schedules order threads and blocks."""

import numpy as np
import pytest

from tests.cuda_on_cpu.planted import complaint, device, line, zeros

SCHEDULES = ("forward", "reverse", "random")


@pytest.mark.parametrize("mode", ["fast", "check"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_barrier_in_a_divergent_if_is_a_deadlock_grouped_by_place(schedule: str, mode: str) -> None:
    kernel = device(mode, schedule=schedule).kernel("lanes", "barrier_in_divergent_if", BUG=1)

    message = complaint(kernel, (1, 1, 1), 64, (zeros(64, dtype=np.float32), 40))

    assert message.splitlines() == [
        "no thread can go on:",
        "  24 threads, from 40 to 63, have exited",
        f"  40 threads, from 0 to 39, wait in __syncthreads at {line('lanes', 'barrier_in_divergent_if')}",
        "  in barrier_in_divergent_if, block (0, 0, 0)",
    ]


@pytest.mark.parametrize("mode", ["fast", "check"])
def test_threads_at_two_barriers_are_found(mode: str) -> None:
    kernel = device(mode).kernel("lanes", "two_barriers", BUG=1)

    message = complaint(kernel, (1, 1, 1), 64, (zeros(64, dtype=np.float32),))

    assert f"{line('lanes', 'two_barriers')}: threads of a block are at different barriers" in message


@pytest.mark.parametrize("mode", ["fast", "check"])
def test_shuffle_in_a_divergent_if_is_a_deadlock(mode: str) -> None:
    kernel = device(mode).kernel("lanes", "each_for_the_other", BUG=1)

    message = complaint(kernel, (1, 1, 1), 64, (zeros(64, dtype=np.float32),))

    place = line("lanes", "each_for_the_other")
    assert f"  16 threads, from 0 to 15, wait in __syncwarp of mask ffffffff at {place}\n" in message
    assert f"  48 threads, from 16 to 63, wait in __syncthreads at {line('lanes', 'the_other')}\n" in message


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ["barrier_in_divergent_if", "two_barriers", "each_for_the_other"])
def test_right_twin_runs(name: str, schedule: str) -> None:
    kernel = device(schedule=schedule).kernel("lanes", name, BUG=0)
    args = (40,) if name == "barrier_in_divergent_if" else ()

    kernel((1, 1, 1), 64, (zeros(64, dtype=np.float32), *args))


def test_lanes_that_exit_do_not_keep_others_waiting() -> None:
    out = zeros(64, dtype=np.float32)

    device().kernel("lanes", "of_exited_lane", BUG=0)((1, 1, 1), 64, (out,))

    assert out.tolist() == [*(float(i ^ 8) for i in range(48)), *[0.0] * 16]


def test_shuffle_in_a_divergent_if_is_found_when_the_others_exit() -> None:
    kernel = device().kernel("lanes", "in_divergent_if", BUG=1)

    message = complaint(kernel, (1, 1, 1), 64, (zeros(64, dtype=np.float32), 41))

    assert f"{line('lanes', 'in_divergent_if')}: __shfl_sync reads lane 9, which is not in mask" in message


def test_schedule_orders_threads_and_blocks() -> None:
    def last(name: str, blocks: int, schedule: str) -> int:
        out = zeros(1)
        threads = 64 if name == "last_thread" else 32
        device("fast", schedule=schedule, seed=5).kernel("launches", name)((blocks, 1, 1), threads, (out,))
        return int(out[0])

    assert [last("last_thread", 1, schedule) for schedule in ("forward", "reverse")] == [63, 0]
    assert last("last_thread", 1, "random") not in (0, 63)
    assert [last("last_block", 50, schedule) for schedule in ("forward", "reverse")] == [49, 0]
    assert last("last_block", 50, "random") not in (0, 49)


def test_seed_decides_the_random_schedule() -> None:
    def order(seed: int) -> list[int]:
        out = zeros(20)
        device("fast", schedule="random", seed=seed).kernel("launches", "last_thread")((20, 1, 1), 64, (out,))
        return [int(thread) for thread in out]

    assert order(1) == order(1)
    assert order(1) != order(2)


def test_every_block_knows_where_it_is() -> None:
    out = zeros(2, 3, 4, 32)  # z, y, x

    device().kernel("launches", "places")((4, 3, 2), 32, (out,))

    x, y, z = np.arange(4), np.arange(3)[:, None], np.arange(2)[:, None, None]
    np.testing.assert_array_equal(out, np.broadcast_to((100 * x + 10 * y + z + 32000)[..., None], out.shape))
