"""Launches of decodes: as large as the step, or as its block tables, and always within the workspace."""

import numpy as np
import pytest

from cupaged.backend.base import Limits
from cupaged.backend.decode_launches import DecodeLaunches
from cupaged.batch import Batch, padding_batch
from cupaged.kernels.paged_decode import SPLIT, Decodes, paged_decode_workspace

LIMITS = Limits(num_tokens=64, num_seqs=5, seq_len=5000, block_size=16, num_slots=8192)


def decodes(lens: list[int], width: int) -> Batch:
    """Return a step of decodes, as the device has it: rounded up to 8."""
    batch = padding_batch(8, 8, num_decodes=8, num_logits=8, table_width=width)
    batch.seq_lens[: len(lens)] = lens
    return batch


@pytest.fixture
def launches() -> DecodeLaunches:
    return DecodeLaunches(LIMITS)


def test_eager_launch_is_as_large_as_the_step(launches: DecodeLaunches) -> None:
    launches.begin_step(decodes([SPLIT, SPLIT + 1, 5000], 313), 8)

    assert launches.of_step(0) == [Decodes(0, 8, 1 + 2 + 10, 5000)]
    assert launches.of_step(SPLIT - 16) == [Decodes(0, 8, 3, 5000)]


def test_next_step_is_cut_anew(launches: DecodeLaunches) -> None:
    for length in (5000, 3):
        launches.begin_step(decodes([length], 313), 8)
        assert launches.of_step(0)[0].max_seq_len == length


def test_step_without_decodes_launches_none(launches: DecodeLaunches) -> None:
    batch = padding_batch(8, 1, num_decodes=0, num_logits=0, table_width=1)
    launches.begin_step(batch, 0)

    assert launches.of_step(0) == launches.of_any(batch) == launches.of_any(batch, longest=True) == []


def test_recorded_launch_has_room_for_what_its_tables_hold(launches: DecodeLaunches) -> None:
    assert launches.of_any(decodes([], 64)) == [Decodes(0, 8, 8 * 2, 64 * 16)]
    assert launches.of_any(decodes([], 313)) == [Decodes(0, 8, 8192 // SPLIT + 8, 5000)]


def test_sequences_that_share_blocks_may_not_fit_a_recorded_launch(launches: DecodeLaunches) -> None:
    batch = decodes([5000, 3], 313)
    launches.begin_step(batch, 8)
    assert launches.fits_any(batch)

    batch = decodes([5000] * 5, 313)
    launches.begin_step(batch, 8)
    assert not launches.fits_any(batch)


@pytest.mark.parametrize(("sliding_window", "fits"), [(0, False), (SPLIT, True)])
def test_blocks_that_left_the_window_take_no_room_of_a_recorded_launch(
    sliding_window: int, fits: bool
) -> None:
    launches = DecodeLaunches(LIMITS._replace(num_slots=5 * (SPLIT + 16), sliding_window=sliding_window))
    batch = decodes([5000] * 5, 313)

    launches.begin_step(batch, 8)

    assert launches.fits_any(batch) == fits


@pytest.mark.parametrize("lens", [[1], [5000] * 5, [513, 5000, 64, 4097, 2]])
def test_workspace_is_enough_for_any_launch(launches: DecodeLaunches, lens: list[int]) -> None:
    batch = decodes(lens, 313)
    launches.begin_step(batch, 8)

    for each in (*launches.of_step(0), *launches.of_any(batch), *launches.of_any(batch, longest=True)):
        needed = paged_decode_workspace(each.max_splits, each.end - each.first, 4, 64)
        assert needed <= launches.workspace(4, 64)
    assert np.sum([each.end - each.first for each in launches.of_step(0)]) == 8
