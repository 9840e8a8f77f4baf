"""The same request gives the same tokens and log-probabilities alone, batched, in chunks and preempted."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from cupaged import LLM, SamplingParams
from cupaged.config import EngineConfig
from cupaged.engine.llm_engine import LLMEngine
from cupaged.outputs import CompletionOutput, Logprobs
from cupaged.sampling_params import RequestOutputKind
from cupaged.worker.executor import UniprocExecutor
from tests.backend.late import LateBackend

NUM_REQUESTS = 32
MAX_MODEL_LEN = 128

Case = tuple[list[int], SamplingParams]
Result = tuple[CompletionOutput, list[Logprobs | None] | None]  # every second one has prompt_logprobs


def cases(temperature: float) -> list[Case]:
    """Return 32 requests of mixed lengths."""
    rng = np.random.default_rng(7)
    made = []
    for i in range(NUM_REQUESTS):
        prompt = rng.integers(3, 90, int(rng.integers(1, 60))).tolist()
        params = SamplingParams(
            temperature=temperature,
            top_p=0.9,
            seed=i,
            max_tokens=int(rng.integers(1, 40)),
            ignore_eos=True,
            logprobs=1,
            prompt_logprobs=2 if i % 2 else None,
        )
        made.append((prompt, params))
    return made


def generate(llm: LLM, requests: list[Case]) -> list[Result]:
    """Return what the user sees of each request, sent together."""
    prompts, params = zip(*requests, strict=True)
    outputs = llm.generate(list(prompts), list(params), use_tqdm=False)
    return [(output.outputs[0], output.prompt_logprobs) for output in outputs]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=[0.0, 1.0], ids=["greedy", "seeded"])
def requests(request: pytest.FixtureRequest) -> list[Case]:
    return cases(request.param)


@pytest.fixture(scope="module")
def alone(tiny_llama_dir: Path, dtype: str, requests: list[Case]) -> Iterator[list[Result]]:
    """Return each request's result when nothing else runs."""
    with LLM(tiny_llama_dir, dtype=dtype, max_model_len=MAX_MODEL_LEN) as llm:
        yield [generate(llm, [case])[0] for case in requests]


def test_batched_together(
    tiny_llama_dir: Path, dtype: str, requests: list[Case], alone: list[Result]
) -> None:
    with LLM(tiny_llama_dir, dtype=dtype, max_model_len=MAX_MODEL_LEN) as llm:
        assert generate(llm, requests) == alone
        assert llm.engine.num_steps < sum(len(completion.token_ids) for completion, _ in alone)


def test_prefilled_in_chunks_of_seven_tokens(
    tiny_llama_dir: Path, dtype: str, requests: list[Case], alone: list[Result]
) -> None:
    with LLM(tiny_llama_dir, dtype=dtype, max_model_len=MAX_MODEL_LEN, max_num_batched_tokens=7) as llm:
        assert generate(llm, requests) == alone


def late_backend(config: EngineConfig, _: str) -> LateBackend:
    return LateBackend(config.dtype)


@pytest.mark.parametrize("aborts", [False, True])
@pytest.mark.parametrize("num_blocks", [None, MAX_MODEL_LEN // 16 + 2], ids=["roomy", "preempted"])
def test_two_steps_in_flight(
    tiny_llama_dir: Path,
    dtype: str,
    requests: list[Case],
    alone: list[Result],
    num_blocks: int | None,
    aborts: bool,
) -> None:
    with LLM(tiny_llama_dir, dtype=dtype, max_model_len=MAX_MODEL_LEN) as probe:
        memory = None if num_blocks is None else probe.engine.kv_block_bytes * num_blocks
    config = EngineConfig.create(
        tiny_llama_dir, dtype=dtype, max_model_len=MAX_MODEL_LEN, kv_cache_memory=memory
    )
    engine = LLMEngine(config, create_executor=partial(UniprocExecutor, create_backend=late_backend))
    assert engine.executor.max_in_flight == 2
    for i, (prompt, params) in enumerate(requests):
        final = replace(params, output_kind=RequestOutputKind.FINAL_ONLY)
        engine.add_request(str(i), prompt, final)
        if aborts:
            engine.add_request(f"gone {i}", prompt, final)

    results: dict[str, Result] = {}
    while engine.has_unfinished():
        if aborts:
            engine.abort(f"gone {engine.num_steps // 2}")
        for output in engine.step():
            results[output.request_id] = output.outputs[0], output.prompt_logprobs
        engine.scheduler.check_invariants()

    assert [results[str(i)] for i in range(NUM_REQUESTS)] == alone
    assert (engine.scheduler.num_preemptions > 0) == (num_blocks is not None)
    assert engine.scheduler.num_used_blocks == 0
    engine.close()


@pytest.mark.parametrize("block_size", [16, 32])
def test_preempted_and_recomputed(
    tiny_llama_dir: Path, dtype: str, requests: list[Case], alone: list[Result], block_size: int
) -> None:
    # The probe tells the bytes of a block, whatever the model's shape.
    with LLM(tiny_llama_dir, dtype=dtype, block_size=block_size, max_model_len=MAX_MODEL_LEN) as probe:
        memory = probe.engine.kv_block_bytes * (MAX_MODEL_LEN // block_size + 2)
    with LLM(
        tiny_llama_dir,
        dtype=dtype,
        block_size=block_size,
        max_model_len=MAX_MODEL_LEN,
        kv_cache_memory=memory,
    ) as llm:
        assert generate(llm, requests) == alone
        assert llm.engine.scheduler.num_preemptions > 0
        assert llm.engine.scheduler.num_used_blocks == 0
