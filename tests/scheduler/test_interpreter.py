import os
import subprocess
import sys


def test_scheduler_works_without_the_compiler() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += [f"tests/scheduler/test_{name}.py" for name in ("scheduler", "plan", "in_flight", "pack")]

    result = subprocess.run(
        command, env=os.environ | {"NUMBA_DISABLE_JIT": "1"}, capture_output=True, text=True, check=False
    )

    assert result.returncode == 0, result.stdout + result.stderr
