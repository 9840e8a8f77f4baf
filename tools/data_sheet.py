"""The data sheet at the head of a .cu file, as far as a program reads it: what a kernel moves and computes.

A sheet's `kernel NAME` parts have lines `field  expression`; `bytes`, `flops`, `shared` and `registers` are
Python expressions over the -D constants, sizeof_T, the shape names that the sheet uses, and a few functions.
They are parsed and evaluated here; nothing in this file knows a kernel.
"""

import ast
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cupaged.kernels.launch import SOURCES, ceil_div

FIELDS = ("bytes", "flops", "shared", "registers")  # of every kernel, expressions
OPTIONAL = ("unique",)  # bytes, each counted once however often it is read; without it, `bytes`
SIZEOF = {"bf16": 2, "f16": 2, "float": 4}  # bytes of a T, by -D ELEMENT
FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "ceil_div": ceil_div,
    "min": min,
    "max": max,
    "sum": sum,
    "len": len,
    "range": range,
    "zip": zip,
}

_KERNEL = re.compile(r"^// kernel (\w+)$")
_FIELD = re.compile(r"^//   (\w+) +(\S.*)$")
_CONTINUATION = re.compile(r"^//    +(\S.*)$")

# fmt: off
_ALLOWED = (
    ast.Expression, ast.Constant, ast.Name, ast.Load, ast.Store, ast.Call, ast.Tuple, ast.IfExp,
    ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.UnaryOp, ast.USub,
    ast.Compare, ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.BoolOp, ast.And, ast.Or, ast.Not,
    ast.GeneratorExp, ast.ListComp, ast.comprehension, ast.Subscript,
)
# fmt: on


@dataclass(frozen=True, slots=True)
class Sheet:
    """The fields of one kernel, as text."""

    file: str
    kernel: str
    fields: Mapping[str, str]

    def evaluate(self, field: str, variables: Mapping[str, Any]) -> int:
        """Return a field's value; `variables` are constants, shapes and lists by the names in the sheet."""
        text = self.fields.get(field)
        if text is None and field in OPTIONAL:
            text = self.fields["bytes"]
        if text is None:
            raise ValueError(
                f"{self.file}: kernel {self.kernel} has no line {field!r}; it has {sorted(self.fields)}"
            )
        where = f"{self.file}, kernel {self.kernel}, {field}"
        element = variables.get("ELEMENT")
        sizes = {"sizeof_T": SIZEOF[element]} if element else {}
        return evaluate(text, {**sizes, **variables}, where)


def evaluate(text: str, variables: Mapping[str, Any], where: str) -> int:
    """Return the integer that an expression of a sheet stands for; ValueError says what it may not have."""
    try:
        tree = ast.parse(text, mode="eval")
    except SyntaxError as error:
        raise ValueError(f"{where}: {text!r} is not an expression: {error.msg}") from None
    bound = {
        node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    for node in ast.walk(tree):
        if not isinstance(node, _ALLOWED):
            raise ValueError(
                f"{where}: a {type(node).__name__} in {text!r}; use arithmetic and {sorted(FUNCTIONS)}"
            )
        if isinstance(node, ast.Call) and not (isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS):
            raise ValueError(f"{where}: {ast.unparse(node)!r} calls none of {sorted(FUNCTIONS)}")
        if isinstance(node, ast.Name) and node.id not in {*bound, *variables, *FUNCTIONS}:
            raise ValueError(f"{where}: {node.id!r} is unknown; known are {sorted(variables)}")
    names = {"__builtins__": {}, **FUNCTIONS, **variables}  # globals, so that generators see them too
    value = eval(compile(tree, where, "eval"), names)
    if value != int(value) or value < 0:
        raise ValueError(f"{where}: {text!r} is {value}; it must be a whole number, not negative")
    return int(value)


def read(file: str, sources: Path = SOURCES) -> Mapping[str, Sheet]:
    """Return the sheets of `file`.cu by kernel; ValueError if one lacks a field."""
    text = (sources / f"{file}.cu").read_text()
    found: dict[str, dict[str, str]] = {}
    fields: dict[str, str] | None = None
    last = ""
    for line in text.split("\n"):
        if kernel := _KERNEL.match(line):
            fields = found[kernel[1]] = {}
        elif fields is None:
            continue
        elif field := _FIELD.match(line):
            last = field[1]
            fields[last] = field[2]
        elif last in fields and (more := _CONTINUATION.match(line)):
            fields[last] += " " + more[1]
        else:
            fields = None
    for kernel_name, sheet in found.items():
        missing = [field for field in FIELDS if field not in sheet]
        if missing:
            raise ValueError(f"{file}.cu: the data sheet of kernel {kernel_name} lacks {missing}")
    return {name: Sheet(f"{file}.cu", name, sheet) for name, sheet in found.items()}
