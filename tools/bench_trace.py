"""What --trace adds to a step: microseconds of host time, and bytes of file.

    python -m tools.bench_trace [--running 64,256,1024,4096]

Two schedulers take the same steps in turn, one of them recording into a file in --directory. In `decode`
every sequence computes one token, from contexts of 64 to 448 tokens on; in `turnover` one sequence in 256
also ends in each step and another enters. Shown are the host time of the plain scheduler's schedule +
update, and what the recorder's takes more: by the best quarter of the steps, by the median, and as a
share of a GPU's step of 5 ms. The last line is JSON.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from cupaged.trace.recorder import TraceRecorder
from cupaged.trace.records import TraceFile
from tools.scheduler_load import GPU_STEP_US, Load, Step

NUM_STEPS = 120
NUM_WARM_STEPS = 8


def measure(
    num_seqs: int, directory: Path, *, num_output: int | None, num_steps: int = NUM_STEPS
) -> dict[str, Any]:
    """Return a row: the plain scheduler's microseconds, what recording adds, and bytes a step."""
    trace = TraceFile(directory / f"{num_seqs}.{num_output}.trace", with_text=False)
    plain = Load(num_seqs, num_output=num_output)
    recorded = Load(num_seqs, num_output=num_output, create=lambda config: TraceRecorder(config, None, trace))
    steps: list[tuple[Step, Step]] = []
    bytes_before = 0
    for n in range(NUM_WARM_STEPS + num_steps):
        if n == NUM_WARM_STEPS:
            bytes_before = trace.num_bytes
        steps.append((plain.step(), recorded.step()))
    trace.close()
    pairs = [[step.schedule + step.update for step in pair] for pair in steps[NUM_WARM_STEPS:]]
    us = np.array(pairs) * 1e6  # [num_steps, 2]: plain, recorded
    quarter, half = np.quantile(us, 0.25, axis=0), np.median(us, axis=0)
    return {
        "running": num_seqs,
        "plain_us": round(float(half[0]), 1),
        "added_us_quarter": round(float(quarter[1] - quarter[0]), 1),
        "added_us": round(float(half[1] - half[0]), 1),
        "bytes_a_step": round((trace.num_bytes - bytes_before) / num_steps, 1),
    }


def main() -> None:
    """Print the table and a last line of JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--running", default="64,256,1024,4096", help="sequences, such as 256,4096")
    parser.add_argument(
        "--directory", type=Path, help="where the traces are written (default: a temporary one)"
    )
    args = parser.parse_args()
    head = f"{'us a step':10}{'running':>8}{'plain':>9}{'added, best quarter':>21}{'median':>8}"
    print(head + f"{'of 5 ms':>9}{'bytes':>8}")
    rows = []
    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        for num_seqs in map(int, args.running.split(",")):
            for name, num_output in (("decode", None), ("turnover", 256)):
                row = {"scenario": name} | measure(num_seqs, Path(directory), num_output=num_output)
                rows.append(row)
                times = f"{row['plain_us']:9.0f}{row['added_us_quarter']:21.0f}{row['added_us']:8.0f}"
                share = f"{row['added_us'] / GPU_STEP_US:9.2%}{row['bytes_a_step']:8.0f}"
                print(f"{name:10}{num_seqs:8}{times}{share}", flush=True)
    print(json.dumps({"bench": "trace", "results": rows}))


if __name__ == "__main__":
    main()
