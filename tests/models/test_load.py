"""Families are found by name, and directories by their config.json."""

from pathlib import Path

import pytest

from cupaged.models import load_model_class, load_model_config
from tools.make_tiny_model import LLAMA, write_tiny_model


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
