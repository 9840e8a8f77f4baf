"""MemoryPlan: what a model takes of the device's memory, exactly, and what that leaves to the KV cache."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

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

    @property
    def num_tokens(self) -> int:
        """Return the tokens that the KV cache holds."""
        return self.num_blocks * self.limits.block_size

    def __str__(self) -> str:
        unit, name = (2**30, "GiB") if self.total >= 2**30 else (2**20, "MiB")
        use = self.use
        parts = {
            "weights": use.weights,
            "workspace": use.workspace,
            "activations": use.activations,
            "driver's modules and graphs": use.reserve,
            "KV cache": self.num_blocks * self.block_bytes,
        }
        total, available = self.total / unit, self.available / unit
        return (
            f"memory in {name}: "
            + " + ".join(f"{part} {size / unit:.3f}" for part, size in parts.items() if size)
            + f" = {total:.3f} of {available:.3f} free; {self.num_blocks} KV blocks hold {self.num_tokens} "
            f"tokens, a sequence at most {self.max_model_len}"
        )


def plan_memory(config: EngineConfig, model: ModelConfig, backend: Backend, measure: Measure) -> MemoryPlan:
    """Return the plan, before anything is allocated; ValueError says what does not fit, and what would.

    Unset, max_model_len is the model's, or the largest that fits; unset, kv_cache_memory is the backend's
    share of what gpu_memory_utilization leaves, and never more than max_num_seqs such sequences can use.
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
    problem = planner.problem(plan)
    if problem is None:
        return plan
    fitting = planner.longest_that_fits(plan)
    if fitting is None:
        raise ValueError(f"{problem.text}; {problem.remedy}")
    if config.max_model_len is not None:
        raise ValueError(
            f"{problem.text}; lower max_model_len to {fitting.max_model_len}, the largest that fits, or "
            f"{problem.remedy}"
        )
    logger.warning(
        "max_model_len lowered from %d to %d tokens, the largest that fits: %s; %s for more",
        wanted,
        fitting.max_model_len,
        problem.text,
        problem.remedy,
    )
    return fitting


class _Problem(NamedTuple):
    """Why a plan cannot be carried out."""

    text: str
    remedy: str  # beside a smaller max_model_len


class _Planner:
    """Plans for one length after the other, all out of the same free memory."""

    def __init__(self, config: EngineConfig, model: ModelConfig, backend: Backend, measure: Measure) -> None:
        self._config, self._backend, self._measure = config, backend, measure
        self._available = backend.available_memory()
        self._budget = int(config.gpu_memory_utilization * self._available)
        self._block_bytes = block_bytes(model, config.block_size, backend.kv_dtype.itemsize)

    def plan(self, seq_len: int) -> MemoryPlan:
        """Return the plan for sequences of up to seq_len tokens; it may have a problem."""
        config, size = self._config, self._config.block_size
        most = self._num_blocks(seq_len, beside=0)
        limits = Limits(
            num_tokens=max(1, min(config.max_num_batched_tokens, most * size)),  # each has a slot of its own
            num_seqs=config.max_num_seqs,
            seq_len=seq_len,
            block_size=size,
            num_slots=most * size,
        )
        use = self._measure(limits)
        return MemoryPlan(
            limits=limits,
            use=use,
            num_blocks=self._num_blocks(seq_len, beside=sum(use)),
            block_bytes=self._block_bytes,
            available=self._available,
        )

    def problem(self, plan: MemoryPlan) -> _Problem | None:
        """Return why the plan cannot be carried out, None if it can."""
        config, use = self._config, plan.use
        if use.weights > self._available:
            return _Problem(
                f"the weights take {use.weights} bytes but only {self._available} are free",
                "close other programs",
            )
        driver = f", {use.reserve} for the driver" if use.reserve else ""
        steps = f"steps of max_num_batched_tokens={config.max_num_batched_tokens}"
        needs = (
            f"beside {use.weights} bytes of weights{driver} and {use.workspace + use.activations} for {steps}"
        )
        if config.kv_cache_memory is None and plan.num_blocks == 0:
            return _Problem(
                f"{needs} no block of KV cache fits in the {self._budget} bytes that may be used",
                "lower max_num_batched_tokens or max_num_seqs, or raise gpu_memory_utilization",
            )
        if plan.total > self._available:
            return _Problem(
                f"kv_cache_memory is {config.kv_cache_memory} bytes but {needs} only "
                f"{max(0, self._available - sum(use))} are free",
                "lower kv_cache_memory, max_num_batched_tokens or max_num_seqs",
            )
        if plan.num_tokens < plan.max_model_len:
            needed = -(-plan.max_model_len // config.block_size) * plan.block_bytes
            memory = config.kv_cache_memory or plan.num_blocks * plan.block_bytes
            return _Problem(
                f"a sequence of max_model_len={plan.max_model_len} tokens needs {needed} bytes of KV cache "
                f"but there are {memory}, which hold {plan.num_tokens} tokens",
                f"{'set' if config.kv_cache_memory is None else 'raise'} kv_cache_memory",
            )
        return None

    def longest_that_fits(self, too_long: MemoryPlan) -> MemoryPlan | None:
        """Return the plan of the longest sequence of whole blocks that has no problem; None if all have.

        What is needed beside the KV cache grows with the length. So what is left beside the needs of a length
        that is too long is long enough, and what is left beside those of a length that fits is not exceeded.
        """
        size = self._config.block_size
        low = 1 if too_long.total > self._available else max(1, too_long.num_blocks)
        best = self.plan(low * size)
        if self.problem(best) is not None:
            return None
        high = self._num_blocks(too_long.max_model_len, beside=sum(best.use))
        high = min(high, (too_long.max_model_len - 1) // size)
        while low < high:  # in blocks: low fits, high + 1 does not
            middle = (low + high + 1) // 2
            plan = self.plan(middle * size)
            if self.problem(plan) is None:
                best, low = plan, middle
            else:
                high = middle - 1
        return best

    def _num_blocks(self, seq_len: int, *, beside: int) -> int:
        """Return the blocks of the KV cache beside so many bytes: the user's, or the backend's share."""
        if self._config.kv_cache_memory is not None:
            return self._config.kv_cache_memory // self._block_bytes
        useful = self._config.max_num_seqs * -(-seq_len // self._config.block_size)
        free = max(0, self._budget - beside)
        return min(self._backend.kv_cache_share(free) // self._block_bytes, useful)


def longest_position(model: ModelConfig) -> int:
    """Return how long a sequence the model's rotary embedding allows."""
    rope = model.rope
    if rope.rope_type in ("linear", "dynamic", "yarn"):
        original = rope.original_max_position_embeddings or model.max_position_embeddings
        return max(model.max_position_embeddings, int(original * rope.factor))
    return model.max_position_embeddings
