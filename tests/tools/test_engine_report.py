"""What gpu_check reports of the engine: rooflines of the same run, predictions, peers, goals."""

from typing import Any

import pytest

from tools.engine_model import REAL
from tools.engine_report import Rates, engine_lines, engine_summary
from tools.gpu_goals import goals
from tools.gpu_report import summary, tables
from tools.gpu_tasks import parts
from tools.steps import LLAMA_8B, Step

RATES = Rates(bytes_per_second=4e12, flops_per_second=8e14)
GPU = "NVIDIA H200"


def found(*, share: float = 0.8, gap: float = 20e-6, context: int = 1024) -> dict[str, Any]:
    """Return what a run might find: each step and product at a share of its roofline."""
    done: dict[str, Any] = {}
    for step in REAL.steps:
        seconds = step.roofline(*RATES) / share
        done[f"step {step.name}"] = {"seconds": seconds, "spread": 0.01}
        if step.num_new == 1:
            cached = step.num_seqs * context
            graphs = {
                "seconds": seconds,
                "spread": 0.01,
                "gap_seconds": gap,
                "gap_90_seconds": 2 * gap,
                "host_seconds": 1e-4,
                "num_cached": cached,
            }
            eager = graphs | {"seconds": 2 * seconds}
            done[f"step {step.name}"] = {"seconds": seconds, "graphs": graphs, "eager": eager}
    for product in REAL.products:
        seconds = max(product.num_bytes / 4e12, product.flops / 8e14) / share
        done[f"gemm {product}"] = {"seconds": seconds, "spread": 0.02}
    for work in REAL.workloads:
        done |= {f"generate {work}": {"seconds": 0.5}, f"transformers {work}": {"seconds": 1.5}}
    return done


def test_each_step_stands_beside_the_roofline_of_the_same_run_and_its_prediction() -> None:
    report = engine_summary(found(), REAL, GPU, RATES, {"8b-decode-1x1024": 4e-3})

    first = report["steps"][0]
    assert first["step"] == "8b-decode-1x1024"
    assert first["roofline_us"] == pytest.approx(1e6 * Step(LLAMA_8B, 1, 1024).least_bytes / 4e12)
    assert {round(row["roofline_share"], 6) for row in report["steps"]} == {0.8}
    assert first["predicted_us"] == pytest.approx(4000)
    assert report["steps"][1]["predicted_us"] is None
    assert first["eager_us"] == pytest.approx(2 * first["us"])


def test_prefill_counts_all_its_tokens() -> None:
    report = engine_summary(found(), REAL, GPU, RATES, {})

    prefill = report["steps"][-1]
    assert not prefill["is_decode"]
    assert prefill["tokens_per_second"] == pytest.approx(8192 / (prefill["us"] / 1e6))


def test_roofline_is_of_the_lengths_that_the_sequences_had() -> None:
    report = engine_summary(found(context=1040), REAL, GPU, RATES, {})

    many = next(row for row in report["steps"] if row["num_seqs"] == 256)
    assert many["length"] == 1040
    assert many["bytes"] == Step(LLAMA_8B, 256, 1040).least_bytes


def test_products_and_workloads_stand_beside_what_they_are_compared_with() -> None:
    report = engine_summary(found(), REAL, GPU, RATES, {})

    assert {round(row["roofline_share"], 6) for row in report["gemms"]} == {0.8}
    assert all(row["predicted_us"] > 0 for row in report["gemms"])
    assert [row["times_as_fast"] for row in report["workloads"]] == [pytest.approx(3.0)] * 2


def test_an_unknown_gpu_has_no_predictions_and_without_rates_there_is_no_roofline() -> None:
    report = engine_summary(found(), REAL, "some other GPU", None, {})

    assert {row["predicted_us"] for row in report["gemms"]} == {None}
    assert {row["roofline_share"] for row in report["steps"]} == {None}


def test_what_was_not_done_is_left_out_and_what_does_not_fit_says_why() -> None:
    done = found()
    del done[f"gemm {REAL.products[0]}"]
    done["step 8b-decode-256x1024"] = {"skipped": "the KV cache has 99 blocks"}

    report = engine_summary(done, REAL, GPU, RATES, {})

    assert len(report["gemms"]) == len(REAL.products) - 1
    lines = engine_lines(report)
    assert next(line for line in lines if "256x1024" in line).endswith("the KV cache has 99 blocks")


def test_lines_say_what_was_checked() -> None:
    done = found() | {
        "agreement clear_llama": {"agreement": "agrees: 176 positions"},
        "graphs": {"num_tokens": 64},
        "load engine": {
            "seconds": 21.0,
            "plan": "memory in MiB",
            "log": ["0.1 s: memory in MiB", "4.0 s: more"],
        },
        "memory": {
            "driver_bytes": 300 << 20,
            "driver_bytes_without_graphs": 100 << 20,
            "num_graphs": 133,
            "reserve_bytes": 400 << 20,
        },
        "link bandwidth": {"to_host": 50e9, "to_device": 55e9, "both": 83e9},
        "swap blocks": {"to_host": 45e9, "to_device": 44e9, "num_blocks": 256, "block_bytes": 2 << 20},
        "fork step": {
            "num_seqs": 256,
            "num_copies": 128,
            "seconds": 5.2e-3,
            "plain_seconds": 5e-3,
            "copied_bytes": 4e8,
        },
    }

    text = "\n".join(engine_lines(engine_summary(done, REAL, GPU, RATES, {})))

    assert "agreement clear_llama: agrees: 176 positions" in text
    assert "every bit of 64 tokens" in text
    assert "loaded in 21.0 s:\n  0.1 s: memory in MiB\n  4.0 s: more\n" in text
    assert "the driver keeps 300 MiB of a reserve of 400, of them 100 before it had 133 graphs" in text
    assert "link to the host, GB/s: to_host 50.0, to_device 55.0, both 83.0" in text
    assert (
        "swap of 256 blocks, GB/s: to_host 45.0 (90.0% of the link), to_device 44.0 (80.0% of the link)"
        in text
    )
    assert (
        "decode of 256 sequences that copies 128 blocks on write: 5200.0 us, without copies 5000.0; "
        "the copies need 200.0 at least" in text
    )


def test_swaps_without_a_link_beside_them_have_no_share_and_without_a_pool_no_line() -> None:
    swap = {"to_host": 45e9, "to_device": 44e9, "num_blocks": 256, "block_bytes": 2 << 20}
    alone = engine_lines(engine_summary(found() | {"swap blocks": swap}, REAL, GPU, None, {}))
    without = engine_lines(
        engine_summary(found() | {"swap blocks": {"skipped": "there is no host pool"}}, REAL, GPU, None, {})
    )

    assert "swap of 256 blocks, GB/s: to_host 45.0 (- of the link), to_device 44.0 (- of the link)" in alone
    assert not any(line.startswith("swap of") for line in without)


@pytest.mark.parametrize(
    ("share", "gap", "statuses"),
    [
        (0.8, 20e-6, ["met", "met", "met"]),
        (0.76, 20e-6, ["met", "not met", "met"]),
        (0.7, 20e-6, ["not met", "not met", "met"]),
        (0.8, 101e-6, ["met", "met", "not met"]),
    ],
)
def test_goals_of_the_engine(share: float, gap: float, statuses: list[str]) -> None:
    report = engine_summary(found(share=share, gap=gap), REAL, GPU, RATES, {})

    assert [goal["status"] for goal in goals([], report["steps"])][2:] == statuses


def test_goals_that_nothing_was_measured_for() -> None:
    assert [goal["status"] for goal in goals([], [])] == ["not measured"] * 5


def test_whole_report_has_engine_goals_and_counts_its_tasks() -> None:
    results = {name: {"result": result, "took": 1.0} for name, result in found().items()}

    report = summary(results, dry_run=False, kernels_only=False)

    assert len(report["goals"]) == 5
    num_tasks = sum(len(part.tasks) for part in parts(False, kernels_only=False))
    assert report["failures"] == [f"{num_tasks - len(results)} tasks did not begin"]
    assert "not measured: decode of one sequence: share of its roofline -, goal 75.0% or more" in tables(
        report
    )
