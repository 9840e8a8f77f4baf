"""parallel_for: every item once, whatever the pieces; what a piece raises is not lost; the cache has it."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupaged.jit import njit, njit_inner
from cupaged.kernels.parallel import parallel_for


@njit_inner
def add_rows(out: Any, x: Any, scale: Any, offset: Any, rows: Any) -> None:
    for i in range(*rows):
        for j in range(out.shape[1]):
            out[i, j] += x[i, j] * scale + offset


@njit
def add(out: Any, x: Any, scale: Any, pieces: Any) -> None:
    parallel_for(add_rows, out.shape[0], pieces, (out, x, scale, 2))


@njit
def check_rows(x: Any, rows: Any) -> None:
    for i in range(*rows):
        if x[i] < 0:
            raise ValueError("negative")


@njit
def check(x: Any, pieces: Any) -> None:
    parallel_for(check_rows, x.shape[0], pieces, (x,))


@pytest.mark.parametrize("pieces", [1, 2, 7, 64])
@pytest.mark.parametrize("num_rows", [0, 1, 13])
def test_each_item_is_seen_once(num_rows: int, pieces: int) -> None:
    x = np.arange(num_rows * 6, dtype=np.float32).reshape(num_rows, 6)[:, ::2]
    out = np.zeros((num_rows, 3), np.float32)

    add(out, x, np.float32(3), pieces)

    assert (out == x * 3 + 2).all()


def test_what_one_piece_raises_comes_as_it_is() -> None:
    with pytest.raises(ValueError, match="negative"):
        check(np.array([1, -1]), 1)


def test_what_one_of_several_pieces_raises_is_not_lost() -> None:
    with pytest.raises((RuntimeError, ValueError)):
        check(np.array([1, 1, 1, -1]), 4)


def test_all_went_well_is_no_error() -> None:
    check(np.array([1, 1, 1, 1]), 4)


MODULE = """
import numpy as np
from cupaged.jit import njit, njit_inner
from cupaged.kernels.parallel import parallel_for

@njit_inner
def fill_rows(out, rows):
    for i in range(*rows):
        out[i] = i

@njit
def fill(out, pieces):
    parallel_for(fill_rows, out.shape[0], pieces, (out,))
"""
FILL = """
import numpy as np
from filling import fill
out = np.zeros(100)
fill(out, 9)
print(out.sum(), sum(fill.stats.cache_hits.values()))
"""


def test_loop_is_loaded_from_the_cache(tmp_path: Path) -> None:
    (tmp_path / "filling.py").write_text(MODULE)
    folders = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONPATH": str(tmp_path)}
    environment = os.environ | folders | {"NUMBA_DISABLE_JIT": "0"}
    command = [sys.executable, "-W", "error", "-c", FILL]
    said = [
        subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
        for _ in range(2)
    ]

    assert said == ["4950.0 0\n", "4950.0 1\n"]
