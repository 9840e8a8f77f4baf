"""Runs to record: a scheduler under load, with an engine's habits and a model that is a pure function."""

from collections import deque
from dataclasses import replace
from pathlib import Path

import numpy as np

from cupaged.batch import Batch, Flag, StepOutput
from cupaged.sampling_params import SamplingParams
from cupaged.scheduler.counters import Counter, create_counters
from cupaged.scheduler.scheduler import Scheduler
from cupaged.scheduler.scheduler_config import SchedulerConfig
from cupaged.sequence import FinishReason, Sequence, SequenceGroup
from cupaged.trace.recorder import TraceRecorder
from cupaged.trace.records import TraceFile

STOP_ID, VOCAB_SIZE = 7, 50


def small_config(**options: object) -> SchedulerConfig:
    """Return a scheduler's configuration under which the workload below runs short of blocks."""
    values: dict[str, object] = {
        "num_blocks": 24,
        "block_size": 4,
        "max_num_seqs": 6,
        "max_num_batched_tokens": 24,
        "max_model_len": 48,
        "num_host_blocks": 16,
        "policy": "priority",
        "preemption_mode": "auto",
        "block_bytes": 1000,
        "swap_bandwidth": 1e7,  # a group of more than a few tokens is swapped
        "prefill_rate": 2e3,
    }
    return SchedulerConfig(**values | options)  # type: ignore[arg-type]


def make_groups(seed: int, number: int) -> list[SequenceGroup]:
    """Return requests of every kind: shared prefixes, salts, n > 1, beams, priorities, prompt logprobs."""
    rng = np.random.default_rng(seed)
    shared = rng.integers(10, VOCAB_SIZE, 20)
    groups = []
    for i in range(number):
        prompt = np.concatenate(
            [shared[: rng.integers(0, 21)], rng.integers(10, VOCAB_SIZE, rng.integers(1, 9))]
        )
        is_beam = bool(rng.integers(0, 6) == 0)
        params = SamplingParams(
            temperature=float(rng.integers(0, 2)),
            min_tokens=int(rng.integers(0, 3)),
            prompt_logprobs=3 if rng.integers(0, 5) == 0 and not is_beam else None,
        )
        groups.append(
            SequenceGroup(
                request_id=f"secret {i}",
                prompt_token_ids=prompt.astype(np.int32),
                params=params,
                max_total_tokens=int(prompt.size + rng.integers(1, 14)),
                stop_token_ids=(STOP_ID,),
                banned_token_ids=(STOP_ID, 3),
                seed=int(rng.integers(0, 2**63)),
                num_sequences=int(rng.integers(1, 4)) + is_beam,
                is_beam=is_beam,
                num_candidates=5 if is_beam else 0,
                priority=int(rng.integers(0, 2)),
                cache_salts=(("cache_salt", "tenant 1"),) if rng.integers(0, 4) == 0 else (),
            )
        )
    return groups


def sample(batch: Batch, ends_every: int) -> StepOutput:
    """Return tokens that depend on position and sequence: some of them end it."""
    samples = (batch.flags & int(Flag.SAMPLES)) != 0
    token_ids = (batch.seq_lens * 31 + batch.group_index * 17 + batch.seed[:, 0] % 101) % VOCAB_SIZE
    token_ids[(batch.seq_lens * 7 + batch.seed[:, 1]) % ends_every == 0] = STOP_ID
    return StepOutput(token_ids.astype(np.int32).reshape(-1, 1), samples.astype(np.int32))


class Run:
    """Drives a scheduler as an engine does: steps in flight, stop strings, aborts, beams."""

    def __init__(self, scheduler: Scheduler, seed: int, *, ends_every: int = 11) -> None:
        self.scheduler = scheduler
        self.ends_every = ends_every  # a stop token after about so many; a stop string, an abort less often
        self.rng = np.random.default_rng(seed)
        self.in_flight: deque[Batch] = deque()
        self.groups: list[SequenceGroup] = []
        self.outputs: dict[Sequence, list[int]] = {}
        self.reported: dict[SequenceGroup, set[int]] = {}
        self.num_active: dict[SequenceGroup, int] = {}
        self.num_chosen: dict[SequenceGroup, int] = {}

    def add(self, group: SequenceGroup) -> None:
        """Queue a group, unless it can never run."""
        try:
            self.scheduler.add(group)
        except ValueError:
            return
        self.groups.append(group)

    def next_turn(self, group: SequenceGroup) -> SequenceGroup:
        """Return the request with a prompt that goes on from what another was told, if one has ended."""
        said = [seq for seq in self.outputs if seq.finish_reason is not None]
        if not said:
            return group
        seq = said[int(self.rng.integers(0, len(said)))]
        prompt = np.array([*seq.group.prompt_token_ids, *self.outputs[seq], 11], np.int32)[:34]
        num_output = group.max_total_tokens - len(group.prompt_token_ids)
        return replace(
            group,
            prompt_token_ids=prompt,
            max_total_tokens=prompt.size + num_output,
            cache_salts=seq.group.cache_salts,
        )

    def step(self) -> None:
        """Plan as far as steps may be in flight, take the oldest back, and follow up."""
        while len(self.in_flight) < self.scheduler.config.num_batches:
            batch = self.scheduler.schedule()
            if batch is None:
                break
            self.in_flight.append(batch)
        if not self.in_flight:
            return
        batch = self.in_flight.popleft()
        output = sample(batch, self.ends_every)
        update = self.scheduler.update(batch, output)
        for i in np.flatnonzero(update.num_tokens).tolist():
            seq = update.sequences[i]
            assert seq is not None, "tokens of nobody"
            self.outputs.setdefault(seq, []).append(int(output.token_ids[i, 0]))
        for i, seq in enumerate(update.sequences):
            if seq is None or seq.finish_reason is not None:
                continue
            if seq.group.is_beam:
                if batch.flags[i] & Flag.SAMPLES:
                    self._continue(seq.group, seq.index)
            elif update.num_tokens[i] and self.rng.integers(0, 2 * self.ends_every) == 0:
                self.scheduler.finish(seq, FinishReason.STOP)  # a stop string
        if self.rng.integers(0, 3 * self.ends_every) == 0:
            unfinished = [group for group in self.groups if group.unfinished]
            if unfinished:
                self.scheduler.finish_group(unfinished[-1], FinishReason.ABORT)

    def _continue(self, group: SequenceGroup, index: int) -> None:
        """Choose beams, once all that are active have reported."""
        reported = self.reported.setdefault(group, set())
        reported.add(index)
        active = self.num_active.get(group, 1)
        if len(reported) < active:
            return
        reported.clear()
        chosen = self.num_chosen[group] = self.num_chosen.get(group, 0) + 1
        at_end = len(group.prompt_token_ids) + chosen == group.max_total_tokens
        if at_end or self.rng.integers(0, 6) == 0:
            self.scheduler.finish_group(group, FinishReason.STOP)
            return
        number = int(self.rng.integers(1, group.num_sequences + 1))
        parents = self.rng.integers(0, active, number).tolist()
        self.num_active[group] = number
        self.scheduler.continue_beams(group, parents, self.rng.integers(10, VOCAB_SIZE, number).tolist())


def record(
    path: Path,
    config: SchedulerConfig,
    *,
    seed: int = 0,
    number: int = 30,
    talks: bool = False,
    with_text: bool = False,
) -> dict[Counter, int]:
    """Run requests to their end and leave the trace at `path`; return what the scheduler counted.

    With `talks` a third of them are the next turn of one that has ended.
    """
    trace = TraceFile(path, with_text=with_text)
    counters = create_counters()
    run = Run(TraceRecorder(config, counters, trace), seed)
    waiting = deque(make_groups(seed, number))
    while waiting or run.scheduler.has_unfinished() or run.in_flight:
        for _ in range(int(run.rng.integers(0, 3))):
            if waiting:
                group = waiting.popleft()
                run.add(run.next_turn(group) if talks and run.rng.integers(0, 3) == 0 else group)
        run.step()
        if run.rng.integers(0, 20) == 0:
            run.scheduler.reset_prefix_cache()
    trace.close()
    return {counter: int(counters[counter]) for counter in Counter}
