"""LLM: the offline front door over a tiny real model."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cupaged import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny_llama_dir: Path) -> Iterator[LLM]:
    with LLM(tiny_llama_dir, max_model_len=128) as made:
        yield made


def tokens(llm: LLM, prompt: Any, params: SamplingParams = GREEDY) -> list[int]:
    return llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids


def test_every_form_of_a_prompt_gives_the_same(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode("hello")

    expected = tokens(llm, "hello")

    for prompt in ("hello", {"prompt": "hello"}, {"prompt_token_ids": ids}, ids, ["hello"], [ids]):
        assert tokens(llm, prompt) == expected


def test_outputs_are_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = [[5], [6, 7], [8, 9, 10]]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (9, 1, 5)]

    outputs = llm.generate(prompts, params, use_tqdm=False)

    assert [o.prompt_token_ids for o in outputs] == prompts
    assert [len(o.outputs[0].token_ids) for o in outputs] == [9, 1, 5]


def test_one_bad_prompt_stops_the_call_before_anything_runs(llm: LLM) -> None:
    steps = llm.engine.num_steps

    with pytest.raises(ValueError, match="empty"):
        llm.generate([[5], []], GREEDY, use_tqdm=False)

    assert llm.engine.num_steps == steps
    assert not llm.engine.has_unfinished()


def test_number_of_params_must_match(llm: LLM) -> None:
    with pytest.raises(ValueError, match="2 prompts but 3 sampling_params"):
        llm.generate(["a", "b"], [GREEDY] * 3, use_tqdm=False)


def test_no_prompts_no_outputs(llm: LLM) -> None:
    assert llm.generate([], GREEDY, use_tqdm=False) == []


def test_top_k_one_equals_greedy(llm: LLM) -> None:
    params = SamplingParams(temperature=1, top_k=1, max_tokens=6, ignore_eos=True)

    assert tokens(llm, [5, 6], params) == tokens(llm, [5, 6])


def test_a_temperature_near_zero_equals_greedy(llm: LLM) -> None:
    params = SamplingParams(temperature=1e-4, max_tokens=6, ignore_eos=True)

    assert tokens(llm, [5, 6], params) == tokens(llm, [5, 6])


def test_a_seed_gives_the_same_tokens_again_and_another_seed_others(llm: LLM) -> None:
    def sample(seed: int) -> list[int]:
        return tokens(llm, [5, 6], SamplingParams(seed=seed, max_tokens=24, ignore_eos=True))

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)


def test_min_tokens_keeps_stop_tokens_out_until_then(llm: LLM) -> None:
    first = tokens(llm, [5, 6])[0]
    params = SamplingParams(temperature=0, max_tokens=6, stop_token_ids=[first], min_tokens=3)

    output = tokens(llm, [5, 6], params)

    assert len(output) >= 3
    assert first not in output[:3]


def test_prompt_logprobs_agree_with_generated_logprobs(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=2)
    generated = llm.generate([[5, 6]], params, use_tqdm=False)[0].outputs[0]
    assert generated.logprobs is not None
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=2)

    scored = llm.generate([[5, 6, *generated.token_ids]], params, use_tqdm=False)[0].prompt_logprobs

    assert scored is not None
    assert scored[0] is None
    assert scored[2:] == generated.logprobs


def test_logprobs_are_ranked_and_contain_the_token(llm: LLM) -> None:
    params = SamplingParams(temperature=1, seed=3, max_tokens=8, ignore_eos=True, logprobs=3)

    output = llm.generate([[5, 6]], params, use_tqdm=False)[0].outputs[0]

    assert output.logprobs is not None
    for token_id, entry in zip(output.token_ids, output.logprobs, strict=True):
        assert token_id in entry
        top = sorted(entry.values(), key=lambda logprob: logprob.rank)[:3]
        assert [logprob.rank for logprob in top] == [1, 2, 3]
        assert top[0].logprob >= top[1].logprob >= top[2].logprob
    total = sum(entry[i].logprob for i, entry in zip(output.token_ids, output.logprobs, strict=True))
    assert output.cumulative_logprob == pytest.approx(total)


def test_chat_uses_the_template_and_encodes_no_second_bos(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hello"}]
    text = llm.get_tokenizer().render_chat(messages)

    output = llm.chat(messages, GREEDY, use_tqdm=False)[0]

    assert output.prompt_token_ids == llm.get_tokenizer().encode(text, add_special_tokens=False)


def test_closed_llm_says_so(tiny_llama_dir: Path) -> None:
    llm = LLM(tiny_llama_dir, max_model_len=64)
    llm.close()

    with pytest.raises(RuntimeError, match="closed"):
        llm.generate("hello")


def test_max_model_len_that_the_cache_cannot_hold_is_refused_with_both_numbers(tiny_llama_dir: Path) -> None:
    with pytest.raises(ValueError, match=r"holds \d+ tokens but max_model_len is 128"):
        LLM(tiny_llama_dir, max_model_len=128, kv_cache_memory=1)


def test_max_model_len_beyond_the_models_positions_is_refused(tiny_llama_dir: Path) -> None:
    with pytest.raises(ValueError, match=r"max_model_len is 1000000 but the model's positions end at \d+"):
        LLM(tiny_llama_dir, max_model_len=1_000_000)


def test_unset_max_model_len_is_lowered_to_what_fits(
    tiny_llama_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with LLM(tiny_llama_dir, max_model_len=64) as probe:
        memory = 3 * probe.engine.kv_block_bytes

    with LLM(tiny_llama_dir, kv_cache_memory=memory) as llm:
        assert llm.engine.max_model_len == 48
        assert "max_model_len lowered" in caplog.text
        assert len(tokens(llm, [5], SamplingParams(max_tokens=None, ignore_eos=True))) == 47
