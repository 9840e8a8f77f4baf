"""On an emulated GPU, sequences that share blocks get the tokens that they get on the CPU.

Forks and what they copy on write, prefixes found in the cache, beams; also while blocks are swapped.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from cupaged import SamplingParams
from cupaged.config import EngineConfig
from cupaged.engine.llm_engine import LLMEngine
from cupaged.sampling_params import BeamSearchParams, RequestOutputKind
from cupaged.scheduler.counters import Counter
from tests.cuda_on_cpu.gpu import EmulatedGpu
from tests.e2e.emulated import MEMORY, create_engine
from tools.make_tiny_model import CLEAR_CASES, write_clear_model, write_tiny_tokenizer

BLOCK_BYTES = 2 * 2 * 2 * 16 * 64 * 2
OPTIONS: dict[str, Any] = {"max_model_len": 96, "max_num_seqs": 8, "max_num_batched_tokens": 40}
PROMPTS = [list(range(first, first + length)) for first, length in ((3, 37), (50, 16), (90, 3), (120, 48))]
FIRST_OF_BEAMS = (3, 50, 90, 120)  # tokens
FINAL = RequestOutputKind.FINAL_ONLY

Tokens = list[list[list[int]]]  # of each sequence of each request


class Engines(NamedTuple):
    """The same model on both."""

    cpu: LLMEngine
    cuda: LLMEngine


def params(n: int, temperature: float = 0.0) -> SamplingParams:
    """At low temperatures the likely token nearly always comes, so that rounding decides nothing."""
    return SamplingParams(
        n=n, temperature=temperature, seed=5, max_tokens=25, ignore_eos=True, output_kind=FINAL
    )


def generate(engine: LLMEngine, each: SamplingParams, prompts: list[list[int]] = PROMPTS) -> Tokens:
    """Return the tokens of each sequence, and check the scheduler's books after each step."""
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, each)
    found: dict[str, list[list[int]]] = {}
    while engine.has_unfinished():
        for output in engine.step():
            found[output.request_id] = [completion.token_ids for completion in output.outputs]
        engine.scheduler.check_invariants()
    assert engine.scheduler.num_used_blocks == 0
    return [found[str(i)] for i in range(len(prompts))]


def search(engine: LLMEngine, width: int) -> Tokens:
    """Return the tokens of the best beams, of prompts whose beams soon need blocks of their own."""
    for i, first in enumerate(FIRST_OF_BEAMS):
        prompt = list(range(first, first + 60))
        beams = BeamSearchParams(beam_width=width, max_tokens=12, ignore_eos=True)
        engine.add(engine.make_beam_request(str(i), prompt, beams))
    found: dict[str, list[list[int]]] = {}
    while engine.has_unfinished():
        for output in engine.step():
            found[output.request_id] = [completion.token_ids for completion in output.outputs]
        engine.scheduler.check_invariants()
    return [found[str(i)] for i in range(len(FIRST_OF_BEAMS))]


def create(model_dir: Path, **options: Any) -> Engines:
    options = OPTIONS | options
    cpu = EngineConfig.create(model_dir, device="cpu", num_threads=1, **options)
    return Engines(LLMEngine(cpu), create_engine(model_dir, gpu=EmulatedGpu(memory=MEMORY), **options))


@pytest.fixture(scope="module")
def windowed_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Whose layers look back some two blocks, so that there are holes in front of tables."""
    directory = tmp_path_factory.mktemp("windowed")
    write_clear_model(directory, CLEAR_CASES["clear_mistral"] | {"sliding_window": 37})
    write_tiny_tokenizer(directory)
    return directory


@pytest.fixture(params=["roomy", "swapping", "recomputing", "swapping windowed"])
def with_blocks(
    request: pytest.FixtureRequest, clear_dir: Path, windowed_dir: Path
) -> Iterator[Callable[[int], Engines]]:
    """With room for all; or with so few blocks, as a test says, that groups are swapped or recomputed."""
    mode, *windowed = request.param.split()
    made: list[LLMEngine] = []

    def create_mode(num_blocks: int) -> Engines:
        few: dict[str, Any] = {"kv_cache_memory": num_blocks * BLOCK_BYTES, "swap_space": 2**-10}
        modes: dict[str, dict[str, Any]] = {
            "roomy": {"kv_cache_memory": 200 * BLOCK_BYTES},
            "swapping": few | {"preemption_mode": "swap"},
            "recomputing": few | {"preemption_mode": "recompute"},
        }
        engines = create(windowed_dir if windowed else clear_dir, **modes[mode])
        made.extend(engines)
        return engines

    yield create_mode
    for engine in made:
        assert (engine.counters[Counter.SWAPPED_IN_BLOCKS] > 0) == (mode == "swapping")
        assert (engine.counters[Counter.RECOMPUTED_TOKENS] > 0) == (mode == "recomputing")
        engine.close()


@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_forks_are_what_they_are_on_the_cpu(
    with_blocks: Callable[[int], Engines], temperature: float
) -> None:
    engines = with_blocks(12)

    on_cpu, on_cuda = (generate(engine, params(4, temperature)) for engine in engines)

    assert on_cuda == on_cpu
    assert engines.cuda.counters[[Counter.FORKS, Counter.COPIED_BLOCKS]].all()
    if temperature == 0:
        assert all(sequence == request[0] for request in on_cuda for sequence in request)


def test_prefixes_that_are_found_change_no_token(with_blocks: Callable[[int], Engines]) -> None:
    engines = with_blocks(9)
    prompts = [[*PROMPTS[0], *prompt] for prompt in PROMPTS]
    cold = [generate(engine, params(1), prompts) for engine in engines]
    before = [engine.counters.copy() for engine in engines]

    again = [generate(engine, params(1), prompts) for engine in engines]

    assert cold[0] == cold[1] == again[0] == again[1]
    for engine, counters in zip(engines, before, strict=True):
        assert (engine.counters - counters)[Counter.PREFIX_HIT_TOKENS] > 0


def test_beams_are_what_they_are_on_the_cpu(with_blocks: Callable[[int], Engines]) -> None:
    engines = with_blocks(10)

    on_cpu, on_cuda = (search(engine, 3) for engine in engines)

    assert on_cuda == on_cpu


def test_decodes_that_share_too_many_blocks_for_a_graph_run_eagerly(clear_dir: Path) -> None:
    # Two splits of a long prompt for each of six, of 8 decodes: 12; the cache makes 2 + 8.
    options = {"max_model_len": 1024, "max_num_batched_tokens": 1024, "kv_cache_memory": 72 * BLOCK_BYTES}
    engines = create(clear_dir, **options)
    prompts = [[3 + i % 250 for i in range(1000)]]
    gpu: Any = engines.cuda.executor._worker._backend._device  # type: ignore[attr-defined]
    gpu.launches.clear()

    on_cpu, on_cuda = (
        generate(engine, SamplingParams(n=6, max_tokens=4, ignore_eos=True, seed=1), prompts)
        for engine in engines
    )

    assert on_cuda == on_cpu
    assert gpu.launches.count("paged_decode") > 2 * 2  # layers, launches of a step
