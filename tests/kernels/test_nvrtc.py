"""NVRTC: what it makes, and one clear error for each way in which it can be missing or not fit."""

from types import SimpleNamespace
from typing import Any

import pytest

from cupaged.kernels.nvrtc import CudaUnavailable, Nvrtc, Program, nvrtc, open_nvrtc

EXTRAS = r"install cupaged\[cuda13\] for a driver of CUDA 13, or cupaged\[cuda12\]"
HELLO = Program("hello.cu", '#include "one.cuh"\nextern "C" __global__ void f(int* x) { *x = ONE; }', {})


@pytest.fixture
def compiler() -> Nvrtc:
    """The machine's own."""
    try:
        return nvrtc()
    except CudaUnavailable as error:
        pytest.skip(str(error))


def library(version: tuple[int, int] = (12, 4), status: int = 0, **others: Any) -> SimpleNamespace:
    """Return a stand-in for NVRTC's library that knows sm_80 and sm_90; compiling ends with `status`."""

    def set_version(major: Any, minor: Any) -> int:
        major._obj.value, minor._obj.value = version
        return 0

    def set_count(count: Any) -> int:
        count._obj.value = 2
        return 0

    def set_archs(archs: Any) -> int:
        archs[:] = [80, 90]
        return 0

    def set_size(handle: Any, size: Any) -> int:  # noqa: ARG001
        size._obj.value = 7
        return 0

    def set_log(handle: Any, log: Any) -> int:  # noqa: ARG001
        log.raw = b"failed\0"
        return 0

    functions: dict[str, Any] = {
        "nvrtcVersion": set_version,
        "nvrtcGetNumSupportedArchs": set_count,
        "nvrtcGetSupportedArchs": set_archs,
        "nvrtcCreateProgram": lambda *_: 0,
        "nvrtcCompileProgram": lambda *_: status,
        "nvrtcDestroyProgram": lambda *_: 0,
        "nvrtcGetProgramLogSize": set_size,
        "nvrtcGetProgramLog": set_log,
        "nvrtcGetCUBINSize": lambda *_: 0,
        "nvrtcGetCUBIN": lambda *_: 0,
    }
    return SimpleNamespace(**(functions | others))


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90", "sm_100"])
def test_cubin_is_made_for_each_architecture(compiler: Nvrtc, arch: str) -> None:
    program = HELLO._replace(headers={"one.cuh": "#define ONE 1"})

    cubin, log = compiler.compile(program, arch, ["--ptxas-options=-v"])

    assert cubin.startswith(b"\x7fELF")
    assert f"Compiling entry function 'f' for '{arch}'" in log


def test_error_shows_file_line_and_options(compiler: Nvrtc) -> None:
    program = HELLO._replace(headers={"one.cuh": "#define ONE two"})

    with pytest.raises(
        ValueError, match=r"(?s)hello.cu does not compile.*sm_90.* --fmad=true.*cu\(2\): error.*two"
    ):
        compiler.compile(program, "sm_90", ["--fmad=true"])


def test_missing_package_names_the_extras() -> None:
    def find() -> Any:
        raise ModuleNotFoundError("No module named 'cuda'", name="cuda.pathfinder")

    with pytest.raises(CudaUnavailable, match=f"no NVRTC: cuda.pathfinder is not installed; {EXTRAS}"):
        open_nvrtc(find)


@pytest.mark.parametrize(
    "error", [RuntimeError('Failure finding "libnvrtc.so"\nand more'), OSError("bad ELF")]
)
def test_missing_library_names_the_extras(error: Exception) -> None:
    def find() -> Any:
        raise error

    with pytest.raises(CudaUnavailable, match=f'no NVRTC.*(libnvrtc.so"|bad ELF); {EXTRAS}'):
        open_nvrtc(find)


def test_library_without_a_function_is_too_old() -> None:
    old = library()
    del old.nvrtcGetCUBIN

    with pytest.raises(CudaUnavailable, match=f"too old, it has no nvrtcGetCUBIN; {EXTRAS}"):
        open_nvrtc(lambda: old)


def test_unknown_architecture_says_which_version_it_needs() -> None:
    old = open_nvrtc(library)

    with pytest.raises(CudaUnavailable, match=r"12.4 cannot compile for sm_100, only for sm_80, sm_90.*12.8"):
        old.compile(HELLO, "sm_100", [])


def test_libraries_of_two_versions_are_one_clear_error() -> None:
    mixed = open_nvrtc(lambda: library(status=7))

    with pytest.raises(CudaUnavailable, match=rf"two libraries do not fit \(failed\); {EXTRAS}"):
        mixed.compile(HELLO, "sm_90", [])


@pytest.mark.parametrize(("version", "num_options"), [((12, 8), 1), ((12, 9), 2), ((13, 0), 2)])
def test_the_drivers_cache_of_newer_versions_is_not_used(version: tuple[int, int], num_options: int) -> None:
    found: list[list[bytes]] = []

    def compile_program(_: Any, count: int, options: Any) -> int:
        found.append(options[:count])
        return 6

    with pytest.raises(ValueError, match="failed"):
        open_nvrtc(lambda: library(version, nvrtcCompileProgram=compile_program)).compile(HELLO, "sm_90", [])
    assert found == [[b"--gpu-architecture=sm_90", b"--no-cache"][:num_options]]


def test_success_without_a_cubin_is_an_error() -> None:
    empty = open_nvrtc(library)

    with pytest.raises(RuntimeError, match=r"compiled hello.cu for sm_90 but returned no cubin"):
        empty.compile(HELLO, "sm_90", [])


def test_failure_of_another_call_is_named() -> None:
    broken = open_nvrtc(lambda: library(nvrtcCreateProgram=lambda *_: 1))

    with pytest.raises(RuntimeError, match="nvrtcCreateProgram failed with status 1"):
        broken.compile(HELLO, "sm_90", [])
