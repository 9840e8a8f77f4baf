"""Command-line flags made from EngineConfig's fields, for every program that builds an engine."""

import argparse
import logging
import sys
from dataclasses import MISSING, fields
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

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
        name = "--" + field.name.replace("_", "-")
        if kind is bool:
            flag = parser.add_argument(name, action=argparse.BooleanOptionalAction, default=field.default)
        else:
            metavar = None if choices else kind.__name__.upper()
            flag = parser.add_argument(
                name, type=kind, choices=choices, default=field.default, metavar=metavar
            )
        default = "" if field.default is None else f" (default: {field.default})"
        # Not as an argument: before Python 3.13, a BooleanOptionalAction adds the default to it once more.
        flag.help = (text + default).replace("%", "%%")


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """Build the EngineConfig from parsed flags; ValueError as from EngineConfig itself."""
    return EngineConfig(**{field.name: getattr(args, field.name) for field in fields(EngineConfig)})


def is_watched() -> bool:
    """Return whether a human sees stderr."""
    return sys.stderr.isatty()


def say_loading(config: EngineConfig) -> None:
    """Give a sign of life where a human watches; bars follow where something takes long."""
    if is_watched():
        print(f"Loading {config.model} ...", file=sys.stderr)


def show_log() -> None:
    """Show on stderr what the engine says: how it plans its memory, warnings, failures.

    For programs only. Used as a library, the engine says nothing below a warning.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    logger = logging.getLogger("cupaged")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)


def _kind(hint: Any) -> tuple[type, tuple[str, ...] | None]:
    """Return the type of a flag's value, and its choices where the field is a Literal."""
    if get_origin(hint) is Literal:
        return str, get_args(hint)
    if get_origin(hint) in (UnionType, Union):  # the latter of a Literal | None
        return _kind(next(arg for arg in get_args(hint) if arg is not type(None)))
    return hint, None
