"""SchedulerConfig: all that a Scheduler's plans depend on beside the requests; a trace records it."""

from dataclasses import dataclass

from cupaged.config import PreemptionMode, SchedulingPolicy

UNMEASURED = 1.0  # a rate that no plan depends on


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Sizes of the pools, limits of a step, and the words of policy; EngineConfig and the worker fill it."""

    num_blocks: int
    block_size: int  # tokens
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_batches: int = 2  # steps in flight at a time, 1 or 2
    num_host_blocks: int = 0  # of the swap pool
    sliding_window: int = 0  # tokens that any layer looks back at most, its own included; 0 = all
    enable_prefix_caching: bool = True
    policy: SchedulingPolicy = "fcfs"
    preemption_mode: PreemptionMode = "auto"
    # The cost model of preemption_mode "auto", seconds of a victim of b blocks and t computed tokens:
    # swap 2 * b * block_bytes / swap_bandwidth, recompute t / prefill_rate.
    block_bytes: int = 1
    swap_bandwidth: float = UNMEASURED  # bytes per second, one way
    prefill_rate: float = UNMEASURED  # tokens per second
