"""What the kernels of a case do, counted by the emulator in mode count, beside what their data sheets say.

Needs g++ and a few seconds; nothing here needs a GPU.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from tests.cuda_on_cpu.count import CountingDevice, KernelCounts
from tools.data_sheet import Sheet, read
from tools.kernel_cases.case import Case, HostArrays, Launch, record


class Counted(NamedTuple):
    """One kernel of a case."""

    launch: Launch
    sheet: Sheet
    variables: Mapping[str, Any]  # of the sheet
    counts: KernelCounts

    def says(self, field: str) -> int:
        """Return what the data sheet says of a field."""
        return self.sheet.evaluate(field, self.variables)


def count(case: Case) -> list[Counted]:
    """Run a case on host arrays; a kernel must be launched once in it."""
    device = CountingDevice(sources=case.sources)
    case.launch(device, case.make(HostArrays(case.name)))
    found = []
    for launch in record(case):
        counts = device.counts[launch.kernel]
        assert counts.launches == 1, f"{case.name} launches {launch.kernel} {counts.launches} times"
        sheet = read(launch.file, case.sources)[launch.kernel]
        found.append(Counted(launch, sheet, {**case.variables, **launch.constants}, counts))
    return found
