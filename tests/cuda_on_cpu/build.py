"""Compile a kernel and the emulator's runtime to a library with g++, once: kept in the user's cache folder.

A library's name hashes the sources, the flags and what g++ says of itself and of the CPU. Processes that
build the same at once do not disturb each other: each builds in a folder of its own, and moves what is ready
into place.
"""

import contextlib
import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from cupaged.kernels.launch import SOURCES, Constant
from cupaged.paths import user_cache_dir

HERE = Path(__file__).parent
UNUSED_DAYS = 30  # after which a library is removed

_ALL = [
    *("-std=c++17", "-march=native", "-fPIC", "-fvisibility=hidden"),
    "-fno-gnu-unique",  # a static of an inline function is of its library, not of the process
    "-fno-strict-aliasing",
    "-fno-math-errno",
    "-Wno-unknown-pragmas",  # unroll
]
_RUNTIME = ["-O3"]
_KERNEL = [
    *("-gdwarf-4", "-g1"),  # lines; in version 5, addr2line takes one file for another now and then
    "-ffp-contract=fast",  # as nvcc
    "-fno-optimize-sibling-calls",  # a call's return address is its line
    *("-fmax-errors=5", "-Werror=return-type", "-Werror=uninitialized"),
    "-Werror=frame-larger-than=49152",  # bytes: a thread has a stack of 64 KiB
]
_WATCHED = [
    "-O1",
    "-fno-tree-loop-distribute-patterns",  # which makes loops calls of memset, and those nobody sees
    *("-fsanitize=thread", "--param", "tsan-instrument-func-entry-exit=0"),
]
_UNDEFINED = [
    "-fsanitize=bounds,shift,integer-divide-by-zero,signed-integer-overflow,float-cast-overflow",
    "-fno-sanitize-recover=all",
]
MODES = {  # the kernel's flags, the observer
    "fast": (["-O2"], "unobserved.cpp"),
    "check": ([*_WATCHED, *_UNDEFINED], "races.cpp"),
    "count": (_WATCHED, "count.cpp"),
}
_RUNTIME_SOURCES = ("fiber", "block", "warp", "matrix", "memory", "copies", "sanitizer", "launch")


class EmulatorError(RuntimeError):
    """A kernel, or its launch, is wrong."""


class NoCompilerError(EmulatorError):
    """Nothing can be compiled here."""


@functools.cache
def compiler() -> str:
    """Return the path of g++."""
    path = shutil.which("g++")
    if path is None:
        raise NoCompilerError("kernels run on the CPU need g++; install it (Debian: apt-get install g++)")
    return path


@functools.cache
def _compiler_key() -> bytes:
    command = [compiler(), "-march=native", "-E", "-v", "-x", "c++", os.devnull]
    return subprocess.run(command, capture_output=True, check=True).stderr


def _run(*command: str | Path) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise EmulatorError(f"{' '.join(map(str, command))}\n{result.stderr}")


def _key(files: Iterable[Path], *flags: object) -> str:
    digest = hashlib.sha256(_compiler_key() + repr(flags).encode())
    for file in sorted([*files, Path(__file__)]):
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def _remove_unused(cache: Path) -> None:
    for path in cache.iterdir():
        with contextlib.suppress(OSError):
            if path.is_file() and time.time() - path.stat().st_mtime > UNUSED_DAYS * 86400:
                path.unlink()


def _included(*sources: Path) -> set[Path]:
    """Return `sources` and all that they include by name, at any depth."""
    found: set[Path] = set()
    pending = [*sources]
    while pending:
        path = pending.pop()
        if path in found:
            continue
        found.add(path)
        for name in re.findall(r'^#include "(.*)"', path.read_text(encoding="utf-8"), re.MULTILINE):
            places = (folder / name for folder in (path.parent, SOURCES, HERE))
            pending += [next(place for place in places if place.exists())]
    return found


@functools.cache
def _runtime(cache: Path, mode: str) -> Path:
    """Return the object file of all that is the same for every kernel of a mode."""
    sources = [HERE / f"{name}.cpp" for name in _RUNTIME_SOURCES] + [HERE / MODES[mode][1]]
    flags = [*_ALL, *_RUNTIME]
    target = cache / f"runtime-{mode}-{_key(_included(*sources), flags)}.o"
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            _run(compiler(), *flags, "-r", "-o", Path(folder, "runtime.o"), *sources)
            os.replace(Path(folder, "runtime.o"), target)
        _remove_unused(cache)
    return target


def _exports(source: Path) -> str:
    text = source.read_text(encoding="utf-8")
    kernels = re.findall(r"^KERNEL\(([^,)]+)[^)]*\)\s*(\w+)", text, re.MULTILINE)
    return "".join(f"EXPORT_KERNEL({name}, {threads})\n" for threads, name in kernels)


def build(source: Path, mode: str, constants: Mapping[str, Constant]) -> Path:
    """Return the library of all kernels in `source` with -D constants; EmulatorError if it has errors."""
    cache = user_cache_dir() / "cuda_on_cpu"
    cache.mkdir(parents=True, exist_ok=True)
    runtime = _runtime(cache, mode)
    defines = [f"-D{name}={value}" for name, value in sorted(constants.items())]
    flags = [*_ALL, *_KERNEL, *MODES[mode][0], *defines]
    key = _key(_included(source, HERE / "cuda.h"), flags, source.parent, runtime.name)
    target = cache / f"{source.stem}-{mode}-{key}.so"
    if target.exists():
        os.utime(target)
        return target
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        unit, compiled, library = (Path(folder, f"kernel.{suffix}") for suffix in ("cpp", "o", "so"))
        unit.write_text(f'#include "{source}"\n{_exports(source)}', encoding="utf-8")
        includes = ["-include", str(HERE / "cuda.h"), "-I", str(SOURCES), "-I", str(HERE)]
        _run(compiler(), *flags, *includes, "-c", "-o", compiled, unit)
        _run(compiler(), "-shared", "-o", library, compiled, runtime)  # without flags: no sanitizer's library
        os.replace(library, target)
    return target


def build_library(source: Path) -> Path:
    """Return the library of a source that needs no runtime; EmulatorError if it has errors."""
    cache = user_cache_dir() / "cuda_on_cpu"
    cache.mkdir(parents=True, exist_ok=True)
    flags = [*_ALL, *_RUNTIME, "-Wall", "-Werror", "-ffp-contract=off", "-shared"]
    target = cache / f"{source.stem}-{_key(_included(source), flags)}.so"
    if target.exists():
        os.utime(target)
        return target
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        library = Path(folder, "library.so")
        _run(compiler(), *flags, "-o", library, source)
        os.replace(library, target)
    return target
