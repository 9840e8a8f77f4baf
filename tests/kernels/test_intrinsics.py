"""Instructions: each against NumPy's result, in every form that this CPU has."""

import ctypes
from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
import ml_dtypes
import numpy as np
import pytest
from llvmlite import ir
from numpy.typing import NDArray

from cupaged.kernels import intrinsics
from cupaged.kernels.emit import FLOATS, INT, LANES, WORDS
from cupaged.kernels.intrinsics import HAS_AVX_VNNI, HAS_BF16, HAS_VNNI

PAIRS_OF_BYTES = ir.VectorType(ir.IntType(8), 2 * LANES)
DOTS = [intrinsics.dot_quads_plain]
DOTS += [intrinsics.dot_quads_256] if HAS_AVX_VNNI else []
DOTS += [intrinsics.dot_quads_512] if HAS_VNNI else []


def execute(emit: Callable[..., Any], inputs: list[tuple[Any, NDArray[Any]]], *outputs: NDArray[Any]) -> None:
    """Run the code that `emit` writes: it gets the inputs, an LLVM type each; what it returns is stored."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    module, arrays = ir.Module(), [array for _, array in inputs] + list(outputs)
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [INT] * len(arrays)), "run")
    builder = ir.IRBuilder(function.append_basic_block())
    values = []
    for (kind, _), address in zip(inputs, function.args, strict=False):
        values.append(builder.load(builder.inttoptr(address, kind.as_pointer())))
        values[-1].align = 1
    made = emit(builder, *values)
    for value, address in zip(made, function.args[len(inputs) :], strict=True):
        builder.store(value, builder.inttoptr(address, value.type.as_pointer())).align = 1
    builder.ret_void()
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten()
    )
    with llvm.create_mcjit_compiler(llvm.parse_assembly(str(module)), machine) as engine:
        engine.finalize_object()
        run = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * len(arrays))(engine.get_function_address("run"))
        run(*(array.ctypes.data for array in arrays))


def integers(kind: Any, low: int, high: int, count: int) -> NDArray[Any]:
    return np.random.default_rng(count).integers(low, high, count, endpoint=True).astype(kind)


@pytest.mark.parametrize("dot", DOTS, ids=lambda dot: dot.__name__)
@pytest.mark.parametrize("extreme", [None, -128, 127])
def test_dot_of_quads_is_exact(dot: Callable[..., Any], extreme: int | None) -> None:
    unsigned, signed = integers(np.uint8, 0, 255, 4 * LANES), integers(np.int8, -128, 127, 4 * LANES)
    if extreme is not None:
        unsigned[:], signed[:] = 255, extreme
    total, out = integers(np.int32, -(2**30), 2**30, LANES), np.zeros(LANES, np.int32)

    execute(lambda *args: [dot(*args)], [(WORDS, total), (WORDS, unsigned), (WORDS, signed)], out)

    products = unsigned.astype(np.int64) * signed
    assert np.array_equal(out, total + products.reshape(LANES, 4).sum(1))


def test_pairs_of_bytes_become_floats() -> None:
    pairs = integers(np.int8, -128, 127, 2 * LANES)
    first, second = np.zeros((2, LANES), np.float32)

    execute(intrinsics.floats_of_byte_pairs, [(PAIRS_OF_BYTES, pairs)], first, second)

    assert np.array_equal(np.stack([first, second], 1).reshape(-1), pairs)


def test_pairs_of_bfloat16_become_floats() -> None:
    pairs = np.random.default_rng(0).standard_normal(2 * LANES).astype(ml_dtypes.bfloat16)
    first, second = np.zeros((2, LANES), np.float32)

    execute(intrinsics.floats_of_pairs, [(WORDS, pairs)], first, second)

    assert np.array_equal(np.stack([first, second], 1).reshape(-1), pairs.astype(np.float32))


@pytest.mark.parametrize("count", [-3, 0, 1, 9, 15, 16, 40])
def test_part_of_a_vector_is_loaded_and_stored(count: int) -> None:
    inside, x = np.arange(LANES) < count, np.random.default_rng(0).standard_normal(LANES, np.float32)
    loaded, stored = np.full((2, LANES), np.nan, np.float32)

    def emit(builder: Any, source: Any, target: Any, many: Any, value: Any) -> list[Any]:
        pointers = [builder.inttoptr(address, FLOATS.as_pointer()) for address in (source, target)]
        intrinsics.store_part(builder, value, pointers[1], many)
        return [intrinsics.load_part(builder, pointers[0], many)]

    addresses = [np.array([array.ctypes.data], np.int64) for array in (x, stored)]
    given = [(INT, address) for address in addresses]
    execute(emit, [*given, (ir.IntType(32), np.array([count], np.int32)), (FLOATS, x)], loaded)

    assert np.array_equal(loaded, np.where(inside, x, 0))
    assert np.array_equal(stored, np.where(inside, x, np.nan), equal_nan=True)


class TestBFloat16:
    """Where the CPU has AVX512_BF16."""

    __test__ = HAS_BF16

    def test_pairs_of_bytes_become_bfloat16(self) -> None:
        pairs, out = (
            np.arange(-128, 128, dtype=np.int8).reshape(8, -1),
            np.zeros(2 * LANES, ml_dtypes.bfloat16),
        )

        for some in pairs:
            execute(
                lambda *args: [intrinsics.halves_of_byte_pairs(*args)],
                [(PAIRS_OF_BYTES, some)],
                out.view(np.int32),
            )
            assert np.array_equal(out.astype(np.int8), some)

    def test_floats_are_rounded_to_pairs_of_bfloat16(self) -> None:
        x, out = (
            np.random.default_rng(0).standard_normal((2, LANES), np.float32),
            np.zeros(32, ml_dtypes.bfloat16),
        )
        x[0, :2] = 1 + 2**-8, 1 + 3 * 2**-8

        execute(
            lambda b, low, high: [intrinsics.round_to_pairs(b, high, low)],
            [(FLOATS, x[0]), (FLOATS, x[1])],
            out,
        )

        assert np.array_equal(out, x.reshape(-1).astype(ml_dtypes.bfloat16))

    def test_dot_of_pairs_adds_both_products(self) -> None:
        a, b = np.random.default_rng(0).standard_normal((2, 2 * LANES)).astype(ml_dtypes.bfloat16)
        total, out = np.linspace(-1, 1, LANES, dtype=np.float32), np.zeros(LANES, np.float32)

        execute(lambda *args: [intrinsics.dot_pairs(*args)], [(FLOATS, total), (WORDS, a), (WORDS, b)], out)

        exact = total + (a.astype(np.float64) * b.astype(np.float64)).reshape(LANES, 2).sum(1)
        assert np.abs(out - exact).max() < 1e-6
