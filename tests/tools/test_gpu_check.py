"""gpu_check: a dry run with a GPU machine's packages only, and what survives a bad task."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.test_floors import imports
from tools.engine_model import TINY
from tools.gpu_check import Lines, StuckError, commit, environment, supervise
from tools.gpu_tasks import WAYS, Part, parts

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
PACKAGES += [
    "jinja2",
    "markupsafe",
    "ml_dtypes",
    "tqdm",
    "envwrap",  # of tqdm
    "torch",
    "transformers",
    "pytest",
    "cupaged",
    "tools",
    "tests",
]
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
    command = [sys.executable, "-m", "tools.gpu_check", "--dry-run", "--json", "found.json"]

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
    engine = report["engine"]
    assert "agrees" in engine["agreements"]["agreement clear_llama"]
    assert all("agrees" in engine["agreements"][f"{way} clear_llama"] for way in WAYS)
    assert engine["graphs"]["num_tokens"] > 50
    assert engine["swap"]["to_host_share"] > 0
    assert engine["fork"]["num_copies"] > 0
    assert sum(engine["memory"]["planned_bytes"]) > 0
    assert any("matrix products" in line for line in engine["load"]["log"])
    assert [row["step"] for row in engine["steps"]] == [step.name for step in TINY.steps]
    assert all(row["us"] > 0 and row["roofline_share"] for row in engine["steps"])
    assert len(engine["gemms"]) == len(TINY.products)
    assert [row["workload"] for row in engine["workloads"]] == [str(work) for work in TINY.workloads]


def test_what_only_runs_on_a_gpu_needs_only_what_its_machine_has(machine: dict[str, str]) -> None:
    command = [sys.executable, "-c", "import tools.gpu_machine, cupaged.backend.cuda"]
    patterns = ("tools/gpu_*.py", "tools/engine_*.py", "cupaged/backend/c*.py")
    files = [path for pattern in patterns for path in ROOT.glob(pattern)]

    done = subprocess.run(command, env=machine, capture_output=True, text=True, check=False)
    later = {name.split(".")[0] for file in files for _, name in imports(file.read_text(encoding="utf-8"))}

    assert done.returncode == 0, done.stderr
    assert {"cupy", "torch", "transformers"} <= later
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
    num_tasks = sum(len(part.tasks) for part in parts(False, kernels_only=True))
    assert f"FAILED {num_tasks - 1} tasks did not begin" in done.stdout


WORKER = """
import json, os, sys, time
print("a library greets", flush=True)
for name in sys.argv[1:]:
    print(json.dumps({"begin": name}), flush=True)
    if name == "dies":
        os._exit(9)
    if name == "hangs":
        time.sleep(60)
    if name == "is slow":
        time.sleep(2)
    if name == "crashes at exit" and len(sys.argv) > 2:
        print(json.dumps({"end": name, "took": 0.0, "error": "wrong"}), flush=True)
        os._exit(139)
    result = {"error": "wrong"} if name == "fails" else {"result": {"pid": os.getpid()}}
    print(json.dumps({"end": name, "took": 0.0, **result}), flush=True)
    if name == "fails":
        sys.exit(3)
    if name == "never ends":
        os.close(1)
        time.sleep(60)
"""


def run_tasks(
    *names: str, task_seconds: float = 30.0, total_seconds: float = 60.0, first_decides: bool = True
) -> dict[str, Any]:
    return supervise(
        [sys.executable, "-c", WORKER],
        names,
        total_seconds=total_seconds,
        first_decides=first_decides,
        limit=lambda _: task_seconds,
    )


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


def test_first_task_of_a_process_has_time_to_import() -> None:
    first = run_tasks("is slow", "b", task_seconds=1.0)
    later = run_tasks("a", "is slow", "b", task_seconds=1.0)

    assert all("result" in row for row in first.values())
    assert later["is slow"]["error"] == "it took over 1 s"
    assert "result" in later["b"]


def test_process_that_prints_no_more_and_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.gpu_check.END_SECONDS", 0.5)
    start = time.monotonic()

    results = run_tasks("a", "never ends")

    assert time.monotonic() - start < 10
    assert all("result" in row for row in results.values())


def test_nothing_runs_behind_a_process_that_cannot_be_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = Lines.end
    monkeypatch.setattr(Lines, "end", lambda lines: ended(lines) and False)

    with pytest.raises(StuckError, match="cannot be killed") as raised:
        run_tasks("a", "dies", "b")

    assert "result" in raised.value.results["a"]
    assert raised.value.results.keys() == {"a", "dies"}


def test_all_ends_when_the_time_is_over() -> None:
    start = time.monotonic()
    results = run_tasks("a", "hangs", "b", total_seconds=2.0)

    assert time.monotonic() - start < 10
    assert results.keys() == {"a", "hangs"}
    assert results["hangs"]["error"] == "the time of its part was over"


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


def test_nothing_begins_after_a_first_task_that_fails_or_when_the_time_is_over() -> None:
    assert run_tasks("fails", "b").keys() == {"fails"}
    assert run_tasks("a", "b", total_seconds=0.0) == {}


def test_all_begin_after_a_first_task_that_decides_nothing() -> None:
    results = run_tasks("fails", "b", first_decides=False)

    assert results.keys() == {"fails", "b"}


@pytest.mark.parametrize("uses_numba", [True, False])
def test_numba_compiles_where_it_is_needed(monkeypatch: pytest.MonkeyPatch, uses_numba: bool) -> None:
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")  # as tools/gpu_check sets it

    env = environment(Part(["a"], most_seconds=1.0, uses_numba=uses_numba))

    assert env.get("NUMBA_DISABLE_JIT") == (None if uses_numba else "1")
    assert env["PATH"] == os.environ["PATH"]


def test_commit_is_what_git_says_or_unknown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert len(commit()) >= 40 or commit() == "unknown"

    monkeypatch.setattr("tools.gpu_check.ROOT", tmp_path)

    assert commit() == "unknown"
