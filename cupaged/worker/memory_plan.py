"""MemoryPlan: what a model takes of the device's memory, exactly, and what that leaves to the KV cache.

And what swapped blocks take of the host's, which is the same memory where the host is the device.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from cupaged.backend.base import Backend, Limits, MemoryUse
from cupaged.config import EngineConfig, ModelConfig
from cupaged.worker.kv_cache import block_bytes

logger = logging.getLogger("cupaged")

SWAP_SPACE = 4 << 30  # bytes of a host beside a device that the swap pool takes unasked,
SWAP_SHARE = 4  # but no more than one of so many parts of what is free: it is taken at once, and page-locked

Measure = Callable[[Limits], MemoryUse]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Where the memory goes, and so how many KV blocks there are and how long a sequence may be."""

    limits: Limits
    use: MemoryUse
    num_blocks: int
    block_bytes: int
    available: int  # bytes
    host_available: int | None = None  # bytes of the host's memory; None if that is what `available` counts

    @property
    def max_model_len(self) -> int:
        """Return the tokens of the longest sequence."""
        return self.limits.seq_len

    @property
    def num_host_blocks(self) -> int:
        """Return the blocks that can be swapped out."""
        return self.limits.num_host_blocks

    @property
    def swap_bytes(self) -> int:
        """Return the bytes of the swap pool, in either memory."""
        return self.num_host_blocks * self.block_bytes

    @property
    def swap_beside(self) -> int:
        """Return the bytes of the swap pool that come out of `available`."""
        return self.swap_bytes if self.host_available is None else 0

    @property
    def beside(self) -> int:
        """Return the bytes of `available` that are planned for all but the KV cache."""
        return sum(self.use) + self.swap_beside

    @property
    def total(self) -> int:
        """Return all bytes of `available` that are planned."""
        return self.beside + self.num_blocks * self.block_bytes

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
            "swap pool": self.swap_beside,
            "KV cache": self.num_blocks * self.block_bytes,
        }
        host = ""
        if self.num_host_blocks and self.host_available is not None:
            swap, free = self.swap_bytes / unit, self.host_available / unit
            host = f"; {self.num_host_blocks} blocks of swap pool are {swap:.3f} of {free:.3f} on the host"
        total, available = self.total / unit, self.available / unit
        return (
            f"memory in {name}: "
            + " + ".join(f"{part} {size / unit:.3f}" for part, size in parts.items() if size)
            + f" = {total:.3f} of {available:.3f} free; {self.num_blocks} KV blocks hold {self.num_tokens} "
            f"tokens, a sequence at most {self.max_model_len}{host}"
        )


def plan_memory(config: EngineConfig, model: ModelConfig, backend: Backend, measure: Measure) -> MemoryPlan:
    """Return the plan, before anything is allocated; ValueError says what does not fit, and what would.

    Unset, max_model_len is the model's, or the largest that fits; unset, kv_cache_memory is the backend's
    share of what gpu_memory_utilization leaves, and never more than max_num_seqs such sequences can use. Nor
    is the swap pool, be it set or not.
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
    planner.check_swap_space(wanted)
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
        self._sliding_window = model.max_sliding_window
        self._available = backend.available_memory()
        self._host_available = backend.host_memory()
        self._budget = int(config.gpu_memory_utilization * self._available)
        self._block_bytes = block_bytes(model, config.block_size, backend.kv_dtype.itemsize)

    def check_swap_space(self, seq_len: int) -> None:
        """Refuse a swap pool for which there is no memory; say so where one is wanted but there is none."""
        config, num_blocks = self._config, self._num_host_blocks(seq_len)
        needed = num_blocks * self._block_bytes
        free = self._available if self._host_available is None else self._host_available
        if needed > free:
            raise ValueError(
                f"swap_space={config.swap_space} GiB takes {needed} bytes of host memory but only {free} are "
                "free; lower swap_space"
            )
        if config.preemption_mode == "swap" and num_blocks == 0:
            logger.warning(
                "preemption_mode is 'swap' but swap_space has no room for a block of %d bytes, so sequences "
                "will be recomputed; raise swap_space",
                self._block_bytes,
            )

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
            num_host_blocks=self._num_host_blocks(seq_len),
            sliding_window=self._sliding_window,
        )
        plan = MemoryPlan(
            limits=limits,
            use=self._measure(limits),
            num_blocks=0,
            block_bytes=self._block_bytes,
            available=self._available,
            host_available=self._host_available,
        )
        return replace(plan, num_blocks=self._num_blocks(seq_len, beside=plan.beside))

    def problem(self, plan: MemoryPlan) -> _Problem | None:
        """Return why the plan cannot be carried out, None if it can."""
        config, use = self._config, plan.use
        if use.weights > self._available:
            return _Problem(
                f"the weights take {use.weights} bytes but only {self._available} are free",
                "close other programs",
            )
        driver = f", {use.reserve} for the driver" if use.reserve else ""
        swap = plan.swap_beside
        swapped, lower = (f", {swap} for swap_space", "lower swap_space,") if swap else ("", "lower")
        steps = f"steps of max_num_batched_tokens={config.max_num_batched_tokens}"
        needs = (
            f"beside {use.weights} bytes of weights{driver}{swapped} and {use.workspace + use.activations} "
            f"for {steps}"
        )
        if config.kv_cache_memory is None and plan.num_blocks == 0:
            return _Problem(
                f"{needs} no block of KV cache fits in the {self._budget} bytes that may be used",
                f"{lower} max_num_batched_tokens or max_num_seqs, or raise gpu_memory_utilization",
            )
        if plan.total > self._available:
            return _Problem(
                f"kv_cache_memory is {config.kv_cache_memory} bytes but {needs} only "
                f"{max(0, self._available - plan.beside)} are free",
                f"{lower} kv_cache_memory, max_num_batched_tokens or max_num_seqs",
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
        high = self._num_blocks(too_long.max_model_len, beside=best.beside)
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
        free = max(0, self._budget - beside)
        return min(self._backend.kv_cache_share(free) // self._block_bytes, self._useful_blocks(seq_len))

    def _num_host_blocks(self, seq_len: int) -> int:
        """Return the blocks of the swap pool: the user's, or where it is another memory a share of that."""
        config, free = self._config, self._host_available
        if config.preemption_mode == "recompute":
            return 0
        if config.swap_space is not None:
            wanted = int(config.swap_space * 2**30)
        else:
            wanted = 0 if free is None else min(SWAP_SPACE, free // SWAP_SHARE)
        return min(wanted // self._block_bytes, self._useful_blocks(seq_len))

    def _useful_blocks(self, seq_len: int) -> int:
        """Return how many blocks max_num_seqs such sequences have at most."""
        return self._config.max_num_seqs * -(-seq_len // self._config.block_size)


def longest_position(model: ModelConfig) -> int:
    """Return how long a sequence the model's rotary embedding allows."""
    rope = model.rope
    if rope.rope_type in ("linear", "dynamic", "yarn"):
        original = rope.original_max_position_embeddings or model.max_position_embeddings
        return max(model.max_position_embeddings, int(original * rope.factor))
    return model.max_position_embeddings
