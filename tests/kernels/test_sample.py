"""Sampling: which tokens can be drawn, how often, and that nothing else has a say."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cupaged.kernels.adjust_logits import BANNED
from cupaged.kernels.exact import ONE, goal, inverse, portion, rank_key, to_mass
from cupaged.kernels.philox import random_word
from cupaged.kernels.ranking import find_tops
from cupaged.kernels.sample import find_nucleus, sample_cpu
from tests.kernels.rows_of_logits import KINDS, finite_rows, greatest

Ints = NDArray[np.int32]


def run(logits: NDArray[np.float32], **options: Any) -> list[int]:
    """Sample one token a row; each option is a value for all rows or a list by row."""
    n = len(logits)

    def column(name: str, default: Any, kind: Any) -> Any:
        return np.array(np.broadcast_to(options.get(name, default), n), kind)

    token_ids = np.full(n, -1, np.int32)
    seeds = column("seed", 0, np.int32)
    sample_cpu(
        logits,
        np.arange(n, dtype=np.int32),
        column("target", -1, np.int32),
        column("temperature", 1.0, np.float32),
        column("top_k", 0, np.int32),
        column("top_p", 1.0, np.float32),
        column("min_p", 0.0, np.float32),
        np.stack([seeds, seeds * 7], 1),
        column("group_index", 0, np.int32),
        column("output_position", 0, np.int32),
        token_ids,
    )
    return list(map(int, token_ids))


def ban(logits: NDArray[np.float32], banned: list[list[int]]) -> NDArray[np.float32]:
    """Return the logits as adjust_logits leaves them."""
    adjusted = np.where(np.isnan(logits), np.float32(-np.inf), logits)
    for row, ids in zip(adjusted.view(np.uint32), banned, strict=True):
        row[ids] = BANNED
    return adjusted


def draw(row: list[float], count: int = 3000, **options: Any) -> Ints:
    """Return how often each token of one row of logits is drawn in `count` output positions."""
    logits = np.tile(np.array(row, np.float32), (count, 1))
    tokens = run(logits, output_position=np.arange(count), **options)
    return np.bincount(tokens, minlength=len(row)).astype(np.int32)


def kept(row: list[float], **options: Any) -> list[int]:
    return list(map(int, np.flatnonzero(draw(row, **options))))


LOGITS = np.log([0.4, 0.05, 0.3, 0.05, 0.2]).tolist()


@pytest.mark.parametrize("vocab_size", [1, 97, 128, 1000, 49152])
def test_greedy_takes_the_lowest_id_of_the_maximum(vocab_size: int) -> None:
    logits = np.random.default_rng(0).integers(0, 50, (7, vocab_size)).astype(np.float32)

    assert run(logits, temperature=0) == logits.argmax(1).tolist()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_are_drawn_in_proportion_to_the_softmax(temperature: float) -> None:
    counts = draw(LOGITS, 20_000, temperature=temperature)

    weights = np.exp(np.array(LOGITS) / temperature)
    expected = 20_000 * weights / weights.sum()
    assert ((counts - expected) ** 2 / expected).sum() < 18.5  # chi-square, 4 degrees of freedom: 0.1 %


@pytest.mark.parametrize("temperature", [1.1e-5, 1e-4])
def test_tiny_temperature_equals_greedy(temperature: float) -> None:
    logits = np.random.default_rng(0).standard_normal((50, 3000), np.float32) * 30

    assert run(logits, temperature=temperature) == logits.argmax(1).tolist()


def test_top_k_of_one_equals_greedy_even_among_equals() -> None:
    logits = np.random.default_rng(0).integers(0, 4, (200, 300)).astype(np.float32)

    assert run(logits, top_k=1, seed=range(200)) == logits.argmax(1).tolist()


@pytest.mark.parametrize("top_k", [0, 5, 1000])
def test_top_k_of_zero_or_the_vocabulary_keeps_all(top_k: int) -> None:
    assert kept(LOGITS, top_k=top_k) == [0, 1, 2, 3, 4]


def test_top_k_keeps_the_first_of_equals() -> None:
    assert kept(LOGITS, top_k=4) == [0, 1, 2, 4]


@pytest.mark.parametrize(
    ("top_p", "tokens"), [(0.01, [0]), (0.39, [0]), (0.41, [0, 2]), (0.71, [0, 2, 4]), (0.92, [0, 1, 2, 4])]
)
def test_top_p_keeps_the_shortest_prefix_that_reaches_it(top_p: float, tokens: list[int]) -> None:
    assert kept(LOGITS, top_p=top_p) == tokens


def test_top_p_counts_what_top_k_left() -> None:
    assert kept(LOGITS, top_k=2, top_p=0.56) == [0]  # 0.4 of 0.7
    assert kept(LOGITS, top_k=2, top_p=0.58) == [0, 2]


def test_top_p_counts_among_equals_only_those_that_top_k_left() -> None:
    assert kept([0.0, 0.0, 0.0, 0.0], top_k=2, top_p=0.4) == [0]


def test_min_p_is_relative_to_the_most_likely() -> None:
    assert kept(LOGITS, min_p=0.49) == [0, 2, 4]
    assert kept(LOGITS, min_p=0.51) == [0, 2]
    assert kept(LOGITS, min_p=1.0) == [0]


def test_filters_see_the_temperature() -> None:
    assert kept(LOGITS, min_p=0.49, temperature=0.5) == [0, 2]


@pytest.mark.parametrize("seed", range(3))
def test_prefixes_equal_those_of_a_full_sort(seed: int) -> None:
    rng = np.random.default_rng(seed)
    row = np.round(rng.standard_normal(300) * 2, 1).astype(np.float32)  # many equals
    order = np.argsort(-row, kind="stable")
    share = np.exp(row[order].astype(np.float64))
    top_k, top_p = int(rng.integers(2, 200)), float(rng.uniform(0.1, 0.9))
    mass = np.cumsum(share[:top_k]) / share[:top_k].sum()
    allowed = order[: int(np.searchsorted(mass, top_p)) + 1]

    tokens = kept(row.tolist(), count=20_000, top_k=top_k, top_p=top_p)

    assert set(tokens) <= set(allowed.tolist())
    assert len(tokens) > 0.9 * len(allowed)


def ranked_token(row: NDArray[np.float32], filters: tuple[float, int, float, float], position: int) -> int:
    """Return the token of one row, by a sort of the whole of it."""
    temperature, top_k, top_p, min_p = filters
    with np.errstate(invalid="ignore", over="ignore"):
        distances = (row - greatest(row)) * np.float32(inverse(np.float32(temperature)))
    masses = np.array([to_mass(x) for x in distances], np.int64)
    keys = np.array([rank_key(bits) for bits in row.view(np.uint32)], np.int64)
    ranking = [int(token) for token in np.argsort(-keys, kind="stable") if masses[token] > 0]
    kept = ranking[: top_k or None]
    if top_p < 1:
        wanted = goal(int(masses[kept].sum()), np.float32(top_p))
        kept = kept[: int(np.searchsorted(masses[kept].cumsum(), wanted)) + 1]
    least = int(np.ceil(np.float64(np.float32(min_p)) * ONE))
    by_id = sorted(token for token in kept if masses[token] >= least)
    target = portion(int(masses[by_id].sum()), random_word(np.zeros(2, np.int32), position, 0))
    return by_id[int(np.searchsorted(masses[by_id].cumsum(), target, side="right"))]


@pytest.mark.parametrize("vocab_size", [5, 300, 3000])
@pytest.mark.parametrize("kind", KINDS)
def test_token_is_that_of_a_sorted_row(kind: str, vocab_size: int) -> None:
    rng = np.random.default_rng(0)
    rows = finite_rows(rng, kind, (24, vocab_size))
    n = len(rows)
    filters = [
        rng.choice(np.array(values, np.float32), n)
        for values in (
            (0.01, 0.3, 1, 2, 1e30),
            (0, 1, 5, 11, 60, 900),
            (1, 0.99, 0.7, 1e-3),
            (0, 1e-7, 0.05, 1),
        )
    ]
    names = ("temperature", "top_k", "top_p", "min_p")

    tokens = run(rows, output_position=np.arange(n), **dict(zip(names, filters, strict=True)))

    for i, (temperature, top_k, top_p, min_p) in enumerate(zip(*filters, strict=True)):
        assert tokens[i] == ranked_token(rows[i], (temperature, int(top_k), top_p, min_p), i)


@pytest.mark.parametrize("spread", [0.1, 1, 3, 10])
@pytest.mark.parametrize("top_p", [0.01, 0.5, 0.9, 0.999])
def test_nucleus_is_among_what_is_looked_at(spread: float, top_p: float) -> None:
    for row in np.random.default_rng(0).standard_normal((9, 3000), np.float32) * np.float32(spread):
        softmax = (greatest(row), np.float32(1))
        masses = np.array([to_mass(x) for x in row - softmax[0]], np.int64)
        ranking = np.argsort(-row, kind="stable")
        length = (
            int(np.searchsorted(masses[ranking].cumsum(), goal(int(masses.sum()), np.float32(top_p)))) + 1
        )

        ids, _, found, mass = find_nucleus(row, find_tops(row.view(np.uint32)), softmax, np.float32(top_p))

        assert mass == masses.sum()
        assert np.array_equal(found, masses[ids])
        assert np.isin(ranking[:length], ids).all()


def test_banned_tokens_are_never_taken() -> None:
    logits = np.tile(np.array(LOGITS, np.float32), (400, 1))

    random = run(ban(logits, [[0, 4]] * 400), seed=range(400))
    greedy = run(ban(logits[:1], [[0, 2]]), temperature=0)

    assert set(random) == {1, 2, 3}
    assert greedy == [4]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nothing_finite_gives_the_lowest_id_that_is_not_banned(temperature: float) -> None:
    logits = np.array([[-np.inf] * 4, [np.nan] * 4, [-np.inf, np.nan, 1, 2]], np.float32)

    assert run(ban(logits, [[], [0, 1], [2, 3]]), temperature=temperature) == [0, 2, 0]
    assert run(ban(logits, [[0, 1, 2, 3]] * 3), temperature=temperature) == [0, 0, 0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_raw_nan_counts_as_minus_infinity_adjusted_or_not(temperature: float) -> None:
    logits = np.array([[np.nan, -np.inf], [-np.inf, np.nan], [np.nan, 1], [np.nan, np.nan]], np.float32)

    assert run(logits, temperature=temperature) == [0, 0, 1, 0]
    assert run(ban(logits, [[]] * 4), temperature=temperature) == [0, 0, 1, 0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_and_infinite_logits_do_not_spread(temperature: float) -> None:
    logits = np.array(
        [[np.nan, 1, -np.inf, np.nan], [0, np.inf, 3, np.inf], [-np.inf, 5, -np.inf, np.nan]], np.float32
    )

    assert run(logits, temperature=temperature, top_p=0.9) == [1, 1, 1]


def test_rows_with_a_target_do_not_sample() -> None:
    assert run(np.zeros((3, 4), np.float32), target=[2, -1, 0], temperature=0) == [-1, 0, -1]


def test_seeded_row_draws_the_same_token_alone_and_in_any_batch() -> None:
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((33, 1000), np.float32)
    options = {"top_p": rng.uniform(0.5, 1, 33), "top_k": rng.integers(0, 99, 33), "seed": np.arange(33)}
    together = run(logits, **options)

    for row in (0, 7, 32):
        alone = {name: values[row : row + 1] for name, values in options.items()}
        assert run(logits[row : row + 1], **alone) == together[row : row + 1]


def test_position_group_and_seed_each_change_the_draw() -> None:
    logits = np.zeros((2, 49152), np.float32)

    for name in ("output_position", "group_index", "seed"):
        first, second = run(logits, **{name: [3, 4]})
        assert first != second


def test_logits_stay_as_they_are() -> None:
    logits = np.random.default_rng(0).standard_normal((3, 50), np.float32)
    before = logits.copy()

    run(logits, top_k=20, top_p=0.5, min_p=0.1)

    assert np.array_equal(logits, before)
