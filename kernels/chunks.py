"""How a parallel kernel divides its work: into few pieces, handed out as threads become free.

A step begins hundreds of kernels, and most of a single stream's are too small to share; and a core that is
busy with another process must not hold up the rest. So small work stays whole, and large work is cut into
several pieces a thread.
"""

from typing import Any

import numba as _numba
from llvmlite import ir
from numba.core import cgutils as _cgutils
from numba.core import types
from numba.extending import intrinsic, overload

from cupaged.jit import njit
from cupaged.threads import launch_threads

numba: Any = _numba  # untyped
cgutils: Any = _cgutils
PIECES = 8  # a thread
launch_threads()  # or compiled code would not find get_num_threads


def num_threads() -> int:
    """Return the threads that a parallel loop of the caller has."""
    return int(numba.get_num_threads())


def _type_num_threads(_context: Any) -> Any:
    def emit(_context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(64), [])  # of Numba's runtime, as its own loops call it
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, "get_num_threads"), [])

    return types.int64(), emit


_num_threads: Any = intrinsic(_type_num_threads)  # numba.get_num_threads() would forbid the on-disk cache


@overload(num_threads, strict=False)
def _overload_num_threads() -> Any:
    return lambda: _num_threads()


@njit
def num_chunks(work: int, grain: int) -> int:
    """Return the pieces to cut `work` into, of at least `grain` each; 1 if it is less than two grains."""
    return max(1, min(work // grain, PIECES * num_threads()))


@njit
def chunk_range(n: int, chunk: int, num_chunks: int) -> tuple[int, int]:
    """Return [first, last) of the n items that the piece `chunk` has."""
    return n * chunk // num_chunks, n * (chunk + 1) // num_chunks
