"""Preemption: who gives up blocks, rows and its place among those that run, and how."""

from collections.abc import Callable
from math import inf

import numpy as np
from numpy.typing import NDArray

from cupaged.scheduler.admission import Fit
from cupaged.scheduler.block_manager import BlockManager
from cupaged.scheduler.enter import obtainable_blocks
from cupaged.scheduler.group_queue import GroupQueue
from cupaged.scheduler.plan import Costs, preempt_last
from cupaged.scheduler.progress import release_rows
from cupaged.scheduler.row_table import RowTable
from cupaged.scheduler.scheduler_config import SchedulerConfig
from cupaged.sequence import SequenceGroup, SequenceStatus

_RECOMPUTE = Costs(swap=inf, recompute=1.0)


class Preemption:
    """Takes groups out of `running`, from its end, and queues them."""

    def __init__(
        self, config: SchedulerConfig, table: RowTable, manager: BlockManager, queue: GroupQueue
    ) -> None:
        """Work on the scheduler's rows, blocks and queue."""
        self.costs = _costs(config)
        self.preempted: list[SequenceGroup] = []  # in the step being planned
        self._table, self._manager, self._queue = table, manager, queue

    def make_way(self, head: SequenceGroup, measure: Callable[[SequenceGroup], Fit]) -> None:
        """Make room for what the head of the queue needs, at the cost of groups of lower priority.

        They are preempted from the end, if that makes enough room at all. Where rows are lacking, swapped
        groups behind the head give theirs up.
        """
        table, manager, lower, fit = self._table, self._manager, self._lower_rows(head), measure(head)
        behind = [group for group in self._queue if group is not head]
        swapped = [group for group in behind if group.status is SequenceStatus.SWAPPED]
        num_rows = len(table.free) + lower.size + sum(len(group.unfinished) for group in swapped)
        num_blocks = obtainable_blocks(manager.blocks, lower, fit.found[fit.first :])
        spare = manager.watermark if table.num_running > lower.size else 0
        if fit.num_rows > num_rows or fit.num_blocks + spare > num_blocks:
            return
        while lower.size:
            lacks_rows = fit.num_rows > len(table.free)
            kept = manager.watermark + table.num_running  # those that run may each take one in this step
            if not lacks_rows and fit.num_blocks + kept <= manager.num_free:
                return
            costs = _RECOMPUTE if lacks_rows else self.costs  # who is swapped keeps its rows
            self.requeue([preempt_last(table.rows, manager.pools, costs)])
            lower, fit = self._lower_rows(head), measure(head)  # which may have found blocks with the victim
        while fit.num_rows > len(table.free):
            self.restart(swapped.pop())

    def _lower_rows(self, head: SequenceGroup) -> NDArray[np.int32]:
        """Return the running rows of lower priority than the head."""
        rows = self._table.rows
        running = rows.running[: self._table.num_running]
        return running[np.searchsorted(rows.at.priority[running], head.priority, side="right") :]

    def requeue(self, swapped: list[bool]) -> None:
        """Queue the groups that were taken out of `running`, the last one first."""
        rows = self._table.rows
        end = self._table.num_running
        groups: list[SequenceGroup] = []
        for is_swapped in reversed(swapped):  # the one preempted last stands first
            group = self._table.by_row[rows.running[end]].group
            end += len(group.unfinished)
            group.status = SequenceStatus.SWAPPED if is_swapped else SequenceStatus.PREEMPTED
            groups.append(group)
        for group in groups:
            if group.status is SequenceStatus.PREEMPTED:
                self._table.unload(group)
            group.num_preemptions += 1
            self._queue.push(group)
            self.preempted.append(group)

    def restart(self, group: SequenceGroup) -> None:
        """Take a group's rows and blocks away; it computes again what it knows when it has its turn."""
        release_rows(self._table.rows, self._manager.pools, self._table.of_group(group))
        self._table.unload(group)
        if group.status is SequenceStatus.RUNNING:
            self._queue.push(group)
        group.status = SequenceStatus.PREEMPTED

    def cancel_swaps(self) -> None:
        """Recompute who was to be swapped out: in a step that computes nothing, nothing can move either."""
        for group in self.preempted:
            if group.status is SequenceStatus.SWAPPED:
                self.restart(group)
        self._manager.moves.num[:] = 0


def _costs(config: SchedulerConfig) -> Costs:
    """Return what preempting costs by the configuration's mode and model."""
    if config.preemption_mode == "recompute":
        return _RECOMPUTE
    if config.preemption_mode == "swap":
        return Costs(swap=0.0, recompute=1.0)
    seconds = 2 * config.block_bytes / config.swap_bandwidth
    return Costs(swap=seconds, recompute=1 / config.prefill_rate)
