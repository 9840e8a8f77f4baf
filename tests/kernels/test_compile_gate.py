"""The compile gate: every instance compiles for each architecture, without a warning, within its data sheet.

The instances are those that the cases launch. Cubins are kept in the user's cache; a second run only looks.
"""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cupaged.kernels.compile import Compiled, compile_kernels
from cupaged.kernels.launch import SOURCES, parameters
from cupaged.kernels.nvrtc import CudaUnavailable, nvrtc
from tools.data_sheet import read
from tools.gpu_specs import ARCHITECTURES, RESERVED_SHARED
from tools.kernel_cases import GOLDENS, INSTANCES, PROBES, TIMED, TRAFFIC
from tools.kernel_cases.case import Case
from tools.kernel_cases.launches import Instance, Launch, instances, sheet_value

MAX_INSTANCES = 60  # of an architecture
NUM_THREADS = 2
HEAD_DIMS = {64, 80, 96, 128, 192, 256}


ALL = instances([*PROBES, *GOLDENS, *TRAFFIC, *TIMED, *INSTANCES])


def complaints(compiled: Compiled, case: Case, launch: Launch, arch: str) -> list[str]:
    """Return what is wrong with a kernel, as compiled and as launched."""
    kernel = compiled.resources[launch.kernel]
    found = [compiled.warnings] if compiled.warnings else []
    if kernel.spill_bytes or kernel.stack_bytes:
        found.append(f"spills {kernel.spill_bytes} bytes, has {kernel.stack_bytes} on the stack")
    shared_bytes = kernel.shared_bytes + launch.shared_bytes
    limit = ARCHITECTURES[arch].shared_bytes - RESERVED_SHARED
    if shared_bytes > limit:
        found.append(f"a block has {shared_bytes} bytes of shared memory, {arch} gives {limit}")
    if launch.kernel in read(launch.file, case.sources):  # all but the probes have a data sheet
        registers, shared = (sheet_value(case, launch, name) for name in ("registers", "shared"))
        if kernel.registers > registers:
            found.append(f"{kernel.registers} registers, its data sheet allows {registers}")
        if shared_bytes != shared:
            found.append(f"a block has {shared_bytes} bytes of shared memory, its data sheet says {shared}")
    return [f"{launch.kernel} of {case.name} for {arch}: {text}" for text in found]


@pytest.fixture(scope="module")
def compiler() -> None:
    """Skip where there is no compiler, or one that is too old."""
    try:
        missing = ARCHITECTURES.keys() - set(nvrtc().archs)
    except CudaUnavailable as error:
        pytest.skip(str(error))
    if missing:
        pytest.skip(f"NVRTC {nvrtc().version} does not know {sorted(missing)}")


@pytest.fixture(scope="module")
def cubins(compiler: None) -> None:  # noqa: ARG001
    """Compile everything in a few threads; the tests then find cubins in the cache, or the error again."""
    with ThreadPoolExecutor(NUM_THREADS) as threads:
        for instance in ALL:
            for arch in ARCHITECTURES:
                threads.submit(compile_kernels, instance.path, arch, dict(instance.constants))


@pytest.mark.usefixtures("cubins")
@pytest.mark.parametrize("instance", ALL, ids=str)
def test_instance_compiles_within_its_data_sheet(instance: Instance) -> None:
    found = [
        complaint
        for arch in ARCHITECTURES
        for compiled in [compile_kernels(instance.path, arch, dict(instance.constants))]
        for case, launch in instance.launches
        for complaint in complaints(compiled, case, launch, arch)
    ]

    assert found == []


def test_instances_are_few() -> None:
    assert len(ALL) <= MAX_INSTANCES


@pytest.mark.parametrize("file", ["paged_decode", "paged_prefill"])
@pytest.mark.parametrize("element", ["bf16", "f16"])
def test_attention_is_compiled_for_every_head_dim(file: str, element: str) -> None:
    found = {
        dict(instance.constants).get("HEAD_DIM")
        for instance in ALL
        if instance.path.stem == file and dict(instance.constants)["ELEMENT"] == element
    }

    assert found == HEAD_DIMS


def test_every_kernel_is_compiled_and_launched() -> None:
    launched = {(instance.path.stem, launch.kernel) for instance in ALL for _, launch in instance.launches}
    kernels = {path.stem: parameters(path.read_text(encoding="utf-8")) for path in SOURCES.glob("*.cu")}

    assert {(file, kernel) for file in kernels for kernel in kernels[file]} - launched == set()
    assert {file: read(file).keys() for file in kernels} == {file: kernels[file].keys() for file in kernels}


PLANTED = """// planted.cu
// kernel planted
//   bytes      0
//   flops      0
//   registers  16
//   shared     0
#include "gpu.cuh"
KERNEL(BLOCK) planted(float* out, int n) {
  BODY
}
"""
SPILLS = """
  float a[96];
  for (int i = 0; i < 96; i++) a[i] = out[i * n + threadIdx.x];
  for (int j = 0; j < n; j++)
    for (int i = 0; i < 96; i++) a[i] = a[i] * a[(i + 7) % 96] + n;
  for (int i = 0; i < 96; i++) out[i + threadIdx.x] = a[i];
"""
STACK = """
  float a[64];
  for (int i = 0; i < 64; i++) a[i] = out[i * n];
  for (int j = 0; j < n; j++) a[j % 64] += a[j * 7 % 64];
  for (int i = 0; i < 64; i++) out[i] = a[i];
"""
WARNS = "int unused; out[0] = n;"
PLAIN = "out[threadIdx.x] = n;"


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(
    ("body", "block", "shared_bytes", "message"),
    [
        (PLAIN, 128, 0, ""),
        (SPILLS, 1024, 0, "spills 1"),
        (STACK, 128, 0, "has 256 on the stack"),
        (SPILLS, 128, 0, "registers, its data sheet allows 16"),
        (WARNS, 128, 0, 'variable "unused" was declared but never referenced'),
        (PLAIN, 128, 256, "a block has 256 bytes of shared memory, its data sheet says 0"),
        (PLAIN, 128, 228 << 10, "sm_90 gives 232448"),
    ],
)
def test_gate_finds_what_is_planted(
    tmp_path: Path,
    body: str,
    block: int,
    shared_bytes: int,
    message: str,
) -> None:
    (tmp_path / "planted.cu").write_text(PLANTED.replace("BODY", body))
    launch = Launch("planted", "planted", {"BLOCK": block}, (1, 1, 1), block, (), shared_bytes)
    case = Case(
        name="planted", make=lambda _: {}, launch=lambda *_: None, outputs=(), variables={}, sources=tmp_path
    )

    compiled = compile_kernels(tmp_path / "planted.cu", "sm_90", launch.constants)
    found = complaints(compiled, case, launch, "sm_90")

    assert bool(found) == bool(message)
    assert message in "\n".join(found)
