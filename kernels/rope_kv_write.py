"""Rotate q and k by their positions and scatter this step's keys and values into the paged cache."""

from typing import Any

import numpy as np

from cupaged.jit import njit, prange
from cupaged.kernels.bits import store
from cupaged.kernels.rms_norm import inverse_rms


@njit
def rotate(head: Any, cos_sin: Any) -> None:
    """Rotate the pairs (j, j + rotary_dim / 2) of one head in place; the rest passes through."""
    half = cos_sin.shape[0] // 2
    for j in range(half):
        cos, sin = cos_sin[j], cos_sin[half + j]
        a, b = head[j], head[half + j]
        head[j] = a * cos - b * sin
        head[half + j] = b * cos + a * sin


@njit
def norm_head(head: Any, weight: Any, eps: Any) -> None:
    """RMS norm of one head in place; a weight of no elements means none."""
    if weight.shape[0] > 0:
        scale = inverse_rms(head, eps)
        for j in range(head.shape[0]):
            head[j] = head[j] * scale * weight[j]


# For jit.specialize; {} is the KV cache's type, f4 or u2 (the bits of bfloat16).
SIGNATURE = (
    "void(f4[:,:,:],f4[:,:,:],f4[:,:,:],{}[:,:,:,:,:,::1],i8,i4[::1],i4[::1],f4[:,::1],f4[::1],f4[::1],f4)"
)


@njit(parallel=True)
def rope_kv_write_cpu(
    q: Any,  # float32[num_tokens, num_heads, head_dim], changed in place
    k: Any,  # float32[num_tokens, num_kv_heads, head_dim], changed in place
    v: Any,
    pool: Any,  # T[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]
    layer: int,
    positions: Any,  # int32[num_tokens]
    slot_mapping: Any,  # int32[num_tokens], -1 = padding
    cos_sin: Any,  # float32[max_positions, rotary_dim]
    q_norm: Any,  # float32[head_dim], or [0] for none
    k_norm: Any,
    eps: Any,
) -> None:
    """Norm and rotate q and k, write k (transposed in its tile) and v to the cache."""
    block_size, head_dim = pool.shape[4], pool.shape[5]
    for token in prange(q.shape[0]):
        angles = cos_sin[positions[token]]
        for h in range(q.shape[1]):
            norm_head(q[token, h], q_norm, eps)
            rotate(q[token, h], angles)
        slot = slot_mapping[token]
        if slot >= 0:
            block, offset = np.int64(slot) // block_size, np.int64(slot) % block_size
            for h in range(k.shape[1]):
                norm_head(k[token, h], k_norm, eps)
                rotate(k[token, h], angles)
                keys = pool[block, layer, 0, h].reshape(head_dim, block_size)
                values = pool[block, layer, 1, h]
                for d in range(head_dim):
                    keys[d, offset] = store(keys[d, offset], k[token, h, d])
                    values[offset, d] = store(values[offset, d], v[token, h, d])
