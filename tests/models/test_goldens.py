"""Every family against transformers' logits, made by tools/make_goldens."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.models.driver import Driver, Logits
from tools.make_tiny_model import CASES, write_tiny_model

GOLDENS = Path(__file__).parent / "goldens"


class Golden(NamedTuple):
    """One case: its checkpoint and what transformers computes."""

    directory: Path
    tokens: list[int]  # prompt and greedy continuation
    num_prompt: int
    logits: Logits  # [len(tokens), vocab_size]
    short_logits: Logits  # of the first tokens alone


@pytest.fixture(scope="module", params=CASES)
def golden(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Golden:
    """Each case in turn."""
    return load_golden(request.param, tmp_path_factory)


def load_golden(case: str, tmp_path_factory: pytest.TempPathFactory) -> Golden:
    """Write the tiny model of `case` and read its golden."""
    directory = write_tiny_model(tmp_path_factory.mktemp(case), CASES[case])
    with np.load(GOLDENS / f"{case}.npz") as arrays:
        return Golden(
            directory,
            arrays["tokens"].tolist(),
            int(arrays["num_prompt"]),
            arrays["logits"],
            arrays["short_logits"],
        )


def assert_logits_equal(actual: Logits, expected: Logits) -> None:
    """Compare within 2e-4 of the largest logit; say how far off they are."""
    error: NDArray[np.float32] = np.abs(actual - expected)
    limit = 2e-4 * max(1.0, float(np.abs(expected).max()))
    first = np.argmax(error.max(axis=1) >= limit)
    assert error.max() < limit, (
        f"error max {error.max():.2e}, mean {error.mean():.2e}, limit {limit:.2e}, first at row {first}"
    )


def test_goldens_have_logits_that_show_errors() -> None:
    for case in CASES:
        with np.load(GOLDENS / f"{case}.npz") as arrays:
            assert 1 < arrays["logits"].std() < 7, case


def test_logits_at_every_position_equal_transformers(golden: Golden) -> None:
    driver = Driver(golden.directory, max_model_len=len(golden.tokens))

    actual = driver.prefill(0, golden.tokens, chunk=len(golden.tokens))

    assert_logits_equal(actual, golden.logits)


def test_chunked_prefill_beside_another_sequence_equals_transformers(golden: Golden) -> None:
    driver = Driver(golden.directory, max_model_len=len(golden.tokens))
    driver.prefill(1, golden.tokens[:19], chunk=19)
    actual = []
    for i, start in enumerate(range(0, len(golden.tokens), 7)):
        chunk = golden.tokens[start : start + 7]
        actual.append(driver.step({0: chunk, 1: golden.tokens[19 + i : 20 + i]})[0])

    assert_logits_equal(np.concatenate(actual), golden.logits)


def test_greedy_decode_gives_transformers_tokens(golden: Golden) -> None:
    driver = Driver(golden.directory, max_model_len=len(golden.tokens))
    logits = driver.prefill(0, golden.tokens[: golden.num_prompt], chunk=23)
    top2 = np.sort(golden.logits, axis=1)[:, -2:]
    clear = top2[:, 1] - top2[:, 0] > 1e-3

    for position in range(golden.num_prompt, len(golden.tokens)):
        token = int(logits[-1].argmax())
        if clear[position - 1]:
            assert token == golden.tokens[position]
        logits = driver.step({0: [golden.tokens[position]]})[0]
        assert_logits_equal(logits, golden.logits[position : position + 1])


def test_dynamic_rope_up_to_the_original_length_equals_transformers(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    golden = load_golden("llama_dynamic", tmp_path_factory)
    num_tokens = len(golden.short_logits)
    driver = Driver(golden.directory, max_model_len=num_tokens)

    actual = driver.prefill(0, golden.tokens[:num_tokens], chunk=num_tokens)

    assert_logits_equal(actual, golden.short_logits)
    assert np.abs(golden.short_logits - golden.logits[:num_tokens]).max() > 0.1  # or it would prove nothing
