"""Mistral 7B, Nemo, Small: llama with a sliding window over all layers."""

from cupaged.config import HFConfig, ModelConfig
from cupaged.models.hf_config import decoder_config
from cupaged.models.llama import Model, weights

__all__ = ["Model", "config", "weights"]


def config(hf: HFConfig) -> ModelConfig:
    """Read config.json; a window that is null means none, one that is absent 4096, as in transformers."""
    if "layer_types" in hf:
        raise ValueError("config.json: layer_types is not supported for model_type 'mistral'; remove it")
    window = hf.get("sliding_window", int, 0 if hf.has("sliding_window") else 4096)
    return decoder_config(hf, sliding_windows=(window,) * hf.get("num_hidden_layers", int))
