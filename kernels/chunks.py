"""How a parallel kernel divides its work: into few pieces, handed out as threads become free.

A step begins hundreds of kernels, and most of a single stream's are too small to share; and a core that is
busy with another process must not hold up the rest. So small work stays whole, and large work is cut into
several pieces a thread.
"""

from cupaged.jit import njit
from cupaged.team import num_team_threads

PIECES = 8  # a thread


@njit
def num_chunks(work: int, grain: int) -> int:
    """Return the pieces to cut `work` into, of at least `grain` each; 1 if it is less than two grains.

    If there are enough of them, each thread gets as many.
    """
    threads = num_team_threads()
    pieces = max(1, min(work // grain, PIECES * threads))
    return pieces if pieces < threads else pieces // threads * threads


@njit
def chunk_range(n: int, chunk: int, num_chunks: int) -> tuple[int, int]:
    """Return [first, last) of the n items that the piece `chunk` has."""
    return n * chunk // num_chunks, n * (chunk + 1) // num_chunks
