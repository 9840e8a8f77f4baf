"""How config.json maps to ModelConfig where the families agree; what none of them can run is refused here."""

from typing import Any, get_args

from cupaged.config import HFConfig, ModelConfig, RopeConfig, RopeType

DTYPES = ("float32", "float16", "bfloat16")
# Keys that some rope types or their writers use and that change nothing for ours.
HARMLESS_ROPE_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "finetuned"}


def decoder_config(hf: HFConfig, **family: Any) -> ModelConfig:
    """Read what all families have; `family` gives the ModelConfig fields in which one differs."""
    if "quantization_config" in hf:
        raise ValueError(
            "config.json has a quantization_config; quantised checkpoints are not supported yet, "
            "use one in float32, float16 or bfloat16"
        )
    act = hf.get("hidden_act", str, "silu")
    if act != "silu":
        raise ValueError(f"config.json: hidden_act {act!r} is not supported; there is 'silu'")
    hidden_size, num_heads = hf.get("hidden_size", int), hf.get("num_attention_heads", int)
    family.setdefault("head_dim", hf.get("head_dim", int, hidden_size // max(num_heads, 1)))
    return ModelConfig(
        model_type=hf.get("model_type", str),
        vocab_size=hf.get("vocab_size", int),
        hidden_size=hidden_size,
        intermediate_size=hf.get("intermediate_size", int),
        num_layers=hf.get("num_hidden_layers", int),
        num_heads=num_heads,
        num_kv_heads=hf.get("num_key_value_heads", int, num_heads),
        max_position_embeddings=hf.get("max_position_embeddings", int),
        rms_norm_eps=hf.get("rms_norm_eps", float, 1e-6),
        rope=rope_config(hf),
        tie_word_embeddings=hf.get("tie_word_embeddings", bool, False),
        dtype=_dtype(hf),
        bos_token_id=hf.get("bos_token_id", int, None),
        eos_token_ids=hf.token_ids("eos_token_id"),
        **family,
    )


def rope_config(hf: HFConfig) -> RopeConfig:
    """Read rope_theta and rope_scaling, or rope_parameters as transformers 5 writes them."""
    section = hf.section("rope_scaling" if "rope_scaling" in hf else "rope_parameters")
    rope_type = section.get("rope_type", str, section.get("type", str, "default"))
    if rope_type not in get_args(RopeType):
        known = ", ".join(get_args(RopeType))
        raise ValueError(f"config.json: rope type {rope_type!r} is not supported; there are {known}")
    unknown = section.keys() - HARMLESS_ROPE_KEYS - set(RopeConfig.__dataclass_fields__)
    if unknown:
        raise ValueError(f"config.json: rope parameters {sorted(unknown)} are not supported")
    partial = section.get("partial_rotary_factor", float, hf.get("partial_rotary_factor", float, 1.0))
    if partial != 1:
        raise ValueError(f"config.json: partial_rotary_factor {partial} is not supported; there is 1.0")
    theta = section.get("rope_theta", float, hf.get("rope_theta", float, 10000.0))
    if rope_type == "default":
        return RopeConfig(theta=theta)
    if rope_type in ("linear", "dynamic"):
        return RopeConfig(theta=theta, rope_type=rope_type, factor=section.get("factor", float))
    original = section.get("original_max_position_embeddings", int, hf.get("max_position_embeddings", int))
    original = hf.get("original_max_position_embeddings", int, original)
    if rope_type == "llama3":
        return RopeConfig(
            theta=theta,
            rope_type="llama3",
            factor=section.get("factor", float),
            original_max_position_embeddings=original,
            low_freq_factor=section.get("low_freq_factor", float),
            high_freq_factor=section.get("high_freq_factor", float),
        )
    return RopeConfig(
        theta=theta,
        rope_type="yarn",
        factor=section.get("factor", float, hf.get("max_position_embeddings", int) / original),
        original_max_position_embeddings=original,
        beta_fast=section.get("beta_fast", float, 32.0) or 32.0,
        beta_slow=section.get("beta_slow", float, 1.0) or 1.0,
        attention_factor=section.get("attention_factor", float, None),
        mscale=section.get("mscale", float, 0.0),
        mscale_all_dim=section.get("mscale_all_dim", float, 0.0),
        truncate=section.get("truncate", bool, True),
    )


def layer_windows(hf: HFConfig) -> tuple[int, ...]:
    """Return each layer's window as Qwen says it: use_sliding_window, and which layers have one."""
    num_layers = hf.get("num_hidden_layers", int)
    window = hf.get("sliding_window", int, 0 if hf.has("sliding_window") else 4096)
    if not hf.get("use_sliding_window", bool, False):
        window = 0
    if "layer_types" not in hf:
        first = hf.get("max_window_layers", int, 28)
        return tuple(window if i >= first else 0 for i in range(num_layers))
    windows = []
    for layer_type in hf.get("layer_types", list):
        if layer_type not in ("full_attention", "sliding_attention"):
            raise ValueError(
                f"config.json: layer type {layer_type!r} is not supported; "
                "there are 'full_attention' and 'sliding_attention'"
            )
        if layer_type == "sliding_attention" and not window:
            raise ValueError(
                "config.json: layer_types has 'sliding_attention' but there is no window; "
                "set use_sliding_window and sliding_window"
            )
        windows.append(window if layer_type == "sliding_attention" else 0)
    return tuple(windows)


def _dtype(hf: HFConfig) -> str:
    dtype: str = hf.get("dtype", str, hf.get("torch_dtype", str, "float32"))
    if dtype not in DTYPES:
        raise ValueError(f"config.json: dtype {dtype!r} is not supported; there are {DTYPES}")
    return dtype
