"""The instructions that only some CPUs have, and what each computes; written as LLVM code.

A vector is LANES 32-bit words: float32 numbers, pairs of bfloat16 or quadruples of int8. Each function takes
LLVM's builder and returns a vector. What the host has decides once for the whole process which are used.
"""

from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba.core import cgutils as _cgutils

cgutils: Any = _cgutils  # untyped
LANES = 16

_FEATURES = llvmlite.binding.get_host_cpu_features()
HAS_AVX512 = bool(_FEATURES.get("avx512f", False))
HAS_BF16 = HAS_AVX512 and bool(_FEATURES.get("avx512bf16", False))
HAS_VNNI = HAS_AVX512 and bool(_FEATURES.get("avx512vnni", False))


class _BFloat(ir.Type):  # type: ignore[misc]  # llvmlite has no types
    """LLVM's bfloat, which llvmlite does not name."""

    intrinsic_name = "bf16"

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash("bfloat")


INT = ir.IntType(64)
_INT32 = ir.IntType(32)
FLOATS = ir.VectorType(ir.FloatType(), LANES)
WORDS = ir.VectorType(_INT32, LANES)
_HALF_FLOATS = ir.VectorType(_BFloat(), 2 * LANES)
_BYTES = ir.VectorType(ir.IntType(8), 4 * LANES)


def _call(builder: Any, name: str, result: Any, *args: Any) -> Any:
    kind = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)


def _words(value: int) -> Any:
    return ir.Constant(WORDS, [value] * LANES)


def splat(builder: Any, value: Any) -> Any:
    """Return a vector of one number (vpbroadcastd; of memory it is part of the instruction that uses it)."""
    vector = ir.VectorType(value.type, LANES)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), value, _INT32(0))
    return builder.shuffle_vector(first, ir.Constant(vector, ir.Undefined), _words(0))


def fma(builder: Any, a: Any, b: Any, total: Any) -> Any:
    """Return total + a * b, rounded once (vfmadd231ps)."""
    return _call(builder, f"llvm.fma.v{LANES}f32", FLOATS, a, b, total)


def first_of_pairs(builder: Any, pairs: Any) -> Any:
    """Return the first bfloat16 of each word as float32, whose upper half it is (vpslld)."""
    return builder.bitcast(builder.shl(pairs, _words(16)), FLOATS)


def second_of_pairs(builder: Any, pairs: Any) -> Any:
    """Return the second bfloat16 of each word as float32 (vpandd)."""
    return builder.bitcast(builder.and_(pairs, _words(0xFFFF0000)), FLOATS)


def dot_pairs(builder: Any, total: Any, a: Any, b: Any) -> Any:
    """Return total + a1 * b1 + a0 * b0 of bfloat16 pairs (vdpbf16ps; HAS_BF16).

    The products are exact, each sum is rounded to nearest even; denormals count as 0.
    """
    pairs = (builder.bitcast(x, _HALF_FLOATS) for x in (a, b))
    return _call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, total, *pairs)


def round_to_pairs(builder: Any, high: Any, low: Any) -> Any:
    """Return 32 float32 as bfloat16, rounded to nearest even (vcvtne2ps2bf16; HAS_BF16)."""
    name = "llvm.x86.avx512bf16.cvtne2ps2bf16.512"
    return builder.bitcast(_call(builder, name, _HALF_FLOATS, high, low), WORDS)


def dot_bytes(builder: Any, total: Any, unsigned: Any, signed: Any) -> Any:
    """Return total + the four products of each word's bytes, as int32 (vpdpbusd; HAS_VNNI)."""
    quads = (builder.bitcast(x, _BYTES) for x in (unsigned, signed))
    return _call(builder, "llvm.x86.avx512.vpdpbusd.512", WORDS, total, *quads)


def prefetch(builder: Any, pointer: Any) -> None:
    """Ask for the cache line at `pointer` (prefetcht1); any address will do."""
    place = builder.bitcast(pointer, ir.IntType(8).as_pointer())
    _call(builder, "llvm.prefetch.p0", ir.VoidType(), place, _INT32(0), _INT32(2), _INT32(1))


def keep_loop(builder: Any) -> None:
    """Keep the loop around it as it is: unrolled twice, a tile that fills the registers would spill them."""
    nothing = ir.InlineAsm(ir.FunctionType(ir.VoidType(), []), "", "", side_effect=True)
    builder.call(nothing, []).attributes.add("convergent")
