"""bench_scheduler: each scenario's steps do what they are named after."""

import argparse

import pytest

from tools.bench_scheduler import (
    COMPARED,
    FEWEST,
    SCENARIOS,
    TURNOVER,
    Scenario,
    Timing,
    lookup_us,
    median,
    parse_running,
    report,
    run,
)
from tools.scheduler_load import Load, Step

NUM_SEQS = FEWEST


def few(scenario: Scenario) -> list[Step]:
    return run(scenario._replace(num_steps=3), NUM_SEQS)


def test_decodes_are_of_all_sequences() -> None:
    assert {(step.num_decodes, step.num_tokens) for step in few(COMPARED["decode"])} == {(NUM_SEQS, NUM_SEQS)}


def test_turnover_computes_whole_new_prompts_and_evicts_for_them() -> None:
    load = COMPARED["turnover"].create(NUM_SEQS)
    for _ in range(TURNOVER):
        load.step()

    assert len(load.groups) == pytest.approx(2 * NUM_SEQS, abs=1)
    assert sum(not group.unfinished for group in load.groups) == len(load.groups) - NUM_SEQS
    assert all(step.num_tokens > NUM_SEQS for step in few(COMPARED["turnover"]))


def test_forks_copies_and_swaps_happen_in_the_steps_that_count() -> None:
    assert all(step.num_forks + step.num_copies > 0 for step in few(SCENARIOS["forks"]))
    assert [step.num_copies for step in few(SCENARIOS["copies"])] == 3 * [NUM_SEQS // 2]
    assert all(step.num_swaps > 0 for step in few(SCENARIOS["swaps"]))


def test_beams_that_go_on_twice_copy_what_they_share() -> None:
    steps = few(SCENARIOS["beams"])

    assert all(step.num_decodes == NUM_SEQS for step in steps)
    # All groups' worst beam gives way to a copy of the best; where a block begins there is nothing to copy.
    assert sum(step.num_copies for step in steps) > NUM_SEQS // 4


def test_total_is_schedule_and_update() -> None:
    timing = median([Step(1e-6, 2e-6, 1, 1, 0, 0, 0), Step(3e-6, 5e-6, 1, 1, 0, 0, 0)])

    assert timing == pytest.approx((2.0, 3.5, 5.5))


@pytest.mark.parametrize("number", [2, 6, 12, 18, 4100])
def test_number_that_a_scenario_has_no_steps_for_is_refused(number: int) -> None:
    assert parse_running("16,20,4096") == [16, 20, 4096]

    with pytest.raises(argparse.ArgumentTypeError, match=f"^{number} is no multiple of 4 from 16 to 4096"):
        parse_running(f"16,{number}")


def test_number_that_vllm_was_not_measured_at_stands_alone() -> None:
    assert report("decode", 256, Timing(1.0, 1.0, 2.0))["vllm_us"] == 3.7e3
    assert "vllm_us" not in report("decode", 128, Timing(1.0, 1.0, 2.0))


def test_lookup_finds_all_tokens() -> None:
    assert lookup_us(2) > 0


def test_load_without_an_end_stays_as_it_is() -> None:
    load = Load(4)

    load.step()
    load.step()

    assert len(load.groups) == 4
