"""Words: compiled code gets back what was put in, and writes where the arrays are."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from cupaged.jit import njit
from cupaged.words import Words, reader, to_words

RECORD = np.dtype([("small", np.int32), ("large", np.float64), ("flag", np.bool_)], align=True)


class Inner(NamedTuple):
    plain: NDArray[np.float32]
    number: int
    share: float
    mask: Any


class Outer(NamedTuple):
    inner: Inner
    at: Any
    cube: NDArray[np.int16]
    none: NDArray[np.int32]


def create(size: int) -> Outer:
    at = np.zeros(size, RECORD).view(np.recarray)
    at.small[:] = np.arange(size)
    cube = np.arange(2 * 3 * size, dtype=np.int16).reshape(2, 3, size)
    inner = Inner(np.arange(size, dtype=np.float32), -size, size / 8, np.uint64(2**64 - size))
    return Outer(inner, at, cube, np.empty((0, size), np.int32))


read = reader(create(1))


@njit
def look(words: Words) -> tuple[Any, ...]:
    value = read(words)
    inner = value.inner
    shapes = value.at.shape, value.cube.shape, value.none.shape, inner.plain.shape
    return inner.number, inner.share, inner.mask, value.cube[1, 2, 3], value.cube[1].sum(), shapes


@njit
def write(words: Words, place: int) -> None:
    value = read(words)
    value.at[place].large = value.at[place].small + value.inner.plain[place:].sum()
    value.at[place].flag = True
    value.cube[1, :, place] = 7


@pytest.mark.parametrize("size", [4, 5])
def test_all_comes_back(size: int) -> None:
    value = create(size)

    number, share, mask, element, total, shapes = look(to_words(value))

    assert (number, share, mask) == (-size, size / 8, 2**64 - size)
    assert element == value.cube[1, 2, 3]
    assert total == value.cube[1].sum()
    assert shapes == ((size,), (2, 3, size), (0, size), (size,))


def test_what_is_written_is_in_the_arrays() -> None:
    value, expected = create(4), create(4)
    expected.at[2] = (2, 2 + 2 + 3, True)
    expected.cube[1, :, 2] = 7

    write(to_words(value), 2)

    assert value.at.tolist() == expected.at.tolist()
    assert value.cube.tolist() == expected.cube.tolist()


def test_array_with_gaps_is_refused() -> None:
    value = create(4)

    with pytest.raises(AssertionError, match="gaps"):
        to_words(value._replace(cube=value.cube[:, :2]))


def test_number_that_is_no_word_is_refused() -> None:
    read_narrow: Any = reader((np.int32(1),))

    @njit
    def narrow(words: Words) -> Any:
        return read_narrow(words)

    with pytest.raises(AssertionError, match="int32 takes no word"):
        narrow(np.zeros(1, np.int64))


def test_works_without_the_compiler() -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        __file__,
        "-k",
        "comes or written",
    ]

    result = subprocess.run(
        command,
        cwd=Path(__file__).parents[1],
        env=os.environ | {"NUMBA_DISABLE_JIT": "1"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert result.returncode == 0, result.stdout + result.stderr
