"""Where the time of a step goes on the CPU: by kernel, with bytes, GB/s and share of the limit.

    python -m tools.profile_step MODEL                            decodes of 1 and of 64 sequences
    python -m tools.profile_step MODEL --batch 16 --context 1024
    python -m tools.profile_step MODEL --batch "" --prefill 512    one prompt
    python -m tools.profile_step llama-3.2-1b --quantization int8  a shape, with random weights

The limit is the memory's bandwidth: the median of parallel reads of as many bytes as the weights have, made
before each profile by as many threads. What fits in the caches, or is fetched ahead, may be above it; a
matrix product of many rows computes longer than it reads, so its GFLOP/s stand beside. Times are medians over
steps. Python (scheduler, sampler, requests) runs while another step's kernels do; what they wait for it, at
most, stands between the kernels. The last line is JSON.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from statistics import median, median_low
from time import perf_counter
from typing import Any, NamedTuple
from unittest.mock import patch

from cupaged.atomics import words
from cupaged.engine.llm_engine import LLMEngine
from cupaged.recording import ROW_BYTES, Call, Recording
from cupaged.team import PLAYED, QUEUED, play_table
from cupaged.threads import ParallelRunner
from tools.cpu_steps import (
    add_arguments,
    batches_of,
    decoding,
    make_engine,
    model_of,
    prefill,
    read_bandwidth,
    seconds_of,
)
from tools.kernel_traffic import label_of, traffic

ROUND = 4  # steps
INSIDE = ("linear", "paged_attention")  # how the names begin of what a step should be all of


class Timed(NamedTuple):
    """One call of a kernel."""

    kernel: Callable[..., None]
    args: Sequence[Any]
    seconds: float


class Row(NamedTuple):
    """All calls of one kind in a step; medians over steps."""

    name: str
    num_calls: int
    seconds: float
    num_bytes: int
    flops: int


class Profile(NamedTuple):
    """A step; medians over steps."""

    seconds: float  # without clocks between its kernels
    between: float  # seconds that no kernel runs
    rows: list[Row]  # the longest first


@contextmanager
def timed_kernels() -> Iterator[list[Timed]]:
    """Note each kernel that is run meanwhile, in order."""
    found: list[Timed] = []
    run = ParallelRunner.run

    def call(kernel: Callable[..., None], args: Sequence[Any], row: int = 0) -> None:
        start = perf_counter()
        if row == 0:
            kernel(*args)
        else:
            play_table(row, 1)
        found.append(Timed(kernel, args, perf_counter() - start))

    def timed_run(runner: ParallelRunner, calls: Iterable[Call]) -> None:
        run(runner, ((call, each) for each in calls))

    def timed_play(runner: ParallelRunner, recording: Recording) -> None:
        if recording.table is None:
            timed_run(runner, recording.calls)
        else:
            first = recording.table.ctypes.data
            run(runner, ((call, (*each, first + i * ROW_BYTES)) for i, each in enumerate(recording.calls)))

    with (
        patch.object(ParallelRunner, "run", timed_run),
        patch.object(ParallelRunner, "play", timed_play),
    ):
        yield found


@contextmanager
def idle_team() -> Iterator[list[float]]:
    """Note the seconds that the team has nothing to do, at most: from when it was last seen at work."""
    found: list[float] = []
    seen = perf_counter()

    def look() -> None:
        nonlocal seen
        now = perf_counter()
        if words[PLAYED] == words[QUEUED]:
            found.append(now - seen)
        seen = now

    def watched(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> None:
            nonlocal seen
            look()
            method(*args)
            seen = perf_counter()

        return call

    with ExitStack() as patches:
        for name in ("run", "play", "wait"):
            method = watched(getattr(ParallelRunner, name))
            patches.enter_context(patch.object(ParallelRunner, name, method))
        yield found
    look()


def sum_by_kind(calls: Sequence[Timed]) -> dict[str, Row]:
    """Return a step's calls by kind."""
    rows: dict[str, Row] = {}
    for kernel, args, seconds in calls:
        name, (num_bytes, flops) = label_of(kernel, args), traffic(kernel, args)
        row = rows.get(name, Row(name, 0, 0.0, 0, 0))
        rows[name] = Row(
            name, row.num_calls + 1, row.seconds + seconds, row.num_bytes + num_bytes, row.flops + flops
        )
    return rows


def profile(step: Callable[[], Any], count: int) -> Profile:
    """Profile so many steps, in rounds: some without clocks between their kernels, some with."""
    plain: list[float] = []
    between: list[float] = []
    by_kind: dict[str, list[Row]] = defaultdict(list)
    for _ in range(0, count, ROUND):
        seconds_of(step, 2)  # threads sleep while the last round is summed up
        for _ in range(ROUND):
            with idle_team() as idle:
                plain += seconds_of(step, 1)
            between.append(sum(idle))
        calls_of_steps = []
        for _ in range(ROUND):
            with timed_kernels() as calls:
                step()
            calls_of_steps.append(calls)
        for calls in calls_of_steps:  # arrays hold by now what they hold in the round's last step
            for name, row in sum_by_kind(calls).items():
                by_kind[name].append(row)
    rows = [
        rows[0]._replace(
            seconds=median(row.seconds for row in rows), num_bytes=median_low(row.num_bytes for row in rows)
        )
        for rows in by_kind.values()
    ]
    return Profile(median(plain), median(between), sorted(rows, key=lambda row: -row.seconds))


def report(title: str, found: Profile, limit: float) -> dict[str, Any]:
    """Print a step for people; return it for scripts. limit: bytes per second."""
    seconds, between, rows = found
    total = between + sum(row.seconds for row in rows)
    print(f"\n{title}: {1e3 * seconds:.2f} ms; memory is read at {limit / 1e9:.1f} GB/s")
    print(f"  {'':26}{'calls':>6} {'us each':>8} {'ms':>8} {'of step':>7}", end="")
    print(f" {'MB':>8} {'GB/s':>6} {'of limit':>8} {'GFLOP/s':>8}")
    for row in rows:
        rate, each = row.num_bytes / row.seconds, 1e6 * row.seconds / row.num_calls
        print(f"  {row.name:26}{row.num_calls:6} {each:8.1f} {1e3 * row.seconds:8.3f}", end="")
        print(f" {row.seconds / total:7.1%} {row.num_bytes / 1e6:8.2f} {rate / 1e9:6.1f}", end="")
        print(f" {rate / limit:8.0%}", f"{row.flops / row.seconds / 1e9:8.0f}" if row.flops else "")
    print(f"  {'between kernels':26}{'':15} {1e3 * between:8.3f} {between / total:7.1%}")
    inside = sum(row.seconds for row in rows if row.name.startswith(INSIDE))
    outside = 1 - inside / max(seconds, total)  # what slows a kernel down in the step counts as outside, too
    print(f"  outside of linear layers and attention: {outside:.1%} of the step (goal: under 12 %)")
    return {
        "step_ms": 1e3 * seconds,
        "bandwidth": limit,
        "outside_share": outside,
        "between_ms": 1e3 * between,
        "kernels": [row._asdict() for row in rows],
    }


def profile_engine(engine: LLMEngine, args: argparse.Namespace, num_bytes: int) -> dict[str, Any]:
    """Profile steps of each size; num_bytes: of weights."""
    found: dict[str, Any] = {}
    for batch in batches_of(args):
        limit = read_bandwidth(num_bytes, args.num_threads)
        with decoding(engine, batch, args.context):
            step = profile(engine.step, args.steps)
        found[f"decode_{batch}"] = report(f"decode of {batch} x {args.context} tokens", step, limit)
    if args.prefill:
        limit = read_bandwidth(num_bytes, args.num_threads)
        step = profile(partial(prefill, engine, args.prefill), max(3, args.steps // 4))
        found[f"prefill_{args.prefill}"] = report(f"prefill of {args.prefill} tokens", step, limit)
    return found


def main() -> None:
    """Profile what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser, batch="1,64")
    parser.add_argument("--prefill", type=int, default=0, metavar="TOKENS", help="profile a prompt, too")
    args = parser.parse_args()
    with model_of(args.model) as (directory, options):
        num_steps = max(3 * args.steps + 32, args.prefill + 1 - args.context)
        engine = make_engine(directory, args, num_steps, **options)
        num_bytes = engine.executor.plan.use.weights
        print(f"{args.model}: {num_bytes / 1e6:.0f} MB of weights, {args.num_threads} threads")
        found = profile_engine(engine, args, num_bytes)
        engine.close()
    print(json.dumps({"model": args.model, "weight_bytes": num_bytes} | found))


if __name__ == "__main__":
    main()
