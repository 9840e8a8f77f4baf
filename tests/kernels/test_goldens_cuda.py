"""The emulator gives what the goldens keep, which tools/gpu_check holds a GPU to; differences are found."""

import numpy as np
import pytest

from cupaged.kernels.launch import SOURCES, parameters
from tests.cuda_on_cpu.device import EmulatedDevice
from tools.kernel_cases import GOLDENS, PROBES
from tools.kernel_cases.case import Case, Tolerance
from tools.kernel_cases.goldens import GOLDENS_DIR, checksum, difference, load, run
from tools.kernel_cases.launches import record

CASES = [*PROBES, *GOLDENS]
MAX_BYTES = 1_500_000  # of all goldens, which are committed


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_emulator_gives_what_the_golden_keeps(case: Case) -> None:
    actual = run(case, EmulatedDevice(sources=case.sources))

    assert difference(case, actual, load(case)) == ""


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_golden_is_of_something(case: Case) -> None:
    for name, array in load(case).items():
        values = array.astype(np.float64)
        assert np.isfinite(values).any(), name
        assert len(np.unique(values[np.isfinite(values)])) > 1 or array.size == 1, name


def test_goldens_are_those_of_the_cases_and_small() -> None:
    files = list(GOLDENS_DIR.glob("*"))

    assert sorted(path.stem for path in files) == sorted(case.name for case in CASES)
    assert sum(path.stat().st_size for path in files) < MAX_BYTES


def test_every_kernel_has_a_golden() -> None:
    kept = {(launch.file, launch.kernel) for case in GOLDENS for launch in record(case)}
    sources = {path.stem: parameters(path.read_text(encoding="utf-8")) for path in SOURCES.glob("*.cu")}

    assert {(file, kernel) for file in sources for kernel in sources[file]} == kept


def test_golden_of_other_inputs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.kernel_cases.goldens.checksum", lambda case: checksum(case)[::-1])

    with pytest.raises(
        ValueError, match=r"probe-narrow.npz is of other inputs.*make_kernel_goldens probe-narrow"
    ):
        load(next(case for case in PROBES if case.name == "probe-narrow"))


@pytest.fixture
def case() -> Case:
    """A case of one output that may be off by a hundredth of itself."""
    return Case(
        name="stand-in",
        make=lambda _: {},
        launch=lambda *_: None,
        outputs=("out",),
        variables={},
        tolerance=Tolerance(0.01, 0.0),
    )


@pytest.mark.parametrize(
    ("actual", "expected", "is_as_it_must_be"),
    [
        ([1.0, np.nan, np.inf], [1.005, np.nan, np.inf], True),
        ([1.0, 1.0], [1.0, 1.02], False),
        ([1.0, np.nan], [1.0, 1.0], False),
        ([1.0, 1.0], [1.0, np.nan], False),
        ([np.inf], [-np.inf], False),
        ([1e30], [np.inf], False),
    ],
)
def test_floats_may_differ_by_the_tolerance(
    case: Case, actual: list[float], expected: list[float], is_as_it_must_be: bool
) -> None:
    outputs = ({"out": np.array(values, np.float32)} for values in (actual, expected))

    assert (difference(case, *outputs) == "") == is_as_it_must_be


def test_integers_must_be_equal(case: Case) -> None:
    actual, expected = ({"out": np.array([[5, last]], np.int32)} for last in (1000, 1001))

    assert difference(case, actual, actual) == ""
    assert difference(case, actual, expected).startswith(
        "out: 1 of 2 wrong, first at [0, 1]: 1000 for 1001; error max 1.00e+00"
    )


def test_other_shape_or_dtype_is_a_difference(case: Case) -> None:
    expected = {"out": np.zeros(3, np.float32)}

    assert difference(case, {"out": np.zeros(2, np.float32)}, expected) == "out is float32[2], not float32[3]"
    assert difference(case, {"out": np.zeros(3, np.int32)}, expected) == "out is int32[3], not float32[3]"
