"""How attention's work is cut: all of it, once, and into pieces that cost about the same."""

from itertools import pairwise
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies

from cupaged.kernels.attention_plan import (
    COST,
    COUNT,
    END,
    FIRST,
    KV_HEAD,
    MOST_SLOTS,
    POSITION,
    SEQ,
    SLOT,
    TOKEN,
    UNIT_ROWS,
    Heads,
    Mask,
    plan_units,
)
from cupaged.kernels.tile import SPLIT

Chunks = list[tuple[int, int]]  # of each sequence: its new tokens, and those it has with them

chunk = strategies.tuples(strategies.integers(0, 200), strategies.integers(0, 5000)).map(
    lambda pair: (pair[0], sum(pair) if pair[0] else 0)  # no new tokens: padding
)


def plan(chunks: Chunks, num_kv_heads: int = 3, group: int = 3, window: int = 0) -> Any:
    starts = np.cumsum([0, *(new for new, _ in chunks)], dtype=np.int32)
    lens = np.array([length for _, length in chunks], np.int32)
    return plan_units(starts, lens, Mask(1.0, window, 0.0), Heads(num_kv_heads, group, 64))


@hypothesis.given(
    strategies.lists(chunk, max_size=20),
    strategies.integers(1, 4),
    strategies.sampled_from([1, 3, 4, 71]),
    strategies.sampled_from([0, 1, 100, 300]),
)
def test_every_query_attends_once_with_every_head_to_all_its_splits(
    chunks: Chunks, num_kv_heads: int, group: int, window: int
) -> None:
    found = []

    made = plan(chunks, num_kv_heads, group, window)

    for unit in made.units[made.cuts[0] : made.cuts[-1]].tolist():
        assert unit[COUNT] * group <= max(UNIT_ROWS, group)
        for i in range(unit[COUNT]):
            place = (unit[SEQ], unit[TOKEN] + i, unit[POSITION] + i, unit[KV_HEAD])
            found += [(*place, split) for split in range(unit[FIRST], unit[END])]
    expected, token = [], 0
    for seq, (new, length) in enumerate(chunks):
        for position in range(length - new, length):
            few = max(1, UNIT_ROWS // group)
            first = position - (position - (length - new)) % few  # of the same unit
            last = min(first + few, length) - 1
            seen = range(max(0, first + 1 - window) // SPLIT if window else 0, last // SPLIT + 1)
            expected += [(seq, token, position, h, split) for h in range(num_kv_heads) for split in seen]
            token += 1
    assert sorted(found) == sorted(expected)


@hypothesis.given(strategies.lists(chunk, max_size=20))
def test_every_slot_is_written_once_and_added_once(chunks: Chunks) -> None:
    made = plan(chunks)

    units = made.units[: made.cuts[-1]]
    written = units[units[:, SLOT] >= 0]
    slots = [slot for unit in written for slot in range(unit[SLOT], unit[SLOT] + unit[COUNT] * 3)]
    assert slots == list(range(made.slots))
    added = []
    for unit in made.units[made.first_sum : made.first_sum + made.num_sums]:
        num_splits = unit[END] - unit[FIRST]
        places = unit[SLOT] + np.arange(num_splits) * unit[COUNT] * 3
        parts = written[np.isin(written[:, SLOT], places)]
        assert (parts[:, :FIRST] == unit[:FIRST]).all()
        assert parts[:, FIRST].tolist() == list(range(unit[FIRST], unit[END]))
        assert (parts[:, END] == parts[:, FIRST] + 1).all()
        added += places.tolist()
    assert added == written[:, SLOT].tolist()


def test_pieces_cost_about_the_same_where_one_sequence_is_long() -> None:
    made = plan([(512, 1024), (1, 300_000), *[(1, 300)] * 30])

    costs = [made.units[first:last, COST].sum() for first, last in pairwise(made.cuts.tolist())]

    assert len(costs) == 8  # of one thread
    assert max(costs) < 2 * np.mean(costs)
    assert made.slots > 0


@pytest.mark.parametrize("length", [1, 100])
def test_short_decode_stays_on_one_thread(length: int) -> None:
    made = plan([(1, length)])

    assert made.cuts.tolist() == [0, 3]
    assert made.slots == 0


def test_records_that_wait_to_be_added_are_limited() -> None:
    most = MOST_SLOTS // 9  # splits of one query, of 3 * 3 heads

    assert plan([(1, most * SPLIT)]).slots == most * 9
    beyond = plan([(1, most * SPLIT + 1)])
    assert beyond.slots == 0
    assert beyond.units[:3, END].tolist() == [most + 1] * 3


def test_step_without_tokens_has_no_units() -> None:
    assert plan([(0, 0)]).cuts.tolist() == [0]
