"""The arena: alignment, which arrays live how long, exact sizes from a dry run."""

from typing import Any

import numpy as np
import pytest

from cupaged.backend.arena import Arena, HostMemory


@pytest.fixture
def arena() -> Arena:
    arena = Arena(HostMemory())
    arena.create(64 * 100)
    return arena


def fill(arena: Arena, value: int, num_bytes: int = 64) -> Any:
    x = arena.take((num_bytes,), np.uint8)
    x[:] = value
    return x


def test_arrays_are_aligned_and_apart(arena: Arena) -> None:
    arrays = [arena.take((n, 3), kind) for n, kind in ((1, np.uint8), (5, np.float32), (7, np.int32))]

    assert [x.ctypes.data % HostMemory.alignment for x in arrays] == [0, 0, 0]
    assert [x.shape for x in arrays] == [(1, 3), (5, 3), (7, 3)]
    assert not any(np.shares_memory(a, b) for a in arrays for b in arrays if a is not b)


def test_base_lives_for_the_whole_forward(arena: Arena) -> None:
    base = fill(arena, 1)

    for layer in range(5):
        arena.begin_layer()
        fill(arena, 10 + layer, 640)

    assert (base == 1).all()


def test_layer_lives_until_the_layer_after_the_next(arena: Arena) -> None:
    arena.begin_layer()
    first = fill(arena, 1)
    arena.begin_layer()
    second = fill(arena, 2, 128)

    assert (first == 1).all()
    arena.begin_layer()
    third = fill(arena, 3)
    assert np.shares_memory(first, third)
    assert (second == 2).all()


def test_rewound_layer_is_used_again_and_the_one_before_stays(arena: Arena) -> None:
    arena.begin_layer()
    first = fill(arena, 1)
    arena.begin_layer()
    second = fill(arena, 2)

    arena.rewind_layer()

    assert np.shares_memory(fill(arena, 3), second)
    assert (first == 1).all()


def test_forward_rewinds_everything(arena: Arena) -> None:
    before = arena.take((64,), np.uint8)
    arena.begin_layer()

    arena.begin_forward()

    assert np.shares_memory(before, arena.take((64,), np.uint8))


def test_restored_arena_goes_on_where_it_stood(arena: Arena) -> None:
    fill(arena, 1)
    for layer in range(3):
        arena.begin_layer()
        hidden = fill(arena, 10 + layer)
    state = arena.state()

    def go_on() -> list[int]:
        places = [arena.take((64,), np.uint8).ctypes.data]
        arena.begin_layer()
        return [*places, arena.take((640,), np.uint8).ctypes.data]

    places = go_on()
    arena.begin_forward()
    arena.restore(state)

    assert go_on() == places
    assert (hidden == 12).all()


def test_arrays_of_no_elements_need_no_room(arena: Arena) -> None:
    arena.take((arena.num_bytes,), np.uint8)

    assert arena.take((0, 3), np.float32).shape == (0, 3)


def test_more_than_the_region_holds_is_refused_with_numbers(arena: Arena) -> None:
    arena.begin_layer()

    with pytest.raises(
        AssertionError, match=r"\(3201,\) uint8 ends at byte 3264, its region at 3200 of 6400"
    ):
        arena.take((3201,), np.uint8)


def test_measured_size_is_exactly_enough() -> None:
    arena = Arena(HostMemory())

    def run() -> None:
        arena.begin_forward()
        arena.take((100,), np.float32)
        for size in (10, 300, 20):
            arena.begin_layer()
            arena.take((size, 7), np.float32)
            arena.take((3,), np.int32)

    num_bytes = arena.measure(run)

    arena.create(num_bytes)
    run()
    arena.create(num_bytes - 1)
    with pytest.raises(AssertionError, match="ends at byte"):
        run()


def test_measuring_takes_no_memory() -> None:
    arena = Arena(HostMemory())
    shapes = []

    def run() -> None:
        arena.begin_forward()
        x = arena.take((1 << 20, 1 << 20), np.float32)
        shapes.append(x.reshape(1 << 20, 1 << 10, -1)[:, :5].shape)

    assert arena.measure(run) == 4 << 40
    assert shapes == [(1 << 20, 5, 1 << 10)]


def test_failed_measurement_leaves_the_arena_usable(arena: Arena) -> None:
    with pytest.raises(ZeroDivisionError):
        arena.measure(lambda: 1 // 0)

    assert (fill(arena, 1) == 1).all()
