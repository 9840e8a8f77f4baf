"""sample.cu takes the tokens that the twin takes, all of them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cupaged.kernels import sample
from cupaged.kernels.adjust_logits import BANNED
from cupaged.kernels.sample import sample_cpu, sample_cuda
from tests.cuda_on_cpu.device import EmulatedDevice
from tests.kernels.elements import strided
from tests.kernels.rows_of_logits import KINDS, logits_of
from tests.kernels.schedules import identical_under_all_schedules

Arrays = tuple[NDArray[Any], ...]

TEMPERATURES = (0, 1e-5, 0.1, 0.7, 1, 2, 1e4, np.finfo(np.float32).max)
TOP_K = (0, 1, 2, 5, 40, 1000, 2**31 - 1)
TOP_P = (1, 1 - 2.0**-24, 0.99, 0.9, 0.5, 1e-3, 2.0**-126)
MIN_P = (0, 0, 0, 1e-9, 0.05, 0.5, 1)


def parameters(rng: np.random.Generator, n: int) -> Arrays:
    """Return what sample takes behind the logits, of n rows; some rows have a target and so do not sample."""
    return (
        rng.permutation(n).astype(np.int32),
        rng.choice([-1] * 7 + [0], n).astype(np.int32),
        rng.choice(TEMPERATURES, n).astype(np.float32),
        rng.choice(TOP_K, n).astype(np.int32),
        rng.choice(TOP_P, n).astype(np.float32),
        rng.choice(MIN_P, n).astype(np.float32),
        rng.integers(-(2**31), 2**31, (n, 2)).astype(np.int32),
        rng.integers(0, 9, n).astype(np.int32),
        rng.integers(0, 4096, n).astype(np.int32),
    )


def alike(n: int, temperature: float = 1, top_k: int = 0, top_p: float = 1, min_p: float = 0) -> Arrays:
    """Return the arguments of n rows that differ only in their random word."""
    filters = (
        np.full(n, temperature, np.float32),
        np.full(n, top_k, np.int32),
        np.full(n, top_p, np.float32),
        np.full(n, min_p, np.float32),
    )
    random = (np.zeros((n, 2), np.int32), np.zeros(n, np.int32), np.arange(n, dtype=np.int32))
    return (np.arange(n, dtype=np.int32), np.full(n, -1, np.int32), *filters, *random)


def both(device: EmulatedDevice, logits: NDArray[np.float32], *args: NDArray[Any]) -> Arrays:
    """Return the tokens of kernel and twin; -7 where a row did not sample."""
    found, expected = (np.full(len(logits), -7, np.int32) for _ in range(2))
    sample_cuda(device, *[logits, *args, found])
    sample_cpu(*[np.ascontiguousarray(logits), *args, expected])
    return found, expected


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let blocks have 64 threads, which the emulator runs faster."""
    monkeypatch.setattr(sample, "THREADS", 64)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("vocab_size", "n"), [(1, 20), (2, 60), (3, 100), (31, 150), (33, 150), (1000, 50)])
def test_tokens_are_the_twins(
    device: EmulatedDevice,
    vocab_size: int,
    n: int,
    kind: str,
) -> None:
    rng = np.random.default_rng(vocab_size)

    found, expected = both(device, logits_of(rng, kind, (n, vocab_size)), *parameters(rng, n))

    assert found.tolist() == expected.tolist()
    assert (expected == -7).any() or n < 50


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_the_twins_in_large_blocks(device: EmulatedDevice, kind: str) -> None:
    rng = np.random.default_rng(5)

    found, expected = both(device, logits_of(rng, kind, (16, 4099)), *parameters(rng, 16))

    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("vocab_size", [32_001, 128_256])
def test_tokens_are_the_twins_in_large_vocabularies(device: EmulatedDevice, vocab_size: int) -> None:
    rng = np.random.default_rng(1)
    logits = rng.standard_normal((5, vocab_size), np.float32) * 3
    seq, target, temperature, top_k, top_p, min_p, *random = alike(5)
    temperature[0] = 0
    top_p[1] = top_p[3] = 0.9
    top_k[2] = top_k[3] = 50
    min_p[4] = 0.05

    found, expected = both(device, logits, seq, target, temperature, top_k, top_p, min_p, *random)

    assert found.tolist() == expected.tolist()


@pytest.mark.usefixtures("small_blocks")
def test_greedy_takes_the_lower_of_any_two_equals(device: EmulatedDevice) -> None:
    pairs = np.array([(i, j) for i in range(31) for j in range(i + 1, 31)])
    n = len(pairs)
    logits = np.zeros((n, 31), np.float32)
    logits[np.arange(n)[:, None], pairs] = 1

    found, _ = both(device, logits, *alike(n, temperature=0))

    assert found.tolist() == pairs[:, 0].tolist()


@pytest.mark.usefixtures("small_blocks")
def test_rows_may_begin_anywhere(device: EmulatedDevice) -> None:
    rng = np.random.default_rng(2)

    for gap in range(1, 5):
        found, expected = both(
            device, strided(logits_of(rng, "normal", (40, 403)), gap), *parameters(rng, 40)
        )

        assert found.tolist() == expected.tolist()


@pytest.mark.usefixtures("small_blocks")
def test_banned_tokens_are_never_taken(device: EmulatedDevice) -> None:
    rng = np.random.default_rng(3)
    logits = logits_of(rng, "strange", (200, 7))
    banned = rng.random(logits.shape) < 0.7
    logits.view(np.uint32)[banned] = BANNED

    found, expected = both(device, logits, *parameters(rng, 200))

    assert found.tolist() == expected.tolist()


@pytest.mark.usefixtures("small_blocks")
def test_lowest_token_that_is_left_is_taken_where_nothing_is_above_minus_infinity(
    device: EmulatedDevice,
) -> None:
    logits = np.full((39, 39), -np.inf, np.float32)
    logits.view(np.uint32)[np.tri(39, k=-1, dtype=bool)] = BANNED

    for gap in range(4):  # rows begin at any place of a 16-byte unit
        found, expected = both(device, strided(logits, gap), *alike(39))

        assert expected.tolist() == list(range(39))
        assert found.tolist() == expected.tolist()


def test_block_size_changes_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(4)
    logits, args = logits_of(rng, "rounded", (60, 999)), parameters(rng, 60)
    tokens = set()

    for threads in (64, 96, 512, 1024):
        monkeypatch.setattr(sample, "THREADS", threads)
        tokens.add(tuple(both(EmulatedDevice(), logits, *args)[0].tolist()))

    assert len(tokens) == 1


@pytest.mark.usefixtures("small_blocks")
def test_order_of_threads_changes_no_token() -> None:
    rng = np.random.default_rng(6)
    logits, args = logits_of(rng, "rounded", (20, 515)), parameters(rng, 20)
    args[1][:] = -1
    tokens = np.empty(20, np.int32)

    assert identical_under_all_schedules(lambda device: sample_cuda(device, *[logits, *args, tokens]), tokens)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    ("filters", "kept"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"top_k": 3}, [0, 2, 4]),
        ({"top_p": 0.71}, [0, 2, 4]),
        ({"min_p": 0.7}, [0, 2]),
    ],
)
def test_tokens_are_drawn_in_proportion_to_the_softmax(
    filters: dict[str, Any],
    kept: Sequence[int],
) -> None:
    share = np.array([0.4, 0.05, 0.3, 0.05, 0.2])
    n = 4000
    tokens = np.empty(n, np.int32)

    logits = np.tile(np.log(share).astype(np.float32), (n, 1))
    sample_cuda(EmulatedDevice(), *[logits, *alike(n, **filters), tokens])

    counts = np.bincount(tokens, minlength=5)[list(kept)]
    expected = n * share[list(kept)] / share[list(kept)].sum()
    assert counts.sum() == n
    assert ((counts - expected) ** 2 / expected).sum() < 18.5  # chi-square, 4 degrees of freedom: 0.1 %
