"""Replay: a trace's calls, in the order they came, made again to schedulers of the same configuration.

Every plan must be the recorded one, bit for bit but for token ids.
"""

from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Items
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cupaged.batch import Batch, Flag, StepOutput
from cupaged.scheduler.scheduler import Scheduler
from cupaged.sequence import NOT_FINISHED, FinishReason, Sequence, SequenceGroup
from cupaged.trace.plan_decoder import PlanDecoder, describe_difference, plan_of
from cupaged.trace.plan_encoder import PlanEncoder
from cupaged.trace.plan_state import create_plan_state
from cupaged.trace.records import Kind, Record
from cupaged.trace.varint import encode_ints
from cupaged.trace.workload import FILLER, Continuation, Request, Segment


class PlansDifferError(Exception):
    """A replay's plan is not the recorded one; the text says which and where."""


class Event(NamedTuple):
    """What has just been done again."""

    kind: Kind
    time: float  # seconds since the scheduler was made
    scheduler: Scheduler
    batch: Batch | None = None  # of a PLAN and an UPDATE
    sequences: Items[Sequence] = ()  # by the batch's sequences


class SequenceRows:
    """Who has which row, kept up with what batches tell; for schedulers driven from outside."""

    def __init__(self) -> None:
        """Start without groups."""
        self.groups: dict[int, SequenceGroup] = {}  # by arrival, unfinished
        self._by_row: dict[int, Sequence] = {}

    def add(self, group: SequenceGroup) -> None:
        """Take a group that a scheduler has taken."""
        self.groups[group.arrival] = group

    def of(self, batch: Batch) -> list[Sequence]:
        """Return the sequences of a batch that has just been planned."""
        if (batch.flags & int(Flag.RESET)).any():
            self.groups = {arrival: group for arrival, group in self.groups.items() if group.unfinished}
            all_sequences = (seq for group in self.groups.values() for seq in group.unfinished)
            self._by_row = {seq.row: seq for seq in all_sequences if seq.row >= 0}
        return [self._by_row[row] for row in batch.rows.tolist()]


class OutputScript:
    """What each sequence of a workload samples."""

    def __init__(self) -> None:
        """Start without sequences."""
        self._ids: dict[Sequence, NDArray[np.int32]] = {}

    def add(self, group: SequenceGroup, request: Request) -> None:
        """Learn what a group's sequences sample."""
        self._ids |= {seq: request.token_ids(seq.index) for seq in group.sequences}

    def run(self, batch: Batch, sequences: list[Sequence]) -> StepOutput:
        """Return what a worker would."""
        samples = (batch.flags & int(Flag.SAMPLES)) != 0
        token_ids = np.full((batch.num_seqs, 1), FILLER, np.int32)
        positions = batch.output_position.tolist()
        for i in np.flatnonzero(samples).tolist():
            ids = self._ids[sequences[i]]
            if positions[i] < ids.size:
                token_ids[i] = ids[positions[i]]
        return StepOutput(token_ids, samples.astype(np.int32))


def replay(segment: Segment) -> Iterator[Event]:
    """Make a segment's calls again, yield after each; PlansDifferError at the first other plan."""
    return _Replay(segment).run()


class _Replay:
    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._scheduler = Scheduler(segment.config)
        self._rows, self._script = SequenceRows(), OutputScript()
        self._continuations: dict[int, Iterator[Continuation]] = {}  # by arrival
        self._in_flight: deque[tuple[Batch, list[Sequence]]] = deque()
        self._plans = PlanEncoder(create_plan_state(segment.config))
        self._num_plans = 0

    def run(self) -> Iterator[Event]:
        """Go through the records."""
        scheduler, requests, microseconds = self._scheduler, iter(self._segment.requests.values()), 0
        for record in self._segment.records:
            values = [] if record.kind == Kind.ADD else record.values
            microseconds += values[0] if values else 0
            event = Event(record.kind, microseconds / 1e6, scheduler)
            if record.kind == Kind.ADD:
                request = next(requests)
                microseconds = round(request.time * 1e6)
                self._add(request)
            elif record.kind in (Kind.PLAN, Kind.IDLE):
                batch = self._schedule(record, values)
                event = event._replace(batch=batch, sequences=self._in_flight[-1][1] if batch else [])
            elif record.kind == Kind.UPDATE:
                batch, sequences = self._update(values)
                event = event._replace(batch=batch, sequences=sequences)
            else:
                self._call(record.kind, values[1:])
            yield event

    def _add(self, request: Request) -> None:
        group = request.create_group(self._segment.config.policy)
        recorded = request.fields["arrival"]
        try:
            self._scheduler.add(group)
        except ValueError as error:
            raise PlansDifferError(f"request {recorded} is refused now: {error}") from None
        if group.arrival != recorded:
            raise PlansDifferError(f"request {recorded} is the {group.arrival}th now")
        self._rows.add(group)
        self._continuations[group.arrival] = iter(request.continuations)
        self._script.add(group, request)

    def _schedule(self, record: Record, values: list[int]) -> Batch | None:
        batch = self._scheduler.schedule()
        where = f"step {self._num_plans}"
        if (batch is None) != (record.kind == Kind.IDLE):
            raise PlansDifferError(f"{where} is {'nothing' if batch is None else 'a plan'} now, but was not")
        if batch is None:
            return None
        if self._plans.encode(batch) != record.payload[len(encode_ints(values[:1])) :]:
            raise PlansDifferError(f"{where}: {self._difference(batch)}")
        self._num_plans += 1
        self._in_flight.append((batch, self._rows.of(batch)))
        return batch

    def _difference(self, batch: Batch) -> str:
        """Say where the plan is another; the records before it are read again, for what they foretell."""
        decoder = PlanDecoder(create_plan_state(self._segment.config))
        plans = [record for record in self._segment.records if record.kind == Kind.PLAN]
        for record in plans[: self._num_plans]:
            decoder.decode(record.values[1:])
        return describe_difference(decoder.decode(plans[self._num_plans].values[1:]), plan_of(batch))

    def _update(self, values: list[int]) -> tuple[Batch, list[Sequence]]:
        batch, sequences = self._in_flight.popleft()
        update = self._scheduler.update(batch, self._script.run(batch, sequences))
        ended: list[int] = []
        for i in np.flatnonzero(update.finish_reasons != NOT_FINISHED).tolist():
            seq, length = sequences[i], int(batch.output_position[i]) + 1
            ended += [seq.group.arrival, seq.index, int(update.finish_reasons[i]), length]
        recorded = values[2 : 2 + 4 * values[1]]
        if ended != recorded:
            raise PlansDifferError(
                f"by step {self._num_plans - 1} ended {ended} now, {recorded} in the trace"
            )
        return batch, sequences

    def _call(self, kind: Kind, values: list[int]) -> None:
        if kind == Kind.RESET_PREFIX_CACHE:
            self._scheduler.reset_prefix_cache()
            return
        arrival = values[0]
        group = self._rows.groups[arrival]
        if kind == Kind.FINISH:
            self._scheduler.finish(group.sequences[values[2]], FinishReason(values[1]))
        elif kind == Kind.FINISH_GROUP:
            self._scheduler.finish_group(group, FinishReason(values[1]))
        else:
            self._scheduler.continue_beams(group, *next(self._continuations[arrival]))
