"""bench_offline: workloads are what the seed says, static batching computes padding, sharing saves blocks."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupaged.config import EngineConfig
from cupaged.engine.llm_engine import LLMEngine
from tools.bench_offline import parse_args, run_static
from tools.offline_runs import LONGEST, SHORTEST, Workload, make_workload, run
from tools.offline_sharing import CreateEngine, compare_prefixes, compare_sampling, run_fresh


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


@pytest.mark.parametrize("others", [("-n", "4"), ("--shared-prefix", "80")])
def test_comparisons_are_made_one_at_a_time(
    others: tuple[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["bench_offline", "model", "--static", "8", *others])

    with pytest.raises(SystemExit):
        parse_args()

    assert "not allowed with argument --static" in capsys.readouterr().err


def test_option_that_would_be_ignored_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["bench_offline", "model", "--static", "8", "--repeat", "3"])

    with pytest.raises(SystemExit):
        parse_args()


def test_no_run_finds_what_one_before_it_has_cached(engine: LLMEngine) -> None:
    workload = Workload([[5] * 40, [6] * 20], [4, 4])
    found = engine.get_metrics()["prefix_hit_tokens"]

    for _ in range(2):
        run_fresh(engine, workload)
        run_static(engine, workload, limit=1)

    assert engine.get_metrics()["prefix_hit_tokens"] == found


@pytest.fixture
def create_engine(tiny_llama_dir: Path) -> CreateEngine:
    """Make engines for what a tiny model can do."""

    def create(max_num_seqs: int, **options: Any) -> LLMEngine:
        options |= {"max_model_len": 256, "max_num_batched_tokens": 128}
        return LLMEngine(EngineConfig.create(tiny_llama_dir, max_num_seqs=max_num_seqs, **options))

    return create


def test_a_prefix_that_all_share_is_stored_once(create_engine: CreateEngine) -> None:
    found = compare_prefixes(create_engine, [64, 96], 6, seed=1, repeat=1)

    assert found.keys() == {"64", "96"}
    for row in found.values():
        assert row["speedup"] > 0
        assert row["memory_saved"] > 0.4
        assert row["shared_blocks"] > 0.3


def test_outputs_of_one_request_share_its_prompt(create_engine: CreateEngine) -> None:
    workload = Workload([[5] * 49, [6] * 33], [4, 9])

    found = compare_sampling(create_engine, lambda _: workload, 8, 4, repeat=2)

    over_own = found["over_requests_of_their_own"]
    # A prompt's full blocks, 3 and 2, are stored once where four requests store them four times.
    assert over_own["other_peak_blocks"] - over_own["peak_blocks"] == 3 * (3 + 2)
    assert found["over_cache_off"]["memory_saved"] == 0
    assert over_own["shared_blocks"] > 0.3


def test_each_sequence_has_its_first_token_and_its_pauses(engine: LLMEngine) -> None:
    result = run(engine, Workload([[5] * 9], [4], num_sequences=2, temperature=1.0))

    assert result.num_output_tokens == 8
    assert len(result.first_token) == 2
    assert len(result.between_tokens) == 2 * 3
