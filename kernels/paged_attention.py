"""Attention over the paged KV cache: the twin of both kernels, decode and prefill, and the launch of both.

A tile of work is a few consecutive queries of one sequence and the heads that share one KV head; its rows
are (query, head) pairs, and a decode is a tile of one query. Keys and values are walked in tiles of KV_TILE
tokens counted from position 0, and a row skips what it must not see, so its arithmetic does not depend on
the tile, the chunk or the batch it came in. Online softmax: m is the running maximum, l the running sum of
weights, acc the weighted values.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from cupaged.jit import njit
from cupaged.kernels.bits import exp, store
from cupaged.kernels.chunks import num_chunks
from cupaged.kernels.launch import Array, Device
from cupaged.kernels.paged_decode import MAX_GROUP, Decodes, paged_decode_cuda
from cupaged.kernels.paged_prefill import paged_prefill_cuda
from cupaged.kernels.parallel import parallel_for
from cupaged.kernels.tile import ROWS, VECTOR, Places, multiply_rows
from cupaged.kernels.tree import BLOCK, tree_max, tree_sum

KV_TILE = BLOCK  # tokens, a multiple of every block size
QUERY_ROWS = 32  # rows of a prefill tile; with KV_TILE scores each they stay in the first-level cache


class Mask(NamedTuple):
    """What a query may see, and what is done to its scores."""

    scale: float
    sliding_window: int  # tokens, the query's own included; 0 = all
    softcap: float  # 0 = off
    group: int  # query heads of a KV head


class Cache(NamedTuple):
    """Where one layer's keys and values of one KV head lie in the flat pool, in elements."""

    block_stride: int
    keys: int  # in block 0: [head_dim, block_size], so that tokens fill a vector
    values: int  # in block 0: [block_size, head_dim]
    block_size: int
    head_dim: int


@njit
def soften(scores: Any, softcap: Any) -> None:
    """Do s -> softcap * tanh(s / softcap) on one row."""
    one = np.float32(1.0)
    for j in range(KV_TILE):
        x = scores[j] / softcap
        e = exp(np.float32(-2.0) * abs(x))
        t = softcap * (one - e) / (one + e)
        scores[j] = t if x >= 0 else -t


@njit
def score_keys(scores: Any, q: Any, pool: Any, cache: Cache, table: Any, span: Any, tile: int) -> None:
    """Set the scores [num_rows, KV_TILE] of the tile's tokens within [first, last)."""
    num_rows, first, last = span
    scores[: num_rows * KV_TILE] = np.float32(0.0)
    begin, end = max(first, tile * KV_TILE), min(last, (tile + 1) * KV_TILE)
    for index in range(begin // cache.block_size, (end - 1) // cache.block_size + 1):
        start = np.int64(table[index]) * cache.block_stride + cache.keys
        for j in range(0, cache.block_size, VECTOR):
            c = index * cache.block_size + j - tile * KV_TILE
            at = Places(c, KV_TILE, 0, cache.head_dim, start + j, cache.block_size)
            multiply_rows(scores, q, pool, at, num_rows, VECTOR, cache.head_dim)


@njit
def weigh_scores(scores: Any, m: Any, scratch: Any, begin: int, end: int, softcap: Any) -> Any:
    """Turn one row's scores into weights where it sees [begin, end), else 0; return maximum and sum."""
    if softcap > 0:
        soften(scores, softcap)
    for j in range(KV_TILE):
        if j < begin or j >= end:
            scores[j] = np.float32(-np.inf)
    m = max(m, tree_max(scores, scratch))
    for j in range(KV_TILE):
        scores[j] = exp(scores[j] - m)
    return m, tree_sum(scores, scratch)


@njit
def add_values(acc: Any, scores: Any, pool: Any, cache: Cache, table: Any, span: Any, tile: int) -> None:
    """Add the weighted values of the tokens [begin, end) to a few rows of acc [num_rows, head_dim]."""
    row, num_rows, begin, end = span
    while begin < end:
        index = begin // cache.block_size
        stop = min(end, (index + 1) * cache.block_size)
        start = np.int64(table[index]) * cache.block_stride + cache.values
        b = start + (begin - index * cache.block_size) * cache.head_dim
        a = row * KV_TILE + begin - tile * KV_TILE
        at = Places(row * cache.head_dim, cache.head_dim, a, KV_TILE, b, cache.head_dim)
        multiply_rows(acc, scores, pool, at, num_rows, cache.head_dim, stop - begin)
        begin = stop


@njit
def add_tile_values(
    acc: Any, scores: Any, pool: Any, cache: Cache, table: Any, bounds: Any, tile: int
) -> None:
    """Add the tile's weighted values: together where all of a few rows see a token, else row by row.

    A weight of 0 would do, were it not that 0 times an unseen infinity is no number.
    """
    low, high = tile * KV_TILE, (tile + 1) * KV_TILE
    for row in range(0, bounds.shape[0], ROWS):
        few = min(ROWS, bounds.shape[0] - row)
        begin, end = low, high
        for i in range(row, row + few):
            begin, end = max(begin, bounds[i, 0]), min(end, bounds[i, 1])
        if begin >= end:
            begin = end = high
        for step in range(2 * few + 1):  # each row alone up to begin, all to end, each alone from there
            if step < few:
                i = row + step
                span = (i, 1, max(low, bounds[i, 0]), min(begin, bounds[i, 1]))
            elif step == few:
                span = (row, few, begin, end)
            else:
                i = row + step - few - 1
                span = (i, 1, max(end, bounds[i, 0]), min(high, bounds[i, 1]))
            if span[2] < span[3]:
                add_values(acc, scores, pool, cache, table, span, tile)


@njit
def attend(q: Any, pool: Any, cache: Cache, table: Any, mask: Mask, bounds: Any, state: Any) -> Any:
    """Return acc / l of the rows q [num_rows * head_dim], which see the tokens of their bounds.

    state float32[num_rows, 2] is m and l, as the sinks left them.
    """
    num_rows, head_dim = bounds.shape[0], cache.head_dim
    scores = np.empty(num_rows * KV_TILE, np.float32)  # then the weights
    acc = np.zeros(num_rows * head_dim, np.float32)
    scratch = np.empty(KV_TILE // 2, np.float32)
    first, last = bounds[0, 0], bounds[num_rows - 1, 1]
    for tile in range(first // KV_TILE, (last - 1) // KV_TILE + 1):
        score_keys(scores, q, pool, cache, table, (num_rows, first, last), tile)
        for row in range(num_rows):
            begin, end = bounds[row, 0] - tile * KV_TILE, bounds[row, 1] - tile * KV_TILE
            if begin < KV_TILE and end > 0:
                own = scores[row * KV_TILE : (row + 1) * KV_TILE]
                m, total = weigh_scores(own, state[row, 0], scratch, begin, end, mask.softcap)
                keep = exp(state[row, 0] - m)
                state[row, 0], state[row, 1] = m, state[row, 1] * keep + total
                for d in range(row * head_dim, (row + 1) * head_dim):
                    acc[d] *= keep
        add_tile_values(acc, scores, pool, cache, table, bounds, tile)
    for row in range(num_rows):
        for d in range(row * head_dim, (row + 1) * head_dim):
            acc[d] /= state[row, 1]
    return acc


@njit
def attend_tile(
    q: Any,
    position: int,
    first_head: int,
    pool: Any,
    cache: Cache,
    table: Any,
    mask: Mask,
    sinks: Any,
    out: Any,
) -> None:
    """Attend from q [few, num_heads, head_dim] at consecutive positions, with the heads of one KV head."""
    group, head_dim = mask.group, cache.head_dim
    num_rows = q.shape[0] * group
    scaled = np.empty(num_rows * head_dim, np.float32)
    bounds = np.empty((num_rows, 2), np.int64)  # a row sees the tokens [bounds[0], bounds[1])
    state = np.empty((num_rows, 2), np.float32)
    for row in range(num_rows):
        token, head = row // group, first_head + row % group
        for d in range(head_dim):
            scaled[row * head_dim + d] = q[token, head, d] * mask.scale
        state[row, 0] = sinks[head] if sinks.shape[0] > 0 else np.float32(-np.inf)
        state[row, 1] = np.float32(1.0) if sinks.shape[0] > 0 else np.float32(0.0)
        last = position + token + 1
        bounds[row, 0] = max(0, last - mask.sliding_window) if mask.sliding_window > 0 else 0
        bounds[row, 1] = last
    acc = attend(scaled, pool, cache, table, mask, bounds, state)
    for row in range(num_rows):
        token, head = row // group, first_head + row % group
        for d in range(head_dim):
            out[token, head, d] = store(out[token, head, d], acc[row * head_dim + d])


@njit
def attend_range(
    q: Any,
    pool: Any,
    layer: int,
    block_tables: Any,
    query_start: Any,
    seq_lens: Any,
    mask: Mask,
    sinks: Any,
    out: Any,
    tiles: Any,
    bounds: Any,
) -> None:
    """Do the items [first, last): a tile of queries and a KV head each."""
    _, num_layers, _, num_kv_heads, block_size, head_dim = pool.shape
    head_size = block_size * head_dim
    flat = pool.reshape(-1)
    few = max(1, QUERY_ROWS // mask.group)
    for item in range(*bounds):
        kv_head = item % num_kv_heads
        seq, token = tiles[item // num_kv_heads]
        end = min(token + few, query_start[seq + 1])
        position = np.int64(seq_lens[seq]) - (query_start[seq + 1] - token)
        keys = (layer * 2 * num_kv_heads + kv_head) * head_size
        values = keys + num_kv_heads * head_size
        cache = Cache(num_layers * 2 * num_kv_heads * head_size, keys, values, block_size, head_dim)
        attend_tile(
            q[token:end],
            position,
            kv_head * mask.group,
            flat,
            cache,
            block_tables[seq],
            mask,
            sinks,
            out[token:end],
        )


# For jit.specialize; {} are the types of KV cache and out, f4 or u2 (the bits of bfloat16).
SIGNATURE = "void(f4[:,:,:],{}[:,:,:,:,:,::1],i8,i4[:,:],i4[::1],i4[::1],f4,i8,f4,f4[::1],{}[:,:,::1])"


@njit
def paged_attention_cpu(
    q: Any,  # float32[num_tokens, num_heads, head_dim]
    pool: Any,  # T[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]
    layer: int,
    block_tables: Any,  # int32[num_seqs, table_width]
    query_start: Any,  # int32[num_seqs + 1]
    seq_lens: Any,  # int32[num_seqs]
    scale: Any,
    sliding_window: int,
    softcap: Any,
    sinks: Any,  # float32[num_heads], or [0] for none
    out: Any,  # float32[num_tokens, num_heads, head_dim]
) -> None:
    """Attend from every query of the step to the cached keys up to its own; a decode is one query."""
    num_kv_heads = pool.shape[3]
    group = q.shape[1] // num_kv_heads
    few = max(1, QUERY_ROWS // group)  # queries of a tile
    tiles = np.empty((q.shape[0], 2), np.int32)  # sequence, first token
    num_tiles = 0
    for seq in range(seq_lens.shape[0]):
        for token in range(query_start[seq], query_start[seq + 1], few):
            tiles[num_tiles, 0], tiles[num_tiles, 1] = seq, token
            num_tiles += 1
    items = num_tiles * num_kv_heads
    mask = Mask(scale, sliding_window, softcap, group)
    parallel_for(
        attend_range,
        items,
        num_chunks(items, 1),
        (q, pool, layer, block_tables, query_start, seq_lens, mask, sinks, out, tiles),
    )


def paged_attention_cuda(
    device: Device,
    q: Array,  # T[num_tokens, num_heads, head_dim]
    pool: Array,  # T[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim], K not transposed
    layer: int,
    block_tables: Array,  # int32[num_seqs, table_width]
    *,
    query_start: Array,  # int32[num_seqs + 1]
    seq_lens: Array,  # int32[num_seqs]
    scale: float,
    sliding_window: int,
    softcap: float,
    sinks: Array | None,  # float32[num_heads]
    out: Array,  # T[num_tokens, num_heads * head_dim]
    decodes: Sequence[Decodes],  # the first sequences, of one new token each; cut_decodes makes them
    workspace: Array,  # float32[the largest paged_decode_workspace(...) of decodes, or more]
    max_blocks: int | None = None,  # as paged_decode_cuda takes it
) -> None:
    """Attend from every query of the step to the cached keys up to its own.

    Decodes of a group that paged_decode does not take go with the prefills, where any group may be.
    """
    if q.shape[1] > MAX_GROUP * pool.shape[3]:
        decodes = ()
    shared: dict[str, Any] = {
        "scale": scale,
        "sliding_window": sliding_window,
        "softcap": softcap,
        "sinks": sinks,
    }
    num_decodes = 0
    for first, num_decodes, max_splits, max_seq_len in decodes:
        which = slice(first, num_decodes)
        paged_decode_cuda(
            device,
            q[which],
            pool,
            layer,
            block_tables[which],
            seq_lens=seq_lens[which],
            out=out[which],
            workspace=workspace,
            max_splits=max_splits,
            max_seq_len=max_seq_len,
            max_blocks=max_blocks,
            **shared,
        )
    if num_decodes < len(seq_lens):
        paged_prefill_cuda(
            device,
            q,
            pool,
            layer,
            block_tables,
            query_start=query_start,
            seq_lens=seq_lens,
            first_seq=num_decodes,
            out=out,
            **shared,
        )
