"""EngineConfig and HFConfig: validation with value and limit, and options of later versions."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupaged.config import EngineConfig, HFConfig, ModelConfig


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("block_size", 8),
        ("block_size", 17),
        ("block_size", 16.0),
        ("max_num_seqs", 0),
        ("max_num_batched_tokens", 0),
        ("max_num_batched_tokens", 1.5),
        ("max_num_batched_tokens", 2**31),
        ("max_model_len", 0),
        ("max_model_len", 1),
        ("kv_cache_memory", -1),
        ("num_threads", 0),
        ("gpu_memory_utilization", 0.0),
        ("gpu_memory_utilization", 1.5),
        ("gpu_memory_utilization", True),
        ("gpu_memory_utilization", "half"),
        ("max_model_len", True),
        ("tokenizer", 5),
        ("chat_template", {}),
        ("dtype", "int8"),
        ("dtype", np.float32),
        ("device", "tpu"),
        ("seed", None),
        ("seed", True),
        ("seed", 1.0),
        ("generation_config", "vllm"),
        ("load_format", "gguf"),
        ("quantization", "awq"),
        ("quantization", 8),
        ("quantization", np.array([1, 2])),
        ("enforce_eager", 1),
        ("enforce_eager", None),
        ("async_scheduling", "yes"),
        ("enable_prefix_caching", 1),
        ("enable_prefix_caching", None),
        ("trace_text", "no"),
        ("trace", 3),
        ("trace", True),
        ("preemption_mode", "swapping"),
        ("preemption_mode", None),
        ("scheduling_policy", "lifo"),
        ("scheduling_policy", 0),
        ("swap_space", -1),
        ("swap_space", float("nan")),
        ("swap_space", float("inf")),
        ("swap_space", 1e308),
        ("swap_space", "4"),
        ("swap_space", True),
        ("swap_bandwidth", 0),
        ("swap_bandwidth", -1.0),
        ("swap_bandwidth", float("inf")),
        ("prefill_rate", 0.0),
        ("prefill_rate", float("nan")),
        ("prefill_rate", "fast"),
    ],
)
def test_bad_option_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        EngineConfig.create("model", **{name: value})


@pytest.mark.parametrize(
    ("name", "value", "kept"),
    [
        ("max_model_len", np.int64(64), 64),
        ("block_size", np.int32(32), 32),
        ("gpu_memory_utilization", np.float32(0.5), 0.5),
        ("tokenizer", Path("a") / "b", "a/b"),
        ("chat_template", Path("file"), "file"),
        ("trace", Path("run") / "trace", "run/trace"),
        ("swap_space", np.float64(0.5), 0.5),
        ("swap_space", np.int64(4), 4),
        ("prefill_rate", np.float32(2.0), 2.0),
    ],
)
def test_numpys_numbers_and_paths_are_kept_as_pythons_own(name: str, value: Any, kept: Any) -> None:
    found = getattr(EngineConfig.create("model", **{name: value}), name)

    assert (found, type(found)) == (kept, type(kept))


@pytest.mark.parametrize(
    ("name", "neutral", "other"),
    [
        ("tensor_parallel_size", 1, 2),
        ("speculative_config", None, {"num_speculative_tokens": 3}),
        ("enable_chunked_prefill", True, False),
        ("tensor_parallel_size", np.int64(1), True),
        ("speculative_config", None, np.array([1, 2])),
        ("kv_cache_dtype", "auto", "fp8"),
    ],
)
def test_option_of_a_later_version_is_taken_at_its_neutral_value_only(
    name: str, neutral: Any, other: Any
) -> None:
    assert EngineConfig.create("model", **{name: neutral}).model == "model"
    with pytest.raises(ValueError, match=f"{name}=.*not supported yet"):
        EngineConfig.create("model", **{name: other})


@pytest.mark.parametrize("name", [None, "int8", "int8_w8a8"])
def test_quantization_is_taken_by_name(name: Any) -> None:
    assert EngineConfig.create("model", quantization=name).quantization == name


def test_unknown_quantization_is_told_with_those_there_are() -> None:
    with pytest.raises(
        ValueError, match=r"^quantization must be one of \(None, 'int8', 'int8_w8a8'\), got 'awq'$"
    ):
        EngineConfig.create("model", quantization="awq")


def test_options_of_the_memory_system_are_taken() -> None:
    options: dict[str, Any] = {
        "enable_prefix_caching": False,
        "swap_space": 0,
        "preemption_mode": "recompute",
        "swap_bandwidth": 25e9,
        "prefill_rate": 5000,
        "scheduling_policy": "priority",
        "trace": "trace.bin",
        "trace_text": True,
    }

    config = EngineConfig.create("model", **options)

    assert {name: getattr(config, name) for name in options} == options


@pytest.mark.parametrize(("name", "least"), [("swap_space", ">= 0"), ("swap_bandwidth", "> 0")])
def test_number_out_of_range_is_told_with_the_limit(name: str, least: str) -> None:
    with pytest.raises(ValueError, match=f"^{name} must be a number {least}, at most 1e.18, got -2$"):
        EngineConfig.create("model", **{name: -2})


def test_unknown_option_is_a_type_error_that_lists_the_known() -> None:
    with pytest.raises(TypeError, match=r"'max_len'.*max_model_len"):
        EngineConfig.create("model", max_len=5)


def test_hf_config_names_a_missing_key() -> None:
    with pytest.raises(ValueError, match="hidden_size"):
        HFConfig({}).get("hidden_size", int)


def test_hf_config_refuses_a_wrong_type() -> None:
    with pytest.raises(ValueError, match=r"'hidden_size' is '64', expected int"):
        HFConfig({"hidden_size": "64"}).get("hidden_size", int)


def test_hf_config_takes_null_as_absent_and_int_as_float() -> None:
    config = HFConfig({"window": None, "theta": 10000})

    assert config.get("window", int, 7) == 7
    assert config.get("theta", float) == 10000.0


def model_config(**values: Any) -> ModelConfig:
    shape: dict[str, Any] = {
        "model_type": "llama",
        "vocab_size": 8,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 4,
        "head_dim": 2,
        "max_position_embeddings": 8,
    }
    return ModelConfig(**shape | values)


def test_model_config_refuses_heads_that_do_not_divide() -> None:
    with pytest.raises(ValueError, match=r"num_attention_heads 6 .* num_key_value_heads 4"):
        model_config(num_heads=6)


@pytest.mark.parametrize(
    ("windows", "largest"), [((), 0), ((64, 64), 64), ((32, 64), 64), ((64, 0), 0), ((0, 0), 0)]
)
def test_one_layer_without_a_window_looks_at_all(windows: tuple[int, ...], largest: int) -> None:
    assert model_config(sliding_windows=windows).max_sliding_window == largest
