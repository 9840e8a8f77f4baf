"""The paper's figures at a tiny size: lengths, allocators and costs exactly, and each part once."""

import math
from concurrent.futures import Future
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from cupaged.scheduler.counters import Counter
from tools.paper_figures import Figures
from tools.paper_machine import COPY_SECONDS, KV_BYTES, NUM_SLOTS, step_seconds, swap_seconds
from tools.paper_paged import Case, PagedRun, Simulation, num_swapped, simulate, worst_waste
from tools.paper_plots import DRAWN, draw
from tools.paper_reference import Buddy, Contiguous, reserve, run_static
from tools.paper_table import Sizes
from tools.paper_time import LOADS, VICTIM, SwapOrRecompute
from tools.paper_workload import (
    ALPACA,
    MAX_LENGTH,
    MAX_TOKENS,
    SHAREGPT,
    SIGMA,
    SIGMAS,
    Dataset,
    Workload,
    draw_workload,
)

SMALL = Dataset("small", 60, 40, 10.0)


def workload(prompts: list[int], outputs: list[int], arrivals: list[float] | None = None) -> Workload:
    seconds = [0.0] * len(prompts) if arrivals is None else arrivals
    return Workload(np.array(seconds), np.array(prompts), np.array(outputs))


@pytest.mark.parametrize("sigma", SIGMAS)
@pytest.mark.parametrize("dataset", [SHAREGPT, ALPACA], ids=lambda dataset: dataset.name)
def test_lengths_have_the_stated_means(dataset: Dataset, sigma: float) -> None:
    drawn = draw_workload(dataset, sigma=sigma, rate=None, num_requests=400)

    assert drawn.prompts.mean() == pytest.approx(dataset.prompt_mean, rel=0.01)
    assert drawn.outputs.mean() == pytest.approx(dataset.output_mean, rel=0.01)
    assert max(drawn.prompts.max(), drawn.outputs.max()) <= MAX_LENGTH


def test_arrivals_have_the_stated_rate_and_are_the_same_each_time() -> None:
    drawn = [draw_workload(SHAREGPT, sigma=1, rate=2.0, num_requests=2000).arrivals for _ in range(2)]

    assert drawn[0][-1] == pytest.approx(1000, rel=0.05)
    assert np.array_equal(drawn[0], drawn[1])


def test_machine_is_the_papers() -> None:
    assert KV_BYTES == 800 * 1024
    assert pytest.approx(15.7e3, rel=0.005) == NUM_SLOTS
    assert step_seconds(2, 3) - step_seconds(1, 3) == pytest.approx(26e9 / (0.8 * 312e12))
    assert swap_seconds(3, 16, 2) == pytest.approx(3 * (2 * 10e-6 + 16 * KV_BYTES / (0.8 * 31.5e9)))


def test_reservations_of_the_papers_example() -> None:
    assert reserve("maximum", 10, 25) == 2048
    assert reserve("power of two", 10, 25) == 10 + 32
    assert reserve("power of two", 10, 32) == 10 + 32
    assert reserve("oracle", 10, 25) == 35


def test_buddy_cuts_the_pool_into_powers_of_two_and_halves_the_smallest_that_fits() -> None:
    buddy = Buddy(16 + 8 + 2)

    assert buddy.allocate(5) == 16  # the 8, not half of the 16
    assert buddy.allocate(2) == 24
    assert [buddy.allocate(3) for _ in range(5)] == [0, 4, 8, 12, None]


def test_buddy_joins_what_is_given_back_but_only_with_its_other_half() -> None:
    buddy = Buddy(16)
    offsets = [buddy.allocate(4) for _ in range(4)]
    assert offsets == [0, 4, 8, 12]

    buddy.release(4)
    buddy.release(8)
    assert buddy.allocate(8) is None  # 4..12 is free, but of two different halves
    buddy.release(12)
    assert buddy.allocate(8) == 8
    buddy.release(0)
    buddy.release(8)
    assert buddy.allocate(16) == 0


def test_buddy_never_gives_a_slot_twice_and_gets_whole_again() -> None:
    rng = np.random.default_rng(0)
    buddy = Buddy(1000)
    whole = {size: set(offsets) for size, offsets in buddy.free.items()}
    regions: dict[int, int] = {}
    for _ in range(500):
        if regions and rng.random() < 0.5:
            offset = int(rng.choice(list(regions)))
            buddy.release(offset)
            del regions[offset]
        else:
            size = int(rng.integers(1, 200))
            found = buddy.allocate(size)
            if found is not None:
                regions[found] = 1 << math.ceil(math.log2(size))
        spans = [(offset, offset + size) for offset, size in sorted(regions.items())]
        assert all(end <= start for (_, end), (start, _) in zip(spans, [*spans[1:], (1000, 0)], strict=False))
    for offset in regions:
        buddy.release(offset)

    assert buddy.free == whole


def test_contiguous_run_counts_shares_and_time_exactly() -> None:
    # Two at a time, four requests alike: measured is the first pair's life, which ends as the last begin.
    requests = workload([4] * 4, [3] * 4)
    run = Contiguous(requests, "oracle", 16).run()

    steps = [step_seconds(8, 8), step_seconds(2, 10), step_seconds(2, 12)]
    held = sum(s * t for s, t in zip(steps, [8, 10, 12], strict=True)) / sum(steps)
    assert run.mean_batch == pytest.approx(2)
    assert run.output_rate == pytest.approx(6 / sum(steps))
    assert run.shares.tokens == pytest.approx(held / 16, rel=0.01)
    assert run.shares.reserved == pytest.approx((14 - held) / 16, rel=0.01)
    assert (run.shares.internal, run.shares.external) == pytest.approx((0, 2 / 16))


def test_static_batch_waits_for_its_longest_output_and_pads() -> None:
    requests = workload([4, 2, 3], [1, 3, 1], [0.0, 0.0, 1e-6])
    run = run_static(requests, 2)

    first = step_seconds(8, 8)
    second = first + step_seconds(2, 10) + step_seconds(2, 12) + step_seconds(3, 3)
    assert run.first_token == pytest.approx([first, first, second - 1e-6])
    assert run.output_rate == pytest.approx(5 / second)


def test_worst_waste_is_a_block_but_for_one_token() -> None:
    assert worst_waste(16) == 15
    assert worst_waste(1) == 0


def test_paged_run_ends_with_the_pool_empty_and_all_first_tokens() -> None:
    simulation = Simulation(Case(dataset=SMALL, num_requests=40, num_slots=1024))
    run = simulation.run()

    assert simulation.scheduler.num_used_blocks == 0
    assert (run.first_token > 0).all()
    assert 0 < run.token_share < 1


def test_paged_steps_time_counts_new_tokens_and_context() -> None:
    run = simulate(Case(dataset=SMALL, num_requests=40, num_slots=4096))

    assert run.first_token.min() == pytest.approx(step_seconds(MAX_TOKENS, MAX_TOKENS))  # a step of prompts


def test_swap_moves_each_block_out_and_in_and_recompute_none() -> None:
    tight = Case(dataset=SMALL, num_requests=40, num_slots=1024, preemption_mode="swap")
    swap, recompute = simulate(tight), simulate(replace(tight, preemption_mode="recompute"))

    assert swap.counters[Counter.SWAPPED_OUT_BLOCKS] == swap.counters[Counter.SWAPPED_IN_BLOCKS] > 0
    assert swap.counters[Counter.RECOMPUTED_TOKENS] == 0
    assert recompute.counters[Counter.SWAPPED_OUT_BLOCKS] == 0
    assert recompute.counters[Counter.RECOMPUTED_TOKENS] > 0
    assert recompute.seconds > swap.seconds


def test_sequences_alone_share_nothing() -> None:
    assert simulate(Case(dataset=SMALL, num_requests=40, num_slots=1024)).sharing == 0


@pytest.mark.parametrize("is_beam", [False, True], ids=["outputs", "beams"])
def test_sequences_of_a_request_share_blocks(is_beam: bool) -> None:
    run = simulate(Case(dataset=SMALL, num_requests=40, num_slots=4096, num_sequences=4, is_beam=is_beam))

    assert 0.1 < run.sharing < 0.75  # of four, three quarters are saved at most
    assert run.counters[Counter.COPIED_BLOCKS] > 0
    assert run.mean_batch <= 40 + 1e-9  # requests, not their sequences


def test_a_victim_that_is_swapped_pays_out_and_in() -> None:
    seconds = SwapOrRecompute.victim_seconds(16)

    num_blocks = -(-VICTIM // 16)
    assert seconds["swap, 80 copies"] == pytest.approx(2 * swap_seconds(num_blocks, 16, 80))


@pytest.fixture(scope="module")
def figures() -> Figures:
    """All figures, of few requests an eighth as long in smaller pools, and of one sigma."""
    simulate_once = cache(simulate)

    def submit(case: Case) -> Future[PagedRun]:
        means = (case.dataset.prompt_mean / 8, case.dataset.output_mean / 8)
        dataset = Dataset(case.dataset.name, *means, case.dataset.rate)
        smaller = 4 if case.num_sequences > 1 else 16
        future: Future[PagedRun] = Future()
        small = replace(case, dataset=dataset, num_slots=case.num_slots // smaller, sigma=SIGMA)
        future.set_result(simulate_once(small))
        return future

    sizes = Sizes(sharegpt=60, alpaca=500, sharegpt_shared=140, alpaca_shared=150, large_card=240)
    return Figures(submit, sizes)


def test_every_figure_makes_a_table(figures: Figures) -> None:
    tables = figures.tables()

    assert len(tables) == 7
    for table in tables:
        assert {len(row) for row in table.rows} == {len(table.columns)}
        assert "nan" not in str(table)


def test_more_memory_holds_tokens_the_less_is_reserved(figures: Figures) -> None:
    shares = figures.share.shares()

    assert all(sum(share) == pytest.approx(1) for share in shares.values())
    assert shares["maximum"][0] < shares["power of two"][0] < shares["oracle"][0] < shares["paged"][0]


def test_a_runs_seconds_have_the_copies_of_all_its_swaps(figures: Figures) -> None:
    run = figures.swap.runs["swap", 16].result()

    seconds = figures.swap.run_seconds(16)

    assert num_swapped(run) > 0
    more = seconds["swap, 80 copies"] - seconds["swap, 1 copy"]
    assert more == pytest.approx(79 * num_swapped(run) * COPY_SECONDS)
    assert seconds["swap, 1 copy"] - run.seconds == pytest.approx(swap_seconds(num_swapped(run), 16, 1))


def test_loads_are_of_the_output_that_static_batching_gives(figures: Figures) -> None:
    capacity = figures.first_token.capacity_run.output_rate  # tokens per second

    rates = np.array(figures.first_token._rates)  # requests per second

    assert rates * SHAREGPT.output_mean == pytest.approx(np.array(LOADS) * capacity)


def test_plots_are_small_pngs(figures: Figures, tmp_path: Path) -> None:
    draw(figures, tmp_path)

    assert {path.stem for path in tmp_path.iterdir()} == set(DRAWN)
    for path in tmp_path.iterdir():
        assert path.read_bytes()[:4] == b"\x89PNG"
        assert path.stat().st_size < 60_000
