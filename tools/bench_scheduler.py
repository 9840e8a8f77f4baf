"""Microseconds of host time that the scheduler takes per step: schedule + pack, and update.

All sequences decode steadily from random contexts of 64 to 448 tokens, in a pool of 100,000 blocks of 16; the
figures are medians over steps. The comparison is vLLM 0.32's Python scheduler (schedule + update, without
packing) on a machine of the same kind.

    python tools/bench_scheduler.py
"""

import json
from time import perf_counter

import numpy as np

from cupaged.batch import Batch, Flag, StepOutput
from cupaged.sampling_params import SamplingParams
from cupaged.scheduler.scheduler import Scheduler
from cupaged.sequence import Sequence

NUM_BLOCKS = 100_000
BLOCK_SIZE = 16
NUM_STEPS = 100
MAX_MODEL_LEN = 4096
VLLM_MS = {64: 1.0, 256: 3.7, 1024: 16.7, 4096: 88.0}  # by running sequences


def output_of(batch: Batch) -> StepOutput:
    """Return what a worker would: token 7 for each sequence that samples."""
    samples = batch.flags & int(Flag.SAMPLES)
    return StepOutput(np.full((batch.num_seqs, 1), 7, np.int32), samples.astype(np.int32))


def start(num_seqs: int) -> Scheduler:
    """Return a scheduler whose `num_seqs` sequences have all been prefilled."""
    rng = np.random.default_rng(0)
    scheduler = Scheduler(
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=65536,  # so that all are prefilled within few steps
        max_model_len=MAX_MODEL_LEN,
    )
    for i, length in enumerate(rng.integers(64, 449, num_seqs).tolist()):
        scheduler.add(
            Sequence(
                request_id=str(i),
                prompt_token_ids=rng.integers(10, 1000, length).astype(np.int32),
                params=SamplingParams(max_tokens=None),
                max_total_tokens=MAX_MODEL_LEN,
                stop_token_ids=(2,),
            )
        )
    while True:
        batch = scheduler.schedule()
        assert batch is not None
        scheduler.update(batch, output_of(batch))
        if batch.num_decodes == num_seqs:
            return scheduler


def measure(num_seqs: int) -> tuple[float, float, float]:
    """Return the median microseconds of schedule + pack, of update and of both together."""
    scheduler = start(num_seqs)
    times = np.empty((NUM_STEPS, 3))
    for step in range(NUM_STEPS):
        begin = perf_counter()
        batch = scheduler.schedule()
        scheduled = perf_counter()
        assert batch is not None
        assert batch.num_seqs == num_seqs
        output = output_of(batch)
        returned = perf_counter()
        scheduler.update(batch, output)
        times[step, 0] = scheduled - begin
        times[step, 1] = perf_counter() - returned
    times[:, 2] = times[:, 0] + times[:, 1]
    schedule, update, total = (np.median(times, axis=0) * 1e6).tolist()
    return schedule, update, total


def main() -> None:
    """Print the table and a last line of JSON."""
    print("running  schedule + pack us  update us  total us  vLLM 0.32 us  ratio")
    results = []
    for num_seqs, vllm_ms in VLLM_MS.items():
        schedule, update, total = measure(num_seqs)
        ratio = vllm_ms * 1e3 / total
        print(f"{num_seqs:7d}{schedule:20.0f}{update:11.0f}{total:10.0f}{vllm_ms * 1e3:14.0f}{ratio:6.0f}x")
        results.append(
            {
                "running": num_seqs,
                "schedule_us": round(schedule, 1),
                "update_us": round(update, 1),
                "total_us": round(total, 1),
                "vllm_ratio": round(ratio, 1),
            }
        )
    print(json.dumps({"bench": "scheduler", "blocks": NUM_BLOCKS, "results": results}))


if __name__ == "__main__":
    main()
