"""Qwen3 (dense): qwen2 with a norm on each head of q and k, and a head_dim free of hidden_size."""

from cupaged.config import HFConfig, ModelConfig
from cupaged.models import llama
from cupaged.models.hf_config import decoder_config, layer_windows
from cupaged.models.llama import Model
from cupaged.models.table import Shard, Weight

__all__ = ["Model", "config", "weights"]


def config(hf: HFConfig) -> ModelConfig:
    """Read config.json."""
    bias = hf.get("attention_bias", bool, False)
    return decoder_config(
        hf,
        head_dim=hf.get("head_dim", int, 128),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        sliding_windows=layer_windows(hf),
    )


def weights(config: ModelConfig) -> list[Weight]:
    """List llama's tensors and the norms of q and k."""
    return llama.weights(config) + [
        Weight(
            f"model.layers.{i}.self_attn.{norm}.weight",
            f"layers.{i}.attention.{norm}.weight",
            (config.head_dim,),
            Shard.REPLICATED,
        )
        for i in range(config.num_layers)
        for norm in ("q_norm", "k_norm")
    ]
