"""Qwen2 and Qwen2.5: llama with biases on q, k and v, and windows on some layers if asked for."""

from cupaged.config import HFConfig, ModelConfig
from cupaged.models.hf_config import decoder_config, layer_windows
from cupaged.models.llama import Model, weights

__all__ = ["Model", "config", "weights"]


def config(hf: HFConfig) -> ModelConfig:
    """Read config.json."""
    return decoder_config(hf, qkv_bias=True, sliding_windows=layer_windows(hf))
