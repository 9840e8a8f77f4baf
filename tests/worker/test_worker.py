"""Worker: what it takes is what it planned, to the byte, and known before anything is there."""

import json
import logging
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupaged import threads
from cupaged.backend.base import Backend, Limits, MemoryUse
from cupaged.backend.cpu import CpuBackend
from cupaged.batch import Flag, padding_batch
from cupaged.config import EngineConfig
from cupaged.sampling_params import MAX_CANDIDATES
from cupaged.worker.executor import UniprocExecutor
from cupaged.worker.worker import Worker, largest_batches
from tests.backend.late import LateBackend
from tools.make_tiny_model import CASES, LLAMA, write_tiny_model

LLAMA_8B = LLAMA | {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}


def config(directory: Path, **options: Any) -> EngineConfig:
    return EngineConfig.create(directory, **{"max_num_batched_tokens": 64, "max_num_seqs": 8, **options})


def config_only(directory: Path, values: dict[str, Any]) -> Path:
    (directory / "config.json").write_text(json.dumps(values))
    return directory


def numpy_bytes() -> int:
    """Return the bytes that NumPy arrays hold, as tracemalloc counts them."""
    arrays = tracemalloc.DomainFilter(True, np.lib.tracemalloc_domain)
    snapshot = tracemalloc.take_snapshot().filter_traces([arrays])
    return sum(trace.size for trace in snapshot.traces)


class AtLog(logging.Handler):
    """Remembers what NumPy's arrays held at each message."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.bytes: list[int] = []

    def emit(self, record: logging.LogRecord) -> None:  # noqa: ARG002
        """Count."""
        self.bytes.append(numpy_bytes())


@pytest.mark.parametrize("case", ["llama_tied", "llama_bias", "mistral_window", "qwen2", "qwen3"])
@pytest.mark.parametrize(("dtype", "swap_space"), [("float32", None), ("bfloat16", 2**-10)])
def test_all_that_is_allocated_is_planned_to_the_byte(
    tmp_path: Path, case: str, dtype: str, swap_space: float | None
) -> None:
    write_tiny_model(tmp_path, CASES[case])
    options = config(tmp_path, dtype=dtype, kv_cache_memory=1 << 20, swap_space=swap_space)
    Worker(options, tmp_path)  # what the process has once is there now: numpy.ma, which Numba imports late
    tracemalloc.start()
    before = numpy_bytes()

    worker = Worker(options, tmp_path)

    taken = numpy_bytes() - before
    tracemalloc.stop()
    assert taken == worker.plan.total
    assert (worker.plan.num_host_blocks > 0) == (swap_space is not None)
    assert worker.plan.use.weights > 0 < worker.plan.use.activations


def test_the_plan_is_said_before_anything_is_allocated(
    tiny_llama_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    handler = AtLog()
    tracemalloc.start()
    before = numpy_bytes()
    with caplog.at_level(logging.INFO, logger="cupaged"):
        logging.getLogger("cupaged").addHandler(handler)
        try:
            worker = Worker(config(tiny_llama_dir), tiny_llama_dir)
        finally:
            logging.getLogger("cupaged").removeHandler(handler)
    tracemalloc.stop()

    assert caplog.messages == [str(worker.plan)]
    (at_log,) = handler.bytes
    assert at_log - before < worker.plan.total / 100


class PlannedError(Exception):
    """Raised in place of taking the memory."""


class Paper(CpuBackend):
    """A backend with the memory of an H200, of which nothing is taken."""

    num_rehearsals = 0

    def available_memory(self) -> int:
        """Return 140 GB."""
        return 140 * 10**9

    def kv_cache_share(self, free: int) -> int:
        """Return all of it."""
        return free

    def measure(self, limits: Limits, rehearse: Any) -> MemoryUse:
        """Count the rehearsals."""
        self.num_rehearsals += 1
        return super().measure(limits, rehearse)

    def allocate(self, limits: Limits, use: MemoryUse) -> None:
        """End here."""
        raise PlannedError(limits, use)


def test_a_rehearsal_reads_no_weights_and_is_quick_for_a_model_of_8b(tmp_path: Path) -> None:
    config_only(tmp_path, LLAMA_8B)
    backend = Paper("bfloat16")
    options = config(tmp_path, load_format="dummy", max_num_batched_tokens=2048, max_num_seqs=256)

    start = time.process_time()
    with pytest.raises(PlannedError) as planned:
        Worker(options, tmp_path, create_backend=lambda *_: backend)
    seconds = time.process_time() - start

    limits, use = planned.value.args
    assert (limits.num_tokens, limits.num_seqs, limits.seq_len) == (2048, 256, 131072)
    assert 16.1e9 < use.weights < 16.2e9  # 8 billion in bfloat16
    assert backend.num_rehearsals == 1
    assert seconds < 1.0


def test_dummy_weights_need_no_checkpoint(tmp_path: Path) -> None:
    config_only(tmp_path, LLAMA)
    worker = Worker(config(tmp_path, load_format="dummy"), tmp_path)
    batch = padding_batch(4, 1, num_decodes=0, num_logits=1, table_width=1)
    batch.query_start[:], batch.seq_lens[:], batch.block_tables[:] = [0, 4], 4, 0
    batch.positions[:] = batch.slot_mapping[:] = range(4)
    batch.logit_index[:], batch.logit_target[:] = 3, -1
    batch.flags[:], batch.rows[:] = Flag.SAMPLES, 0

    output = worker.submit(batch).result()

    assert output.num_tokens.tolist() == [1]
    assert 0 <= output.token_ids[0, 0] < LLAMA["vocab_size"]


def test_without_weights_a_checkpoint_is_asked_for(tmp_path: Path) -> None:
    config_only(tmp_path, LLAMA)

    with pytest.raises(ValueError, match=r"neither model\.safetensors nor"):
        Worker(config(tmp_path), tmp_path)


def test_rates_of_swaps_and_prefills_are_measured_at_load(tiny_llama_dir: Path) -> None:
    worker = Worker(config(tiny_llama_dir, swap_space=0.01), tiny_llama_dir)

    assert worker.swap_rates.bandwidth > 1e6
    assert worker.swap_rates.prefill_rate > 10


def test_a_swap_that_is_timed_is_done_when_its_call_returns(tiny_llama_dir: Path) -> None:
    backend = LateBackend("float32")
    worker = Worker(
        config(tiny_llama_dir, swap_space=0.01), tiny_llama_dir, create_backend=lambda *_: backend
    )

    worker._swap_first(1)

    assert not backend.begun


def test_rates_that_the_user_gives_are_kept(tiny_llama_dir: Path) -> None:
    options = config(tiny_llama_dir, swap_space=0.01, swap_bandwidth=25e9, prefill_rate=5000)

    assert UniprocExecutor(options, tiny_llama_dir).swap_rates == (25e9, 5000)


@pytest.mark.parametrize(
    ("backend", "num_threads", "async_scheduling", "expected"),
    [
        (LateBackend, 1, True, 2),
        (LateBackend, 1, False, 1),
        (CpuBackend, 1, True, 1),
        (CpuBackend, 2, True, 2),
    ],
)
def test_steps_in_flight_are_the_backends_unless_switched_off(
    tiny_llama_dir: Path,
    backend: type[CpuBackend],
    num_threads: int,
    async_scheduling: bool,
    expected: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def create(options: EngineConfig, _: str) -> Backend:
        return backend("float32", options.num_threads)

    monkeypatch.setattr(threads, "available_cpus", lambda: 2)
    options = config(tiny_llama_dir, num_threads=num_threads, async_scheduling=async_scheduling)

    assert Worker(options, tiny_llama_dir, create_backend=create).max_in_flight == expected


def test_the_largest_steps_fill_their_limits() -> None:
    limits = Limits(num_tokens=48, num_seqs=8, seq_len=64, block_size=16, num_slots=48)

    decodes, prefill = largest_batches(limits)

    assert (decodes.num_tokens, decodes.num_seqs, decodes.num_decodes, decodes.num_logits) == (8, 8, 8, 8)
    assert (prefill.num_tokens, prefill.num_seqs, prefill.num_decodes, prefill.num_logits) == (48, 8, 0, 48)
    for batch in (decodes, prefill):
        assert (batch.num_logprobs == MAX_CANDIDATES).all()
        assert (batch.num_prompt_logprobs == MAX_CANDIDATES).all()
