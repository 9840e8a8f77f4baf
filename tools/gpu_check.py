"""Check the kernels on a GPU: their goldens, then their times beside predictions and limits of the same run.

    sh tools/gpu_check --kernels [--json PATH]      on a machine with an NVIDIA GPU, in 4 minutes at most
    sh tools/gpu_check --kernels --dry-run          through the emulator, small shapes, without a GPU

Times are medians over graphs of many calls with random inputs that no call finds in L2. The exit status is 0
if every golden is met and every task ran. Bandwidth counts each byte once; copy bandwidth is read + write;
causal FLOPs are counted once.
"""

import argparse
import json
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.gpu_report import summary, tables
from tools.gpu_worker import FAILED, tasks

TASK_SECONDS = 60.0  # after which a task is given up
TOTAL_SECONDS = 230.0  # after which no task begins
Results = dict[str, dict[str, Any]]  # by task: "result" or "error", and "took"


def supervise(
    command: Sequence[str], names: Sequence[str], *, task_seconds: float, total_seconds: float
) -> Results:
    """Have `command` run the tasks; start it again for those left if it dies or one takes too long.

    Where the first one fails there is nothing to run on, and the others do not begin.
    """
    results: Results = {}
    deadline = time.monotonic() + total_seconds
    pending = list(names)
    while pending and time.monotonic() < deadline:
        current = pending[0]  # of which the process has not said that it ended
        with subprocess.Popen([*command, *pending], stdout=subprocess.PIPE, text=True) as worker:
            assert worker.stdout is not None
            watchdog = _kill_later(worker, task_seconds)
            for text in worker.stdout:
                watchdog.cancel()
                line = json.loads(text)
                if "begin" in line:
                    current = line["begin"]
                    if time.monotonic() > deadline:
                        worker.kill()
                        break
                else:
                    results[line.pop("end")] = line
                    pending = pending[1:]
                watchdog = _kill_later(worker, task_seconds)
            watchdog.cancel()
        if pending and worker.returncode != FAILED and time.monotonic() < deadline:
            reason = f"its process ended with status {worker.returncode}"
            if worker.returncode < 0:
                reason += f", as it does if a task takes over {task_seconds:.0f} s"
            results[current] = {"error": reason}
            pending = pending[1:]
        if "error" in results.get(names[0], {}):
            break
    return results


def _kill_later(worker: "subprocess.Popen[str]", seconds: float) -> threading.Timer:
    timer = threading.Timer(seconds, worker.kill)
    timer.daemon = True
    timer.start()
    return timer


def main() -> None:
    """Run the check and print its tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--kernels", action="store_true", required=True, help="the kernels' goldens and times"
    )
    parser.add_argument("--dry-run", action="store_true", help="through the emulator, on small shapes")
    parser.add_argument("--json", type=Path, help="write all results there")
    args = parser.parse_args()
    start = time.monotonic()
    command = [sys.executable, "-m", "tools.gpu_worker", *(["--dry-run"] if args.dry_run else [])]
    results = supervise(command, tasks(args.dry_run), task_seconds=TASK_SECONDS, total_seconds=TOTAL_SECONDS)
    report = summary(results, dry_run=args.dry_run)
    report["took_seconds"] = time.monotonic() - start
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(tables(report))
    sys.exit(1 if report["failures"] else 0)


if __name__ == "__main__":
    main()
