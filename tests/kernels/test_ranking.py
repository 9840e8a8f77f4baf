"""Rankings: what blocks rule out, and where a prefix ends, held to sorts and to sums one by one."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cupaged.kernels.exact import ONE, inverse, rank_key, to_mass
from cupaged.kernels.ranking import ALL, collect, find_cut, find_first, find_tops, lowest_key, weigh_blocks
from tests.kernels.rows_of_logits import KINDS, finite_rows, greatest

TEMPERATURES = (1e-4, 0.05, 0.7, 1.0, 50.0, 1e30)


def keys_of(row: NDArray[np.float32]) -> NDArray[np.uint32]:
    return np.array([rank_key(bits) for bits in row.view(np.uint32)], np.uint32)


def masses_of(row: NDArray[np.float32], softmax: Any) -> NDArray[np.int64]:
    z_max, scale = softmax
    with np.errstate(invalid="ignore", over="ignore"):
        distances = (row - z_max) * scale
    return np.array([to_mass(x) for x in distances], np.int64)


def softmax_of(row: NDArray[np.float32], temperature: float) -> Any:
    return greatest(row), np.float32(inverse(np.float32(temperature)))


def rows_of(kind: str, vocab_size: int) -> NDArray[np.float32]:
    return finite_rows(np.random.default_rng(0), kind, (4, vocab_size))


@pytest.mark.parametrize("vocab_size", [1, 255, 256, 257, 1000])
@pytest.mark.parametrize("kind", KINDS)
def test_tops_are_the_greatest_keys_of_the_blocks(kind: str, vocab_size: int) -> None:
    for row in rows_of(kind, vocab_size):
        keys = keys_of(row)

        tops = find_tops(row.view(np.uint32))

        assert tops.tolist() == [keys[start : start + 256].max() for start in range(0, vocab_size, 256)]
        assert find_first(row.view(np.uint32), tops) == keys.argmax()


@pytest.mark.parametrize("share", [0.0, 2.0**-39, 1e-6, 0.05, 1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_below_the_lowest_key_no_token_has_its_share(kind: str, share: float) -> None:
    least = max(1, int(np.ceil(share * ONE)))
    for row in rows_of(kind, 600):
        for temperature in TEMPERATURES:
            softmax = softmax_of(row, temperature)
            enough = masses_of(row, softmax) >= least

            lowest = lowest_key(softmax, share)

            assert (keys_of(row)[enough] >= lowest).all()


def test_lowest_key_is_no_more_than_a_hundredth_too_low() -> None:
    row = np.linspace(-20, 0, 1000, dtype=np.float32)

    lowest = lowest_key((np.float32(0), np.float32(1)), float(np.exp(-10.0)))

    assert abs(row[keys_of(row) >= lowest].min() + 10) < 0.02 + 20 / 999


@pytest.mark.parametrize("kind", KINDS)
def test_block_masses_are_sums_of_what_is_enough(kind: str) -> None:
    for row in rows_of(kind, 700):
        softmax = softmax_of(row, 0.7)
        masses = masses_of(row, softmax)
        for share in (0.0, 0.05):
            least = max(1, int(np.ceil(share * ONE)))

            sums = weigh_blocks(
                row, find_tops(row.view(np.uint32)), softmax, lowest_key(softmax, share), least
            )

            kept = np.where(masses >= least, masses, 0)
            assert sums.tolist() == [kept[start : start + 256].sum() for start in range(0, 700, 256)]


@pytest.mark.parametrize("vocab_size", [1, 15, 256, 700])
@pytest.mark.parametrize("kind", KINDS)
def test_collected_are_all_tokens_with_mass_from_a_key_on(kind: str, vocab_size: int) -> None:
    for row in rows_of(kind, vocab_size):
        softmax, keys = softmax_of(row, 0.7), keys_of(row)
        masses = masses_of(row, softmax)
        for first in (0, int(np.median(keys)), int(keys.max())):
            wanted = np.flatnonzero((keys >= first) & (masses > 0))

            found = collect(row, find_tops(row.view(np.uint32)), softmax, np.uint32(first))

            assert [array.tolist() for array in found] == [
                array.tolist() for array in (wanted, keys[wanted], masses[wanted])
            ]


@pytest.mark.parametrize("bits", [2, 12, 32])  # of the keys that differ: many equals, some, none
@pytest.mark.parametrize("seed", range(3))
def test_prefix_is_that_of_a_sort(seed: int, bits: int) -> None:
    rng = np.random.default_rng(seed)
    keys = (rng.integers(0, 2**bits, 300, np.uint64) << np.uint64(rng.integers(0, 33 - bits))).astype(
        np.uint32
    )
    masses = (keys.astype(np.int64) + 1) * 1000  # equal keys have equal masses
    order = np.argsort(-keys.astype(np.int64), kind="stable")
    sums = np.cumsum(masses[order])
    goals = [(count, ALL) for count in (1, 2, 150, 299, 300)]
    goals += [(ALL, int(mass) + extra) for mass in sums[[0, 1, 150, 298]] for extra in (0, 1)]
    for max_count, max_mass in [*goals, (7, int(sums[9])), (9, int(sums[6]))]:
        length = min(max_count, int(np.searchsorted(sums, max_mass)) + 1)

        cut, ties, mass = find_cut(keys, masses, max_count, max_mass)

        assert np.count_nonzero(keys > cut) + ties == length
        assert ties <= np.count_nonzero(keys == cut)
        assert mass == sums[length - 1]
