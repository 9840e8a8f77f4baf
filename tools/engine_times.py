"""How fast the engine is on a machine of gpu_check: steps, whole workloads, matrix products alone."""

import statistics
from collections.abc import Sequence
from itertools import pairwise
from time import perf_counter
from typing import Any

from cupaged.backend.gemm import WORKSPACE_BYTES, Gemm
from cupaged.kernels.launch import SOURCES, ceil_div
from tools.engine_model import Bench, Workload
from tools.engine_timed import TimedEngine, TimedStep
from tools.kernel_cases.case import DTYPES
from tools.machine import Machine, Times, summarize
from tools.steps import ITEM, Step
from tools.steps import Gemm as Product

NUM_WARM_STEPS = 3  # of each kind, which do not count
NUM_IN_FLIGHT = 2  # the last steps noted, which nobody waited for
NUM_SPARE = 8  # tokens that a sequence is not to run out of
NUM_RUNS = 2  # of a workload, the best counts


def time_step(machine: Machine, engine: TimedEngine, bench: Bench, step: Step) -> dict[str, Any]:
    """Return the times of a step; "skipped" says why there are none."""
    if step.num_new > 1:
        return time_prefill(machine, engine, step, bench.num_prefills)
    return time_decodes(machine, engine, step, bench.num_timed_steps)


def time_prefill(machine: Machine, engine: TimedEngine, step: Step, num_repeats: int) -> dict[str, Any]:
    """Return the time of a step that computes whole prompts, from the first mark to the last."""
    times = []
    for _ in range(1 + num_repeats):
        engine.steps.clear()
        engine.add(Workload(step.num_seqs, step.length, 1))
        engine.run()
        machine.synchronize()
        (only,) = engine.steps
        times.append(machine.elapsed(only.begin, only.end))
    return summarize(times[1:], 1, 1)._asdict()


def time_decodes(machine: Machine, engine: TimedEngine, step: Step, num_steps: int) -> dict[str, Any]:
    """Return the times of steps in which all sequences decode, with CUDA graphs and without.

    Prompts are so much shorter than the step says that the mean length is what it says while the steps with
    graphs are timed.
    """
    num_prefills = ceil_div(step.num_seqs * step.length, engine.plan.limits.num_tokens)
    lead = num_prefills // 2 + NUM_WARM_STEPS + num_steps // 2
    num_decodes = 2 * (NUM_WARM_STEPS + num_steps + NUM_IN_FLIGHT)
    work = Workload(step.num_seqs, step.length - lead, num_prefills + num_decodes + NUM_SPARE)
    size = engine.plan.limits.block_size
    if engine.plan.num_blocks < work.num_seqs * ceil_div(work.prompt_length + work.output_length, size):
        return {"skipped": f"the KV cache has {engine.plan.num_blocks} blocks"}
    engine.steps.clear()
    engine.add(work)
    while not engine.steps or engine.steps[-1].num_decodes < step.num_seqs:
        engine.engine.step()
    found = {}
    for kind, is_eager in (("graphs", False), ("eager", True)):
        engine.set_eager(is_eager)
        engine.steps.clear()
        for _ in range(NUM_WARM_STEPS + num_steps + NUM_IN_FLIGHT):
            engine.engine.step()
        found[kind] = _intervals(machine, engine.steps[NUM_WARM_STEPS:-NUM_IN_FLIGHT])
    engine.set_eager(False)
    engine.drop_all()
    return {"seconds": found["graphs"]["seconds"], **found}


def _intervals(machine: Machine, steps: Sequence[TimedStep]) -> dict[str, float]:
    """Return what lies between the marks of steps that followed each other."""
    assert all(step.num_decodes == steps[0].num_seqs for step in steps), "a sequence does not decode"
    machine.synchronize()
    periods = [machine.elapsed(step.begin, after.begin) for step, after in pairwise(steps)]
    gaps = sorted(machine.elapsed(step.end, after.begin) for step, after in pairwise(steps))
    return {
        "seconds": statistics.median(periods),
        "spread": summarize(periods, 1, 1).spread,
        "gap_seconds": statistics.median(gaps),
        "gap_90_seconds": gaps[9 * len(gaps) // 10],  # nine of ten are at most as long
        "host_seconds": statistics.median(step.host_seconds for step in steps),
        "num_cached": statistics.mean(step.num_cached for step in steps),
    }


def time_workload(engine: TimedEngine, work: Workload) -> float:
    """Return the host's seconds from the first request to the last one's end."""
    times = []
    for _ in range(NUM_RUNS):
        start = perf_counter()
        engine.add(work)
        engine.run()
        times.append(perf_counter() - start)
    return min(times)


def time_gemm(machine: Machine, product: Product) -> Times:
    """Return the time of a matrix product by the algorithm that the engine uses, no weight of it in L2."""
    gemm, maker = Gemm(machine.gpu()), machine.gpu_maker()
    element, out = DTYPES["bf16"], DTYPES["bf16" if product.out_bytes == ITEM else "float"]
    num_sets = max(2, ceil_div(3 * machine.l2_bytes, product.num_bytes))
    sets = [
        (
            maker.normal((product.rows, product.in_features), element),
            gemm.prepare(maker.normal((product.out_features, product.in_features), element, 0.02)),
            maker.unwritten((product.rows, product.out_features), out),
        )
        for _ in range(num_sets)
    ]
    gemm.note(*sets[0])
    workspace, room = (maker.unwritten((size,), "u1") for size in (WORKSPACE_BYTES, product.num_bytes))
    gemm.tune(workspace, room, product.rows)
    return machine.time(lambda i: gemm.multiply(*sets[i % num_sets]), SOURCES, num_sets)
