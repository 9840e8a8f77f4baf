"""Moves of rows: gather, the last sampled tokens that stay on the device, and whole KV blocks."""

from typing import Any

from cupaged.jit import njit, prange

SAMPLES, INPUT_FROM_LAST_TOKEN = 1, 2  # bits of a sequence's flags, as in batch.Flag


@njit(signatures=["void(f4[:,::1],i4[::1],f4[:,::1])"], parallel=True)
def gather_rows_cpu(x: Any, index: Any, out: Any) -> None:
    """Set out[i] to x[index[i]]."""
    for i in prange(index.shape[0]):
        for j in range(x.shape[1]):
            out[i, j] = x[index[i], j]


@njit(signatures=["void(i4[:,::1],i4[::1],i4[::1],i4[::1],i4[::1],i4[::1])"])
def load_last_tokens_cpu(
    row_copy: Any,  # int32[n, 2], rows (from, to)
    rows: Any,  # int32[num_seqs], and so flags
    flags: Any,
    query_start: Any,  # int32[num_seqs + 1]
    last_token: Any,  # int32[max_num_seqs]
    input_ids: Any,  # int32[num_tokens]
) -> None:
    """Copy rows of last_token, then set the last input of each sequence that is flagged for it."""
    for i in range(row_copy.shape[0]):
        last_token[row_copy[i, 1]] = last_token[row_copy[i, 0]]
    for seq in range(rows.shape[0]):
        if flags[seq] & INPUT_FROM_LAST_TOKEN:
            input_ids[query_start[seq + 1] - 1] = last_token[rows[seq]]


@njit(signatures=["void(i4[::1],i4[::1],i4[::1],i4[::1])"])
def store_last_tokens_cpu(rows: Any, flags: Any, token_ids: Any, last_token: Any) -> None:
    """Set last_token[row] for the sequences that sampled."""
    for seq in range(rows.shape[0]):
        if flags[seq] & SAMPLES:
            last_token[rows[seq]] = token_ids[seq]


@njit(signatures=["void(u1[:,::1],u1[:,::1],i4[:,::1])"])
def copy_blocks_cpu(source: Any, target: Any, pairs: Any) -> None:
    """Copy block pairs[i, 0] of source [num_blocks, bytes] to block pairs[i, 1] of target, in order."""
    for i in range(pairs.shape[0]):
        from_block, to_block = pairs[i, 0], pairs[i, 1]
        for j in range(source.shape[1]):
            target[to_block, j] = source[from_block, j]
