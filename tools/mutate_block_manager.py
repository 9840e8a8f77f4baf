"""Do the scheduler's tests notice when the memory system is wrong? Plant one fault after the other and see.

    python -m tools.mutate_block_manager [--only TEXT]

Each fault (tools/scheduler_faults.py) changes a line or a few of cupaged/scheduler, in a copy of
the repository; the tests run there without the compiler, until the first of them fails. A table says which
did; the exit status is 1 if a fault went unnoticed. Takes about 3 minutes on one core.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tools.scheduler_faults import FAULTS, Fault

ROOT = Path(__file__).parents[1]
COPIED = ("cupaged", "models", "kernels", "tests", "tools", "pyproject.toml")
# The quick ones first.
TESTS = (
    "allocator",
    "block_manager",
    "plan",
    "group_queue",
    "scheduler",
    "in_flight",
    "prefix_cache",
    "forks",
    "swap",
    "sliding_window",
    "beams",
    "policies",
    "allocator_properties",
    "scheduler_properties",
    "liveness",
)
# An example that fails need not be made small.
CONFTEST = """
import hypothesis

once = [hypothesis.Phase.generate]
hypothesis.settings.register_profile("once", derandomize=True, deadline=None, database=None, phases=once)
hypothesis.settings.load_profile("once")
"""
TIME_LIMIT = 600  # seconds, for all tests; a fault that makes a test run for ever is noticed


def copy_repository(target: Path) -> None:
    """Copy what the tests need."""
    for name in COPIED:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, target / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy2(ROOT / name, target / name)
    (target / "tests" / "scheduler" / "conftest.py").write_text(CONFTEST, encoding="utf-8")


def first_failure(directory: Path) -> str:
    """Run the tests in a copy; return the name of the first that fails, or nothing."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--no-header"]
    # Hashes wrap, of which only the interpreter warns.
    command += ["-W", "ignore:overflow encountered:RuntimeWarning"]
    command += [f"tests/scheduler/test_{name}.py" for name in TESTS]
    try:
        result = subprocess.run(
            command,
            cwd=directory,
            env=os.environ | {"NUMBA_DISABLE_JIT": "1", "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            check=False,
            timeout=TIME_LIMIT,
        )
    except subprocess.TimeoutExpired:
        return f"(none has ended within {TIME_LIMIT} s)"
    if result.returncode == 0:
        return ""
    failed = re.search(r"^(?:FAILED|ERROR) (?:tests/scheduler/)?(\S+)", result.stdout, re.MULTILINE)
    return failed[1] if failed else result.stdout[-500:] + result.stderr[-500:]


def plant(fault: Fault, directory: Path) -> str:
    """Write the fault into the copy; return the text as it was."""
    path = directory / "cupaged" / "scheduler" / fault.file
    text = path.read_text(encoding="utf-8")
    found = text.count(fault.before)
    if found != 1:
        raise ValueError(
            f"{fault.file} has {fault.before!r} {found} times, not once; update tools/scheduler_faults.py"
        )
    path.write_text(text.replace(fault.before, fault.after), encoding="utf-8")
    return text


def main() -> int:
    """Plant all faults; return 1 if one went unnoticed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="faults with this in file or description")
    only = parser.parse_args().only
    faults = [fault for fault in FAULTS if only in f"{fault.file} {fault.what}"]
    if not faults:
        parser.error(f"no fault has {only!r} in its file or description; --only '' takes all {len(FAULTS)}")
    unnoticed = 0
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        copy_repository(directory)
        failure = first_failure(directory)
        if failure:
            print(f"without any fault {failure} fails already")
            return 1
        for fault in faults:
            begin = time.perf_counter()
            original = plant(fault, directory)
            failure = first_failure(directory)
            (directory / "cupaged" / "scheduler" / fault.file).write_text(original, encoding="utf-8")
            unnoticed += not failure
            seconds = time.perf_counter() - begin
            print(f"{failure or 'UNNOTICED':70} {seconds:4.0f} s  {fault.file}: {fault.what}", flush=True)
    print(f"{len(faults) - unnoticed} of {len(faults)} faults noticed")
    return 1 if unnoticed else 0


if __name__ == "__main__":
    sys.exit(main())
