"""Microseconds of host time that a scheduler's step takes, schedule + pack and update, by what happens in it.

    python -m tools.bench_scheduler [--running 256,4096]

decode    every sequence computes one token, from contexts of 64 to 448 tokens on; beside vLLM 0.32's Python
          scheduler (schedule + update, without packing) on a machine of the same kind
turnover  one of 256 sequences ends in each step, and another enters whose prompt is not cached; the pool is
          so small that cached blocks are evicted for it
forks     turnover of requests with 4 sequences each; the steps in which some fork or copy a block on write
copies    requests of 4 sequences that begin and end together, in rounds; the steps in which half of all
          sequences copy a block on write
swaps     turnover in a pool that is too small; the steps in which blocks are swapped out or in
beams     every request keeps 4 beams and chooses anew in each step; continue_beams counts as update

The first two run with the prefix cache on and off in turn: the difference is what it costs where nothing is
found. It stands beside a GPU's step of 5 ms, and beside the least that a Llama-3.1-8B's step of so many takes
on an H200 (tools/steps.py). All else runs with it on. Figures are medians over the steps of several runs. A
lookup is of 4,096 tokens, all of them cached. The last line is JSON.

--running takes multiples of 4, the sequences of a request, from 16, whose pools hold a longest sequence, to
4096, whose contexts the pool of `decode` holds.
"""

import argparse
import json
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from cupaged.scheduler.counters import Counter
from cupaged.scheduler.prefix_cache import lookup_prefix
from tools.gpu_specs import H200
from tools.scheduler_load import BLOCK_SIZE, GPU_STEP_US, Load, Step
from tools.steps import LLAMA_8B
from tools.steps import Step as GpuStep

NUM_STEPS = 60  # of a run, that count
NUM_RUNS = 3
CACHE_TARGET = 0.01  # of a GPU's step, where nothing is found
MEAN_CONTEXT = 256  # tokens of a sequence, as Load has them at first
TARGET_US = {256: 200.0, 4096: 2000.0}  # a step, by running sequences
LOOKUP_TARGET_US = 60.0
LOOKUP_TOKENS = 4096
NUM_LOOKUPS = 64  # prompts, looked up in turn
VLLM_US = {64: 1e3, 256: 3.7e3, 1024: 16.7e3, 4096: 88e3}  # by running sequences
TURNOVER = 256  # steps until a sequence ends
WIDTH = 4  # sequences of a request that has several
FEWEST, MOST = 16, 4096  # running sequences that every scenario has steps for


class Scenario(NamedTuple):
    """Which scheduler runs, and which of its steps count."""

    create: Callable[..., Load]  # (number of running sequences, enable_prefix_caching=)
    counts: Callable[[Step, int], bool]  # of a step and that number
    num_warm_steps: int = 0
    num_steps: int = NUM_STEPS
    num_runs: int = NUM_RUNS


class Timing(NamedTuple):
    """Medians over steps, in microseconds."""

    schedule: float
    update: float
    total: float


def _turnover(num_seqs: int, *, blocks_each: int = 32, num_output: int = TURNOVER, **options: Any) -> Load:
    return Load(num_seqs, num_blocks=blocks_each * num_seqs, num_output=num_output, **options)


def _swaps(num_seqs: int, **options: Any) -> Load:
    host: dict[str, Any] = {"num_host_blocks": 32 * num_seqs, "preemption_mode": "swap"}
    return _turnover(num_seqs, blocks_each=20, **host, **options)


TURNED_OVER = 128  # steps, until the pool is full of blocks that are cached
COMPARED = {  # with the prefix cache on and off
    "decode": Scenario(Load, lambda step, num_seqs: step.num_decodes == num_seqs),
    "turnover": Scenario(_turnover, lambda step, num_seqs: step.num_tokens > num_seqs, TURNED_OVER),
}
SCENARIOS = {
    "forks": Scenario(
        partial(_turnover, width=WIDTH, num_output=TURNOVER // 4),
        lambda step, num_seqs: step.num_decodes > num_seqs // 2 and step.num_forks + step.num_copies > 0,
        TURNED_OVER,
    ),
    "copies": Scenario(
        partial(Load, width=WIDTH, prompt_lengths=(17, 24), num_output=8, in_rounds=True),
        lambda step, num_seqs: step.num_copies >= num_seqs // 2,
        num_warm_steps=10,  # a round
        num_steps=11,
    ),
    "swaps": Scenario(_swaps, lambda step, num_seqs: step.num_swaps > 0, TURNED_OVER),  # noqa: ARG005
    "beams": Scenario(
        partial(Load, width=WIDTH, is_beam=True), lambda step, num_seqs: step.num_decodes == num_seqs, 10
    ),
}


def run(scenario: Scenario, num_seqs: int, *, caching: bool = True) -> list[Step]:
    """Return the steps of one run that count."""
    load = scenario.create(num_seqs, enable_prefix_caching=caching)
    for _ in range(scenario.num_warm_steps):
        load.step()
    steps: list[Step] = []
    while len(steps) < scenario.num_steps:
        step = load.step()
        if scenario.counts(step, num_seqs):
            steps.append(step)
    assert load.scheduler.counters[Counter.PREFIX_HIT_TOKENS] == 0, "a prompt was found in the cache"
    return steps


def median(steps: list[Step]) -> Timing:
    """Return the medians of schedule + pack, update, and both together."""
    seconds = np.array([(step.schedule, step.update, step.schedule + step.update) for step in steps])
    return Timing(*(np.median(seconds, axis=0) * 1e6).tolist())


def compare(scenario: Scenario, num_seqs: int) -> tuple[Timing, Timing]:
    """Return the timings with the prefix cache on and off, from runs in turn."""
    steps: dict[bool, list[Step]] = {True: [], False: []}
    for _ in range(scenario.num_runs):
        for caching, found in steps.items():
            found += run(scenario, num_seqs, caching=caching)
    return median(steps[True]), median(steps[False])


def lookup_us(num_prompts: int = NUM_LOOKUPS) -> float:
    """Return the median time of a lookup of LOOKUP_TOKENS tokens, all of which are found; prompts in turn."""
    lengths = (LOOKUP_TOKENS, LOOKUP_TOKENS)
    load = Load(num_prompts, prompt_lengths=lengths, max_model_len=2 * LOOKUP_TOKENS, num_output=1)
    groups = list(load.groups)
    while any(group.unfinished for group in groups):
        load.step()
    cache = load.scheduler.block_manager.blocks.cache
    blocks = np.empty(LOOKUP_TOKENS // BLOCK_SIZE, np.int32)
    times = []
    for _ in range(1 + NUM_RUNS):  # the first compiles
        for group in groups:
            begin = perf_counter()
            num_found = lookup_prefix(cache, group.prompt_token_ids, 0, blocks)
            times.append(perf_counter() - begin)
            assert num_found == blocks.size, f"{num_found} of {blocks.size} blocks were found"
    return float(np.median(times[num_prompts:])) * 1e6


def report(name: str, num_seqs: int, timing: Timing) -> dict[str, Any]:
    """Print a row for people; return it for scripts."""
    row: dict[str, Any] = {"scenario": name, "running": num_seqs}
    row |= {f"{part}_us": round(value, 1) for part, value in timing._asdict().items()}
    said = ""
    if num_seqs in TARGET_US:
        row["target_us"] = TARGET_US[num_seqs]
        said += f"{TARGET_US[num_seqs]:8.0f}"
    if name == "decode" and num_seqs in VLLM_US:
        row["vllm_us"] = VLLM_US[num_seqs]
        said += f"   vLLM 0.32: {VLLM_US[num_seqs]:.0f}, {VLLM_US[num_seqs] / timing.total:.0f}x"
    times = "".join(f"{value:10.0f}" for value in timing)
    print(f"{name:18}{num_seqs:8}{times}{said}", flush=True)
    return row


def cost_row(name: str, num_seqs: int, cost_us: float) -> dict[str, Any]:
    """Return what the prefix cache costs a step in which it finds nothing, beside what a GPU's step takes."""
    gpu_step = GpuStep(LLAMA_8B, num_seqs, MEAN_CONTEXT)
    least = gpu_step.roofline(H200.copy_bandwidth, H200.matmul_flops)
    return {
        "scenario": name,
        "running": num_seqs,
        "cost_us": round(cost_us, 1),
        "share_of_5_ms": round(cost_us / GPU_STEP_US, 4),
        "share_of_8b_step": round(cost_us / (least * 1e6), 4),
    }


def parse_running(text: str) -> list[int]:
    """Return the numbers of --running; ArgumentTypeError for one that some scenario cannot run."""
    numbers = [int(number) for number in text.split(",")]
    for number in numbers:
        if number % WIDTH or not FEWEST <= number <= MOST:
            raise argparse.ArgumentTypeError(
                f"{number} is no multiple of {WIDTH} from {FEWEST} to {MOST}; {WIDTH} sequences are a request"
            )
    return numbers


def main() -> None:
    """Print the table and a last line of JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--running",
        type=parse_running,
        default="64,256,1024,4096",
        metavar="NUMBERS",
        help="sequences, such as 256,4096",
    )
    running = parser.parse_args().running
    print(f"{'us a step':18}{'running':>8}{'schedule':>10}{'update':>10}{'total':>10}{'target':>8}")
    rows, costs = [], []
    for num_seqs in running:
        for name, scenario in COMPARED.items():
            on, off = compare(scenario, num_seqs)
            rows += [report(name, num_seqs, on), report(f"{name}, no cache", num_seqs, off)]
            costs.append(cost_row(name, num_seqs, on.total - off.total))
        for name, scenario in SCENARIOS.items():
            steps = [step for _ in range(scenario.num_runs) for step in run(scenario, num_seqs)]
            rows.append(report(name, num_seqs, median(steps)))
    for cost in costs:
        print(
            f"prefix cache, no hits, {cost['scenario']}, {cost['running']} running: {cost['cost_us']} us, "
            f"{cost['share_of_5_ms']:.1%} of 5 ms, {cost['share_of_8b_step']:.1%} of an 8B's step; goal: "
            f"below {CACHE_TARGET:.0%}"
        )
    lookup = lookup_us()
    print(
        f"lookup of {LOOKUP_TOKENS} tokens, all found: {lookup:.1f} us, goal at most {LOOKUP_TARGET_US:.0f}"
    )
    print(json.dumps({"bench": "scheduler", "results": rows, "cache": costs, "lookup_us": round(lookup, 1)}))


if __name__ == "__main__":
    main()
