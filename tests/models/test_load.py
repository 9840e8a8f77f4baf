"""Families are found by name, and directories by their config.json."""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from cupaged.models import load_model_class, load_model_config
from tests.models.driver import Driver
from tools.make_tiny_model import CASES, LLAMA, make_weights, write_tiny_model


@pytest.mark.parametrize("model_type", ["gpt2", "layers", "rope", "", "../llama", "llama.config"])
def test_unknown_model_type_lists_what_there_is(model_type: str) -> None:
    with pytest.raises(ValueError, match=r"not supported; there are llama, mistral, qwen2, qwen3$"):
        load_model_class(model_type)


def test_config_is_read_by_its_family(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, LLAMA)

    assert load_model_config(tmp_path).num_layers == LLAMA["num_hidden_layers"]


@pytest.mark.parametrize(
    ("text", "complaint"), [("{", "is not valid JSON"), ("[]", "holds a list, expected an object")]
)
def test_damaged_config_is_refused(tmp_path: Path, text: str, complaint: str) -> None:
    (tmp_path / "config.json").write_text(text)

    with pytest.raises(ValueError, match=complaint):
        load_model_config(tmp_path)


def test_directory_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json does not exist; the model must be"):
        load_model_config(tmp_path)


def test_tiny_chat_model_is_a_llama(tiny_llama_dir: Path) -> None:
    assert load_model_config(tiny_llama_dir).eos_token_ids == (2, 4)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_half_precision_checkpoint_computes_as_its_float32_values(tmp_path: Path, dtype: Any) -> None:
    for name in ("half", "single"):
        write_tiny_model(tmp_path / name, CASES["qwen2"])
        rounded = {key: value.astype(dtype) for key, value in make_weights(CASES["qwen2"], 0).items()}
        if name == "single":
            rounded = {key: value.astype(np.float32) for key, value in rounded.items()}
        save_file(rounded, tmp_path / name / "model.safetensors")

    half, single = (
        Driver(tmp_path / name, max_model_len=32).prefill(0, list(range(30)), chunk=11)
        for name in ("half", "single")
    )

    np.testing.assert_array_equal(half, single)


def test_bfloat16_stays_near_float32(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, CASES["llama"])

    exact, rounded = (
        Driver(tmp_path, max_model_len=64, dtype=dtype).prefill(0, list(range(50)), chunk=50)
        for dtype in ("float32", "bfloat16")
    )

    assert 0 < np.abs(rounded - exact).max() < 0.05 * np.abs(exact).max()
