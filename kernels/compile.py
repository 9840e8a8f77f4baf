"""Compile .cu files to cubins, once: kept in the user's cache folder, by all that decides what comes out.

Nothing here needs a GPU. What the compiler says of a kernel's registers and memory is kept beside the cubin.
"""

import contextlib
import functools
import hashlib
import json
import os
import re
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from cupaged.kernels.launch import SOURCES, Constant
from cupaged.kernels.nvrtc import Nvrtc, Program, nvrtc
from cupaged.paths import user_cache_dir

# All that may change results: IEEE division and square roots, subnormals kept, a * b + c rounded once.
OPTIONS = (
    "--std=c++17",
    "--ftz=false",
    "--prec-div=true",
    "--prec-sqrt=true",
    "--fmad=true",
    "--ptxas-options=-v",  # reports registers and spills
)
UNUSED_DAYS = 90  # after which a cubin is removed


class Resources(NamedTuple):
    """What one kernel takes, as the compiler reports it."""

    registers: int  # a thread
    spill_bytes: int  # stored and loaded, a thread
    stack_bytes: int  # a thread; an array that a variable indexes lies there
    shared_bytes: int  # a block, static


class Compiled(NamedTuple):
    """One .cu file, compiled."""

    path: Path  # of the cubin
    resources: Mapping[str, Resources]  # by kernel
    warnings: str  # of the compiler; "" = none


def compile_kernels(
    path: Path, arch: str, constants: Mapping[str, Constant], compiler: Nvrtc | None = None
) -> Compiled:
    """Return the cubin of the .cu file at `path` for `arch`, such as "sm_90"; it is compiled if it is new."""
    compiler = compiler or nvrtc()
    program = read_program(path)
    options = [*OPTIONS, *(f"--define-macro={name}={value}" for name, value in sorted(constants.items()))]
    key = hashlib.sha256(repr((program, arch, options, compiler.version)).encode()).hexdigest()[:32]
    cubin = _folder() / f"{path.stem}-{arch}-{key}.cubin"
    log = _load(cubin)
    if log is None:
        image, log = compiler.compile(program, arch, options)
        _store(cubin, image, log)
    return Compiled(cubin, *parse_log(log))


def read_program(path: Path) -> Program:
    """Read a .cu file and all .cuh files that it includes, at any depth, from beside it or from kernels/."""
    source = path.read_text(encoding="utf-8")
    headers: dict[str, str] = {}
    pending = [source]
    while pending:
        for name in re.findall(r'^#include "(\w+\.cuh)"', pending.pop(), re.MULTILINE):
            if name not in headers:
                beside = path.parent / name
                place = beside if beside.is_file() else SOURCES / name
                headers[name] = place.read_text(encoding="utf-8")
                pending.append(headers[name])
    return Program(path.name, source, headers)


_KERNEL = re.compile(r"Compiling entry function '(\w+)'")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers(?:.*?(\d+) bytes smem)?")
_INFO = re.compile(r"\s*(ptxas +(info +:|\.)|$|.*\(declared in|\d+ bytes stack frame)")


def parse_log(log: str) -> tuple[dict[str, Resources], str]:
    """Return the resources of each kernel in the compiler's log, and what else it says."""
    found: dict[str, Resources] = {}
    others = []
    kernel = ""
    for line in log.split("\n"):
        if match := _KERNEL.search(line):
            kernel = match[1]
            found[kernel] = Resources(0, 0, 0, 0)
        elif kernel and (match := _STACK.search(line)):  # also of functions that are not inlined
            stack, stores, loads = map(int, match.groups())
            so_far = found[kernel]
            found[kernel] = so_far._replace(
                spill_bytes=so_far.spill_bytes + stores + loads, stack_bytes=so_far.stack_bytes + stack
            )
        elif kernel and (match := _USED.search(line)):
            found[kernel] = found[kernel]._replace(registers=int(match[1]), shared_bytes=int(match[2] or 0))
        elif not _INFO.match(line):
            others.append(line)
    return found, "\n".join(others)


@functools.cache
def _temporary_folder() -> Any:
    return tempfile.TemporaryDirectory(prefix="cupaged-cubin-")


def _folder() -> Path:
    """Return the folder of the cubins; where the user's cannot be written, one that lives as long as we."""
    folder = user_cache_dir() / "cubin"
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    return folder if os.access(folder, os.W_OK) else Path(_temporary_folder().name)


def _load(cubin: Path) -> str | None:
    """Return the log that was kept with a cubin; None if there is no such cubin, whole and unchanged."""
    try:
        kept = json.loads(cubin.with_suffix(".json").read_text(encoding="utf-8"))
        if hashlib.sha256(cubin.read_bytes()).hexdigest() != kept["sha256"]:
            return None
        os.utime(cubin)  # used today
        return str(kept["log"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _store(cubin: Path, image: bytes, log: str) -> None:
    """Keep a cubin and its log, each in one step; remove those long unused."""
    kept = json.dumps({"sha256": hashlib.sha256(image).hexdigest(), "log": log})
    for path, content in ((cubin, image), (cubin.with_suffix(".json"), kept.encode())):
        with tempfile.NamedTemporaryFile(dir=cubin.parent, delete=False) as file:
            file.write(content)
        os.replace(file.name, path)
    for other in cubin.parent.glob("*.cubin"):
        with contextlib.suppress(OSError):  # another process removed it first
            if time.time() - other.stat().st_mtime > UNUSED_DAYS * 86400:
                other.unlink()
                other.with_suffix(".json").unlink()
