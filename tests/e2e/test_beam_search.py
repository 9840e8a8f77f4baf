"""Beam search on tiny models: transformers' outputs, alone, in company, in chunks, preempted and swapped."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupaged import LLM, BeamSearchParams, SamplingParams
from cupaged.config import EngineConfig
from cupaged.engine.llm_engine import LLMEngine
from cupaged.outputs import BeamSearchSequence, RequestOutput
from cupaged.sampling_params import RequestOutputKind
from cupaged.worker.executor import UniprocExecutor
from tests.backend.late import LateBackend
from tools.beam_cases import GOLDENS, MODEL_CASES, MODELS, BeamCase
from tools.make_tiny_model import write_tiny_model, write_tiny_tokenizer

MAX_MODEL_LEN = 64
GOLDEN: dict[str, Any] = json.loads(GOLDENS.read_text(encoding="utf-8"))
LLAMA_CASES = {name: case for name, case in MODEL_CASES.items() if case.model == "llama"}


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the directory of each tiny model."""
    made = {}
    for model, config in MODELS.items():
        made[model] = write_tiny_model(tmp_path_factory.mktemp(model), config)
        write_tiny_tokenizer(made[model])
    return made


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def llm(directories: dict[str, Path], model: str) -> Iterator[LLM]:
    with LLM(directories[model], max_model_len=MAX_MODEL_LEN) as llm:
        yield llm


def params_of(case: BeamCase) -> BeamSearchParams:
    return BeamSearchParams(
        beam_width=case.beam_width,
        max_tokens=case.max_tokens,
        ignore_eos=not case.eos_token_ids,
        temperature=case.temperature,
        length_penalty=case.length_penalty,
        early_stopping=case.early_stopping,
    )


def score(case: BeamCase, sequence: BeamSearchSequence) -> float:
    length = len(sequence.tokens) - len(case.prompt_token_ids)
    return sequence.cum_logprob / float(length**case.length_penalty)


def test_outputs_equal_transformers(llm: LLM, model: str) -> None:
    cases = {name: case for name, case in MODEL_CASES.items() if case.model == model}
    for name, case in cases.items():
        prompt = list(case.prompt_token_ids)

        (output,) = llm.beam_search([prompt], params_of(case), use_tqdm=False)

        expected = GOLDEN[name]
        assert [sequence.tokens for sequence in output.sequences] == [
            prompt + token_ids for token_ids in expected["token_ids"]
        ], name
        scores = [score(case, sequence) for sequence in output.sequences]
        np.testing.assert_allclose(scores, expected["scores"], rtol=1e-4, err_msg=name)
        for sequence in output.sequences:
            by_eos = sequence.tokens[-1] in case.eos_token_ids
            assert sequence.finish_reason == ("stop" if by_eos else "length")
        assert llm.engine.scheduler.num_used_blocks == 0


# In company.


def late_backend(_: EngineConfig, dtype: str) -> LateBackend:
    return LateBackend(dtype)


def make_engine(directory: Path, *, late: bool = False, num_blocks: int = 0, **options: Any) -> LLMEngine:
    """Return an engine of so many KV blocks, 0 = plenty; late = two steps in flight."""
    if num_blocks:
        with LLM(directory, max_model_len=MAX_MODEL_LEN) as probe:
            options["kv_cache_memory"] = num_blocks * probe.engine.kv_block_bytes
    config = EngineConfig.create(directory, **({"max_model_len": MAX_MODEL_LEN} | options))
    create = partial(UniprocExecutor, create_backend=late_backend) if late else UniprocExecutor
    return LLMEngine(config, create_executor=create)


def add_all(engine: LLMEngine) -> None:
    """Add every search, an ordinary request before each and one of two outputs behind."""
    for i, (name, case) in enumerate(LLAMA_CASES.items()):
        prompt = list(case.prompt_token_ids)
        params = SamplingParams(
            seed=i,
            max_tokens=20,
            ignore_eos=True,
            n=1 + i % 2,
            logprobs=i % 3,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        engine.add_request(f"other {i}", prompt[::-1], params)
        engine.add(engine.make_beam_request(name, prompt, params_of(case)))


def run(engine: LLMEngine) -> dict[str, RequestOutput]:
    """Step until all is done, checking the scheduler after each step."""
    outputs = {}
    while engine.has_unfinished():
        for output in engine.step():
            outputs[output.request_id] = output
        engine.scheduler.check_invariants()
    assert engine.scheduler.num_used_blocks == 0
    return outputs


def token_ids(output: RequestOutput) -> list[list[int]]:
    return [completion.token_ids for completion in output.outputs]


@pytest.fixture(scope="module")
def others(directories: dict[str, Path]) -> dict[str, list[list[int]]]:
    """Return what the ordinary requests give among searches in a roomy cache."""
    engine = make_engine(directories["llama"])
    add_all(engine)
    outputs = run(engine)
    engine.close()
    return {name: token_ids(output) for name, output in outputs.items() if name not in LLAMA_CASES}


RECOMPUTED = {"num_blocks": 24, "preemption_mode": "recompute"}
SWAPPED = {"num_blocks": 24, "preemption_mode": "swap", "swap_space": 0.01}
FEW_TOKENS = {"max_num_batched_tokens": 7}  # prompts in chunks, and wide beams in several steps


@pytest.mark.parametrize("late", [False, True], ids=["one in flight", "two in flight"])
@pytest.mark.parametrize(
    ("options", "happened"),
    [
        ({}, ["copied_blocks"]),
        ({"enable_prefix_caching": False}, ["copied_blocks"]),
        (FEW_TOKENS, ["copied_blocks"]),
        (RECOMPUTED, ["preemptions", "recomputed_tokens"]),
        (RECOMPUTED | FEW_TOKENS, ["preemptions", "recomputed_tokens"]),
        (SWAPPED, ["preemptions", "swapped_out_blocks", "swapped_in_blocks"]),
        (SWAPPED | FEW_TOKENS, ["preemptions", "swapped_out_blocks", "swapped_in_blocks"]),
    ],
    ids=["roomy", "uncached", "chunked", "recomputed", "recomputed-chunked", "swapped", "swapped-chunked"],
)
def test_searches_beside_others_equal_those_alone(
    directories: dict[str, Path],
    others: dict[str, list[list[int]]],
    options: dict[str, Any],
    happened: list[str],
    late: bool,
) -> None:
    engine = make_engine(directories["llama"], late=late, **options)
    add_all(engine)

    outputs = run(engine)

    found = {name: token_ids(output) for name, output in outputs.items()}
    assert found == {name: GOLDEN[name]["token_ids"] for name in LLAMA_CASES} | others
    metrics = engine.get_metrics()
    assert [name for name in happened if metrics[name] == 0] == []
    searches = [outputs[name].metrics for name in LLAMA_CASES]
    assert any(times is not None and times.num_preemptions for times in searches) == (
        "preemptions" in happened
    )
    engine.close()


def test_a_cached_prompt_changes_nothing(directories: dict[str, Path]) -> None:
    engine = make_engine(directories["llama"])
    for _ in range(2):
        add_all(engine)
        outputs = run(engine)

    for name, case in LLAMA_CASES.items():
        assert token_ids(outputs[name]) == GOLDEN[name]["token_ids"]
        assert (outputs[name].num_cached_tokens > 0) == (len(case.prompt_token_ids) > 16)
    engine.close()


def test_an_aborted_search_gives_its_blocks_back(directories: dict[str, Path]) -> None:
    engine = make_engine(directories["llama"], late=True)
    engine.add(engine.make_beam_request("a", [5, 6, 7], BeamSearchParams(beam_width=4, max_tokens=30)))
    for _ in range(5):
        engine.step()

    engine.abort("a")

    assert run(engine) == {}
    engine.close()


def test_a_search_that_could_outgrow_the_cache_is_refused_with_the_numbers(
    directories: dict[str, Path],
) -> None:
    engine = make_engine(directories["llama"], num_blocks=9)

    with pytest.raises(ValueError, match=r"beam_width is 8: .* up to 23 tokens.* take 16 .* there are 9"):
        engine.make_beam_request("a", [5, 6, 7], BeamSearchParams(beam_width=8, max_tokens=20))
    engine.close()


# The front door.


def test_several_prompts_come_back_in_order(llm: LLM) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=6)
    prompts: list[Any] = ["one", [7, 8, 9], {"prompt": "the third"}]

    outputs = llm.beam_search(prompts, params, use_tqdm=False)

    alone = [llm.beam_search(prompt, params, use_tqdm=False)[0] for prompt in prompts]
    assert outputs == alone
    assert [len(output.sequences) for output in outputs] == [3, 3, 3]


def test_text_is_that_of_prompt_and_output(llm: LLM) -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=5, ignore_eos=True)

    (output,) = llm.beam_search("the one", params, use_tqdm=False)

    tokenizer = llm.get_tokenizer()
    for sequence in output.sequences:
        assert sequence.text.startswith("the one")
        assert sequence.text == tokenizer.decode(sequence.tokens)
        assert len(sequence.tokens) == len(tokenizer.encode("the one")) + 5


def test_the_eos_token_is_in_the_text_only_if_asked(directories: dict[str, Path]) -> None:
    case = LLAMA_CASES["llama_0"]
    texts = []
    with LLM(directories["llama"], max_model_len=MAX_MODEL_LEN) as llm:
        for includes in (False, True):
            params = BeamSearchParams(beam_width=2, max_tokens=16, include_stop_str_in_output=includes)
            (output,) = llm.beam_search(list(case.prompt_token_ids), params, use_tqdm=False)
            first = output.sequences[0]
            assert first.tokens[-1] in case.eos_token_ids
            texts.append(first.text)
        eos = llm.get_tokenizer().decode(first.tokens[-1:])

    assert eos
    assert texts[1] == texts[0] + eos


def test_params_of_another_kind_are_refused(llm: LLM) -> None:
    with pytest.raises(ValueError, match="params must be BeamSearchParams, got"):
        llm.beam_search("a", SamplingParams(), use_tqdm=False)  # type: ignore[arg-type]
