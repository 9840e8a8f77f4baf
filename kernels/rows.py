"""Moves of rows: gather, the last sampled tokens that stay on the device, and whole KV blocks."""

from typing import Any

from cupaged.jit import njit, prange


@njit(signatures=["void(f4[:,::1],i4[::1],f4[:,::1])"], parallel=True)
def gather_rows_cpu(x: Any, index: Any, out: Any) -> None:
    """Set out[i] to x[index[i]]."""
    for i in prange(index.shape[0]):
        for j in range(x.shape[1]):
            out[i, j] = x[index[i], j]


@njit
def load_last_tokens_cpu(
    row_copy: Any, rows: Any, flags: Any, query_start: Any, last_token: Any, input_ids: Any
) -> None:
    """Copy rows of last_token, then set the last input of each sequence whose flag 2 asks for it."""
    for i in range(row_copy.shape[0]):
        last_token[row_copy[i, 1]] = last_token[row_copy[i, 0]]
    for seq in range(rows.shape[0]):
        if flags[seq] & 2:
            input_ids[query_start[seq + 1] - 1] = last_token[rows[seq]]


@njit
def store_last_tokens_cpu(rows: Any, flags: Any, token_ids: Any, last_token: Any) -> None:
    """Set last_token[row] for the sequences whose flag 1 says that they sampled."""
    for seq in range(rows.shape[0]):
        if flags[seq] & 1:
            last_token[rows[seq]] = token_ids[seq]


@njit
def copy_blocks_cpu(source: Any, target: Any, pairs: Any) -> None:
    """Copy block pairs[i, 0] of source to block pairs[i, 1] of target, in order."""
    for i in range(pairs.shape[0]):
        target[pairs[i, 1]] = source[pairs[i, 0]]
