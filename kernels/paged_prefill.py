"""Attention of many new tokens a sequence over the paged KV cache, on tensor cores: FlashAttention-2.

The twin is paged_attention_cpu. The grid depends on how many tokens and sequences a step has; which block
works on which rows the kernel finds out from query_start, which may be on the device only.
"""

from cupaged.kernels.attention import element_of, score_factors, strides_of, window_of
from cupaged.kernels.launch import Array, Device

THREADS = 128
MAX_SLOTS = 65535  # gridDim.y


def tile_sizes(head_dim: int) -> tuple[int, int]:
    """Return the rows (query, head) of a block and the tokens of a KV tile.

    Of a thread's 255 registers rows * head_dim / 128 hold the output and rows * kv_tile / 128 the scores. Two
    blocks share an SM of sm_80, 90 and 100, in its shared memory too, and any fits the 99 KiB of sm_89.
    """
    return (128 if head_dim <= 128 else 64), (64 if head_dim <= 192 else 32)


def paged_prefill_cuda(
    device: Device,
    q: Array,  # T[num_tokens or more, num_heads, head_dim], heads of a token in a row
    pool: Array,  # T[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]
    layer: int,
    block_tables: Array,  # int32[num_seqs or more, table_width]
    *,
    query_start: Array,  # int32[num_seqs + 1], where the new tokens of each sequence begin in the step
    seq_lens: Array,  # int32[num_seqs], tokens in the cache, the new ones included
    first_seq: int,  # those before are decodes, served by paged_decode_cuda
    scale: float,
    sliding_window: int,  # tokens, the query's own included; 0 = all
    softcap: float,
    sinks: Array | None,  # float32[num_heads]
    out: Array,  # T[num_tokens or more, num_heads * head_dim]
) -> None:
    """Attend from the new tokens of the sequences from first_seq on to the cached keys up to their own.

    A sequence without new tokens is padding, and so are tokens behind the last sequence's.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, block_size = pool.shape[3:5]
    num_seqs, group = len(seq_lens), num_heads // num_kv_heads
    element = element_of(q, pool, out)
    rows, kv_tile = tile_sizes(head_dim)
    assert block_size & (block_size - 1) == 0, f"block_size {block_size} is no power of 2"
    num_slots = num_tokens * group // rows + num_seqs - first_seq
    if num_slots > MAX_SLOTS:
        raise ValueError(
            f"a step of {num_tokens} tokens with {group} query heads a KV head makes {num_slots} tiles of "
            f"{rows} rows but a launch takes {MAX_SLOTS}; lower --max-num-batched-tokens"
        )
    if num_seqs == first_seq:
        return
    constants = {"ELEMENT": element, "HEAD_DIM": head_dim, "ROWS": rows, "KV_TILE": kv_tile}
    device.kernel("paged_prefill", "paged_prefill", **constants)(
        (num_kv_heads, num_slots, 1),
        THREADS,
        (
            *(out, q, pool, block_tables, query_start, seq_lens, sinks),
            *strides_of(q, pool, layer, block_tables),
            *(first_seq, num_seqs, num_kv_heads, group),
            *(block_size.bit_length() - 1, window_of(sliding_window)),
            *score_factors(scale, softcap),
        ),
        shared_bytes=(rows + 2 * kv_tile) * (head_dim + 8) * 2,  # queries, keys and values in padded rows
    )
