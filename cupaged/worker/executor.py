"""Executor: what stands between the engine and its worker or workers; StepHandle: a step under way."""

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from cupaged.backend.base import Backend, create_backend
from cupaged.batch import Batch, StepOutput
from cupaged.config import EngineConfig, ModelConfig
from cupaged.worker.memory_plan import MemoryPlan
from cupaged.worker.swap_rates import SwapRates
from cupaged.worker.worker import Worker


class StepHandle(Protocol):
    """A submitted step."""

    def result(self) -> StepOutput:
        """Wait for the step and return what rank 0 gives back."""


class Executor(Protocol):
    """Runs batches in the order in which they are submitted."""

    plan: MemoryPlan
    swap_rates: SwapRates
    model_config: ModelConfig
    max_in_flight: int  # batches that may be submitted before the first one's result is asked for

    def submit(self, batch: Batch) -> StepHandle:
        """Start a step; the batch's buffer must stay as it is until its result has been taken."""

    def is_async(self, batch: Batch) -> bool:
        """Return whether submit(batch) returns before the step is done, as it does at best."""

    def synchronize(self) -> None:
        """Wait until all submitted steps are done, also those whose result nobody will ask for."""

    def close(self) -> None:
        """Wait, then release all memory; nothing may be submitted afterwards."""


class UniprocExecutor:
    """One worker in this process; a step runs inside submit, or begins there."""

    def __init__(
        self,
        config: EngineConfig,
        model_dir: Path,
        *,
        create_backend: Callable[[EngineConfig, str], Backend] = create_backend,
    ) -> None:
        """Load the model."""
        self._worker: Worker | None = Worker(config, model_dir, create_backend=create_backend)
        self.plan = self._worker.plan
        self.swap_rates = self._worker.swap_rates
        self.model_config = self._worker.model_config
        self.max_in_flight = self._worker.max_in_flight

    def submit(self, batch: Batch) -> StepHandle:
        """Run or begin the step."""
        return self._open_worker().submit(batch)

    def is_async(self, batch: Batch) -> bool:
        """Return whether the step only begins."""
        return self._open_worker().is_async(batch)

    def synchronize(self) -> None:
        """Wait until all submitted steps are done."""
        if self._worker is not None:
            self._worker.synchronize()

    def _open_worker(self) -> Worker:
        if self._worker is None:
            raise RuntimeError("the engine is closed; make a new one")
        return self._worker

    def close(self) -> None:
        """Drop the worker, and with it weights, arena and KV cache, once no step uses them any more."""
        try:
            self.synchronize()
        finally:
            self._worker = None
            _return_free_memory()


def _return_free_memory() -> None:
    """Have glibc return what was freed to the system; it keeps weights smaller than its mmap threshold."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        if hasattr(libc, "malloc_trim"):
            libc.malloc_trim(0)
