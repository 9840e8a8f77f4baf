"""What bench_offline runs: requests with lengths drawn from a seed, all sent at once; and what a run took."""

from time import perf_counter
from typing import NamedTuple

import numpy as np

from cupaged.engine.llm_engine import LLMEngine
from cupaged.sampling_params import RequestOutputKind, SamplingParams

SIGMA = 0.8  # of both log-normal distributions
SHORTEST, LONGEST = 8, 384  # tokens, prompt and output alike


class Workload(NamedTuple):
    """What is asked for, request by request."""

    prompts: list[list[int]]
    output_lengths: list[int]
    num_sequences: int = 1  # of each request
    temperature: float = 0.0


class Result(NamedTuple):
    """What one run took."""

    seconds: float
    num_steps: int
    num_output_tokens: int  # that were asked for
    first_token: list[float]  # seconds from the start, by sequence
    between_tokens: list[float]  # seconds, all sequences
    slot_use: float  # share of the slots of used blocks that hold a token, mean over steps
    peak_blocks: int
    shared: float  # of the blocks in sequences' tables, the share that sharing saves, mean over steps

    @property
    def tokens_per_second(self) -> float:
        """Return the output tokens per second."""
        return self.num_output_tokens / self.seconds


def make_workload(
    num_requests: int, seed: int, prompt_mean: int, output_mean: int, vocab_size: int
) -> Workload:
    """Draw lengths and token ids from `seed`."""
    rng = np.random.default_rng(seed)

    def lengths(mean: int) -> list[int]:
        drawn = rng.lognormal(np.log(mean) - SIGMA**2 / 2, SIGMA, num_requests)
        return [int(n) for n in np.clip(drawn, SHORTEST, LONGEST).round()]

    prompt_lengths, output_lengths = lengths(prompt_mean), lengths(output_mean)
    return Workload([rng.integers(0, vocab_size, n).tolist() for n in prompt_lengths], output_lengths)


def run(engine: LLMEngine, workload: Workload) -> Result:
    """Send everything at once and step until all is done."""
    last: dict[tuple[str, int], float] = {}  # by sequence
    first_token: list[float] = []
    between: list[float] = []
    slot_use: list[float] = []
    shared: list[float] = []
    steps_before = engine.num_steps
    engine.peak_kv_blocks = 0
    start = perf_counter()
    for i, (prompt, length) in enumerate(zip(workload.prompts, workload.output_lengths, strict=True)):
        engine.add_request(str(i), prompt, _params(workload, length))
    while engine.has_unfinished():
        outputs = engine.step()
        now = perf_counter()
        for key in ((output.request_id, part.index) for output in outputs for part in output.outputs):
            if key in last:
                between.append(now - last[key])
            else:
                first_token.append(now - start)
            last[key] = now
        scheduler = engine.scheduler
        if num_used := scheduler.num_used_blocks:
            slot_use.append(scheduler.num_stored_tokens / (num_used * engine.config.block_size))
            shared.append(1 - num_used / int(scheduler.block_manager.blocks.held.num_blocks.sum()))
    return Result(
        seconds=perf_counter() - start,
        num_steps=engine.num_steps - steps_before,
        num_output_tokens=sum(workload.output_lengths) * workload.num_sequences,
        first_token=first_token,
        between_tokens=between,
        slot_use=float(np.mean(slot_use)),
        peak_blocks=engine.peak_kv_blocks,
        shared=float(np.mean(shared)),
    )


def _params(workload: Workload, length: int) -> SamplingParams:
    return SamplingParams(
        temperature=workload.temperature,
        n=workload.num_sequences,
        max_tokens=length,
        ignore_eos=True,
        output_kind=RequestOutputKind.DELTA,
    )
