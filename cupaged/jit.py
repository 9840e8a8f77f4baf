"""Numba as the whole project uses it: `njit`, cached in a folder of our own.

The on-disk cache does not notice an edit in a function that was imported from another file, so a
module's cache folder is named by a hash over its own source, that of all our modules that it imports, at
any depth, Python's, Numba's and LLVM's version and the CPU.
"""

import contextlib
import functools
import hashlib
import inspect
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, overload

import llvmlite.binding
import numba
from llvmlite import __version__ as llvmlite_version
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler
from numba.core.dispatcher import Dispatcher
from numba.core.sigutils import normalize_signature as _normalize_signature

from cupaged.paths import user_cache_dir

normalize_signature: Any = _normalize_signature  # untyped
F = TypeVar("F", bound=Callable[..., Any])

# Two engines may start at once, and both change what the process has once: Numba's settings, a dispatcher's.
_lock = threading.RLock()
UNUSED_DAYS = 30  # after which a cache folder is removed
ROOT = Path(__file__).parent  # of the package; models and kernels are links in it
_IMPORT = re.compile(
    r"^[ \t]*(?:from[ \t]+(\S+)[ \t]+import[ \t]+(\([^)]*\)|.*)|import[ \t]+(.*))$", re.MULTILINE
)


@functools.cache
def _imported_names(path: Path) -> list[str]:
    """Return what the source at `path` imports, and from where; parsing it would take a start 0.1 s more."""
    names: list[str] = []
    for module, imported, modules in _IMPORT.findall(path.read_text(encoding="utf-8")):
        names += [module, *(f"{module}.{name}" for name in re.findall(r"\w+", imported))]
        names += re.findall(r"[\w.]+", modules)
    return names


def source_files(path: Path, root: Path) -> list[Path]:
    """Return `path` and all modules of the package at `root` that it imports, at any depth, sorted."""
    found: set[Path] = set()
    pending = [path]
    while pending:
        path = pending.pop()
        if path in found or not path.is_file():
            continue
        found.add(path)
        for name in _imported_names(path):
            package, *parts = name.split(".")
            if package == root.name:
                place = root.joinpath(*parts)
                pending += [place.with_suffix(".py"), place / "__init__.py"]
    return sorted(found)


@functools.cache
def source_key(path: Path, root: Path = ROOT) -> str:
    """Return a hash over all that decides what the njit functions of the module at `path` compile to."""
    digest = hashlib.sha256()
    for name in (numba.__version__, llvmlite_version, sys.version, llvmlite.binding.get_host_cpu_name()):
        digest.update(name.encode())
    digest.update(llvmlite.binding.get_host_cpu_features().flatten().encode())
    for file in source_files(path, root):
        digest.update(file.relative_to(root).as_posix().encode() if root in file.parents else b"")
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


@functools.cache
def cache_dir(module: str) -> str:
    """Return the cache folder of the module at the path `module`; remove those long unused."""
    folder = user_cache_dir() / "numba" / source_key(Path(module))
    new = not folder.exists()
    with contextlib.suppress(OSError):  # where it cannot be written, all is compiled in memory
        folder.mkdir(parents=True, exist_ok=True)
        os.utime(folder)
        for other in folder.parent.iterdir() if new else ():
            if time.time() - other.stat().st_mtime > UNUSED_DAYS * 86400:
                shutil.rmtree(other, ignore_errors=True)
    return str(folder)


class _InnerLibrary(JITCodeLibrary):
    """A function that only functions call: optimised, and made machine code, as a part of theirs."""

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:  # noqa: ARG002
        return 0

    @property
    def codegen(self) -> Any:
        """Return what Numba gives an environment to, which nothing without a wrapper needs."""
        return SimpleNamespace(set_env=lambda *_: None)


class _InnerCompiler(Compiler):
    def define_pipelines(self) -> Any:
        state: Any = self.state
        library: Any = _InnerLibrary
        state.library = library(state.targetctx.codegen(), state.func_id.func_qualname)
        return super().define_pipelines()  # type: ignore[no-untyped-call]


@overload
def njit(function: F) -> F: ...
@overload
def njit(function: None = None, **options: Any) -> Callable[[F], F]: ...
def njit(function: Any = None, **options: Any) -> Any:
    """Compile `function` when it is called, without the GIL, cached in our folder.

    What njit functions call of it is a twin, or LLVM would go through a function once more for each one on
    the way up to Python. The host program's setting of the cache is kept.
    """
    if function is None:
        return functools.partial(njit, **options)
    config: Any = numba.config
    folder = cache_dir(function.__code__.co_filename)
    with _lock:
        before, config.CACHE_DIR = config.CACHE_DIR, folder
        try:
            # Elsewhere, beside the source, Numba's cache would not notice edits.
            ours: Any = {"cache": os.access(folder, os.W_OK), "nogil": True, "no_cfunc_wrapper": True}
            dispatcher: Any = numba.njit(**options | ours)(function)
        finally:
            config.CACHE_DIR = before
    if not config.DISABLE_JIT:
        twin = dispatcher.inner = _inner(function, options)
        dispatcher.get_call_template, dispatcher.get_overload = twin.get_call_template, twin.get_overload
    return dispatcher


def njit_inner(function: F) -> F:
    """Compile what only njit functions call and what makes no array: no wrappers, no reference counts.

    A call with a NamedTuple of many arrays, whose counts would all go up and down, saves a microsecond: the
    caller holds the arrays. What makes an array after all does not compile ("NRT required").
    """
    return _inner(function, {"_nrt": False})  # type: ignore[no-any-return]


def _inner(function: Any, options: dict[str, Any]) -> Any:
    no_wrappers: Any = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    return numba.njit(**options | no_wrappers, nogil=True, pipeline_class=_InnerCompiler)(function)


def specialize(function: Callable[..., Any], signature: str) -> None:
    """Compile `function` for `signature`, and let it be called only for such.

    A C-contiguous array then also serves where a strided one is declared (an array of one row always
    is contiguous), and nothing is compiled while requests are served.
    """
    if isinstance(function, Dispatcher):  # else the compiler is off
        dispatcher: Any = function
        kinds, _ = normalize_signature(signature)
        with _lock:
            if tuple(kinds) not in dispatcher.overloads:  # else another engine may be calling it just now
                dispatcher.disable_compile(False)
                dispatcher.compile(signature)
            if tuple(kinds) not in dispatcher.overloads:
                # Two processes gave one name to what they compiled for two signatures, and it was loaded.
                dispatcher._cache.flush()
                dispatcher.compile(signature)
            dispatcher.disable_compile()
        set_compiled(function, signature)


def is_compiled(function: Callable[..., Any], signature: str = "") -> bool:
    """Return whether the on-disk cache has `function`; without a signature, all that it calls."""
    return _mark(function, signature).exists()


def set_compiled(function: Callable[..., Any], signature: str = "") -> None:
    """Note that the on-disk cache now has it."""
    with contextlib.suppress(OSError):  # where nothing can be written, nothing is there next time
        _mark(function, signature).touch()


def _mark(function: Callable[..., Any], signature: str) -> Path:
    source: Any = inspect.unwrap(function)
    module = source.__code__.co_filename
    text = f"{source.__qualname__} {signature} {_times(module)}"
    return Path(cache_dir(module)) / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.compiled"


@functools.cache
def _times(module: str) -> list[int]:
    """Return when the sources of a module were changed: by those Numba's cache goes, too."""
    return [file.stat().st_mtime_ns for file in source_files(Path(module), ROOT)]
