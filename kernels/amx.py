"""AMX: the eight tile registers of newer Intel server CPUs, and what each of their instructions does.

A tile has up to ROWS rows of up to ROW_BYTES bytes; how many, its configuration says. A call of a function
below compiles to the instruction that it names, if the CPU has it; then `tiles` is nothing, for a core has
one set. The function itself says what the instruction does. It runs where the compiler is off, on `tiles`
that stand in for the registers, and refuses what makes the CPU trap. Tile numbers are literals. Places in
arrays are counted in elements of the flat array.
"""

import ctypes
import sys
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import llvmlite.binding
import numpy as np
from llvmlite import ir
from numba import types
from numba.core.errors import TypingError
from numba.extending import overload
from numpy.typing import NDArray

from cupaged.kernels.emit import INT, NEAREST, call, lower_builtin, prefetch, templates

F = TypeVar("F", bound=Callable[..., Any])

TILES = 8
ROWS = 16  # of a tile, at most
ROW_BYTES = 64
TILE_BYTES = ROWS * ROW_BYTES
CONFIG_BYTES = 64  # 0: palette; 16 + 2 * tile: bytes of a row; 48 + tile: rows
LINE_BYTES = 64  # of a cache line
_LEAST = np.float32(2.0**-126)  # the least normal float32
_BYTE, _VOID = ir.IntType(8), ir.VoidType()


def _has_amx() -> bool:
    """Return whether there are tiles, and the system lets this process use them when asked to."""
    features = llvmlite.binding.get_host_cpu_features()
    if sys.platform != "linux" or not all(features.get(f"amx-{name}") for name in ("tile", "bf16", "int8")):
        return False
    arch_prctl, request_permission, tile_data = map(ctypes.c_long, (158, 0x1023, 18))
    return bool(ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0)


HAS_AMX = _has_amx()


class Tiles(NamedTuple):
    """What stands in for the registers of one core."""

    data: NDArray[np.uint8]  # [TILES, ROWS, ROW_BYTES]
    rows: NDArray[np.int64]  # [TILES]
    widths: NDArray[np.int64]  # [TILES], bytes of a row


def create_tiles() -> Any:
    """Return registers that are not configured."""
    data = np.zeros((TILES, ROWS, ROW_BYTES), np.uint8)
    return Tiles(data, np.zeros(TILES, np.int64), np.zeros(TILES, np.int64))


@overload(create_tiles, strict=False)
def _overload_create_tiles() -> Any:
    return lambda: 0


def _instruction(write: Callable[..., None], *literals: int) -> Callable[[F], F]:
    """Compile calls of a function to what write(builder, *args but tiles) writes.

    Arguments at the places `literals` are given as numbers, arrays as pointers.
    """

    def decorate(function: F) -> F:
        any_args: Any = types.VarArg(types.Any)  # type: ignore[no-untyped-call]
        key = f"amx.{function.__name__}"  # the function is not in its module yet

        @templates.infer_global(function, typing_key=key)
        class Template(templates.AbstractTemplate):  # type: ignore[misc]
            def generic(self, args: Any, kws: Any) -> Any:
                if not HAS_AMX:
                    raise TypingError(f"{key} is for CPUs with AMX only; see cupaged.kernels.amx.HAS_AMX")
                if kws or not all(isinstance(args[place], types.Literal) for place in literals):
                    return None
                exact = [
                    types.intp if isinstance(kind, types.Integer) and place not in literals else kind
                    for place, kind in enumerate(args)
                ]
                return templates.signature(types.none, *exact)

        @lower_builtin(key, any_args)  # type: ignore[untyped-decorator]
        def lower(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            given = []
            for kind, arg in zip(signature.args[1:], args[1:], strict=True):
                if isinstance(kind, types.Array):
                    given.append(context.make_array(kind)(context, builder, arg).data)
                else:
                    given.append(kind.literal_value if isinstance(kind, types.Literal) else arg)
            write(builder, *given)
            return context.get_dummy_value()

        return function

    return decorate


def _bytes_at(builder: Any, array: Any, index: Any) -> Any:
    return builder.bitcast(builder.gep(array, [index]), _BYTE.as_pointer())


def _write_ldtilecfg(builder: Any, config: Any) -> None:
    call(builder, "llvm.x86.ldtilecfg", _VOID, _bytes_at(builder, config, INT(0)))


@_instruction(_write_ldtilecfg)
def load_config(tiles: Any, config: Any) -> None:
    """Shape the tiles as uint8[CONFIG_BYTES] says, and zero them (ldtilecfg)."""
    widths, rows = config[16:32].view(np.uint16), config[48:56]
    assert config[0] == 1, "palette 1 is the only one there is"
    assert not np.r_[config[1:16], config[32:48], config[56:]].any(), "reserved bytes are 0"
    assert widths.max() <= ROW_BYTES, f"bytes of a row: {widths}"
    assert rows.max() <= ROWS, f"rows: {rows}"
    assert np.array_equal(widths == 0, rows == 0), f"a tile without rows has no bytes either: {widths} {rows}"
    tiles.data[:] = 0
    tiles.rows[:] = rows
    tiles.widths[:] = widths


def _write_tilerelease(builder: Any) -> None:
    call(builder, "llvm.x86.tilerelease", _VOID)


@_instruction(_write_tilerelease)
def release_tiles(tiles: Any) -> None:
    """Forget configuration and contents, so that the system need not save them (tilerelease)."""
    tiles.data[:] = 0
    tiles.rows[:] = 0
    tiles.widths[:] = 0


def _write_move(builder: Any, name: str, tile: int, array: Any, start: Any, stride: Any) -> None:
    element = array.type.pointee
    size = element.width // 8 if isinstance(element, ir.IntType) else 4
    call(builder, name, _VOID, _BYTE(tile), _bytes_at(builder, array, start), builder.mul(stride, INT(size)))


def _rows_in_memory(tiles: Any, tile: int, array: Any, start: int, stride: int) -> Any:
    """Return the bytes of a tile's rows as they lie in an array, a view for each."""
    assert tiles.rows[tile] > 0, f"tile {tile} is not configured"
    elements = tiles.widths[tile] // array.itemsize
    places = [start + row * stride for row in range(tiles.rows[tile])]
    assert min(places) >= 0, "rows before the array"
    assert max(places) + elements <= array.size, "rows past the array"
    return [array[place : place + elements].view(np.uint8) for place in places]


def _write_tileloadd(builder: Any, tile: int, array: Any, start: Any, stride: Any) -> None:
    _write_move(builder, "llvm.x86.tileloadd64", tile, array, start, stride)


@_instruction(_write_tileloadd, 1)
def load_tile(tiles: Any, tile: int, array: Any, start: int, stride: int) -> None:
    """Load a tile, a row from every `stride` elements; 0 repeats the first one (tileloadd)."""
    for row, source in zip(
        tiles.data[tile], _rows_in_memory(tiles, tile, array, start, stride), strict=False
    ):
        row[: source.size] = source


def _write_tilestored(builder: Any, tile: int, array: Any, start: Any, stride: Any) -> None:
    _write_move(builder, "llvm.x86.tilestored64", tile, array, start, stride)


@_instruction(_write_tilestored, 1)
def store_tile(tiles: Any, tile: int, array: Any, start: int, stride: int) -> None:
    """Store a tile, a row to every `stride` elements (tilestored)."""
    for row, target in zip(
        tiles.data[tile], _rows_in_memory(tiles, tile, array, start, stride), strict=False
    ):
        target[:] = row[: target.size]


def _dot_operands(tiles: Any, c: int, a: int, b: int, dtype: Any) -> Any:
    """Return A [rows, quads, n], B [quads, columns, n] of `dtype` and C [rows, columns], four bytes each."""
    assert len({c, a, b}) == 3, "the tiles are not three"
    assert tiles.rows[c] > 0, f"tile {c} is not configured"
    assert tiles.rows[a] == tiles.rows[c], "C and A differ in rows"
    assert tiles.widths[b] == tiles.widths[c], "C and B differ in columns"
    assert tiles.widths[a] == 4 * tiles.rows[b], "A and B differ in inputs"
    x, weight, total = (tiles.data[tile, : tiles.rows[tile], : tiles.widths[tile]] for tile in (a, b, c))
    number = 4 // np.dtype(dtype).itemsize
    return (
        x.view(dtype).reshape(len(x), -1, number),
        weight.view(dtype).reshape(len(weight), -1, number),
        total.view(np.int32 if dtype == np.int8 else np.float32),
    )


def _flush(x: Any) -> Any:
    return np.where(np.abs(x) < _LEAST, x * np.float32(0.0), x)


def _floats(halves: Any) -> Any:
    return _flush((halves.astype(np.uint32) << 16).view(np.float32))


def _write_tdpbf16ps(builder: Any, c: int, a: int, b: int) -> None:
    call(builder, "llvm.x86.tdpbf16ps", _VOID, _BYTE(c), _BYTE(a), _BYTE(b))


@_instruction(_write_tdpbf16ps, 1, 2, 3)
def dot_bfloat16(tiles: Any, c: int, a: int, b: int) -> None:
    """Do C[rows, columns] += A[rows, pairs, 2] @ B[pairs, columns, 2], bfloat16 in float32 (tdpbf16ps).

    First and second numbers of the pairs are a chain each, ascending from 0; their sum is added to C. Every
    sum is rounded to nearest even; denormals count as 0. (Here a product is rounded too, which shows only
    where it is denormal.)
    """
    x, weight, total = _dot_operands(tiles, c, a, b, np.uint16)
    x, weight = _floats(x), _floats(weight)
    chains = np.zeros((*total.shape, 2), np.float32)
    for pair in range(len(weight)):
        chains = _flush(chains + x[:, pair, None] * weight[pair])
    total[:] = _flush(_flush(total) + _flush(chains[..., 0] + chains[..., 1]))


def _write_tdpbssd(builder: Any, c: int, a: int, b: int) -> None:
    call(builder, "llvm.x86.tdpbssd", _VOID, _BYTE(c), _BYTE(a), _BYTE(b))


@_instruction(_write_tdpbssd, 1, 2, 3)
def dot_int8(tiles: Any, c: int, a: int, b: int) -> None:
    """Do C[rows, columns] += A[rows, quads, 4] @ B[quads, columns, 4], int8 in int32 (tdpbssd)."""
    x, weight, total = _dot_operands(tiles, c, a, b, np.int8)
    total += np.einsum("rqi,qci->rc", x, weight, dtype=np.int32)


def _write_prefetcht0(builder: Any, array: Any, start: Any, lines: int) -> None:
    first = _bytes_at(builder, array, start)
    for line in range(lines):
        prefetch(builder, builder.gep(first, [INT(line * LINE_BYTES)]), NEAREST)


@_instruction(_write_prefetcht0, 3)
def fetch_lines(tiles: Any, array: Any, start: int, lines: int) -> None:
    """Ask for so many cache lines, a literal, from an element on; any place will do (prefetcht0 each)."""
