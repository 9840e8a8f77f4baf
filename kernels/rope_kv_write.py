"""Rotate q and k by their positions and scatter this step's keys and values into the paged cache."""

from typing import Any

import numpy as np

from cupaged.jit import njit
from cupaged.kernels.bits import store
from cupaged.kernels.chunks import num_chunks
from cupaged.kernels.launch import (
    Array,
    Device,
    ceil_div,
    element_type,
    layer_place,
    require_packed,
    row_stride,
)
from cupaged.kernels.parallel import parallel_for
from cupaged.kernels.rms_norm import inverse_rms

THREADS = 128  # a block
GRAIN = 1 << 13  # numbers that are worth a piece of a CPU's work
MAX_LANES = 32  # of a warp, that can share a head


@njit
def rotate(head: Any, cos_sin: Any, interleaved: Any) -> None:
    """Rotate pairs of one head in place: (j, j + rotary_dim / 2), or neighbours; the rest passes through."""
    half = cos_sin.shape[0] // 2
    if interleaved:
        for j in range(half):
            cos, sin = cos_sin[j], cos_sin[half + j]
            a, b = head[2 * j], head[2 * j + 1]
            head[2 * j] = a * cos - b * sin
            head[2 * j + 1] = b * cos + a * sin
        return
    for j in range(half):
        cos, sin = cos_sin[j], cos_sin[half + j]
        a, b = head[j], head[half + j]
        head[j] = a * cos - b * sin
        head[half + j] = b * cos + a * sin


@njit
def norm_head(head: Any, weight: Any, eps: Any, weight_offset: Any) -> None:
    """RMS norm of one head in place; a weight of no elements means none."""
    if weight.shape[0] > 0:
        scale = inverse_rms(head, eps)
        for j in range(head.shape[0]):
            head[j] = head[j] * scale * (weight_offset + weight[j])


@njit
def make_finite(value: Any, key: Any) -> None:
    """Replace what is not finite in a value, and then all of its key by NaN."""
    lost = False
    for j in range(value.shape[0]):
        if not abs(value[j]) < np.inf:
            value[j], lost = 0, True
    if lost:
        key[:] = np.nan


@njit
def rope_range(
    q: Any,
    k: Any,
    v: Any,
    pool: Any,
    layer: int,
    positions: Any,
    slot_mapping: Any,
    cos_sin: Any,
    q_norm: Any,
    k_norm: Any,
    eps: Any,
    weight_offset: Any,
    interleaved: Any,
    bounds: Any,
) -> None:
    """Do what rope_kv_write_cpu does for the tokens [first, last)."""
    block_size, head_dim = pool.shape[4], pool.shape[5]
    for token in range(*bounds):
        angles = cos_sin[positions[token]]
        for h in range(q.shape[1]):
            norm_head(q[token, h], q_norm, eps, weight_offset)
            rotate(q[token, h], angles, interleaved)
        slot = slot_mapping[token]
        if slot >= 0:
            block, offset = np.int64(slot) // block_size, np.int64(slot) % block_size
            for h in range(k.shape[1]):
                norm_head(k[token, h], k_norm, eps, weight_offset)
                rotate(k[token, h], angles, interleaved)
                make_finite(v[token, h], k[token, h])
                keys = pool[block, layer, 0, h].reshape(head_dim, block_size)
                values = pool[block, layer, 1, h]
                for d in range(head_dim):
                    keys[d, offset] = store(keys[d, offset], k[token, h, d])
                    values[offset, d] = store(values[offset, d], v[token, h, d])


# For jit.specialize; {} is the KV cache's type, f4 or u2 (the bits of bfloat16).
SIGNATURE = (
    "void(f4[:,:,:],f4[:,:,:],f4[:,:,:],{}[:,:,:,:,:,::1],i8,i4[::1],i4[::1],f4[:,::1],f4[::1],f4[::1],f4,"
    "f4,b1)"
)


@njit
def rope_kv_write_cpu(
    q: Any,  # float32[num_tokens, num_heads, head_dim], changed in place
    k: Any,  # float32[num_tokens, num_kv_heads, head_dim], undefined afterwards: keys are read from the cache
    v: Any,  # undefined afterwards
    pool: Any,  # T[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]
    layer: int,
    positions: Any,  # int32[num_tokens]
    slot_mapping: Any,  # int32[num_tokens], -1 = padding, or stored already
    cos_sin: Any,  # float32[max_positions, rotary_dim], cosines then sines
    q_norm: Any,  # float32[head_dim], or [0] for none
    k_norm: Any,
    eps: Any,
    weight_offset: Any,  # 0, or 1 for norms that multiply by (1 + weight)
    interleaved: Any,  # pairs are neighbours, not halves
) -> None:
    """Norm and rotate q and k, write k (transposed in its tile) and v to the cache.

    A token without a slot gets its q rotated like any, and nothing written to the cache. The cache has finite
    values only: of one that is not, the key becomes NaN, and so does what sees the token; nothing else does.
    """
    place = (pool, layer, positions, slot_mapping, cos_sin)
    norms = (q_norm, k_norm, eps, weight_offset)
    pieces = num_chunks(q.size + k.size + v.size, GRAIN)
    parallel_for(rope_range, q.shape[0], pieces, (q, k, v, *place, *norms, interleaved))


def rope_kv_write_cuda(
    device: Device,
    q: Array,  # T[num_tokens, num_heads, head_dim], changed in place
    k: Array,  # T[num_tokens, num_kv_heads, head_dim], undefined afterwards: keys are read from the cache
    v: Array,
    pool: Array,  # T[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]
    layer: int,
    positions: Array,  # int32[num_tokens]
    slot_mapping: Array,  # int32[num_tokens], -1 = padding, or stored already
    cos_sin: Array,  # float32[max_positions, rotary_dim], cosines then sines
    q_norm: Array | None = None,  # T[head_dim]
    k_norm: Array | None = None,
    eps: float = 0.0,
    weight_offset: float = 0.0,  # 1 for norms that multiply by (1 + weight)
    interleaved: bool = False,  # pairs are neighbours, not halves
) -> None:
    """Norm and rotate q and k, write k and v to the cache.

    A token without a slot gets its q rotated like any, and nothing written to the cache. The cache has finite
    values only: of one that is not, the key becomes NaN, and so does what sees the token; nothing else does.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, block_size = pool.shape[3:5]
    rotary_dim = cos_sin.shape[1]
    itemsize = q.dtype.itemsize
    pair = 32 // itemsize  # elements of a lane, two units of 16 bytes
    if head_dim % pair or head_dim > MAX_LANES * pair:
        raise ValueError(
            f"head_dim is {head_dim}, but CUDA kernels take a multiple of {pair} in {q.dtype}, "
            f"at most {MAX_LANES * pair}; use device='cpu' for this model"
        )
    assert rotary_dim % 2 == 0 <= rotary_dim <= head_dim, f"rotary_dim {rotary_dim} of {head_dim}"
    require_packed("cos_sin", cos_sin)
    lanes = 1  # of a head
    while lanes * pair < head_dim:
        lanes *= 2
    element = element_type(q, k, v, pool, q_norm, k_norm)
    kernel = device.kernel("rope_kv_write", "rope_kv_write", ELEMENT=element, THREADS=THREADS, LANES=lanes)
    shapes = (num_tokens, num_heads, num_kv_heads, head_dim, rotary_dim, block_size, int(interleaved))
    strides = (*(row_stride(x, inner=2, unit=16) for x in (q, k, v)), *layer_place(pool, layer))
    arrays = (q, k, v, pool, positions, slot_mapping, cos_sin, q_norm, k_norm)
    kernel(
        (ceil_div(num_tokens * (num_heads + 2 * num_kv_heads) * lanes, THREADS), 1, 1),
        THREADS,
        (*arrays, *shapes, *strides, eps, weight_offset),
        # Where a pair lies in two lanes, they exchange each head through shared memory as float32.
        shared_bytes=THREADS // lanes * head_dim * 4 if rotary_dim % pair else 0,
    )
