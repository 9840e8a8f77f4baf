"""A step's time is explained by what the step has, and never by less than nothing."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cupaged.trace.step_model import StepModel, fit, least_squares
from cupaged.trace.workload import Step
from tests.trace.runs import small_config


def steps(model: StepModel, number: int = 50, noise: float = 0.0) -> list[Step]:
    rng = np.random.default_rng(0)
    made = []
    for _ in range(number):
        tokens, context = int(rng.integers(1, 500)), int(rng.integers(1, 20000))
        seconds = model.per_step + model.per_token * tokens + model.per_context * context
        made.append(Step(seconds * (1 + noise * rng.standard_normal()), tokens, context, 0))
    return made


def test_the_coefficients_come_back() -> None:
    model = StepModel(5e-3, 2e-5, 1e-7)

    found = fit(steps(model))

    assert found.model == pytest.approx(model)
    assert found.median_error < 1e-9
    assert found.num_steps == 50


def test_noise_moves_them_little_and_is_told() -> None:
    model = StepModel(5e-3, 2e-5, 1e-7)

    found = fit(steps(model, noise=0.02))

    assert found.model == pytest.approx(model, rel=0.1)
    assert 0.005 < found.median_error < 0.03


def test_a_pause_does_not_outvote_the_other_steps() -> None:
    model = StepModel(5e-3, 2e-5, 1e-7)
    made = steps(model)
    made[7] = made[7]._replace(seconds=60.0)

    assert fit(made).model == pytest.approx(model, rel=0.25)


def test_no_coefficient_is_below_nothing() -> None:
    terms = np.array([[1.0, 0.0], [1.0, 1.0], [1.0, 2.0]])

    found = least_squares(terms, np.array([3.0, 2.0, 1.0]))

    assert found.tolist() == pytest.approx([2.0, 0.0])


def test_steps_that_swapped_are_left_out_and_too_few_are_refused() -> None:
    made = [step._replace(num_swapped=1) for step in steps(StepModel(1, 1, 1), 9)]

    with pytest.raises(ValueError, match=r"0 steps to fit .* at least 2 are needed; give --step-ms"):
        fit(made)


@pytest.mark.parametrize(("num_out", "num_in"), [(3, 0), (0, 3), (1, 2)])
def test_a_block_takes_the_links_time_out_as_in(num_out: int, num_in: int) -> None:
    config = small_config(block_bytes=1000, swap_bandwidth=1e6)
    swaps = {"swap_out": np.zeros((num_out, 2)), "swap_in": np.zeros((num_in, 2))}
    batch: Any = SimpleNamespace(seq_lens=np.array([5]), num_tokens=1, **swaps)

    assert StepModel(1.0, 0.0, 0.0).seconds(batch, config) == pytest.approx(1.003)


def test_it_is_shown_in_units_that_fit() -> None:
    assert str(StepModel(5e-3, 2e-5, 1e-7)) == "5 ms + 20 us a token + 100 ns a token of context"
