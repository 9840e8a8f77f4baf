"""The paper's workloads through our Scheduler and BlockManager; the model is simulated, and so is its time.

The executor answers at once with a fixed token; how long each step takes is paper_machine's linear model.
Beams are continued as a Wright-Fisher population: each new beam follows a beam drawn at random, all alike
likely. No text stands behind the tokens, so the model has no constant, and says least about how beams part.
"""

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cupaged.batch import Batch, Flag
from cupaged.config import PreemptionMode
from cupaged.sampling_params import SamplingParams
from cupaged.scheduler.counters import Counter
from cupaged.scheduler.scheduler import Scheduler, Update
from cupaged.scheduler.scheduler_config import SchedulerConfig
from cupaged.sequence import FinishReason, SequenceGroup
from tools.paper_machine import NUM_SLOTS, step_seconds
from tools.paper_reference import Meter
from tools.paper_workload import MAX_TOKENS, SEED, SHAREGPT, SIGMA, Dataset, Workload, draw_workload
from tools.scheduler_load import TOKEN, output_of

MAX_NUM_SEQS = 256
SAMPLE_STEPS = 8  # sharing is counted every so many steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One run: what comes, and into which pool."""

    dataset: Dataset
    num_requests: int
    sigma: float = SIGMA
    rate: float | None = None  # requests per second; None = all wait from the start
    num_sequences: int = 1
    is_beam: bool = False
    block_size: int = 16
    num_slots: int = NUM_SLOTS
    preemption_mode: PreemptionMode = "recompute"

    def workload(self) -> Workload:
        """Return its requests."""
        return draw_workload(self.dataset, sigma=self.sigma, rate=self.rate, num_requests=self.num_requests)


class PagedRun(NamedTuple):
    """A finished run."""

    token_share: float  # of the pool's slots, that hold a token's keys and values
    mean_batch: float  # requests
    output_rate: float  # tokens per second
    sharing: float  # blocks saved, of those that there would be without sharing
    seconds: float  # of all steps, without those that swaps take
    counters: NDArray[np.int64]  # by Counter
    first_token: NDArray[np.float64]  # [num_requests], seconds from arrival to the first token


def scheduler_config(case: Case) -> SchedulerConfig:
    """Return the scheduler's sizes for a case; a host pool is as large as the device's."""
    num_blocks = case.num_slots // case.block_size
    return SchedulerConfig(
        num_blocks=num_blocks,
        block_size=case.block_size,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=MAX_TOKENS,
        max_model_len=min(MAX_TOKENS, num_blocks * case.block_size),
        num_batches=1,
        num_host_blocks=num_blocks if case.preemption_mode == "swap" else 0,
        enable_prefix_caching=False,  # prompts have nothing in common
        preemption_mode=case.preemption_mode,
    )


def create_group(
    request: int, num_prompt: int, num_output: int, *, num_sequences: int = 1, is_beam: bool = False
) -> SequenceGroup:
    """Return a request whose sequences end by their length alone."""
    return SequenceGroup(
        request_id=str(request),
        prompt_token_ids=np.full(num_prompt, TOKEN, np.int32),
        params=SamplingParams(max_tokens=None),
        max_total_tokens=num_prompt + num_output,
        num_sequences=num_sequences,
        is_beam=is_beam,
    )


def sharing(batch: Batch) -> float:
    """Return which share of the blocks that the sequences point to is saved by pointing to the same."""
    blocks = batch.block_tables[batch.block_tables >= 0]
    return 1 - len(np.unique(blocks)) / len(blocks)


class Beams:
    """Beam groups' next steps: parents at random, the end when the output is long enough."""

    def __init__(self, scheduler: Scheduler) -> None:
        """Start with none."""
        self._scheduler = scheduler
        self._rng = np.random.default_rng(SEED)
        self._sampled: dict[SequenceGroup, set[int]] = {}  # beams whose step has come back, by group
        self._num_active: dict[SequenceGroup, int] = {}
        self._remaining: dict[SequenceGroup, int] = {}  # tokens

    def add(self, group: SequenceGroup, num_output: int) -> None:
        """Follow a group that has just been added."""
        self._sampled[group], self._num_active[group], self._remaining[group] = set(), 1, num_output

    def advance(self, update: Update, batch: Batch) -> None:
        """Continue the groups all of whose beams have sampled, and end those that are long enough."""
        for i in np.nonzero(batch.flags & int(Flag.SAMPLES))[0]:
            seq = update.sequences[i]
            assert seq is not None, "nothing ends while a step is in flight"
            group = seq.group
            self._sampled[group].add(seq.index)
            if len(self._sampled[group]) < self._num_active[group]:
                continue
            self._remaining[group] -= 1
            if self._remaining[group] == 0:
                self._scheduler.finish_group(group, FinishReason.LENGTH)
                continue
            parents = self._rng.integers(0, self._num_active[group], group.num_sequences)
            self._scheduler.continue_beams(group, parents.tolist(), [TOKEN] * group.num_sequences)
            self._sampled[group].clear()
            self._num_active[group] = group.num_sequences


class Simulation:
    """One case through a Scheduler of its own."""

    def __init__(self, case: Case) -> None:
        """Draw the requests; none has come yet."""
        self.case = case
        self.workload = case.workload()
        self.scheduler = Scheduler(scheduler_config(case))
        self._beams = Beams(self.scheduler)
        self._coming = deque(range(case.num_requests))
        self._first_token = np.full(case.num_requests, np.nan)
        self._meter = Meter(case.num_requests)
        self._num_measured = 0  # steps
        self._saved: list[float] = []
        self.now = 0.0
        self.busy = 0.0

    def run(self) -> PagedRun:
        """Run until all have finished."""
        while self._coming or self.scheduler.has_unfinished():
            self._add_those_that_have_come()
            batch = self.scheduler.schedule()
            if batch is None:
                assert self._coming, "the scheduler has requests and runs none"
                self.now = float(self.workload.arrivals[self._coming[0]])
                continue
            self._step(batch)
        tokens, batch_size, rate = self._meter.means()
        return PagedRun(
            token_share=tokens / self.case.num_slots,
            mean_batch=batch_size,
            output_rate=rate,
            sharing=float(np.mean(self._saved)) if self._saved else 0.0,
            seconds=self.busy,
            counters=self.scheduler.counters.copy(),
            first_token=self._first_token,
        )

    def _add_those_that_have_come(self) -> None:
        case, workload = self.case, self.workload
        while self._coming and workload.arrivals[self._coming[0]] <= self.now:
            i = self._coming.popleft()
            num_prompt, num_output = int(workload.prompts[i]), int(workload.outputs[i])
            group = create_group(
                i, num_prompt, num_output, num_sequences=case.num_sequences, is_beam=case.is_beam
            )
            if case.is_beam:
                self._beams.add(group, num_output)
            self.scheduler.add(group)

    def _step(self, batch: Batch) -> None:
        """Let the time of a step pass and take its results in."""
        seconds = step_seconds(batch.num_tokens, int(batch.seq_lens.sum()))
        num_begun = int(np.count_nonzero(~np.isnan(self._first_token)))
        samples = np.nonzero(batch.flags & int(Flag.SAMPLES))[0]
        first = samples[(batch.output_position[samples] == 0) & (batch.group_index[samples] == 0)]
        if self._meter.measures(num_begun):
            running = self.scheduler.num_running / self.case.num_sequences
            self._meter.add(seconds, self.scheduler.num_stored_tokens, running, len(samples) / seconds)
            if self.case.num_sequences > 1 and self._num_measured % SAMPLE_STEPS == 0:
                self._saved.append(sharing(batch))
            self._num_measured += 1
        self.now += seconds
        self.busy += seconds
        update = self.scheduler.update(batch, output_of(batch))
        for i in first:
            seq = update.sequences[i]
            assert seq is not None, "nothing ends while a step is in flight"
            request = int(seq.group.request_id)
            if np.isnan(self._first_token[request]):
                self._first_token[request] = self.now - self.workload.arrivals[request]
        if self.case.is_beam:
            self._beams.advance(update, batch)


def simulate(case: Case) -> PagedRun:
    """Run a case; a function, so that other processes can."""
    return Simulation(case).run()


def num_swapped(run: PagedRun) -> int:
    """Return how many blocks went out or in."""
    return int(run.counters[Counter.SWAPPED_OUT_BLOCKS] + run.counters[Counter.SWAPPED_IN_BLOCKS])


def worst_waste(block_size: int) -> int:
    """Return how many slots one request holds at most beyond its tokens, over prompts of up to two blocks."""
    worst = 0
    for num_prompt in range(1, 2 * block_size + 1):
        scheduler = Scheduler(scheduler_config(Case(dataset=SHAREGPT, num_requests=1, block_size=block_size)))
        scheduler.add(create_group(0, num_prompt, 1))
        scheduler.schedule()
        held = scheduler.num_used_blocks * block_size
        worst = max(worst, held - scheduler.num_stored_tokens)
    return worst
