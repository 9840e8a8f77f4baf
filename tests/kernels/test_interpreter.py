"""The twins without the compiler: plain Python that a debugger can step through."""

import os
import subprocess
import sys

FILES = ["adjust_logits", "bits", "exact", "linear", "logprobs", "paged_attention", "philox", "rms_norm"]
FILES += ["rope_kv_write", "rows", "simd", "linear_int8", "quantize", "ranking", "gated_mul", "packed_row"]
TOO_MUCH = (
    "equals_dense or same_bits or dense_attention or units or bfloat16 or uniform or 1000 or 576 or shape or "
    "wide or finite or overflow or threads_change"
)


def test_twins_work_without_the_compiler() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", f"not ({TOO_MUCH})"]
    command += ["tests/kernels/test_sample.py::test_nan_and_infinite_logits_do_not_spread"]
    command += [f"tests/kernels/test_{name}.py" for name in FILES]

    result = subprocess.run(
        command, env=os.environ | {"NUMBA_DISABLE_JIT": "1"}, capture_output=True, text=True, check=False
    )

    assert result.returncode == 0, result.stdout + result.stderr
