"""Engines with weights of 8 bits: near the float ones, a request the same in any company, and smaller."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupaged import LLM, SamplingParams
from cupaged.outputs import RequestOutput
from tools.make_tiny_model import CASES, write_tiny_model, write_tiny_tokenizer

NAMES = ("int8", "int8_w8a8")
PROMPTS = [list(range(3, 3 + n)) for n in (1, 17, 40, 5)]
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0, prompt_logprobs=0)


def load(path: Path, quantization: Any, **options: Any) -> LLM:
    return LLM(str(path), quantization=quantization, max_model_len=64, kv_cache_memory=1 << 20, **options)


def run(llm: LLM, prompts: list[list[int]]) -> list[RequestOutput]:
    return llm.generate(prompts, PARAMS, use_tqdm=False)


def prompt_logprobs(outputs: list[RequestOutput]) -> list[float]:
    """Return the log-probability of each prompt token but the first of its prompt."""
    found = []
    for output in outputs:
        assert output.prompt_logprobs is not None
        for token, logprobs in zip(output.prompt_token_ids, output.prompt_logprobs, strict=True):
            if logprobs is not None:
                found.append(logprobs[token].logprob)
    return found


@pytest.fixture(params=["llama", "llama_tied", "qwen2"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    write_tiny_model(tmp_path, CASES[request.param])
    write_tiny_tokenizer(tmp_path)
    return tmp_path


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("quantization", "limit"), [("int8", 0.1), ("int8_w8a8", 0.2)])
def test_log_probabilities_are_near_those_of_float_weights(
    model: Path, quantization: str, limit: float, dtype: str
) -> None:
    exact = prompt_logprobs(run(load(model, None, dtype="float32"), PROMPTS))

    rounded = prompt_logprobs(run(load(model, quantization, dtype=dtype), PROMPTS))

    difference = np.abs(np.subtract(exact, rounded))
    assert 0 < difference.mean() < limit, f"mean {difference.mean():.3g}, max {difference.max():.3g}"


@pytest.mark.parametrize("quantization", NAMES)
def test_a_request_is_the_same_alone_among_others_and_in_chunks(model: Path, quantization: str) -> None:
    together = run(load(model, quantization), PROMPTS)

    chunked = run(load(model, quantization, max_num_batched_tokens=7, max_num_seqs=4), PROMPTS)
    alone = [run(load(model, quantization), [prompt])[0] for prompt in PROMPTS]

    for others in (chunked, alone):
        assert [output.outputs for output in others] == [output.outputs for output in together]
        assert prompt_logprobs(others) == prompt_logprobs(together)


@pytest.mark.parametrize("quantization", NAMES)
def test_weights_take_less_memory_than_bfloat16(quantization: str, model: Path) -> None:
    plans = [load(model, name, dtype="bfloat16").engine.executor.plan for name in (None, quantization)]

    half, byte = (plan.use.weights for plan in plans)
    assert byte < 0.75 * half  # scales and norms count for more in a tiny model


@pytest.mark.parametrize(("quantization", "by_output"), [("int8", 8), ("int8_w8a8", 12)])
def test_tied_embedding_is_in_memory_once(quantization: str, by_output: int, tmp_path: Path) -> None:
    config, use = CASES["llama_tied"], {}
    for is_tied in (True, False):
        directory = tmp_path / str(is_tied)
        directory.mkdir()
        write_tiny_model(directory, config | {"tie_word_embeddings": is_tied})
        write_tiny_tokenizer(directory)
        use[is_tied] = load(directory, quantization).engine.executor.plan.use.weights

    assert use[False] - use[True] == config["vocab_size"] * (config["hidden_size"] + by_output)
