"""LLM: several outputs of a prompt, the prefix cache and priorities over a tiny real model."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cupaged import LLM, BeamSearchParams, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny_llama_dir: Path) -> Iterator[LLM]:
    with LLM(tiny_llama_dir, max_model_len=128) as made:
        yield made


def test_n_greedy_outputs_are_the_single_one_bit_for_bit(llm: LLM) -> None:
    params = replace(GREEDY, logprobs=2)
    single = llm.generate([5, 6, 7], params, use_tqdm=False)[0].outputs[0]

    outputs = llm.generate([5, 6, 7], replace(params, n=4), use_tqdm=False)[0].outputs

    assert outputs == [replace(single, index=index) for index in range(4)]


def test_n_sampled_outputs_differ_and_the_first_is_the_single_one(llm: LLM) -> None:
    params = SamplingParams(seed=3, max_tokens=8, ignore_eos=True)
    single = llm.generate("hello", params, use_tqdm=False)[0].outputs[0].token_ids

    outputs = llm.generate("hello", replace(params, n=4), use_tqdm=False)[0].outputs

    assert outputs[0].token_ids == single
    assert len({tuple(output.token_ids) for output in outputs}) == 4


def test_best_of_returns_the_most_likely_of_all(llm: LLM) -> None:
    params = SamplingParams(seed=3, max_tokens=8, ignore_eos=True, logprobs=0)
    every = llm.generate("hello", replace(params, n=4), use_tqdm=False)[0].outputs

    (best,) = llm.generate("hello", replace(params, best_of=4), use_tqdm=False)[0].outputs

    # All have as many tokens, so that the mean ranks as the sum does.
    likeliest = max(every, key=lambda output: output.cumulative_logprob or 0)
    assert best == replace(likeliest, index=0)


def test_a_prompt_is_found_again_until_the_cache_is_reset(tiny_llama_dir: Path) -> None:
    prompt = list(range(5, 45))
    with LLM(tiny_llama_dir, max_model_len=64) as llm:

        def run() -> tuple[int, list[int]]:
            output = llm.generate(prompt, GREEDY, use_tqdm=False)[0]
            return output.num_cached_tokens, output.outputs[0].token_ids

        runs = [run(), run()]
        llm.reset_prefix_cache()
        runs.append(run())

        assert [cached for cached, _ in runs] == [0, 32, 0]
        assert len({tuple(ids) for _, ids in runs}) == 1
        assert llm.get_metrics()["prefix_hit_tokens"] == 32


def test_an_id_in_use_stops_the_call_and_not_the_request_that_has_it(tiny_llama_dir: Path) -> None:
    with LLM(tiny_llama_dir, max_model_len=64) as llm:
        llm.engine.add_request("1", [5], GREEDY)

        with pytest.raises(ValueError, match="'1' is in use"):
            llm.generate([[5], [6], [7]], GREEDY, use_tqdm=False)

        outputs = []
        while llm.engine.has_unfinished():
            outputs += llm.engine.step()
        assert {output.request_id for output in outputs} == {"1"}
        assert outputs[-1].finished


def test_priorities_go_with_the_prompts(tiny_llama_dir: Path) -> None:
    with LLM(tiny_llama_dir, max_model_len=64, max_num_seqs=1, scheduling_policy="priority") as llm:
        outputs = llm.generate([[5], [6], [7]], GREEDY, use_tqdm=False, priority=[2, 0, 1])

    ends = [output.metrics.finished_time for output in outputs if output.metrics]
    assert [place for _, place in sorted(zip(ends, range(3), strict=True))] == [1, 2, 0]


@pytest.mark.parametrize(
    ("priority", "message"),
    [
        ([0], "2 prompts but 1 priorities"),
        (3, "priority must be a list of whole numbers"),
        ([0, 1], r"prompts\[1\]: priority is 1 but .*fcfs"),
        ([0, "a"], r"prompts\[1\]: priority must be a whole number"),
    ],
)
def test_priorities_that_cannot_be_are_refused(llm: LLM, priority: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        llm.generate([[5], [6]], GREEDY, use_tqdm=False, priority=priority)
    with pytest.raises(ValueError, match=message):
        llm.beam_search([[5], [6]], BeamSearchParams(beam_width=1, max_tokens=2), False, priority=priority)
    with pytest.raises(ValueError, match=message):
        llm.chat([[{"role": "user", "content": "a"}]] * 2, GREEDY, False, priority=priority)


def test_a_group_that_can_never_fit_is_refused_by_its_place_before_anything_runs(
    tiny_llama_dir: Path,
) -> None:
    with LLM(tiny_llama_dir, max_model_len=64) as probe:
        memory = 5 * probe.engine.kv_block_bytes
    with LLM(tiny_llama_dir, max_model_len=64, kv_cache_memory=memory) as llm:
        with pytest.raises(ValueError, match=r"prompts\[1\]: .*blocks"):
            llm.generate([[5], [6]], [GREEDY, replace(GREEDY, n=9, max_tokens=60)], use_tqdm=False)

        assert llm.engine.num_steps == 0
