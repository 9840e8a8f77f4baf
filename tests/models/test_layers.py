"""Layers over two ranks, in one process: every rank a thread, meeting at a barrier."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from cupaged.backend.base import Array
from tests.models.driver import Driver, Logits
from tools.make_tiny_model import CASES, write_tiny_model


class LockStep:
    """One of two ranks; what both say is added or joined once both have said it."""

    size = 2

    def __init__(self, rank: int, barrier: threading.Barrier, said: list[Array]) -> None:
        self.rank, self._barrier, self._said = rank, barrier, said
        self.num_reduces = 0

    def all_reduce(self, x: Array) -> Array:
        self.num_reduces += 1
        first, second = self._exchange(x)
        return first + second

    def all_gather(self, x: Array) -> Array:
        return np.concatenate(self._exchange(x), axis=-1)

    def broadcast(self, x: Array) -> Array:
        return self._exchange(x)[0]

    def barrier(self) -> None:
        self._barrier.wait()

    def _exchange(self, x: Array) -> list[Array]:
        self._said[self.rank] = np.array(x)
        self._barrier.wait(60)
        said = list(self._said)
        self._barrier.wait(60)
        return said


def make_ranks() -> list[LockStep]:
    barrier, said = threading.Barrier(2), [None, None]
    return [LockStep(rank, barrier, said) for rank in range(2)]


@pytest.mark.parametrize("case", ["llama_bias", "mistral_window", "qwen3"])  # biases; a window; tied, qk-norm
def test_two_ranks_equal_one(tmp_path: Path, case: str) -> None:
    write_tiny_model(tmp_path, CASES[case])
    tokens = list(range(7, 40))

    def run(rank: LockStep) -> Logits:
        return Driver(tmp_path, max_model_len=64, communicator=rank).prefill(0, tokens, chunk=17)

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(run, make_ranks())

    whole = Driver(tmp_path, max_model_len=64).prefill(0, tokens, chunk=17)
    np.testing.assert_array_equal(first, second)
    np.testing.assert_allclose(first, whole, atol=1e-4)


def test_a_decoder_layer_reduces_twice(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, CASES["llama"])
    ranks = make_ranks()

    def run(rank: LockStep) -> None:
        driver = Driver(tmp_path, max_model_len=8, communicator=rank)
        rank.num_reduces = 0
        driver.step({0: [7, 8, 9]})

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(run, ranks))

    assert ranks[0].num_reduces == 2 * 2 * CASES["llama"]["num_hidden_layers"]  # measured once, run once


def test_heads_that_ranks_cannot_share_are_named(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, CASES["llama_tied"])

    with pytest.raises(ValueError, match="num_key_value_heads 1 cannot be divided over 2 ranks"):
        Driver(tmp_path, max_model_len=8, communicator=make_ranks()[0])


def test_tied_head_shares_the_embeddings_handle(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, CASES["llama_tied"])
    model = Driver(tmp_path, max_model_len=8).model

    assert model._lm_head._weight is model._embed_tokens.weight  # type: ignore[attr-defined]
