"""What gpu_check reports: each time beside the limits of the same run, goals, failures."""

from typing import Any

import pytest

from tools.gpu_goals import goals
from tools.gpu_report import least_bytes, progress, summary, tables
from tools.gpu_tasks import cases_by_task
from tools.kernel_cases import TIMED


def results(**others: Any) -> dict[str, Any]:
    """Return what a run on an H200 might find: each kernel at half the copy bandwidth."""
    found: dict[str, Any] = {}
    for task, case in cases_by_task(False).items():
        seconds = 0.5e-12 * max(least_bytes(case), 1) if task.startswith("time") else 1e-3
        times = {"seconds": seconds, "spread": 0.01, "num_calls": 8, "num_sets": 2, "kernels": {}}
        found[task] = {"difference": ""} if task.startswith("golden") else times
    found |= {
        "versions": {"GPU": "NVIDIA H200, sm_90, 132 SMs"},
        "compile": {"instances": 1},
        "resources": {
            "as_foreseen of it": {"local_bytes": 0, "blocks_per_sm": 2, "predicted_blocks_per_sm": 2},
            "another of it": {"local_bytes": 16, "blocks_per_sm": 2, "predicted_blocks_per_sm": 3},
            "of_a_gpu_without_figures": {"local_bytes": 0, "blocks_per_sm": 2},
        },
        "clocks": {"clocks.sm": "1980 MHz"},
        "copy bandwidth": {"bytes_per_second": 4e12},
        "matmul": {"flops_per_second": 8e14},
        "launch overhead": {"case": "some", "function_seconds": 8e-6, "kernel_seconds": 1e-6},
    }
    return {name: {"result": result, "took": 1.0} for name, result in found.items()} | others


def report_of(found: dict[str, Any]) -> dict[str, Any]:
    """Return the report of a run of the kernels alone."""
    return summary(found, dry_run=False, kernels_only=True)


def test_report_sets_each_time_beside_the_limits_of_the_same_run() -> None:
    report = report_of(results())

    assert report["failures"] == []
    assert report["num_goldens_met"] == report["num_goldens"]
    assert [row["case"] for row in report["times"]] == [case.name for case in TIMED]
    assert {round(row["bandwidth_share"], 6) for row in report["times"]} == {0.5}
    assert report["goals"][0]["status"] == "not met"
    text = tables(report)
    assert "copy, read + write: 4.000 TB/s" in text
    assert (
        "not met: paged_decode, batch x context >= 256k: share of copy bandwidth 50.0%, goal 85.0% or more"
        in text
    )


def test_report_says_what_a_gpu_has_otherwise_than_foreseen() -> None:
    text = tables(report_of(results()))

    assert "another of it: 16 bytes of local memory a thread; 2 blocks an SM, 3 were predicted\n" in text
    assert "as_foreseen" not in text
    assert "without_figures" not in text
    assert "clocks.sm: 1980 MHz" in text


def test_bytes_of_attention_are_those_that_no_kernel_can_do_without() -> None:
    decode = next(case for case in TIMED if case.name == "paged_decode-bf16-32_8x128-64x4096")
    prefill = next(case for case in TIMED if case.name == "paged_prefill-bf16-32_8x128-1x8192")

    assert least_bytes(decode) == 64 * (4096 * 2 * 8 + 2 * 32) * 128 * 2
    assert least_bytes(prefill) == 8192 * (2 * 8 + 2 * 32) * 128 * 2


@pytest.mark.parametrize(
    ("row", "line"),
    [
        ({"took": 0.26, "result": {"difference": ""}}, "   0.3 s  it: ok"),
        ({"took": 1.0, "result": {"difference": "out is wrong"}}, "   1.0 s  it: out is wrong"),
        ({"took": 2.0, "result": {"seconds": 3e-6}}, "   2.0 s  it: 3.0 us"),
        ({"took": 9.0, "result": {"seconds": 8.5}}, "   9.0 s  it: 8.50 s"),
        ({"took": 1.0, "result": {"skipped": "no g++"}}, "   1.0 s  it: no g++"),
        ({"error": "it took over 2 s"}, "     - s  it: it took over 2 s"),
    ],
)
def test_line_on_a_task(row: dict[str, Any], line: str) -> None:
    assert progress("it", row) == line


def test_report_names_what_failed_differs_or_is_missing() -> None:
    golden, timed = (
        next(task for task in cases_by_task(False) if task.startswith(kind)) for kind in ("golden", "time")
    )
    found = results(
        **{
            golden: {"result": {"difference": "out: 1 of 2 wrong"}},
            timed: {"error": "it broke", "traceback": "where"},
        }
    )
    del found["matmul"]

    report = report_of(found)

    assert report["failures"] == [
        f"{timed}: it broke",
        f"{golden}: out: 1 of 2 wrong",
        "1 tasks did not begin",
    ]
    assert report["tracebacks"] == {timed: "where"}
    assert report["num_goldens_met"] == report["num_goldens"] - 1
    assert f"FAILED {golden}: out: 1 of 2 wrong" in tables(report)


@pytest.mark.parametrize(
    ("shares", "status"),
    [([0.9, 0.86], "met"), ([0.9, 0.84], "not met"), ([None], "not measured"), ([], "not measured")],
)
def test_goal_is_met_if_its_worst_shape_meets_it(shares: list[float | None], status: str) -> None:
    decodes = [
        {"queries": 1, "num_seqs": 64, "length": 4096, "bandwidth_share": share, "flops_share": None}
        for share in shares
    ]
    smaller = {"queries": 1, "num_seqs": 1, "length": 8192, "bandwidth_share": 0.1, "flops_share": None}

    decode, prefill = goals([*decodes, smaller], None)

    assert decode["status"] == status
    assert prefill["status"] == "not measured"
