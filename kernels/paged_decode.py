"""Attention of one new token a sequence over the paged KV cache, on tensor cores, each context in splits.

The twin is paged_attention_cpu. How many splits a step has is the host's to know: it decides the grid. Where
the host cannot say, because a CUDA graph keeps its grid, most_splits and blocks_at_once do.
"""

from typing import NamedTuple

import numpy as np

from cupaged.kernels.attention import element_of, score_factors, strides_of, window_of
from cupaged.kernels.launch import Array, Device, ceil_div

# Tokens, a block's work for one KV head: 256 KiB of keys and values at head_dim 128. What it leaves to merge
# is 1.6 % of that (group 4, written and read), and 8k tokens still make 16 blocks a KV head.
SPLIT = 512
MAX_GROUP = 16  # query heads of a KV head, the rows of one mma tile
# Half tiles of 16 tokens in the shared memory of each of 4 warps, by head_dim; all but one are in flight.
# Up to head_dim 128 two blocks live on an SM of sm_80; any fits the 99 KiB that a block may have on sm_89.
SLOTS = {64: 5, 80: 5, 96: 5, 128: 4, 192: 3, 256: 2}
THREADS = 128
TILE = 16  # tokens
MAX_DEPTH = 20  # 16-byte copies of a thread of paged_decode_combine that are in flight: 40 KiB of a block
SHARED_BYTES = 228 << 10  # of an SM of sm_90 and sm_100, of which each block takes 1 KiB for itself


class Decodes(NamedTuple):
    """The sequences [first, end) of a step, which one launch serves, and what it has room for."""

    first: int
    end: int
    max_splits: int  # all of theirs, or more
    max_seq_len: int  # of the longest, or more


def splits_of(seq_lens: Array, sliding_window: int) -> Array:
    """Return each sequence's splits, of int32[num_seqs] on the host; padding has none."""
    first = np.maximum(seq_lens - window_of(sliding_window), 0) // TILE * TILE
    return -((first - seq_lens) // SPLIT)


def num_splits(seq_lens: Array, sliding_window: int) -> int:
    """Return the splits of a step's sequences, int32[num_seqs] on the host."""
    return int(splits_of(seq_lens, sliding_window).sum())


def most_splits(num_seqs: int, seq_len: int, num_slots: int) -> int:
    """Return the most splits that sequences of up to seq_len tokens have in a cache of num_slots tokens.

    Whatever the window, and whether or not blocks that left it are free. Those that share blocks may have
    more: cut_decodes.
    """
    return min(num_seqs * ceil_div(seq_len, SPLIT), num_slots // SPLIT + num_seqs)


def cut_decodes(seq_lens: Array, sliding_window: int, max_splits: int) -> list[Decodes]:
    """Return the launches for a step's decodes, int32[num_decodes] on the host, in order.

    One, unless they have more than max_splits splits together. No sequence has more on its own.
    """
    splits = splits_of(seq_lens, sliding_window).tolist()
    launches: list[Decodes] = []
    first = total = 0
    for seq, own in enumerate(splits):
        if total + own > max_splits:
            launches.append(Decodes(first, seq, total, int(seq_lens[first:seq].max())))
            first, total = seq, 0
        total += own
    if splits:
        launches.append(Decodes(first, len(splits), total, int(seq_lens[first:].max())))
    return launches


def shared_bytes(head_dim: int) -> int:
    """Return the dynamic shared memory of a block of paged_decode: queries and rings, in padded rows."""
    return (TILE + 4 * TILE * SLOTS[head_dim]) * (head_dim + 8) * 2


def blocks_at_once(num_sms: int, head_dim: int) -> int:
    """Return max_blocks for a launch that has room for more splits than most steps have.

    As many blocks as the GPU holds at once, by shared memory and registers, and each walks its share of the
    splits. More would gain nothing where there is work for all, as they wait for a place; where there is not
    they would each cost a look at all lengths behind the blocks that have work. Fewer would leave SMs without
    enough loads in flight. An SM with less shared memory holds fewer, and the others wait, as they always do.
    """
    by_registers = 4 if head_dim <= 128 else 2  # MIN_BLOCKS of paged_decode.cu
    return num_sms * min(by_registers, SHARED_BYTES // (shared_bytes(head_dim) + 512 + 1024))


def paged_decode_workspace(max_splits: int, num_seqs: int, num_heads: int, head_dim: int) -> int:
    """Return the floats of workspace that paged_decode_cuda needs."""
    return max_splits * num_heads * (head_dim + 2) + num_seqs


def paged_decode_cuda(
    device: Device,
    q: Array,  # T[num_seqs or more, num_heads, head_dim], heads of a token in a row
    pool: Array,  # T[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]
    layer: int,
    block_tables: Array,  # int32[num_seqs or more, table_width]
    *,
    seq_lens: Array,  # int32[num_seqs], the query's own token included; 0 = padding
    scale: float,
    sliding_window: int,  # tokens, the query's own included; 0 = all
    softcap: float,
    sinks: Array | None,  # float32[num_heads]
    out: Array,  # T[num_seqs or more, num_heads * head_dim]
    workspace: Array,  # float32[paged_decode_workspace(...) or more]
    max_splits: int,  # num_splits(seq_lens) or more
    max_seq_len: int,  # max(seq_lens) or more
    max_blocks: int | None = None,  # of the grid; None = one for each split and KV head
) -> None:
    """Attend from each sequence's one new token to its cached keys; the grid depends on the max_* alone.

    max_* change no bit of the result.
    """
    num_heads, head_dim = q.shape[1:]
    num_kv_heads, block_size = pool.shape[3:5]
    group = num_heads // num_kv_heads
    if group > MAX_GROUP:
        raise ValueError(
            f"{num_heads} query heads share {num_kv_heads} KV heads, {group} each, but paged_decode takes at "
            f"most {MAX_GROUP}; use a model with fewer query heads a KV head"
        )
    element = element_of(q, pool, out)
    num_seqs, window = len(seq_lens), window_of(sliding_window)
    constants = {"ELEMENT": element, "HEAD_DIM": head_dim, "SPLIT": SPLIT, "SLOTS": SLOTS[head_dim]}
    needed = paged_decode_workspace(max_splits, num_seqs, num_heads, head_dim)
    assert workspace.size >= needed, f"workspace has {workspace.size} floats, the launch needs {needed}"
    num_items = max_splits * num_kv_heads
    device.kernel("paged_decode", "paged_decode", **constants)(
        (num_items if max_blocks is None else min(num_items, max_blocks), 1, 1),
        THREADS,
        (
            *(out, workspace, q, pool, block_tables, seq_lens, sinks),
            *strides_of(q, pool, layer, block_tables),
            *(num_seqs, num_kv_heads, max_splits, group, block_size, window),
            *score_factors(scale, softcap),
        ),
        shared_bytes=shared_bytes(head_dim),
    )
    most = ceil_div(min(max_seq_len, window + TILE - 1), SPLIT)  # splits of a sequence
    if most > 1:
        depth = min(ceil_div(most, THREADS // (head_dim // 4)), MAX_DEPTH)
        device.kernel("paged_decode", "paged_decode_combine", **constants)(
            (num_seqs * num_heads, 1, 1),
            THREADS,
            (out, workspace, seq_lens, sinks, num_heads, max_splits, window, depth),
            shared_bytes=depth * THREADS * 16,
        )
