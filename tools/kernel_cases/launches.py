"""What cases launch, found out without running them: kernels, -D constants, grids, what data sheets say."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from cupaged.kernels.launch import Constant, Grid
from tools.data_sheet import read
from tools.kernel_cases.case import Arrays, Case, ShapeArrays


class Launch(NamedTuple):
    """One launch, as a launch function asked for it."""

    file: str
    kernel: str
    constants: Mapping[str, Constant]  # -D
    grid: Grid
    block: int
    args: tuple[Any, ...]
    shared_bytes: int  # dynamic


@dataclass
class RecordingDevice:
    """launch.Device that runs nothing and notes every launch."""

    launches: list[Launch] = field(default_factory=list)

    def kernel(self, file: str, name: str, **constants: Constant) -> Callable[..., None]:
        """Return what notes a launch of this kernel."""

        def note(grid: Grid, block: int, args: tuple[Any, ...], shared_bytes: int = 0) -> None:
            self.launches.append(Launch(file, name, constants, grid, block, args, shared_bytes))

        return note


def record(case: Case, arrays: Arrays | None = None) -> list[Launch]:
    """Return the launches of a case, which do not run; without arrays of its own it has only shapes."""
    device = RecordingDevice()
    case.launch(device, case.make(ShapeArrays()) if arrays is None else arrays)
    return device.launches


def sheet_value(case: Case, launch: Launch, name: str) -> int:
    """Return what the data sheet says of a launch in a field such as "bytes"; see tools/data_sheet.py."""
    sheet = read(launch.file, case.sources)[launch.kernel]
    return sheet.evaluate(name, {**case.variables, **launch.constants})


class Instance(NamedTuple):
    """One .cu file with one set of -D constants, which is compiled at once, and the launches that need it."""

    path: Path
    constants: tuple[tuple[str, Constant], ...]
    launches: list[tuple[Case, Launch]]

    def __str__(self) -> str:
        return "-".join([self.path.stem, *(f"{name}={value}" for name, value in self.constants)])


def instances(cases: Iterable[Case]) -> list[Instance]:
    """Return what must be compiled for the cases, each once."""
    found: dict[tuple[Path, tuple[tuple[str, Constant], ...]], Instance] = {}
    for case in cases:
        for launch in record(case):
            key = (case.sources / f"{launch.file}.cu", tuple(sorted(launch.constants.items())))
            found.setdefault(key, Instance(*key, [])).launches.append((case, launch))
    return [found[key] for key in sorted(found, key=repr)]
