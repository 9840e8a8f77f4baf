"""What a call of a kernel on the CPU moves and computes, from its arguments: each array once, by name.

Of an array that a kernel has only parts of, such as the KV cache, those parts count.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
LINE = 64  # bytes of a cache line, which is read as a whole


class Traffic(NamedTuple):
    """What one call moves and computes."""

    num_bytes: int
    flops: int  # of matrix products and attention; 0 where nobody counts them


def traffic(kernel: Callable[..., None], args: Sequence[Any]) -> Traffic:
    """Return the traffic of kernel(*args); what the arrays hold must be what it was."""
    name, arrays = name_of(kernel), arrays_of(kernel, args)
    parts, read = PARTS.get(name, ((), _nothing))
    num_bytes = sum(array.nbytes for key, array in arrays.items() if key.split(".")[0] not in parts)
    return Traffic(num_bytes + read(arrays), _flops(arrays))


def name_of(kernel: Callable[..., None]) -> str:
    """Return the name of what the kernel does."""
    return kernel.__name__.removesuffix("_cpu")


def label_of(kernel: Callable[..., None], args: Sequence[Any]) -> str:
    """Return the name, and of a matrix product its shape."""
    arrays = arrays_of(kernel, args)
    if not _is_product(arrays):
        return name_of(kernel)
    return f"{name_of(kernel)} {arrays['out'].shape[1]}x{arrays['x'].shape[1]}"


def arrays_of(kernel: Callable[..., None], args: Sequence[Any]) -> dict[str, Array]:
    """Return the arrays among the arguments by their parameters; those of a tuple are `name.0` and so on."""
    found: dict[str, Array] = {}
    for name, value in zip(_parameters(kernel), args, strict=True):
        values = (
            {f"{name}.{i}": each for i, each in enumerate(value)}
            if isinstance(value, tuple)
            else {name: value}
        )
        found |= {key: each for key, each in values.items() if isinstance(each, np.ndarray)}
    return found


@cache
def _parameters(kernel: Callable[..., None]) -> list[str]:
    return list(inspect.signature(getattr(kernel, "py_func", kernel)).parameters)


def _is_product(arrays: Mapping[str, Array]) -> bool:
    return {"x", "panels", "out"} <= arrays.keys()


def _flops(arrays: Mapping[str, Array]) -> int:
    """Return 2 for each multiply-add of a matrix product or of causal attention."""
    if _is_product(arrays):
        return 2 * prod(arrays["x"].shape) * int(arrays["out"].shape[1])
    if {"q", "pool", "seq_lens"} <= arrays.keys():
        new = np.diff(arrays["query_start"]).astype(np.int64)
        before = arrays["seq_lens"] - new
        return 4 * prod(arrays["q"].shape[1:]) * int((new * before + new * (new + 1) // 2).sum())
    return 0


def _nothing(arrays: Mapping[str, Array]) -> int:  # noqa: ARG001
    return 0


def _embedding_bytes(arrays: Mapping[str, Array]) -> int:
    """Return the bytes of the lines in which the rows lie: each group of inputs has one of its own."""
    return int(arrays["out"].size) // int(arrays["panels"].shape[3]) * LINE


def _written_kv_bytes(arrays: Mapping[str, Array]) -> int:
    """Return the bytes of keys and values written, and of q, which is written where it was read."""
    num_written = 2 * int((arrays["slot_mapping"] >= 0).sum()) * prod(arrays["k"].shape[1:])
    return int(arrays["q"].nbytes) + num_written * int(arrays["pool"].itemsize)


def _read_kv_bytes(arrays: Mapping[str, Array]) -> int:
    """Return the bytes of all keys and values that are seen; a window is not looked at."""
    pool = arrays["pool"]
    token = prod((2, pool.shape[3], pool.shape[5], pool.itemsize))
    return int(arrays["seq_lens"].sum()) * token


# By kernel: parameters that are not read as a whole; the bytes that are read or written beside the others.
PARTS: dict[str, tuple[tuple[str, ...], Callable[[Mapping[str, Array]], int]]] = {
    "embedding": (("panels", "scales"), _embedding_bytes),
    "embedding_int8": (("panels", "scales"), _embedding_bytes),
    "gather_rows": (("x",), lambda arrays: arrays["out"].nbytes),
    "add_rms_norm": ((), lambda arrays: arrays["residual"].nbytes),
    "rope_kv_write": (("pool", "cos_sin"), _written_kv_bytes),
    "paged_attention": (("pool", "block_tables"), _read_kv_bytes),
    "adjust_logits": (("counts",), _nothing),
}
