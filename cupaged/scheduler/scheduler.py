"""Scheduler: which sequences compute how many tokens in the next step, and what a finished step changes.

It owns the waiting queue, the rows and the block manager; it never touches a model or a device. Loops
over rows, tokens and blocks are njit in plan.py and pack.py; here a sequence costs Python only when it
enters or leaves.
"""

from collections import OrderedDict, deque
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cupaged.batch import Batch, StepOutput, bucket_for
from cupaged.sampling_params import SamplingParams
from cupaged.scheduler.block_manager import BlockManager
from cupaged.scheduler.pack import BatchBuffer, measure, pack_batch
from cupaged.scheduler.plan import StepRows, advance, apply_output, compact, plan_running, release
from cupaged.scheduler.state import NO_SERIAL, create_rows, create_sampling_rows, load_row, load_sampling_row
from cupaged.sequence import NOT_FINISHED, FinishReason, Sequence, SequenceStatus

_NO_TURNS = np.empty(0, np.int64)


class Update(NamedTuple):
    """What a step changed, by the batch's sequences."""

    sequences: list[Sequence | None]  # None: finished while the step was in flight, its result is discarded
    num_tokens: NDArray[np.int32]  # how many of output.token_ids[i] were appended
    finish_reasons: NDArray[np.int8]  # FinishReason or NOT_FINISHED


class Scheduler:
    """First come, first served, under one token budget, with preemption by recompute."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        num_batches: int = 2,
    ) -> None:
        """Allocate all state; at most `num_batches` (1 or 2) steps are in flight at a time."""
        # With more, a resumed row could need an unknown token that last_token no longer holds.
        assert num_batches in (1, 2), f"num_batches is {num_batches}"
        try:
            self.block_manager = BlockManager(
                num_blocks=num_blocks,
                block_size=block_size,
                num_rows=max_num_seqs,
                max_model_len=max_model_len,
            )
            self._rows = create_rows(max_num_seqs, max_model_len)
            self._sampling = create_sampling_rows(max_num_seqs)
        except MemoryError as error:
            raise ValueError(
                f"no memory for the tables of max_num_seqs={max_num_seqs} sequences of up to {max_model_len} "
                f"tokens ({error}); lower max_num_seqs or max_model_len"
            ) from None
        self.max_model_len = max_model_len
        self.max_num_batched_tokens = max_num_batched_tokens
        self.num_preemptions = 0
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._by_row: NDArray[np.object_] = np.full(max_num_seqs, None, np.object_)
        self._waiting: OrderedDict[Sequence, None] = OrderedDict()  # the preempted first, then by arrival
        self._num_admitted = 0
        self._step = 0
        self._last_admission = 0
        self._in_flight: deque[Batch] = deque()
        num_tokens = min(max_num_batched_tokens, num_blocks * block_size)  # each has a slot of its own
        table_width = self.block_manager.blocks_for(max_model_len)
        largest = bucket_for(num_tokens, min(max_num_seqs, num_tokens), table_width)
        self._buffers = deque(BatchBuffer(largest) for _ in range(num_batches))

    @property
    def num_waiting(self) -> int:
        """Return how many sequences wait, the preempted ones included."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Return how many sequences hold blocks."""
        return int(self._rows.num_running[0])

    @property
    def num_used_blocks(self) -> int:
        """Return how many KV blocks are held."""
        return self.block_manager.total - self.block_manager.num_free

    @property
    def num_cached_tokens(self) -> int:
        """Return how many tokens the blocks in use hold once the submitted steps are done."""
        return int(self._rows.num_computed_tokens[self._rows.running[: self.num_running]].sum())

    def has_unfinished(self) -> bool:
        """Return whether any sequence waits or runs."""
        return bool(self._waiting) or self.num_running > 0

    def add(self, seq: Sequence) -> None:
        """Queue a new sequence behind all others; ValueError if it could never run."""
        assert seq.status is SequenceStatus.WAITING, f"{seq.request_id} is {seq.status.name}"
        num_prompt = len(seq.prompt_token_ids)
        if num_prompt == 0:
            raise ValueError("the prompt has no tokens; give at least one")
        if seq.max_total_tokens > self.max_model_len:
            raise ValueError(
                f"{seq.max_total_tokens} tokens of prompt and output are asked for but max_model_len is "
                f"{self.max_model_len}; shorten the prompt, lower max_tokens or raise max_model_len"
            )
        if num_prompt >= seq.max_total_tokens:
            raise ValueError(
                f"the prompt has {num_prompt} tokens but prompt and output may have {seq.max_total_tokens}; "
                "shorten the prompt"
            )
        self._waiting[seq] = None

    def schedule(self) -> Batch | None:
        """Plan and pack the next step; None if nothing can run before a step in flight comes back."""
        assert len(self._in_flight) < len(self._buffers), "update() the oldest batch in flight first"
        # 1 running: decodes, then prefill chunks; whoever finds no free block preempts the newest.
        planned, num_preempted = self._plan_running()
        # 2 swapped: none, preempted rows are recomputed; they wait at the head of the queue.
        # 3 waiting: first come, first served, while rows, blocks and budget last.
        if num_preempted == 0:
            planned += self._admit(self.max_num_batched_tokens - planned)
        # 4 pack.
        return self._pack() if planned else None

    def update(self, batch: Batch, output: StepOutput) -> Update:
        """Take the oldest batch in flight back: append its tokens, end and free sequences."""
        oldest = self._in_flight.popleft()
        assert oldest is batch, "batches come back in the order they went"
        num_appended = np.empty(batch.num_seqs, np.int32)
        reasons = np.empty(batch.num_seqs, np.int8)
        sequences: list[Sequence | None] = self._by_row[batch.rows].tolist()
        step = StepRows(batch.rows, batch.serials, batch.flags, output.token_ids, output.num_tokens)
        apply_output(self._rows, self.block_manager.blocks, step, num_appended, reasons)
        for i in np.flatnonzero(num_appended < 0).tolist():
            sequences[i] = None
        for i in np.flatnonzero(reasons != NOT_FINISHED).tolist():
            seq = sequences[i]
            assert seq is not None
            self._forget(seq, FinishReason(int(reasons[i])))
        return Update(sequences, np.maximum(num_appended, 0), reasons)

    def finish(self, seq: Sequence, reason: FinishReason) -> None:
        """End a sequence in any state, free its row and blocks; one that has finished stays as it is."""
        if seq.status is SequenceStatus.FINISHED:
            return
        if seq.row >= 0:
            release(self._rows, self.block_manager.blocks, seq.row)
            compact(self._rows)
        self._forget(seq, reason)

    def warm_up(self) -> None:
        """Plan, pack and take back one made-up step, so that no request waits for the compiler.

        Only for a scheduler that has had no sequence yet; it is as new afterwards.
        """
        seq = Sequence(
            request_id="warm-up",
            prompt_token_ids=np.zeros(1, np.int32),
            params=SamplingParams(),
            max_total_tokens=2,
            stop_token_ids=(),
        )
        self.add(seq)
        batch = self.schedule()
        assert batch is not None, "nothing else runs"
        self.update(batch, StepOutput(np.zeros((1, 1), np.int32), np.ones(1, np.int32)))

    def _forget(self, seq: Sequence, reason: FinishReason) -> None:
        """Drop a sequence whose row, if it has one, is released."""
        self._waiting.pop(seq, None)
        if seq.row >= 0:
            self._by_row[seq.row] = None
            self._free_rows.append(seq.row)
            seq.row = -1
        seq.status = SequenceStatus.FINISHED
        seq.finish_reason = reason

    def _plan_running(self) -> tuple[int, int]:
        """Plan the running rows and queue the preempted ones; return (tokens planned, rows preempted)."""
        rows, budget = self._rows, self.max_num_batched_tokens
        total_preempted = 0
        while True:
            head = next(iter(self._waiting), None)
            num_head = self._admissible_tokens(head) if head else 0
            turns = self._turns() if self.num_running >= budget else _NO_TURNS
            planned, num_preempted = plan_running(rows, self.block_manager.blocks, turns, budget, num_head)
            self._queue_preempted(num_preempted)
            total_preempted += num_preempted
            # All whose turn it was have been preempted: the turn goes to the others.
            if planned or not num_preempted:
                return planned, total_preempted

    def _turns(self) -> NDArray[np.int64]:
        """Order the places of `running` and, as num_running, the queue: least recently scheduled first."""
        running = self._rows.running[: self.num_running]
        last_turns = np.append(self._rows.last_scheduled[running], self._last_admission)
        return last_turns.argsort(kind="stable")

    def _admissible_tokens(self, seq: Sequence) -> int:
        """Return how many tokens a waiting sequence would compute, 0 if it cannot enter now."""
        if seq.row < 0:
            total = len(seq.prompt_token_ids) if self._free_rows else 0
        else:
            total = int(self._rows.num_tokens[seq.row] + self._rows.num_in_flight[seq.row])
        # Alone it may have the whole pool, which holds max_model_len tokens.
        fits = self.block_manager.can_allocate(total, keep_watermark=self.num_running > 0)
        return total if fits else 0

    def _admit(self, budget: int) -> int:
        """Start waiting sequences in order until one does not fit; return the tokens planned for them."""
        left = budget
        while left and self._waiting:
            seq = next(iter(self._waiting))
            total = self._admissible_tokens(seq)
            if total == 0:
                break
            del self._waiting[seq]
            if seq.row < 0:
                seq.row = self._free_rows.pop()
                self._by_row[seq.row] = seq
                self._num_admitted += 1
                self._rows = load_row(self._rows, seq.row, seq, self._num_admitted)
                self._sampling = load_sampling_row(self._sampling, seq.row, seq)
            self.block_manager.allocate(seq.row, total)
            seq.status = SequenceStatus.RUNNING
            rows = self._rows
            rows.reset[seq.row] = True
            rows.num_new[seq.row] = min(total, left)
            rows.running[rows.num_running[0]] = seq.row
            rows.num_running[0] += 1
            left -= min(total, left)
            self._last_admission = self._step + 1
        return budget - left

    def _queue_preempted(self, num_preempted: int) -> None:
        """Put the rows that plan_running left behind `running` at the front of the queue, oldest first."""
        first = self.num_running
        for row in self._rows.running[first : first + num_preempted][::-1].tolist():
            seq: Sequence = self._by_row[row]
            seq.status = SequenceStatus.PREEMPTED
            seq.num_preemptions += 1
            self._waiting[seq] = None
            self._waiting.move_to_end(seq, last=False)
        self.num_preemptions += num_preempted

    def _pack(self) -> Batch:
        """Pack the plan into the buffer whose turn it is and count it as in flight."""
        self._step += 1
        rows, sampling, blocks = self._rows, self._sampling, self.block_manager.blocks
        num_tokens, num_seqs, table_width, num_tail = measure(rows, sampling, blocks)
        buffer = self._buffers[0]
        self._buffers.rotate(-1)
        bucket = bucket_for(num_tokens, num_seqs, table_width)
        arrays = buffer.views(bucket, num_tail)
        pack_batch(rows, sampling, blocks, arrays, buffer.serials)
        advance(rows, self._step)
        batch = Batch(buffer.words, bucket, buffer.serials[:num_seqs], arrays=arrays)
        self._in_flight.append(batch)
        return batch

    def check_invariants(self) -> None:
        """Assert that blocks, rows, queue and the order of arrival agree."""
        self.block_manager.check_invariants()
        rows, blocks = self._rows, self.block_manager.blocks
        running = rows.running[: self.num_running]
        preempted = np.array([seq.row for seq in self._waiting if seq.row >= 0], np.int64)
        free = np.array(self._free_rows, np.int64)
        in_use = np.concatenate([running, preempted])
        everything = np.sort(np.concatenate([in_use, free]))
        assert np.array_equal(everything, np.arange(rows.serial.size)), "a row is lost or in two places"
        assert (np.diff(rows.serial[in_use]) > 0).all(), "running, then preempted rows are not by arrival"
        assert (rows.serial[free] == NO_SERIAL).all(), "a free row has a serial"
        assert not blocks.num_blocks[preempted].any(), "a preempted row holds blocks"
        assert not blocks.num_blocks[free].any(), "a free row holds blocks"
        assert not rows.num_computed_tokens[preempted].any(), "a preempted row has computed tokens"
        slots = blocks.num_blocks[running] * self.block_manager.block_size
        assert (rows.num_computed_tokens[running] <= slots).all(), "a row has computed past its blocks"
        total = rows.num_tokens[in_use] + rows.num_in_flight[in_use]
        assert (total <= rows.max_total_tokens[in_use]).all(), "a row samples past max_total_tokens"
        assert (rows.num_in_flight[in_use] <= len(self._in_flight)).all(), "more in flight than steps"
        assert all((self._by_row[seq.row] is seq) for seq in self._waiting if seq.row >= 0)
