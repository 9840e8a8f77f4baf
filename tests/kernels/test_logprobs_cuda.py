"""logprobs.cu gives the bits that the twin gives."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cupaged.kernels import logprobs
from cupaged.kernels.logprobs import MAX_TOP, SCALED_LOGPROBS, logprobs_cpu, logprobs_cuda
from tests.cuda_on_cpu.device import EmulatedDevice
from tests.kernels.elements import strided
from tests.kernels.rows_of_logits import KINDS, logits_of
from tests.kernels.schedules import identical_under_all_schedules

Arrays = tuple[NDArray[Any], ...]
TEMPERATURES = np.array([0.0, 1e-6, 1e-4, 0.3, 0.7, 1.0, 1.9, 50.0, 3e38], np.float32)


def chosen(rng: np.random.Generator, n: int, vocab_size: int) -> Arrays:
    """Return logit_seq, logit_target, sampled, flags and temperature of n rows; some are scaled."""
    target = np.where(rng.random(n) < 0.5, -1, rng.integers(0, vocab_size, n))
    return (
        rng.permutation(n).astype(np.int32),
        target.astype(np.int32),
        rng.integers(0, vocab_size, n).astype(np.int32),
        (rng.integers(0, 8, n) | rng.choice([0, SCALED_LOGPROBS], n)).astype(np.int32),
        rng.choice(TEMPERATURES, n),
    )


def empty(n: int, num_top: int) -> Arrays:
    """Return token_ids, logprobs and ranks that nobody has written."""
    width = (n, 1 + num_top)
    return np.full(width, -7, np.int32), np.full(width, np.nan, np.float32), np.full(n, -7, np.int32)


def assert_same_bits(device: EmulatedDevice, logits: NDArray[np.float32], args: Arrays, num_top: int) -> None:
    found, expected = (empty(len(logits), num_top) for _ in range(2))
    logprobs_cuda(device, logits, *args, *found)
    logprobs_cpu(np.ascontiguousarray(logits), *args, *expected)

    for a, b in zip(found, expected, strict=True):
        assert np.array_equal(a, b, equal_nan=a.dtype == np.float32)
    assert not np.signbit(found[1][found[1] == 0]).any()


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let blocks have 64 threads, which the emulator runs faster."""
    monkeypatch.setattr(logprobs, "THREADS", 64)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("vocab_size", "n"), [(1, 10), (2, 20), (31, 40), (33, 40), (1000, 20)])
@pytest.mark.parametrize("num_top", [0, 1, 20])
def test_bits_are_the_twins(
    device: EmulatedDevice,
    num_top: int,
    vocab_size: int,
    n: int,
    kind: str,
) -> None:
    rng = np.random.default_rng(vocab_size)
    logits = logits_of(rng, kind, (n, vocab_size))

    assert_same_bits(device, logits, chosen(rng, n, vocab_size), min(num_top, vocab_size))


@pytest.mark.parametrize("vocab_size", [4099, 32_001, 128_256])
def test_bits_are_the_twins_in_large_vocabularies(device: EmulatedDevice, vocab_size: int) -> None:
    rng = np.random.default_rng(1)
    logits = rng.standard_normal((2, vocab_size), np.float32) * 3

    assert_same_bits(device, logits, chosen(rng, 2, vocab_size), 5)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("value", [np.nan, -np.inf, np.inf, 0.0])
def test_bits_are_the_twins_where_all_are_the_same(
    device: EmulatedDevice,
    value: float,
) -> None:
    logits = np.full((3, 300), value, np.float32)

    assert_same_bits(device, logits, chosen(np.random.default_rng(2), 3, 300), MAX_TOP)


@pytest.mark.parametrize("temperature", [1e-6, 1e-5, 0.7, 3e38])
def test_scaled_bits_are_the_twins_in_a_large_vocabulary(device: EmulatedDevice, temperature: float) -> None:
    rng = np.random.default_rng(1)
    logits = rng.standard_normal((2, 32_001), np.float32) * 3
    sampled = rng.integers(0, 32_001, 2).astype(np.int32)
    seqs, flags = np.array([1, 0], np.int32), np.full(2, SCALED_LOGPROBS, np.int32)
    args = (seqs, np.full(2, -1, np.int32), sampled, flags, np.full(2, temperature, np.float32))

    assert_same_bits(device, logits, args, MAX_TOP)


@pytest.mark.usefixtures("small_blocks")
def test_rows_may_begin_anywhere(device: EmulatedDevice) -> None:
    rng = np.random.default_rng(3)

    for gap in range(1, 5):
        logits = strided(logits_of(rng, "rounded", (10, 403)), gap)
        assert_same_bits(device, logits, chosen(rng, 10, 403), 20)


@pytest.mark.usefixtures("small_blocks")
def test_order_of_threads_changes_no_bit() -> None:
    rng = np.random.default_rng(4)
    logits, args = logits_of(rng, "few", (4, 515)), chosen(rng, 4, 515)
    out = empty(4, 20)

    assert identical_under_all_schedules(lambda device: logprobs_cuda(device, logits, *args, *out), *out)


def test_more_top_tokens_than_there_are_is_no_launch() -> None:
    logits, ints = np.zeros((1, 3), np.float32), np.zeros(1, np.int32)
    outputs = np.zeros((1, 5), np.int32), np.zeros((1, 5), np.float32), ints

    with pytest.raises(AssertionError, match="4 top tokens of 3"):
        logprobs_cuda(EmulatedDevice(), logits, ints, ints, ints, ints, outputs[1][0, :1], *outputs)


def test_too_many_top_tokens_are_an_error() -> None:
    rng = np.random.default_rng(5)
    logits = np.zeros((1, 1000), np.float32)

    with pytest.raises(ValueError, match="129 top tokens are wanted but kernels give 128; ask for fewer"):
        logprobs_cuda(EmulatedDevice(), logits, *chosen(rng, 1, 1000), *empty(1, 129))
