"""Load: a Scheduler kept full with made-up requests, and what each of its steps took.

For bench_scheduler and bench_trace; that every sequence samples the same token, paper_paged has from here.
"""

from collections.abc import Callable, Iterable
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from cupaged.batch import Batch, Flag, StepOutput
from cupaged.sampling_params import SamplingParams
from cupaged.scheduler.counters import Counter
from cupaged.scheduler.scheduler import Scheduler, Update
from cupaged.scheduler.scheduler_config import SchedulerConfig
from cupaged.sequence import SequenceGroup

BLOCK_SIZE = 16
MAX_MODEL_LEN = 4096
BUDGET = 65536  # tokens of a step, so that all are prefilled within few
SHORTEST, LONGEST = 64, 448  # tokens of a prompt
TOKEN = 7  # what every sequence samples
GPU_STEP_US = 5000.0  # of a GPU's step, which a scheduler's stands beside


class Step(NamedTuple):
    """What one step took and did."""

    schedule: float  # seconds, with pack
    update: float  # with continue_beams
    num_tokens: int
    num_decodes: int
    num_forks: int
    num_copies: int
    num_swaps: int  # blocks, out and in


class Load:
    """A scheduler with as many sequences as it can run; a request that ends makes room for another.

    The first ones end one after the other, evenly over `num_output` steps, or with the others of their round
    if `in_rounds`; without num_output nobody ends.
    """

    def __init__(
        self,
        num_seqs: int,
        *,
        num_blocks: int = 100_000,
        num_output: int | None = None,
        prompt_lengths: tuple[int, int] = (SHORTEST, LONGEST),
        max_model_len: int = MAX_MODEL_LEN,
        width: int = 1,
        in_rounds: bool = False,
        is_beam: bool = False,
        create: Callable[[SchedulerConfig], Scheduler] = Scheduler,
        **options: Any,
    ) -> None:
        """Queue the first requests, each with `width` sequences; `options` are SchedulerConfig's."""
        config = SchedulerConfig(
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            max_num_seqs=num_seqs,
            max_num_batched_tokens=BUDGET,
            max_model_len=max_model_len,
            **options,
        )
        self.scheduler = create(config)
        self.groups: list[SequenceGroup] = []  # so far, in order
        self._num_output, self._prompt_lengths = num_output, prompt_lengths
        self._width, self._is_beam = width, is_beam
        self._rng = np.random.default_rng(0)
        num_groups = num_seqs // width
        for i in range(1, 1 + num_groups):
            self._add(num_output if in_rounds else num_output and 1 + num_output * i // num_groups)

    def step(self) -> Step:
        """Run a step, and replace the requests that ended in it."""
        scheduler = self.scheduler
        num_forks = int(scheduler.counters[Counter.FORKS])
        begin = perf_counter()
        batch = scheduler.schedule()
        seconds = perf_counter() - begin
        assert batch is not None, "nothing is in flight, so something can run"
        output = output_of(batch)
        begin = perf_counter()
        update = scheduler.update(batch, output)
        update_seconds = perf_counter() - begin
        if self._is_beam:
            update_seconds += self._continue_beams(update)
        for _ in ended(update):
            self._add(self._num_output)
        return Step(
            schedule=seconds,
            update=update_seconds,
            num_tokens=batch.num_tokens,
            num_decodes=batch.num_decodes,
            num_forks=int(scheduler.counters[Counter.FORKS]) - num_forks,
            num_copies=len(batch.copy),
            num_swaps=len(batch.swap_out) + len(batch.swap_in),
        )

    def _continue_beams(self, update: Update) -> float:
        """Choose the next beams: the best one goes on twice, the worst one ends. Return the seconds."""
        active: dict[SequenceGroup, int] = {}
        for seq in update.sequences:
            assert seq is not None, "nobody ends a beam"
            active[seq.group] = active.get(seq.group, 0) + 1
        tokens = [TOKEN] * self._width
        parents = {1: [0] * self._width, self._width: [0, *range(self._width - 1)]}  # by how many there are
        begin = perf_counter()
        for group, num_active in active.items():
            self.scheduler.continue_beams(group, parents[num_active], tokens)
        return perf_counter() - begin

    def _add(self, num_output: int | None) -> None:
        length = int(self._rng.integers(*self._prompt_lengths, endpoint=True))
        group = SequenceGroup(
            request_id=str(len(self.groups)),
            prompt_token_ids=self._rng.integers(10, 1000, length).astype(np.int32),
            params=SamplingParams(max_tokens=None),
            max_total_tokens=length + num_output if num_output else self.scheduler.config.max_model_len,
            stop_token_ids=(2,),
            num_sequences=self._width,
            is_beam=self._is_beam,
        )
        self.groups.append(group)
        self.scheduler.add(group)


def output_of(batch: Batch) -> StepOutput:
    """Return what a worker would: TOKEN for each sequence that samples."""
    samples = batch.flags & int(Flag.SAMPLES)
    return StepOutput(np.full((batch.num_seqs, 1), TOKEN, np.int32), samples.astype(np.int32))


def ended(update: Update) -> Iterable[SequenceGroup]:
    """Return the requests whose last sequence ended."""
    last = [seq for seq in update.sequences if seq is not None and seq.finish_reason is not None]
    return {seq.group: None for seq in last if not seq.group.unfinished}
