"""adjust_logits.cu gives the bits that the twins give."""

from typing import Any

import numpy as np
import pytest

from cupaged.kernels import adjust_logits
from cupaged.kernels.adjust_logits import (
    adjust_logits_cpu,
    adjust_logits_cuda,
    count_history_cpu,
    count_history_cuda,
    count_sampled_cpu,
    count_sampled_cuda,
)
from tests.cuda_on_cpu.device import EmulatedDevice
from tests.kernels.elements import strided
from tests.kernels.penalties import Step, make_histories, make_step
from tests.kernels.schedules import identical_under_all_schedules

VOCAB_SIZES = [1, 31, 1000, 4099]


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a row be of several blocks."""
    monkeypatch.setattr(adjust_logits, "THREADS", 64)
    monkeypatch.setattr(adjust_logits, "CHUNK", 128)


def without(step: Step, *names: str) -> tuple[list[Any], list[Any]]:
    """Return the kernel's and the twin's arguments where no sequence has what these say."""
    kernel = [None if name in names else value for name, value in step._asdict().items()]
    twin = [v[:0, :0] if n == "counts" else v[:0] for n, v in step._asdict().items() if n in names]
    return kernel, [twin.pop(0) if name in names else value for name, value in step._asdict().items()]


PENALTIES = ("counts", "repetition_penalty", "frequency_penalty", "presence_penalty")
BIAS, BANS = ("bias_start", "bias_ids", "bias"), ("banned_start", "banned")


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
@pytest.mark.parametrize("absent", [(), PENALTIES, BIAS, BANS, PENALTIES + BIAS + BANS])
def test_bits_are_the_twins(
    device: EmulatedDevice,
    vocab_size: int,
    absent: tuple[str, ...],
) -> None:
    args, twin_args = without(make_step(vocab_size), *absent)
    found, expected = (np.full((5, vocab_size), np.nan, np.float32) for _ in range(2))

    adjust_logits_cuda(device, *[strided(args[0], 3), *args[1:], found])
    adjust_logits_cpu(*[*twin_args, expected])

    assert np.array_equal(found.view(np.uint32), expected.view(np.uint32))


def test_bits_are_the_twins_in_blocks_as_large_as_in_use(device: EmulatedDevice) -> None:
    step = make_step(9001)
    found, expected = (np.full_like(step.logits, np.nan) for _ in range(2))

    adjust_logits_cuda(device, *step, found)
    adjust_logits_cpu(*step, expected)

    assert np.array_equal(found.view(np.uint32), expected.view(np.uint32))


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_counts_are_the_twins(device: EmulatedDevice, vocab_size: int) -> None:
    *args, found = make_histories(vocab_size)
    rows, flags = args[:2]
    expected, token_ids = found.copy(), np.array([0, vocab_size - 1, 0, 0], np.int32)

    count_history_cuda(device, *[*args, found])
    count_history_cpu(*[*args, expected])
    assert np.array_equal(found, expected)

    count_sampled_cuda(device, rows, flags, token_ids, found)
    count_sampled_cpu(rows, flags, token_ids, expected)
    assert np.array_equal(found, expected)


@pytest.mark.usefixtures("small_chunks")
def test_order_of_threads_changes_no_bit() -> None:
    step = make_step(500)
    *args, before = make_histories(500)
    adjusted, counts = np.empty_like(step.logits), np.empty_like(before)

    def launch(device: EmulatedDevice) -> None:
        adjusted[:] = 0
        counts[:] = before
        adjust_logits_cuda(device, *step, adjusted)
        count_history_cuda(device, *[*args, counts])

    assert identical_under_all_schedules(launch, adjusted, counts)
