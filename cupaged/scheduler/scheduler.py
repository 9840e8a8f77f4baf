"""Scheduler: which sequences compute how many tokens in the next step, and what a finished step changes.

It owns the queue, the rows and the block manager; it never touches a model or a device, and reads no clock.
Loops over rows, tokens and blocks are njit in plan.py, enter.py, progress.py and pack.py; here a group costs
Python only when it enters or leaves.
"""

from collections import deque
from collections.abc import Sequence as Items
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cupaged.batch import Batch, StepOutput, bucket_for
from cupaged.scheduler.admission import Admission
from cupaged.scheduler.block_manager import BlockManager
from cupaged.scheduler.counters import create_counters
from cupaged.scheduler.group_queue import GroupQueue
from cupaged.scheduler.invariants import check_groups, check_rows
from cupaged.scheduler.pack import BatchBuffer
from cupaged.scheduler.preemption import Preemption
from cupaged.scheduler.progress import release_rows, reorder_beams
from cupaged.scheduler.row_table import RowTable
from cupaged.scheduler.scheduler_config import SchedulerConfig
from cupaged.scheduler.state import NEVER, NO_SERIAL
from cupaged.scheduler.step import create_state, measure_step, pack_step, plan_step, take_back_step
from cupaged.sequence import NOT_FINISHED, FinishReason, Sequence, SequenceGroup, SequenceStatus
from cupaged.words import Words, to_words


class Update(NamedTuple):
    """What a step changed, by the batch's sequences."""

    sequences: list[Sequence | None]  # None: its row was given up meanwhile, the result is discarded
    num_tokens: NDArray[np.int32]  # how many of output.token_ids[i] were appended; 0 for a beam
    finish_reasons: NDArray[np.int8]  # FinishReason or NOT_FINISHED


class Scheduler:
    """Groups by priority, then arrival, under one token budget; preemption by swap or recompute.

    A group finishes within (max_num_seqs + 1) * sum(num_sequences * max_total_tokens) steps, the sum over
    itself and the unfinished groups before it in that order, whatever arrives behind it: the first one is
    never preempted, and each of its rows has a turn at least every max_num_seqs + 1 steps.
    """

    def __init__(self, config: SchedulerConfig, counters: NDArray[np.int64] | None = None) -> None:
        """Allocate all state; `counters`, by Counter, are added to and may outlive the scheduler."""
        # With more, a resumed row could need an unknown token that last_token no longer holds.
        assert config.num_batches in (1, 2), f"num_batches is {config.num_batches}"
        self.config = config
        self.counters = create_counters() if counters is None else counters
        try:
            self.block_manager = BlockManager(config, self.counters)
            self._table = RowTable(config.max_num_seqs, config.max_model_len)
        except MemoryError as error:
            raise ValueError(
                f"no memory for the tables of max_num_seqs={config.max_num_seqs} sequences of up to "
                f"{config.max_model_len} tokens ({error}); lower max_num_seqs or max_model_len"
            ) from None
        num_slots = config.num_blocks * config.block_size
        self._budget = min(config.max_num_batched_tokens, num_slots)  # no more are planned for by the worker
        self._queue = GroupQueue()
        self._admission = Admission(config, self._table, self.block_manager, self.counters)
        self._preemption = Preemption(config, self._table, self.block_manager, self._queue)
        self._num_arrived = 0
        self._step = 0
        self._last_admission = 0
        self._in_flight: deque[tuple[Batch, Words]] = deque()
        table_width = self.block_manager.blocks_for(config.max_model_len)
        largest = bucket_for(self._budget, min(config.max_num_seqs, self._budget), table_width)
        self._buffers = deque(BatchBuffer(largest) for _ in range(config.num_batches))
        self._state = create_state(
            self._table.rows,
            self._table.sampling,
            self.block_manager.pools,
            budget=self._budget,
            sliding_window=config.sliding_window,
            costs=self._preemption.costs,
        )
        self._words = to_words(self._state)

    @property
    def num_waiting(self) -> int:
        """Return how many groups wait, the preempted and swapped ones included."""
        return len(self._queue)

    @property
    def num_running(self) -> int:
        """Return how many sequences run."""
        return self._table.num_running

    @property
    def num_free_blocks(self) -> int:
        """Return how many KV blocks nobody holds, those with cached prefixes included."""
        return self.block_manager.num_free

    @property
    def num_used_blocks(self) -> int:
        """Return how many KV blocks are held, shared ones counted once."""
        return self.block_manager.total - self.block_manager.num_free

    @property
    def num_stored_tokens(self) -> int:
        """Return how many slots of the blocks in use hold a token once the submitted steps are done."""
        rows, running = self._table.rows, self._table.rows.running[: self.num_running]
        return self.block_manager.count_tokens(running, rows.at.num_computed_tokens[running])

    def has_unfinished(self) -> bool:
        """Return whether any group waits or runs."""
        return len(self._queue) > 0 or self.num_running > 0

    # What comes and goes.

    def check(self, group: SequenceGroup) -> None:
        """Raise ValueError, naming the field, if the group could never run; any thread may ask."""
        config = self.config
        num_prompt, most = len(group.prompt_token_ids), group.max_total_tokens
        if num_prompt == 0:
            raise ValueError("the prompt has no tokens; give at least one")
        if most > config.max_model_len:
            raise ValueError(
                f"{most} tokens of prompt and output are asked for but max_model_len is "
                f"{config.max_model_len}; shorten the prompt, lower max_tokens or raise max_model_len"
            )
        if num_prompt >= most:
            raise ValueError(
                f"the prompt has {num_prompt} tokens but prompt and output may have {most}; "
                "shorten the prompt"
            )
        if config.policy == "fcfs" and group.priority != 0:
            raise ValueError(
                f"priority is {group.priority} but scheduling_policy is 'fcfs'; leave priority out, or start "
                "the engine with scheduling_policy='priority'"
            )
        name = "beam_width" if group.is_beam else "n" if group.params.best_of is None else "best_of"
        n = group.num_sequences
        if n > config.max_num_seqs:
            raise ValueError(
                f"{name} is {n} but max_num_seqs is {config.max_num_seqs}; lower {name} or raise max_num_seqs"
            )
        needed = self.block_manager.most_blocks(num_prompt, most, n)
        if needed > config.num_blocks:
            raise ValueError(
                f"{name} is {n}: so many sequences of up to {most} tokens, {num_prompt} in common, may "
                f"take {needed} KV blocks but there are {config.num_blocks}; lower {name} or max_tokens, or "
                "give the cache more memory"
            )

    def add(self, group: SequenceGroup) -> None:
        """Queue a new group; ValueError as from `check`."""
        assert group.status is SequenceStatus.WAITING, f"{group.request_id} is {group.status.name}"
        self.check(group)
        group.arrival = self._num_arrived
        self._num_arrived += 1
        self._queue.push(group)

    def finish(self, seq: Sequence, reason: FinishReason) -> None:
        """End a sequence in any state, free its row and blocks; one that has finished stays as it is."""
        if seq.finish_reason is not None:
            return
        assert not seq.group.is_beam, "beams end together, by finish_group"
        if seq.row >= 0:
            rows, group = self._table.rows, self._table.of_group(seq.group)
            if rows.at.is_pending[group].any() and not rows.at[seq.row].is_pending:
                self._preemption.restart(seq.group)  # the others wait for the prompt that it was computing
        if seq.row >= 0:
            release_rows(self._table.rows, self.block_manager.pools, np.array([seq.row], np.int32))
        self._end(seq, reason)

    def finish_group(self, group: SequenceGroup, reason: FinishReason) -> None:
        """End all sequences of a group that have not ended."""
        loaded = self._table.of_group(group)
        if loaded.size and loaded[0] >= 0:
            release_rows(self._table.rows, self.block_manager.pools, loaded)
        for seq in group.unfinished:
            self._end(seq, reason)

    def continue_beams(self, group: SequenceGroup, parents: Items[int], token_ids: Items[int]) -> None:
        """Let beam i be what beam parents[i] was and then token_ids[i]; others take no part from then on.

        What steps in flight bring back for the group is discarded.
        """
        assert group.is_beam, f"{group.request_id} is no beam search"
        assert 0 < len(parents) == len(token_ids) <= group.num_sequences, f"{parents} and {token_ids}"
        assert group.sequences[0].row >= 0, "beams are chosen when the last one has reported, from its row"
        table, choices = self._table, np.array((parents, token_ids), np.int32)
        beams, serial = table.of_group(group), table.new_serial()
        reorder_beams(table.rows, self.block_manager.pools, beams, choices, serial)

    def reset_prefix_cache(self) -> None:
        """Find nothing again that is cached, or in use, by now; blocks in use stay with who holds them."""
        self.block_manager.reset_prefix_cache()
        at = self._table.rows.at
        at.num_registered[at.serial != NO_SERIAL] = NEVER

    # A step.

    def schedule(self) -> Batch | None:
        """Plan and pack the next step; None if nothing can run before a step in flight comes back."""
        assert len(self._in_flight) < len(self._buffers), "update() the oldest batch in flight first"
        self._preemption.preempted.clear()
        self._make_way()
        # 1 running: decodes, then prefill chunks; who finds no block preempts the last group.
        planned, *size = self._plan_running()
        # 2 swapped and 3 waiting: one queue by priority and arrival, so the swapped return before new ones.
        if self._admit(self._budget - planned):
            planned, *size = measure_step(self._words)
        # 4 pack.
        if planned:
            return self._pack(planned, *size)
        self._preemption.cancel_swaps()
        return None

    def update(self, batch: Batch, output: StepOutput) -> Update:
        """Take the oldest batch in flight back: append its tokens, end and free sequences."""
        oldest, packed = self._in_flight.popleft()
        assert oldest is batch, "batches come back in the order they went"
        sequences: list[Sequence | None] = self._table.by_row.take(batch.rows).tolist()
        num_appended = np.empty(batch.num_seqs, np.int32)
        reasons = np.empty(batch.num_seqs, np.int8)
        columns = output.token_ids, output.num_tokens, num_appended, reasons
        if not take_back_step(self._words, packed, *columns):
            return Update(sequences, num_appended, reasons)
        for i in np.flatnonzero(num_appended < 0).tolist():
            sequences[i] = None
        for i in np.flatnonzero(reasons != NOT_FINISHED).tolist():
            seq = sequences[i]
            assert seq is not None
            self._end(seq, FinishReason(int(reasons[i])))
        return Update(sequences, np.maximum(num_appended, 0), reasons)

    def _end(self, seq: Sequence, reason: FinishReason) -> None:
        """Note that a sequence has ended, whose blocks are free."""
        seq.finish_reason = reason
        if seq.row >= 0:
            self._table.drop(seq)
        if not seq.group.unfinished:
            seq.group.status = SequenceStatus.FINISHED
            self._queue.remove(seq.group)

    def _make_way(self) -> None:
        """Preempt for the head of the queue if it goes before one that runs and cannot enter."""
        head = self._queue.head()
        if head is not None and self.config.policy == "priority":
            fit = self._admission.fit(head)
            if fit.num_tokens > 0 and not self._admission.can_enter(fit):
                self._preemption.make_way(head, self._admission.fit)

    def _plan_running(self) -> list[int]:
        """Plan the running rows, queue the groups preempted for it; return what measure_step does."""
        while True:
            head_tokens = head_priority = 0
            group = self._queue.head()
            is_scarce = self.num_running >= self._budget
            if group in self._preemption.preempted:  # it enters in no step that it was preempted in
                group = None
            if group is not None and (is_scarce or self.config.policy == "priority"):
                head_tokens, head_priority = self._admission.admissible_tokens(group), group.priority
            if is_scarce:
                self._order_turns(head_priority)
            is_in_flight = len(self._in_flight) > 0
            num_preempted, *size = plan_step(self._words, head_tokens, head_priority, is_in_flight)
            if num_preempted:
                self._preemption.requeue(self._state.swapped[:num_preempted].tolist())
            # All whose turn it was have been preempted: the turn goes to the others.
            if size[0] or not num_preempted:
                return size

    def _order_turns(self, head_priority: int) -> None:
        """Order the places of `running` and, as num_running, the queue: least recently scheduled first."""
        rows, num_running = self._table.rows, self.num_running
        running = rows.running[:num_running]
        last_turns = np.append(rows.at.last_scheduled[running], self._last_admission)
        order = np.lexsort((last_turns, np.append(rows.at.priority[running], head_priority)))
        self._state.turns[: num_running + 1] = order

    def _admit(self, budget: int) -> int:
        """Let waiting groups enter in order until one cannot; return the tokens planned for them."""
        left = budget
        while left:
            group = self._queue.head()
            if group is None or group in self._preemption.preempted:
                break
            if group.status is not SequenceStatus.SWAPPED and len(group.unfinished) > len(self._table.free):
                break  # before a look-up in the prefix cache, in every step in which rows are lacking
            fit = self._admission.fit(group)
            if not self._admission.can_enter(fit):
                break
            self._queue.remove(group)
            left -= self._admission.enter(group, fit, left)
            self._last_admission = self._step + 1
        if left < budget:
            self._note_growth()
        return budget - left

    def _note_growth(self) -> None:
        """Let the next steps have the tables that have grown for who has entered."""
        rows, sampling = self._table.rows, self._table.sampling
        if rows is not self._state.rows or sampling is not self._state.sampling:
            self._state = self._state._replace(rows=rows, sampling=sampling)
            self._words = to_words(self._state)

    def _pack(self, num_tokens: int, num_seqs: int, table_width: int, num_tail: int) -> Batch:
        """Pack the plan into the buffer whose turn it is and count it as in flight."""
        self._step += 1
        buffer = self._buffers[0]
        self._buffers.rotate(-1)
        bucket = bucket_for(num_tokens, num_seqs, table_width)
        arrays, packed, _ = buffer.views(bucket, num_tail)
        pack_step(self._words, packed, self._step)
        batch = Batch(buffer.words, bucket, buffer.serials[:num_seqs], arrays=arrays)
        self._in_flight.append((batch, packed))
        return batch

    def check_invariants(self) -> None:
        """Assert that blocks, rows, queue and the order of those that run agree."""
        self.block_manager.check_invariants()
        check_rows(self._table, self.block_manager, len(self._in_flight))
        check_groups(self._table, self._queue)
