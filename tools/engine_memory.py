"""How fast the engine moves KV blocks on a machine of gpu_check: swaps each way, and copies on write."""

import statistics
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tools.engine_model import Bench
from tools.engine_timed import TimedEngine
from tools.machine import Machine

MAX_SWAPS = 256  # blocks that go at once
NUM_SWAP_REPEATS = 5  # the best counts, as of the link
NUM_FORK_REPEATS = 3


def time_swaps(machine: Machine, engine: TimedEngine) -> dict[str, Any]:
    """Return the bytes a second of swaps by the engine's own pools, blocks from all over them; none runs."""
    plan, backend = engine.plan, engine.executor.backend
    num_pairs = min(MAX_SWAPS, plan.num_blocks, plan.num_host_blocks)
    if not num_pairs:
        return {"skipped": "there is no host pool"}
    rng = np.random.Generator(np.random.PCG64(0))
    blocks, host_blocks = (
        rng.permutation(total)[:num_pairs].astype(np.int32)
        for total in (plan.num_blocks, plan.num_host_blocks)
    )
    outward: NDArray[np.int32] = np.stack([blocks, host_blocks], axis=1)
    inward = np.ascontiguousarray(outward[:, ::-1])
    seconds: dict[str, list[float]] = {"to_host": [], "to_device": []}
    for _ in range(NUM_SWAP_REPEATS):
        start = machine.mark()
        backend.swap_out(backend.pool, backend.host_pool, outward)
        middle = machine.mark()
        backend.swap_in(backend.host_pool, backend.pool, inward)
        end = machine.mark()
        machine.synchronize()
        seconds["to_host"].append(machine.elapsed(start, middle))
        seconds["to_device"].append(machine.elapsed(middle, end))
    num_bytes = num_pairs * plan.block_bytes
    rates = {name: num_bytes / min(times) for name, times in seconds.items()}
    return {**rates, "num_blocks": num_pairs, "block_bytes": plan.block_bytes}


def time_forks(machine: Machine, engine: TimedEngine, bench: Bench) -> dict[str, Any]:
    """Return the time of the decode that copies most blocks on write, and of such that copy none.

    All sequences of a request share their prompt's last block until each writes its first own token.
    """
    num_seqs = bench.fork.num_seqs * bench.num_forks
    copying, plain, num_copies = [], [], 0
    for _ in range(NUM_FORK_REPEATS):
        engine.steps.clear()
        engine.add(bench.fork, n=bench.num_forks, temperature=1.0)
        engine.run()
        machine.synchronize()
        decodes = [step for step in engine.steps if step.num_decodes == step.num_seqs == num_seqs]
        num_copies = max(step.num_copies for step in decodes)
        for step, after in pairwise(decodes):
            seconds = machine.elapsed(step.begin, after.begin)
            if step.num_copies == num_copies:
                copying.append(seconds)
            elif not step.num_copies:
                plain.append(seconds)
    return {
        "num_seqs": num_seqs,
        "num_copies": num_copies,
        "seconds": statistics.median(copying),
        "plain_seconds": statistics.median(plain),
        "copied_bytes": num_copies * engine.plan.block_bytes,
    }
