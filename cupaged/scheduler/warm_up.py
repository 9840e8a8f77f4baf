"""Compile all that plans, packs and takes back a step, so that no request waits for the compiler."""

import numpy as np

from cupaged.batch import Flag, StepOutput
from cupaged.sampling_params import SamplingParams
from cupaged.scheduler.scheduler import Scheduler
from cupaged.scheduler.scheduler_config import SchedulerConfig
from cupaged.sequence import FinishReason, SequenceGroup, SequenceStatus


def warm_up() -> None:
    """Run made-up groups through a small scheduler: forked, swapped, recomputed, cached, beams."""
    config = SchedulerConfig(
        num_blocks=7,
        block_size=2,
        max_num_seqs=4,
        max_num_batched_tokens=8,
        max_model_len=8,
        num_batches=1,
        num_host_blocks=7,
        sliding_window=8,
        policy="priority",
        preemption_mode="swap",
    )
    scheduler = Scheduler(config)
    forked, urgent, beams = _group(4, 2, priority=1), _group(7, 1), _group(4, 2, is_beam=True)
    scheduler.add(forked)
    _step(scheduler)
    _step(scheduler)
    scheduler.add(urgent)
    was_swapped = False
    while scheduler.has_unfinished():
        _step(scheduler)
        was_swapped |= forked.status is SequenceStatus.SWAPPED
    assert was_swapped, "nothing was swapped"
    scheduler.add(beams)
    _step(scheduler)
    scheduler.continue_beams(beams, [0, 0], [3, 4])
    scheduler.finish_group(beams, FinishReason.ABORT)
    scheduler.reset_prefix_cache()


def _group(num_prompt: int, num_sequences: int, *, priority: int = 0, is_beam: bool = False) -> SequenceGroup:
    return SequenceGroup(
        request_id="warm-up",
        prompt_token_ids=np.arange(num_prompt, 2 * num_prompt, dtype=np.int32),
        params=SamplingParams(),
        max_total_tokens=8,
        num_sequences=num_sequences,
        priority=priority,
        is_beam=is_beam,
    )


def _step(scheduler: Scheduler) -> None:
    batch = scheduler.schedule()
    assert batch is not None, "nothing else runs"
    samples = (batch.flags & int(Flag.SAMPLES)).astype(np.int32)
    scheduler.update(batch, StepOutput(np.full((batch.num_seqs, 1), 2, np.int32), samples))
