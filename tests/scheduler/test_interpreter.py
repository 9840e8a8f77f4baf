import os
import subprocess
import sys


def test_scheduler_works_without_the_compiler() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["tests/scheduler/test_scheduler.py", "tests/scheduler/test_pack.py"]

    result = subprocess.run(
        command, env=os.environ | {"NUMBA_DISABLE_JIT": "1"}, capture_output=True, text=True, check=False
    )

    assert result.returncode == 0, result.stdout + result.stderr
