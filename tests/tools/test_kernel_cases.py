"""Cases: named once, made the same everywhere, and looked at without memory."""

import hashlib
import tracemalloc

import ml_dtypes
import numpy as np
import pytest

from tools.kernel_cases import GOLDENS, INSTANCES, PROBES, TIMED, TRAFFIC
from tools.kernel_cases.case import Case, HostArrays, ShapeArrays
from tools.kernel_cases.launches import record

ALL = [*PROBES, *GOLDENS, *TRAFFIC, *TIMED, *INSTANCES]


def test_names_are_file_names_and_name_one_case() -> None:
    goldens = [case.name for case in (*PROBES, *GOLDENS)]

    assert len(set(goldens)) == len(goldens)
    assert all(set(case.name) <= set("abcdefghijklmnopqrstuvwxyz0123456789_-.") for case in ALL)


def test_random_arrays_are_the_same_bits_everywhere() -> None:
    arrays = HostArrays("a name")
    made = (
        arrays.normal((3, 5), ml_dtypes.bfloat16),
        arrays.integers(-9, 99, (7,)),
        arrays.normal((2,), spread=3),
    )

    digest = hashlib.sha256(b"".join(array.tobytes() for array in made)).hexdigest()[:16]

    assert digest == "540d4206ee7307ce"


def test_random_arrays_are_what_they_say() -> None:
    arrays = HostArrays("a name")
    x, y = arrays.normal((9999,), spread=2.0), arrays.normal((9999,))
    integers = arrays.integers(-2, 3, (9999,))

    assert abs(x.mean()) < 0.1
    assert abs(x.std() - 2) < 0.1
    assert abs(np.corrcoef(x, y)[0, 1]) < 0.05
    assert np.unique(integers).tolist() == [-2, -1, 0, 1, 2]
    assert np.bincount(integers + 2).min() > 1800


def test_what_a_kernel_is_to_write_is_nan_or_minus_one() -> None:
    arrays = HostArrays("")

    assert np.isnan(arrays.unwritten((2, 3), ml_dtypes.bfloat16).astype(float)).all()
    assert (arrays.unwritten((2, 3), np.int32) == -1).all()


def test_shapes_without_memory_look_as_arrays_do() -> None:
    shapes = ShapeArrays()
    real = np.empty((3, 4, 2, 8), np.float16)
    made = shapes.normal(real.shape, real.dtype)

    assert (made.shape, made.dtype, made.strides) == (real.shape, real.dtype, real.strides)
    assert made[1:, 2].strides == real[1:, 2].strides
    assert made.reshape(12, 16).view(np.uint16).shape == (12, 16)


def test_shapes_without_memory_can_be_read_as_a_failed_test_reads_them() -> None:
    made = ShapeArrays().normal((1 << 20, 1 << 20), ml_dtypes.bfloat16)

    assert "0, 0, 0, ..., 0, 0, 0" in repr((made[1:], [made.reshape(-1)]))
    assert (made[-1] == made[0]).all()


@pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)
def test_launches_are_noted_without_memory(case: Case) -> None:
    tracemalloc.start()
    launches = record(case)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert launches
    assert all(min(launch.grid) > 0 and 0 < launch.block <= 1024 for launch in launches)
    assert peak < 16e6  # bytes, of block tables
