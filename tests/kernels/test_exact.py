"""The arithmetic of sampling, against Python's integers and float64."""

import numpy as np
import pytest

from cupaged.kernels.exact import (
    KEY_OF_INFINITY,
    KEY_OF_MINUS_INFINITY,
    ONE,
    goal,
    inverse,
    log_of,
    portion,
    rank_key,
    to_mass,
)

RNG = np.random.default_rng(0)
TOTALS = [0, 1, 2**32 - 1, 2**32, ONE, 2**58, 2**62 + 12345, *RNG.integers(0, 2**62, 200).tolist()]


def test_mass_is_exp_in_units_of_its_smallest() -> None:
    x = -np.concatenate([RNG.random(1000) * 28, [0, 27.5, 1e-30]]).astype(np.float32)

    mass = np.array([to_mass(each) for each in x])

    exact = np.exp(x.astype(np.float64)) * ONE
    assert (np.abs(mass - exact) <= 1 + 2 * 2.0**-23 * exact).all()
    assert to_mass(np.float32(0)) == ONE


@pytest.mark.parametrize("x", [-27.76, -28, -100, -1e30, -np.inf, np.nan])
def test_what_is_far_away_has_no_mass(x: float) -> None:
    assert to_mass(np.float32(x)) == 0


def test_tokens_with_mass_come_before_all_without() -> None:
    nearest, furthest = (int(np.float32(x).view(np.uint32)) for x in (-27.7258, -27.7260))
    x = np.arange(nearest, furthest, dtype=np.uint32).view(np.float32)  # every float there is

    has_mass = [to_mass(each) > 0 for each in x]

    assert has_mass == sorted(has_mass, reverse=True)
    assert has_mass[0]
    assert not has_mass[-1]


def test_keys_order_like_the_numbers() -> None:
    numbers = [-np.inf, -1e30, -1, -1e-40, 0.0, 1e-40, 1, 1e30, np.inf]

    keys = [int(rank_key(np.float32(number).view(np.uint32))) for number in numbers]

    assert keys == sorted(set(keys))
    assert (keys[0], keys[-1]) == (KEY_OF_MINUS_INFINITY, KEY_OF_INFINITY)


def test_key_of_minus_zero_is_that_of_zero_and_of_nan_that_of_minus_infinity() -> None:
    assert rank_key(np.uint32(0x80000000)) == rank_key(np.uint32(0))
    for bits in (0x7F800001, 0x7FC00000, 0xFF800001, 0xFFFFFFFF):
        assert rank_key(np.uint32(bits)) == KEY_OF_MINUS_INFINITY


@pytest.mark.parametrize("word", [0, 1, 2**31, 2**32 - 1, 0xDEADBEEF])
def test_portion_is_that_of_whole_numbers(word: int) -> None:
    assert [portion(total, np.uint32(word)) for total in TOTALS] == [total * word >> 32 for total in TOTALS]


@pytest.mark.parametrize("fraction", [2.0**-126, 1e-9, 0.1, 0.5, 0.9, 1 - 2.0**-24])
def test_goal_is_that_of_whole_numbers_rounded_up(fraction: float) -> None:
    units = max(1, int(np.ceil(np.float64(np.float32(fraction)) * 2**32)))

    found = [goal(total, np.float32(fraction)) for total in TOTALS]

    assert found == [-(-total * units // 2**32) for total in TOTALS]


def test_logarithm_is_within_its_bound() -> None:
    totals = [
        ONE,
        ONE + 1,
        2 * ONE - 1,
        2 * ONE,
        2**58,
        *(2 ** RNG.uniform(40, 62, 300)).astype(int).tolist(),
    ]

    for total in totals:
        assert abs(log_of(total) - np.log(total / ONE) * 2**32) < 300


def test_inverse_of_the_hottest_temperature_is_a_normal_number() -> None:
    assert inverse(np.finfo(np.float32).max) == np.float32(2.0**-126)
    assert inverse(np.float32(0.5)) == 2
