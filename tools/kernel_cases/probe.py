"""Cases of probe.cu: each PTX function of gpu.cuh alone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from cupaged.kernels.launch import Array, Device
from tools.kernel_cases.case import DTYPES, EXACT, Arrays, Case, Maker, Tolerance

NUM_FLOATS = 1024
# Where rounding changes: ties, the largest and smallest of bf16 and f16, subnormals, infinities, NaN.
# fmt: off
SPECIAL = np.array([
    0x00000000, 0x80000000, 0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0x3F801000, 0x3F803000,
    0x7F7FFFFF, 0x7F7F7FFF, 0x7F7F8000, 0x00000001, 0x007FFFFF, 0x00008000, 0x00018000, 0x477FEFFF,
    0x477FF000, 0x33000000, 0x33000001, 0x33C00000, 0x387FE000, 0x387FF000, 0x7F800000, 0xFF800000,
    0x7FC00000, 0xFFC00001,
], np.uint32)
# fmt: on


def probe(
    name: str,
    kernel: str,
    make: Callable[[Maker], dict[str, Array]],
    *,
    outputs: tuple[str, ...],
    scalars: tuple[int, ...] = (),
    tolerance: Tolerance = EXACT,
    element: str = "bf16",
) -> Case:
    """Return a case that launches one warp with the arrays as they are made, then the scalars."""

    def launch(device: Device, arrays: Arrays) -> None:
        device.kernel("probe", kernel, ELEMENT=element)((1, 1, 1), 32, (*arrays.values(), *scalars))

    return Case(
        name=f"probe-{name}",
        make=make,
        launch=launch,
        outputs=outputs,
        variables={},
        tolerance=tolerance,
        sources=Path(__file__).parent,
    )


def multiply(element: str, *, integers: bool) -> Case:
    """Return [16, 8] + [16, 16] x [16, 8]; of integers it is exact, and shows every element's place."""

    def numbers(maker: Maker, shape: tuple[int, ...], dtype: Any) -> Array:
        return small_integers(shape, dtype) if integers else maker.normal(shape, dtype)

    def make(maker: Maker) -> dict[str, Array]:
        return {
            "d": maker.unwritten((16, 8)),
            "c": numbers(maker, (16, 8), np.float32),
            "a": numbers(maker, (16, 16), DTYPES[element]),
            "b": numbers(maker, (8, 16), DTYPES[element]),
        }

    return probe(
        f"multiply-{element}-{'integers' if integers else 'normal'}",
        "multiply",
        make,
        outputs=("d",),
        # A tensor core may cut an addend off about 2^-24 below the largest, which is under 16 here, 17 times.
        tolerance=EXACT if integers else Tolerance(0.0, 16 * 2**-19),
        element=element,
    )


def small_integers(shape: tuple[int, ...], dtype: Any) -> Array:
    """Return integers from -15 to 15 that depend on their place."""
    places = np.arange(int(np.prod(shape))) * 7919
    return (places % 31 - 15).astype(dtype).reshape(shape)


def make_matrices(maker: Maker) -> dict[str, Array]:
    """Return four matrices [8][8] whose elements are their places."""
    rows = np.arange(32 * 8, dtype=np.uint16).reshape(32, 8)
    return {"out": maker.unwritten((2, 32, 4), np.uint32), "rows": maker.array(rows)}


def make_copy(maker: Maker) -> dict[str, Array]:
    """Return rows of 16 bytes."""
    rows = np.arange(1, 32 * 8 + 1, dtype=np.uint16).reshape(32, 8)
    return {"out": maker.unwritten((32, 8), np.uint16), "rows": maker.array(rows)}


def make_exponents(maker: Maker) -> dict[str, Array]:
    """Return exponents that a score may become, down to where 2^x is 0."""
    x = np.concatenate((np.linspace(-160, 20, NUM_FLOATS - 3), [0.0, -np.inf, -126.0])).astype(np.float32)
    return {"out": maker.unwritten((NUM_FLOATS,)), "x": maker.array(x)}


def make_floats(maker: Maker) -> dict[str, Array]:
    """Return floats that round in every way."""
    places = np.arange(NUM_FLOATS - len(SPECIAL), dtype=np.uint64)
    any_bits = (places * np.uint64(2654435761) % np.uint64(2**32)).astype(np.uint32)
    return {
        "bf16_pairs": maker.unwritten((NUM_FLOATS,), np.uint32),
        "f16_pairs": maker.unwritten((NUM_FLOATS,), np.uint32),
        "x": maker.array(np.concatenate((SPECIAL, any_bits)).view(np.float32)),
    }


def make_halves(maker: Maker) -> dict[str, Array]:
    """Return the bits of halves of every sign and exponent, subnormals, infinities and NaN among them."""
    bits = np.arange(0, 2**16, 2**16 // NUM_FLOATS) + np.arange(NUM_FLOATS) % 64
    return {"out": maker.unwritten((NUM_FLOATS,)), "bits": maker.array(bits.astype(np.uint16))}


PROBES = [
    *(multiply(element, integers=integers) for element in ("bf16", "f16") for integers in (True, False)),
    probe("ldmatrix", "load_four_matrices", make_matrices, outputs=("out",)),
    probe("cp.async", "copy", make_copy, outputs=("out",)),
    # 2 units in the last place, on both sides.
    probe(
        "exp2",
        "exponentiate",
        make_exponents,
        outputs=("out",),
        scalars=(NUM_FLOATS,),
        tolerance=Tolerance(2**-21, 2**-126),
    ),
    probe("narrow", "narrow", make_floats, outputs=("bf16_pairs", "f16_pairs"), scalars=(NUM_FLOATS,)),
    probe("widen", "widen", make_halves, outputs=("out",), scalars=(NUM_FLOATS,)),
]
