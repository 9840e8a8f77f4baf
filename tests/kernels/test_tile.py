"""The two products of attention: what the compiled code does is what the plain functions say."""

from typing import Any

import numpy as np
import pytest

from cupaged.jit import njit
from cupaged.kernels.simd import LANES
from cupaged.kernels.tile import GROUPS, ROWS, SPLIT, VECTORS, Keys, Values, add_values, score_keys

HEAD_DIMS = [8, 16, 64, 80, 96, 100]
STRIDE = 32  # of keys: blocks of two groups


@njit
def run_score_keys(scores: Any, q: Any, pool: Any, groups: Any, at: Keys, rows: int) -> None:
    score_keys(scores, q, pool, groups, at, rows)


@njit
def run_add_values(sums: Any, weights: Any, pool: Any, groups: Any, at: Values, rows: int) -> None:
    add_values(sums, weights, pool, groups, at, rows)


def integers(rng: np.random.Generator, *shape: int) -> Any:
    """Small ones, none of them 0: their sums are exact, in float32 and in bfloat16."""
    return rng.choice([-3, -2, -1, 1, 2, 3], shape).astype(np.float32)


def draw(seed: int, head_dim: int, kind: Any) -> tuple[Any, ...]:
    """Return rows of numbers, a pool, and where its groups begin: those in use, then those to come."""
    rng = np.random.default_rng(seed)
    size = max(STRIDE, LANES) * head_dim  # of a group's place
    pool = integers(rng, (GROUPS + 1) * size)
    if kind == np.uint16:
        pool = (pool.view(np.uint32) >> 16).astype(np.uint16)
    groups = np.concatenate([rng.permutation(GROUPS) * size, rng.permutation(GROUPS) * size]).astype(np.int64)
    return integers(rng, ROWS * SPLIT + 40), pool, groups, integers(rng, ROWS * (head_dim + 20) + 40)


@pytest.mark.parametrize("rows", range(1, ROWS + 1))
@pytest.mark.parametrize("kind", [np.float32, np.uint16])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_compiled_scores_equal_the_plain_ones(rows: int, kind: Any, head_dim: int) -> None:
    scores, pool, groups, q = draw(rows, head_dim, kind)
    for last in range(VECTORS + 1, 3 * VECTORS + 1):
        at = Keys(5, 3, head_dim, STRIDE, VECTORS, last, 0, GROUPS)
        compiled, plain = scores.copy(), scores.copy()

        run_score_keys(compiled, q, pool, groups, at, rows)
        score_keys(plain, q, pool, groups, at, rows)

        if VECTORS > 1 and last % 2 > 0:  # then the group behind may have scores
            behind = slice(last * LANES, (last + 1) * LANES)
            found, wanted = (x[5 : 5 + ROWS * SPLIT].reshape(ROWS, SPLIT) for x in (compiled, plain))
            found[:, behind] = wanted[:, behind]
        assert np.array_equal(compiled, plain)


@pytest.mark.parametrize("rows", range(1, ROWS + 1))
@pytest.mark.parametrize("kind", [np.float32, np.uint16])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(("begin", "end"), [(0, SPLIT), (0, 1), (15, 17), (37, 90), (SPLIT - 1, SPLIT)])
def test_compiled_sums_equal_the_plain_ones(
    rows: int, kind: Any, head_dim: int, begin: int, end: int
) -> None:
    weights, pool, groups, sums = draw(rows, head_dim, kind)
    at = Values(2, head_dim + 20, 7, head_dim, begin, end, 0, GROUPS)
    compiled, plain = sums.copy(), sums.copy()

    run_add_values(compiled, weights, pool, groups, at, rows)
    add_values(plain, weights, pool, groups, at, rows)

    assert np.array_equal(compiled, plain)
    assert (compiled != sums).any() == (head_dim >= LANES)


def test_scores_are_products_of_queries_and_keys() -> None:
    scores, pool, groups, q = draw(0, 64, np.float32)

    score_keys(scores, q, pool, groups, Keys(0, 0, 64, STRIDE, 0, GROUPS, 0, GROUPS), ROWS)

    for g in range(GROUPS):
        keys = pool[groups[g] : groups[g] + 64 * STRIDE].reshape(64, STRIDE)[:, :LANES]
        found = scores[: ROWS * SPLIT].reshape(ROWS, SPLIT)[:, g * LANES : (g + 1) * LANES]
        assert np.array_equal(found, q[: ROWS * 64].reshape(ROWS, 64) @ keys)


def test_sums_are_products_of_weights_and_values() -> None:
    weights, pool, groups, sums = draw(0, 64, np.float32)
    values = np.concatenate([pool[g : g + LANES * 64].reshape(LANES, 64) for g in groups[:GROUPS]])
    expected = sums[: ROWS * 64].reshape(ROWS, 64)
    expected = expected + weights[: ROWS * SPLIT].reshape(ROWS, SPLIT)[:, 5:200] @ values[5:200]

    add_values(sums, weights, pool, groups, Values(0, 64, 0, 64, 5, 200, 0, GROUPS), ROWS)

    assert np.array_equal(sums[: ROWS * 64].reshape(ROWS, 64), expected)


def test_what_is_beyond_the_tokens_is_not_read() -> None:
    weights, pool, groups, sums = draw(0, 64, np.float32)
    row = groups[37 // LANES] + 37 % LANES * 64
    pool[:row], pool[row + 64 :] = np.nan, np.nan

    run_add_values(sums, weights, pool, groups, Values(0, 64, 0, 64, 37, 38, 0, GROUPS), ROWS)

    assert not np.isnan(sums).any()
