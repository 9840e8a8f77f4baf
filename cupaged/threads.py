"""Numba's threads: which layer carries them, and how many of them an engine uses.

TBB is preferred: with another busy process on the machine OpenMP's spinning threads slow down twenty
times, TBB's do not. Numba finds no TBB that pip installed, so it is loaded here first. A layer, number of
threads or priority that the host program has chosen is kept.
"""

import ctypes
import importlib.metadata
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Any

import numba

_TBB_NAMES = ("libtbb.so.12", "tbb12.dll", "libtbb.12.dylib")
_lock = threading.RLock()  # Numba's workqueue layer aborts the process when two threads enter it


def tbb_candidates() -> list[Path]:
    """Return where pip may have put TBB's library: beside the interpreter, or as its record says."""
    places = [Path(sys.prefix) / folder / name for folder in ("lib", "Library/bin") for name in _TBB_NAMES]
    try:
        files = importlib.metadata.files("tbb") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    recorded = [Path(str(file.locate())).resolve() for file in files if file.name in _TBB_NAMES]
    return [path for path in (*recorded, *places) if path.is_file()]


def _load_tbb() -> bool:
    for path in tbb_candidates():
        try:
            ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        except OSError:
            continue
        return True
    return False


def launch_threads() -> str:
    """Start Numba's threads once a process, on TBB if there is one; return the layer's name."""
    config: Any = numba.config
    with _lock:
        before = config.THREADING_LAYER
        if before == "default":
            _load_tbb()
            # OpenMP is left out: where TBB is missing, workqueue under our lock is the steadier one.
            config.THREADING_LAYER_PRIORITY, priority = (
                ["tbb", "workqueue", "omp"],
                config.THREADING_LAYER_PRIORITY,
            )
            try:
                numba.get_num_threads()
            finally:
                config.THREADING_LAYER_PRIORITY = priority
        else:
            numba.get_num_threads()
    return str(numba.threading_layer())


class ParallelRegion:
    """`with region:` runs parallel kernels alone in the process, on `num_threads` threads."""

    def __init__(self, num_threads: int | None = None) -> None:
        launch_threads()
        limit = int(numba.config.NUMBA_NUM_THREADS)  # type: ignore[attr-defined]
        self.num_threads = limit if num_threads is None else min(num_threads, limit)
        self._before: list[int] = []

    def __enter__(self) -> None:
        _lock.acquire()
        self._before.append(numba.get_num_threads())
        numba.set_num_threads(self.num_threads)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        numba.set_num_threads(self._before.pop())
        _lock.release()
