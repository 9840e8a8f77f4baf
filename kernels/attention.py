"""What the launches of both attention kernels, paged_decode and paged_prefill, have in common."""

from math import e, log2

from cupaged.kernels.launch import Array, element_type, layer_place, require_packed, row_stride

HEAD_DIMS = (64, 80, 96, 128, 192, 256)
ALL_TOKENS = 2**31 - 1  # a window that has no end


def element_of(q: Array, pool: Array, out: Array) -> str:
    """Return -D ELEMENT of both kernels; ValueError if they do not take such heads."""
    num_heads, head_dim = q.shape[1:]
    if head_dim not in HEAD_DIMS:
        raise ValueError(
            f"head_dim {head_dim} has no attention kernels, there are some for {list(HEAD_DIMS)}; use "
            "device='cpu' for this model"
        )
    if q.dtype.itemsize != 2:
        raise ValueError(f"dtype {q.dtype} has no attention kernels; use bfloat16 or float16")
    assert num_heads % pool.shape[3] == 0, f"{num_heads} query heads, {pool.shape[3]} KV heads"
    assert pool.shape[5] == head_dim, f"heads of {head_dim} dimensions, in the cache of {pool.shape[5]}"
    require_packed("out", out)
    return element_type(q, pool, out)


def strides_of(q: Array, pool: Array, layer: int, block_tables: Array) -> tuple[int, int, int, int]:
    """Return q_stride, block_stride, layer_offset and table_stride, in elements, as kernels take them."""
    return row_stride(q, inner=2, unit=16), *layer_place(pool, layer), row_stride(block_tables)


def window_of(sliding_window: int) -> int:
    """Return the tokens that a query sees, its own included."""
    if sliding_window < 0:
        raise ValueError(f"sliding_window is {sliding_window} but must be positive, or 0 for all tokens")
    return sliding_window or ALL_TOKENS


def score_factors(scale: float, softcap: float) -> tuple[float, float]:
    """Return what makes q k^T the exponents of 2 of weights: 2^(factor * q k^T), or, with a softcap,
    2^(factor * tanh x) with e^2x = 2^(tanh_factor * q k^T); tanh_factor is 0 without.

    The host knows both, so the kernels read them where they use them and spend no register on them.
    """
    if not scale > 0.0:
        raise ValueError(f"attention scale is {scale} but must be positive; see the model's config.json")
    if not softcap >= 0.0:
        raise ValueError(f"attention softcap is {softcap} but must be positive, or 0 for none")
    if softcap == 0.0:
        return scale * log2(e), 0.0
    return softcap * log2(e), 2.0 * log2(e) * scale / softcap
