"""LLM: the offline front door over a tiny real model."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from shutil import copy, copytree
from typing import Any

import numpy as np
import pytest

from cupaged import LLM, SamplingParams
from tools.make_tiny_model import CHAT, write_tiny_model, write_tiny_tokenizer

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


@pytest.mark.parametrize(
    "prompt",
    [np.array([5, 6]), [np.int64(5), 6], (5, 6), [(5, 6)], np.array([[5, 6]]), (ids for ids in [[5, 6]])],
)
def test_token_ids_in_any_kind_of_list(llm: LLM, prompt: Any) -> None:
    assert tokens(llm, prompt) == tokens(llm, [5, 6])


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([True, False], "whole numbers, got True"),
        (["a", 5], "whole numbers, got 'a'"),
        ([5, "a"], "whole numbers, got 'a'"),
        (b"abc", "got bytes"),
        (None, "a prompt or a list of them, got None"),
        (5, "a prompt or a list of them, got 5"),
        (["a", None], r"prompts\[1\]: .*got NoneType"),
        (["a", ""], r"prompts\[1\]: .*empty"),
    ],
)
def test_anything_else_is_refused_with_its_place(llm: LLM, prompts: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        llm.generate(prompts, GREEDY, use_tqdm=False)


@pytest.mark.parametrize("params", [{"max_tokens": 3}, 3, [None]])
def test_params_of_another_type_are_refused(llm: LLM, params: Any) -> None:
    with pytest.raises(ValueError, match="must be SamplingParams, got"):
        llm.generate("a", params, use_tqdm=False)


@pytest.mark.parametrize("messages", [None, "hi", [["hi"]], [5]])
def test_messages_of_another_type_are_refused(llm: LLM, messages: Any) -> None:
    with pytest.raises(ValueError, match="message"):
        llm.chat(messages, GREEDY, use_tqdm=False)


def test_several_conversations_are_answered_in_order(llm: LLM) -> None:
    conversations = [[{"role": "user", "content": text}] for text in ("hello", "good day")]

    together = llm.chat(conversations, GREEDY, use_tqdm=False)

    for conversation, output in zip(conversations, together, strict=True):
        alone = llm.chat(conversation, GREEDY, use_tqdm=False)[0]
        assert output.outputs[0].token_ids == alone.outputs[0].token_ids


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


def test_a_seed_gives_the_same_tokens_again_and_another_seed_others(llm: LLM) -> None:
    def sample(seed: int) -> list[int]:
        return tokens(llm, [5, 6], SamplingParams(seed=seed, max_tokens=24, ignore_eos=True))

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)


def test_requests_without_a_seed_differ_and_are_the_same_in_the_next_run(tiny_llama_dir: Path) -> None:
    def sample() -> list[list[int]]:
        with LLM(tiny_llama_dir, max_model_len=64, seed=3) as fresh:
            params = SamplingParams(max_tokens=12, ignore_eos=True)
            outputs = fresh.generate([[5, 6]] * 4, params, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]

    first = sample()

    assert len(set(map(tuple, first))) == 4
    assert sample() == first


def test_a_seeded_request_does_not_depend_on_its_neighbours(llm: LLM) -> None:
    seeded = SamplingParams(seed=-7, max_tokens=12, ignore_eos=True)
    free = SamplingParams(max_tokens=12, ignore_eos=True)

    between = llm.generate([[5, 6]] * 3, [free, seeded, free], use_tqdm=False)[1]

    assert between.outputs[0].token_ids == tokens(llm, [5, 6], seeded)


@pytest.mark.parametrize(
    "options", [{"top_p": 1e-300}, {"top_p": 1e-9}, {"min_p": 1.0}, {"top_k": 1}, {"temperature": 1e-4}]
)
def test_filters_that_leave_one_token_equal_greedy(llm: LLM, options: dict[str, Any]) -> None:
    params = SamplingParams(max_tokens=6, ignore_eos=True, **options)

    assert tokens(llm, [5, 6], params) == tokens(llm, [5, 6])


@pytest.mark.parametrize("options", [{"top_k": 2**31 - 1}, {"min_p": 1e-300}, {"top_k": -1}])
def test_filters_that_leave_all_tokens_change_nothing(llm: LLM, options: dict[str, Any]) -> None:
    plain = SamplingParams(seed=2**64 - 1, max_tokens=12, ignore_eos=True)

    assert tokens(llm, [5, 6], replace(plain, **options)) == tokens(llm, [5, 6], plain)


def test_the_hottest_temperature_samples_anything(llm: LLM) -> None:
    params = SamplingParams(temperature=3e38, seed=1, max_tokens=100, ignore_eos=True)

    assert len(set(tokens(llm, [5, 6], params))) > 60


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


@pytest.mark.parametrize("budget", [1, 5])
def test_the_smallest_budgets_have_room_for_log_probabilities(tiny_llama_dir: Path, budget: int) -> None:
    params = SamplingParams(max_tokens=3, ignore_eos=True, logprobs=20, prompt_logprobs=20)

    with LLM(tiny_llama_dir, max_model_len=32, max_num_batched_tokens=budget) as small:
        output = small.generate([[5] * 12] * 4, params, use_tqdm=False)[0]

    entries = [*(output.prompt_logprobs or ()), *(output.outputs[0].logprobs or ())]
    assert [entry is None or len(entry) >= 20 for entry in entries] == [True] * (12 + 3)


def test_chat_uses_the_template_and_encodes_no_second_bos(tiny_llama_dir: Path, tmp_path: Path) -> None:
    model = copytree(tiny_llama_dir, tmp_path / "model")
    config = json.loads((model / "tokenizer_config.json").read_text())
    config |= {"add_bos_token": True, "chat_template": "{{ bos_token }}{{ messages[0].content }}"}
    (model / "tokenizer_config.json").write_text(json.dumps(config))

    with LLM(model, max_model_len=64) as llm:
        chat = llm.chat([{"role": "user", "content": "hello"}], GREEDY, use_tqdm=False)[0]
        plain = llm.generate("hello", GREEDY, use_tqdm=False)[0]

    assert chat.prompt == "<s>hello"
    assert chat.prompt_token_ids == plain.prompt_token_ids
    assert chat.prompt_token_ids.count(1) == 1


def test_closed_llm_says_so(tiny_llama_dir: Path) -> None:
    llm = LLM(tiny_llama_dir, max_model_len=64)
    llm.close()

    with pytest.raises(RuntimeError, match="closed"):
        llm.generate("hello")


def test_calls_from_two_threads_take_turns(llm: LLM) -> None:
    prompts = [[[5 + i, 6]] * 8 for i in range(4)]
    expected = [tokens(llm, prompt) for prompt in prompts]

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda prompt: tokens(llm, prompt), prompts)) == expected


def test_two_llms_run_at_once(llm: LLM, tiny_llama_dir: Path) -> None:
    expected = tokens(llm, [5, 6])

    with LLM(tiny_llama_dir, max_model_len=64, num_threads=1) as other, ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(tokens, each, [5, 6]) for each in (llm, other) * 4]
        assert [run.result() for run in runs] == [expected] * 8


MEMORY = """
import sys
from cupaged import LLM

def anonymous_mib():
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024

for model in sys.argv[1:]:  # a tiny one first, to load the code
    before = anonymous_mib()
    llm = LLM(model, max_model_len=64)
    llm.generate([[5]], use_tqdm=False)
    pin = [bytes(100_000) for _ in range(50)]  # above the weights in the heap, so that it cannot shrink
    loaded = anonymous_mib()
    llm.close()
print(loaded - before, anonymous_mib() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_close_returns_all_memory(tiny_llama_dir: Path, tmp_path: Path) -> None:
    config = CHAT | {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4}
    write_tiny_model(tmp_path, config)
    write_tiny_tokenizer(tmp_path)

    command = [sys.executable, "-c", MEMORY, str(tiny_llama_dir), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)

    loaded, left = map(float, done.stdout.split())
    assert loaded > 50
    assert left < 5


def test_interpreter_mode_gives_the_same_tokens(llm: LLM, tiny_llama_dir: Path) -> None:
    code = (
        "import sys; from cupaged import LLM, SamplingParams\n"
        "params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)\n"
        "llm = LLM(sys.argv[1], max_model_len=16, max_num_seqs=1, max_num_batched_tokens=2)\n"
        "print(llm.generate([[5, 6]], params, use_tqdm=False)[0].outputs[0].token_ids)"
    )

    done = subprocess.run(
        [sys.executable, "-c", code, str(tiny_llama_dir)],
        env={**os.environ, "NUMBA_DISABLE_JIT": "1"},
        capture_output=True,
        text=True,
    )

    assert done.stdout == f"{tokens(llm, [5, 6])[:2]}\n", done.stderr


def test_max_model_len_that_the_cache_cannot_hold_is_refused_with_both_numbers(tiny_llama_dir: Path) -> None:
    with pytest.raises(ValueError, match=r"max_model_len=128 tokens needs \d+ bytes .* are 1, which hold 0"):
        LLM(tiny_llama_dir, max_model_len=128, kv_cache_memory=1)


def dummy_dir(model: Path, directory: Path, *left_out: str) -> Path:
    """Copy what a dummy model needs, but for the files left out."""
    names = {"config.json", "tokenizer.json", "tokenizer_config.json"} - set(left_out)
    for name in names:
        copy(model / name, directory)
    return directory


def test_dummy_weights_need_config_and_tokenizer_only(tiny_llama_dir: Path, tmp_path: Path) -> None:
    with LLM(dummy_dir(tiny_llama_dir, tmp_path), load_format="dummy", max_model_len=64) as llm:
        output = llm.generate("hello", SamplingParams(max_tokens=5, ignore_eos=True), use_tqdm=False)

    assert len(output[0].outputs[0].token_ids) == 5


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json"])
def test_dummy_model_without_config_or_tokenizer_is_refused_by_the_files_name(
    tiny_llama_dir: Path, tmp_path: Path, missing: str
) -> None:
    with pytest.raises(ValueError, match=missing):
        LLM(dummy_dir(tiny_llama_dir, tmp_path, missing), load_format="dummy")


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
