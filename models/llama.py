"""Llama 2 and 3, SmolLM2, TinyLlama and what else says "llama"; the pattern of the other families."""

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from cupaged.backend.base import Array, Backend, Communicator, KVCache
from cupaged.batch import Batch
from cupaged.config import HFConfig, ModelConfig
from cupaged.models.hf_config import decoder_config
from cupaged.models.layers import DecoderLayer, Embedding, LMHead, RMSNorm, Scope
from cupaged.models.rope import cos_sin_table
from cupaged.models.table import Shard, Weight, linear


def config(hf: HFConfig) -> ModelConfig:
    """Read config.json."""
    attention_bias = hf.get("attention_bias", bool, False)
    return decoder_config(
        hf, qkv_bias=attention_bias, o_bias=attention_bias, mlp_bias=hf.get("mlp_bias", bool, False)
    )


def weights(config: ModelConfig) -> list[Weight]:
    """List the tensors: name in the checkpoint, name in the model, whole shape, how ranks divide it."""
    hidden, inner, vocab = config.hidden_size, config.intermediate_size, config.vocab_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    head = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
    column, row, whole = Shard.COLUMN, Shard.ROW, Shard.REPLICATED
    table = [
        *linear("model.embed_tokens", "embed_tokens", (vocab, hidden), whole),
        *linear(head, "lm_head", (vocab, hidden), column),
        Weight("model.norm.weight", "norm.weight", (hidden,), whole),
    ]
    for i in range(config.num_layers):
        theirs, ours = f"model.layers.{i}", f"layers.{i}"
        attn, attention, mlp = f"{theirs}.self_attn", f"{ours}.attention", f"{theirs}.mlp"
        table += [
            Weight(f"{theirs}.input_layernorm.weight", f"{ours}.attention_norm.weight", (hidden,), whole),
            *linear(f"{attn}.q_proj", f"{attention}.q", (q, hidden), column, bias=config.qkv_bias),
            *linear(f"{attn}.k_proj", f"{attention}.k", (kv, hidden), column, bias=config.qkv_bias),
            *linear(f"{attn}.v_proj", f"{attention}.v", (kv, hidden), column, bias=config.qkv_bias),
            *linear(f"{attn}.o_proj", f"{attention}.o", (hidden, q), row, bias=config.o_bias),
            Weight(f"{theirs}.post_attention_layernorm.weight", f"{ours}.mlp_norm.weight", (hidden,), whole),
            *linear(f"{mlp}.gate_proj", f"{ours}.mlp.gate", (inner, hidden), column, bias=config.mlp_bias),
            *linear(f"{mlp}.up_proj", f"{ours}.mlp.up", (inner, hidden), column, bias=config.mlp_bias),
            *linear(f"{mlp}.down_proj", f"{ours}.mlp.down", (hidden, inner), row, bias=config.mlp_bias),
        ]
    return table


class Model:
    """Embedding, decoder layers, norm, head."""

    def __init__(
        self,
        config: ModelConfig,
        backend: Backend,
        communicator: Communicator,
        weights: Mapping[str, NDArray[Any]],
        *,
        max_model_len: int,
    ) -> None:
        """Prepare all weights; max_model_len is the longest sequence, prompt and output together."""
        scope = Scope(backend, communicator, weights)
        cos_sin = backend.from_host(cos_sin_table(config, max_model_len))
        self._embed_tokens = Embedding(scope / "embed_tokens")
        self._layers = [
            DecoderLayer(scope / f"layers.{i}", config, i, cos_sin) for i in range(config.num_layers)
        ]
        self._norm = RMSNorm(scope / "norm", config.rms_norm_eps)
        tied = self._embed_tokens if config.tie_word_embeddings else None
        self._lm_head = LMHead(scope / "lm_head", config.vocab_size, tied)

    def forward(self, batch: Batch, kv_cache: KVCache) -> Array:
        """Return every token's last hidden state, after the final norm, [num_tokens, hidden_size]."""
        hidden, residual = self._embed_tokens(batch.input_ids), None
        for layer in self._layers:
            hidden, residual = layer(hidden, residual, batch, kv_cache)
        return self._norm(hidden, residual)

    def logits(self, hidden: Array) -> Array:
        """Return float32[n, vocab_size] of n rows of the last hidden state."""
        return self._lm_head(hidden)
