"""x @ weight.T + bias: weights packed in blocks of 16 outputs, which stream from memory once for all rows.

linear_tile says what arithmetic there is. A row's bits depend neither on the other rows nor on how the work
is divided: each output is one chain over all inputs, whatever tiles and threads compute it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from cupaged.jit import njit, njit_inner
from cupaged.kernels.bits import load, store
from cupaged.kernels.chunks import num_chunks
from cupaged.kernels.intrinsics import LANES
from cupaged.kernels.linear_tile import MOST_BLOCKS, MOST_ROWS, Places, multiply_tile
from cupaged.kernels.parallel import parallel_for

DEPTH = 2048  # inputs; the part of a tile's weights, 192 KiB, stays in the second-level cache for all rows
GRAIN = 1 << 17  # bytes of weights that are worth a thread
PACKED_ROWS = 1024  # of a weight, converted at a time
PACKED_INPUTS = 32


class PackedLinear(NamedTuple):
    """A weight matrix [out_features, in_features] in blocks of LANES outputs."""

    panels: NDArray[Any]  # [num_blocks, ceil(in_features / pair), LANES, pair]; bf16 in pairs, as uint16
    bias: NDArray[np.float32]  # [num_blocks * LANES]
    out_features: int
    in_features: int


def packed_shapes(out_features: int, in_features: int, dtype: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of panels and bias."""
    num_blocks, pair = -(-out_features // LANES), 4 // np.dtype(dtype).itemsize
    return (num_blocks, -(-in_features // pair), LANES, pair), (num_blocks * LANES,)


def pack_linear(
    parts: Sequence[NDArray[Any]], bias: Sequence[NDArray[Any]] | None, panels: Any, padded_bias: Any
) -> None:
    """Pack the parts [n, in_features], stacked along the outputs, into arrays of the packed shapes."""
    panels[-1] = 0
    panels[:, -1] = 0
    first = 0
    for part in parts:
        for row in range(0, len(part), PACKED_ROWS):
            rows = np.ascontiguousarray(part[row : row + PACKED_ROWS])
            if rows.dtype == ml_dtypes.bfloat16:
                rows = rows.view(np.uint16)
            elif rows.dtype != np.float32:
                rows = rows.astype(np.float32)
            pack_rows(rows, first + row, panels)
        first += len(part)
    padded_bias[:] = 0
    if bias is not None:
        padded_bias[:first] = np.concatenate([part.astype(np.float32) for part in bias])


@njit_inner
def pack_range(rows: Any, first: int, panels: Any, bounds: Any) -> None:
    """Pack the blocks [bounds[0], bounds[1]) of those that the rows reach into."""
    num_rows, in_features = rows.shape
    pair = panels.shape[3]
    start = first // LANES
    for block in range(start + bounds[0], start + bounds[1]):
        begin, stop = max(first, block * LANES), min(first + num_rows, (block + 1) * LANES)
        for k in range(0, in_features, PACKED_INPUTS):
            # A line of each row, then the next: both sides stay in the first-level cache.
            for i in range(begin, stop):
                for j in range(k, min(k + PACKED_INPUTS, in_features)):
                    weight = store(panels[0, 0, 0, 0], load(rows[i - first, j]))
                    panels[block, j // pair, i % LANES, j % pair] = weight


# For jit.specialize: rows, which may be read-only, and panels.
PACK_SIGNATURE = "void(Array({}, 2, 'C', True), i8, {}[:,:,:,::1])"


@njit
def pack_rows(rows: Any, first: int, panels: Any) -> None:
    """Put rows [n, in_features] to the outputs from `first` on."""
    num_blocks = (first + rows.shape[0] + LANES - 1) // LANES - first // LANES
    parallel_for(pack_range, num_blocks, num_chunks(rows.size, 1 << 16), (rows, first, panels))


@njit_inner
def multiply_blocks(
    out: Any, initial: Any, x: Any, weight: Any, at: Places, num_rows: int, blocks: int, depth: int
) -> None:
    """Set out to initial + x @ weight for all rows, in tiles, and fetch the weights from at.ahead on."""
    row, ahead = 0, at.ahead
    while row < num_rows:
        rows = MOST_ROWS
        while rows > num_rows - row:
            rows //= 2
        out_at, initial_at = at.out + row * at.out_stride, at.initial + row * at.initial_stride
        x_at = at.x + row * at.x_stride
        here = Places(
            out_at,
            at.out_stride,
            initial_at,
            at.initial_stride,
            x_at,
            at.x_stride,
            at.weight,
            at.block_stride,
            ahead,
        )
        multiply_tile(out, initial, x, weight, here, rows, blocks, depth)
        row += rows
        ahead = at.weight  # which is there already


# For jit.specialize: x and panels, f4 or u2 (the bits of bfloat16).
SIGNATURE = "void({}[:,::1],{}[:,:,:,::1],f4[::1],f4[:,::1])"


@njit
def multiply_range(x: Any, panels: Any, bias: Any, out: Any, bounds: Any) -> None:
    """Set the outputs of the tiles [first, last) of MOST_BLOCKS blocks each."""
    num_rows, in_features = x.shape
    num_blocks, _, _, pair = panels.shape
    out_features = out.shape[1]
    x_flat, weight, out_flat = x.reshape(-1), panels.reshape(-1), out.reshape(-1)
    stride = panels.shape[1] * LANES * pair  # from block to block
    block, last = bounds[0] * MOST_BLOCKS, min(bounds[1] * MOST_BLOCKS, num_blocks)
    while block < last:
        blocks = MOST_BLOCKS if block + MOST_BLOCKS <= last else 1
        if (block + blocks) * LANES > out_features:
            blocks = 1  # the block that sticks out of the row goes alone
        column = block * LANES
        width = min(blocks * LANES, out_features - column)
        edge = width < LANES
        result, start, row_stride = out_flat, column, out_features
        if edge:
            result, start, row_stride = np.empty(num_rows * LANES, np.float32), 0, LANES
        initial, initial_at, initial_stride = bias, column, 0
        for k in range(0, in_features, DEPTH):
            here, depth = block * stride + k * LANES, min(DEPTH, in_features - k)
            ahead = here + DEPTH * LANES if k + DEPTH < in_features else (block + blocks) * stride
            places = (start, row_stride, initial_at, initial_stride, k, in_features, here, stride, ahead)
            multiply_blocks(result, initial, x_flat, weight, Places(*places), num_rows, blocks, depth)
            initial, initial_at, initial_stride = result, start, row_stride
        if edge:
            for i in range(num_rows):
                for j in range(width):
                    out[i, column + j] = result[i * LANES + j]
        block += blocks


@njit
def linear_cpu(x: Any, panels: Any, bias: Any, out: Any) -> None:
    """Set out [n, out_features] to x [n, in_features] @ weight.T + bias."""
    tiles = (panels.shape[0] + MOST_BLOCKS - 1) // MOST_BLOCKS
    work = panels.size * panels.itemsize * (1 + x.shape[0] // MOST_ROWS)
    parallel_for(multiply_range, tiles, min(tiles, num_chunks(work, GRAIN)), (x, panels, bias, out))


EMBEDDING_SIGNATURE = "void(i4[::1],{}[:,:,:,::1],f4[:,::1])"


@njit_inner
def embed_range(ids: Any, panels: Any, out: Any, bounds: Any) -> None:
    """Set the rows [first, last) of out."""
    pair = panels.shape[3]
    for i in range(*bounds):
        block, lane = ids[i] // LANES, ids[i] % LANES
        for k in range(out.shape[1]):
            out[i, k] = load(panels[block, k // pair, lane, k % pair])


@njit
def embedding_cpu(ids: Any, panels: Any, out: Any) -> None:
    """Set out [n, in_features] to the rows `ids` of a packed weight."""
    parallel_for(embed_range, ids.shape[0], num_chunks(out.size, 1 << 14), (ids, panels, out))
