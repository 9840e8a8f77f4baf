"""The njit functions that Python calls in every step. What a scheduler works on comes as words.

They plan, pack and take back: plan.py, pack.py and progress.py do the work.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cupaged.batch import SMALLEST, buffer_size, view
from cupaged.jit import njit
from cupaged.scheduler.allocator import create_host_blocks
from cupaged.scheduler.pack import Packed, measure, pack_batch
from cupaged.scheduler.plan import Costs, Head, plan_running
from cupaged.scheduler.pools import Pools, create_moves
from cupaged.scheduler.progress import advance, apply_output
from cupaged.scheduler.state import Rows, SamplingRows, create_rows, create_sampling_rows
from cupaged.words import Words, reader


class State(NamedTuple):
    """All that a step changes, and what its plan depends on."""

    rows: Rows
    sampling: SamplingRows
    pools: Pools
    budget: int  # tokens
    sliding_window: int  # tokens, 0 = all
    costs: Costs
    turns: NDArray[np.int64]  # [num_rows + 1], as plan_running has it
    swapped: NDArray[np.bool_]  # [num_rows], as grow_groups has it


def create_state(
    rows: Rows, sampling: SamplingRows, pools: Pools, *, budget: int, sliding_window: int, costs: Costs
) -> State:
    """Return the state of a scheduler of these rows and blocks."""
    num_rows = rows.running.size
    turns, swapped = np.empty(num_rows + 1, np.int64), np.empty(num_rows, np.bool_)
    return State(rows, sampling, pools, budget, sliding_window, costs, turns, swapped)


def example_state() -> State:
    """Return a state of the types that all have."""
    blocks = create_host_blocks(1, 1, table_shape=(1, 1))
    pools = Pools(blocks, blocks, create_moves(1, 1))
    rows, sampling = create_rows(1, 1), create_sampling_rows(1)
    return create_state(rows, sampling, pools, budget=1, sliding_window=0, costs=Costs(0.0, 0.0))


def example_packed() -> Packed:
    """Return where a step is written, likewise."""
    return Packed(view(np.empty(buffer_size(SMALLEST, 0), np.int32), SMALLEST), np.empty(1, np.int64))


_read_state = reader(example_state())
_read_packed = reader(example_packed())


@njit
def plan_step(
    words: Words, head_tokens: int, head_priority: int, is_in_flight: bool
) -> tuple[int, int, int, int, int]:
    """Plan the running rows; return how many groups were preempted for it, and what measure_step does.

    The head of the queue would compute head_tokens tokens if it entered now, 0 if it cannot.
    """
    state = _read_state(words)
    limits = state.budget, Head(head_tokens, head_priority), state.costs, is_in_flight
    num_preempted = plan_running(state.rows, state.pools, state.turns, limits, state.swapped)
    return num_preempted, *measure(state.rows, state.sampling, state.pools.device, state.pools.moves)


@njit
def measure_step(words: Words) -> tuple[int, int, int, int]:
    """Return the planned step's tokens, sequences, widest block table and enough words of tail."""
    state = _read_state(words)
    return measure(state.rows, state.sampling, state.pools.device, state.pools.moves)


@njit
def pack_step(words: Words, packed: Words, step: int) -> None:
    """Write the planned step where `packed` says, and count it as submitted, as number `step`."""
    state = _read_state(words)
    rows, blocks = state.rows, state.pools.device
    pack_batch(rows, state.sampling, blocks, state.pools.moves, _read_packed(packed))
    advance(rows, blocks, step)


@njit
def take_back_step(
    words: Words,
    packed: Words,
    token_ids: NDArray[np.int32],
    num_tokens: NDArray[np.int32],
    num_appended: NDArray[np.int32],
    reasons: NDArray[np.int8],
) -> bool:
    """Append what a step sampled and release the rows that end; what is written and returned, see there."""
    state, step = _read_state(words), _read_packed(packed)
    output, outcome = (token_ids, num_tokens), (num_appended, reasons)
    return apply_output(state.rows, state.pools, step, output, state.sliding_window, outcome)
