"""Worker: one rank. Loads the model, plans its memory, executes batches.

Knows nothing of requests or queues: a Batch comes in, a StepOutput goes out.
"""

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupaged.backend.base import Array, Backend, Communicator, Limits, MemoryUse, create_backend
from cupaged.backend.comm import SingleRank
from cupaged.batch import Batch, padding_batch
from cupaged.config import EngineConfig, ModelConfig
from cupaged.models import load_model_class, load_model_config
from cupaged.sampling_params import MAX_CANDIDATES
from cupaged.worker.kv_cache import KVCache
from cupaged.worker.memory_plan import plan_memory
from cupaged.worker.sampler import SampledStep, Sampler
from cupaged.worker.swap_rates import find_swap_rates, prefill_batch
from cupaged.worker.weights import Checkpoint, DummyWeights, WatchedWeights

logger = logging.getLogger("cupaged")

Weights = Mapping[str, NDArray[Any]]  # by Weight.attribute, this rank's share


class Worker:
    """Model, KV cache and sampler of one rank."""

    def __init__(
        self,
        config: EngineConfig,
        model_dir: Path,
        *,
        communicator: Communicator | None = None,
        create_backend: Callable[[EngineConfig, str], Backend] = create_backend,
    ) -> None:
        """Load everything; ValueError names what does not fit or is not supported."""
        self._communicator = communicator or SingleRank()
        self.model_config: ModelConfig = load_model_config(model_dir)
        self._family = load_model_class(self.model_config.model_type)
        self._backend = backend = create_backend(config, self.model_config.dtype)
        self.max_in_flight = backend.max_in_flight if config.async_scheduling else 1
        weights = self._open_weights(config, model_dir)
        self.plan = plan = plan_memory(config, self.model_config, backend, partial(self._measure, weights))
        logger.info("%s", plan)
        backend.allocate(plan.limits, plan.use)
        try:
            with WatchedWeights(weights) as watched:
                self._build(watched, plan.limits, plan.num_blocks)
            backend.warm_up(self._run)
            self.swap_rates = find_swap_rates(
                config,
                plan,
                swap=self._swap_first,
                prefill=lambda num_tokens: self._run(prefill_batch(num_tokens, config.block_size)),
            )
        except BaseException:
            with suppress(RuntimeError):  # of a device that is lost: what went wrong first is what counts
                backend.synchronize()  # copies under way are from memory that goes now
            raise

    def submit(self, batch: Batch) -> SampledStep:
        """Begin a step; its buffer must stay as it is until the result has been taken."""
        backend = self._backend
        backend.begin_forward()
        host, batch = batch, backend.upload(batch)
        self._kv_cache.apply(batch, host)
        hidden = backend.run_forward(batch, partial(self._forward, batch))
        return self._sampler.sample(hidden, batch, host)

    def is_async(self, batch: Batch) -> bool:
        """Return whether submit(batch) returns before the step is done."""
        return self._backend.is_async(batch)

    def synchronize(self) -> None:
        """Wait until all steps that have begun are done."""
        self._backend.synchronize()

    def _run(self, batch: Batch) -> None:
        self.submit(batch).result()

    def _swap_first(self, num_blocks: int) -> None:
        """Move the first blocks out and back; there is nothing in them yet."""
        backend, pool, host_pool = self._backend, self._kv_cache.pool, self._kv_cache.host_pool
        pairs = np.arange(num_blocks, dtype=np.int32).repeat(2).reshape(-1, 2)
        backend.swap_out(pool, host_pool, pairs)
        backend.swap_in(host_pool, pool, pairs)
        backend.synchronize()

    def _forward(self, batch: Batch) -> Array:
        self._backend.load_last_tokens(batch, self._sampler.last_token)
        return self._model.forward(batch, self._kv_cache)

    def _open_weights(self, config: EngineConfig, model_dir: Path) -> Checkpoint | DummyWeights:
        table, ranks = self._family.weights(self.model_config), self._communicator
        if config.load_format == "dummy":
            return DummyWeights(table, self.model_config.dtype, size=ranks.size)
        return Checkpoint(model_dir, table, rank=ranks.rank, size=ranks.size)

    def _build(self, weights: Weights, limits: Limits, num_blocks: int) -> None:
        """Make model, KV cache and sampler."""
        backend, config = self._backend, self.model_config
        self._model = self._family.Model(
            config, backend, self._communicator, weights, max_model_len=limits.seq_len
        )
        self._kv_cache = KVCache(backend, config, limits, num_blocks)
        self._sampler = Sampler(backend, self._model, limits.num_seqs)

    def _measure(self, weights: Weights, limits: Limits) -> MemoryUse:
        """Return the memory that the model and its largest steps take."""

        def rehearse() -> None:
            self._build(weights, limits, num_blocks=1)
            for batch in largest_batches(limits):
                self.submit(batch)

        use = self._backend.measure(limits, rehearse)
        del self._model, self._kv_cache, self._sampler  # of arrays without memory
        return use


def largest_batches(limits: Limits) -> list[Batch]:
    """Return batches that need the most arena of any: all decodes, and all prefill, every token's logits."""
    batches = []
    num_seqs = min(limits.num_seqs, limits.num_tokens)
    for num_decodes, num_tokens in ((num_seqs, num_seqs), (0, limits.num_tokens)):
        batch = padding_batch(
            num_tokens, num_seqs, num_decodes=num_decodes, num_logits=num_tokens, table_width=1
        )
        batch.num_logprobs[:] = batch.num_prompt_logprobs[:] = MAX_CANDIDATES
        batches.append(batch)
    return batches
