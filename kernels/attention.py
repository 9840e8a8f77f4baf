"""What the launches of both attention kernels, paged_decode and paged_prefill, have in common."""

from math import e, log2

HEAD_DIMS = (64, 80, 96, 128, 192, 256)
ALL_TOKENS = 2**31 - 1  # a window that has no end


def score_factors(scale: float, softcap: float) -> tuple[float, float]:
    """Return what makes q k^T the exponents of 2 of weights: 2^(factor * q k^T), or, with a softcap,
    2^(factor * tanh x) with e^2x = 2^(tanh_factor * q k^T); tanh_factor is 0 without.

    The host knows both, so the kernels read them where they use them and spend no register on them.
    """
    if scale <= 0.0:
        raise ValueError(f"attention scale is {scale} but must be positive; see the model's config.json")
    if softcap == 0.0:
        return scale * log2(e), 0.0
    return softcap * log2(e), 2.0 * log2(e) * scale / softcap
