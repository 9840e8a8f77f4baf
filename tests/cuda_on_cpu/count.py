"""What mode count tells of launches, as a profiler on a GPU would: by kind of event and by source line.

count.cpp counts by instruction; here instructions become lines of .cu and .cuh files, and launches add up.
"""

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

from cupaged.kernels.launch import SOURCES
from tests.cuda_on_cpu.device import EmulatedDevice, EmulatedKernel

SECTOR = 32  # bytes
FLOPS_PER_MULTIPLY = 2 * 16 * 8 * 16  # of one mma.m16n8k16


class Event(IntEnum):
    """Kinds of events, as in count.cpp."""

    GLOBAL_LOAD = 0
    GLOBAL_STORE = 1
    COPY_SOURCE = 2  # cp.async, its reading
    SHARED_LOAD = 3
    SHARED_STORE = 4
    COPY_DESTINATION = 5  # cp.async, its writing
    LOAD_MATRICES = 6
    GLOBAL_ATOMIC = 7
    SHARED_ATOMIC = 8
    MULTIPLY = 9
    SHUFFLE = 10
    VOTE = 11  # ballot, any, all, match, reduce
    WARP_BARRIER = 12
    BARRIER = 13


GLOBAL = (Event.GLOBAL_LOAD, Event.GLOBAL_STORE, Event.COPY_SOURCE)
SHARED = (Event.SHARED_LOAD, Event.SHARED_STORE, Event.COPY_DESTINATION, Event.LOAD_MATRICES)


class Line(NamedTuple):
    """Where an event is."""

    event: Event
    source: str  # "rms_norm.cu:40"; for one in a header "gpu.cuh:170 < rms_norm.cu:40"


@dataclass(frozen=True, slots=True)
class Count:
    """Events of one line, or of several together."""

    requests: int = 0  # of warps; barriers: of blocks
    bytes: int = 0  # that the lanes asked for
    moved: int = 0  # sectors of global memory, wavefronts of shared memory
    ideal: int = 0  # sectors that the bytes fill; wavefronts without bank conflicts
    widths: frozenset[int] = frozenset()  # bytes that one lane asks for

    def __add__(self, other: "Count") -> "Count":
        return Count(
            self.requests + other.requests,
            self.bytes + other.bytes,
            self.moved + other.moved,
            self.ideal + other.ideal,
            self.widths | other.widths,
        )

    @property
    def efficiency(self) -> float:
        """Share of what was moved that would have been enough: 1 = coalesced, or no bank conflict."""
        return self.ideal / self.moved if self.moved else 1.0


@dataclass
class KernelCounts:
    """All launches of one kernel since the last reset."""

    launches: int = 0
    lines: dict[Line, Count] = field(default_factory=dict)
    block_read_bytes: int = 0  # in sectors that blocks read, each counted once a block: perfect L1 caches
    launch_bytes: int = 0  # in sectors read and written, each counted once a launch: a perfect L2 cache
    copy_bytes: int = 0  # of cp.async, under way at most in a block

    def total(self, *events: Event) -> Count:
        """Return the events of these kinds together."""
        return sum((count for line, count in self.lines.items() if line.event in events), Count())

    def at(self, *events: Event) -> Mapping[str, Count]:
        """Return the events of these kinds by source line."""
        found: dict[str, Count] = {}
        for line, count in self.lines.items():
            if line.event in events:
                found[line.source] = found.get(line.source, Count()) + count
        return found

    @property
    def bytes_moved(self) -> int:
        """Bytes of all sectors that warps read and wrote; what is asked for twice counts twice."""
        return SECTOR * self.total(*GLOBAL).moved

    @property
    def wavefronts(self) -> int:
        """Wavefronts of shared memory."""
        return self.total(*SHARED).moved

    @property
    def flops(self) -> int:
        """FLOPs of mma.sync."""
        return FLOPS_PER_MULTIPLY * self.total(Event.MULTIPLY).requests


class _Row(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in ("event", "offset", "requests", "bytes", "moved", "ideal", "widths")
    )


class _Totals(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("block_sectors", "launch_sectors", "copy_bytes"))


class CountingDevice(EmulatedDevice):
    """An EmulatedDevice in mode count that keeps what was counted, by kernel."""

    def __init__(self, *, sources: Path = SOURCES) -> None:
        super().__init__("count", sources=sources, on_launch=self._add)
        self.counts: dict[str, KernelCounts] = {}

    def reset_counts(self) -> None:
        """Forget all launches."""
        self.counts = {}

    def _add(self, kernel: EmulatedKernel) -> None:
        """Add what the last launch did."""
        size = ctypes.c_size_t()
        kernel.library.count_rows.restype = ctypes.POINTER(_Row)
        kernel.library.count_totals.restype = ctypes.POINTER(_Totals)
        found = kernel.library.count_rows(ctypes.byref(size))
        rows = [found[i] for i in range(size.value)]
        lines = kernel.lines(row.offset for row in rows)
        counts = self.counts.setdefault(kernel.name, KernelCounts())
        for row in rows:
            line = Line(Event(row.event), _source_of(lines[row.offset]))
            widths = frozenset(1 << bit for bit in range(5) if row.widths >> bit & 1)
            count = Count(row.requests, row.bytes, row.moved, row.ideal, widths)
            counts.lines[line] = counts.lines.get(line, Count()) + count
        totals = kernel.library.count_totals().contents
        counts.launches += 1
        counts.block_read_bytes += SECTOR * totals.block_sectors
        counts.launch_bytes += SECTOR * totals.launch_sectors
        counts.copy_bytes = max(counts.copy_bytes, totals.copy_bytes)


def _source_of(frames: str) -> str:
    """Return a line, and for one in a header the line of the .cu that it is for."""
    first, *callers = frames.split(", called at ")
    if ".cuh:" not in first:
        return first
    return " < ".join((first, *[caller for caller in callers if ".cuh:" not in caller][:1]))
