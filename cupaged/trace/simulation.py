"""Simulation: a recorded workload under other settings, in simulated time.

Requests arrive when they did, a step takes as long as a StepModel says, and every sequence samples what it
sampled then; the scheduler is the real one. Arrivals do not wait for answers, as an impatient client's would.
"""

from collections import deque
from dataclasses import dataclass, field
from heapq import heappop, heappush

from cupaged.batch import Batch, Flag
from cupaged.scheduler.counters import Counter, create_counters
from cupaged.scheduler.scheduler import Scheduler, Update
from cupaged.scheduler.scheduler_config import SchedulerConfig
from cupaged.sequence import FinishReason, Sequence, SequenceGroup
from cupaged.trace.replay import OutputScript, SequenceRows
from cupaged.trace.step_model import StepModel
from cupaged.trace.workload import Request, Segment

SAMPLES = int(Flag.SAMPLES)


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What a simulation measured; times in seconds, lists by request in the order of the event."""

    num_refused: int = 0  # requests that could never run under these settings
    num_unended: int = 0  # those whose end the trace does not tell: left out
    num_finished: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_computed_tokens: int = 0
    seconds: float = 0.0
    busy_seconds: float = 0.0
    num_steps: int = 0
    queue_seconds: list[float] = field(default_factory=list)  # from arrival to the first step
    first_token_seconds: list[float] = field(default_factory=list)  # from arrival to the first token
    request_seconds: list[float] = field(default_factory=list)  # from arrival to the end
    mean_running: float = 0.0  # rows, over busy time, like the next two
    mean_used: float = 0.0  # share of the pool's blocks that are referenced
    mean_stored: float = 0.0  # share of the pool's slots that hold tokens
    counters: dict[Counter, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Progress:
    """What a simulated request still needs from outside the scheduler."""

    request: Request
    started: bool = False
    reported: set[int] = field(default_factory=set)  # beams that have sampled since the last continuation
    num_beams: int = 1
    num_continued: int = 0


def simulate(segment: Segment, config: SchedulerConfig, model: StepModel) -> Outcome:
    """Run a segment's requests under `config`; ValueError if the configuration itself cannot be."""
    return _Simulation(segment, config, model).run()


class _Simulation:
    def __init__(self, segment: Segment, config: SchedulerConfig, model: StepModel) -> None:
        self._config, self._model = config, model
        self._counters = create_counters()
        self._scheduler = Scheduler(config, self._counters)
        self._outcome = Outcome()
        requests = [request for request in segment.requests.values() if self._has_end(request)]
        self._outcome.num_unended = len(segment.requests) - len(requests)
        self._arrivals = deque(requests)
        self._rows, self._script = SequenceRows(), OutputScript()
        self._progress: dict[SequenceGroup, _Progress] = {}
        self._aborts: list[tuple[float, int, int, Sequence]] = []  # of those that never had a token, by time
        self._in_flight: deque[tuple[Batch, list[Sequence]]] = deque()
        self._now = 0.0

    @staticmethod
    def _has_end(request: Request) -> bool:
        return all(output.reason is not None for output in request.outputs)

    def run(self) -> Outcome:
        """Step until every request has ended."""
        while self._arrivals or self._scheduler.has_unfinished():
            self._arrive()
            while len(self._in_flight) < self._config.num_batches:
                batch = self._scheduler.schedule()
                if batch is None:
                    break
                self._submit(batch)
            if self._in_flight:
                self._step()
            else:
                times = [request.time for request in self._arrivals] + [abort[0] for abort in self._aborts]
                assert times or not self._scheduler.has_unfinished(), "requests wait and none of them can run"
                self._now = max(self._now, min(times, default=0.0))
        return self._finish()

    def _arrive(self) -> None:
        """Add whoever has arrived and abort whoever was aborted without a token."""
        while self._arrivals and self._arrivals[0].time <= self._now:
            request = self._arrivals.popleft()
            group = request.create_group(self._config.policy)
            try:
                self._scheduler.add(group)
            except ValueError:
                self._outcome.num_refused += 1
                continue
            self._rows.add(group)
            self._script.add(group, request)
            self._progress[group] = _Progress(request)
            self._outcome.num_prompt_tokens += len(group.prompt_token_ids)
            for seq, output in zip(group.sequences, request.outputs, strict=True):
                if output.ended_from_outside and output.length == 0 and not group.is_beam:
                    heappush(self._aborts, (request.time + output.lifetime, group.arrival, seq.index, seq))
        while self._aborts and self._aborts[0][0] <= self._now:
            seq = heappop(self._aborts)[-1]
            self._scheduler.finish(seq, FinishReason.ABORT)
            self._note_end(seq.group)

    def _submit(self, batch: Batch) -> None:
        sequences = self._rows.of(batch)
        self._in_flight.append((batch, sequences))
        for group in {seq.group: None for seq in sequences}:
            progress = self._progress[group]
            if not progress.started:
                progress.started = True
                self._outcome.queue_seconds.append(self._now - progress.request.time)

    def _step(self) -> None:
        """Let the oldest step's time pass and take its result back."""
        batch, sequences = self._in_flight.popleft()
        outcome, scheduler, config = self._outcome, self._scheduler, self._config
        seconds = self._model.seconds(batch, config)
        self._now += seconds
        outcome.busy_seconds += seconds
        outcome.num_steps += 1
        outcome.num_computed_tokens += batch.num_tokens
        outcome.mean_running += seconds * batch.num_seqs
        outcome.mean_used += seconds * scheduler.num_used_blocks / config.num_blocks
        outcome.mean_stored += seconds * scheduler.num_stored_tokens / (config.num_blocks * config.block_size)
        update = scheduler.update(batch, self._script.run(batch, sequences))
        self._follow_up(batch, sequences, update)

    def _follow_up(self, batch: Batch, sequences: list[Sequence], update: Update) -> None:
        """Do what the engine does after a step: stop strings, beams; note who has ended."""
        lengths = (batch.output_position + update.num_tokens).tolist()
        searches: dict[SequenceGroup, None] = {}
        for i, seq in enumerate(sequences):
            if update.sequences[i] is None:
                continue
            if seq.group.is_beam:
                if batch.flags[i] & SAMPLES:
                    self._progress[seq.group].reported.add(seq.index)
                    searches[seq.group] = None
            elif update.num_tokens[i]:
                self._note_token(seq, lengths[i])
        for group in searches:
            self._continue_beams(group)
        for seq in sequences:
            self._note_end(seq.group)

    def _note_token(self, seq: Sequence, length: int) -> None:
        progress = self._progress[seq.group]
        self._outcome.num_output_tokens += 1
        if length == 1 and seq.index == 0:
            self._outcome.first_token_seconds.append(self._now - progress.request.time)
        output = progress.request.outputs[seq.index]
        if output.ended_from_outside and 0 < output.length <= length and output.reason is not None:
            self._scheduler.finish(seq, output.reason)

    def _note_end(self, group: SequenceGroup) -> None:
        if group.unfinished:
            return
        progress = self._progress.pop(group, None)
        if progress is not None:
            self._outcome.num_finished += 1
            self._outcome.request_seconds.append(self._now - progress.request.time)

    def _continue_beams(self, group: SequenceGroup) -> None:
        """Go on as the recorded search did, once all active beams have reported."""
        progress = self._progress[group]
        if len(progress.reported) < progress.num_beams:
            return
        progress.reported.clear()
        self._outcome.num_output_tokens += progress.num_beams
        if progress.num_continued == 0:
            self._outcome.first_token_seconds.append(self._now - progress.request.time)
        continuations = progress.request.continuations
        if progress.num_continued < len(continuations):
            parents, token_ids = continuations[progress.num_continued]
            progress.num_continued += 1
            progress.num_beams = len(parents)
            self._scheduler.continue_beams(group, parents, token_ids)
        else:
            reason = progress.request.outputs[0].reason
            assert reason is not None, "a request without an end was let in"
            self._scheduler.finish_group(group, reason)

    def _finish(self) -> Outcome:
        outcome = self._outcome
        outcome.seconds = self._now
        for name in ("mean_running", "mean_used", "mean_stored"):
            setattr(outcome, name, getattr(outcome, name) / max(outcome.busy_seconds, 1e-12))
        outcome.counters = {counter: int(self._counters[counter]) for counter in Counter}
        return outcome
