"""The one inner loop of the CPU twins: a few rows of A times a few vectors of columns of B.

Each element of C is one chain of fused multiply-adds over `depth`, in ascending order, whatever the
other rows and columns are. So a row's bits do not depend on who shares its tile: linear and attention
owe their sameness to this.
"""

from typing import Any, NamedTuple

from cupaged.jit import njit
from cupaged.kernels.bits import load

VECTOR = 16  # floats; columns come in multiples of it


class Places(NamedTuple):
    """Where the tiles begin in their flat arrays, and from one row to the next, in elements."""

    c: int
    c_stride: int
    a: int
    a_stride: int
    b: int
    b_stride: int


@njit
def multiply_rows(c: Any, a: Any, b: Any, at: Places, rows: int, columns: int, depth: int) -> None:
    """Do C[rows, columns] += A[rows, depth] @ B[depth, columns] on flat arrays."""
    for i in range(rows):
        for k in range(depth):
            x = a[at.a + i * at.a_stride + k]
            for j in range(columns):
                c[at.c + i * at.c_stride + j] += x * load(b[at.b + k * at.b_stride + j])
