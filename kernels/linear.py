"""x @ weight.T + bias: weights packed in panels of outputs, which stream from memory once for all rows.

linear_tile says what arithmetic there is. A row's bits depend neither on the other rows nor on how the work
is divided: each output is one chain over all inputs, whatever tiles and threads compute it.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from cupaged.jit import njit, njit_inner
from cupaged.kernels.bits import load, store
from cupaged.kernels.chunks import chunk_range, num_chunks
from cupaged.kernels.linear_tile import LONG_ROWS, MOST_ROWS, NEAR, WIDTH, Places, multiply_tile
from cupaged.kernels.parallel import parallel_for
from cupaged.team import claim_ahead, nth_piece, num_team_threads

DEPTH = 2048  # inputs; the part of a tile's weights, 192 KiB, stays in the second-level cache for all rows
GRAIN = 1 << 17  # bytes of weights that are worth a thread
PACKED_ROWS = 1024  # of a weight, converted at a time
PACKED_NUMBERS = 1 << 16  # that are worth a thread
EMBEDDED_NUMBERS = 1 << 12  # that are: each word of a row has a cache line of its own


class PackedLinear(NamedTuple):
    """A weight matrix [out_features, in_features] in panels of `width` outputs, the last one filled up."""

    panels: NDArray[Any]  # [num_panels, ceil(in_features / pair), width, pair]; bf16 in pairs, as uint16
    bias: NDArray[np.float32]  # [num_panels * width]
    out_features: int
    in_features: int


def packed_shapes(
    out_features: int, in_features: int, dtype: Any, width: int = WIDTH
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of panels and bias."""
    num_panels, pair = -(-out_features // width), 4 // np.dtype(dtype).itemsize
    return (num_panels, -(-in_features // pair), width, pair), (num_panels * width,)


def pack_linear(
    parts: Sequence[NDArray[Any]], bias: Sequence[NDArray[Any]] | None, panels: Any, padded_bias: Any
) -> None:
    """Pack the parts [n, in_features], stacked along the outputs, into arrays of the packed shapes."""
    words = as_words(panels)
    for first, rows in rows_of(parts):
        pack_rows(rows, first, panels, words)
    pack_bias(bias, padded_bias)


def as_words(panels: NDArray[Any]) -> NDArray[Any]:
    """Return the panels as [num_panels, groups of inputs, width], a word a group; zeros in the last one."""
    kind = np.dtype(f"u{panels.shape[3] * panels.itemsize}")
    words: NDArray[Any] = panels.view(kind)[..., 0]
    words[-1] = 0
    return words


def rows_of(parts: Sequence[NDArray[Any]]) -> Iterator[tuple[int, NDArray[Any]]]:
    """Yield the rows of parts of any float type as kernels read them, and before how many others they are.

    They are contiguous, float32 or bfloat16 (as uint16).
    """
    first = 0
    for part in parts:
        for row in range(0, len(part), PACKED_ROWS):
            rows = np.ascontiguousarray(part[row : row + PACKED_ROWS])
            is_half = rows.dtype == ml_dtypes.bfloat16
            yield first + row, rows.view(np.uint16) if is_half else rows.astype(np.float32, copy=False)
        first += len(part)


def pack_bias(bias: Sequence[NDArray[Any]] | None, padded: NDArray[np.float32]) -> None:
    """Put the parts' biases, or zeros, into `padded`, and zeros behind."""
    padded[:] = 0
    if bias is not None:
        padded[: sum(map(len, bias))] = np.concatenate([part.astype(np.float32) for part in bias])


@njit
def pack_range(rows: Any, first: int, panels: Any, words: Any, bounds: Any) -> None:
    """Put the rows [bounds[0], bounds[1]) to the outputs from `first` on."""
    packed = np.zeros(panels.shape[1] * panels.shape[3], panels.dtype)
    for i in range(*bounds):
        row = rows[i]
        for k in range(row.shape[0]):
            packed[k] = store(packed[0], load(row[k]))
        place_row(packed.view(words.dtype), first + i, words)


# For jit.specialize: rows, which may be read-only, and panels.
PACK_SIGNATURE = "void(Array({}, 2, 'C', True), i8, {}[:,:,:,::1], u4[:,:,::1])"


@njit
def pack_rows(rows: Any, first: int, panels: Any, words: Any) -> None:
    """Put rows [n, in_features] to the outputs from `first` on; words: the panels, as of as_words."""
    args = (rows, first, panels, words)
    parallel_for(pack_range, rows.shape[0], num_chunks(rows.size, PACKED_NUMBERS), args)


@njit_inner
def place_row(row: Any, output: int, words: Any) -> None:
    """Put one output's weights, a word a group of inputs, to their places."""
    panel, lane = output // words.shape[2], output % words.shape[2]
    for k in range(row.shape[0]):
        words[panel, k, lane] = row[k]


@njit_inner
def multiply_panel(out: Any, x: Any, weight: Any, terms: Any, at: Places, num_rows: int, depth: int) -> None:
    """Take a part of the inputs for all rows, in tiles; meanwhile fetch the weights from at.ahead on."""
    row, ahead = 0, at.ahead
    while row < num_rows:
        rows = min(MOST_ROWS, num_rows - row)
        here = Places(
            row=row,
            column=at.column,
            width=at.width,
            out_stride=at.out_stride,
            x=at.x + row * at.x_stride,
            x_stride=at.x_stride,
            weight=at.weight,
            ahead=ahead,
            is_first=at.is_first,
            is_last=at.is_last,
        )
        multiply_tile(out, x, weight, terms, here, rows, depth)
        row += rows
        ahead = at.weight  # which is there already


@njit
def is_last_piece(end: int, num_panels: int, pieces: int, threads: int) -> bool:
    """Return whether the piece that ends at a panel is the last one of a thread, while these take turns."""
    for thread in range(1, threads):
        if end == chunk_range(num_panels, nth_piece(thread, pieces, threads), pieces)[0]:
            return True
    return end == num_panels


@njit
def multiply_panels(x: Any, panels: Any, terms: Any, out: Any, pieces: int, bounds: Any) -> None:
    """Set the outputs of the panels [first, last), of all rows."""
    in_features, out_features = x.shape[1], out.shape[1]
    x_flat, weight, out_flat = x.reshape(-1), panels.reshape(-1), out.reshape(-1)
    stride = panels.size // panels.shape[0]  # from panel to panel
    leaves = is_last_piece(bounds[1], panels.shape[0], pieces, num_team_threads())
    for panel in range(*bounds):
        column = panel * WIDTH
        for k in range(0, in_features, DEPTH):
            depth, start = min(DEPTH, in_features - k), panel * stride + k * WIDTH
            is_last = k + depth == in_features
            ahead = start + depth * WIDTH
            if is_last and leaves and panel + 1 == bounds[1]:
                wanted = depth * WIDTH * panels.itemsize if x.shape[0] >= LONG_ROWS else NEAR
                place = claim_ahead(wanted)
                ahead = (place - panels.ctypes.data) // panels.itemsize if place > 0 else start
            at = Places(
                row=0,
                column=column,
                width=out_features - column,
                out_stride=out_features,
                x=k,
                x_stride=in_features,
                weight=start,
                ahead=ahead,
                is_first=k == 0,
                is_last=is_last,
            )
            multiply_panel(out_flat, x_flat, weight, terms, at, x.shape[0], depth)


@njit
def multiply(x: Any, panels: Any, terms: Any, out: Any) -> None:
    """Set out [n, out_features] to what linear_tile makes of x [n, in_features], on all threads."""
    work, num_panels = panels.size * panels.itemsize * (1 + x.shape[0] // MOST_ROWS), panels.shape[0]
    pieces = min(num_panels, num_chunks(work, GRAIN))
    parallel_for(multiply_panels, num_panels, pieces, (x, panels, terms, out, pieces))


# For jit.specialize: x and panels, f4 or u2 (the bits of bfloat16).
SIGNATURE = "void({}[:,::1],{}[:,:,:,::1],f4[::1],f4[:,::1])"


@njit
def linear_cpu(x: Any, panels: Any, bias: Any, out: Any) -> None:
    """Set out [n, out_features] to x [n, in_features] @ weight.T + bias."""
    multiply(x, panels, (bias,), out)


@njit_inner
def embed_rows(ids: Any, panels: Any, out: Any, rows: Any) -> None:
    """Set the rows [first, last) of out: the first input of every group, then the second one."""
    pair, width = panels.shape[3], out.shape[1]
    for i in range(*rows):
        weights, lane, target = panels[ids[i] // panels.shape[2]], ids[i] % panels.shape[2], out[i]
        for j in range(pair):
            for k in range((width - j + pair - 1) // pair):
                target[k * pair + j] = load(weights[k, lane, j])


EMBEDDING_SIGNATURE = "void(i4[::1],{}[:,:,:,::1],f4[:,::1])"


@njit
def embedding_cpu(ids: Any, panels: Any, out: Any) -> None:
    """Set out [n, in_features] to the rows `ids` of a packed weight."""
    parallel_for(embed_rows, ids.shape[0], num_chunks(out.size, EMBEDDED_NUMBERS), (ids, panels, out))
