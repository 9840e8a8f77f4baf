"""bench_offline: the workload is what the seed says, and static batching computes what padding costs."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cupaged.config import EngineConfig
from cupaged.engine.llm_engine import LLMEngine
from tools.bench_offline import LONGEST, SHORTEST, Workload, make_workload, run, run_static


@pytest.fixture(scope="module")
def engine(tiny_llama_dir: Path) -> Iterator[LLMEngine]:
    made = LLMEngine(EngineConfig.create(tiny_llama_dir, max_model_len=128, max_num_seqs=2))
    yield made
    made.close()


def test_workload_is_the_same_for_the_same_seed_and_within_its_bounds() -> None:
    first, second = (make_workload(256, 3, prompt_mean=128, output_mean=96, vocab_size=50) for _ in range(2))

    assert first == second
    lengths = np.array([[len(prompt) for prompt in first.prompts], first.output_lengths])
    assert lengths.min() >= SHORTEST
    assert lengths.max() <= LONGEST
    assert lengths.mean(axis=1) == pytest.approx([128, 96], rel=0.15)


def test_continuous_run_computes_what_was_asked_for(engine: LLMEngine) -> None:
    result = run(engine, Workload([[5] * 9, [6] * 20, [7] * 3], [4, 1, 6]))

    assert result.num_output_tokens == 11
    assert len(result.first_token) == 3
    assert len(result.between_tokens) == 11 - 3
    assert result.num_steps == 7  # 4 beside 1 and then the first tokens of 6: whoever leaves makes room
    assert 0 < result.slot_use <= 1
    assert not engine.has_unfinished()


def test_static_run_waits_for_the_slowest_of_each_batch(engine: LLMEngine) -> None:
    _, num_steps = run_static(engine, Workload([[5] * 9, [6] * 20, [7] * 3], [4, 1, 6]), limit=2)

    assert num_steps == 4 + 6
