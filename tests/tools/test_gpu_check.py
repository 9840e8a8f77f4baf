"""gpu_check: a dry run with a GPU machine's packages only, what survives a bad task, what is reported."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.test_floors import imports
from tools.gpu_check import supervise
from tools.gpu_report import goals, least_bytes, progress, summary, tables
from tools.gpu_worker import cases_by_task, kind_of, tasks
from tools.kernel_cases import TIMED

ROOT = Path(__file__).parents[2]
# What a machine with a GPU is sure to have beside the standard library, by the names that are imported.
PACKAGES = [
    "numpy",
    "cupy",
    "cupyx",
    "cupy_backends",
    "cuda",
    "numba",
    "llvmlite",
    "safetensors",
    "tokenizers",
]
PACKAGES += ["jinja2", "ml_dtypes", "tqdm", "torch", "transformers", "pytest", "cupaged", "tools", "tests"]
HOOK = f"""
import sys
allowed = sys.stdlib_module_names | set({PACKAGES})
class Blocker:
    @staticmethod
    def find_spec(name, path=None, target=None):
        root = name.split(".")[0]
        if root not in allowed and not root.startswith("__editable__"):
            raise ImportError(f"a GPU machine does not have {{name}}")
sys.meta_path.insert(0, Blocker)
"""


@pytest.fixture
def machine(tmp_path: Path) -> dict[str, str]:
    """The environment of Python processes that import only what a GPU machine has."""
    (tmp_path / "sitecustomize.py").write_text(HOOK)
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}


def test_dry_run_needs_only_what_a_gpu_machine_has(machine: dict[str, str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tools.gpu_check", "--kernels", "--dry-run", "--json", "found.json"]

    done = subprocess.run(command, env=machine, cwd=tmp_path, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr + done.stdout
    report = json.loads((tmp_path / "found.json").read_text())
    assert report["failures"] == []
    assert report["num_goldens_met"] == report["num_goldens"] > 20
    assert len(report["times"]) > 10
    decode = next(row for row in report["times"] if row["case"] == "paged_decode-bf16-8_2x128-2x1024")
    assert decode["kernels_us"].keys() == {"paged_decode", "paged_decode_combine"}
    assert report["goals"] == []
    assert "goldens met" in done.stdout


def test_what_only_runs_on_a_gpu_needs_only_what_its_machine_has(machine: dict[str, str]) -> None:
    command = [sys.executable, "-c", "import tools.gpu_machine, cupaged.backend.cupy_device"]
    files = [*(ROOT / "tools").glob("gpu_*.py"), ROOT / "cupaged" / "backend" / "device.py"]

    done = subprocess.run(command, env=machine, capture_output=True, text=True, check=False)
    later = {name.split(".")[0] for file in files for _, name in imports(file.read_text(encoding="utf-8"))}

    assert done.returncode == 0, done.stderr
    assert later - sys.stdlib_module_names - set(PACKAGES) == set()


def test_the_block_on_other_packages_bites(machine: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import msgspec"], env=machine, capture_output=True, text=True, check=False
    )

    assert "ImportError: a GPU machine does not have msgspec" in done.stderr


def test_without_a_gpu_one_failure_says_why() -> None:
    done = subprocess.run(
        ["sh", str(ROOT / "tools" / "gpu_check"), "--kernels"],
        env=os.environ | {"PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])},
        capture_output=True,
        text=True,
        check=False,
    )

    if "GPU: " in done.stdout:
        pytest.skip("this machine has a GPU")
    assert done.returncode == 1
    assert "FAILED versions: CudaUnavailable: " in done.stdout
    assert f"FAILED {len(tasks(False)) - 1} tasks did not begin" in done.stdout


WORKER = """
import json, os, sys, time
for name in sys.argv[1:]:
    print(json.dumps({"begin": name}), flush=True)
    if name == "dies":
        os._exit(9)
    if name == "hangs":
        time.sleep(60)
    if name == "crashes at exit" and len(sys.argv) > 2:
        print(json.dumps({"end": name, "took": 0.0, "error": "wrong"}), flush=True)
        os._exit(139)
    result = {"error": "wrong"} if name == "fails" else {"result": {"pid": os.getpid()}}
    print(json.dumps({"end": name, "took": 0.0, **result}), flush=True)
    if name == "fails":
        sys.exit(3)
"""


def run_tasks(*names: str, task_seconds: float = 30.0, total_seconds: float = 60.0) -> dict[str, Any]:
    command = [sys.executable, "-c", WORKER]
    return supervise(command, names, total_seconds=total_seconds, limit=lambda _: task_seconds)


def test_tasks_that_work_share_a_process() -> None:
    results = run_tasks("a", "b")

    assert results["a"]["result"] == results["b"]["result"]


@pytest.mark.parametrize(("bad", "error"), [("fails", "wrong"), ("dies", "its process ended with status 9")])
def test_tasks_after_a_bad_one_run_in_a_new_process(bad: str, error: str) -> None:
    results = run_tasks("a", bad, "b")

    assert list(results) == ["a", bad, "b"]
    assert results[bad]["error"] == error
    assert results["a"]["result"] != results["b"]["result"]


def test_process_that_ends_between_tasks_is_no_tasks_fault() -> None:
    results = run_tasks("a", "crashes at exit", "b")

    assert "result" in results["b"]


def test_process_that_never_begins_ends_the_check() -> None:
    results = supervise([sys.executable, "-c", "raise SystemExit(1)"], ("a", "b"), total_seconds=60)

    assert results == {"a": {"error": "its process ended with status 1"}}


def test_task_that_hangs_is_ended() -> None:
    results = run_tasks("a", "hangs", "b", task_seconds=2.0)

    assert results["hangs"]["error"] == "it took over 2 s"
    assert results.keys() == {"a", "hangs", "b"}


def test_all_ends_when_the_time_is_over() -> None:
    start = time.monotonic()
    results = run_tasks("a", "hangs", "b", total_seconds=2.0)

    assert time.monotonic() - start < 10
    assert results.keys() == {"a", "hangs"}
    assert results["hangs"]["error"] == "the time of all tasks was over"


def test_each_task_is_noted_as_it_ends() -> None:
    noted: list[list[str]] = []
    command = [sys.executable, "-c", WORKER]

    supervise(command, ("a", "dies", "b"), total_seconds=60, note=lambda results: noted.append(list(results)))

    assert noted == [["a"], ["a", "dies"], ["a", "dies", "b"]]


def test_what_libraries_print_does_not_reach_the_report() -> None:
    code = (
        "import os; from tools.gpu_worker import reserve_stdout; out = reserve_stdout();"
        "print('python', flush=True); os.write(1, b'library'); out.write('report')"
    )

    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)

    assert (done.stdout, done.stderr) == ("report", "python\nlibrary")


def test_what_decides_comes_first_and_torch_last() -> None:
    kinds = [kind_of(task) for task in tasks(False)]

    assert kinds[:3] == ["versions", "compile", "resources"]
    assert kinds == sorted(kinds, key=kinds.index), "a kind is in several places"
    assert kinds[-1] == "sdpa"
    assert max(kinds.index("golden"), kinds.index("copy"), kinds.index("matmul")) < kinds.index("time")


def test_nothing_begins_after_a_first_task_that_fails_or_when_the_time_is_over() -> None:
    assert run_tasks("fails", "b").keys() == {"fails"}
    assert run_tasks("a", "b", total_seconds=0.0) == {}


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


def test_report_sets_each_time_beside_the_limits_of_the_same_run() -> None:
    report = summary(results(), dry_run=False)

    assert report["failures"] == []
    assert report["num_goldens_met"] == report["num_goldens"]
    assert [row["case"] for row in report["times"]] == [case.name for case in TIMED]
    assert {round(row["bandwidth_share"], 6) for row in report["times"]} == {0.5}
    assert report["goals"][0]["status"] == "not met"
    text = tables(report)
    assert "copy, read + write: 4.000 TB/s" in text
    assert "not met: paged_decode, batch x context >= 256k: share of copy bandwidth 50.0%, goal 85.0%" in text


def test_report_says_what_a_gpu_has_otherwise_than_foreseen() -> None:
    text = tables(summary(results(), dry_run=False))

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
        ({"error": "it took over 2 s"}, "     - s  it: it took over 2 s"),
    ],
)
def test_line_on_a_task(row: dict[str, Any], line: str) -> None:
    assert progress("it", row) == line


def test_report_names_what_failed_differs_or_is_missing() -> None:
    golden, timed = (
        next(task for task in tasks(False) if task.startswith(kind)) for kind in ("golden", "time")
    )
    found = results(**{golden: {"result": {"difference": "out: 1 of 2 wrong"}}, timed: {"error": "it broke"}})
    del found["matmul"]

    report = summary(found, dry_run=False)

    assert report["failures"] == [
        f"{timed}: it broke",
        f"{golden}: out: 1 of 2 wrong",
        "1 tasks did not begin",
    ]
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

    decode, prefill = goals([*decodes, smaller])

    assert decode["status"] == status
    assert prefill["status"] == "not measured"
