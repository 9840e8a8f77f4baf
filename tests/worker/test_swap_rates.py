"""find_swap_rates: the user's where given, else measured with a clock, and only where somebody will ask."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cupaged.backend.base import Limits, MemoryUse
from cupaged.config import EngineConfig
from cupaged.worker.memory_plan import MemoryPlan
from cupaged.worker.swap_rates import SwapRates, find_swap_rates, prefill_batch

BLOCK_BYTES = 16 << 20


class Machine:
    """Takes what each test says for a swap and for a prefill, one time after the other."""

    def __init__(self, *seconds: float) -> None:
        self.time = 1000.0
        self.swaps: list[int] = []
        self.prefills: list[int] = []
        self._seconds = list(seconds)

    def work(self, done: list[int]) -> Callable[[int], None]:
        def run(amount: int) -> None:
            done.append(amount)
            self.time += self._seconds.pop(0)

        return run


def measure(
    machine: Machine, *, num_blocks: int = 9, num_host_blocks: int = 7, seq_len: int = 300, **options: Any
) -> SwapRates:
    limits = Limits(
        num_tokens=256,
        num_seqs=2,
        seq_len=seq_len,
        block_size=16,
        num_slots=640,
        num_host_blocks=num_host_blocks,
    )
    plan = MemoryPlan(
        limits=limits,
        use=MemoryUse(0, 0, 0, 0),
        num_blocks=num_blocks,
        block_bytes=BLOCK_BYTES,
        available=1 << 40,
    )
    return find_swap_rates(
        EngineConfig.create("model", **options),
        plan,
        swap=machine.work(machine.swaps),
        prefill=machine.work(machine.prefills),
        clock=lambda: machine.time,
    )


def test_rates_are_what_was_moved_both_ways_and_computed_over_the_shortest_time() -> None:
    machine = Machine(0.0625, 0.03125, 0.03125, 0.0625, 0.0625, 0.0625, 0.125)

    rates = measure(machine)

    assert rates == SwapRates(bandwidth=2 * 4 * BLOCK_BYTES / 0.03125, prefill_rate=256 / 0.0625)
    assert (machine.swaps, machine.prefills) == ([4] * 4, [256] * 3)  # 64 MiB; as many as a step has


def test_slow_machine_is_asked_twice_as_the_first_answer_may_be_of_fresh_memory() -> None:
    machine = Machine(4.0, 0.25, 16.0, 8.0)

    assert measure(machine) == SwapRates(bandwidth=2 * 4 * BLOCK_BYTES / 0.25, prefill_rate=32.0)
    assert (machine.swaps, machine.prefills) == ([4, 4], [256, 256])


@pytest.mark.parametrize(("pools", "moved"), [((3, 7), 3), ((9, 2), 2)])
def test_no_more_is_moved_than_there_is(pools: tuple[int, int], moved: int) -> None:
    machine = Machine(1.0, 1.0, 1.0, 1.0)

    measure(machine, num_blocks=pools[0], num_host_blocks=pools[1], seq_len=40)

    assert (machine.swaps, machine.prefills) == ([moved] * 2, [40] * 2)


def test_what_the_user_says_is_not_measured() -> None:
    assert measure(Machine(), swap_bandwidth=25e9, prefill_rate=1000) == (25e9, 1000)
    assert measure(Machine(1.0, 1.0), swap_bandwidth=25e9) == (25e9, 256.0)
    assert measure(Machine(1.0, 1.0), prefill_rate=1000) == (8.0 * BLOCK_BYTES, 1000)


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_nothing_is_measured_where_nothing_is_weighed(mode: str) -> None:
    assert measure(Machine(), preemption_mode=mode) == (1.0, 1.0)
    assert measure(Machine(), num_host_blocks=0) == (1.0, 1.0)
    assert measure(Machine(), num_host_blocks=0, prefill_rate=1000) == (1.0, 1000)


@pytest.mark.parametrize("num_tokens", [1, 16, 33])
def test_prefill_fills_the_first_slots(num_tokens: int) -> None:
    batch = prefill_batch(num_tokens, 16)

    assert (batch.num_tokens, batch.num_seqs, batch.num_decodes, batch.num_logits) == (num_tokens, 1, 0, 0)
    assert batch.slot_mapping.tolist() == batch.positions.tolist() == list(range(num_tokens))
    assert batch.seq_lens.tolist() == [num_tokens]
    assert batch.query_start.tolist() == [0, num_tokens]
    assert np.array_equal(batch.block_tables, [np.arange(-(-num_tokens // 16))])
