"""Numba as the whole project uses it: `njit`, cached in a folder of our own.

The on-disk cache does not notice an edit in a function that was imported from another file, so the
cache folder is named by a hash over all our sources, Numba's and LLVM's version and the CPU.
"""

import hashlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, overload

import llvmlite.binding
import numba
from llvmlite import __version__ as llvmlite_version

from cupaged.paths import user_cache_dir
from cupaged.threads import launch_threads

F = TypeVar("F", bound=Callable[..., Any])
prange = numba.prange


def source_key(root: Path) -> str:
    """Return a hash over every .py file of the package at `root`, Numba, llvmlite and the CPU."""
    digest = hashlib.sha256()
    for name in (numba.__version__, llvmlite_version, sys.version, llvmlite.binding.get_host_cpu_name()):
        digest.update(name.encode())
    digest.update(llvmlite.binding.get_host_cpu_features().flatten().encode())
    for folder in (root, root / "models", root / "kernels"):  # rglob does not follow the two links
        for path in sorted(folder.rglob("*.py")):
            digest.update(path.relative_to(root).as_posix().encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


CACHE_DIR = str(user_cache_dir() / "numba" / source_key(Path(__file__).parent))


@overload
def njit(function: F) -> F: ...
@overload
def njit(*, signatures: Sequence[str] | None = None, **options: Any) -> Callable[[F], F]: ...
def njit(function: F | None = None, *, signatures: Sequence[str] | None = None, **options: Any) -> Any:
    """Compile `function` without the GIL, cached in our folder; the host program's setting is kept.

    With `signatures` it is compiled at once, for those alone: a C-contiguous array then also serves
    where a strided one is declared, and nothing is compiled while requests are served.
    """
    if function is None:
        return lambda f: njit(f, signatures=signatures, **options)
    if options.get("parallel"):
        launch_threads()
    config: Any = numba.config
    before, config.CACHE_DIR = config.CACHE_DIR, CACHE_DIR
    try:
        return numba.njit(signatures, cache=True, nogil=True, **options)(function)
    finally:
        config.CACHE_DIR = before
