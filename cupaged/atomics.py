"""Words that threads share, and what else compiled code needs to work together: no Python, no locks.

A word has 64 bits; each operation on one is in one piece, and seen by all threads in one order. The words lie
in memory that compiled code finds by the name of a symbol, so it may lie in the on-disk cache.
"""

import sys
from typing import Any

import llvmlite.binding
import numpy as np
from llvmlite import ir
from numba.core import cgutils as _cgutils
from numba.core import types
from numba.extending import intrinsic

from cupaged.recording import ENTRY_TYPE

# ruff: noqa: ARG001  (Numba knows an operation's arguments by the parameters of the function that types it)

cgutils: Any = _cgutils  # untyped

NUM_WORDS = 256
PAIR = 16  # words: processors fetch lines of 64 bytes in pairs, so what two threads write lies so far apart
SYMBOL = "cupaged_team"
_INT = ir.IntType(64)
_POINTER = ir.IntType(8).as_pointer()
_TASK = ir.FunctionType(ir.VoidType(), [_POINTER, _INT])
_memory = np.zeros(NUM_WORDS + PAIR, np.int64)
words = _memory[-_memory.ctypes.data % (8 * PAIR) // 8 :][:NUM_WORDS]
llvmlite.binding.add_symbol(SYMBOL, words.ctypes.data)


def _word(builder: Any, place: Any) -> Any:
    """Return the address of a word."""
    module, kind = builder.module, ir.ArrayType(_INT, NUM_WORDS)
    found = module.globals.get(SYMBOL)
    team = ir.GlobalVariable(module, kind, SYMBOL) if found is None else found
    return builder.gep(team, [_INT(0), place])


def _type_load(_context: Any, place: Any) -> Any:
    def emit(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.load_atomic(_word(builder, args[0]), "seq_cst", 8)

    return types.int64(types.int64), emit


def _type_store(_context: Any, place: Any, value: Any) -> Any:
    def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        builder.store_atomic(args[1], _word(builder, args[0]), "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit


def _type_add(_context: Any, place: Any, value: Any) -> Any:
    def emit(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", _word(builder, args[0]), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), emit


def _type_claim(_context: Any, place: Any) -> Any:
    def emit(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        pair = builder.cmpxchg(_word(builder, args[0]), _INT(0), _INT(1), "seq_cst", "seq_cst")
        return builder.extract_value(pair, 1)

    return types.boolean(types.int64), emit


def _type_read(_context: Any, address: Any) -> Any:
    def emit(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.load(builder.inttoptr(args[0], _INT.as_pointer()))

    return types.int64(types.int64), emit


def _type_pause(_context: Any) -> Any:
    def emit(context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
        nothing = ir.FunctionType(ir.VoidType(), [])
        name = "llvm.x86.sse2.pause"
        if llvmlite.binding.get_default_triple().startswith("x86"):
            builder.call(cgutils.get_or_insert_function(builder.module, nothing, name), [])
        else:
            builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), emit


def _type_do_piece(_context: Any, task: Any, data: Any, piece: Any) -> Any:
    def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        function = builder.inttoptr(args[0], _TASK.as_pointer())
        builder.call(function, [builder.inttoptr(args[1], _POINTER), args[2]])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), emit


def _type_enter(_context: Any, entry: Any, arguments: Any) -> Any:
    def emit(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        function = builder.inttoptr(args[0], ENTRY_TYPE.as_pointer())
        return builder.call(function, [builder.inttoptr(args[1], _INT.as_pointer())])

    return types.int32(types.int64, types.int64), emit


def _type_fetch(_context: Any, address: Any) -> Any:
    def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        number = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [_POINTER, number, number, number])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        # To read, into all but the first of the caches, data; any address will do.
        builder.call(function, [builder.inttoptr(args[0], _POINTER), number(0), number(2), number(1)])
        return context.get_dummy_value()

    return types.void(types.int64), emit


load: Any = intrinsic(_type_load)
store: Any = intrinsic(_type_store)
add: Any = intrinsic(_type_add)  # returns what was there
claim: Any = intrinsic(_type_claim)  # sets a word that is 0 to 1; returns whether it was 0
read: Any = intrinsic(_type_read)  # of any memory
pause: Any = intrinsic(_type_pause)
do_piece: Any = intrinsic(_type_do_piece)
enter: Any = intrinsic(_type_enter)  # returns 0 unless the kernel failed
fetch: Any = intrinsic(_type_fetch)
yield_core: Any = types.ExternalFunction(
    "SwitchToThread" if sys.platform == "win32" else "sched_yield", types.int32()
)
