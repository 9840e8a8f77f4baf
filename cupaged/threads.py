"""Numba's threads: which layer carries them, and how many of them an engine uses.

TBB is preferred: with another busy process on the machine OpenMP's spinning threads slow down twenty
times, TBB's do not. Numba finds no TBB that pip installed, so it is loaded here first. Without TBB it is
workqueue, under our lock. A layer that the host program chose, or has running, is kept.
"""

import ctypes
import importlib.metadata
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numba as _numba

numba: Any = _numba  # it has no types for its threads
TBB_NAMES = ("libtbb.so.12", "libtbb.12.dylib", "tbb12.dll")

_lock = threading.RLock()  # workqueue aborts the process when two threads enter it


def tbb_candidates() -> list[Path]:
    """Return where pip may have put TBB's library: as its record says, or beside the interpreter."""
    try:
        files = importlib.metadata.files("tbb") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    recorded = [Path(str(file.locate())).resolve() for file in files if file.name in TBB_NAMES]
    beside = [Path(sys.prefix) / folder / name for folder in ("lib", "Library/bin") for name in TBB_NAMES]
    return [path for path in (*recorded, *beside) if path.is_file()]


def _load_tbb() -> None:
    for path in tbb_candidates():
        try:
            ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        except OSError:
            continue
        return


def launch_threads() -> str:
    """Start Numba's threads if they are not running; return the name of their layer."""
    with _lock:
        config = numba.config
        before = config.THREADING_LAYER_PRIORITY
        try:
            if config.THREADING_LAYER == "default":
                _load_tbb()
                config.THREADING_LAYER_PRIORITY = ["tbb", "workqueue", "omp"]
            numba.get_num_threads()  # starts them
        finally:
            config.THREADING_LAYER_PRIORITY = before
    return str(numba.threading_layer())


Call = tuple[Callable[..., None], Sequence[Any]]  # a kernel and its arguments


class ParallelRunner:
    """Runs parallel kernels on up to `num_threads` threads, one kernel at a time in this process."""

    def __init__(self, num_threads: int | None = None) -> None:
        launch_threads()
        limit = int(numba.config.NUMBA_NUM_THREADS)  # what Numba started
        self.num_threads = limit if num_threads is None else min(num_threads, limit)

    def run(self, calls: Sequence[Call]) -> None:
        """Call the kernels one after the other; the calling thread's own settings are as before afterwards.

        The iterations of their parallel loops are handed out one by one, so that a core that is busy
        elsewhere does not hold up the others: an iteration should be worth it.
        """
        with _lock:
            threads, chunk = numba.get_num_threads(), numba.set_parallel_chunksize(1)
            if threads != self.num_threads:
                numba.set_num_threads(self.num_threads)
            try:
                for kernel, args in calls:
                    kernel(*args)
            finally:
                numba.set_parallel_chunksize(chunk)
                if threads != self.num_threads:
                    numba.set_num_threads(threads)
