"""A loop on all threads, without what Numba's own costs to compile.

Numba makes five functions of a prange, each of which carries the loop's body through LLVM once more. Here the
body is a function of its own, and Numba's thread pool is called where Numba's loops call it, so a kernel
compiles in a third of the time. One piece runs on the calling thread, which costs nothing.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils as _cgutils
from numba.core import types
from numba.extending import lower_builtin, type_callable

from cupaged.kernels.chunks import chunk_range

cgutils: Any = _cgutils  # untyped
_INT = ir.IntType(64)
_POINTER = ir.IntType(8).as_pointer()
_VOID = ir.VoidType()
# What Numba's threads call: (arrays, numbers of items, steps between them, data), as NumPy's ufuncs are.
_TASK = ir.FunctionType(_VOID, [_POINTER.as_pointer(), _INT.as_pointer(), _INT.as_pointer(), _POINTER])
_RANGE: Any = types.UniTuple(types.intp, 2)  # type: ignore[no-untyped-call]


def parallel_for(body: Callable[..., None], n: int, pieces: int, args: tuple[Any, ...]) -> None:
    """Call body(*args, (first, last)) for each of the pieces, one or more, into which n items are cut.

    `body` is an njit function. If it raises, so does the loop, a RuntimeError where there are several pieces.
    """
    for piece in range(pieces):
        body(*args, chunk_range(n, piece, pieces))


class _Body:
    """The compiled body, as LLVM code calls it."""

    def __init__(self, dispatcher: Any, args: Any) -> None:
        self._given = args.types
        self._types = (*map(types.unliteral, args.types), _RANGE)
        dispatcher.compile(self._types)
        self._compiled = dispatcher.overloads[self._types]

    def link(self, context: Any) -> None:
        context.active_code_library.add_linking_library(self._compiled.library)

    def call(self, context: Any, builder: Any, args: Any, bounds: list[Any]) -> Any:
        """Call it; return how that ended."""
        function = context.declare_function(builder.module, self._compiled.fndesc)
        values = [
            context.cast(builder, builder.extract_value(args, i), given, declared)
            for i, (given, declared) in enumerate(zip(self._given, self._types, strict=False))
        ]
        pair = context.make_tuple(builder, _RANGE, bounds)
        status, _ = context.call_conv.call_function(
            builder, function, types.none, self._types, [*values, pair]
        )
        return status


def _emit_task(context: Any, module: Any, name: str, body: _Body, shared: Any) -> Any:
    """Return a function for Numba's threads that calls the body for the pieces [first, first + count)."""
    task = ir.Function(module, _TASK, name=name)
    task.linkage = "internal"
    builder = ir.IRBuilder(task.append_basic_block())
    arrays, counts, _, data = task.args
    first = builder.ptrtoint(builder.load(arrays), _INT)  # an array at address 0 with steps of 1
    data = builder.bitcast(data, shared.as_pointer())
    n, pieces, args = (builder.load(cgutils.gep_inbounds(builder, data, 0, i)) for i in range(3))
    with cgutils.for_range(builder, builder.load(counts)) as loop:
        piece = builder.add(first, loop.index)
        bounds = [builder.sdiv(builder.mul(n, edge), pieces) for edge in (piece, builder.add(piece, _INT(1)))]
        status = body.call(context, builder, args, bounds)
        with cgutils.if_unlikely(builder, status.is_error):
            builder.store(_INT(1), cgutils.gep_inbounds(builder, data, 0, 3))
    builder.ret_void()
    return task


def _emit_loop(context: Any, builder: Any, body: _Body, n: Any, pieces: Any, args: Any) -> None:
    """Hand the pieces to Numba's threads and wait for them."""
    module = builder.module
    shared = ir.LiteralStructType([_INT, _INT, args.type, _INT])
    task = _emit_task(context, module, module.get_unique_name(f"{builder.function.name}.task"), body, shared)
    data = cgutils.alloca_once(builder, shared)
    for i, value in enumerate((n, pieces, args, _INT(0))):
        builder.store(value, cgutils.gep_inbounds(builder, data, 0, i))
    arrays = cgutils.alloca_once_value(builder, ir.Constant(_POINTER, None))
    counts, steps = (cgutils.alloca_once_value(builder, value) for value in (pieces, _INT(1)))
    num_threads = builder.call(
        cgutils.get_or_insert_function(module, ir.FunctionType(_INT, []), "get_num_threads"), []
    )
    kind = ir.FunctionType(_VOID, [_POINTER] * 5 + [_INT] * 3)
    pool = cgutils.get_or_insert_function(module, kind, "numba_parallel_for")
    pointers = [builder.bitcast(pointer, _POINTER) for pointer in (task, arrays, counts, steps, data)]
    builder.call(pool, [*pointers, _INT(0), _INT(1), num_threads])
    failed = builder.load(cgutils.gep_inbounds(builder, data, 0, 3))
    with cgutils.if_unlikely(builder, cgutils.is_true(builder, failed)):
        context.call_conv.return_user_exc(builder, RuntimeError, ("a piece of a parallel loop failed",))


@type_callable(parallel_for)
def _type_parallel_for(_context: Any) -> Any:
    def typed(body: Any, n: Any, pieces: Any, args: Any) -> Any:  # noqa: ARG001
        _Body(body.dispatcher, args)
        return types.none

    return typed


# Not an overload, which would be one more function to compile for each kernel.
@lower_builtin(parallel_for, types.Dispatcher, types.Integer, types.Integer, types.BaseTuple)
def _lower_parallel_for(context: Any, builder: Any, signature: Any, values: Any) -> Any:
    kinds = signature.args
    body = _Body(kinds[0].dispatcher, kinds[3])
    n, pieces = (context.cast(builder, values[i], kinds[i], types.intp) for i in (1, 2))
    args = values[3]
    body.link(context)
    with builder.if_else(builder.icmp_signed("<=", pieces, _INT(1))) as (one, several):
        with one:
            status = body.call(context, builder, args, [_INT(0), n])
            with cgutils.if_unlikely(builder, status.is_error):
                context.call_conv.return_status_propagate(builder, status)
        with several:
            _emit_loop(context, builder, body, n, pieces, args)
    return context.get_dummy_value()
