"""Libraries are built once, again when what they are made of changes, and safely by several at once."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cuda_on_cpu.build import EmulatorError, build

ROOT = Path(__file__).parents[2]
SOURCE = """#include "gpu.cuh"
#include "other.cuh"
KERNEL(64) k(int* out) { out[threadIdx.x] = VALUE + OTHER; }
"""


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Give these tests a cache of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Return a kernel of the test's own."""
    (tmp_path / "other.cuh").write_text("#define OTHER 1\n", encoding="utf-8")
    (tmp_path / "k.cu").write_text(SOURCE, encoding="utf-8")
    return tmp_path / "k.cu"


def test_processes_may_build_the_same_at_once(source: Path) -> None:
    program = (
        "from pathlib import Path; from tests.cuda_on_cpu.build import build\n"
        f"print(build(Path({str(source)!r}), 'fast', {{'VALUE': 3}}))"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]

    built = {process.communicate()[0].strip() for process in processes}

    assert [process.returncode for process in processes] == [0, 0]
    assert len(built) == 1
    assert Path(built.pop()).exists()


def test_library_is_built_once(source: Path) -> None:
    first = build(source, "fast", {"VALUE": 1})
    inode = first.stat().st_ino

    assert build(source, "fast", {"VALUE": 1}) == first
    assert first.stat().st_ino == inode


def test_library_is_another_for_other_constants_modes_and_headers(source: Path) -> None:
    libraries = {build(source, "fast", {"VALUE": 1}), build(source, "fast", {"VALUE": 2})}
    libraries.add(build(source, "check", {"VALUE": 1}))
    (source.parent / "other.cuh").write_text("#define OTHER 2\n", encoding="utf-8")
    libraries.add(build(source, "fast", {"VALUE": 1}))

    assert len(libraries) == 4
    assert all(library.exists() for library in libraries)


def test_errors_of_the_compiler_are_told(source: Path) -> None:
    with pytest.raises(EmulatorError, match=r"k.cu:3:.*error: .*VALUE"):
        build(source, "fast", {})


def test_plain_shared_memory_is_refused(source: Path) -> None:
    text = '#include "gpu.cuh"\nKERNEL(64) k(int* x) { __shared__ int s[4]; }\n'
    source.write_text(text, encoding="utf-8")

    with pytest.raises(EmulatorError, match="declare shared memory by SHARED_ARRAY or DYNAMIC_SHARED"):
        build(source, "fast", {})


def test_kernel_that_needs_too_much_stack_is_refused(source: Path) -> None:
    text = '#include "gpu.cuh"\nKERNEL(64) k(int* x) { int a[20000]; a[x[0]] = 1; x[1] = a[x[2]]; }\n'
    source.write_text(text, encoding="utf-8")

    with pytest.raises(EmulatorError, match="the frame size of 80"):
        build(source, "fast", {})
