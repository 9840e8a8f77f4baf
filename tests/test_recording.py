"""Recording: what the calls did is done again on new numbers, by the same code; and what is read next."""

import weakref
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cupaged import recording
from cupaged.jit import njit, specialize
from cupaged.kernels.parallel import parallel_for
from cupaged.recording import AHEAD, AHEAD_END, MOST_AHEAD, Call, Recording
from cupaged.threads import ParallelRunner


@njit
def mix(
    x: Any, single: Any, double: Any, count: Any, small: Any, flag: Any, strided: Any, empty: Any, out: Any
) -> None:
    for i in range(out.shape[0]):
        out[i] = x[i] * single + strided[i, 1] * double + count + small
        if flag:
            out[i] = -out[i] - empty.shape[0]


MIX_SIGNATURE = "void(Array(f4, 1, 'C', True),f4,f8,i8,i4,b1,f8[:,:],f4[::1],f8[::1])"


@njit
def add(x: Any, out: Any) -> None:
    for i in range(out.shape[0]):
        out[i] += x[i]


@njit
def set_by(value: Any, out: Any) -> None:
    out[0] = value


@njit
def reset() -> None:
    pass


@njit
def refuse(x: Any) -> None:
    if x[0] > 1:
        raise ValueError("x is above 1")


@njit
def refuse_piece(x: Any, bounds: Any) -> None:
    if bounds[0] <= 3 < bounds[1] and x[0] > 1:
        raise ValueError("x is above 1")


@njit
def refuse_in_pieces(x: Any) -> None:
    parallel_for(refuse_piece, 8, 8, (x,))


@njit
def never_compiled(x: Any) -> None:
    x[0] = 1


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    specialize(mix, MIX_SIGNATURE)
    for kind in ("u2", "f4", "f8"):
        specialize(add, f"void({kind}[::1],{kind}[::1])")
        specialize(add, f"void({kind}[:],{kind}[::1])")
    specialize(set_by, "void(f4,f8[::1])")
    specialize(reset, "void()")
    specialize(refuse, "void(f8[::1])")
    specialize(refuse_in_pieces, "void(f8[::1])")


def record(*calls: Call) -> Recording:
    return Recording(calls, [None] * len(calls))


def play(recording: Recording, num_threads: int = 1) -> None:
    runner = ParallelRunner(num_threads)
    runner.play(recording)
    runner.wait()


def ones(n: int = 1) -> NDArray[np.float64]:
    return np.ones(n)


@pytest.mark.parametrize(
    "scalars",
    [
        (0.1, 0.1, 5, -7, True),
        (-1e-30, -1e300, -(1 << 62), 1 << 30, False),
        (np.float32(0.3), np.float64(0.3), np.int32(-1), np.int64(9), np.bool_(True)),
        (2, 3, True, False, 1),
        (float("inf"), float("nan"), 0, 0, 0),
    ],
    ids=["python", "extreme", "numpy", "converted", "not finite"],
)
def test_arguments_of_every_kind_are_those_of_a_call(scalars: tuple[Any, ...]) -> None:
    numbers = np.random.default_rng(1)
    x, strided = numbers.random(5, np.float32), numbers.random((10, 4))[::2, 1:]
    frozen, empty = x.view(), np.empty(0, np.float32)
    frozen.flags.writeable = False
    played, called = np.zeros(5), np.zeros(5)
    given = (frozen, *scalars, strided, empty)
    arguments: Any = (*given, called)
    again = record((mix, (*given, played)))

    for _ in range(2):
        x[:], strided[:] = numbers.random(5), numbers.random((5, 3))
        play(again)
        mix(*arguments)

        np.testing.assert_array_equal(played, called)


def test_calls_are_made_in_their_order_each_time() -> None:
    a, b, c = ones(), ones(), ones()
    again = record((add, (a, b)), (add, (b, c)), (reset, ()), (add, (c, a)))

    play(again)
    assert (a[0], b[0], c[0]) == (4, 2, 3)
    play(again)

    assert (a[0], b[0], c[0]) == (13, 6, 9)


def test_each_call_is_of_the_code_for_its_arrays() -> None:
    whole = [np.array([1, 2, 3, 4], kind) for kind in (np.uint16, np.float32, np.float64)]
    outs = [np.zeros(2, x.dtype) for x in whole for _ in range(2)]
    inputs = [part for x in whole for part in (x[:2], x[::2])]

    play(record(*((add, pair) for pair in zip(inputs, outs, strict=True))))

    assert [out.tolist() for out in outs] == [[1, 2], [1, 3]] * 3


def test_the_code_is_what_pythons_call_chooses() -> None:
    played, called = ones(), ones()
    play(record((set_by, (0.1, played))))
    assert played[0] == np.float32(0.1)
    specialize(set_by, "void(f8,f8[::1])")

    play(record((set_by, (0.1, played))))  # there is code now that fits better
    set_by(0.1, called)

    assert played[0] == called[0] == 0.1


def test_arrays_live_as_long_as_the_recording() -> None:
    x, out = ones(1000), np.zeros(1000)
    kept = weakref.ref(x)
    again = record((add, (x, out)))

    del x
    others = [np.full(n, -1) for n in range(64) for _ in range(9)]  # in memory that nothing uses any more
    play(again)
    assert (out == 1).all()
    assert all((other == -1).all() for other in others)
    del again

    assert kept() is None


@pytest.mark.parametrize(("kernel", "error"), [(refuse, ValueError), (refuse_in_pieces, RuntimeError)])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_kernels_error_is_raised_and_later_calls_are_not_made(
    kernel: Any, error: type[Exception], num_threads: int
) -> None:
    x, before, after = ones(), ones(), ones()
    again = record((add, (ones(), before)), (kernel, (x,)), (add, (ones(), after)))
    play(again, num_threads)
    x[0] = 2

    with pytest.raises(error, match="x is above 1" if error is ValueError else "a piece"):
        play(again, num_threads)
    assert (before[0], after[0]) == (3, 2)
    x[0] = 1
    play(again, num_threads)

    assert (before[0], after[0]) == (4, 3)


@pytest.mark.parametrize("is_compiled", [True, False])
def test_a_moved_recording_is_of_the_other_buffers_numbers(is_compiled: bool) -> None:
    buffers, outside = [np.zeros(16) for _ in range(3)], ones(3)
    home = buffers[0]
    calls: list[Call] = [(add, (home[2:8:2], outside)), (add, (outside, home[13:]))]
    calls.append((add, (home[:0], home[16:])) if is_compiled else (np.multiply, (home[13:], 1, home[13:])))
    moved = Recording(calls, [None] * 3, home).moved(buffers[1]).moved(buffers[2])
    for buffer in buffers:
        buffer[2:8:2] = 1, 2, 3

    play(moved)

    assert (moved.table is not None) == is_compiled
    assert [buffer[13:].tolist() for buffer in buffers] == [[0, 0, 0], [0, 0, 0], [2, 3, 4]]
    assert outside.tolist() == [2, 3, 4]


def test_an_error_of_a_moved_recording_is_that_of_its_own_numbers() -> None:
    home, other = np.array([3.0]), np.array([2.0])
    again = Recording([(refuse, (home,))], [None], home)
    moved = again.moved(other)
    home[0] = 1
    with pytest.raises(ValueError, match="x is above 1"):
        play(moved)
    home[0], other[0] = 2, 1

    play(moved)


def test_an_error_that_does_not_come_again_is_one_still(monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.array([2.0])
    again = record((reset, ()), (refuse, (x,)))
    monkeypatch.setattr(ParallelRunner, "run", lambda *_: None)

    with pytest.raises(RuntimeError, match="call 1 of 2"):
        play(again)


def test_functions_of_python_are_called_too() -> None:
    out = ones()
    again = record((add, (ones(), out)), (np.multiply, (out, 3, out)))

    play(again)
    play(again)

    assert again.table is None
    assert out[0] == 21


def test_nothing_recorded_is_nothing_played() -> None:
    play(record())


def test_a_kernel_that_is_not_compiled_for_its_arguments_is_named() -> None:
    with pytest.raises(TypeError, match=r"never_compiled is not compiled for .*float64.*cpu_kernels"):
        record((never_compiled, (ones(),)))
    with pytest.raises(TypeError, match="refuse is not compiled for"):
        record((refuse, (ones(4)[::2],)))


def test_a_kernel_is_entered_by_the_same_code_in_every_recording() -> None:
    first = record((refuse, (ones(),)), (refuse, (ones(),)))
    num_entries = len(recording._entries)

    second = record((refuse, (ones(),)))

    assert first.table is not None
    assert second.table is not None
    assert len({*first.table[:, recording.ENTRY], *second.table[:, recording.ENTRY]}) == 1
    assert len(recording._entries) == num_entries


def reading(*reads: NDArray[Any] | None) -> Recording:
    return Recording([(reset, ())] * len(reads), reads)


def ahead(recording: Recording) -> list[int]:
    """Return the addresses that each call has fetched, 0 for none."""
    assert recording.table is not None
    columns = recording.table[:, [AHEAD, AHEAD_END]]
    assert [end - start for start, end in columns.tolist()] == [MOST_AHEAD * (a > 0) for a in columns[:, 0]]
    return [int(start) for start, _ in columns]


def test_each_matrix_is_fetched_from_the_call_on_that_reads_the_one_before() -> None:
    first, second, third = (ones() for _ in range(3))

    again = reading(None, first, None, second, third, None)

    assert ahead(again) == [0, second.ctypes.data, 0, third.ctypes.data, 0, 0]


def test_recordings_that_take_turns_fetch_each_others_first_matrix() -> None:
    a, b, head = (ones() for _ in range(3))
    forward, sampling = reading(None, a, b, None), reading(None, head)

    sampling.follow(forward)
    forward.follow(sampling)

    assert ahead(forward) == [0, b.ctypes.data, head.ctypes.data, 0]
    assert ahead(sampling) == [0, a.ctypes.data]


def test_a_recording_that_reads_no_matrix_leaves_its_neighbours_alone() -> None:
    a, b = ones(), ones()
    forward, nothing, python = reading(a, b), reading(None), Recording([(lambda: None, ())], [a])

    for other in (nothing, python):
        forward.follow(other)
        other.follow(forward)
    nothing.follow(python)

    assert ahead(forward) == [
        b.ctypes.data,
        a.ctypes.data,
    ]  # which Python reads, too
    assert ahead(nothing) == [0]
