"""Warp collectives give what NumPy says; lanes that do not all come to the same one are found."""

from typing import Any

import numpy as np
import pytest

from tests.cuda_on_cpu.planted import complaint, device, line, threads_in, zeros

LANES = np.arange(32)


def expected(x: np.ndarray[Any, Any]) -> list[Any]:
    """Return what each collective of warp.cu gives the lanes of a warp that have x int32[32]."""
    unsigned = x.view(np.uint32)
    groups = x.reshape(4, 8)

    def where(condition: Any) -> int:
        return int(sum(1 << lane for lane in LANES[condition]))

    return [
        x[5],
        x[37 % 32],
        np.repeat(groups[:, 3], 8),
        x[LANES ^ 16],
        x[LANES ^ 5],
        np.where(LANES & 8, x[LANES ^ 8], x),  # from groups of lanes before its own, not from those behind it
        np.where(LANES >= 3, x[LANES - 3], x),
        np.where(LANES % 16 >= 3, x[LANES - 3], x),
        np.where(LANES < 29, x[(LANES + 3) % 32], x),
        np.where(LANES % 16 < 13, x[(LANES + 3) % 32], x),
        where(x > 0),
        int((x == 3).any()),
        int((x < 8).all()),
        [where(x == value) for value in x],
        x.sum(),
        x.min(),
        x.max(),
        unsigned.min(),
        unsigned.max(),
        np.bitwise_and.reduce(x),
        np.bitwise_or.reduce(x),
        np.bitwise_xor.reduce(x),
    ]


@pytest.mark.parametrize("mode", ["fast", "check"])
@pytest.mark.parametrize("schedule", ["forward", "reverse", "random"])
def test_collectives_equal_numpy(mode: str, schedule: str) -> None:
    x = np.random.default_rng(0).integers(-9, 9, 64).astype(np.int32)
    x[32:] = np.maximum(x[32:], 1)
    out = zeros(25, 64)

    device(mode, schedule=schedule).kernel("warp", "collectives")((1, 1, 1), 64, (out, x))

    for warp in (slice(0, 32), slice(32, 64)):
        for i, value in enumerate(expected(x[warp])):
            got = out[i, warp].astype(np.int64) & 0xFFFFFFFF
            np.testing.assert_array_equal(got, np.asarray(value, np.int64) & 0xFFFFFFFF, str(i))
    assert (out[22] == (x > 0).sum()).all()
    assert (out[23] == (x == 3).any()).all()
    assert (out[24] == (x < 8).all()).all()


@pytest.mark.parametrize("schedule", ["forward", "reverse", "random"])
def test_halves_of_a_warp_may_each_have_their_mask(schedule: str) -> None:
    out = zeros(32)

    device(schedule=schedule).kernel("warp", "halves")((1, 1, 1), 32, (out,))

    assert out.tolist() == [sum(range(16))] * 16 + [sum(range(16, 32))] * 16


@pytest.mark.parametrize("schedule", ["forward", "reverse", "random"])
def test_lanes_may_come_while_others_are_in_another_collective(schedule: str) -> None:
    out = zeros(32)

    device(schedule=schedule).kernel("warp", "masks_in_turn")((1, 1, 1), 32, (out,))

    assert out.tolist() == [3 + 1, 1 + 3 + 2, 2 + 4, 3 + 0, *range(4, 32)]


def test_numbers_of_8_bytes_are_shuffled_whole() -> None:
    x = (np.arange(32, dtype=np.int64) << 40) + 1
    out = zeros(32, dtype=np.int64)

    device().kernel("warp", "wide")((1, 1, 1), 32, (out, x))

    np.testing.assert_array_equal(out, x[LANES ^ 1])


@pytest.mark.parametrize("schedule", ["forward", "reverse", "random"])
def test_atomics_lose_nothing(schedule: str) -> None:
    out, bits = zeros(6), np.array([2**32 - 1, 0, 0], np.uint32)
    total, wide = zeros(1, dtype=np.float32), zeros(1, dtype=np.uint64)

    device(schedule=schedule).kernel("warp", "atomics")((1, 1, 1), 64, (out, bits, total, wide))

    assert out[[0, 1, 2, 3, 5]].tolist() == [2016, -2016, -63, 63, 7]
    assert bits.tolist() == [0, 2**32 - 1, 0]
    assert total[0] == 32
    assert wide[0] == 63 << 32


# kernel of lanes.cu: what the message says, the thread that it blames in schedule forward
DIVERGENCE = {
    "wrong_mask": ("__shfl_sync of mask 0000ffff, in which the calling lane is not", 16),
    "at_two_places": (
        "lanes of a warp have diverged: this one is in __shfl_sync, lane 0 in __shfl_sync at",
        31,
    ),
    "of_exited_lane": ("__shfl_sync reads lane 16, which is not in mask ffffffff or has exited", 32),
    "matrix_without_lane": ("mma (bf16) needs all 32 lanes, here are fffffeff", 63),
}


@pytest.mark.parametrize("mode", ["fast", "check"])
@pytest.mark.parametrize("name", DIVERGENCE)
def test_divergence_is_found_and_its_line_named(name: str, mode: str) -> None:
    what, thread = DIVERGENCE[name]
    kernel = device(mode).kernel("lanes", name, BUG=1)

    message = complaint(kernel, (1, 1, 1), 64, (zeros(64, dtype=np.float32),))

    assert what in message
    assert line("lanes", name) in message
    assert threads_in(message) == (0, thread)


@pytest.mark.parametrize("name", DIVERGENCE)
def test_right_twin_runs(name: str) -> None:
    kernel = device().kernel("lanes", name, BUG=0)

    kernel((1, 1, 1), 64, (zeros(64, dtype=np.float32),))
