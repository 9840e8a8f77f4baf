"""Throughput of N requests that all arrive at once: continuous batching, static batching, and a peer.

    python tools/bench_offline.py MODEL                        output tokens/s and latencies
    python tools/bench_offline.py MODEL --static 8,16,64       continuous over static batching at those limits
    python tools/bench_offline.py MODEL --peer transformers --peer-python PYTHON

Prompt and output lengths are log-normal from a seed. The static mode runs on the same engine: it pads to
the longest prompt of a batch, goes on until its longest output is out, and then takes the next batch, which
is what any padded batch must compute; only the tokens that were asked for count. The peer runs the same
lengths in padded batches of 8 in its own environment. The last line is JSON.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from cupaged.config import EngineConfig
from cupaged.engine.llm_engine import LLMEngine
from cupaged.sampling_params import RequestOutputKind, SamplingParams

SIGMA = 0.8  # of both log-normal distributions
SHORTEST, LONGEST = 8, 384  # tokens, prompt and output alike
PEER_BATCH = 8  # sequences in a padded batch of the peer


class Workload(NamedTuple):
    """What is asked for, request by request."""

    prompts: list[list[int]]
    output_lengths: list[int]


class Result(NamedTuple):
    """What one run took."""

    seconds: float
    num_steps: int
    num_output_tokens: int  # that were asked for
    first_token: list[float]  # seconds from the start, by request
    between_tokens: list[float]  # seconds, all requests
    slot_use: float  # share of the slots of used blocks that hold a token, mean over steps
    peak_blocks: int

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
    last: dict[str, float] = {}
    first_token: list[float] = []
    between: list[float] = []
    slot_use: list[float] = []
    steps_before = engine.num_steps
    engine.peak_kv_blocks = 0
    start = perf_counter()
    for i, (prompt, length) in enumerate(zip(*workload, strict=True)):
        engine.add_request(str(i), prompt, _params(length))
    while engine.has_unfinished():
        outputs = engine.step()
        now = perf_counter()
        for output in outputs:
            if output.request_id in last:
                between.append(now - last[output.request_id])
            else:
                first_token.append(now - start)
            last[output.request_id] = now
        if engine.scheduler.num_used_blocks:
            used = engine.scheduler.num_used_blocks * engine.config.block_size
            slot_use.append(engine.scheduler.num_cached_tokens / used)
    return Result(
        seconds=perf_counter() - start,
        num_steps=engine.num_steps - steps_before,
        num_output_tokens=sum(workload.output_lengths),
        first_token=first_token,
        between_tokens=between,
        slot_use=float(np.mean(slot_use)),
        peak_blocks=engine.peak_kv_blocks,
    )


def run_static(engine: LLMEngine, workload: Workload, limit: int) -> tuple[float, int]:
    """Run padded batches of `limit` requests one after the other; return seconds and steps."""
    seconds, num_steps = 0.0, 0
    for i in range(0, len(workload.prompts), limit):
        prompts, lengths = workload.prompts[i : i + limit], workload.output_lengths[i : i + limit]
        longest = max(map(len, prompts))
        padded = [prompt + [0] * (longest - len(prompt)) for prompt in prompts]
        result = run(engine, Workload(padded, [max(lengths)] * len(prompts)))
        seconds += result.seconds
        num_steps += result.num_steps
    return seconds, num_steps


def run_peer(args: argparse.Namespace, workload: Workload) -> dict[str, Any]:
    """Run the workload through tools/peer_transformers.py under the peer's own Python."""
    order = {
        "model": args.model,
        "prompts": workload.prompts,
        "output_lengths": workload.output_lengths,
        "batch": PEER_BATCH,
        "threads": args.num_threads,
        "dtype": args.peer_dtype,
    }
    # Threads that spin would stall it 20 times over beside a busy neighbour.
    environment = os.environ | {"OMP_WAIT_POLICY": "passive"}
    for name in ("OPENBLAS_CORETYPE", "PYTHONPATH"):
        environment.pop(name, None)
    script = Path(__file__).with_name("peer_transformers.py")
    done = subprocess.run(
        [args.peer_python, str(script)],
        input=json.dumps(order),
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    if done.returncode:
        sys.exit(f"the peer failed under {args.peer_python}:\n{done.stderr[-2000:]}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def make_engine(args: argparse.Namespace, max_num_seqs: int) -> LLMEngine:
    """Build and warm an engine, so that compilation is not part of the figures."""
    config = EngineConfig.create(
        args.model,
        dtype=args.dtype,
        max_num_seqs=max_num_seqs,
        num_threads=args.num_threads,
        max_model_len=2 * LONGEST,
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
        result = run(engine, workload)
        seconds, num_steps = run_static(engine, workload, limit)
        engine.close()
        ratios = {"time_ratio": seconds / result.seconds, "steps_ratio": num_steps / result.num_steps}
        table[str(limit)] = ratios
        print(
            f"  {limit:6} {result.seconds:10.2f} s {seconds:10.2f} s {ratios['time_ratio']:10.2f}x"
            f" {ratios['steps_ratio']:11.2f}x"
        )
    return table


def _params(length: int) -> SamplingParams:
    return SamplingParams(
        temperature=0, max_tokens=length, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )


def _workload(args: argparse.Namespace, engine: LLMEngine) -> Workload:
    return make_workload(
        args.num_requests,
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
    parser.add_argument("--prompt-mean", type=int, default=128, help="tokens")
    parser.add_argument("--output-mean", type=int, default=96, help="tokens")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--num-threads", type=int, default=os.cpu_count())
    parser.add_argument("--repeat", type=int, default=1, help="runs; the median is reported")
    parser.add_argument("--static", metavar="LIMITS", help="limits of running sequences, such as 8,16,64")
    parser.add_argument("--peer", choices=("transformers",))
    parser.add_argument("--peer-python", metavar="PYTHON", help="the interpreter that has the peer installed")
    parser.add_argument("--peer-dtype", default="float32")
    args = parser.parse_args()
    if args.peer and not args.peer_python:
        parser.error("--peer needs --peer-python")
    return args


def main() -> None:
    """Run what the command line asks for."""
    args = parse_args()
    figures: dict[str, Any] = {}
    if args.static:
        figures["static"] = compare_static(args, [int(limit) for limit in args.static.split(",")])
    else:
        engine = make_engine(args, 256)
        workload = _workload(args, engine)
        results = sorted((run(engine, workload) for _ in range(args.repeat)), key=lambda r: r.seconds)
        print(f"{len(workload.prompts)} requests, {sum(map(len, workload.prompts))} prompt tokens")
        figures["cupaged"] = report(results[len(results) // 2], engine)
        engine.close()
        if args.peer:
            peer = figures["peer"] = run_peer(args, workload)
            rate = peer["output_tokens_per_second"]
            figures["ratio"] = figures["cupaged"]["output_tokens_per_second"] / rate
            print(f"  {peer['what']}: {rate:.1f} output tokens/s")
            print(f"  cupaged over it: {figures['ratio']:.2f}x")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
