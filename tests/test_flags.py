"""Flags made from EngineConfig: every field has one, with its type, default and choices."""

import argparse
from dataclasses import fields

import pytest

from cupaged.config import EngineConfig
from cupaged.flags import add_engine_flags, engine_config


def parse(*argv: str) -> EngineConfig:
    parser = argparse.ArgumentParser()
    add_engine_flags(parser)
    return engine_config(parser.parse_args(argv))


def test_defaults_are_the_configs() -> None:
    assert parse("model") == EngineConfig(model="model")


def test_every_field_has_a_flag_that_sets_it() -> None:
    words = {
        "tokenizer": "x",
        "dtype": "float32",
        "quantization": "int8",
        "device": "cpu",
        "gpu_memory_utilization": "0.5",
        "generation_config": "none",
        "chat_template": "x",
        "load_format": "dummy",
        "preemption_mode": "swap",
        "scheduling_policy": "priority",
        "trace": "x",
    }
    for field in fields(EngineConfig)[1:]:
        name = field.name.replace("_", "-")
        if isinstance(field.default, bool):
            config = parse("model", f"--no-{name}" if field.default else f"--{name}")
        else:
            config = parse("model", f"--{name}", words.get(field.name, "32"))

        assert getattr(config, field.name) != field.default, field.name


def test_help_states_every_default_once() -> None:
    parser = argparse.ArgumentParser()
    add_engine_flags(parser)
    text = " ".join(parser.format_help().split())

    shown = [field for field in fields(EngineConfig)[1:] if field.default is not None]
    assert text.count("(default: ") == len(shown)
    assert "no CUDA graphs (default: False)" in text


@pytest.mark.parametrize("name", ["int8", "int8_w8a8"])
def test_choice_that_may_be_unset_is_taken(name: str) -> None:
    assert parse("model", "--quantization", name).quantization == name


def test_bad_choice_is_an_argparse_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("model", "--dtype", "int8")
    assert "invalid choice" in capsys.readouterr().err
