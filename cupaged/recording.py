"""Recordings: kernel calls with their arguments, which compiled code makes one after the other.

Python would take a microsecond for each of a step's three hundred calls. Here a call is a row of a table: the
address of an entry, which is code that unpacks a kernel's arguments and calls it, and where they lie.
"""

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from itertools import pairwise
from typing import Any

import numpy as np
from llvmlite import ir
from numba import typeof as _typeof
from numba._dispatcher import compute_fingerprint
from numba.core import types
from numba.core.compiler_lock import global_compiler_lock as _global_compiler_lock
from numba.core.dispatcher import Dispatcher
from numba.core.sigutils import normalize_signature as _normalize_signature
from numpy.typing import NDArray

typeof: Any = _typeof  # untyped
normalize_signature: Any = _normalize_signature
global_compiler_lock: Any = _global_compiler_lock
Call = tuple[Callable[..., None], Sequence[Any]]  # a kernel and its arguments
Array = NDArray[Any]

ENTRY, ARGUMENTS, AHEAD, AHEAD_END = range(4)  # columns of a table
ROW_BYTES = 4 * 8
POINTER = 4  # the word of an array where it begins
MOST_AHEAD = 16 << 20  # bytes; what lies behind a matrix is mostly what is wanted after it

_NO_BUFFER: Array = np.empty(0, np.int32)
_WORD = ir.IntType(64)
ENTRY_TYPE = ir.FunctionType(ir.IntType(32), [_WORD.as_pointer()])
_chosen: dict[Any, Any] = {}  # compiled kernels, by the kernel and what its arguments look like
_entries: dict[Any, int] = {}  # addresses, by the library of the compiled kernel


def prepare(kernels: Iterable[tuple[Callable[..., None], str]]) -> None:
    """Have all that a recording of calls of such kernels needs; signatures are those of jit.specialize."""
    compilers: list[tuple[Any, str]] = [each for each in kernels if isinstance(each[0], Dispatcher)]
    _make_entries(
        [kernel.overloads[tuple(normalize_signature(signature)[0])] for kernel, signature in compilers]
    )


class Recording:
    """Calls that can be made again. They keep their arrays; only what these hold may change."""

    def __init__(
        self, calls: Sequence[Call], reads: Sequence[Array | None], buffer: Array | None = None
    ) -> None:
        """Take the calls; `reads` has the weights that each streams from memory, if any.

        Arrays that lie in `buffer` may lie in another one later, see moved().
        """
        self.buffer = self._home = _NO_BUFFER if buffer is None else buffer
        self.reads = [(i, array) for i, array in enumerate(reads) if array is not None]
        self.table: NDArray[np.int64] | None = None  # [calls, 4], or None: a kernel is not compiled
        self._calls = calls
        if calls and all(isinstance(kernel, Dispatcher) for kernel, _ in calls):
            self._fill_table()

    @property
    def calls(self) -> Sequence[Call]:
        """Return the calls."""
        if self.buffer is self._home:
            return self._calls
        where = self._home, self.buffer
        return [(kernel, tuple(_moved(arg, *where) for arg in args)) for kernel, args in self._calls]

    def moved(self, buffer: Array) -> "Recording":
        """Return the recording of such calls with arrays that lie in `buffer` as these do in their own."""
        other = copy(self)
        other.buffer = buffer
        if self.table is not None:
            other.table, other._arguments = self.table.copy(), self._arguments.copy()
            other.table[:, ARGUMENTS] += other._arguments.ctypes.data - self._arguments.ctypes.data
            other._arguments[self._pointers] += buffer.ctypes.data - self.buffer.ctypes.data
        return other

    def follow(self, other: "Recording") -> None:
        """Have this one's first weights fetched when the other one has read its last."""
        if self.reads and other.reads and other.table is not None:
            _fetch_ahead(other.table[other.reads[-1][0]], self.reads[0][1])

    def _fill_table(self) -> None:
        compiled = [_compiled(kernel, args) for kernel, args in self._calls]
        words: list[int] = []
        first, pointers = [], []
        for kernel, (_, args) in zip(compiled, self._calls, strict=True):
            first.append(len(words))
            for value, kind in zip(args, kernel.signature.args, strict=True):
                if isinstance(kind, types.Array):
                    pointers.append(len(words) + POINTER)
                words += _words(value, kind)
        _make_entries(compiled)
        self._arguments = np.array(words, np.int64)  # which the table points to
        offsets = self._arguments[pointers] - self.buffer.ctypes.data
        self._pointers = np.array(pointers)[
            (offsets >= 0) & (offsets < self.buffer.nbytes)
        ]  # into the buffer
        self.table = np.zeros((len(self._calls), 4), np.int64)
        self.table[:, ENTRY] = [_entries[kernel.library] for kernel in compiled]
        self.table[:, ARGUMENTS] = self._arguments.ctypes.data + 8 * np.array(first)
        for (i, _), (_, array) in pairwise(self.reads):
            _fetch_ahead(self.table[i], array)


def _moved(value: Any, home: Array, buffer: Array) -> Any:
    """Return the array as it lies in `buffer` if it lies in `home`; any other value as it is."""
    first = value.ctypes.data - home.ctypes.data if isinstance(value, np.ndarray) else -1
    return (
        np.ndarray(value.shape, value.dtype, buffer, first, value.strides)
        if 0 <= first < home.nbytes
        else value
    )


def _fetch_ahead(row: NDArray[np.int64], array: Array) -> None:
    """Have `array` fetched, from the row's call on, by threads that find nothing to do."""
    row[AHEAD], row[AHEAD_END] = array.ctypes.data, array.ctypes.data + MOST_AHEAD


def _compiled(kernel: Any, args: Sequence[Any]) -> Any:
    """Return what the kernel was compiled to for such arguments: what Python's call would choose."""
    key = kernel, len(kernel.overloads), compute_fingerprint(tuple(args))
    if key not in _chosen:
        given = [typeof(arg) for arg in args]
        cases = [compiled.signature for compiled in tuple(kernel.overloads.values())]
        best = kernel.targetdescr.typing_context.resolve_overload(kernel.__name__, cases, given, {})
        if best is None:
            name = kernel.__name__
            raise TypeError(f"{name} is not compiled for {given}; add it to backend/cpu_kernels.py")
        _chosen[key] = kernel.overloads[best.args]
    return _chosen[key]


def _words(value: Any, kind: Any) -> list[int]:
    """Return the 64-bit words in which an entry finds an argument of that type."""
    if isinstance(kind, types.Array):
        return [0, 0, value.size, value.itemsize, value.ctypes.data, *value.shape, *value.strides]
    if isinstance(kind, types.Float):
        return [int(np.array([value, 0], f"f{kind.bitwidth // 8}").view(np.int64)[0])]
    return [int(value)]  # integers and booleans


@global_compiler_lock  # type: ignore[untyped-decorator]
def _make_entries(compiled: Sequence[Any]) -> None:
    """Write the entries of those kernels that have none."""
    new = {kernel.library: kernel for kernel in compiled if kernel.library not in _entries}
    if not new:
        return
    library = compiled[0].target_context.codegen().create_library("cupaged.entries")
    module = library.create_ir_module("cupaged.entries")
    names = {each: f"entry_of_{kernel.fndesc.mangled_name}" for each, kernel in new.items()}
    for each, name in names.items():
        _emit_entry(ir.Function(module, ENTRY_TYPE, name), new[each])
    library.add_ir_module(module)
    library.finalize()
    _entries.update((each, library.get_pointer_to_function(name)) for each, name in names.items())
    _libraries.append(library)


_libraries: list[Any] = []  # whose code is in use


def _emit_entry(entry: Any, kernel: Any) -> None:
    """Write the code that calls a kernel with the arguments that lie where it is told; 0 unless it fails."""
    context, kinds = kernel.target_context, kernel.signature.args
    builder = ir.IRBuilder(entry.append_basic_block())
    values, first = [], 0
    for kind in kinds:
        model = context.data_model_manager[kind]
        place = builder.gep(entry.args[0], [_WORD(first)])
        value = builder.load(builder.bitcast(place, model.get_data_type().as_pointer()), align=8)
        is_same = value.type == model.get_value_type()  # of arrays: then as a whole, for LLVM is slow
        values.append(value if is_same else model.from_data(builder, value))
        first += -(-context.get_abi_sizeof(model.get_data_type()) // 8)
    convention = context.call_conv
    function = convention.get_function_type(types.none, kinds).as_pointer()
    address = kernel.library.get_pointer_to_function(kernel.fndesc.llvm_func_name)
    callee = builder.inttoptr(_WORD(address), function)
    status, _ = convention.call_function(builder, callee, types.none, kinds, values)
    builder.ret(status.code)
