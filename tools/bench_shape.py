"""A model's shape on this CPU before its weights are here: tokens/s and memory, beside what to expect.

    python -m tools.bench_shape llama-3.2-1b                       decodes of 1 and of 16 sequences
    python -m tools.bench_shape llama-3.2-1b --quantization int8 --batch 1
    python -m tools.bench_shape MODEL                              or a checkpoint

The weights of a shape are random (load_format="dummy"), which takes as long and as much memory as real ones.
To be expected are the tokens/s of a step that does nothing but read weights, keys and values at the memory's
bandwidth, the median of parallel reads of as many bytes in the same run; and the bytes that the engine plans
with before it takes any. The memory taken is the process's peak, less what it had before there was an engine.
The last line is JSON.
"""

import argparse
import json
import resource
import sys
from math import prod
from time import perf_counter
from typing import Any

import numpy as np

from cupaged.config import ModelConfig
from cupaged.engine.llm_engine import LLMEngine
from cupaged.models import load_model_class
from tools.cpu_steps import (
    add_arguments,
    batches_of,
    decoding,
    make_engine,
    model_of,
    read_bandwidth,
    seconds_of,
)

WARM_UP = 3  # steps, after which no step of the same size takes more memory
UNIT = 1 if sys.platform == "darwin" else 1024  # bytes of ru_maxrss


def peak_memory() -> int:
    """Return the most bytes that this process has had resident."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * UNIT


def count_weights(config: ModelConfig) -> tuple[int, int]:
    """Return the model's numbers, and those that a step reads: not an embedding that is not the head too."""
    table = load_model_class(config.model_type).weights(config)
    sizes = {weight.name: prod(weight.shape) for weight in table}
    everything = sum(sizes.values())
    if not config.tie_word_embeddings:
        sizes = {name: size for name, size in sizes.items() if "embed_tokens" not in name}
    return everything, sum(sizes.values())


def measure_memory(engine: LLMEngine, before: int, args: argparse.Namespace) -> dict[str, int]:
    """Run steps of each size, print the memory that it took for people, and return it for scripts."""
    for batch in batches_of(args):
        with decoding(engine, batch, args.context):
            seconds_of(engine.step, WARM_UP)
    plan, taken = engine.executor.plan, peak_memory() - before
    weights, activations, cache, total, most = (
        f"{size / 2**20:.0f}"
        for size in (
            plan.use.weights,
            plan.use.activations,
            plan.num_blocks * plan.block_bytes,
            plan.total,
            taken,
        )
    )
    print(f"  planned: weights {weights} + activations {activations} + KV cache {cache} = {total} MiB")
    print(f"  taken at most: {most} MiB, {taken / plan.total:.2f} times that, beside ", end="")
    print(f"{before / 2**20:.0f} MiB of a process without an engine")
    return {"planned_bytes": plan.total, "taken_bytes": taken, "bytes_before": before}


def measure_speed(engine: LLMEngine, batch: int, num_bytes: int, args: argparse.Namespace) -> dict[str, Any]:
    """Print a batch's tokens/s beside the prediction for people; return it for scripts."""
    with decoding(engine, batch, args.context):
        seconds_of(engine.step, WARM_UP)
        before = read_bandwidth(num_bytes, args.num_threads)
        seconds = float(np.median(seconds_of(engine.step, args.steps)))
        bandwidth = (before + read_bandwidth(num_bytes, args.num_threads)) / 2
    num_tokens = batch * (args.context + WARM_UP + args.steps // 2)
    cached = num_tokens * engine.kv_block_bytes // engine.config.block_size
    found = {
        "tokens_per_second": batch / seconds,
        "predicted_tokens_per_second": batch * bandwidth / (num_bytes + cached),
        "bandwidth": bandwidth,
    }
    ratio = found["tokens_per_second"] / found["predicted_tokens_per_second"]
    print(
        f"  batch {batch:3}: {batch / seconds:8.1f} tokens/s, {ratio:4.0%} of what {bandwidth / 1e9:.1f}",
        end="",
    )
    print(f" GB/s give for {num_bytes / 1e6:.0f} MB of weights and {cached / 1e6:.0f} of keys and values")
    return found | {"ratio": ratio}


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser, batch="1,16")
    args = parser.parse_args()
    before = peak_memory()
    with model_of(args.model) as (directory, options):
        start = perf_counter()
        engine = make_engine(directory, args, args.steps + 2 * WARM_UP + 8, **options)
        seconds = perf_counter() - start
    everything, read = count_weights(engine.model_config)
    num_bytes = engine.executor.plan.use.weights * read // everything
    print(f"{args.model}, {args.quantization or args.dtype}: {everything / 1e9:.2f} billion weights", end="")
    print(f", ready after {seconds:.1f} s")
    figures: dict[str, Any] = {"model": args.model, "load_seconds": seconds}
    figures |= measure_memory(engine, before, args)
    for batch in batches_of(args):
        figures[f"batch_{batch}"] = measure_speed(engine, batch, num_bytes, args)
    engine.close()
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
