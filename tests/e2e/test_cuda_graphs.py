"""On an emulated GPU, a step that a CUDA graph replays gives the bits of the same step run eagerly.

Each batch of an engine goes to two workers, one with graphs and one without. What they compute must be the
same, whatever ran in between: prefill chunks and mixed steps, which cut the arena in other ways, sequences
that come, go and are preempted, blocks that are swapped, an arena whose contents are no numbers.
"""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupaged import SamplingParams
from cupaged.backend.base import Array, Backend
from cupaged.backend.cuda import CudaBackend
from cupaged.backend.gemm import bucket
from cupaged.batch import Batch, StepOutput
from cupaged.config import EngineConfig
from cupaged.engine.llm_engine import LLMEngine
from cupaged.kernels.paged_decode import SPLIT
from cupaged.worker.worker import Worker
from tests.cuda_on_cpu.gpu import EmulatedGpu
from tests.e2e.emulated import MEMORY
from tools.make_tiny_model import CLEAR_CASES, write_clear_model, write_tiny_tokenizer

NUM_BLOCKS = 44  # for 704 tokens: too few for all


class Watched(CudaBackend):
    """A backend that keeps what forwards return."""

    hidden: Array

    def run_forward(self, batch: Batch, forward: Any) -> Array:
        """Keep the array."""
        self.hidden = super().run_forward(batch, forward)
        return self.hidden


class Twin:
    """A worker on an emulated GPU of its own."""

    def __init__(self, config: EngineConfig, model_dir: Path) -> None:
        self.gpu = EmulatedGpu(memory=MEMORY, num_sms=1)  # so that blocks have several splits to walk
        self.worker = Worker(config, model_dir, create_backend=self._create_backend)
        self.gpu.freeze()

    def _create_backend(self, config: EngineConfig, dtype: str) -> Backend:
        self._backend = Watched(self.gpu, dtype, enforce_eager=config.enforce_eager)
        return self._backend

    def run(self, batch: Batch) -> tuple[StepOutput, list[bytes]]:
        """Run a step; return its output, and the bits of hidden states and KV cache."""
        self.gpu.launches.clear()
        self.gpu.write(self._backend._arena.memory, 0xFF)  # NaN
        output = self.worker.submit(batch).result()
        hidden = self.gpu.read(self._backend.hidden)[: batch.num_tokens]
        assert not np.isnan(hidden.astype(np.float32)).any()
        return output, [hidden.tobytes(), self.gpu.read(self.worker._kv_cache.pool).tobytes()]


class Done:
    """A step that has been run."""

    def __init__(self, output: StepOutput) -> None:
        self.result = lambda: output


class TwinExecutor:
    """Runs each step with graphs and without, and counts how each kind of step was run."""

    def __init__(self, config: EngineConfig, model_dir: Path) -> None:
        self._graphs = Twin(config, model_dir)
        self._eager = Twin(replace(config, enforce_eager=True), model_dir)
        worker = self._graphs.worker
        self.plan, self.model_config, self.max_in_flight = worker.plan, worker.model_config, 1
        self.swap_rates = worker.swap_rates
        self.steps: Counter[tuple[str, int]] = Counter()  # by kind and sequences
        self.num_replayed_with_swaps = self.num_replayed_with_holes = 0

    def submit(self, batch: Batch) -> Done:
        """Run the step twice."""
        output, bits = self._graphs.run(batch)
        expected, expected_bits = self._eager.run(batch)
        assert bits == expected_bits
        assert output.token_ids.tolist() == expected.token_ids.tolist()
        assert "paged_decode" in self._eager.gpu.launches or batch.num_decodes == 0
        is_replayed = "silu_mul" not in self._graphs.gpu.launches
        self.steps["replayed" if is_replayed else "eager", batch.num_seqs] += 1
        assert is_replayed == (batch.num_decodes == batch.num_seqs)
        self.num_replayed_with_swaps += is_replayed and len(batch.swap_out) + len(batch.swap_in) > 0
        self.num_replayed_with_holes += is_replayed and bool((batch.block_tables[:, 0] < 0).any())
        return Done(output)

    def is_async(self, batch: Batch) -> bool:  # noqa: ARG002
        """Return False: submit gives the output."""
        return False

    def synchronize(self) -> None:
        """Do nothing: no step is under way."""

    def close(self) -> None:
        """Do nothing."""


@pytest.mark.parametrize(
    ("case", "block_bytes", "is_windowed"),
    [("clear_llama_128", 24 << 10, False), ("clear_mistral", 16 << 10, True)],
)
def test_replayed_steps_have_the_bits_of_eager_ones(
    tmp_path: Path, case: str, block_bytes: int, is_windowed: bool
) -> None:
    model_dir = write_clear_model(tmp_path, CLEAR_CASES[case])
    write_tiny_tokenizer(model_dir)
    options = {"max_num_seqs": 12, "max_num_batched_tokens": 128, "kv_cache_memory": NUM_BLOCKS * block_bytes}
    config = EngineConfig.create(model_dir, max_model_len=SPLIT + 128, preemption_mode="swap", **options)
    engine = LLMEngine(config, create_executor=TwinExecutor)
    rng = np.random.Generator(np.random.PCG64(0))
    lengths = [SPLIT - 3, *rng.integers(1, 60, 19).tolist()]  # the first passes from one split to two
    for i, length in enumerate(lengths):
        params = SamplingParams(temperature=3.0, seed=i, max_tokens=5 + 2 * i, ignore_eos=True)
        engine.add_request(str(i), rng.integers(3, 256, length).tolist(), params)

    while engine.has_unfinished():
        engine.step()

    executor: Any = engine.executor
    steps = executor.steps
    replayed = [num_seqs for kind, num_seqs in steps if kind == "replayed"]
    assert {bucket(num_seqs) for num_seqs in replayed} == {1, 2, 4, 8, 16}, steps
    assert any(num_seqs != bucket(num_seqs) for num_seqs in replayed), steps
    assert sum(count for (kind, _), count in steps.items() if kind == "eager") > 5, steps
    assert (executor.num_replayed_with_swaps > 0) == (not is_windowed)  # blocks leave the window in time
    assert (executor.num_replayed_with_holes > 0) == is_windowed
