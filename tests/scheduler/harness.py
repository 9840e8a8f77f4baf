"""Harness: a scheduler, a scripted worker, and between them what an engine does; it asserts at every step."""

from collections import Counter, deque
from typing import Any, NamedTuple

import numpy as np

from cupaged.batch import Batch, Flag
from cupaged.scheduler.counters import Counter as Event
from cupaged.scheduler.scheduler import Scheduler, Update
from cupaged.sequence import FinishReason, Sequence, SequenceGroup, SequenceStatus
from tests.scheduler.groups import expected_output, make_group, make_scheduler
from tests.scheduler.scripted import Cell, ScriptedWorker, cells, next_token


class Step(NamedTuple):
    """A step in flight."""

    batch: Batch
    seqs: list[Sequence]
    known: list[list[int]]  # of each sequence, as `Harness.tokens` said when it was planned
    lost: set[int]  # blocks that have a new owner since the step before


class Harness:
    """Does what an engine does; the worker answers at once, or one step late with max_in_flight = 2."""

    def __init__(self, scheduler: Scheduler, max_in_flight: int = 1) -> None:
        self.scheduler = scheduler
        self.worker = ScriptedWorker(scheduler.config)
        self.max_in_flight = max_in_flight
        self.groups: list[SequenceGroup] = []
        self.outputs: dict[Sequence, list[int]] = {}
        self.admitted: list[SequenceGroup] = []
        self.prompt_positions: dict[SequenceGroup, list[int]] = {}  # whose log-probabilities came
        self.steps: list[Counter[SequenceGroup]] = []  # new tokens by group
        self.in_flight: deque[Step] = deque()
        self.num_beams: dict[SequenceGroup, int] = {}  # that are active
        self.sampled: dict[SequenceGroup, set[int]] = {}  # which of them have
        self.entries: dict[tuple[int, int], list[Cell | None]] = {}  # cached (block, serial) -> its content
        self.ended: set[Sequence] = set()  # from outside
        self._lost: set[int] = set()

    # What an engine does.

    def add(self, *groups: SequenceGroup) -> None:
        """Queue groups."""
        for group in groups:
            self.scheduler.add(group)
            self.groups.append(group)
            self.outputs |= {seq: [] for seq in group.sequences}
            self.prompt_positions[group] = []

    def schedule(self) -> Batch | None:
        """Plan a step and put it in flight."""
        before = self.holders()
        batch = self.scheduler.schedule()
        self.check()
        after = self.holders()
        cached = self.cached_blocks()
        self._lost |= {b for b, seqs in after.items() if b not in cached and not seqs & before.get(b, set())}
        if batch is None:
            assert self.in_flight or not self.scheduler.has_unfinished(), "nobody can ever run again"
            return None
        by_row = {seq.row: seq for seq in self.outputs if seq.row >= 0}
        seqs = [by_row[row] for row in batch.rows.tolist()]
        self._note(batch, seqs)
        self._refuse_shared_writes(batch, seqs, before)
        self.in_flight.append(Step(batch, seqs, [self.tokens(seq) for seq in seqs], self._lost))
        self._lost = set()
        return batch

    def update(self) -> Update:
        """Run the oldest step in flight, check what it reads and take its result back."""
        step = self.in_flight.popleft()
        batch = step.batch
        output = self.worker.run(batch, step.lost)
        for i, (seq, known) in enumerate(zip(step.seqs, step.known, strict=True)):
            if seq.finish_reason is None:
                read, end = self.worker.read(batch, i), int(batch.seq_lens[i])
                assert read == cells(known)[end - len(read) : end], "KV of other tokens than its own"
        update = self.scheduler.update(batch, output)
        self.check()
        self.check_cache()
        for i, owner in enumerate(update.sequences):
            if owner is None:
                continue
            assert owner is step.seqs[i]
            if owner.group.is_beam:
                assert self.tokens(owner) == step.known[i], "a beam gets what another's tokens led to"
                assert update.num_tokens[i] == 0
                if batch.flags[i] & Flag.SAMPLES:
                    self.sampled.setdefault(owner.group, set()).add(owner.index)
            self.outputs[owner] += output.token_ids[i, : update.num_tokens[i]].tolist()
        self._note_prompt_logprobs(batch, update)
        self.advance_beams()
        return update

    def step(self) -> None:
        """Fill the flight, take the oldest back."""
        while len(self.in_flight) < self.max_in_flight and self.schedule() is not None:
            pass
        if self.in_flight:
            self.update()

    def run(self, max_steps: int = 10_000) -> None:
        """Step until all is done."""
        while self.scheduler.has_unfinished() or self.in_flight:
            assert len(self.steps) < max_steps, "it does not end"
            self.step()

    def abort(self, group: SequenceGroup) -> None:
        """End a group from outside."""
        self.ended |= set(group.unfinished)
        self.scheduler.finish_group(group, FinishReason.ABORT)
        self.check()

    def stop(self, seq: Sequence) -> None:
        """End a sequence as a stop string does."""
        self.ended.add(seq)
        self.scheduler.finish(seq, FinishReason.STOP)
        self.check()

    # Beams.

    def advance_beams(self) -> None:
        """Continue each group whose beams have all sampled; end those that have all their tokens."""
        for group, sampled in list(self.sampled.items()):
            active = self.num_beams.get(group, 1)
            if group.status is SequenceStatus.FINISHED:
                del self.sampled[group]
            elif len(sampled) == active:
                del self.sampled[group]
                self.continue_beams(group)

    def continue_beams(self, group: SequenceGroup) -> None:
        """Choose parents by a fixed rule that forks, drops and shrinks beams."""
        active = self.num_beams.get(group, 1)
        tokens = [self.tokens(seq) for seq in group.sequences[:active]]
        length = len(tokens[0])
        if length + 1 == group.max_total_tokens:
            self.scheduler.finish_group(group, FinishReason.STOP)
            return
        width = max(1, group.num_sequences - (length % 4 == 0))
        parents = [i * length % active for i in range(width)]
        chosen = [next_token(cells(tokens[parent])[-1], i) for i, parent in enumerate(parents)]
        self.scheduler.continue_beams(group, parents, chosen)
        self.num_beams[group] = width
        num_prompt = len(group.prompt_token_ids)
        for seq, parent, token in zip(group.sequences, parents, chosen, strict=False):
            self.outputs[seq] = [*tokens[parent][num_prompt:], token]
        self.check()

    # What must hold.

    def output(self, group: SequenceGroup) -> list[int]:
        """Return what a group's first sequence has generated so far."""
        return self.outputs[group.sequences[0]]

    def tokens(self, seq: Sequence) -> list[int]:
        """Return what is known of a sequence beforehand; of a beam, what it is now."""
        output = self.outputs[seq] if seq.group.is_beam else expected_output(seq.group, seq.index)
        return [*seq.group.prompt_token_ids.tolist(), *output]

    def holders(self) -> dict[int, set[Sequence]]:
        """Return the sequences that hold each device block."""
        blocks = self.scheduler.block_manager.blocks
        held: dict[int, set[Sequence]] = {}
        for seq in self.outputs:
            if seq.row >= 0:
                first, end = blocks.held[seq.row].tolist()
                for block in blocks.block_tables[seq.row, first:end].tolist():
                    held.setdefault(block, set()).add(seq)
        return held

    def cached_blocks(self) -> dict[int, int]:
        """Return the serial of each block that can be found by its content."""
        serials = self.scheduler.block_manager.blocks.cache.at.serial
        return {block: int(serials[block]) for block in np.flatnonzero(serials).tolist()}

    def check(self) -> None:
        """Assert the scheduler's invariants and that its gauges say what its tables say."""
        scheduler = self.scheduler
        scheduler.check_invariants()
        num_used = len(self.holders())
        assert scheduler.num_used_blocks == num_used
        assert scheduler.num_free_blocks == scheduler.config.num_blocks - num_used

    def check_cache(self) -> None:
        """Assert that what can be found in the prefix cache has been written, and never changes."""
        block_size, tokens = self.worker.config.block_size, self.scheduler.block_manager.blocks.cache.tokens
        found = {}
        for block, serial in self.cached_blocks().items():
            slots = range(block * block_size, (block + 1) * block_size)
            content = [self.worker.cache.get(slot) for slot in slots]
            assert [cell and cell.token for cell in content] == tokens[block].tolist()
            found[block, serial] = content
            assert self.entries.get((block, serial), content) == content, "a cached block changed"
        self.entries = found

    def _note(self, batch: Batch, seqs: list[Sequence]) -> None:
        """Remember who computes what."""
        counts = np.diff(batch.query_start).tolist()
        assert all(seq.group.status is SequenceStatus.RUNNING for seq in seqs)
        assert sum(counts) <= self.scheduler.config.max_num_batched_tokens
        step: Counter[SequenceGroup] = Counter()
        for seq, tokens in zip(seqs, counts, strict=True):
            step[seq.group] += tokens
        self.steps.append(step)
        self.admitted += sorted(
            step.keys() - self.admitted, key=lambda group: (group.priority, group.arrival)
        )

    def _note_prompt_logprobs(self, batch: Batch, update: Update) -> None:
        """Remember which prompt tokens' log-probabilities came."""
        for index, i, target in zip(batch.logit_index, batch.logit_seq, batch.logit_target, strict=True):
            seq = update.sequences[i]
            if target >= 0 and seq is not None:
                position = int(batch.positions[index])
                assert target == seq.group.prompt_token_ids[position + 1]
                self.prompt_positions[seq.group].append(position)

    def _refuse_shared_writes(
        self, batch: Batch, seqs: list[Sequence], before: dict[int, set[Sequence]]
    ) -> None:
        """Assert that no new token goes to a cached block, or to one that another sequence held `before`.

        Siblings that fork when this step is submitted may share what it writes.
        """
        after, cached = self.holders(), self.cached_blocks()
        for i, seq in enumerate(seqs):
            for t in range(*batch.query_start[i : i + 2].tolist()):
                block = int(batch.slot_mapping[t]) // self.worker.config.block_size
                if block < 0:
                    continue
                assert block not in cached, f"a step writes to block {block}, which is cached"
                others = after[block] - {seq}
                assert not others & before.get(block, set()), (
                    f"a step writes to block {block}, which is shared"
                )
                assert all(other.group is seq.group for other in others), (
                    "another group shares what it writes"
                )


def assert_all_as_expected(harness: Harness, groups: list[SequenceGroup]) -> None:
    """Assert that each sequence generated what it must and that nothing is held any more."""
    for group in groups:
        for seq in group.sequences:
            assert harness.outputs[seq] == expected_output(group, seq.index)
    scheduler = harness.scheduler
    assert scheduler.num_running == scheduler.num_waiting == scheduler.num_used_blocks == 0
    assert scheduler.num_free_blocks == scheduler.config.num_blocks


def start(*groups: SequenceGroup, max_in_flight: int = 1, **options: Any) -> Harness:
    """Return a harness over `make_scheduler(**options)` in which `groups` wait."""
    harness = Harness(make_scheduler(**options), max_in_flight)
    harness.add(*groups)
    return harness


def count(harness: Harness, event: Event) -> int:
    """Return how often something has happened."""
    return int(harness.scheduler.counters[event])


def preempting(**options: Any) -> tuple[Harness, list[SequenceGroup]]:
    """Return three groups of one block each that grow until four blocks no longer hold them."""
    groups = [make_group([i, 5, 6, 7], 8) for i in range(3)]
    harness = start(*groups, **{"num_blocks": 4, "max_model_len": 16, **options})
    return harness, groups


def until(harness: Harness, group: SequenceGroup, status: SequenceStatus) -> None:
    """Step until the group is in `status`."""
    while group.status is not status:
        assert harness.scheduler.has_unfinished(), f"it is never {status.name}"
        harness.step()
