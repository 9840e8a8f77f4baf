"""A launch's arguments: packed as for the driver, checked against what the compiler knows."""

import struct
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from cupaged.kernels.launch import Array, Parameter
from tests.cuda_on_cpu.build import EmulatorError
from tests.cuda_on_cpu.library import ArraySpan, KernelType, ParameterType

ALLOCATION = 512  # bytes: CuPy's arrays begin at multiples of it


class Span(NamedTuple):
    """The bytes of an array, or of several that overlap."""

    begin: int
    end: int
    owner: int  # address of the piece of memory that they are part of
    element_bytes: int
    is_const: bool
    names: tuple[str, ...]  # of the parameters

    @property
    def phase(self) -> int:
        """Where it would begin on a GPU, modulo ALLOCATION."""
        return (self.begin - self.owner) % ALLOCATION


def _span(array: Array, parameter: Parameter) -> Span:
    begin = array.ctypes.data
    root = array
    while isinstance(root.base, np.ndarray):
        root = root.base
    owner = begin if root is array else root.ctypes.data
    end = begin
    if array.size:
        end += array.itemsize
        for size, stride in zip(array.shape, array.strides, strict=True):
            end += (size - 1) * stride
    return Span(begin, end, owner, array.itemsize, parameter.is_const, (parameter.name,))


def _join(a: Span, b: Span) -> Span:
    return Span(
        a.begin,
        max(a.end, b.end),
        a.owner,
        min(a.element_bytes, b.element_bytes),
        a.is_const and b.is_const,
        tuple(dict.fromkeys(a.names + b.names)),
    )


def _merged(spans: Iterable[Span]) -> list[Span]:
    merged: list[Span] = []
    for span in sorted(spans):
        if merged and span.begin < merged[-1].end:
            merged[-1] = _join(merged[-1], span)
        else:
            merged.append(span)
    return merged


def check_parameters(kernel: KernelType, parsed: Sequence[Parameter]) -> None:
    """Raise EmulatorError if launch.parameters read the source otherwise than the compiler did."""
    types = [kernel.parameters[i] for i in range(kernel.num_parameters)]
    compiled = [(kind.code.decode(), kind.is_const) for kind in types]
    if compiled != [(parameter.code, parameter.is_const) for parameter in parsed]:
        raise EmulatorError(
            f"{kernel.name.decode()}: launch.parameters reads {parsed}, but the compiler {compiled}"
        )


def _array_fault(array: Any, kind: ParameterType) -> str:
    if not isinstance(array, np.ndarray):
        return f"is a {type(array).__name__}, not an array"
    if kind.size not in (0, array.itemsize):
        return f"has elements of {array.itemsize} bytes, but the kernel's have {kind.size}"
    if kind.element != b" " and (kind.element == b"f") != (array.dtype.kind == "f"):
        kinds = {b"f": "floats", b"i": "integers"}
        return f"is of {array.dtype}, but the kernel's elements are {kinds[kind.element]}"
    if any(stride < 0 for stride in array.strides):
        return f"has strides {array.strides}, but a pointer is to the first byte"
    if not array.flags.writeable and not kind.is_const:
        return "is read-only, but the kernel's parameter is not const"
    return ""


def _number_fault(number: Any, kind: ParameterType) -> str:
    if isinstance(number, np.ndarray) or number is None:
        return f"is a {type(number).__name__}, not a number"
    try:
        struct.pack(kind.code.decode(), number)
    except (struct.error, OverflowError) as error:
        return f"is {number!r}: {error}"
    return ""


def pack(
    kernel: KernelType, parsed: Sequence[Parameter], args: Sequence[Any]
) -> tuple[bytes, list[ArraySpan]]:
    """Return the parameters as the driver takes them, and the arrays that they point to."""
    name = kernel.name.decode()
    if len(args) != len(parsed):
        raise EmulatorError(f"{name}: {len(args)} arguments for {len(parsed)} parameters")
    values, spans = [], []
    for i, (arg, parameter) in enumerate(zip(args, parsed, strict=True)):
        is_array = parameter.code == "P" and arg is not None
        if is_array:
            fault = _array_fault(arg, kernel.parameters[i])
        else:
            fault = _number_fault(0 if parameter.code == "P" else arg, kernel.parameters[i])
        if fault:
            raise EmulatorError(f"{name}: argument {parameter.name!r} {fault}")
        if not is_array:
            values.append(arg or 0)
            continue
        span = _span(arg, parameter)
        if span.phase % parameter.alignment:
            raise EmulatorError(
                f"{name}: argument {parameter.name!r} begins {span.phase} bytes into an allocation, but is "
                f"moved by {parameter.alignment}"
            )
        spans.append(span)
        values.append(span.begin)
    packed = struct.pack("@" + "".join(parameter.code for parameter in parsed), *values)
    if len(packed) != kernel.parameter_bytes:
        raise EmulatorError(f"{name}: {len(packed)} bytes of parameters, not {kernel.parameter_bytes}")
    return packed, [
        ArraySpan(
            name="/".join(span.names).encode(),
            data=span.begin,
            bytes=span.end - span.begin,
            phase=span.phase,
            element_bytes=span.element_bytes,
            is_const=span.is_const,
        )
        for span in _merged(spans)
    ]
