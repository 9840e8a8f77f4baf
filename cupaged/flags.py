"""Command-line flags made from EngineConfig's fields, for every program that builds an engine."""

import argparse
import sys
from dataclasses import MISSING, fields
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from cupaged.config import EngineConfig


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Add the positional MODEL and one --flag for every other field of EngineConfig."""
    hints = get_type_hints(EngineConfig)
    for field in fields(EngineConfig):
        text = field.metadata["help"]
        if field.default is MISSING:
            parser.add_argument(field.name, metavar=field.name.upper(), help=text)
            continue
        kind, choices = _kind(hints[field.name])
        default = "" if field.default is None else f" (default: {field.default})"
        name = "--" + field.name.replace("_", "-")
        if kind is bool:
            action = argparse.BooleanOptionalAction
            parser.add_argument(name, action=action, default=field.default, help=text + default)
            continue
        parser.add_argument(
            name,
            type=kind,
            choices=choices,
            default=field.default,
            metavar=None if choices else kind.__name__.upper(),
            help=(text + default).replace("%", "%%"),
        )


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """Build the EngineConfig from parsed flags; ValueError as from EngineConfig itself."""
    return EngineConfig(**{field.name: getattr(args, field.name) for field in fields(EngineConfig)})


def say_loading(config: EngineConfig) -> None:
    """Give a sign of life where a human watches: an empty cache of kernels takes a while to fill."""
    if sys.stderr.isatty():
        print(f"Loading {config.model}; the first time also compiles, for 30 s ...", file=sys.stderr)


def _kind(hint: Any) -> tuple[type, tuple[str, ...] | None]:
    """Return the type of a flag's value, and its choices where the field is a Literal."""
    if get_origin(hint) is Literal:
        return str, get_args(hint)
    if isinstance(hint, UnionType):
        return _kind(next(arg for arg in get_args(hint) if arg is not type(None)))
    return hint, None
