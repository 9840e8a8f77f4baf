"""generation_config.json: defaults for sampling, EOS ids, and what is wrong with the file."""

import json
from pathlib import Path
from typing import Any

import pytest

from cupaged.engine.generation_config import read_generation_config


def write(path: Path, values: Any) -> Path:
    text = values if isinstance(values, str) else json.dumps(values)
    (path / "generation_config.json").write_text(text, encoding="utf-8")
    return path


def test_fields_that_we_know_become_sampling_params(tmp_path: Path) -> None:
    values = {"temperature": 0.6, "top_k": 20, "max_new_tokens": 64, "do_sample": True, "top_p": None}

    found = read_generation_config(write(tmp_path, values)).sampling_params

    assert found == {"temperature": 0.6, "top_k": 20, "max_tokens": 64}


@pytest.mark.parametrize(("eos", "expected"), [(2, (2,)), ([2, 4], (2, 4)), (None, ()), ([], ())])
def test_eos_is_one_id_or_a_list(tmp_path: Path, eos: Any, expected: tuple[int, ...]) -> None:
    assert read_generation_config(write(tmp_path, {"eos_token_id": eos})).eos_token_ids == expected


@pytest.mark.parametrize("values", [{"repetition_penalty": 1.1}, {"temperature": "hot"}])
def test_what_cannot_be_followed_is_left_out_with_a_warning(
    tmp_path: Path, values: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert read_generation_config(write(tmp_path, values)).sampling_params == {}
    assert f"generation_config.json: {next(iter(values))}" in caplog.text


@pytest.mark.parametrize("values", ["{", "[1]", {"eos_token_id": "</s>"}, {"eos_token_id": [True]}])
def test_a_damaged_file_is_named(tmp_path: Path, values: Any) -> None:
    with pytest.raises(ValueError, match=r"generation_config\.json"):
        read_generation_config(write(tmp_path, values))


def test_no_file_no_defaults(tmp_path: Path) -> None:
    assert read_generation_config(tmp_path) == ({}, ())
