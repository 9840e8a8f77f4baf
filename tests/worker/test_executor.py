"""UniprocExecutor: close lets go of everything."""

import weakref
from pathlib import Path

import pytest

from cupaged.config import EngineConfig
from cupaged.worker.executor import UniprocExecutor
from cupaged.worker.worker import largest_batches


def test_close_lets_go_of_the_worker_and_nothing_runs_afterwards(tiny_llama_dir: Path) -> None:
    config = EngineConfig.create(tiny_llama_dir, max_model_len=32, max_num_batched_tokens=4)
    executor = UniprocExecutor(config, tiny_llama_dir)
    assert executor._worker is not None
    worker = weakref.ref(executor._worker)

    executor.close()
    executor.close()

    assert worker() is None
    with pytest.raises(RuntimeError, match="closed"):
        executor.submit(largest_batches(config, 32)[0])
