"""Workload: what the users of a recorded run asked for and got, as far as a scheduler can tell.

Token ids are invented where the trace has none: 0, but at the end of a piece a number that stands for the
hash of the prefix up to there, so that prefixes are equal exactly where they were.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cupaged.batch import Count
from cupaged.config import SchedulingPolicy
from cupaged.sampling_params import SamplingParams
from cupaged.scheduler.scheduler_config import SchedulerConfig
from cupaged.sequence import FinishReason, SequenceGroup
from cupaged.trace.plan_state import CONTEXT, NUM_TOTALS
from cupaged.trace.records import REQUEST_DEFAULTS, Kind, Record, Recording
from cupaged.trace.varint import decode_ints

FILLER, STOP_TOKEN, FIRST_PIECE = 0, 1, 2  # invented token ids
_PARAMS = ("temperature", "top_p", "top_k", "min_p", "logprobs", "prompt_logprobs", "min_tokens")


@dataclass(slots=True)
class Output:
    """One sequence's output, or what is known of it."""

    pieces: list[int] = field(default_factory=list)  # token ids at the ends of pieces
    length: int = 0  # tokens; 0 while the trace does not tell
    reason: FinishReason | None = None  # None: it had not ended when the trace did
    ended_from_outside: bool = False  # by a stop string, an abort, the beam search
    lifetime: float = 0.0  # seconds from arrival to its end


class Continuation(NamedTuple):
    """One Scheduler.continue_beams."""

    parents: list[int]
    token_ids: list[int]


@dataclass(slots=True, kw_only=True)
class Request:
    """One request and all that became of it."""

    time: float  # of its arrival, seconds since the trace began
    fields: dict[str, Any]  # as recorded
    prompt: NDArray[np.int32]  # [num_prompt_tokens]
    piece: int  # tokens
    with_text: bool
    outputs: list[Output]  # by index
    continuations: list[Continuation] = field(default_factory=list)

    def create_group(self, policy: SchedulingPolicy) -> SequenceGroup:
        """Return the request as a scheduler of `policy` takes it."""
        f = self.fields
        return SequenceGroup(
            request_id=str(f["arrival"]),
            prompt_token_ids=self.prompt,
            params=SamplingParams(max_tokens=None, **{name: f[name] for name in _PARAMS}),
            max_total_tokens=f["max_total_tokens"],
            stop_token_ids=tuple(f["stop_token_ids"]) if self.with_text else (STOP_TOKEN,),
            banned_token_ids=tuple(range(f["num_banned"])),
            seed=f["seed"],
            num_sequences=f["num_sequences"],
            is_beam=f["is_beam"],
            num_candidates=f["num_candidates"],
            priority=f["priority"] if policy == "priority" else 0,
            cache_salts=tuple((kind, text) for kind, text in f["salts"]),
        )

    def token_ids(self, index: int) -> NDArray[np.int32]:
        """Return a sequence's output, [at least its length]; what is behind the last piece is FILLER."""
        output, num_prompt = self.outputs[index], self.prompt.size
        first = self.piece - 1 - num_prompt % self.piece  # where in the output its first piece ends
        known = first + 1 + (len(output.pieces) - 1) * self.piece if output.pieces else 0
        ids = np.full(max(output.length, known), FILLER, np.int32)
        ids[first : known : self.piece] = output.pieces
        if output.reason is FinishReason.STOP and not output.ended_from_outside and not self.with_text:
            ids[output.length - 1] = STOP_TOKEN
        return ids


class Step(NamedTuple):
    """One step as it went."""

    seconds: float  # from when it could begin to when its result was there
    num_tokens: int
    context: int  # tokens whose KV it read at most
    num_swapped: int  # blocks


@dataclass(slots=True, kw_only=True)
class Segment:
    """What one scheduler of the run was given; after a call that was broken off there is another."""

    config: SchedulerConfig
    piece: int  # tokens
    with_text: bool
    records: list[Record]  # behind its own
    requests: dict[int, Request] = field(default_factory=dict)  # by arrival
    steps: list[Step] = field(default_factory=list)
    seconds: float = 0.0  # from its beginning to its last record


def read_segments(recording: Recording) -> list[Segment]:
    """Return the run's schedulers; ValueError if they are another version's."""
    segments: list[Segment] = []
    for record in recording.records:
        if record.kind != Kind.SCHEDULER:
            segments[-1].records.append(record)
            continue
        try:
            head = json.loads(record.payload)
            config = SchedulerConfig(**head["config"])
            segments.append(
                Segment(config=config, piece=head["piece"], with_text=head["with_text"], records=[])
            )
        except (TypeError, KeyError) as error:
            raise ValueError(
                f"the trace is another version's: {error}; replay it with that version"
            ) from None
    names = _Names()
    for segment in segments:
        _Reader(segment, names).read()
    return segments


class _Names:
    """Token ids for hashes, each its own."""

    def __init__(self) -> None:
        self._ids: dict[int, int] = {}

    def id(self, value: int, with_text: bool) -> int:
        """Return the token id of a piece's value."""
        return value if with_text else self._ids.setdefault(value, FIRST_PIECE + len(self._ids))


class _Reader:
    """Goes through a segment's records and gathers its requests and steps."""

    def __init__(self, segment: Segment, names: _Names) -> None:
        self._segment, self._names = segment, names
        self._time = 0  # microseconds
        self._planned: list[tuple[int, NDArray[np.int64]]] = []  # when, counts
        self._counts = np.zeros(NUM_TOTALS, np.int64)  # of the last plan
        self._last_update = 0

    def read(self) -> None:
        """Fill the segment."""
        for record in self._segment.records:
            if record.kind == Kind.ADD:
                self._read_request(record.payload)
            else:
                values = record.values
                self._time += values[0]
                self._read_event(record.kind, values[1:])
        self._segment.seconds = self._time / 1e6

    def _read_request(self, payload: bytes) -> None:
        head, _, pieces = payload.partition(b"\n")
        fields = REQUEST_DEFAULTS | json.loads(head)
        self._time += fields["time"]
        segment = self._segment
        prompt = np.full(fields["num_prompt_tokens"], FILLER, np.int32)
        ends = prompt[segment.piece - 1 :: segment.piece]
        ends[:] = [self._names.id(value, segment.with_text) for value in decode_ints(pieces)]
        segment.requests[fields["arrival"]] = Request(
            time=self._time / 1e6,
            fields=fields,
            prompt=prompt,
            piece=segment.piece,
            with_text=segment.with_text,
            outputs=[Output() for _ in range(fields["num_sequences"])],
        )

    def _read_event(self, kind: Kind, values: list[int]) -> None:
        if kind == Kind.PLAN:
            self._counts = self._counts + np.array(values[:NUM_TOTALS])
            self._planned.append((self._time, self._counts))
        elif kind == Kind.UPDATE:
            self._read_step()
            for arrival, index, reason, length in _in_parts(values[1 : 1 + 4 * values[0]], 4):
                self._end(arrival, index, reason, length, from_outside=False)
            for arrival, index, value in self._pieces(values[1 + 4 * values[0] :]):
                self._segment.requests[arrival].outputs[index].pieces.append(value)
        elif kind in (Kind.FINISH, Kind.FINISH_GROUP):
            arrival, reason = values[:2]
            for index, length in _in_parts(values[2:], 2):
                self._end(arrival, index, reason, length, from_outside=True)
        elif kind == Kind.CONTINUE_BEAMS:
            arrival, number = values[:2]
            token_ids = [FILLER] * number
            for _, index, value in self._pieces(values[2 + number :]):
                token_ids[index] = value
            continuation = Continuation(values[2 : 2 + number], token_ids)
            self._segment.requests[arrival].continuations.append(continuation)

    def _pieces(self, values: list[int]) -> Iterator[tuple[int, int, int]]:
        """Go through the (arrival, index, token id) of the pieces in a record."""
        arrival = 0
        for difference, index, value in _in_parts(values, 3):
            arrival += difference
            yield arrival, index, self._names.id(value, self._segment.with_text)

    def _end(self, arrival: int, index: int, reason: int, length: int, *, from_outside: bool) -> None:
        request = self._segment.requests[arrival]
        output = request.outputs[index]
        output.reason, output.length, output.ended_from_outside = FinishReason(reason), length, from_outside
        output.lifetime = self._time / 1e6 - request.time

    def _read_step(self) -> None:
        planned, counts = self._planned.pop(0)
        began = max(planned, self._last_update)
        self._last_update = self._time
        self._segment.steps.append(
            Step(
                seconds=(self._time - began) / 1e6,
                num_tokens=int(counts[Count.NUM_TOKENS]),
                context=int(counts[CONTEXT]),
                num_swapped=int(counts[Count.NUM_SWAP_OUT] + counts[Count.NUM_SWAP_IN]),
            )
        )


def _in_parts(values: list[int], size: int) -> Iterator[list[int]]:
    return (values[i : i + size] for i in range(0, len(values), size))
