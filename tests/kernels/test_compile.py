"""Cubins are compiled once, kept on disk by all that decides what they are, and reported on."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from cupaged.kernels.compile import Resources, compile_kernels, parse_log, read_program
from cupaged.kernels.launch import SOURCES
from cupaged.kernels.nvrtc import CudaUnavailable, Nvrtc, Program, nvrtc

LOG = """
foo.cu(3): warning #177-D: variable "unused" was declared but never referenced

ptxas info    : 8 bytes gmem, 32 bytes cmem[4]
ptxas info    : Compiling entry function 'first' for 'sm_90'
ptxas info    : Function properties for first
ptxas         .     256 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 256 bytes cumulative stack size, 1056 bytes smem, 8 bytes cmem[0]
ptxas info    : Compile time = 17.449 ms
ptxas info    : Compiling entry function 'second' for 'sm_90'
ptxas info    : Function properties for second
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 12 registers, used 0 barriers, 360 bytes cmem[0]
ptxas info    : Function properties for helper
    8 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads
"""  # noqa: E501


class CountingCompiler(Nvrtc):
    """Stands in for NVRTC: the cubin is the program's source, the log is LOG."""

    def __init__(self, version: tuple[int, int] = (12, 9)) -> None:
        self.version = version
        self.num_compiled = 0

    def compile(self, program: Program, arch: str, options: Sequence[str]) -> tuple[bytes, str]:  # noqa: ARG002
        self.num_compiled += 1
        return program.source.encode(), LOG


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder."""
    monkeypatch.setattr("cupaged.kernels.compile.user_cache_dir", lambda: tmp_path / "cache")
    return tmp_path / "cache" / "cubin"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A .cu file that includes one header that includes another."""
    (tmp_path / "outer.cuh").write_text('#pragma once\n#include "inner.cuh"\n')
    (tmp_path / "inner.cuh").write_text("#define ONE 1\n")
    path = tmp_path / "foo.cu"
    path.write_text('#include "gpu.cuh"\n#include "outer.cuh"\nKERNEL(32) foo(int* x) { *x = ONE; }\n')
    return path


def test_log_gives_the_resources_of_each_kernel_and_keeps_warnings() -> None:
    resources, warnings = parse_log(LOG)

    assert resources == {"first": Resources(40, 28, 256, 1056), "second": Resources(12, 8, 8, 0)}
    assert warnings == 'foo.cu(3): warning #177-D: variable "unused" was declared but never referenced'


def test_headers_come_from_beside_the_file_or_from_kernels(source: Path) -> None:
    program = read_program(source)

    assert program.name == "foo.cu"
    assert set(program.headers) == {"gpu.cuh", "outer.cuh", "inner.cuh"}
    assert program.headers["gpu.cuh"] == (SOURCES / "gpu.cuh").read_text(encoding="utf-8")


def test_compiled_once(source: Path) -> None:
    compiler = CountingCompiler()

    first, second = (compile_kernels(source, "sm_90", {"A": 1}, compiler) for _ in range(2))

    assert first == second
    assert first.path.read_text() == source.read_text()
    assert compiler.num_compiled == 1


def test_whatever_decides_the_cubin_makes_a_new_one(source: Path) -> None:
    compiler = CountingCompiler()
    paths = [
        compile_kernels(source, arch, constants, compiler).path
        for arch, constants in (("sm_90", {"A": 1}), ("sm_80", {"A": 1}), ("sm_90", {"A": 2}), ("sm_90", {}))
    ]
    paths.append(compile_kernels(source, "sm_90", {}, CountingCompiler((13, 0))).path)
    (source.parent / "inner.cuh").write_text("#define ONE 2\n")
    paths.append(compile_kernels(source, "sm_90", {}, compiler).path)
    source.write_text(source.read_text() + "\n")
    paths.append(compile_kernels(source, "sm_90", {}, compiler).path)

    assert len(set(paths)) == len(paths) == 7


@pytest.mark.parametrize("broken", ["cubin cut", "cubin gone", "log cut", "log gone", "log of another"])
def test_damaged_entry_is_compiled_again(source: Path, broken: str) -> None:
    compiler = CountingCompiler()
    cubin = compile_kernels(source, "sm_90", {}, compiler).path
    log = cubin.with_suffix(".json")
    damaged = cubin if broken.startswith("cubin") else log
    if broken.endswith("cut"):
        damaged.write_bytes(damaged.read_bytes()[:-1])
    elif broken.endswith("gone"):
        damaged.unlink()
    else:
        log.write_text(json.dumps({"sha256": "", "log": ""}))

    again = compile_kernels(source, "sm_90", {}, compiler)

    assert compiler.num_compiled == 2
    assert again.path.read_text() == source.read_text()


def test_folder_that_cannot_be_written_is_replaced_by_a_temporary_one(
    source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)  # root may write anywhere
    compiler = CountingCompiler()

    first, second = (compile_kernels(source, "sm_90", {}, compiler).path for _ in range(2))

    assert first == second
    assert cache not in first.parents
    assert compiler.num_compiled == 1


def test_kernels_compile_with_the_real_compiler(source: Path) -> None:
    try:
        compiler = nvrtc()
    except CudaUnavailable as error:
        pytest.skip(str(error))

    compiled = compile_kernels(source, "sm_90", {"ELEMENT": "bf16"}, compiler)

    assert compiled.path.read_bytes().startswith(b"\x7fELF")
    assert 0 < compiled.resources["foo"].registers < 32
    assert compiled.warnings == ""
