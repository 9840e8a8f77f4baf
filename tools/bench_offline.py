"""Throughput of N requests that all arrive at once: continuous and static batching, and sharing.

    python -m tools.bench_offline MODEL                        output tokens/s and latencies
    python -m tools.bench_offline MODEL --static 8,16,64       continuous over static batching at those limits
    python -m tools.bench_offline MODEL --shared-prefix 80,341 the prefix cache, where prompts begin alike
    python -m tools.bench_offline MODEL -n 4                   4 outputs of a request over 4 requests

One of these at a time. Prompt and output lengths are log-normal from a seed. The static mode runs on the
same engine: it pads to the longest prompt of a batch, goes on until its longest output is out, and then takes
the next batch, which is what any padded batch must compute; only the tokens that were asked for count. No run
finds what one before it has cached. tools/bench_peers.py sets the first of these beside other engines. The
last line is JSON.
"""

import argparse
import json
import os
import resource
from functools import partial
from typing import Any

import numpy as np

from cupaged.config import EngineConfig
from cupaged.engine.llm_engine import LLMEngine
from tools.offline_runs import LONGEST, Result, Workload, make_workload, run
from tools.offline_sharing import compare_prefixes, compare_sampling, run_fresh


def run_static(engine: LLMEngine, workload: Workload, limit: int) -> tuple[float, int]:
    """Run padded batches of `limit` requests one after the other; return seconds and steps."""
    seconds, num_steps = 0.0, 0
    engine.reset_prefix_cache()
    for i in range(0, len(workload.prompts), limit):
        prompts, lengths = workload.prompts[i : i + limit], workload.output_lengths[i : i + limit]
        longest = max(map(len, prompts))
        padded = [prompt + [0] * (longest - len(prompt)) for prompt in prompts]
        result = run(engine, Workload(padded, [max(lengths)] * len(prompts)))
        seconds += result.seconds
        num_steps += result.num_steps
    return seconds, num_steps


def make_engine(args: argparse.Namespace, max_num_seqs: int, **options: Any) -> LLMEngine:
    """Build and warm an engine, so that compilation is not part of the figures."""
    config = EngineConfig.create(
        args.model,
        dtype=args.dtype,
        max_num_seqs=max_num_seqs,
        num_threads=args.num_threads,
        **{"max_model_len": 2 * LONGEST} | options,
    )
    engine = LLMEngine(config)
    vocab_size = engine.model_config.vocab_size
    run(engine, make_workload(4, 1, prompt_mean=32, output_mean=8, vocab_size=vocab_size))
    return engine


def report(result: Result, engine: LLMEngine) -> dict[str, float]:
    """Print one run for people; return it for scripts."""
    first, between = np.array(result.first_token), np.array(result.between_tokens)
    figures = {
        "output_tokens_per_second": result.tokens_per_second,
        "requests_per_second": len(first) / result.seconds,
        "ttft_median_seconds": float(np.median(first)),
        "ttft_p99_seconds": float(np.percentile(first, 99)),
        "inter_token_median_ms": float(np.median(between)) * 1e3,
        "inter_token_p99_ms": float(np.percentile(between, 99)) * 1e3,
        "peak_memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "kv_slot_use": result.slot_use,
        "kv_peak_pool_use": result.peak_blocks / engine.num_kv_blocks,
        "num_steps": result.num_steps,
        "seconds": result.seconds,
    }
    for name, value in figures.items():
        print(f"  {name:28} {value:10.2f}")
    return figures


def compare_static(args: argparse.Namespace, limits: list[int]) -> dict[str, dict[str, float]]:
    """Print continuous over static batching for each limit of running sequences."""
    print(f"  {'limit':>6} {'continuous':>12} {'static':>12} {'time ratio':>11} {'steps ratio':>12}")
    table = {}
    for limit in limits:
        engine = make_engine(args, limit)
        workload = _workload(args, engine)
        result = run_fresh(engine, workload)
        seconds, num_steps = run_static(engine, workload, limit)
        engine.close()
        ratios = {"time_ratio": seconds / result.seconds, "steps_ratio": num_steps / result.num_steps}
        table[str(limit)] = ratios
        print(
            f"  {limit:6} {result.seconds:10.2f} s {seconds:10.2f} s {ratios['time_ratio']:10.2f}x"
            f" {ratios['steps_ratio']:11.2f}x"
        )
    return table


def _workload(args: argparse.Namespace, engine: LLMEngine) -> Workload:
    """Return the requests that the command line asks for."""
    return make_workload(
        args.num_requests // args.n,
        args.seed,
        prompt_mean=args.prompt_mean,
        output_mean=args.output_mean,
        vocab_size=engine.model_config.vocab_size,
    )


def parse_args() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="directory of a checkpoint")
    parser.add_argument("--num-requests", type=int, default=64)
    parser.add_argument("--prompt-mean", type=int, default=128, help="tokens; not of --shared-prefix")
    parser.add_argument("--output-mean", type=int, default=96, help="tokens; not of --shared-prefix")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--num-threads", type=int, default=os.cpu_count())
    parser.add_argument("--repeat", type=int, default=1, help="runs; the median is reported")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--shared-prefix", metavar="LENGTHS", help="tokens that all prompts begin with")
    mode.add_argument("-n", type=int, default=1, help="outputs of a request, of which there are as many less")
    mode.add_argument("--static", metavar="LIMITS", help="limits of running sequences, such as 8,16,64")
    args = parser.parse_args()
    if args.static and args.repeat > 1:
        parser.error("--static makes one run of each, so it takes no --repeat")
    return args


def main() -> None:
    """Run what the command line asks for."""
    args = parse_args()
    figures: dict[str, Any] = {}
    if args.static:
        figures["static"] = compare_static(args, [int(limit) for limit in args.static.split(",")])
    elif args.shared_prefix:
        lengths = [int(length) for length in args.shared_prefix.split(",")]
        figures["shared_prefix"] = compare_prefixes(
            partial(make_engine, args), lengths, args.num_requests, args.seed, args.repeat
        )
    elif args.n > 1:
        figures["sampling"] = compare_sampling(
            partial(make_engine, args), partial(_workload, args), args.num_requests, args.n, args.repeat
        )
    else:
        figures |= measure(args)
    print(json.dumps(figures))


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Print throughput and latencies."""
    engine = make_engine(args, 256)
    workload = _workload(args, engine)
    results = sorted((run_fresh(engine, workload) for _ in range(args.repeat)), key=lambda r: r.seconds)
    print(f"{len(workload.prompts)} requests, {sum(map(len, workload.prompts))} prompt tokens")
    figures: dict[str, Any] = {"cupaged": report(results[len(results) // 2], engine)}
    engine.close()
    return figures


if __name__ == "__main__":
    main()
