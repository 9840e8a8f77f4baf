"""Attention over the paged KV cache: the decode and the prefill twin over one `attend`.

A tile of work is a few consecutive queries of one sequence and the heads that share one KV head: its rows
are (query, head) pairs. Keys and values are walked in tiles of KV_TILE tokens counted from position 0, and a
row skips what it must not see, so its arithmetic does not depend on the tile, the chunk or the batch it came
in. Online softmax: m is the running maximum, l the running sum of weights, acc the weighted values.
"""

from typing import Any, NamedTuple

import numpy as np

from cupaged.jit import njit, prange
from cupaged.kernels.bits import exp
from cupaged.kernels.tile import VECTOR, Places, multiply_rows

KV_TILE = 128  # tokens, a multiple of every block size
QUERY_ROWS = 32  # rows of a prefill tile; with KV_TILE scores each they stay in the first-level cache
VALUE_ROWS = 4  # rows that share one load of the values


class Mask(NamedTuple):
    """What a query may see, and what is done to its scores."""

    scale: float
    sliding_window: int  # tokens, the query's own included; 0 = all
    softcap: float  # 0 = off


class Rows(NamedTuple):
    """The state of one tile's rows."""

    q: Any  # float32[rows * head_dim], scaled
    scores: Any  # float32[rows * KV_TILE], then the weights
    acc: Any  # float32[rows * head_dim]
    m: Any  # float32[rows]
    l: Any  # float32[rows]  # noqa: E741
    first: Any  # int64[rows], the row sees the tokens [first, last)
    last: Any  # int64[rows]
    scratch: Any  # float32[KV_TILE]


@njit
def tree_sum(values: Any, start: int, scratch: Any) -> Any:
    """Add KV_TILE numbers pairwise, in an order that no compiler may change."""
    for j in range(KV_TILE // 2):
        scratch[j] = values[start + j] + values[start + KV_TILE // 2 + j]
    width = KV_TILE // 4
    while width > 0:
        for j in range(width):
            scratch[j] += scratch[width + j]
        width //= 2
    return scratch[0]


@njit
def soften(scores: Any, start: int, softcap: Any) -> None:
    """Do s -> softcap * tanh(s / softcap) on one row."""
    one = np.float32(1.0)
    for j in range(start, start + KV_TILE):
        x = scores[j] / softcap
        e = exp(np.float32(-2.0) * abs(x))
        t = softcap * (one - e) / (one + e)
        scores[j] = t if x >= 0 else -t


@njit
def score_keys(rows: Rows, num_rows: int, pool: Any, place: Any, table: Any, tile: int) -> None:
    """Set the scores of the tile's tokens that some row sees."""
    block_size, head_dim = pool.shape[4], pool.shape[5]
    layer, kv_head, first, last = place
    keys = pool.reshape(-1)
    rows.scores[: num_rows * KV_TILE] = np.float32(0.0)
    begin, end = max(first, tile * KV_TILE), min(last, (tile + 1) * KV_TILE)
    for index in range(begin // block_size, (end - 1) // block_size + 1):
        block = np.int64(table[index])
        start = (((block * pool.shape[1] + layer) * 2) * pool.shape[3] + kv_head) * block_size * head_dim
        for j in range(0, block_size, VECTOR):
            c = index * block_size + j - tile * KV_TILE
            at = Places(c, KV_TILE, 0, head_dim, start + j, block_size)
            multiply_rows(rows.scores, rows.q, keys, at, num_rows, VECTOR, head_dim)


@njit
def weigh_scores(rows: Rows, row: int, head_dim: int, mask: Mask, tile: int) -> None:
    """Turn one row's scores into weights and carry its softmax on."""
    begin, end = rows.first[row] - tile * KV_TILE, rows.last[row] - tile * KV_TILE
    if begin >= KV_TILE or end <= 0:
        return
    scores, start = rows.scores, row * KV_TILE
    if mask.softcap > 0:
        soften(scores, start, mask.softcap)
    for j in range(0, begin):
        scores[start + j] = np.float32(-np.inf)
    for j in range(max(end, 0), KV_TILE):
        scores[start + j] = np.float32(-np.inf)
    m = rows.m[row]
    for j in range(start, start + KV_TILE):
        m = max(m, scores[j])
    for j in range(start, start + KV_TILE):
        scores[j] = exp(scores[j] - m)
    keep = exp(rows.m[row] - m)
    rows.m[row] = m
    rows.l[row] = rows.l[row] * keep + tree_sum(scores, start, rows.scratch)
    for d in range(row * head_dim, (row + 1) * head_dim):
        rows.acc[d] *= keep


@njit
def add_values(rows: Rows, span: Any, pool: Any, place: Any, table: Any, tile: int) -> None:
    """Add the weighted values of the tokens [begin, end) to a few rows."""
    row, num_rows, begin, end = span
    if begin >= end:
        return
    block_size, head_dim = pool.shape[4], pool.shape[5]
    layer, kv_head = place[0], place[1]
    values = pool.reshape(-1)
    for index in range(begin // block_size, (end - 1) // block_size + 1):
        token, stop = max(begin, index * block_size), min(end, (index + 1) * block_size)
        block = np.int64(table[index])
        start = (((block * pool.shape[1] + layer) * 2 + 1) * pool.shape[3] + kv_head) * block_size * head_dim
        start += (token - index * block_size) * head_dim
        a = row * KV_TILE + token - tile * KV_TILE
        at = Places(row * head_dim, head_dim, a, KV_TILE, start, head_dim)
        multiply_rows(rows.acc, rows.scores, values, at, num_rows, head_dim, stop - token)


@njit
def add_tile_values(rows: Rows, num_rows: int, pool: Any, place: Any, table: Any, tile: int) -> None:
    """Add the tile's weighted values: together where all of a few rows see a token, else row by row."""
    low, high = tile * KV_TILE, (tile + 1) * KV_TILE
    for row in range(0, num_rows, VALUE_ROWS):
        few = min(VALUE_ROWS, num_rows - row)
        begin, end = low, high
        for i in range(row, row + few):
            begin, end = max(begin, rows.first[i]), min(end, rows.last[i])
        if begin >= end:
            begin = end = high
        # Each row alone up to `begin`, all of them to `end`, each row alone from there.
        for step in range(2 * few + 1):
            i = row + step % (few + 1)
            if step == few:
                span = (row, few, begin, end)
            elif step < few:
                span = (i, 1, max(low, rows.first[i]), min(begin, rows.last[i]))
            else:
                i = row + step - few - 1
                span = (i, 1, max(end, rows.first[i]), min(high, rows.last[i]))
            add_values(rows, span, pool, place, table, tile)


@njit
def create_rows(num_rows: int, head_dim: int) -> Rows:
    """Make the state of a tile's rows."""
    return Rows(
        np.empty(num_rows * head_dim, np.float32),
        np.empty(num_rows * KV_TILE, np.float32),
        np.zeros(num_rows * head_dim, np.float32),
        np.full(num_rows, -np.inf, np.float32),
        np.zeros(num_rows, np.float32),
        np.empty(num_rows, np.int64),
        np.empty(num_rows, np.int64),
        np.empty(KV_TILE, np.float32),
    )


@njit
def attend(q: Any, pool: Any, place: Any, table: Any, mask: Mask, sinks: Any, out: Any) -> None:
    """Attend from the queries q [few, num_heads, head_dim] at consecutive positions to their cached keys."""
    layer, kv_head, position = place
    num_heads, head_dim = q.shape[1], q.shape[2]
    group = num_heads // pool.shape[3]
    num_rows = q.shape[0] * group
    rows = create_rows(num_rows, head_dim)
    for row in range(num_rows):
        token, head = row // group, kv_head * group + row % group
        for d in range(head_dim):
            rows.q[row * head_dim + d] = q[token, head, d] * mask.scale
        if sinks.shape[0] > 0:
            rows.m[row], rows.l[row] = sinks[head], np.float32(1.0)
        rows.last[row] = position + token + 1
        window = mask.sliding_window if mask.sliding_window > 0 else rows.last[row]
        rows.first[row] = max(0, rows.last[row] - window)
    first, last = rows.first[0], rows.last[num_rows - 1]
    place = (layer, kv_head, first, last)
    for tile in range(first // KV_TILE, (last - 1) // KV_TILE + 1):
        score_keys(rows, num_rows, pool, place, table, tile)
        for row in range(num_rows):
            weigh_scores(rows, row, head_dim, mask, tile)
        add_tile_values(rows, num_rows, pool, place, table, tile)
    for row in range(num_rows):
        token, head = row // group, kv_head * group + row % group
        for d in range(head_dim):
            out[token, head, d] = rows.acc[row * head_dim + d] / rows.l[row]


# For jit.specialize; {} is the KV cache's type, f4 or u2 (the bits of bfloat16).
SIGNATURE = "void(f4[:,:,:],{}[:,:,:,:,:,::1],i8,i4[:,:],i4[::1],i4[::1],f4,i8,f4,f4[::1],f4[:,:,::1])"


@njit(parallel=True)
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
    few = max(1, QUERY_ROWS // (q.shape[1] // num_kv_heads))  # queries of a tile
    tiles = np.empty((q.shape[0], 2), np.int32)  # sequence, first token
    num_tiles = 0
    for seq in range(seq_lens.shape[0]):
        for token in range(query_start[seq], query_start[seq + 1], few):
            tiles[num_tiles, 0], tiles[num_tiles, 1] = seq, token
            num_tiles += 1
    for item in prange(num_tiles * num_kv_heads):
        seq, token = tiles[item // num_kv_heads]
        end = min(token + few, query_start[seq + 1])
        mask = Mask(scale, sliding_window, softcap)
        position = np.int64(seq_lens[seq]) - (query_start[seq + 1] - token)
        place = (layer, item % num_kv_heads, position)
        attend(q[token:end], pool, place, block_tables[seq], mask, sinks, out[token:end])
