"""bench_scheduler: each scenario's steps do what they are named after."""

import pytest

from tools.bench_scheduler import COMPARED, SCENARIOS, TURNOVER, Scenario, lookup_us, median, run
from tools.scheduler_load import Load, Step

NUM_SEQS = 16


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


def test_lookup_finds_all_tokens() -> None:
    assert lookup_us(2) > 0


def test_load_without_an_end_stays_as_it_is() -> None:
    load = Load(4)

    load.step()
    load.step()

    assert len(load.groups) == 4
