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
    values = {"int": "32", "float": "0.5", "str": "x"}
    changed = 0
    for field in fields(EngineConfig)[1:]:
        kind = "float" if field.name == "gpu_memory_utilization" else "int"
        if field.name in ("tokenizer", "chat_template"):
            kind = "str"
        text = {"dtype": "float32", "device": "cpu", "generation_config": "none"}.get(
            field.name, values[kind]
        )

        config = parse("model", "--" + field.name.replace("_", "-"), text)

        changed += getattr(config, field.name) != field.default
    assert changed == len(fields(EngineConfig)) - 1


def test_bad_choice_is_an_argparse_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("model", "--dtype", "int8")
    assert "invalid choice" in capsys.readouterr().err
