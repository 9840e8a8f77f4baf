"""x @ weight.T + bias on the tile registers of AMX, for weights of bfloat16 or int8.

A square of up to BLOCK rows by BLOCK outputs is four tiles, which take one tile of the inputs after the
other, ascending. Rows and outputs at the edges make the tiles smaller, nothing else; where the inputs are
taken in parts, tiles wait in `out`, exactly. So a row's bits depend on that row alone.

    tiles:       B 6 | B 7       weights: 16 pairs (quads) of inputs x 16 outputs, 1 KiB in a row
           A 4   C 0 | C 1
           A 5   C 2 | C 3       A: 16 rows of x; C 2, C 3 and A 5 only for more than 16 rows

bfloat16 is passed as uint16. in_features is a multiple of a row of a tile: of 32 bfloat16, or of 64 int8.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import types
from numba.extending import overload

from cupaged.jit import njit, njit_inner
from cupaged.kernels import amx
from cupaged.kernels.amx import CONFIG_BYTES, LINE_BYTES, ROW_BYTES, ROWS, TILE_BYTES
from cupaged.kernels.chunks import num_chunks
from cupaged.kernels.parallel import parallel_for
from cupaged.kernels.quantize import quantize_rows

# ruff: noqa: ARG001, ARG005  (Numba's overloads repeat the parameters of what they stand for)

BLOCK = 2 * ROWS
DEPTH = 64  # tiles of inputs; the part of a square's weights, 128 KiB, stays in the second-level cache
SLAB = 256  # rows; their part of x, 1 MiB, stays there too while a thread goes through its outputs
SHALLOW = 8  # tiles of int8 weights, made bfloat16 in the first-level cache when few rows use them
AHEAD = 8  # tiles from the one in use to the one that is fetched
LINES, INT8_LINES = TILE_BYTES // LINE_BYTES, TILE_BYTES // LINE_BYTES // 2  # of a tile, of what becomes one
GRAIN = 1 << 17  # bytes of weights that are worth a thread


class Task(NamedTuple):
    """What all pieces of one multiplication share; steps and strides of x in elements."""

    num_rows: int
    out_features: int
    steps: int  # tiles of inputs
    x_step: int  # from a tile of x to the next one of the same rows
    x_stride: int  # from row to row of a tile
    units: int  # a unit is SLAB rows x BLOCK outputs; those of the same rows follow each other


class Places(NamedTuple):
    """Where a square lies, in elements: its first row and block, and from there to the others."""

    out: int
    out_stride: int
    begin: int
    begin_stride: int  # 0: all rows begin alike
    right: int  # from the first block to the second, of out and begin
    x: int
    lower: int  # from the first 16 rows of x to the others
    x_step: int
    x_stride: int
    weight: int
    weight_right: int


def row_size(array: Any) -> int:
    """Return how many of an array's numbers are a row of a tile."""
    return int(ROW_BYTES // array.itemsize)


@overload(row_size, strict=False)
def _overload_row_size(array: Any) -> Any:
    size = 8 * ROW_BYTES // array.dtype.bitwidth  # known when compiling, unlike itemsize
    return lambda array: size


def dot(tiles: Any, x: Any, c: int, a: int, b: int) -> None:
    """Do C += A @ B as the type of x says."""
    if x.dtype == np.int8:
        amx.dot_int8(tiles, c, a, b)
    else:
        amx.dot_bfloat16(tiles, c, a, b)


@overload(dot, strict=False, prefer_literal=True)
def _overload_dot(tiles: Any, x: Any, c: Any, a: Any, b: Any) -> Any:
    if x.dtype == types.int8:
        return lambda tiles, x, c, a, b: amx.dot_int8(tiles, c, a, b)
    return lambda tiles, x, c, a, b: amx.dot_bfloat16(tiles, c, a, b)


@njit_inner
def shape_tiles(tiles: Any, config: Any, rows: int, columns: int) -> None:
    """Make the tiles those of a square; a block that is alone in it counts as its second too."""
    upper, lower = min(rows, ROWS), max(rows - ROWS, 0)
    left = 4 * min(columns, ROWS)
    right = 4 * (columns - ROWS) if columns > ROWS else left
    is_tall = lower > 0  # a tile without rows has no bytes either
    config[0] = 1
    config[48] = config[49] = config[52] = upper  # rows of C 0, C 1 and A 4
    config[50] = config[51] = config[53] = lower
    config[54] = config[55] = ROWS
    config[16] = config[28] = left  # bytes of a row of C 0 and B 6
    config[18] = config[30] = right
    config[20] = left if is_tall else 0
    config[22] = right if is_tall else 0
    config[24] = ROW_BYTES
    config[26] = ROW_BYTES if is_tall else 0
    amx.load_config(tiles, config)


@njit_inner
def multiply_square(
    tiles: Any, out: Any, begin: Any, x: Any, weight: Any, at: Places, is_tall: bool, steps: int
) -> None:
    """Set a square of out to `begin` + x @ weight; is_tall: it has more than 16 rows."""
    width, tile_size = row_size(weight), ROWS * row_size(weight)
    amx.load_tile(tiles, 0, begin, at.begin, at.begin_stride)
    amx.load_tile(tiles, 1, begin, at.begin + at.right, at.begin_stride)
    if is_tall:
        below = at.begin + ROWS * at.begin_stride
        amx.load_tile(tiles, 2, begin, below, at.begin_stride)
        amx.load_tile(tiles, 3, begin, below + at.right, at.begin_stride)
    over = 2 * at.weight_right - steps * tile_size  # past these two blocks come the next two
    for step in range(steps):
        a, b = at.x + step * at.x_step, at.weight + step * tile_size
        ahead = b + AHEAD * tile_size + (over if step + AHEAD >= steps else 0)
        amx.fetch_lines(tiles, weight, ahead, LINES)
        amx.fetch_lines(tiles, weight, ahead + at.weight_right, LINES)
        amx.load_tile(tiles, 6, weight, b, width)
        amx.load_tile(tiles, 4, x, a, at.x_stride)
        amx.load_tile(tiles, 7, weight, b + at.weight_right, width)
        dot(tiles, x, 0, 4, 6)
        dot(tiles, x, 1, 4, 7)
        if is_tall:
            amx.load_tile(tiles, 5, x, a + at.lower, at.x_stride)
            dot(tiles, x, 2, 5, 6)
            dot(tiles, x, 3, 5, 7)
    amx.store_tile(tiles, 0, out, at.out, at.out_stride)
    amx.store_tile(tiles, 1, out, at.out + at.right, at.out_stride)
    if is_tall:
        below = at.out + ROWS * at.out_stride
        amx.store_tile(tiles, 2, out, below, at.out_stride)
        amx.store_tile(tiles, 3, out, below + at.right, at.out_stride)


def weights_for(tiles: Any, x: Any, weight: Any, room: Any, start: int, right: int, steps: int) -> Any:
    """Return an array of the type of x, where in it a square's weights are, and how far the second block."""
    if weight.itemsize == x.itemsize:
        return weight, start, right
    return expand_weights(tiles, weight, room, start, right, steps)


@njit_inner
def expand_weights(tiles: Any, weight: Any, room: Any, start: int, right: int, steps: int) -> Any:
    """Return `room` with int8 weights as bfloat16, which holds them exactly, as weights_for does."""
    size = ROWS * row_size(room)
    for block in range(2):
        for step in range(steps):
            first = start + block * right + step * size
            amx.fetch_lines(tiles, weight, first + AHEAD * size, INT8_LINES)
            tile = weight[first : first + size]
            target = room[(block * steps + step) * size :][:size]
            for i in range(size):
                target[i] = np.float32(tile[i]).view(np.uint32) >> np.uint32(16)  # the rest is 0
    return room, 0, steps * size


@overload(weights_for, strict=False)
def _overload_weights_for(
    tiles: Any, x: Any, weight: Any, room: Any, start: Any, right: Any, steps: Any
) -> Any:
    if weight.dtype.bitwidth == x.dtype.bitwidth:
        return lambda tiles, x, weight, room, start, right, steps: (weight, start, right)
    return lambda tiles, x, weight, room, start, right, steps: expand_weights(
        tiles, weight, room, start, right, steps
    )


@njit_inner
def multiply_units(
    tiles: Any,
    config: Any,
    out: Any,
    begin: Any,
    x: Any,
    weight: Any,
    room: Any,
    task: Task,
    depth: int,
    first: int,
    last: int,
) -> None:
    """Set out of the units [first, last) to `begin`, which repeats, + x @ weight, `depth` tiles at a time."""
    pairs = (task.out_features + BLOCK - 1) // BLOCK
    tile_size = ROWS * row_size(x)  # also of the weights: as many numbers, if int8 half the bytes
    in_features = task.steps * row_size(x)
    parts, units = (task.steps + depth - 1) // depth, last - first
    for turn in range(parts * units):
        if task.num_rows <= BLOCK:  # weights are used once: take them in the order of memory
            unit, k = first + turn // parts, turn % parts * depth
        else:  # keep the part of x
            unit, k = first + turn % units, turn // units * depth
        steps = min(depth, task.steps - k)
        slab, column = unit // pairs * SLAB, unit % pairs * BLOCK
        columns = min(BLOCK, task.out_features - column)
        start = (column // ROWS * task.steps + k) * tile_size
        next_block = task.steps * tile_size if columns > ROWS else 0
        weights, at_weight, weight_right = weights_for(tiles, x, weight, room, start, next_block, steps)
        for row in range(slab, min(slab + SLAB, task.num_rows), BLOCK):
            rows = min(BLOCK, task.num_rows - row)
            if row == slab or rows < BLOCK:
                shape_tiles(tiles, config, rows, columns)
            at_out = row * task.out_features + column
            at = Places(
                at_out,
                task.out_features,
                column % begin.size if k == 0 else at_out,
                0 if k == 0 else task.out_features,
                ROWS if columns > ROWS else 0,
                row * in_features + k * task.x_step,
                ROWS * in_features,
                task.x_step,
                task.x_stride,
                at_weight,
                weight_right,
            )
            multiply_square(tiles, out, begin if k == 0 else out, x, weights, at, rows > ROWS, steps)
    amx.release_tiles(tiles)


@njit
def aligned(size: int, like: Any) -> Any:
    """Return a flat array of the type of `like` that begins on a cache line: else every row crosses two."""
    whole = np.empty(size + row_size(like), like.dtype)
    skipped = -whole.ctypes.data % ROW_BYTES // like.itemsize
    return whole[skipped : skipped + size]


@njit
def plan(x: Any, out: Any) -> Task:
    """Return the task; it says how `lay_out` lays out x."""
    num_rows, in_features = x.shape
    width = row_size(x)
    slabs, pairs = (num_rows + SLAB - 1) // SLAB, (out.shape[1] + BLOCK - 1) // BLOCK
    x_step, x_stride = (width, in_features) if num_rows <= BLOCK else (ROWS * width, width)
    return Task(num_rows, out.shape[1], in_features // width, x_step, x_stride, slabs * pairs)


@njit_inner
def lay_out_range(x: Any, packed: Any, bounds: Any) -> None:
    """Put the rows [first, last) of x where `lay_out` says."""
    in_features, width = x.shape[1], row_size(x)
    for row in range(*bounds):
        start = row // ROWS * ROWS * in_features + row % ROWS * width
        for step in range(in_features // width):
            target = packed[start + step * ROWS * width :][:width]
            source = x[row, step * width :][:width]
            for i in range(width):
                target[i] = source[i]


@njit
def lay_out(x: Any) -> Any:
    """Return x, flat: few rows as they are, many as tiles [row blocks, steps, ROWS, row of a tile].

    Rows a power of two apart would evict each other from the first-level cache.
    """
    num_rows, in_features = x.shape
    if num_rows <= BLOCK:
        return x.reshape(-1)
    packed = aligned((num_rows + ROWS - 1) // ROWS * ROWS * in_features, x)
    parallel_for(lay_out_range, num_rows, num_chunks(x.size * x.itemsize, GRAIN), (x, packed))
    return packed


@njit
def num_pieces(panels: Any, task: Task) -> int:
    """Return how many pieces to divide the units into."""
    work = panels.size * panels.itemsize * (1 + task.num_rows // BLOCK)
    return min(num_chunks(work, GRAIN), max(task.units, 1))


@njit
def bfloat16_range(x: Any, weight: Any, bias: Any, out: Any, task: Task, bounds: Any) -> None:
    """Set out of the units [first, last); x as it is laid out, weight and out flat."""
    depth = max(task.steps, 1) if task.num_rows <= BLOCK else DEPTH
    tiles, config = amx.create_tiles(), np.zeros(CONFIG_BYTES, np.uint8)
    multiply_units(tiles, config, out, bias, x, weight, x, task, depth, bounds[0], bounds[1])


SIGNATURE = "void(u2[:,::1],u2[:,:,:,::1],f4[::1],f4[:,::1])"


@njit
def linear_amx(x: Any, panels: Any, bias: Any, out: Any) -> None:
    """Set out [n, out_features] to x [n, in_features] @ weight.T + bias.

    panels: bfloat16 [blocks of 16 outputs, in_features / 2, 16, 2]; bias: one for every output of them.
    """
    task = plan(x, out)
    args = (lay_out(x), panels.reshape(-1), bias, out.reshape(-1), task)
    parallel_for(bfloat16_range, task.units, num_pieces(panels, task), args)


@njit_inner
def scale_units(
    out: Any, sums: Any, row_scale: Any, scale: Any, bias: Any, task: Task, first: int, last: int
) -> None:
    """Set out of the units to sums * (row_scale * scale) + bias; row_scale repeats, sums may lie in out."""
    pairs = (task.out_features + BLOCK - 1) // BLOCK
    for unit in range(first, last):
        slab, column = unit // pairs * SLAB, unit % pairs * BLOCK
        columns = min(BLOCK, task.out_features - column)
        for row in range(slab, min(slab + SLAB, task.num_rows)):
            start = row * task.out_features + column
            for i in range(columns):
                factor = row_scale[row % row_scale.size] * scale[column + i]
                out[start + i] = np.float32(sums[start + i]) * factor + bias[column + i]


@njit
def w8a16_range(x: Any, weight: Any, scale: Any, bias: Any, out: Any, task: Task, bounds: Any) -> None:
    """Set out of the units [first, last); x as it is laid out, weight and out flat."""
    depth = SHALLOW if task.num_rows <= BLOCK else DEPTH
    room = aligned(2 * depth * ROWS * row_size(x), x)
    zeros, ones = np.zeros(BLOCK, np.float32), np.ones(1, np.float32)
    tiles, config = amx.create_tiles(), np.zeros(CONFIG_BYTES, np.uint8)
    multiply_units(tiles, config, out, zeros, x, weight, room, task, depth, bounds[0], bounds[1])
    scale_units(out, out, ones, scale, bias, task, bounds[0], bounds[1])


SIGNATURE_W8A16 = "void(u2[:,::1],i1[:,:,:,::1],f4[::1],f4[::1],f4[:,::1])"


@njit
def linear_w8a16_amx(x: Any, panels: Any, scale: Any, bias: Any, out: Any) -> None:
    """Set out [n, out_features] to x [n, in_features] @ weight.T * scale + bias.

    panels: int8 [blocks of 16 outputs, in_features / 2, 16, 2]; scale, bias: one for every output of them.
    """
    task = plan(x, out)
    args = (lay_out(x), panels.reshape(-1), scale, bias, out.reshape(-1), task)
    parallel_for(w8a16_range, task.units, num_pieces(panels, task), args)


@njit
def w8a8_range(
    x: Any, row_scale: Any, weight: Any, scale: Any, bias: Any, out: Any, task: Task, bounds: Any
) -> None:
    """Set out of the units [first, last); x as it is laid out, weight and out flat."""
    depth = max(task.steps, 1) if task.num_rows <= BLOCK else DEPTH
    sums, zeros = out.view(np.int32), np.zeros(BLOCK, np.int32)
    tiles, config = amx.create_tiles(), np.zeros(CONFIG_BYTES, np.uint8)
    multiply_units(tiles, config, sums, zeros, x, weight, x, task, depth, bounds[0], bounds[1])
    scale_units(out, sums, row_scale, scale, bias, task, bounds[0], bounds[1])


# For jit.specialize: x, f4 or u2 (the bits of bfloat16).
SIGNATURE_W8A8 = "void({}[:,::1],i1[:,::1],f4[::1],i1[:,:,:,::1],f4[::1],f4[::1],f4[:,::1])"


@njit
def linear_w8a8_amx(
    x: Any, quantized: Any, row_scale: Any, panels: Any, scale: Any, bias: Any, out: Any
) -> None:
    """Set out [n, out_features] to x [n, in_features] @ weight.T * scale + bias, x of 8 bits, too.

    quantized, int8[n, in_features], and row_scale [n] are room for x. The bits are linear_w8a8_cpu's.
    panels: int8 [blocks of 16 outputs, in_features / 4, 16, 4]; scale, bias: one for every output of them.
    """
    quantize_rows(x, 0, quantized, row_scale)
    task = plan(quantized, out)
    args = (lay_out(quantized), row_scale, panels.reshape(-1), scale, bias, out.reshape(-1), task)
    parallel_for(w8a8_range, task.units, num_pieces(panels, task), args)
