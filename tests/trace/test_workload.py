"""Times of a recorded run: how long a step took, and how long a sequence lived."""

import json
from dataclasses import asdict

import pytest

from cupaged.sequence import FinishReason
from cupaged.trace.plan_state import NUM_TOTALS
from cupaged.trace.records import Kind, Record, Recording
from cupaged.trace.varint import encode_ints
from cupaged.trace.workload import Segment, read_segments
from tests.trace.runs import small_config

ELAPSED = 10  # microseconds from each record to the next
NO_COUNTS = [0] * NUM_TOTALS  # a plan's, as differences to those of the plan before
NOBODY = [0]  # the number of sequences that an update ends


def segment_of(*records: Record) -> Segment:
    head = {"with_text": False, "piece": 4, "config": asdict(small_config())}
    first = Record(Kind.SCHEDULER, json.dumps(head).encode())
    (segment,) = read_segments(Recording([first, *records], 0))
    return segment


def record_of(kind: Kind, values: list[int]) -> Record:
    return Record(kind, encode_ints([ELAPSED, *values]))


def test_a_step_begins_when_it_is_planned_or_when_the_one_before_ends() -> None:
    plan, update = record_of(Kind.PLAN, NO_COUNTS), record_of(Kind.UPDATE, NOBODY)

    segment = segment_of(plan, plan, update, update)

    assert [step.seconds for step in segment.steps] == pytest.approx([20e-6, 10e-6])


def test_a_lifetime_counts_from_the_requests_arrival() -> None:
    fields = {"time": ELAPSED, "arrival": 0, "num_prompt_tokens": 3, "max_total_tokens": 4, "seed": 0}
    add = Record(Kind.ADD, json.dumps(fields).encode() + b"\n")
    idle = record_of(Kind.IDLE, [])
    plan = record_of(Kind.PLAN, NO_COUNTS)
    update = record_of(Kind.UPDATE, [1, 0, 0, int(FinishReason.LENGTH), 1])

    request = segment_of(idle, idle, add, plan, update).requests[0]

    assert request.time == pytest.approx(30e-6)
    assert request.outputs[0].lifetime == pytest.approx(20e-6)
