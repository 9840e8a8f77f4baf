"""A loop on all threads: the body is a function of its own, and the team (cupaged/team.py) runs its pieces.

Numba's prange would make five functions, each of which carries the loop's body through LLVM once more; so a
kernel compiles in a third of the time. One piece runs on the calling thread, which costs nothing.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils as _cgutils
from numba.core import types
from numba.extending import lower_builtin as _lower_builtin
from numba.extending import type_callable

from cupaged.kernels.chunks import chunk_range
from cupaged.team import lead

cgutils: Any = _cgutils  # untyped
lower_builtin: Any = _lower_builtin
_INT = ir.IntType(64)
_POINTER = ir.IntType(8).as_pointer()
_VOID = ir.VoidType()
_TASK = ir.FunctionType(_VOID, [_POINTER, _INT])  # (what the pieces share, the piece)
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
        dispatcher = getattr(dispatcher, "inner", dispatcher)
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
    """Return a function for the team that calls the body for a piece."""
    task = ir.Function(module, _TASK, name=name)
    task.linkage = "internal"
    builder = ir.IRBuilder(task.append_basic_block())
    data, piece = task.args
    data = builder.bitcast(data, shared.as_pointer())
    n, pieces, args = (builder.load(cgutils.gep_inbounds(builder, data, 0, i)) for i in range(3))
    bounds = [builder.sdiv(builder.mul(n, edge), pieces) for edge in (piece, builder.add(piece, _INT(1)))]
    status = body.call(context, builder, args, bounds)
    with cgutils.if_unlikely(builder, status.is_error):
        builder.store(_INT(1), cgutils.gep_inbounds(builder, data, 0, 3))
    builder.ret_void()
    return task


def _emit_loop(context: Any, builder: Any, body: _Body, n: Any, pieces: Any, args: Any) -> None:
    """Lead the team through the pieces."""
    module = builder.module
    shared = ir.LiteralStructType([_INT, _INT, args.type, _INT])
    task = _emit_task(context, module, module.get_unique_name(f"{builder.function.name}.task"), body, shared)
    data = cgutils.alloca_once(builder, shared)
    for i, value in enumerate((n, pieces, args, _INT(0))):
        builder.store(value, cgutils.gep_inbounds(builder, data, 0, i))
    words = [builder.ptrtoint(task, _INT), builder.ptrtoint(data, _INT), pieces]
    kinds = (types.int64,) * 3
    compiled: Any = lead
    compiled.compile(kinds)
    leader = compiled.overloads[kinds]
    context.active_code_library.add_linking_library(leader.library)
    function = context.declare_function(module, leader.fndesc)
    context.call_conv.call_function(builder, function, types.none, kinds, words)
    failed = builder.load(cgutils.gep_inbounds(builder, data, 0, 3))
    with cgutils.if_unlikely(builder, cgutils.is_true(builder, failed)):
        context.call_conv.return_user_exc(builder, RuntimeError, ("a piece of a parallel loop failed",))


@type_callable(parallel_for)
def _type_parallel_for(_context: Any) -> Any:
    def typed(body: Any, n: Any, pieces: Any, args: Any) -> Any:  # noqa: ARG001
        _Body(body.dispatcher, args)
        return types.none

    return typed


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


# Not an overload, which would be one more function to compile for each kernel.
lower_builtin(parallel_for, types.Dispatcher, types.Integer, types.Integer, types.BaseTuple)(
    _lower_parallel_for
)
