import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEST = """
import pytest
from tests.cuda_on_cpu import cublaslt
from tests.cuda_on_cpu.device import EmulatedDevice
@pytest.fixture
def library(): return cublaslt.load()
def test_it(): EmulatedDevice().kernel("rms_norm", "rms_norm")
def test_its_fixture(library): pass
"""


def test_without_a_compiler_tests_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TEST, encoding="utf-8")

    result = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-ra",
            "-p",
            "no:cacheprovider",
            "-p",
            "tests.cuda_on_cpu.skips",
            ".",
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )

    assert result.returncode == 0, result.stdout
    assert "2 skipped" in result.stdout
    assert "need g++; install it" in result.stdout
