"""A Device (kernels/launch.py) on the CPU: the lines that launch a kernel on a GPU launch it here.

Mode fast runs kernels plainly, check watches every access and finds races, count counts (count.py).
"""

import ctypes
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from cupaged.kernels.launch import SOURCES, Constant, Grid, Parameter, parameters
from tests.cuda_on_cpu.arguments import check_parameters, pack
from tests.cuda_on_cpu.build import MODES, EmulatorError, build
from tests.cuda_on_cpu.library import ArraySpan, LaunchRequest, kernel_type, load
from tests.cuda_on_cpu.lines import lines

__all__ = ["EmulatedDevice", "EmulatedKernel", "EmulatorError"]

ORDERS = ("forward", "reverse", "random")  # as enum Order in block.h
MAX_THREADS = 1024  # a block
MAX_GRID = (2**31 - 1, 65535, 65535)
MAX_SHARED_BYTES = 227 * 1024  # a block, dynamic, on sm_90


class EmulatedKernel:
    """One kernel of one library."""

    def __init__(self, device: "EmulatedDevice", path: Path, name: str, parsed: Sequence[Parameter]) -> None:
        self.device = device
        self.path = path
        self.name = name
        self.library = load(path)
        self._type = kernel_type(self.library, name)
        self.parameters = parsed
        check_parameters(self._type, parsed)

    def __call__(self, grid: Grid, block: int, args: tuple[Any, ...], shared_bytes: int = 0) -> None:
        """Run the kernel over the grid; EmulatorError says what is wrong with it or with the launch."""
        run = self.prepare(grid, block, args, shared_bytes)
        if run is not None:
            run()

    def prepare(
        self, grid: Grid, block: int, args: tuple[Any, ...], shared_bytes: int = 0
    ) -> Callable[[], None] | None:
        """Return what runs the kernel, any number of times, its arguments taken now; None without blocks."""
        self._check(grid, block, shared_bytes)
        packed, arrays = pack(self._type, self.parameters, args)
        if 0 in grid:
            return None
        device = self.device
        request = LaunchRequest(
            kernel=ctypes.pointer(self._type),
            parameters=packed,
            arrays=(ArraySpan * len(arrays))(*arrays),
            num_arrays=len(arrays),
            shared_bytes=shared_bytes,
            seed=device.seed,
            grid=grid,
            order=ORDERS.index(device.schedule),
            early_copies=device.early_copies,
        )
        return partial(self._run, request)

    def _run(self, request: LaunchRequest) -> None:
        error = self.library.launch(ctypes.byref(request))
        if error is not None:
            raise EmulatorError(self._with_lines(error.decode()))
        if self.device.on_launch is not None:
            self.device.on_launch(self)

    def _check(self, grid: Grid, block: int, shared_bytes: int) -> None:
        if len(grid) != 3 or not all(0 <= n <= limit for n, limit in zip(grid, MAX_GRID, strict=True)):
            raise EmulatorError(f"{self.name}: grid {grid}, but up to {MAX_GRID} blocks are possible")
        if block > MAX_THREADS:
            raise EmulatorError(f"{self.name}: {block} threads a block, at most {MAX_THREADS} are possible")
        if block != self._type.threads:
            raise EmulatorError(f"{self.name}: {block} threads a block, but KERNEL({self._type.threads})")
        if not 0 <= shared_bytes <= MAX_SHARED_BYTES:
            raise EmulatorError(f"{self.name}: {shared_bytes} bytes of shared memory, of {MAX_SHARED_BYTES}")

    def lines(self, offsets: Iterable[int]) -> Mapping[int, str]:
        """Return the lines of the source that offsets in the library stand for."""
        return lines(self.path, offsets)

    def _with_lines(self, message: str) -> str:
        offsets = {int(offset, 16) for offset in re.findall(r"\{\+0x(\w+)\}", message)}
        found = self.lines(offsets)
        return re.sub(r"\{\+0x(\w+)\}", lambda match: found[int(match[1], 16)], message)


class EmulatedDevice:
    """Runs kernels of `sources` in a mode and under a schedule of threads; on_launch is called after each."""

    def __init__(
        self,
        mode: str = "fast",
        *,
        schedule: str = "forward",
        seed: int = 0,
        early_copies: bool = False,
        sources: Path = SOURCES,
        on_launch: Callable[[EmulatedKernel], None] | None = None,
    ) -> None:
        if mode not in MODES or schedule not in ORDERS:
            raise ValueError(f"{mode!r}, {schedule!r}: use one of {list(MODES)} and one of {ORDERS}")
        self.mode = mode
        self.schedule = schedule
        self.seed = seed
        self.early_copies = early_copies
        self.sources = sources
        self.on_launch = on_launch
        self._kernels: dict[tuple[object, ...], EmulatedKernel] = {}

    def kernel(self, file: str, name: str, **constants: Constant) -> EmulatedKernel:
        """Return kernel `name` of `file`.cu compiled with -D constants; compiled and loaded once."""
        key = (file, name, *sorted(constants.items()))
        if key not in self._kernels:
            source = self.sources / f"{file}.cu"
            parsed = parameters(source.read_text(encoding="utf-8"))
            if name not in parsed:
                raise EmulatorError(f"{source.name} has no kernel {name!r}, only {sorted(parsed)}")
            self._kernels[key] = EmulatedKernel(self, build(source, self.mode, constants), name, parsed[name])
        return self._kernels[key]
