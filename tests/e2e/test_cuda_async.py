"""On an emulated GPU, planning a step while the one before it runs changes nothing, nor do CUDA graphs."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from cupaged import SamplingParams
from cupaged.backend.base import Array
from cupaged.backend.cuda import CudaBackend
from cupaged.batch import Batch
from cupaged.engine.llm_engine import LLMEngine
from cupaged.models import load_model_config
from cupaged.outputs import CompletionOutput, Logprobs
from cupaged.sampling_params import RequestOutputKind
from cupaged.scheduler.counters import Counter
from cupaged.worker.kv_cache import block_bytes
from tests.cuda_on_cpu.gpu import EmulatedGpu
from tests.e2e.emulated import MEMORY, create_engine
from tools.make_tiny_model import CLEAR_CASES, write_clear_model, write_tiny_tokenizer

NUM_REQUESTS = 16
MAX_MODEL_LEN = 96
EOS = 2

Case = tuple[list[int], SamplingParams]


class Result(NamedTuple):
    """What a user sees of a request in the end."""

    completion: CompletionOutput
    prompt_logprobs: list[Logprobs | None] | None


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    """Return requests of every kind: greedy and seeded, with log-probabilities, stops and bans."""
    rng = np.random.Generator(np.random.PCG64(7))
    made = []
    for i in range(NUM_REQUESTS):
        max_tokens = int(rng.integers(1, 40))
        params = SamplingParams(
            temperature=4.0 if i % 3 else 0.0,  # below, the likely token nearly always comes
            top_p=0.95,
            top_k=50 if i % 5 == 1 else 0,
            seed=i,
            max_tokens=max_tokens,
            min_tokens=max_tokens // 2 if i % 4 == 1 else 0,
            stop_token_ids=range(i, 256, 32) if i % 4 < 2 else None,
            logprobs=i % 4 if i % 2 else None,
            prompt_logprobs=1 if i % 3 == 1 else None,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        made.append((rng.integers(3, 256, int(rng.integers(1, 48))).tolist(), params))
    # The likely tokens after these are 0, 1 and EOS.
    made[0] = [*made[0][0], 254, 255], SamplingParams(temperature=0, max_tokens=20)
    made[3] = [*made[3][0], 254, 255], SamplingParams(temperature=0, max_tokens=20, min_tokens=10)
    return made


def run(engine: LLMEngine, cases: list[Case], *, aborts: bool = False) -> list[Result]:
    """Return what becomes of the requests; with aborts, beside each there is one that is soon given up."""
    for i, (prompt, params) in enumerate(cases):
        engine.add_request(str(i), prompt, params)
        if aborts:
            engine.add_request(f"gone {i}", prompt, SamplingParams(max_tokens=None, ignore_eos=True))
    results: dict[str, Result] = {}  # of each request the last
    while engine.has_unfinished():
        for output in engine.step():
            results[output.request_id] = Result(output.outputs[0], output.prompt_logprobs)
            if output.request_id.startswith("gone") and len(output.outputs[0].token_ids) > 1:
                engine.abort(output.request_id)  # its next token is in flight
        engine.scheduler.check_invariants()
    assert engine.scheduler.num_used_blocks == 0
    return [results[str(i)] for i in range(len(cases))]


class Run(NamedTuple):
    """What an engine made of the requests, and how."""

    results: list[Result]
    counters: NDArray[np.int64]  # by Counter


def generate(
    model_dir: Path, cases: list[Case], *, aborts: bool = False, num_blocks: int = 256, **options: Any
) -> Run:
    """Run the requests through a new engine."""
    engine = create_engine(
        model_dir,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=NUM_REQUESTS,
        kv_cache_memory=num_blocks * block_bytes(load_model_config(model_dir), 16, 2),
        # A prompt whose blocks are found is cut elsewhere, and on a GPU last bits hang on that.
        **{"enable_prefix_caching": False, **options},
    )
    assert engine.executor.max_in_flight == (2 if options.get("async_scheduling", True) else 1)
    results = run(engine, cases, aborts=aborts)
    made = Run(results, engine.counters.copy())
    engine.close()
    return made


def tokens(run: Run) -> list[tuple[list[int], str, str | None, int | str | None]]:
    """Return all that is no floating-point number."""
    completions = [result.completion for result in run.results]
    return [(each.token_ids, each.text, each.finish_reason, each.stop_reason) for each in completions]


def logprobs(run: Run) -> list[float]:
    """Return all log-probabilities, of outputs and of prompts."""
    found = []
    for completion, prompt_logprobs in run.results:
        for each in (*(completion.logprobs or ()), *(prompt_logprobs or ())):
            found += [logprob.logprob for logprob in (each or {}).values()]
    return found


@pytest.fixture(scope="module")
def expected(clear_dir: Path, cases: list[Case]) -> Run:
    """Return what comes of one step after the other."""
    return generate(clear_dir, cases, async_scheduling=False)


def test_requests_end_in_every_way(expected: Run) -> None:
    reasons = {(each.finish_reason, each.stop_reason is None) for each, _ in expected.results}

    assert reasons == {("stop", True), ("stop", False), ("length", True)}  # EOS, a stop token, max_tokens
    greedy, banned = expected.results[0].completion, expected.results[3].completion
    assert (greedy.token_ids, greedy.finish_reason) == ([0, 1, EOS], "stop")
    assert len(banned.token_ids) >= 10
    assert EOS not in banned.token_ids[:10]


@pytest.mark.parametrize("aborts", [False, True])
@pytest.mark.parametrize("deferred", [False, True], ids=["quick GPU", "late GPU"])
def test_async_scheduling_changes_nothing(
    clear_dir: Path, cases: list[Case], expected: Run, aborts: bool, deferred: bool
) -> None:
    gpu = EmulatedGpu(memory=MEMORY, deferred=deferred)  # has done all at once, or nothing before it must

    made = generate(clear_dir, cases, aborts=aborts, gpu=gpu)

    assert made.results == expected.results


RECOMPUTING: dict[str, Any] = {
    "num_blocks": 8,
    "max_num_batched_tokens": 24,
    "preemption_mode": "recompute",
}
SWAPPING = RECOMPUTING | {"preemption_mode": "swap"}


@pytest.fixture(scope="module")
def many_heads_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Over 16 heads a KV head: decodes go through the kernel of prefills, with the same bits in any chunk."""
    heads = {"num_attention_heads": 17, "num_key_value_heads": 1}
    directory = tmp_path_factory.mktemp("many_heads")
    write_clear_model(directory, CLEAR_CASES["clear_llama"] | heads)
    write_tiny_tokenizer(directory)
    return directory


@pytest.fixture(scope="module")
def expected_of_many_heads(many_heads_dir: Path, cases: list[Case]) -> Run:
    return generate(many_heads_dir, cases, async_scheduling=False)


# What is preempted, and where a chunk ends, hangs on who still runs.
@pytest.mark.parametrize(
    ("options", "happens"),
    [
        (RECOMPUTING, Counter.RECOMPUTED_TOKENS),
        (SWAPPING, Counter.SWAPPED_IN_BLOCKS),
        (SWAPPING | {"enable_prefix_caching": True}, Counter.PREFIX_HIT_TOKENS),
    ],
    ids=["recomputing", "swapping", "caching"],
)
def test_async_scheduling_changes_nothing_where_steps_are_cut_in_other_ways(
    many_heads_dir: Path,
    cases: list[Case],
    expected_of_many_heads: Run,
    options: dict[str, Any],
    happens: Counter,
) -> None:
    made = generate(many_heads_dir, cases, aborts=True, **options)

    assert made.results == expected_of_many_heads.results
    assert made.counters[happens] > 0


def test_where_decodes_have_a_kernel_of_their_own_only_last_bits_change(
    clear_dir: Path, cases: list[Case], expected: Run
) -> None:
    made = generate(clear_dir, cases, aborts=True, **RECOMPUTING)

    assert tokens(made) == tokens(expected)
    assert np.abs(np.subtract(logprobs(made), logprobs(expected))).max() < 0.1
    assert made.counters[Counter.PREEMPTIONS] > 0


def test_graphs_change_nothing(clear_dir: Path, cases: list[Case]) -> None:
    made, eager = (
        generate(clear_dir, cases, enforce_eager=enforce_eager, enable_prefix_caching=True, **SWAPPING)
        for enforce_eager in (False, True)
    )

    assert made.results == eager.results
    assert np.array_equal(made.counters, eager.counters)
    assert made.counters[Counter.SWAPPED_IN_BLOCKS] > 0


class Forgetful(CudaBackend):
    """A backend that sometimes leaves a row's last token as it was."""

    num_stores = 0

    def store_last_tokens(self, batch: Batch, last_token: Array) -> None:
        """Forget every tenth step's tokens."""
        self.num_stores += 1
        if self.num_stores % 10:
            super().store_last_tokens(batch, last_token)


def test_token_that_is_not_left_for_the_next_step_is_found(
    clear_dir: Path, cases: list[Case], expected: Run
) -> None:
    made = generate(clear_dir, cases, backend_class=Forgetful)
    one_by_one = generate(clear_dir, cases, backend_class=Forgetful, async_scheduling=False)

    assert tokens(made) != tokens(expected)
    assert tokens(one_by_one) == tokens(expected)  # there the host knows all tokens
