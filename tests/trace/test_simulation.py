"""The recorded requests in simulated time: the same outputs under any settings, at the model's pace."""

from dataclasses import replace
from pathlib import Path

import pytest

from cupaged.scheduler.counters import Counter
from cupaged.scheduler.scheduler_config import SchedulerConfig
from cupaged.sequence import FinishReason
from cupaged.trace.records import read_records
from cupaged.trace.simulation import Outcome, simulate
from cupaged.trace.step_model import StepModel
from cupaged.trace.workload import Segment, read_segments
from tests.trace.runs import record, small_config

MODEL = StepModel(5e-3, 1e-4, 1e-6)


@pytest.fixture(scope="module")
def segment(tmp_path_factory: pytest.TempPathFactory) -> Segment:
    """A recorded run, as if its requests had come a millisecond apart."""
    path = tmp_path_factory.mktemp("trace") / "a.trace"
    record(path, small_config(num_blocks=14, num_batches=2), seed=1, number=40)
    (found,) = read_segments(read_records(path))
    return replace(found, requests={a: replace(r, time=a / 1000) for a, r in found.requests.items()})


def run(segment: Segment, **changes: object) -> Outcome:
    return simulate(segment, replace(segment.config, **changes), MODEL)  # type: ignore[arg-type]


def num_tokens(segment: Segment) -> int:
    """Return the tokens of output that the trace tells of, those of beams left out."""
    requests = [request for request in segment.requests.values() if not request.fields["is_beam"]]
    return sum(output.length for request in requests for output in request.outputs)


def without_beams(segment: Segment) -> Segment:
    kept = {a: r for a, r in segment.requests.items() if not r.fields["is_beam"]}
    return replace(segment, requests=kept)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_blocks": 200},
        {"num_blocks": 14, "preemption_mode": "recompute"},
        {"preemption_mode": "swap", "num_host_blocks": 40},
        {"max_num_batched_tokens": 8, "num_batches": 1},
        {"policy": "fcfs"},
        {"enable_prefix_caching": False},
        {"block_size": 8},
        {"sliding_window": 8},
    ],
)
def test_every_request_ends_as_it_did(segment: Segment, changes: dict[str, object]) -> None:
    outcome = run(segment, **changes)

    assert outcome.num_refused == outcome.num_unended == 0
    assert outcome.num_finished == len(segment.requests) > 30
    assert len(outcome.request_seconds) == outcome.num_finished


@pytest.mark.parametrize("changes", [{}, {"num_blocks": 200}, {"max_num_batched_tokens": 8}])
def test_every_token_is_sampled_again(segment: Segment, changes: dict[str, object]) -> None:
    plain = without_beams(segment)

    outcome = run(plain, **changes)

    assert outcome.num_output_tokens == num_tokens(plain) > 100


def test_each_kind_of_end_is_in_the_trace(segment: Segment) -> None:
    outputs = [output for request in segment.requests.values() for output in request.outputs]

    ends = {(output.reason, output.ended_from_outside) for output in outputs}
    assert ends == {
        (FinishReason.STOP, False),
        (FinishReason.LENGTH, False),
        (FinishReason.STOP, True),
        (FinishReason.ABORT, True),
    }
    assert any(request.continuations for request in segment.requests.values())


def test_more_blocks_mean_no_preemption_and_less_time(segment: Segment) -> None:
    tight, roomy = run(segment), run(segment, num_blocks=200)

    assert tight.counters[Counter.PREEMPTIONS] > 0
    assert roomy.counters[Counter.PREEMPTIONS] == 0
    assert roomy.seconds < tight.seconds
    assert roomy.mean_used < tight.mean_used <= 1


def test_the_mode_decides_between_swap_and_recompute(segment: Segment) -> None:
    recompute = run(segment, preemption_mode="recompute").counters
    swap = run(segment, preemption_mode="swap", num_host_blocks=100).counters

    assert recompute[Counter.SWAPPED_OUT_BLOCKS] == 0 < recompute[Counter.RECOMPUTED_TOKENS]
    assert swap[Counter.SWAPPED_OUT_BLOCKS] > 0


def test_prefixes_are_equal_where_they_were(segment: Segment) -> None:
    cached = run(segment, num_blocks=400)
    not_cached = run(segment, num_blocks=400, enable_prefix_caching=False)

    assert 0 < cached.counters[Counter.PREFIX_HIT_TOKENS] < cached.counters[Counter.PREFIX_QUERIED_TOKENS]
    saved = not_cached.num_computed_tokens - cached.num_computed_tokens
    assert saved == cached.counters[Counter.PREFIX_HIT_TOKENS]


def test_time_is_the_sum_of_the_steps_and_waiting(segment: Segment) -> None:
    outcome = run(segment)

    assert outcome.busy_seconds <= outcome.seconds
    last_arrival = max(request.time for request in segment.requests.values())
    assert outcome.seconds == pytest.approx(outcome.busy_seconds, abs=last_arrival)
    assert min(outcome.queue_seconds) >= 0
    assert max(outcome.queue_seconds) > 5e-3


def test_a_request_has_one_first_token_however_many_its_sequences(segment: Segment) -> None:
    answered = {a: r for a, r in segment.requests.items() if all(output.length for output in r.outputs)}
    assert any(r.fields["num_sequences"] > 1 and not r.fields["is_beam"] for r in answered.values())

    outcome = run(replace(segment, requests=answered))

    assert len(outcome.first_token_seconds) == len(outcome.queue_seconds) == len(answered) > 20


def test_tokens_are_stored_in_the_slots_of_blocks_in_use(segment: Segment) -> None:
    outcome = run(segment)

    assert 0.5 * outcome.mean_used < outcome.mean_stored <= outcome.mean_used <= 1


def test_a_swap_takes_the_links_time(segment: Segment) -> None:
    fast = run(segment, preemption_mode="swap", num_host_blocks=100, swap_bandwidth=1e12)
    slow = run(segment, preemption_mode="swap", num_host_blocks=100, swap_bandwidth=1e5)

    blocks = slow.counters[Counter.SWAPPED_OUT_BLOCKS] + slow.counters[Counter.SWAPPED_IN_BLOCKS]
    assert slow.busy_seconds - fast.busy_seconds > 0.5 * blocks * segment.config.block_bytes / 1e5


def test_who_can_never_run_is_counted(segment: Segment) -> None:
    outcome = run(segment, max_num_seqs=1, num_blocks=12)

    assert outcome.num_refused > 0
    assert outcome.num_finished + outcome.num_refused == len(segment.requests)


def test_whose_end_is_not_known_is_left_out(tmp_path: Path) -> None:
    record(tmp_path / "a.trace", small_config(), seed=1)
    data = (tmp_path / "a.trace").read_bytes()
    (tmp_path / "a.trace").write_bytes(data[: len(data) * 2 // 3])
    (cut,) = read_segments(read_records(tmp_path / "a.trace"))

    outcome = run(cut)

    assert outcome.num_unended > 0
    assert outcome.num_finished + outcome.num_unended == len(cut.requests)


def test_arrivals_are_kept(segment: Segment) -> None:
    """Spread far apart, nobody waits for anybody."""
    apart = {a: replace(r, time=100.0 * i) for i, (a, r) in enumerate(segment.requests.items())}
    spread = replace(segment, requests=apart)

    outcome = run(spread)

    assert max(outcome.queue_seconds) == 0
    assert outcome.seconds > 100 * (len(apart) - 1)
    assert outcome.mean_running <= max(r.fields["num_sequences"] for r in apart.values())


def test_configurations_that_cannot_be_are_refused(segment: Segment) -> None:
    config: SchedulerConfig = replace(segment.config, num_blocks=2)

    with pytest.raises(ValueError, match="max_model_len is 48 but the KV cache holds 8 tokens"):
        simulate(segment, config, MODEL)
