"""Moves of rows: gather, the last sampled tokens that stay on the device, and whole KV blocks."""

from math import prod
from typing import Any

from cupaged.jit import njit, njit_inner
from cupaged.kernels.bits import load, store
from cupaged.kernels.chunks import num_chunks
from cupaged.kernels.launch import Array, Device, ceil_div, require_packed, row_stride, row_units
from cupaged.kernels.parallel import parallel_for

SAMPLES, INPUT_FROM_LAST_TOKEN = 1, 2  # bits of a sequence's flags, as in batch.Flag
THREADS = 256  # a block
GRAIN = 1 << 16  # numbers, 4 us of a CPU's work
BATCH = 4  # units of 16 bytes that a thread of copy_blocks moves


@njit_inner
def gather_range(x: Any, index: Any, out: Any, places: Any) -> None:
    """Set the rows [first, last) of out."""
    for i in range(*places):
        if index[i] >= 0:
            source, target = x[index[i]], out[i]
            for j in range(x.shape[1]):
                target[j] = store(target[j], load(source[j]))


# For jit.specialize; {} are the types of x and out, f4 or u2 (the bits of bfloat16).
SIGNATURE = "void({}[:,::1],i4[::1],{}[:,::1])"


@njit
def gather_rows_cpu(x: Any, index: Any, out: Any) -> None:
    """Set out[i] to x[index[i]]; at index -1, padding, it stays as it is."""
    parallel_for(gather_range, index.shape[0], num_chunks(out.size, GRAIN), (x, index, out))


def gather_rows_cuda(device: Device, x: Array, index: Array, out: Array) -> None:
    """Set out[i] to x[index[i]]; at index -1, padding, it stays as it is. x [num, size], index int32[n]."""
    num_rows, num_units = len(index), row_units(x, "hidden_size")
    require_packed("out", out)
    assert out.dtype == x.dtype, f"rows of {x.dtype}, out of {out.dtype}"
    kernel = device.kernel("rows", "gather_rows", THREADS=THREADS)
    grid = (ceil_div(num_rows * num_units, THREADS), 1, 1)
    x_stride = row_stride(x, unit=16) * x.dtype.itemsize // 16
    kernel(grid, THREADS, (out, x, index, num_rows, num_units, x_stride))


LOAD_SIGNATURE = "void(i4[::1],i4[::1],i4[::1],i4[::1],i4[::1])"


@njit
def load_last_tokens_cpu(
    rows: Any,  # int32[num_seqs], and so flags; row -1 = padding
    flags: Any,
    query_start: Any,  # int32[num_seqs + 1]
    last_token: Any,  # int32[max_num_seqs]
    input_ids: Any,  # int32[num_tokens]
) -> None:
    """Set the last input of each sequence that is flagged for it to its row of last_token."""
    for seq in range(rows.shape[0]):
        if rows[seq] >= 0 and flags[seq] & INPUT_FROM_LAST_TOKEN:
            input_ids[query_start[seq + 1] - 1] = last_token[rows[seq]]


def load_last_tokens_cuda(
    device: Device,
    rows: Array,  # int32[num_seqs], and so flags; row -1 = padding
    flags: Array,
    query_start: Array,  # int32[num_seqs + 1]
    last_token: Array,  # int32[max_num_seqs]
    input_ids: Array,  # int32[num_tokens]
) -> None:
    """Set the last input of each sequence that is flagged for it to its row of last_token."""
    kernel = device.kernel("rows", "load_last_tokens", THREADS=THREADS)
    grid = (ceil_div(len(rows), THREADS), 1, 1)
    kernel(grid, THREADS, (input_ids, rows, flags, query_start, last_token, len(rows)))


STORE_SIGNATURE = "void(i4[::1],i4[::1],i4[::1],i4[::1])"


@njit
def store_last_tokens_cpu(rows: Any, flags: Any, token_ids: Any, last_token: Any) -> None:
    """Set last_token[row] for the sequences that sampled."""
    for seq in range(rows.shape[0]):
        if rows[seq] >= 0 and flags[seq] & SAMPLES:
            last_token[rows[seq]] = token_ids[seq]


def store_last_tokens_cuda(
    device: Device, rows: Array, flags: Array, token_ids: Array, last_token: Array
) -> None:
    """Set last_token[row] for the sequences that sampled. int32[num_seqs]; last_token int32[max_num_seqs]."""
    kernel = device.kernel("rows", "store_last_tokens", THREADS=THREADS)
    args = (last_token, rows, flags, token_ids, len(rows))
    kernel((ceil_div(len(rows), THREADS), 1, 1), THREADS, args)


COPY_SIGNATURE = "void(u1[:,::1],u1[:,::1],i4[:,::1])"


@njit
def copy_blocks_cpu(source: Any, target: Any, pairs: Any) -> None:
    """Copy block pairs[i, 0] of source [num_blocks, bytes] to block pairs[i, 1] of target.

    No block is the target of two pairs, or, in one pool, target of one and source of another.
    """
    for i in range(pairs.shape[0]):
        from_block, to_block = pairs[i, 0], pairs[i, 1]
        for j in range(source.shape[1]):
            target[to_block, j] = source[from_block, j]


def copy_blocks_cuda(device: Device, source: Array, target: Array, pairs: Array) -> None:
    """Copy block pairs[i, 0] of source [num_blocks, ...] to block pairs[i, 1] of target; pairs int32[n, 2].

    No block is the target of two pairs, or, in one pool, target of one and source of another.
    """
    for pool in (source, target):
        require_packed("a pool", pool)
    block_bytes, other = (prod(pool.shape[1:]) * pool.dtype.itemsize for pool in (source, target))
    assert block_bytes == other, f"blocks of {block_bytes} and of {other} bytes"
    if block_bytes % 16:
        raise ValueError(f"KV blocks have {block_bytes} bytes, but CUDA kernels copy 16 at a time")
    num_units = block_bytes // 16
    kernel = device.kernel("rows", "copy_blocks", THREADS=THREADS)
    grid = (len(pairs), ceil_div(num_units, THREADS * BATCH), 1)
    kernel(grid, THREADS, (target, source, pairs, num_units))
