"""A worker without a model: it keeps the KV cache as a dictionary and refuses every wrong slot.

The next token is a pure function of all tokens before it, so what a sequence must generate is known
beforehand, whatever the scheduler does to it on the way.
"""

from collections import Counter, deque

import numpy as np

from cupaged.batch import Batch, Flag, StepOutput
from cupaged.sampling_params import SamplingParams
from cupaged.scheduler.scheduler import Scheduler, Update
from cupaged.sequence import FinishReason, Sequence, SequenceStatus

VOCAB_SIZE = 97


def next_token(tokens: list[int], banned: tuple[int, ...] = ()) -> int:
    """Return what the scripted model says after `tokens`; a banned token gives way to the next one."""
    token = (31 * sum(tokens) + 7 * len(tokens) + 3 * tokens[-1]) % VOCAB_SIZE
    while token in banned:
        token = (token + 1) % VOCAB_SIZE
    return token


def expected_output(seq: Sequence) -> list[int]:
    """Return what `seq` must have generated when it ends by itself."""
    tokens: list[int] = seq.prompt_token_ids.tolist()
    num_prompt = len(tokens)
    while len(tokens) < seq.max_total_tokens:
        early = len(tokens) - num_prompt < seq.params.min_tokens
        tokens.append(next_token(tokens, seq.banned_token_ids if early else ()))
        if tokens[-1] in seq.stop_token_ids:
            break
    return tokens[num_prompt:]


def make_sequence(
    prompt: int | list[int],
    max_tokens: int = 4,
    *,
    name: str = "",
    stop: tuple[int, ...] = (),
    banned: tuple[int, ...] = (),
    params: SamplingParams | None = None,
) -> Sequence:
    """Return a waiting sequence; a prompt given as a length is tokens 1, 2, 3, ..."""
    tokens = list(range(1, prompt + 1)) if isinstance(prompt, int) else prompt
    return Sequence(
        request_id=name,
        prompt_token_ids=np.array(tokens, np.int32),
        params=params or SamplingParams(max_tokens=max_tokens),
        max_total_tokens=len(tokens) + max_tokens,
        stop_token_ids=stop,
        banned_token_ids=banned,
    )


def make_scheduler(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    max_model_len: int = 64,
    num_batches: int = 2,
) -> Scheduler:
    """Return a small scheduler."""
    return Scheduler(
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        num_batches=num_batches,
    )


class ScriptedWorker:
    """Runs a batch the way a device does: it believes the batch, and nothing else."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.block_size = scheduler.block_manager.block_size
        self.num_slots = scheduler.block_manager.total * self.block_size
        self.cache: dict[int, tuple[int, int]] = {}  # slot -> (position, token)
        self.last_token: dict[int, int] = {}  # row -> token

    def run(self, batch: Batch) -> StepOutput:
        """Write the step's tokens to their slots, then sample where the batch says so."""
        slots = batch.slot_mapping.tolist()
        assert len(set(slots)) == len(slots), "two tokens of a step share a slot"
        assert all(0 <= slot < self.num_slots for slot in slots)
        token_ids = np.zeros((batch.num_seqs, 1), np.int32)
        num_tokens = np.zeros(batch.num_seqs, np.int32)
        for i in range(batch.num_seqs):
            self._write(batch, i)
        for i in range(batch.num_seqs):
            tokens = self.tokens(batch, i)
            if batch.flags[i] & Flag.SAMPLES:
                banned = batch.banned[batch.banned_start[i] : batch.banned_start[i + 1]]
                token_ids[i] = next_token(tokens, tuple(banned.tolist()))
                num_tokens[i] = 1
                self.last_token[int(batch.rows[i])] = int(token_ids[i, 0])
        return StepOutput(token_ids, num_tokens)

    def _write(self, batch: Batch, i: int) -> None:
        first, end = batch.query_start[i : i + 2].tolist()
        for t in range(first, end):
            token = int(batch.input_ids[t])
            if t == end - 1 and batch.flags[i] & Flag.INPUT_FROM_LAST_TOKEN:
                token = self.last_token[int(batch.rows[i])]
            self.cache[int(batch.slot_mapping[t])] = (int(batch.positions[t]), token)

    def tokens(self, batch: Batch, i: int) -> list[int]:
        """Return the tokens that sequence i attends to, read through its block table."""
        tokens = []
        for position in range(batch.seq_lens[i]):
            block = int(batch.block_tables[i, position // self.block_size])
            assert block >= 0, "a block table ends before its sequence"
            written, token = self.cache[block * self.block_size + position % self.block_size]
            assert written == position, f"position {position} finds what position {written} wrote"
            tokens.append(token)
        return tokens


class Harness:
    """A scheduler and a scripted worker that answers at once, or one step late with max_in_flight = 2."""

    def __init__(self, scheduler: Scheduler, max_in_flight: int = 1) -> None:
        self.scheduler = scheduler
        self.worker = ScriptedWorker(scheduler)
        self.max_in_flight = max_in_flight
        self.outputs: dict[Sequence, list[int]] = {}
        self.admitted: list[Sequence] = []
        self.prompt_positions: dict[Sequence, list[int]] = {}  # whose log-probabilities came
        self.steps: list[Counter[Sequence]] = []  # new tokens by sequence
        self.in_flight: deque[tuple[Batch, list[Sequence]]] = deque()

    def add(self, *seqs: Sequence) -> None:
        """Queue sequences."""
        for seq in seqs:
            self.scheduler.add(seq)
            self.outputs[seq] = []
            self.prompt_positions[seq] = []

    def schedule(self) -> Batch | None:
        """Plan a step and put it in flight."""
        batch = self.scheduler.schedule()
        self.scheduler.check_invariants()
        if batch is not None:
            by_row = {seq.row: seq for seq in self.outputs if seq.row >= 0}
            seqs = [by_row[row] for row in batch.rows.tolist()]
            self._note(batch, seqs)
            self.in_flight.append((batch, seqs))
        else:
            assert self.in_flight or not self.scheduler.has_unfinished(), "nobody can ever run again"
        return batch

    def update(self) -> Update:
        """Run the oldest step in flight, check what it reads and take its result back."""
        batch, seqs = self.in_flight.popleft()
        output = self.worker.run(batch)
        for i, seq in enumerate(seqs):
            if seq.finish_reason is None:
                known = seq.prompt_token_ids.tolist() + expected_output(seq)
                assert self.worker.tokens(batch, i) == known[: batch.seq_lens[i]]
        update = self.scheduler.update(batch, output)
        self.scheduler.check_invariants()
        for i, updated in enumerate(update.sequences):
            if updated is not None:
                assert updated is seqs[i]
                self.outputs[updated] += output.token_ids[i, : update.num_tokens[i]].tolist()
        return update

    def step(self) -> None:
        """Do what an engine does: fill the flight, take the oldest back."""
        while len(self.in_flight) < self.max_in_flight and self.schedule() is not None:
            pass
        if self.in_flight:
            self.update()

    def run(self, max_steps: int = 10_000) -> None:
        """Step until all is done."""
        while self.scheduler.has_unfinished() or self.in_flight:
            assert len(self.steps) < max_steps, "it does not end"
            self.step()

    def abort(self, seq: Sequence) -> None:
        """End a sequence from outside."""
        self.scheduler.finish(seq, FinishReason.ABORT)
        self.scheduler.check_invariants()

    def _note(self, batch: Batch, seqs: list[Sequence]) -> None:
        counts = np.diff(batch.query_start).tolist()
        assert all(seq.status is SequenceStatus.RUNNING for seq in seqs)
        assert sum(counts) <= self.scheduler.max_num_batched_tokens
        self.steps.append(Counter(dict(zip(seqs, counts, strict=True))))
        serials = dict(zip(seqs, batch.serials.tolist(), strict=True))
        self.admitted += sorted((s for s in seqs if s not in self.admitted), key=serials.__getitem__)
        for index, i, target in zip(batch.logit_index, batch.logit_seq, batch.logit_target, strict=True):
            if target >= 0:
                position = int(batch.positions[index])
                assert target == seqs[i].prompt_token_ids[position + 1]
                self.prompt_positions[seqs[i]].append(position)


def assert_all_as_expected(harness: Harness, seqs: list[Sequence]) -> None:
    """Assert that each sequence generated what it must and that nothing is held any more."""
    for seq in seqs:
        assert harness.outputs[seq] == expected_output(seq)
    assert harness.scheduler.num_running == harness.scheduler.num_waiting == 0
    assert harness.scheduler.num_used_blocks == 0


def start(*seqs: Sequence, max_in_flight: int = 1, **options: int) -> Harness:
    """Return a harness over `make_scheduler(**options)` in which `seqs` wait."""
    harness = Harness(make_scheduler(**options), max_in_flight)
    harness.add(*seqs)
    return harness


def preempting() -> tuple[Harness, list[Sequence]]:
    """Return three sequences of one block each that grow until four blocks no longer hold them."""
    seqs = [make_sequence([i, 5, 6, 7], 8) for i in range(3)]
    harness = start(*seqs, num_blocks=4, max_model_len=16)
    return harness, seqs
