"""Rotate q and k by their positions and scatter this step's keys and values into the paged cache."""

from typing import Any, NamedTuple

import numpy as np

from cupaged.jit import njit, njit_inner
from cupaged.kernels import simd
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
from cupaged.kernels.packed_row import packed_row
from cupaged.kernels.parallel import parallel_for
from cupaged.kernels.rms_norm import inverse_rms
from cupaged.kernels.simd import LANES

THREADS = 128  # a block
GRAIN = 1 << 12  # numbers in q, 3 us of a CPU's work
LINE = 64  # bytes of a cache line
MAX_LANES = 32  # of a warp, that can share a head


class Slot(NamedTuple):
    """Where a token's key and value of the first KV head begin in the flat pool, in elements."""

    key: int  # whose elements lie block_size apart
    value: int
    head: int  # from one head to the next


@njit_inner
def rotate_halves(heads: Any, start: int, cos_sin: Any, angle: int, half: int) -> None:
    """Rotate the pairs (j, j + half) of the head that begins at `start`, in place."""
    rest = half // LANES * LANES
    for j in range(0, rest, LANES):
        cos, sin = simd.load(cos_sin, angle + j), simd.load(cos_sin, angle + half + j)
        a, b = simd.load(heads, start + j), simd.load(heads, start + half + j)
        simd.store(heads, start + j, simd.fma(a, cos, -(b * sin)))
        simd.store(heads, start + half + j, simd.fma(b, cos, a * sin))
    for j in range(rest, half):
        cos, sin = cos_sin[angle + j], cos_sin[angle + half + j]
        a, b = heads[start + j], heads[start + half + j]
        heads[start + j] = a * cos - b * sin
        heads[start + half + j] = b * cos + a * sin


@njit_inner
def rotate_neighbours(heads: Any, start: int, cos_sin: Any, angle: int, half: int) -> None:
    """Rotate the pairs (2 j, 2 j + 1) of the head that begins at `start`, in place."""
    for j in range(half):
        cos, sin = cos_sin[angle + j], cos_sin[angle + half + j]
        a, b = heads[start + 2 * j], heads[start + 2 * j + 1]
        heads[start + 2 * j] = a * cos - b * sin
        heads[start + 2 * j + 1] = b * cos + a * sin


@njit_inner
def norm_head(head: Any, weight: Any, eps: Any, weight_offset: Any) -> None:
    """RMS norm of one head in place; a weight of no elements means none."""
    if weight.shape[0] > 0:
        scale = inverse_rms(head, eps)
        for j in range(head.shape[0]):
            head[j] = head[j] * scale * (weight_offset + weight[j])


@njit_inner
def turn_heads(heads: Any, head_dim: int, norm: Any, rotation: Any) -> None:
    """Norm and rotate a token's heads, in place; what a head has past rotary_dim passes through."""
    weight, eps, weight_offset = norm
    cos_sin, angle, half, interleaved = rotation
    for start in range(0, heads.shape[0], head_dim):
        norm_head(heads[start : start + head_dim], weight, eps, weight_offset)
        if interleaved:
            rotate_neighbours(heads, start, cos_sin, angle, half)
        else:
            rotate_halves(heads, start, cos_sin, angle, half)


@njit_inner
def make_finite(value: Any, key: Any) -> None:
    """Replace what is not finite in a value, and then all of its key by NaN."""
    lost = False
    for j in range(value.shape[0]):
        lost |= not abs(value[j]) < np.inf
    if lost:
        for j in range(value.shape[0]):
            value[j] = value[j] if abs(value[j]) < np.inf else np.float32(0.0)
            key[j] = np.nan


@njit_inner
def find_slot(slot: int, pool: Any, layer: int) -> Slot:
    """Return where the key and the value of a token with this slot go."""
    _, num_layers, _, num_kv_heads, block_size, head_dim = pool.shape
    head = block_size * head_dim
    keys = (slot // block_size * num_layers + layer) * 2 * num_kv_heads * head
    offset = slot % block_size
    return Slot(keys + offset, keys + num_kv_heads * head + offset * head_dim, head)


@njit_inner
def fetch_slot(slot: int, pool: Any, flat: Any, layer: int) -> None:
    """Ask for a slot's cache lines, if it is one; a key lies in as many as its head has, or half as many."""
    if slot >= 0:
        to, line = find_slot(slot, pool, layer), LINE // pool.itemsize
        num_kv_heads, head_dim = pool.shape[3], pool.shape[5]
        for i in range(0, num_kv_heads * to.head, line):
            simd.prefetch(flat, to.key + i)
        for value in range(to.value, to.value + num_kv_heads * to.head, to.head):
            for i in range(0, head_dim, line):
                simd.prefetch(flat, value + i)


@njit_inner
def write_slot(flat: Any, block_size: int, to: Slot, keys: Any, values: Any, room: Any) -> None:
    """Write a token's keys and values; room [head_dim] is for a key as it is stored."""
    head_dim = room.shape[0]
    for h in range(keys.shape[0] // head_dim):
        key, value = keys[h * head_dim : (h + 1) * head_dim], values[h * head_dim : (h + 1) * head_dim]
        make_finite(value, key)
        start = to.value + h * to.head
        stored = flat[start : start + head_dim]
        for d in range(head_dim):
            stored[d] = store(stored[d], value[d])
        for d in range(head_dim):
            room[d] = store(room[d], key[d])
        for d in range(head_dim):
            flat[to.key + h * to.head + d * block_size] = room[d]


@njit
def write_tokens(
    q: Any,
    k: Any,
    v: Any,
    cache: Any,
    positions: Any,
    slot_mapping: Any,
    norms: Any,
    rotation: Any,
    tokens: Any,
) -> None:
    """Do what rope_kv_write_cpu does for the tokens [first, last)."""
    (pool, layer), (q_norm, k_norm, eps, weight_offset), (cos_sin, interleaved) = cache, norms, rotation
    flat, block_size, head_dim = pool.reshape(-1), pool.shape[4], pool.shape[5]
    angles, rotary_dim = cos_sin.reshape(-1), cos_sin.shape[1]
    room = np.empty(head_dim, pool.dtype)
    both, weights = (q, k), (q_norm, k_norm)
    first, last = tokens
    for token in range(first, last):
        if token == first:
            fetch_slot(np.int64(slot_mapping[token]), pool, flat, layer)
        if token + 1 < last:
            fetch_slot(np.int64(slot_mapping[token + 1]), pool, flat, layer)
        turn = (angles, np.int64(positions[token]) * rotary_dim, rotary_dim // 2, interleaved)
        for i in range(2):
            turn_heads(packed_row(both[i], token), head_dim, (weights[i], eps, weight_offset), turn)
        if slot_mapping[token] >= 0:
            to = find_slot(np.int64(slot_mapping[token]), pool, layer)
            write_slot(flat, block_size, to, packed_row(k, token), packed_row(v, token), room)


# For jit.specialize; {} is the KV cache's type, f4 or u2 (the bits of bfloat16).
SIGNATURE = (
    "void(f4[:,:,:],f4[:,:,:],f4[:,:,:],{}[:,:,:,:,:,::1],i8,i4[::1],i4[::1],f4[:,::1],f4[::1],f4[::1],f4,"
    "f4,b1)"
)


@njit
def rope_kv_write_cpu(
    # The heads of a token lie in one piece.
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
    cache, norms = (pool, layer), (q_norm, k_norm, eps, weight_offset)
    args = (q, k, v, cache, positions, slot_mapping, norms, (cos_sin, interleaved))
    parallel_for(write_tokens, q.shape[0], num_chunks(q.size, GRAIN), args)


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
