"""No operation of a step allocates what it returns or works on: all of it is in the arena."""

import tracemalloc
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupaged.backend.cpu import CpuBackend
from cupaged.config import EngineConfig
from cupaged.engine.llm_engine import LLMEngine
from cupaged.sampling_params import SamplingParams

# Called while an engine is built, or to move blocks; and what leaves a step belongs to who fetches it.
OTHERS = {
    "available_memory",
    "host_memory",
    "kv_cache_share",
    "measure",
    "allocate",
    "warm_up",
    "synchronize",
}
OTHERS |= {"create_pool", "create_host_pool", "copy_blocks", "swap_out", "swap_in", "from_host", "fetch"}
OTHERS |= {"prepare_linear", "prepare_vector"}

NUM_SEQS, PROMPT = 64, 20  # tokens
VIEWS = 3 << 10  # bytes of Python's own: views, tuples of arguments; an array with a row a sequence has more
SCRATCH = {"paged_attention": 64 << 10, "sample": 64 << 10, "logprobs": 16 << 10}  # of one thread
SCRATCH["run_forward"] = SCRATCH["paged_attention"]  # in a step that is replayed
SCRATCH["run_sampling"] = 8 << 10  # in one that is not: which rows report, by row


@pytest.fixture
def peaks(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[int]]:
    """Bytes that each call of an operation had allocated at most, beyond what there was before it."""
    found: dict[str, list[int]] = defaultdict(list)

    def watch(name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            result = operation(*args, **options)
            found[name].append(tracemalloc.get_traced_memory()[1] - before)
            return result

        return call

    for name, operation in vars(CpuBackend).items():
        if callable(operation) and not name.startswith("_") and name not in OTHERS:
            monkeypatch.setattr(CpuBackend, name, watch(name, operation))
    return found


def run(engine: LLMEngine) -> None:
    """Prefill many prompts in one step, then decode them all, by every way to sample there is."""
    rng = np.random.default_rng(0)
    for i in range(NUM_SEQS):
        params = SamplingParams(
            temperature=i % 3 / 2,
            top_p=0.9 if i % 2 else 1,
            top_k=5 if i % 5 else 0,
            min_p=0.1 if i % 7 else 0,
            max_tokens=6,
            min_tokens=2 if i % 4 else 0,
            ignore_eos=i % 4 == 0,
            logprobs=3 if i % 8 == 0 else None,
        )
        engine.add_request(str(i), rng.integers(5, 200, PROMPT).tolist(), params)
    while engine.has_unfinished():
        engine.step()
    engine.reset_prefix_cache()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_operations_of_a_step_allocate_no_arrays(
    tiny_llama_dir: Path, peaks: dict[str, list[int]], dtype: str
) -> None:
    options: dict[str, Any] = {"num_threads": 1, "max_num_seqs": NUM_SEQS, "max_num_batched_tokens": 2048}
    engine = LLMEngine(EngineConfig.create(tiny_llama_dir, dtype=dtype, max_model_len=128, **options))
    run(engine)
    peaks.clear()

    tracemalloc.start()  # of NumPy's allocations and of Numba's, too
    run(engine)
    tracemalloc.stop()

    engine.close()
    assert {name: max(sizes) for name, sizes in peaks.items() if max(sizes) > SCRATCH.get(name, VIEWS)} == {}
    assert {"linear", "sample", "logprobs", "rope_kv_write", "run_forward"} <= peaks.keys()
