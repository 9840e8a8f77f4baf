"""Mode check finds accesses to what is no array, not aligned or const; arrays lie as CuPy has them."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.cuda_on_cpu.planted import complaint, device, line, threads_in, zeros

F32 = np.float32
POOL = np.arange(64, dtype=F32)


def floats(*shape: int) -> np.ndarray[Any, Any]:
    return zeros(*shape, dtype=F32)


# kernel of bounds.cu: its arguments, what the message says behind the line, the thread that it blames
BUGS: dict[str, tuple[tuple[Any, ...], str, int]] = {
    "off_by_one_table": (
        (floats(64), POOL, np.array([3, 1, 0, 2], np.int32)),
        "illegal read of 4 bytes at byte 16 of 'table', which has 16 bytes",
        48,
    ),
    "padded_table": (
        (floats(64), POOL, np.array([3, 1, -1, 2], np.int32), 4),
        "illegal read of 4 bytes at byte -64 of 'pool', which has 256 bytes",
        32,
    ),
    "past_end": ((floats(50), 50), "illegal write of 4 bytes at byte 200 of 'out', which has 200 bytes", 50),
    "far_off": (
        (floats(64), floats(64), 1 << 20),
        "illegal read of 4 bytes at byte 4194304 of 'x', which has 256 bytes",
        0,
    ),
    "last_unit": (
        (floats(64, 4).view(np.uint32), floats(50), 50),
        "illegal read of 16 bytes at byte 192 of 'x', which has 200 bytes",
        12,
    ),
    "last_pair": (
        (floats(64), floats(49), 49),
        "illegal read of 8 bytes at byte 192 of 'x', which has 196 bytes",
        0,
    ),
    "past_shared_array": ((floats(64),), "illegal write of 4 bytes at byte 256 of 's', which has 256", 63),
    "past_dynamic_shared": (
        (floats(64),),
        "illegal write of 4 bytes at byte 256 of 'dynamic shared memory', which has 256 bytes",
        63,
    ),
    "past_row": ((floats(64),), "index out of an array's bounds", 7),
    "null_pointer": ((floats(64), None), "illegal read of 4 bytes at a null pointer", 0),
    "misaligned_load": (
        (floats(256), floats(256)),
        "misaligned read of 16 bytes at byte 8 of 'x', which has 1024 bytes",
        1,
    ),
    "misaligned_pair": ((floats(64), floats(129)), "misaligned read of 8 bytes at byte 4 of 'x'", 0),
    "write_to_const": (
        (floats(64), floats(64)),
        "forbidden (const) write of 4 bytes at byte 0 of 'x', which has 256 bytes",
        0,
    ),
    "atomic_past_end": ((zeros(8), 8), "illegal atomic access of 4 bytes at byte 32 of 'out'", 7),
    "half_a_row": (
        (zeros(64, dtype=ml_dtypes.bfloat16), np.ones((64, 4), ml_dtypes.bfloat16)[:, 3], 4),
        "illegal read of 2 bytes at byte 506 of 'x', which has 506 bytes",
        63,
    ),
    "constants": ((floats(64),), "index out of an array's bounds", 3),
    "constants_by_pointer": ((floats(64),), "illegal write of 4 bytes at address 0x", 0),
}


@pytest.mark.parametrize("name", BUGS)
def test_bug_is_found_and_its_line_named(name: str) -> None:
    args, what, thread = BUGS[name]
    kernel = device().kernel("bounds", name, BUG=1)

    message = complaint(kernel, (1, 1, 1), 64, args, 256)

    assert f"{line('bounds', name)}: {what}" in message
    assert threads_in(message) == (0, thread)


@pytest.mark.parametrize("mode", ["fast", "check"])
@pytest.mark.parametrize("name", BUGS)
def test_right_twin_runs(name: str, mode: str) -> None:
    kernel = device(mode).kernel("bounds", name, BUG=0)

    kernel((1, 1, 1), 64, BUGS[name][0], 256)


def test_results_come_back_and_inputs_stay_in_every_mode() -> None:
    results = []
    for mode in ("fast", "check"):
        out, table = floats(64), np.array([3, 1, 0, 2], np.int32)
        device(mode).kernel("bounds", "off_by_one_table", BUG=0)((1, 1, 1), 64, (out, POOL, table))
        results.append(out)

    np.testing.assert_array_equal(results[0], POOL.reshape(4, 16)[[3, 1, 0, 2]].ravel())
    np.testing.assert_array_equal(results[1], results[0])


def test_views_of_one_buffer_are_one_array_with_both_names() -> None:
    buffer = floats(100)
    kernel = device().kernel("bounds", "far_off", BUG=1)

    message = complaint(kernel, (1, 1, 1), 64, (buffer[:64], buffer[36:], 100))

    assert "illegal read of 4 bytes at byte 544 of 'out/x', which has 400 bytes" in message


def test_view_may_be_read_through_its_neighbour_only_where_they_overlap() -> None:
    buffer = floats(200)
    kernel = device().kernel("bounds", "far_off", BUG=1)

    message = complaint(kernel, (1, 1, 1), 64, (buffer[:64], buffer[64:128], 64))

    assert "illegal read of 4 bytes at byte 256 of 'x', which has 256 bytes" in message


def test_view_of_a_misaligned_part_is_misaligned_as_on_a_gpu() -> None:
    kernel = device().kernel("bounds", "misaligned_load", BUG=0)

    message = complaint(kernel, (1, 1, 1), 64, (floats(256), floats(258)[2:]))

    assert "misaligned read of 16 bytes at byte 0 of 'x', which has 1024 bytes" in message


def test_array_that_begins_anywhere_on_the_cpu_begins_aligned_as_on_a_gpu() -> None:
    memory = bytearray(2048)
    begin = (4 - np.frombuffer(memory, np.uint8).ctypes.data) % 16
    odd = np.frombuffer(memory, F32, 256, begin)
    kernel = device().kernel("bounds", "misaligned_load", BUG=0)

    kernel((1, 1, 1), 64, (floats(256), odd))

    assert odd.ctypes.data % 16 == 4


def test_empty_array_may_be_given_but_not_read() -> None:
    kernel = device().kernel("bounds", "far_off", BUG=0)

    message = complaint(kernel, (1, 1, 1), 64, (floats(64), floats(0), 0))

    assert "illegal read of 4 bytes at byte 0 of 'x', which has 0 bytes" in message


def test_static_shared_memory_is_limited() -> None:
    kernel = device("fast").kernel("launches", "big_static")

    message = complaint(kernel, (1, 1, 1), 32, (zeros(1),))

    assert "with 'b' the SHARED_ARRAYs take 65536 bytes, but a block has 49152 for them" in message


@pytest.mark.parametrize("mode", ["fast", "check"])
def test_shared_array_is_one_for_each_instance_of_its_function(mode: str) -> None:
    out = zeros(32)
    device(mode).kernel("launches", "instances")((1, 1, 1), 32, (out,))

    assert out.tolist() == [10000 * 2 + 100 * 4 + 1 + 5] + [10000 * 2 + 100 * 4 + 1] * 31
