"""The same request gives the same tokens and log-probabilities whatever the memory system does to it.

Alone = batched = in chunks = from cached prefixes = swapped = recomputed = forked, at once and late, each
asserted to have happened.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from cupaged import LLM, SamplingParams, team, threads
from cupaged.atomics import words
from cupaged.config import EngineConfig
from cupaged.engine.llm_engine import LLMEngine
from cupaged.outputs import CompletionOutput, Logprobs, RequestOutput
from cupaged.sampling_params import RequestOutputKind
from cupaged.worker.executor import UniprocExecutor
from tests.backend.late import LateBackend

NUM_REQUESTS = 32
MAX_MODEL_LEN = 128
SMALL_POOL = MAX_MODEL_LEN // 16 + 2  # blocks
HOST_POOL = 64 * 1024 / 2**30  # GiB, of which a block takes at most 9 KiB

Case = tuple[list[int], SamplingParams]
Result = tuple[list[CompletionOutput], list[Logprobs | None] | None]


def cases(temperature: float) -> list[Case]:
    """Return 32 requests of mixed lengths, every second one with prompt_logprobs."""
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


def run(llm: LLM, requests: list[Case]) -> list[RequestOutput]:
    prompts, params = zip(*requests, strict=True)
    return llm.generate(list(prompts), list(params), use_tqdm=False)


def results(outputs: list[RequestOutput]) -> list[Result]:
    """Return what the user sees of each request."""
    return [(output.outputs, output.prompt_logprobs) for output in outputs]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=[0.0, 1.0], ids=["greedy", "seeded"])
def requests(request: pytest.FixtureRequest) -> list[Case]:
    return cases(request.param)


class Engines:
    """Makes LLMs of the tiny model; `num_blocks` limits their KV cache."""

    def __init__(self, directory: Path, dtype: str) -> None:
        self.directory, self.dtype = directory, dtype
        with self.llm() as probe:
            self.slot_bytes = probe.engine.kv_block_bytes // 16

    def options(self, num_blocks: int | None = None, **options: Any) -> dict[str, Any]:
        memory = None if num_blocks is None else self.slot_bytes * options.get("block_size", 16) * num_blocks
        return {"dtype": self.dtype, "max_model_len": MAX_MODEL_LEN, "kv_cache_memory": memory, **options}

    def llm(self, num_blocks: int | None = None, **options: Any) -> LLM:
        return LLM(self.directory, **self.options(num_blocks, **options))

    @contextmanager
    def two_threads(self, num_blocks: int | None = None, **options: Any) -> Iterator[LLMEngine]:
        """Give an engine that plans a step while the one before it runs."""
        with patch.object(threads, "available_cpus", lambda: 2):
            engine = LLMEngine(EngineConfig.create(self.directory, **self.options(num_blocks, **options)))
        assert engine.executor.max_in_flight == 2
        num_queued = words[team.QUEUED]
        yield engine
        assert words[team.QUEUED] - num_queued > engine.num_steps / 2
        assert engine.scheduler.num_used_blocks == 0
        engine.close()

    @contextmanager
    def late(self, num_blocks: int | None = None, **options: Any) -> Iterator[LLMEngine]:
        """Give an engine that has two steps in flight."""
        config = EngineConfig.create(self.directory, **self.options(num_blocks, **options))
        engine = LLMEngine(config, create_executor=partial(UniprocExecutor, create_backend=late_backend))
        assert engine.executor.max_in_flight == 2
        yield engine
        assert engine.scheduler.num_used_blocks == 0
        engine.close()


def late_backend(config: EngineConfig, _: str) -> LateBackend:
    return LateBackend(config.dtype)


@pytest.fixture(scope="module")
def engines(tiny_llama_dir: Path, dtype: str) -> Engines:
    return Engines(tiny_llama_dir, dtype)


@pytest.fixture(scope="module")
def alone(engines: Engines, requests: list[Case]) -> Iterator[list[Result]]:
    """Return each request's result when nothing else runs and nothing is cached."""
    with engines.llm(enable_prefix_caching=False) as llm:
        yield [results(run(llm, [case]))[0] for case in requests]


def test_batched_together(engines: Engines, requests: list[Case], alone: list[Result]) -> None:
    with engines.llm() as llm:
        assert results(run(llm, requests)) == alone
        assert llm.engine.num_steps < sum(len(outputs[0].token_ids) for outputs, _ in alone)


def test_prefilled_in_chunks_of_seven_tokens(
    engines: Engines, requests: list[Case], alone: list[Result]
) -> None:
    with engines.llm(max_num_batched_tokens=7) as llm:
        assert results(run(llm, requests)) == alone
        assert 7 * llm.engine.num_steps >= sum(len(prompt) for prompt, _ in requests)


def test_found_in_the_prefix_cache(engines: Engines, requests: list[Case], alone: list[Result]) -> None:
    with engines.llm() as llm:
        run(llm, requests)
        again = run(llm, requests)

        assert results(again) == alone
        for output in again:
            num_full = len(output.prompt_token_ids) // 16 * 16
            found = 0 if output.prompt_logprobs else min(num_full, len(output.prompt_token_ids) - 1)
            assert output.num_cached_tokens == found
        assert sum(output.num_cached_tokens for output in again) > 300


@pytest.mark.parametrize(
    ("block_size", "enable_prefix_caching"), [(32, False), (16, True)], ids=["uncached", "cached"]
)
@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_preempted(
    engines: Engines,
    requests: list[Case],
    alone: list[Result],
    mode: str,
    block_size: int,
    enable_prefix_caching: bool,
) -> None:
    options = {"preemption_mode": mode, "swap_space": HOST_POOL, "block_size": block_size}
    num_blocks = MAX_MODEL_LEN // block_size + 2
    with engines.llm(num_blocks, enable_prefix_caching=enable_prefix_caching, **options) as llm:
        assert results(run(llm, requests)) == alone
        happened = llm.get_metrics()
        assert happened["preemptions"] > 0
        assert happened["num_used_blocks"] == 0
        assert (happened["swapped_out_blocks"] > 0) == (mode == "swap")
        assert happened["swapped_in_blocks"] == happened["swapped_out_blocks"]
        assert (happened["recomputed_tokens"] > 0) == (mode == "recompute")


@pytest.mark.parametrize("mode", ["roomy", "swap", "recompute"])
def test_forked(engines: Engines, requests: list[Case], alone: list[Result], mode: str) -> None:
    n = 3
    forked = [(prompt, replace(params, n=n)) for prompt, params in requests if params.max_tokens]
    options: dict[str, Any] = {}
    if mode != "roomy":
        options = {"num_blocks": 24, "preemption_mode": mode, "swap_space": HOST_POOL}
    with engines.llm(**options) as llm:
        outputs = run(llm, forked)
        happened = llm.get_metrics()

    for output, ((single,), prompt_logprobs), (_, params) in zip(outputs, alone, requests, strict=True):
        assert output.prompt_logprobs == prompt_logprobs
        assert output.outputs[0] == single
        assert [completion.index for completion in output.outputs] == list(range(n))
        if params.temperature == 0:
            assert output.outputs[1:] == [replace(single, index=index) for index in range(1, n)]
        elif len(single.token_ids) > 8:
            assert len({tuple(completion.token_ids) for completion in output.outputs}) == n
    assert happened["forks"] >= (n - 1) * NUM_REQUESTS
    assert happened["copied_blocks"] > NUM_REQUESTS
    assert (happened["preemptions"] > 0) == (mode != "roomy")
    assert (happened["swapped_out_blocks"] > 0) == (mode == "swap")


def run_forked(engine: LLMEngine, requests: list[Case], aborts: bool) -> dict[str, RequestOutput]:
    """Return the outputs of the requests, of which every second one forks, by their numbers."""
    finals = [replace(params, output_kind=RequestOutputKind.FINAL_ONLY) for _, params in requests]
    if aborts:
        for i, (prompt, _) in enumerate(requests):
            engine.add_request(f"gone {i}", prompt, replace(finals[i], prompt_logprobs=None))
        for _ in range(4):
            engine.step()
    for i, (prompt, _) in enumerate(requests):
        engine.add_request(str(i), prompt, replace(finals[i], n=1 + i % 2))
    seen: dict[str, RequestOutput] = {}
    while engine.has_unfinished():
        if aborts:
            engine.abort(f"gone {engine.num_steps // 2}")
        seen |= {output.request_id: output for output in engine.step()}
        engine.scheduler.check_invariants()
    return seen


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_planned_while_the_step_before_is_played(
    engines: Engines, requests: list[Case], alone: list[Result], mode: str
) -> None:
    """Without log-probabilities, which nothing is played for; one request in eight wants them."""
    options: dict[str, Any] = {"preemption_mode": mode, "swap_space": HOST_POOL}
    plain = [
        (prompt, params if i % 8 == 7 else replace(params, logprobs=None, prompt_logprobs=None))
        for i, (prompt, params) in enumerate(requests)
    ]
    with engines.two_threads(4 * SMALL_POOL, enable_prefix_caching=False, **options) as engine:
        seen = run_forked(engine, plain, aborts=True)
        happened = engine.get_metrics()
    for i, ((single,), _) in enumerate(alone):
        assert seen[str(i)].outputs[0].token_ids == single.token_ids
        assert i % 8 < 7 or seen[str(i)].outputs[0] == single
    assert happened["preemptions"] > 0
    assert (happened["swapped_out_blocks"] > 0) == (mode == "swap")
    assert happened["copied_blocks"] > 0


@pytest.mark.parametrize("aborts", [False, True])
@pytest.mark.parametrize("mode", ["roomy", "swap", "recompute"])
def test_two_steps_in_flight(
    engines: Engines, requests: list[Case], alone: list[Result], mode: str, aborts: bool
) -> None:
    """With every second request forked, and others of the same prompts that go on the way."""
    options: dict[str, Any] = {}
    if mode != "roomy":
        options = {"num_blocks": 2 * SMALL_POOL, "preemption_mode": mode, "swap_space": HOST_POOL}
    with engines.late(**options) as engine:
        seen = run_forked(engine, requests, aborts)
        for i, ((single,), prompt_logprobs) in enumerate(alone):
            assert seen[str(i)].outputs[0] == single
            assert seen[str(i)].prompt_logprobs == prompt_logprobs
        happened = engine.get_metrics()
        assert (happened["preemptions"] > 0) == (mode != "roomy")
        assert (happened["swapped_out_blocks"] > 0) == (mode == "swap")
        assert happened["forks"] >= NUM_REQUESTS // 2
        assert mode != "roomy" or (happened["prefix_hit_tokens"] > 0) == aborts
