"""TimedEngine: the engine as it is served, on a machine of gpu_check; it notes when steps begin and end.

Marks are put on the device's own stream: the first behind the copy of the batch, the last behind the copy of
what was sampled. So the time from one step's last to the next one's first is what the device waited for the
host, and for that copy.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple, cast

import numpy as np

from cupaged.backend.base import Array, Backend
from cupaged.backend.cuda import CudaBackend
from cupaged.batch import Batch
from cupaged.config import EngineConfig
from cupaged.engine.llm_engine import LLMEngine
from cupaged.outputs import RequestOutput
from cupaged.sampling_params import RequestOutputKind, SamplingParams
from cupaged.worker.executor import StepHandle, UniprocExecutor
from cupaged.worker.memory_plan import MemoryPlan
from tools.engine_model import FIRST_TOKEN, Workload
from tools.machine import Machine, Mark


class MarkedBackend:
    """A backend that marks the beginning of each step, and can leave its graphs out for a while.

    It also keeps the pools that it made last, for those who time what is done with whole blocks.
    """

    def __init__(self, backend: CudaBackend, mark: Callable[[], Mark]) -> None:
        self._backend, self._mark = backend, mark
        self.is_eager = False
        self.pool: Array = None  # of KV blocks on the device
        self.host_pool: Array = None  # of those that are swapped out; None = there is none
        self.begin: Mark = None  # of the last step
        self.driver_bytes_before: list[int] = []  # each step of warm_up: the first, then one a graph

    def __getattr__(self, name: str) -> Any:
        """Return all else as the backend has it."""
        return getattr(self._backend, name)

    def warm_up(self, step: Callable[[Batch], Any]) -> None:
        """Warm up, and note how the driver's memory grows."""

        def noted(batch: Batch) -> Any:
            self.driver_bytes_before.append(self._backend.driver_bytes())
            return step(batch)

        self._backend.warm_up(noted)

    def create_pool(self, shape: tuple[int, ...]) -> Array:
        """Make the pool, and keep it."""
        self.pool = self._backend.create_pool(shape)
        return self.pool

    def create_host_pool(self, shape: tuple[int, ...]) -> Array:
        """Make the host's pool, and keep it."""
        self.host_pool = self._backend.create_host_pool(shape)
        return self.host_pool

    def upload(self, batch: Batch) -> Batch:
        """Upload, and mark."""
        uploaded = self._backend.upload(batch)
        self.begin = self._mark()
        return uploaded

    def run_forward(self, batch: Batch, forward: Callable[[], Array]) -> Array:
        """Return forward(), or let a graph do it."""
        return forward() if self.is_eager else self._backend.run_forward(batch, forward)


class TimedStep(NamedTuple):
    """One step that was submitted."""

    begin: Mark
    end: Mark
    num_seqs: int
    num_decodes: int
    num_cached: int  # tokens of all sequences once the step is done
    num_copies: int  # blocks that copy-on-write copied before it
    host_seconds: float  # of submitting it


class TimedExecutor(UniprocExecutor):
    """UniprocExecutor that notes every step."""

    def __init__(self, machine: Machine, config: EngineConfig, model_dir: Path) -> None:
        """Load the model."""
        self._machine, self._device = machine, machine.gpu()
        self._num_before = len(self._device.allocations)
        self.steps: list[TimedStep] = []
        super().__init__(config, model_dir, create_backend=self._create_backend)

    def _create_backend(self, config: EngineConfig, checkpoint_dtype: str) -> Backend:
        backend = CudaBackend.create(self._device, config, checkpoint_dtype)
        self.backend = MarkedBackend(backend, self._machine.mark)
        return cast(Backend, self.backend)

    @property
    def allocations(self) -> list[int]:
        """Return the bytes of each allocation on the device for this engine."""
        return self._device.allocations[self._num_before :]

    def submit(self, batch: Batch) -> StepHandle:
        """Begin the step and note it."""
        start = perf_counter()
        handle = super().submit(batch)
        host_seconds = perf_counter() - start
        cached = int(batch.seq_lens.sum())
        marks = (self.backend.begin, self._machine.mark())
        counts = (batch.num_seqs, batch.num_decodes, cached, len(batch.copy))
        self.steps.append(TimedStep(*marks, *counts, host_seconds))
        return handle


class TimedEngine:
    """LLMEngine over a TimedExecutor."""

    def __init__(self, machine: Machine, model_dir: Path, **options: Any) -> None:
        """Load the model; `options` are EngineConfig's."""
        self._num_requests = 0
        config = EngineConfig.create(model_dir, device="cuda", **options)
        self.engine = LLMEngine(config, create_executor=partial(TimedExecutor, machine))
        self.executor = cast(TimedExecutor, self.engine.executor)

    @property
    def plan(self) -> MemoryPlan:
        """Return where its memory goes."""
        return self.executor.plan

    @property
    def steps(self) -> list[TimedStep]:
        """Return the steps so far; whoever times clears them."""
        return self.executor.steps

    def set_eager(self, is_eager: bool) -> None:
        """Launch every kernel by itself from the next step on, or let graphs do it again."""
        self.executor.backend.is_eager = is_eager

    def add(self, work: Workload, **params: Any) -> None:
        """Queue the requests of a workload, random prompts, greedy if `params` do not say otherwise."""
        rng = np.random.Generator(np.random.PCG64(self._num_requests))
        for _ in range(work.num_seqs):
            prompt = rng.integers(FIRST_TOKEN, self.engine.model_config.vocab_size, work.prompt_length)
            sampling = {"temperature": 0.0, "seed": self._num_requests} | params
            self._num_requests += 1
            self.engine.add_request(
                str(self._num_requests),
                prompt.tolist(),
                SamplingParams(
                    max_tokens=work.output_length,
                    ignore_eos=True,
                    detokenize=False,
                    output_kind=RequestOutputKind.FINAL_ONLY,
                    **sampling,
                ),
            )

    def run(self) -> list[RequestOutput]:
        """Step until every request has finished; return them by their ids."""
        finished: list[RequestOutput] = []
        while self.engine.has_unfinished():
            finished += self.engine.step()
        return sorted(finished, key=lambda output: int(output.request_id))

    def drop_all(self) -> None:
        """Abort every request and take back the steps in flight."""
        for request_id in range(1, self._num_requests + 1):
            self.engine.abort(str(request_id))
        self.run()

    def close(self) -> None:
        """Release all memory."""
        self.engine.close()
