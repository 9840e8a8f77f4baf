"""x @ weight.T + bias, with the weight packed in panels that stream from memory once for all rows."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cupaged.jit import njit, prange
from cupaged.kernels.tile import ROWS, Places, multiply_rows

PANEL = 32  # outputs; two vectors of accumulators for each of eight rows fit the registers
DEPTH = 2048  # inputs; a panel's part, 256 KiB, stays in the second-level cache while all rows use it


class PackedLinear(NamedTuple):
    """A weight matrix [out_features, in_features] as panels."""

    panels: NDArray[np.float32]  # [num_panels, in_features, PANEL], zeros past out_features
    bias: NDArray[np.float32]  # [num_panels * PANEL]
    out_features: int


def packed_shapes(out_features: int, in_features: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of panels and bias."""
    num_panels = -(-out_features // PANEL)
    return (num_panels, in_features, PANEL), (num_panels * PANEL,)


def pack_linear(
    rows: Callable[[int, int], NDArray[np.float32]], bias: NDArray[np.float32] | None, out_features: int
) -> PackedLinear:
    """Pack the matrix whose rows [first, last) are `rows(first, last)`."""
    shapes = packed_shapes(out_features, rows(0, 1).shape[1])
    panels, padded = (np.zeros(shape, np.float32) for shape in shapes)
    for panel in range(len(panels)):
        first, last = panel * PANEL, min((panel + 1) * PANEL, out_features)
        panels[panel, :, : last - first] = rows(first, last).T
    if bias is not None:
        padded[:out_features] = bias
    return PackedLinear(panels, padded, out_features)


@njit(signatures=["void(f4[:,::1],f4[:,:,::1],f4[::1],f4[:,::1])"], parallel=True)
def linear_cpu(x: Any, panels: Any, bias: Any, out: Any) -> None:
    """Set out [n, out_features] to x [n, in_features] @ weight.T + bias."""
    num_rows, in_features = x.shape
    out_features = out.shape[1]
    x_flat, panel_flat, out_flat = x.reshape(-1), panels.reshape(-1), out.reshape(-1)
    for panel in prange(panels.shape[0]):
        first = panel * PANEL
        width = min(PANEL, out_features - first)
        edge = np.empty(ROWS * PANEL, np.float32)  # where a panel sticks out of the row
        for k in range(0, in_features, DEPTH):
            depth = min(DEPTH, in_features - k)
            b = (panel * in_features + k) * PANEL
            for row in range(0, num_rows, ROWS):
                rows = min(ROWS, num_rows - row)
                if k == 0:
                    for i in range(rows):
                        for j in range(width):
                            out[row + i, first + j] = bias[first + j]
                a = row * in_features + k
                if width == PANEL:
                    at = Places(row * out_features + first, out_features, a, in_features, b, PANEL)
                    multiply_rows(out_flat, x_flat, panel_flat, at, rows, PANEL, depth)
                    continue
                edge[:] = np.float32(0.0)
                for i in range(rows):
                    for j in range(width):
                        edge[i * PANEL + j] = out[row + i, first + j]
                at = Places(0, PANEL, a, in_features, b, PANEL)
                multiply_rows(edge, x_flat, panel_flat, at, rows, PANEL, depth)
                for i in range(rows):
                    for j in range(width):
                        out[row + i, first + j] = edge[i * PANEL + j]


@njit(signatures=["void(i4[::1],f4[:,:,::1],f4[:,::1])"], parallel=True)
def embedding_cpu(ids: Any, panels: Any, out: Any) -> None:
    """Set out [n, in_features] to the rows `ids` of a packed weight."""
    for i in prange(ids.shape[0]):
        panel, lane = ids[i] // PANEL, ids[i] % PANEL
        for k in range(out.shape[1]):
            out[i, k] = panels[panel, k, lane]
