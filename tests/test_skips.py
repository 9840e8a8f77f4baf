import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(("ci", "exit_code"), [("true", 1), ("", 0)])
def test_skip_is_a_failure_in_ci_only(tmp_path: Path, ci: str, exit_code: int) -> None:
    (tmp_path / "test_it.py").write_text(
        "import pytest\ndef test_it(): pytest.skip('no g++')\n", encoding="utf-8"
    )

    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-ra", "-p", "no:cacheprovider", "-p", "tests.skips", "."],
        cwd=tmp_path,
        env={**os.environ, "CI": ci, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )

    assert (result.returncode, "no g++" in result.stdout) == (exit_code, True)
    assert ("which is a failure here" in result.stdout) == bool(exit_code)
