"""MemoryPlan: what a model takes of the device's memory, exactly, and what that leaves to the KV cache."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from cupaged.backend.base import Backend, Limits, MemoryUse
from cupaged.config import EngineConfig, ModelConfig
from cupaged.worker.kv_cache import block_bytes

logger = logging.getLogger("cupaged")

Measure = Callable[[Limits], MemoryUse]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Where the memory goes, and so how many KV blocks there are and how long a sequence may be."""

    limits: Limits
    use: MemoryUse
    num_blocks: int
    block_bytes: int
    available: int  # bytes

    @property
    def max_model_len(self) -> int:
        """Return the tokens of the longest sequence."""
        return self.limits.seq_len

    @property
    def total(self) -> int:
        """Return all bytes that are planned."""
        return sum(self.use) + self.num_blocks * self.block_bytes

    def __str__(self) -> str:
        parts = " + ".join(f"{name} {_gib(size)}" for name, size in self.use._asdict().items() if size)
        tokens = self.num_blocks * self.limits.block_size
        return (
            f"memory, GiB: {parts} + KV cache {_gib(self.num_blocks * self.block_bytes)} ({self.num_blocks} "
            f"blocks, {tokens} tokens) = {_gib(self.total)} of {_gib(self.available)} free"
        )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.3f}"


def plan_memory(config: EngineConfig, model: ModelConfig, backend: Backend, measure: Measure) -> MemoryPlan:
    """Return the plan, before anything is allocated; ValueError says what does not fit, and what would.

    Unset, kv_cache_memory is the backend's share of what gpu_memory_utilization leaves, and never more than
    max_num_seqs sequences of max_model_len can use; unset, max_model_len is the model's, or what then fits.
    """
    longest = longest_position(model)
    # Dynamic rope changes every position's rotation once max_model_len passes the original length, so unasked
    # it stays within.
    unset = model.max_position_embeddings if model.rope.rope_type == "dynamic" else longest
    wanted = config.max_model_len or unset
    if wanted > longest:
        raise ValueError(
            f"max_model_len is {wanted} but the model's positions end at {longest}; lower max_model_len"
        )
    planner = _Planner(config, model, backend, measure)
    plan = planner.plan(wanted)
    if _capacity(plan) >= wanted:
        return plan
    fitting = planner.longest_that_fits(plan)
    if config.max_model_len is not None:
        needed = -(-wanted // config.block_size) * plan.block_bytes
        raise ValueError(
            f"max_model_len is {wanted} but the KV cache of {plan.num_blocks * plan.block_bytes} bytes holds "
            f"{_capacity(plan)} tokens, {needed} bytes would be needed; lower max_model_len to "
            f"{fitting.max_model_len}, the largest that fits, or {planner.remedy}"
        )
    logger.warning(
        "max_model_len lowered from %d to %d tokens, which is what the KV cache of %d blocks holds; %s",
        wanted,
        fitting.max_model_len,
        fitting.num_blocks,
        f"{planner.remedy} for more",
    )
    return fitting


def _capacity(plan: MemoryPlan) -> int:
    return plan.num_blocks * plan.limits.block_size


class _Planner:
    """Plans for one length after the other, all out of the same free memory."""

    def __init__(self, config: EngineConfig, model: ModelConfig, backend: Backend, measure: Measure) -> None:
        self._config, self._backend, self._measure = config, backend, measure
        self._available = backend.available_memory()
        self._block_bytes = block_bytes(model, config.block_size, backend.kv_dtype.itemsize)
        is_unset = config.kv_cache_memory is None
        self.remedy = f"raise {'gpu_memory_utilization' if is_unset else 'kv_cache_memory'}"

    def plan(self, seq_len: int) -> MemoryPlan:
        """Return the plan for sequences of seq_len tokens; its KV cache may hold less than one."""
        config, size = self._config, self._config.block_size
        useful = config.max_num_seqs * -(-seq_len // size)  # blocks
        budget = int(config.gpu_memory_utilization * self._available)
        num_blocks = min(self._kv_cache_bytes(budget) // self._block_bytes, useful)  # at most
        limits = Limits(
            num_tokens=max(1, min(config.max_num_batched_tokens, num_blocks * size)),
            num_seqs=config.max_num_seqs,
            seq_len=seq_len,
            block_size=size,
            num_slots=num_blocks * size,
        )
        use = self._measure(limits)
        self._check(use, budget)
        memory = self._kv_cache_bytes(budget - sum(use))
        num_blocks = min(memory // self._block_bytes, useful)
        if num_blocks == 0:
            raise ValueError(
                f"a KV cache of {memory} bytes holds 0 tokens: a block takes {self._block_bytes}; "
                f"{self.remedy}"
            )
        return MemoryPlan(
            limits=limits,
            use=use,
            num_blocks=num_blocks,
            block_bytes=self._block_bytes,
            available=self._available,
        )

    def longest_that_fits(self, too_long: MemoryPlan) -> MemoryPlan:
        """Return the plan of the longest sequence that its KV cache holds.

        What else is needed grows with the length: the answer is at least what too_long holds, and at most
        what a plan for that length does.
        """
        size = self._config.block_size
        best = self.plan(_capacity(too_long))
        low, high = _capacity(too_long) // size, min(_capacity(best), too_long.max_model_len) // size
        while low < high:  # in blocks; low fits, high + 1 does not
            middle = (low + high + 1) // 2
            plan = self.plan(middle * size)
            if _capacity(plan) >= middle * size:
                best, low = plan, middle
            else:
                high = middle - 1
        return best

    def _kv_cache_bytes(self, free: int) -> int:
        """Return the bytes of the KV cache, of so many that are free: the user's, or the backend's share."""
        if self._config.kv_cache_memory is not None:
            return self._config.kv_cache_memory
        return self._backend.kv_cache_share(max(0, free))

    def _check(self, use: MemoryUse, budget: int) -> None:
        """Raise ValueError if there is no room for a KV cache beside `use`."""
        if use.weights > self._available:
            raise ValueError(
                f"the weights take {use.weights} bytes but only {self._available} are free; "
                "close other programs or choose a smaller model"
            )
        tokens = f"a step of max_num_batched_tokens={self._config.max_num_batched_tokens} tokens"
        needs = f"{use.weights} bytes of weights, {sum(use) - use.weights} for {tokens}"
        kv_cache = self._config.kv_cache_memory
        if kv_cache is None and sum(use) >= budget:
            raise ValueError(
                f"{needs}, but {budget} are free to use; lower max_num_batched_tokens or max_num_seqs, or "
                "raise gpu_memory_utilization"
            )
        if kv_cache is not None and kv_cache + sum(use) > self._available:
            raise ValueError(
                f"kv_cache_memory is {kv_cache} bytes, but beside {needs}, only "
                f"{max(0, self._available - sum(use))} are free; lower kv_cache_memory or "
                "max_num_batched_tokens"
            )


def longest_position(model: ModelConfig) -> int:
    """Return how long a sequence the model's rotary embedding allows."""
    rope = model.rope
    if rope.rope_type in ("linear", "dynamic", "yarn"):
        original = rope.original_max_position_embeddings or model.max_position_embeddings
        return max(model.max_position_embeddings, int(original * rope.factor))
    return model.max_position_embeddings
