import os
import subprocess
import sys

# What takes long is left to the compiled run.
MODULES = (
    "allocator",
    "beams",
    "block_manager",
    "forks",
    "in_flight",
    "pack",
    "plan",
    "prefix_cache",
    "scheduler",
    "sliding_window",
    "swap",
)


def test_scheduler_works_without_the_compiler() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    # Hashes wrap, of which only the interpreter warns.
    command += ["-W", "ignore:overflow encountered:RuntimeWarning"]
    command += [f"tests/scheduler/test_{name}.py" for name in MODULES]

    result = subprocess.run(
        command, env=os.environ | {"NUMBA_DISABLE_JIT": "1"}, capture_output=True, text=True, check=False
    )

    assert result.returncode == 0, result.stdout + result.stderr
