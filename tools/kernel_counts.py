"""What the kernels of a case do, counted by the emulator in mode count, beside what their data sheets say.

Needs g++ and a few seconds; nothing here needs a GPU.
"""

from typing import NamedTuple

from tests.cuda_on_cpu.count import CountingDevice, KernelCounts
from tools.kernel_cases.case import Case, HostArrays
from tools.kernel_cases.launches import Launch, record, sheet_value


class Counted(NamedTuple):
    """One launch of a case."""

    case: Case
    launch: Launch
    counts: KernelCounts

    def says(self, name: str) -> int:
        """Return what the data sheet says of the launch."""
        return sheet_value(self.case, self.launch, name)


def count(case: Case) -> list[Counted]:
    """Run a case on host arrays; a kernel must be launched once in it."""
    device = CountingDevice(sources=case.sources)
    case.launch(device, case.make(HostArrays(case.name)))
    found = []
    for launch in record(case):
        counts = device.counts[launch.kernel]
        assert counts.launches == 1, f"{case.name} launches {launch.kernel} {counts.launches} times"
        found.append(Counted(case, launch, counts))
    return found
