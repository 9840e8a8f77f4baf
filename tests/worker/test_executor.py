"""UniprocExecutor: steps under way are waited for, and close lets go of everything."""

import weakref
from pathlib import Path

import pytest

from cupaged.batch import Batch, padding_batch
from cupaged.config import EngineConfig
from cupaged.worker.executor import UniprocExecutor
from tests.backend.late import LateBackend


def make_batch() -> Batch:
    return padding_batch(4, 1, num_decodes=0, num_logits=1, table_width=1)


def make_executor(model: Path, backend: LateBackend | None = None) -> UniprocExecutor:
    config = EngineConfig.create(model, max_model_len=32, max_num_batched_tokens=4)
    if backend is None:
        return UniprocExecutor(config, model)
    return UniprocExecutor(config, model, create_backend=lambda *_: backend)


def test_close_lets_go_of_the_worker_and_nothing_runs_afterwards(tiny_llama_dir: Path) -> None:
    executor = make_executor(tiny_llama_dir)
    assert executor._worker is not None
    worker = weakref.ref(executor._worker)

    executor.close()
    executor.close()

    assert worker() is None
    with pytest.raises(RuntimeError, match="closed"):
        executor.submit(make_batch())


def test_close_waits_for_the_steps_under_way_before_it_lets_go(tiny_llama_dir: Path) -> None:
    backend = LateBackend("float32")
    executor = make_executor(tiny_llama_dir, backend)
    assert executor._worker is not None
    worker = weakref.ref(executor._worker)
    alive: list[bool] = []
    handles = [executor.submit(make_batch()) for _ in range(executor.max_in_flight)]
    assert len(handles) == 2
    assert backend.begun
    backend.begun.append(lambda: alive.append(worker() is not None))

    executor.close()

    assert alive == [True]
    assert not backend.begun
    assert worker() is None


def test_memory_is_freed_even_if_the_device_has_failed(tiny_llama_dir: Path) -> None:
    def fail() -> None:
        raise RuntimeError("an illegal memory access")

    backend = LateBackend("float32")
    executor = make_executor(tiny_llama_dir, backend)
    assert executor._worker is not None
    worker = weakref.ref(executor._worker)
    backend.begun.append(fail)

    with pytest.raises(RuntimeError, match="illegal"):
        executor.close()

    assert worker() is None


def test_results_of_steps_in_flight_come_in_order_and_are_their_own(tiny_llama_dir: Path) -> None:
    backend = LateBackend("float32")
    executor = make_executor(tiny_llama_dir, backend)
    first, second = executor.submit(make_batch()), executor.submit(make_batch())
    num_begun = len(backend.begun)

    first.result()

    assert 0 < len(backend.begun) < num_begun
    second.result()
    assert not backend.begun
