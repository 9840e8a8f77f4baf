"""Words: many arrays and numbers as one array, for compiled functions that Python calls in every step.

Numba unboxes each array of an argument anew in every call: half a microsecond, and thrice that behind kernels
that have driven all else out of the caches. Of words it unboxes one array, and the function reads those that
it uses.
"""

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numba as _numba
import numpy as np
from llvmlite import ir
from numba import typeof as _typeof
from numba.core import types
from numba.extending import intrinsic
from numba.np import arrayobj as _arrayobj

numba: Any = _numba  # untyped
typeof: Any = _typeof
arrayobj: Any = _arrayobj
Words = Any  # int64[n]; without the compiler, the tuple itself
T = TypeVar("T", bound=tuple[Any, ...])

_WORD = ir.IntType(64)


def to_words(value: tuple[Any, ...]) -> Words:
    """Return a tuple of C-contiguous arrays, 64-bit numbers and such tuples as one array.

    Whoever has the words must keep the arrays.
    """
    return value if numba.config.DISABLE_JIT else np.array([*_words(value)], np.int64)


def _words(value: Any) -> Iterator[int]:
    if isinstance(value, tuple):
        for element in value:
            yield from _words(element)
    elif isinstance(value, np.ndarray):
        assert value.flags.c_contiguous, f"an array with gaps: strides {value.strides}"
        yield from (value.ctypes.data, *value.shape)
    elif isinstance(value, float | np.uint64):
        yield int(np.array(value).view(np.int64))
    else:
        yield value


def reader(example: T) -> Callable[[Words], T]:
    """Return what gives compiled functions a tuple like `example` back from its words."""
    if numba.config.DISABLE_JIT:
        return lambda words: words
    kind = typeof(example)

    def type_read(_context: Any, words: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            array = arrayobj.make_array(signature.args[0])(context, builder, args[0])
            return _read(context, builder, kind, _loads(builder, array.data))

        return kind(words), emit

    read: Any = intrinsic(type_read)
    return read  # type: ignore[no-any-return]


def _loads(builder: Any, data: Any) -> Iterator[Any]:
    """Go through the words, each of which is loaded when it is asked for."""
    place = 0
    while True:
        yield builder.load(builder.gep(data, [_WORD(place)]))
        place += 1


def _read(context: Any, builder: Any, kind: Any, words: Iterator[Any]) -> Any:
    """Return a value of that type, made of the next words."""
    if isinstance(kind, types.BaseTuple):
        elements: Any = kind
        return context.make_tuple(builder, kind, [_read(context, builder, each, words) for each in elements])
    if isinstance(kind, types.Array):
        return _read_array(context, builder, kind, words)
    assert kind.bitwidth == _WORD.width, f"{kind} takes no word"
    return builder.bitcast(next(words), context.get_value_type(kind))


def _read_array(context: Any, builder: Any, kind: Any, words: Iterator[Any]) -> Any:
    array = arrayobj.make_array(kind)(context, builder)
    data = builder.inttoptr(next(words), array.data.type)
    shape = [next(words) for _ in range(kind.ndim)]
    itemsize = _WORD(context.get_abi_sizeof(context.get_data_type(kind.dtype)))
    strides = [itemsize]
    for length in reversed(shape[1:]):
        strides.insert(0, builder.mul(strides[0], length))
    arrayobj.populate_array(array, data, shape, strides, itemsize, meminfo=None)  # nobody counts references
    return array._getvalue()
