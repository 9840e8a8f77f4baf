"""The instructions that only some CPUs have, and what each computes; written as LLVM code.

A vector is LANES 32-bit words: float32 numbers, pairs of bfloat16 or quadruples of int8. Each function takes
LLVM's builder and returns a vector. What the host has decides once for the whole process which are used.
"""

from typing import Any

import llvmlite.binding
from llvmlite import ir

from cupaged.kernels.emit import FLOATS, HALVES, LANES, WORDS, call, splat, words

_FEATURES = llvmlite.binding.get_host_cpu_features()
HAS_AVX512 = bool(_FEATURES.get("avx512f", False))
HAS_BF16 = HAS_AVX512 and bool(_FEATURES.get("avx512bf16", False))
HAS_VNNI = HAS_AVX512 and bool(_FEATURES.get("avx512vnni", False))
HAS_AVX_VNNI = bool(_FEATURES.get("avxvnni", False))

_INT32 = ir.IntType(32)
_ALL_HALVES = ir.VectorType(ir.IntType(16), 2 * LANES)


def _part(builder: Any, vector: Any, start: int, count: int) -> Any:
    """Return the lanes [start, start + count)."""
    lanes = ir.Constant(ir.VectorType(_INT32, count), list(range(start, start + count)))
    return builder.shuffle_vector(vector, vector, lanes)


def floats_of_pairs(builder: Any, pairs: Any) -> tuple[Any, Any]:
    """Return the first and the second bfloat16 of each word as float32, whose upper half it is (vpslld)."""
    first, second = builder.shl(pairs, words(16)), builder.and_(pairs, words(0xFFFF0000))
    return builder.bitcast(first, FLOATS), builder.bitcast(second, FLOATS)


def dot_pairs(builder: Any, total: Any, a: Any, b: Any) -> Any:
    """Return total + a1 * b1 + a0 * b0 of bfloat16 pairs (vdpbf16ps; HAS_BF16).

    The products are exact, each sum is rounded to nearest even; denormals count as 0.
    """
    return call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, total, a, b)


def round_to_pairs(builder: Any, high: Any, low: Any) -> Any:
    """Return 32 float32 as bfloat16, rounded to nearest even (vcvtne2ps2bf16; HAS_BF16)."""
    name = "llvm.x86.avx512bf16.cvtne2ps2bf16.512"
    return builder.bitcast(call(builder, name, _ALL_HALVES, high, low), WORDS)


def floats_of_byte_pairs(builder: Any, pairs: Any) -> tuple[Any, Any]:
    """Return the first and the second int8 of each of LANES pairs as float32 (vpmovsxwd, vcvtdq2ps)."""
    whole = builder.sext(builder.bitcast(pairs, HALVES), WORDS)
    first = builder.ashr(builder.shl(whole, words(24)), words(24))
    return builder.sitofp(first, FLOATS), builder.sitofp(builder.ashr(whole, words(8)), FLOATS)


def halves_of_byte_pairs(builder: Any, pairs: Any) -> Any:
    """Return LANES pairs of int8 as pairs of bfloat16, which holds them exactly (vpmovsxbd, vcvtdq2ps)."""
    floats = [
        builder.sitofp(builder.sext(_part(builder, pairs, start, LANES), WORDS), FLOATS)
        for start in (0, LANES)
    ]
    return round_to_pairs(builder, floats[1], floats[0])


def dot_quads_512(builder: Any, total: Any, unsigned: Any, signed: Any) -> Any:
    """Return total + the four products of each word's uint8 and int8, as int32 (vpdpbusd; HAS_VNNI)."""
    return call(builder, "llvm.x86.avx512.vpdpbusd.512", WORDS, total, unsigned, signed)


def dot_quads_256(builder: Any, total: Any, unsigned: Any, signed: Any) -> Any:
    """Return the same, by halves (vpdpbusd on ymm; HAS_AVX_VNNI)."""
    half = ir.VectorType(_INT32, LANES // 2)
    low, high = (
        call(
            builder,
            "llvm.x86.avx512.vpdpbusd.256",
            half,
            *(_part(builder, x, start, LANES // 2) for x in (total, unsigned, signed)),
        )
        for start in (0, LANES // 2)
    )
    return builder.shuffle_vector(low, high, ir.Constant(WORDS, list(range(LANES))))


def dot_quads_plain(builder: Any, total: Any, unsigned: Any, signed: Any) -> Any:
    """Return the same, anywhere: a product of uint8 and int8 fits 16 bits (vpmullw, vpaddd)."""
    eight = ir.Constant(_ALL_HALVES, [8] * 2 * LANES)
    u, s = (builder.bitcast(x, _ALL_HALVES) for x in (unsigned, signed))
    even = builder.mul(builder.lshr(builder.shl(u, eight), eight), builder.ashr(builder.shl(s, eight), eight))
    odd = builder.mul(builder.lshr(u, eight), builder.ashr(s, eight))
    for products in (even, odd):
        pairs = builder.bitcast(products, WORDS)
        total = builder.add(total, builder.ashr(builder.shl(pairs, words(16)), words(16)))
        total = builder.add(total, builder.ashr(pairs, words(16)))
    return total


# The same integers by whichever the CPU has.
dot_quads = dot_quads_512 if HAS_VNNI else dot_quads_256 if HAS_AVX_VNNI else dot_quads_plain


def load_part(builder: Any, pointer: Any, count: Any) -> Any:
    """Load up to LANES float32, `count` of them if it is less, and zeros behind (vmovups {k}{z})."""
    zeros = ir.Constant(FLOATS, None)
    mask, align = _first_lanes(builder, count), _INT32(4)
    return call(builder, f"llvm.masked.load.v{LANES}f32.p0", FLOATS, pointer, align, mask, zeros)


def store_part(builder: Any, value: Any, pointer: Any, count: Any) -> None:
    """Store up to LANES float32, `count` of them if it is less (vmovups {k})."""
    mask, align = _first_lanes(builder, count), _INT32(4)
    call(builder, f"llvm.masked.store.v{LANES}f32.p0", ir.VoidType(), value, pointer, align, mask)


def _first_lanes(builder: Any, count: Any) -> Any:
    return builder.icmp_signed("<", ir.Constant(WORDS, list(range(LANES))), splat(builder, count))


def keep_loop(builder: Any) -> None:
    """Keep the loop around it as it is: unrolled twice, a tile that fills the registers would spill them."""
    nothing = ir.InlineAsm(ir.FunctionType(ir.VoidType(), []), "", "", side_effect=True)
    builder.call(nothing, []).attributes.add("convergent")
