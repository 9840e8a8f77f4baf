"""How each family reads config.json, and what it refuses."""

from typing import Any

import pytest

from cupaged.config import HFConfig, ModelConfig, RopeConfig
from cupaged.models import load_model_class
from tools.make_tiny_model import LLAMA, MISTRAL, QWEN2, QWEN3


def read(values: dict[str, Any], **changes: Any) -> ModelConfig:
    return load_model_class(values["model_type"]).config(HFConfig(values | changes))


def test_llama_without_optional_keys_has_transformers_defaults() -> None:
    required = {
        key: LLAMA[key]
        for key in (
            "model_type",
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "max_position_embeddings",
        )
    }

    config = read(required)

    assert config.num_kv_heads == config.num_heads
    assert config.head_dim == 12
    assert config.rms_norm_eps == 1e-6
    assert config.rope == RopeConfig(theta=10000.0)
    assert (config.tie_word_embeddings, config.qkv_bias, config.o_bias, config.mlp_bias) == (False,) * 4
    assert config.dtype == "float32"
    assert (config.bos_token_id, config.eos_token_ids) == (None, ())


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"])
def test_missing_key_is_named(key: str) -> None:
    values = {name: value for name, value in LLAMA.items() if name != key}

    with pytest.raises(ValueError, match=f"config.json has no '{key}'"):
        read(values)


@pytest.mark.parametrize(
    ("eos", "expected"), [(2, (2,)), ([128001, 128008], (128001, 128008)), (None, ()), ([], ())]
)
def test_eos_is_one_id_or_a_list(eos: Any, expected: tuple[int, ...]) -> None:
    assert read(LLAMA, eos_token_id=eos).eos_token_ids == expected


@pytest.mark.parametrize("eos", ["2", [2, "3"], [True], 2.5])
def test_eos_of_another_type_is_refused(eos: Any) -> None:
    with pytest.raises(ValueError, match="eos_token_id"):
        read(LLAMA, eos_token_id=eos)


def test_dtype_goes_before_torch_dtype() -> None:
    assert read(LLAMA, torch_dtype="float16").dtype == "float16"
    assert read(LLAMA, torch_dtype="float16", dtype="bfloat16").dtype == "bfloat16"


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; there is 'silu'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised checkpoints are not supported yet"),
        ({"torch_dtype": "float8_e4m3fn"}, "dtype 'float8_e4m3fn' is not supported"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        (
            {"rope_scaling": {"rope_type": "longrope"}},
            "rope type 'longrope' is not supported; there are default, linear,",
        ),
        ({"rope_scaling": {"type": "default", "mrope_section": [1, 2]}}, "'mrope_section'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "'full_attention'"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling has no 'factor'"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "rope factor is 0.0, must be above 0"),
        ({"num_attention_heads": 0}, "num_heads is 0"),
        ({"num_key_value_heads": 3}, "no multiple of"),
    ],
)
def test_what_cannot_run_is_refused(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        read(LLAMA, **changes)


def test_rope_parameters_of_transformers_5_are_read() -> None:
    values = {key: value for key, value in LLAMA.items() if key != "rope_theta"}

    rope = read(values, rope_parameters={"rope_type": "linear", "rope_theta": 5e5, "factor": 2}).rope

    assert rope == RopeConfig(theta=5e5, rope_type="linear", factor=2.0)


def test_rope_type_goes_before_the_older_type() -> None:
    scaling = {"type": "linear", "rope_type": "dynamic", "factor": 2.0}

    assert read(LLAMA, rope_scaling=scaling).rope.rope_type == "dynamic"


def test_yarn_without_a_factor_takes_the_ratio_of_lengths() -> None:
    scaling = {"type": "yarn", "original_max_position_embeddings": 32}

    assert read(LLAMA, rope_scaling=scaling).rope.factor == 4.0


@pytest.mark.parametrize(("window", "expected"), [(None, 0), (64, 64)])
def test_mistral_window_null_means_none(window: int | None, expected: int) -> None:
    assert read(MISTRAL, sliding_window=window).sliding_windows == (expected,) * 3


def test_mistral_window_absent_means_4096() -> None:
    values = {key: value for key, value in MISTRAL.items() if key != "sliding_window"}

    assert read(values).sliding_windows == (4096,) * 3


def test_mistral_with_layer_types_is_refused() -> None:
    with pytest.raises(ValueError, match="layer_types is not supported"):
        read(MISTRAL, layer_types=["full_attention"] * 3)


def test_qwen2_has_biases_on_qkv_only() -> None:
    config = read(QWEN2)

    assert (config.qkv_bias, config.o_bias, config.mlp_bias) == (True, False, False)


def test_qwen_window_needs_use_sliding_window() -> None:
    window = {"sliding_window": 9, "max_window_layers": 1}

    assert read(QWEN2, **window).sliding_windows == (0, 0, 0)
    assert read(QWEN2, use_sliding_window=True, **window).sliding_windows == (0, 9, 9)


def test_qwen_layer_types_go_before_max_window_layers() -> None:
    types = ["sliding_attention", "full_attention", "sliding_attention"]

    config = read(QWEN3, use_sliding_window=True, sliding_window=5, layer_types=types)

    assert config.sliding_windows == (5, 0, 5)


@pytest.mark.parametrize(
    ("types", "complaint"),
    [
        (["full_attention"] * 2, "2 layer types for 3 layers"),
        (["full_attention", "chunked_attention", "full_attention"], "'chunked_attention' is not supported"),
        (["sliding_attention"] * 3, "there is no window"),
    ],
)
def test_layer_types_that_make_no_sense_are_refused(types: list[str], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        read(QWEN3, layer_types=types)


def test_qwen3_head_dim_is_free_of_hidden_size() -> None:
    assert read(QWEN3).head_dim == 16
    assert read({key: value for key, value in QWEN3.items() if key != "head_dim"}).head_dim == 128
