"""A launch passes what a GPU's would, and is refused where a GPU would refuse it or read garbage."""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.cuda_on_cpu.device import EmulatedDevice, EmulatedKernel, EmulatorError
from tests.cuda_on_cpu.planted import KERNELS, complaint, device, line, zeros

MODES = ("fast", "check")
F32 = np.float32


@pytest.mark.parametrize("mode", MODES)
def test_arguments_arrive(mode: str) -> None:
    out = zeros(6)
    x = np.array([1.5], ml_dtypes.bfloat16)

    kernel = device(mode).kernel("launches", "arguments")
    kernel((1, 1, 1), 32, (out, -5, (7 << 32) + 9, 0.25, x, np.int64(11)))

    assert out.tolist() == [-5, 7, 9, np.array(0.25, F32).view(np.int32), x.view(np.uint16)[0], 11]


def test_none_is_a_null_pointer() -> None:
    out = zeros(6)

    device().kernel("launches", "arguments")((1, 1, 1), 32, (out, 0, 0, 0.0, None, 0))

    assert out[4] == -1


def test_strided_view_begins_at_its_first_element() -> None:
    x = np.arange(12, dtype=F32).reshape(3, 4)
    out = zeros(1, dtype=F32)

    device().kernel("launches", "floats")((1, 1, 1), 32, (out, x[1:, 2], None))

    assert out[0] == 6


GOOD: tuple[Any, ...] = (zeros(6), 1, 2, 3.0, None, 4)
WRONG = {
    "arguments: 5 arguments for 6 parameters": GOOD[:5],
    "argument 'a' is a ndarray, not a number": (zeros(6), zeros(1), *GOOD[2:]),
    "argument 'a' is a NoneType, not a number": (zeros(6), None, *GOOD[2:]),
    "argument 'a' is 2147483648": (zeros(6), 2**31, *GOOD[2:]),
    "argument 'a' is 1.5": (zeros(6), 1.5, *GOOD[2:]),
    "argument 'out' is a int, not an array": (5, *GOOD[1:]),
    "argument 'out' is a list, not an array": ([5], *GOOD[1:]),
    "argument 'out' has elements of 8 bytes, but the kernel's have 4": (zeros(6, dtype=np.int64), *GOOD[1:]),
    "argument 'out' is of float32, but the kernel's elements are integers": (zeros(6, dtype=F32), *GOOD[1:]),
    "argument 'out' has strides (-4,), but a pointer is to the first byte": (zeros(6)[::-1], *GOOD[1:]),
    "argument 'x' has elements of 4 bytes, but the kernel's have 2": (*GOOD[:4], zeros(1, dtype=F32), 4),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_argument_is_refused(what: str) -> None:
    kernel = device("fast").kernel("launches", "arguments")

    assert what in complaint(kernel, (1, 1, 1), 32, WRONG[what])


def test_read_only_array_may_be_given_to_const_parameters_only() -> None:
    kernel = device().kernel("launches", "floats")
    x, out = np.ones(1, F32), zeros(1, dtype=F32)
    x.flags.writeable = False

    kernel((1, 1, 1), 32, (out, x, None))

    assert "argument 'out' is read-only" in complaint(kernel, (1, 1, 1), 32, (x, out, None))


def test_array_that_units_of_16_bytes_do_not_fit_is_refused() -> None:
    kernel = device("fast").kernel("launches", "unit")
    x = np.arange(16, dtype=F32)

    kernel((1, 1, 1), 32, (x, x[4:]))

    assert x[:4].tolist() == [4, 5, 6, 7]
    assert "argument 'x' begins 8 bytes into an allocation" in complaint(kernel, (1, 1, 1), 32, (x, x[2:]))


def test_integers_are_no_floats() -> None:
    kernel = device().kernel("launches", "floats")

    message = complaint(kernel, (1, 1, 1), 32, (zeros(1, dtype=F32), zeros(1), None))

    assert "argument 'x' is of int32, but the kernel's elements are floats" in message


@pytest.mark.parametrize("grid", [(-1, 1, 1), (1, 1, 65536), (2**31, 1, 1), (1, 1)])
def test_grid_that_a_gpu_has_not_is_refused(grid: Any) -> None:
    kernel = device("fast").kernel("launches", "last_block")

    assert "grid (" in complaint(kernel, grid, 32, (zeros(1),))


@pytest.mark.parametrize("grid", [(0, 1, 1), (1, 0, 1), (0, 0, 0)])
def test_grid_of_no_blocks_launches_nothing(grid: Any) -> None:
    kernel = device("fast").kernel("launches", "last_block")
    out = zeros(1)

    kernel(grid, 32, (out,))

    assert out.tolist() == [0]
    assert "0 arguments" in complaint(kernel, grid, 32, ())


@pytest.mark.parametrize(
    ("threads", "what"),
    [
        (1025, "1025 threads a block, at most 1024"),
        (64, "64 threads a block, but KERNEL(32)"),
        (0, "0 threads"),
    ],
)
def test_block_is_as_large_as_the_kernel_says(threads: int, what: str) -> None:
    kernel = device("fast").kernel("launches", "last_block")

    assert what in complaint(kernel, (1, 1, 1), threads, (zeros(1),))


def test_dynamic_shared_memory_is_limited() -> None:
    kernel = device("fast").kernel("launches", "last_block")

    kernel((1, 1, 1), 32, (zeros(1),), 227 * 1024)
    message = complaint(kernel, (1, 1, 1), 32, (zeros(1),), 227 * 1024 + 1)

    assert "232449 bytes of shared memory, of 232448" in message


@pytest.mark.parametrize("mode", MODES)
def test_assert_and_trap_stop_the_kernel(mode: str) -> None:
    kernel = device(mode).kernel("launches", "traps")

    kernel((1, 1, 1), 32, (zeros(1), 4))
    failed = complaint(kernel, (1, 1, 1), 32, (zeros(1), 5))
    trapped = complaint(kernel, (1, 1, 1), 32, (zeros(1), -1))

    assert failed.startswith(f"{line('launches', 'assert')}: assert(x < 5)")
    assert trapped.startswith(f"{line('launches', 'trap')}: __trap()")


@pytest.mark.parametrize(
    ("address", "what"),
    [(1 << 44, "address 0x100000000000"), (1 << 60, "no address of this machine")],  # over 47 bits
)
def test_wild_pointer_in_fast_mode_is_an_error_and_no_crash(address: int, what: str) -> None:
    kernel, out = device("fast").kernel("launches", "wild"), zeros(32)
    offset = (address - out.ctypes.data) // out.itemsize  # wherever `out` lies: at 47 bits its place decides

    message = complaint(kernel, (1, 1, 1), 32, (out, offset))

    assert f"{line('launches', 'wild')}: illegal access to {what}" in message
    assert "in wild, block (0, 0, 0), thread 3 (warp 0, lane 3)" in message
    kernel((1, 1, 1), 32, (zeros(32), 0))


def test_division_by_zero_in_fast_mode_is_an_error_and_no_crash() -> None:
    kernel = device("fast").kernel("launches", "divides")

    message = complaint(kernel, (1, 1, 1), 32, (zeros(32), 0))

    assert "integer division by zero" in message


def test_launch_after_an_error_is_as_if_there_had_been_none() -> None:
    kernel = device().kernel("races", "read_before_barrier", BUG=1)
    right = device().kernel("races", "read_before_barrier", BUG=0)

    first, second = (complaint(kernel, (1, 1, 1), 64, (zeros(64),)) for _ in range(2))
    out = zeros(64)
    right((1, 1, 1), 64, (out,))

    assert first == second
    assert out.tolist() == list(range(63, -1, -1))


def test_unknown_kernel_mode_and_schedule_are_refused() -> None:
    with pytest.raises(EmulatorError, match=r"launches.cu has no kernel 'first_block', only \['arguments'"):
        device().kernel("launches", "first_block")
    with pytest.raises(ValueError, match="use one of"):
        EmulatedDevice("slow")
    with pytest.raises(ValueError, match="use one of"):
        EmulatedDevice(schedule="sideways")


def test_kernel_is_loaded_once_and_launches_are_told() -> None:
    told: list[EmulatedKernel] = []
    emulated = EmulatedDevice(sources=KERNELS, on_launch=told.append)

    kernel = emulated.kernel("launches", "last_block")
    kernel((1, 1, 1), 32, (zeros(1),))

    assert emulated.kernel("launches", "last_block") is kernel
    assert told == [kernel]


def test_parameters_that_are_parsed_otherwise_than_compiled_are_refused(tmp_path: Path) -> None:
    source = '#include "gpu.cuh"\nusing int64_t_ = int;\n#define float double\nKERNEL(32) k(float x) {}\n'
    (tmp_path / "k.cu").write_text(source, encoding="utf-8")

    with pytest.raises(EmulatorError, match=r"launch.parameters reads .* but the compiler"):
        EmulatedDevice(sources=tmp_path).kernel("k", "k")
