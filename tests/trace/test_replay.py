"""A recorded run, made again, has the same plans; a run that is not the same is found out."""

from dataclasses import replace
from pathlib import Path

import pytest

from cupaged.scheduler.counters import Counter
from cupaged.scheduler.scheduler_config import SchedulerConfig
from cupaged.trace.records import Kind, read_records
from cupaged.trace.replay import PlansDifferError, replay
from cupaged.trace.workload import Segment, read_segments
from tests.trace.runs import make_groups, record, small_config


def segment_of(path: Path) -> Segment:
    (segment,) = read_segments(read_records(path))
    return segment


@pytest.mark.parametrize("with_text", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"num_batches": 1},
        {"num_batches": 2},
        {"num_batches": 2, "num_blocks": 14, "preemption_mode": "recompute"},
        {"num_batches": 2, "num_blocks": 14, "preemption_mode": "swap"},
        {"num_batches": 1, "sliding_window": 9},
        {"num_batches": 2, "enable_prefix_caching": False},
    ],
)
@pytest.mark.parametrize("seed", [0, 1])
def test_plans_are_the_same_and_all_that_is_counted(
    tmp_path: Path, options: dict[str, object], seed: int, with_text: bool
) -> None:
    config = small_config(**options)
    counted = record(tmp_path / "a.trace", config, seed=seed, talks=True, with_text=with_text)

    *_, last = replay(segment_of(tmp_path / "a.trace"))

    assert {counter: int(last.scheduler.counters[counter]) for counter in Counter} == counted
    assert not last.scheduler.has_unfinished()


def test_a_sequence_is_itself_in_whatever_row(tmp_path: Path) -> None:
    """This run has one that leaves a row, goes on in another, and is back in the first."""
    config = small_config(num_blocks=13, preemption_mode="recompute", num_batches=2)
    record(tmp_path / "a.trace", config, seed=32, number=60, talks=True)

    list(replay(segment_of(tmp_path / "a.trace")))


def test_the_runs_have_what_is_to_be_replayed(tmp_path: Path) -> None:
    """Preemption both ways, copies, forks, hits, evictions, and every kind of record."""
    kinds: set[Kind] = set()
    total = dict.fromkeys(Counter, 0)
    for mode in ("recompute", "swap"):
        config = small_config(num_blocks=14, preemption_mode=mode)
        counted = record(tmp_path / f"{mode}.trace", config, seed=1)
        total = {counter: total[counter] + counted[counter] for counter in Counter}
        kinds |= {r.kind for r in read_records(tmp_path / f"{mode}.trace").records}

    assert all(total.values()), total
    assert kinds == set(Kind)


def test_nothing_can_be_read_of_texts(tmp_path: Path) -> None:
    """The same run twice: lengths, times and plans apart, only hashes under another key are left."""
    config = small_config(num_batches=1)
    traces = []
    for name in ("one", "other"):
        record(tmp_path / name, config, seed=2)
        traces.append(segment_of(tmp_path / name))
    added = [[r.payload for r in trace.records if r.kind == Kind.ADD] for trace in traces]

    for one, other in zip(*added, strict=True):
        head, _, pieces = one.partition(b"\n")
        assert b"secret" not in head
        assert b"tenant" not in head
        assert not pieces or pieces != other.partition(b"\n")[2]
    salts = [
        {tuple(r.fields["salts"][0]) for r in trace.requests.values() if r.fields["salts"]}
        for trace in traces
    ]
    assert [len(names) for names in salts] == [1, 1]
    assert salts[0] != salts[1]


def test_with_text_the_token_ids_are_there(tmp_path: Path) -> None:
    record(tmp_path / "a.trace", small_config(), seed=2, with_text=True)

    requests = segment_of(tmp_path / "a.trace").requests

    added = {tuple(request.prompt.tolist()) for request in requests.values()}
    assert added <= {tuple(group.prompt_token_ids.tolist()) for group in make_groups(2, 30)}
    assert len(requests) > 20


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"num_blocks": 23}, "step"),
        ({"max_num_batched_tokens": 23}, "step"),
        ({"enable_prefix_caching": False}, "step"),
    ],
)
def test_a_scheduler_that_plans_otherwise_is_found_and_the_place_named(
    tmp_path: Path, change: dict[str, object], where: str
) -> None:
    record(tmp_path / "a.trace", small_config(), seed=0)
    segment = segment_of(tmp_path / "a.trace")
    segment.config = replace(segment.config, **change)  # type: ignore[arg-type]

    with pytest.raises(PlansDifferError, match=rf"{where} \d+: \w+.*in the trace and .* now"):
        list(replay(segment))


def test_an_event_that_is_missing_is_found(tmp_path: Path) -> None:
    record(tmp_path / "a.trace", small_config(), seed=0)
    segment = segment_of(tmp_path / "a.trace")
    segment.records.remove(next(r for r in segment.records if r.kind == Kind.FINISH_GROUP))

    with pytest.raises(PlansDifferError):
        list(replay(segment))


def test_a_run_that_was_cut_off_is_replayed_as_far_as_it_goes(tmp_path: Path) -> None:
    record(tmp_path / "a.trace", small_config(), seed=0)
    data = (tmp_path / "a.trace").read_bytes()
    (tmp_path / "a.trace").write_bytes(data[: len(data) // 2])

    *_, last = replay(segment_of(tmp_path / "a.trace"))

    assert last.scheduler.has_unfinished()


def test_a_second_scheduler_in_a_file_is_a_second_segment(tmp_path: Path) -> None:
    first, second = tmp_path / "a.trace", tmp_path / "b.trace"
    record(first, small_config(), seed=0, number=3)
    record(second, small_config(), seed=1, number=3)
    one, other = read_records(first), read_records(second)

    segments = read_segments(one._replace(records=one.records + other.records))

    assert len(segments) == 2
    for segment in segments:
        list(replay(segment))


def test_another_versions_configuration_is_refused(tmp_path: Path) -> None:
    record(tmp_path / "a.trace", small_config(), seed=0, number=1)
    recording = read_records(tmp_path / "a.trace")
    head = recording.records[0]
    payload = head.payload.replace(b'"num_blocks"', b'"num_pages"')

    with pytest.raises(ValueError, match=r"another version's.*num_pages"):
        read_segments(recording._replace(records=[head._replace(payload=payload)]))


def test_configuration_is_recorded_whole(tmp_path: Path) -> None:
    config: SchedulerConfig = small_config(sliding_window=9)
    record(tmp_path / "a.trace", config, seed=0, number=1)

    assert segment_of(tmp_path / "a.trace").config == config
