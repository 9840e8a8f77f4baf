"""SwapRates: how fast this machine swaps blocks and computes prompts, for the scheduler to weigh.

Measured at load, where somebody will ask and the user has not said it; a scheduler reads no clock.
"""

import logging
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from cupaged.batch import Batch, padding_batch
from cupaged.config import EngineConfig
from cupaged.worker.memory_plan import MemoryPlan

logger = logging.getLogger("cupaged")

SWAP_BYTES = 64 << 20  # at most, that are moved out and back to see how long it takes
PREFILL_TOKENS = 512  # likewise, that are computed: weights are read, and paid for, once a step
TRIES = 4  # the best counts, and never the first alone: it may touch memory for the first time
ENOUGH = 0.2  # seconds, after which there is no third


class SwapRates(NamedTuple):
    """What the two ways out cost when blocks run out."""

    bandwidth: float  # bytes per second of a swap, one way
    prefill_rate: float  # tokens per second of a recompute


def find_swap_rates(
    config: EngineConfig,
    plan: MemoryPlan,
    *,
    swap: Callable[[int], None],
    prefill: Callable[[int], None],
    clock: Callable[[], float] = time.perf_counter,
) -> SwapRates:
    """Return the user's rates, else measured ones: swap(num_blocks) out and back, prefill(num_tokens).

    Both return when the device is done. Where there is nothing to weigh, a rate that nobody asks for is 1.
    """
    bandwidth, rate = config.swap_bandwidth, config.prefill_rate
    if not plan.num_host_blocks or config.preemption_mode != "auto":
        return SwapRates(bandwidth or 1.0, rate or 1.0)
    if bandwidth is None:
        most = max(1, SWAP_BYTES // plan.block_bytes)
        num_blocks = min(most, plan.num_blocks, plan.num_host_blocks)
        bandwidth = 2 * num_blocks * plan.block_bytes / _seconds(swap, num_blocks, clock)
    if rate is None:
        num_tokens = min(PREFILL_TOKENS, plan.limits.num_tokens, plan.max_model_len)
        rate = num_tokens / _seconds(prefill, num_tokens, clock)
    logger.info("blocks are swapped at %.3g GB/s, computed anew at %.4g tokens/s", bandwidth / 1e9, rate)
    return SwapRates(bandwidth, rate)


def _seconds(work: Callable[[int], None], amount: int, clock: Callable[[], float]) -> float:
    times: list[float] = []
    while len(times) < 2 or (len(times) < TRIES and sum(times) < ENOUGH):
        began = clock()
        work(amount)
        times.append(clock() - began)
    return max(min(times), 1e-9)


def prefill_batch(num_tokens: int, block_size: int) -> Batch:
    """Return a prefill of so many tokens 0 into the first blocks of the cache, which samples nothing."""
    num_blocks = -(-num_tokens // block_size)
    batch = padding_batch(num_tokens, 1, num_decodes=0, num_logits=0, table_width=num_blocks)
    batch.arrays.query_start[1:] = batch.seq_lens[0] = num_tokens
    batch.positions[:] = batch.slot_mapping[:] = np.arange(num_tokens)
    batch.block_tables[0] = np.arange(num_blocks)
    return batch
