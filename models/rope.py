"""Rotary position embedding: the table of cosines and sines for every way of stretching it.

Float32 throughout, in the order of operations of Hugging Face transformers, because at position 100,000
the last bit of a frequency moves an angle by hundredths. Small host tables, so plain NumPy.
"""

from math import ceil, floor, log, pi
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupaged.config import ModelConfig, RopeConfig

Floats = NDArray[Any]  # float32


def cos_sin_table(config: ModelConfig, max_model_len: int) -> Floats:
    """Return float32[max_model_len, head_dim]: cosines, then sines, of every position the engine may meet.

    Its length is max_model_len, which may exceed max_position_embeddings. Dynamic NTK gets one base for all
    positions: the original one if max_model_len is at most max_position_embeddings, else the one that
    transformers uses for a prompt of max_model_len tokens. A base that grew with each sequence, as theirs
    does, would contradict the keys that are already in the cache.
    """
    inv_freq = inverse_frequencies(config, max_model_len)
    angles = np.arange(max_model_len, dtype=np.float32)[:, None] * inv_freq  # [max_model_len, head_dim // 2]
    table = np.concatenate((np.cos(angles), np.sin(angles)), axis=1)
    table *= np.float32(attention_factor(config.rope))
    return table


def inverse_frequencies(config: ModelConfig, max_model_len: int) -> Floats:
    """Return float32[head_dim // 2], the radians per position of each pair of dimensions."""
    rope, dim = config.rope, config.head_dim
    original = rope.original_max_position_embeddings or config.max_position_embeddings
    theta = rope.theta
    if rope.rope_type == "dynamic":
        theta = _dynamic_base(rope, dim, original, max_model_len)
    powers = _powers(theta, dim)
    if rope.rope_type == "yarn":
        return _yarn(rope, powers, original)
    inv_freq: Floats = 1 / powers
    if rope.rope_type == "linear":
        inv_freq /= np.float32(rope.factor)
    elif rope.rope_type == "llama3":
        inv_freq = _llama3(rope, inv_freq, original)
    return inv_freq


def attention_factor(rope: RopeConfig) -> float:
    """Return what cosines and sines are multiplied by, 1 unless YaRN says otherwise."""
    if rope.rope_type != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _mscale(rope.factor, rope.mscale) / _mscale(rope.factor, rope.mscale_all_dim)
    return _mscale(rope.factor, 1.0)


def _mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * log(factor) + 1.0 if factor > 1 else 1.0


def _powers(base: float, dim: int) -> Floats:
    """Return float32[dim // 2], base ** (2 i / dim): the positions per radian."""
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    powers: Floats = np.power(np.float32(base), exponents)
    return powers


def _dynamic_base(rope: RopeConfig, dim: int, original: int, max_model_len: int) -> float:
    stretch = rope.factor * max(max_model_len, original) / original - (rope.factor - 1)
    return float(rope.theta * stretch ** (dim / (dim - 2)))


def _llama3(rope: RopeConfig, inv_freq: Floats, original: int) -> Floats:
    """Divide low frequencies by the factor, keep high ones, blend those between."""
    low, high = rope.low_freq_factor, rope.high_freq_factor
    wavelength = 2 * pi / inv_freq  # positions per turn
    scaled = np.where(wavelength > original / low, inv_freq / np.float32(rope.factor), inv_freq)
    smooth = (original / wavelength - low) / (high - low)
    blended = (1 - smooth) * scaled / rope.factor + smooth * scaled
    between = (wavelength >= original / high) & (wavelength <= original / low)
    return np.where(between, blended, scaled).astype(np.float32)


def _yarn(rope: RopeConfig, powers: Floats, original: int) -> Floats:
    """Blend from unstretched (high frequencies) to stretched by the factor (low ones) along a ramp."""
    dim = 2 * len(powers)
    low, high = (
        dim * log(original / (rotations * 2 * pi)) / (2 * log(rope.theta))
        for rotations in (rope.beta_fast, rope.beta_slow)
    )
    if rope.truncate:
        low, high = floor(low), ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # as transformers does, lest the ramp divide by zero
    ramp = np.clip((np.arange(dim // 2, dtype=np.float32) - low) / (high - low), 0, 1)
    keep = 1 - ramp.astype(np.float32)
    stretched = 1 / (np.float32(rope.factor) * powers)
    inv_freq: Floats = stretched * (1 - keep) + 1 / powers * keep
    return inv_freq
