"""One token's heads as a row: q, k and v lie side by side in longer rows, which hides it from Numba."""

from typing import Any

from numba.core import cgutils as _cgutils
from numba.core import types
from numba.core.imputils import impl_ret_borrowed as _impl_ret_borrowed
from numba.extending import lower_builtin as _lower_builtin
from numba.extending import type_callable

# Untyped.
cgutils: Any = _cgutils
impl_ret_borrowed: Any = _impl_ret_borrowed
lower_builtin: Any = _lower_builtin


def packed_row(x: Any, i: int) -> Any:
    """Return x[i], whose elements lie one after the other, as [size]; x [n, heads, head_dim]."""
    return x[i].reshape(-1)


@type_callable(packed_row)
def _type_packed_row(_context: Any) -> Any:
    def typed(x: Any, i: Any) -> Any:  # noqa: ARG001
        return types.Array(x.dtype, 1, "C")

    return typed


def _lower_packed_row(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    row = signature.return_type
    whole = context.make_array(signature.args[0])(context, builder, args[0])
    i = context.cast(builder, args[1], signature.args[1], types.intp)
    offset = builder.mul(i, builder.extract_value(whole.strides, 0))
    array = context.make_array(row)(context, builder)
    context.populate_array(
        array,
        data=cgutils.pointer_add(builder, whole.data, offset),
        shape=[builder.mul(*cgutils.unpack_tuple(builder, whole.shape)[1:])],
        strides=[whole.itemsize],
        itemsize=whole.itemsize,
        meminfo=whole.meminfo,
        parent=whole.parent,
    )
    return impl_ret_borrowed(context, builder, row, array._getvalue())


lower_builtin(packed_row, types.Array, types.Integer)(_lower_packed_row)
