"""Attention over the paged KV cache: the twin of both kernels, decode and prefill, and the launch of both.

How work is cut is attention_plan.py's to say; what is done with it, attend.py's. groups.py knows the paged
cache; tile.py has the inner loops.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from cupaged.jit import njit
from cupaged.kernels.attend import Step, attend_units, record_size
from cupaged.kernels.attention_plan import Heads, Mask, plan_units, queries_of_unit
from cupaged.kernels.groups import Cache
from cupaged.kernels.launch import Array, Device
from cupaged.kernels.paged_decode import MAX_GROUP, Decodes, paged_decode_cuda
from cupaged.kernels.paged_prefill import paged_prefill_cuda
from cupaged.kernels.parallel import parallel_for

# For jit.specialize; {} are the types of KV cache and out, f4 or u2 (the bits of bfloat16).
SIGNATURE = "void(f4[:,:,:],{}[:,:,:,:,:,::1],i8,i4[:,:],i4[::1],i4[::1],f4,i8,f4,f4[::1],{}[:,:,::1])"


@njit
def paged_attention_cpu(
    q: Any,  # float32[num_tokens, num_heads, head_dim], a head's in a row
    pool: Any,  # T[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]
    layer: int,
    block_tables: Any,  # int32[num_seqs, table_width]
    query_start: Any,  # int32[num_seqs + 1]
    seq_lens: Any,  # int32[num_seqs]
    scale: Any,
    sliding_window: int,
    softcap: Any,
    sinks: Any,  # float32[num_heads], or [0] for none
    out: Any,  # float32 or bfloat16 [num_tokens, num_heads, head_dim]
) -> None:
    """Attend from every query of the step to the cached keys up to its own; a decode is one query."""
    num_kv_heads, block_size, head_dim = pool.shape[3], pool.shape[4], pool.shape[5]
    heads = Heads(num_kv_heads, q.shape[1] // num_kv_heads, head_dim)
    part = num_kv_heads * block_size * head_dim
    cache = Cache(pool.shape[1] * 2 * part, layer * 2 * part, (layer * 2 + 1) * part, block_size)
    mask = Mask(scale, sliding_window, softcap)
    plan = plan_units(query_start, seq_lens, mask, heads)
    most = min(queries_of_unit(heads.group), q.shape[0]) * heads.group
    partial = np.empty(plan.slots * record_size(head_dim), np.float32)
    step = Step(
        q, pool.reshape(-1), cache, heads, block_tables, mask, sinks, most=most, partial=partial, out=out
    )
    for adding in range(1 if plan.slots == 0 else 2):
        pieces = plan.num_sums if adding else plan.cuts.shape[0] - 1
        parallel_for(attend_units, pieces, pieces, (plan, adding > 0, step))


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
