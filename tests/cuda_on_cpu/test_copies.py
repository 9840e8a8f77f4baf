"""cp.async lands when it is waited for; what relies on more is found, or has other bits with early copies."""

from typing import Any

import numpy as np
import pytest

from tests.cuda_on_cpu.planted import complaint, device, line, zeros

F32 = np.float32
TILES = np.arange(5 * 256, dtype=F32).reshape(5, 256)
SUMS = TILES.reshape(5, 64, 4)[:, ::-1].sum(0).ravel()
UNDER_WAY = "is still under way"

# BUG of copies.cu: the mark of a line in the message, what else it says
BUGS = {
    "WAIT_TOO_LAX": ("read", UNDER_WAY),
    "NO_BARRIER_AFTER_WAIT": ("read", ""),
    "OVERWRITTEN_TOO_EARLY": ("start", UNDER_WAY),
    "NEVER_WAITED": ("start", "this cp.async was never waited for"),
    "NO_COMMIT": ("read", UNDER_WAY),
    "LAST_UNCOMMITTED": ("uncommitted", "this cp.async was never waited for"),
    "MISALIGNED": ("start", "misaligned cp.async at byte"),
    "WRITTEN_UNDER_WAY": ("write", UNDER_WAY),
    "STAGE_PAST_END": ("start", "illegal write by cp.async of 16 bytes at byte"),
    "TO_GLOBAL": ("start", "global-memory write by cp.async of 16 bytes at byte"),
}


def sum_tiles(bug: str, mode: str = "check", **options: Any) -> np.ndarray[Any, Any]:
    out = zeros(256, dtype=F32)
    kernel = device(mode, **options).kernel("copies", "sum_tiles", BUG=bug)
    kernel((1, 1, 1), 64, (out, TILES, len(TILES)))
    return out


@pytest.mark.parametrize("schedule", ["forward", "reverse", "random"])
@pytest.mark.parametrize("bug", BUGS)
def test_bug_is_found_and_its_line_named(bug: str, schedule: str) -> None:
    mark, what = BUGS[bug]
    kernel = device(schedule=schedule).kernel("copies", "sum_tiles", BUG=bug)

    message = complaint(kernel, (1, 1, 1), 64, (zeros(256, dtype=F32), TILES, len(TILES)))

    assert what in message
    assert line("copies", mark) in message


@pytest.mark.parametrize("early_copies", [False, True])
@pytest.mark.parametrize("schedule", ["forward", "reverse", "random"])
@pytest.mark.parametrize("mode", ["fast", "check"])
def test_right_twin_sums_in_every_order(mode: str, schedule: str, early_copies: bool) -> None:
    np.testing.assert_array_equal(sum_tiles("NONE", mode, schedule=schedule, early_copies=early_copies), SUMS)


def test_fast_mode_gives_a_lax_wait_other_bits_with_early_copies() -> None:
    late, early = (sum_tiles("WAIT_TOO_LAX", "fast", early_copies=early) for early in (False, True))

    assert np.isnan(late).any()
    np.testing.assert_array_equal(early, SUMS)


@pytest.mark.parametrize("bug", ["NEVER_WAITED", "NO_COMMIT", "LAST_UNCOMMITTED"])
def test_copies_under_way_at_the_end_are_found_in_fast_mode(bug: str) -> None:
    kernel = device("fast").kernel("copies", "sum_tiles", BUG=bug)

    message = complaint(kernel, (1, 1, 1), 64, (zeros(256, dtype=F32), TILES, len(TILES)))

    assert "this cp.async was never waited for" in message
    assert line("copies", BUGS[bug][0] if bug != "NO_COMMIT" else "start") in message


@pytest.mark.parametrize("early_copies", [False, True])
@pytest.mark.parametrize("mode", ["fast", "check"])
def test_invalid_copy_fills_with_zeros_and_reads_nothing(mode: str, early_copies: bool) -> None:
    out, x = zeros(32, 4, dtype=F32), np.ones((5, 4), F32)

    kernel = device(mode, early_copies=early_copies).kernel("copies", "fill_with_zeros", BUG="NONE")
    kernel((1, 1, 1), 32, (out, x, 5))

    assert (out[:5] == 1).all()
    assert (out[5:] == 0).all()
    kernel((1, 1, 1), 32, (out, x[:0], 0))
