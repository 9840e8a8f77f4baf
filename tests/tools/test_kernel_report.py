import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from cupaged.kernels.launch import SOURCES
from tools.kernel_cases import TIMED
from tools.kernel_cases.rms_norm import rms_norm
from tools.kernel_report import (
    COMMAND,
    REPORTED,
    Profile,
    fingerprint,
    kernel_row,
    kernels,
    key_of,
    main,
    shape_row,
)
from tools.kernel_tables import kernel_table, markdown, predictions, read_readme, shape_table
from tools.steps import STEPS

CASE = rms_norm("bf16", 1000, 4096)


def test_the_tables_in_the_readme_are_of_these_sources() -> None:
    assert f"Sources {fingerprint(REPORTED)}," in read_readme(), (
        f"kernels/README.md is older than its sources: {COMMAND}"
    )


def test_a_change_of_source_or_shape_changes_the_fingerprint(tmp_path: Path) -> None:
    for path in (*SOURCES.glob("*.cu"), *SOURCES.glob("*.cuh")):
        shutil.copy(path, tmp_path)
    same = fingerprint([CASE], tmp_path)

    assert same == fingerprint([CASE])
    assert same != fingerprint([rms_norm("bf16", 1001, 4096)], tmp_path)
    (tmp_path / "gpu.cuh").write_text((tmp_path / "gpu.cuh").read_text() + "\n")
    assert same != fingerprint([CASE], tmp_path)


def test_a_kernel_is_listed_once_with_its_resources() -> None:
    [(case, launch)] = kernels([CASE, rms_norm("bf16", 7, 4096), replace(CASE, name="again")])

    row = kernel_row(case, launch, ["sm_80", "sm_90"])

    assert row["kernel"] == "rms_norm"
    assert row["constants"]["ELEMENT"] == "bf16"
    assert row["spill_bytes"] == 0
    assert list(row["registers"]) == ["sm_80", "sm_90"]
    assert all(0 < share <= 1 for share in row["occupancy"].values())
    assert "ELEMENT=bf16" in kernel_table([row])


def test_a_shape_has_its_sheet_s_bytes_and_times_above_the_roofline() -> None:
    [(_, launch)] = kernels([CASE])

    row = shape_row(CASE, {key_of(launch): Profile(mma_flops=0.0, wavefronts=0.01, copy_bytes=0)})

    assert row["bytes"] == 3 * 1000 * 4096 * 2
    assert row["unique_bytes"] == 2001 * 4096 * 2
    for times in row["gpus"].values():
        assert times["predicted_us"] > times["roofline_us"] > 0
    assert CASE.name in shape_table([row])


def test_tables_are_aligned() -> None:
    text = markdown(("a", "long name"), [("12345", "x")])

    assert text == "| a     | long name |\n| ---   | ---       |\n| 12345 | x         |\n"


def test_predictions_are_those_of_the_readme() -> None:
    found = predictions("NVIDIA H200")

    assert found.keys() == {case.name for case in TIMED} | {step.name for step in STEPS}
    assert all(0 < seconds < 1 for seconds in found.values())
    for other in ("NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"):
        assert predictions(other).keys() == found.keys()
        assert predictions(other) != found
    assert predictions("GeForce") == {}


def test_shapes_of_ones_own_are_predicted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = ["--decode", "2x1000", "--prefill", "1x300", "--heads", "f16-4_2x64"]
    monkeypatch.setattr("sys.argv", ["kernel_report", "--arch", "sm_90", *shapes])

    main()

    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["case"] for row in result["shapes"]] == [
        "paged_decode-f16-4_2x64-2x1000",
        "paged_prefill-f16-4_2x64-1x300",
    ]
    assert all(row["gpus"]["H200"]["predicted_us"] > 0 for row in result["shapes"])
    assert {row["constants"]["HEAD_DIM"] for row in result["kernels"]} == {64}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--decode", "2x0"], "'2x0' is not SEQUENCESxTOKENS"),
        (["--decode", "1x9", "--heads", "bf16-3_2x64"], "HEADS a multiple of KVHEADS"),
        (["--prefill", "1x9", "--heads", "bf16-4_2x100"], "head_dim 100 has no attention kernels"),
        (["--decode", "1x9", "--heads", "bf16-64_2x64"], "paged_decode takes at most 16"),
        (["--decode", "1x9", "--markdown"], "leave out --all and --markdown"),
    ],
)
def test_shapes_that_have_no_kernel_are_refused(
    options: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.argv", ["kernel_report", *options])

    with pytest.raises(SystemExit):
        main()

    assert message in capsys.readouterr().err.replace("\n", " ")
