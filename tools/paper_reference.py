"""What the paper compares with: contiguous KV memory in three sizes of reservation, and static batching.

A reservation is one contiguous region, found by buddy allocation, for all that a request may come to hold:
the model's maximum, its output rounded up to a power of two, or (knowing the future) exactly what it will be.
Requests are batched step by step, first come, first served, as Orca does; steps take what paper_machine says.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tools.paper_machine import CONTEXT_SECONDS, step_seconds
from tools.paper_workload import MAX_TOKENS, Workload

RESERVATIONS = ("maximum", "power of two", "oracle")


def reserve(reservation: str, prompt: int, output: int) -> int:
    """Return the slots that a request reserves."""
    slots = {
        "maximum": MAX_TOKENS,
        "power of two": prompt + (1 << (output - 1).bit_length()),
        "oracle": prompt + output,
    }
    return slots[reservation]


class Buddy:
    """Buddy allocation: regions are powers of two, halved on demand, joined when both halves are free."""

    def __init__(self, num_slots: int) -> None:
        """Cut the pool, largest first, into the powers of two that it is the sum of."""
        self.free: dict[int, set[int]] = {1 << i: set() for i in range(num_slots.bit_length())}
        self._sizes: dict[int, int] = {}  # of the regions in use, by offset
        offset = 0
        for size in sorted(self.free, reverse=True):
            if num_slots & size:
                self.free[size].add(offset)
                offset += size

    def allocate(self, num_slots: int) -> int | None:
        """Return the offset of a region of the next power of two, the smallest and lowest that is free."""
        wanted = 1 << (num_slots - 1).bit_length()
        size = wanted
        while size in self.free and not self.free[size]:
            size *= 2
        if size not in self.free:
            return None
        offset = min(self.free[size])
        self.free[size].remove(offset)
        while size > wanted:
            size //= 2
            self.free[size].add(offset + size)
        self._sizes[offset] = size
        return offset

    def release(self, offset: int) -> None:
        """Give a region back and join it with its other half as often as that is free."""
        size = self._sizes.pop(offset)
        while (offset ^ size) in self.free[size]:
            self.free[size].remove(offset ^ size)
            offset &= ~size
            size *= 2
        self.free[size].add(offset)


class Shares(NamedTuple):
    """What the pool's slots are, on average over the measured time; together 1."""

    tokens: float  # hold a token's keys and values
    reserved: float  # will hold one
    internal: float  # reserved, but never used
    external: float  # in no reservation: free, or lost to rounding and gaps


class ContiguousRun(NamedTuple):
    """A finished run over reservations."""

    shares: Shares
    mean_batch: float
    output_rate: float  # tokens per second


class StaticRun(NamedTuple):
    """A finished run of fixed batches."""

    output_rate: float  # tokens per second
    first_token: NDArray[np.float64]  # [num_requests], seconds from arrival to the first token


@dataclass(slots=True)
class Meter:
    """Means over the measured time: from when a quarter of the requests has begun until the last one has.

    By then those that began together at the start, all young, have parted.
    """

    num_requests: int
    seconds: float = 0.0
    sums: NDArray[np.float64] = field(default_factory=lambda: np.zeros(1))  # [number of values], once given

    def measures(self, num_begun: int) -> bool:
        """Return whether the run is past its start and still has requests to begin."""
        return self.num_requests / 4 <= num_begun < self.num_requests

    def add(self, seconds: float, *values: float) -> None:
        """Count that the values held for so long."""
        self.seconds += seconds
        self.sums = self.sums + seconds * np.array(values)

    def means(self) -> list[float]:
        """Return the values' means."""
        assert self.seconds > 0, f"{self.num_requests} requests are too few: all began at once"
        means: list[float] = (self.sums / self.seconds).tolist()
        return means


class Contiguous:
    """Continuous batching over contiguous reservations; steps that are alike are taken at once."""

    def __init__(self, workload: Workload, reservation: str, num_slots: int) -> None:
        """Queue all requests."""
        sizes = [reserve(reservation, *lengths) for lengths in zip(*self._lengths(workload), strict=True)]
        self.workload = workload
        self.num_slots = num_slots
        self._reserved = np.array(sizes)  # [num_requests], slots
        self._buddy = Buddy(num_slots)
        self._waiting = deque(range(len(sizes)))
        self._regions: dict[int, int] = {}  # offsets of those that run, by request
        self._done = np.zeros(len(sizes), np.int64)  # [num_requests], output tokens
        self._meter = Meter(len(sizes))
        self.now = 0.0

    @staticmethod
    def _lengths(workload: Workload) -> tuple[list[int], list[int]]:
        return workload.prompts.tolist(), workload.outputs.tolist()

    def run(self) -> ContiguousRun:
        """Run until all have finished."""
        while self._waiting or self._regions:
            begun = self._admit()
            if self._regions:
                self._advance(begun)
            else:
                self.now = float(self.workload.arrivals[self._waiting[0]])
        *shares, batch, rate = self._meter.means()
        return ContiguousRun(Shares(*(share / self.num_slots for share in shares)), batch, rate)

    def _admit(self) -> list[int]:
        """Give regions to those that have come, in order, until one gets none; return the admitted."""
        begun: list[int] = []
        while self._waiting and self.workload.arrivals[self._waiting[0]] <= self.now:
            offset = self._buddy.allocate(int(self._reserved[self._waiting[0]]))
            if offset is None:
                break
            begun.append(self._waiting.popleft())
            self._regions[begun[-1]] = offset
        return begun

    def _advance(self, begun: list[int]) -> None:
        """Take one step if it has prompts, else decodes until a request ends or comes."""
        running, batch = list(self._regions), len(self._regions)
        prompts, outputs = self.workload.prompts[running], self.workload.outputs[running]
        held = int((prompts + self._done[running]).sum())  # in the cache once the first of the steps is done
        if begun:
            num_new = batch - len(begun) + int(self.workload.prompts[begun].sum())
            steps, seconds = 1, step_seconds(num_new, held)
        else:
            ends = decode_seconds(batch, held, int((outputs - self._done[running]).min()))
            steps = len(ends)
            if self._waiting and self.workload.arrivals[self._waiting[0]] > self.now:
                next_one = self.workload.arrivals[self._waiting[0]] - self.now
                steps = min(int(np.searchsorted(ends, next_one)) + 1, steps)
            seconds = float(ends[steps - 1])
        if self._meter.measures(self._meter.num_requests - len(self._waiting)):
            tokens = held + batch * (steps - 1) / 2
            used, reserved = int((prompts + outputs).sum()), int(self._reserved[running].sum())
            shares = (tokens, used - tokens, reserved - used, self.num_slots - reserved)
            self._meter.add(seconds, *shares, batch, batch * steps / seconds)
        self.now += seconds
        self._done[running] += steps
        for request in running:
            if self._done[request] == self.workload.outputs[request]:
                self._buddy.release(self._regions.pop(request))


def decode_seconds(batch: int, held: int, most: int) -> NDArray[np.float64]:
    """Return when each of `most` steps of decodes ends, seconds from now."""
    j = np.arange(1, most + 1)
    read = held * j + batch * j * (j - 1) / 2  # tokens in the cache, over all steps so far
    return j * step_seconds(batch, 0) + read * CONTEXT_SECONDS


def run_static(workload: Workload, batch_size: int) -> StaticRun:
    """Run the requests in fixed batches: prompts padded to the longest, all rows until the last has ended."""
    arrivals = workload.arrivals
    first_token = np.zeros(len(arrivals))
    now, begin = 0.0, 0
    while begin < len(arrivals):
        now = max(now, float(arrivals[begin]))
        end = min(begin + batch_size, int(np.searchsorted(arrivals, now, side="right")))
        batch, size = slice(begin, end), end - begin
        prompt, output = int(workload.prompts[batch].max()), int(workload.outputs[batch].max())
        now += step_seconds(size * prompt, size * prompt)
        first_token[batch] = now - arrivals[batch]
        if output > 1:
            now += float(decode_seconds(size, size * (prompt + 1), output - 1)[-1])
        begin = end
    return StaticRun(float(workload.outputs.sum()) / now, first_token)
