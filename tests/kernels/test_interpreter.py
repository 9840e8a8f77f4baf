"""The twins without the compiler: plain Python that a debugger can step through."""

import os
import subprocess
import sys

FILES = "bits linear logprobs paged_attention philox rms_norm rope_kv_write rows sample".split()
TOO_MUCH = (
    "equals_dense or same_bits or same_token or dense_attention or units or bfloat16 or uniform_numbers or 49152 "
    "or 1000 or 576 or drawn or prefix or kept or keeps or counts or filters or tiny or change or shape or min_p"
)


def test_twins_work_without_the_compiler() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", f"not ({TOO_MUCH})"]
    command += [f"tests/kernels/test_{name}.py" for name in FILES]

    result = subprocess.run(
        command, env=os.environ | {"NUMBA_DISABLE_JIT": "1"}, capture_output=True, text=True, check=False
    )

    assert result.returncode == 0, result.stdout + result.stderr
