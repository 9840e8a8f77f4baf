"""Check the kernels on a GPU: their goldens, then their times beside predictions and limits of the same run.

    sh tools/gpu_check --kernels [--json PATH]      on a machine with an NVIDIA GPU, in 4 minutes at most
    sh tools/gpu_check --kernels --dry-run          through the emulator, small shapes, without a GPU

Times are medians over graphs of many calls with random inputs that no call finds in L2. The exit status is 0
if every golden is met and every task ran. Bandwidth counts each byte once, that of attention only what any
kernel must move; copy bandwidth is read + write; causal FLOPs are counted once. PATH is written anew after
each task, so a run that is cut short leaves what it found.
"""

import argparse
import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tools.gpu_report import progress, summary, tables
from tools.gpu_worker import kind_of, tasks

START_SECONDS = 60.0  # of a process: Python's imports off a disk that nobody has read yet
# After so many a task is given up, by its kind. CUDA begins, all is compiled, torch is imported:
TASK_SECONDS = {"versions": 60.0, "compile": 60.0, "sdpa": 60.0}
OTHER_SECONDS = 20.0  # most take less than one
TOTAL_SECONDS = 225.0  # after which nothing runs
Results = dict[str, dict[str, Any]]  # by task: "result" or "error", and "took"


def seconds_of(task: str) -> float:
    """Return after how long a task is given up."""
    return TASK_SECONDS.get(kind_of(task), OTHER_SECONDS)


def supervise(
    command: Sequence[str],
    names: Sequence[str],
    *,
    total_seconds: float,
    limit: Callable[[str], float] = seconds_of,
    note: Callable[[Results], None] = lambda results: None,  # noqa: ARG005
) -> Results:
    """Have `command` run the tasks; start it again for those left if it dies or one takes too long.

    Where the first one fails there is nothing to run on, and the others do not begin. `note` is called after
    each task.
    """
    results: Results = {}
    deadline = time.monotonic() + total_seconds
    pending = list(names)
    while pending and time.monotonic() < deadline and "error" not in results.get(names[0], {}):
        current, seconds = pending[0], START_SECONDS  # what ends with the process, and after how long
        with subprocess.Popen([*command, *pending], stdout=subprocess.PIPE, text=True) as worker:
            lines = Lines(worker)
            while text := lines.next(min(seconds, deadline - time.monotonic())):
                line = json.loads(text)
                if "begin" in line:
                    current, seconds = line["begin"], limit(line["begin"])
                    continue
                results[line.pop("end")] = line
                pending = pending[1:]
                current = ""  # a process that ends here is no task's fault
                note(results)
        if current:
            reason = f"its process ended with status {worker.returncode}"
            if lines.took_too_long:
                over = time.monotonic() >= deadline
                reason = "the time of all tasks was over" if over else f"it took over {seconds:.0f} s"
            results[current] = {"error": reason}
            pending.remove(current)
            note(results)
    return results


class Lines:
    """What a process prints, line by line; it is killed if it prints nothing for too long."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.took_too_long = False
        self._process = process
        self._lines: queue.Queue[str] = queue.Queue()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def next(self, seconds: float) -> str:
        """Return the next line, "" at the end; or kill the process after so many seconds, and return ""."""
        try:
            return self._lines.get(timeout=max(0.0, seconds))
        except queue.Empty:
            self.took_too_long = True
            self._process.kill()
            self._thread.join()  # it meets the end of the output
            return ""


def main() -> None:
    """Run the check; print each task as it ends, then the tables."""
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

    def note(results: Results) -> dict[str, Any]:
        report = summary(results, dry_run=args.dry_run)
        report["took_seconds"] = time.monotonic() - start
        if args.json:
            args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        return report

    def show(results: Results) -> None:
        print(progress(*list(results.items())[-1]), flush=True)
        note(results)

    command = [sys.executable, "-m", "tools.gpu_worker", *(["--dry-run"] if args.dry_run else [])]
    report = note(supervise(command, tasks(args.dry_run), total_seconds=TOTAL_SECONDS, note=show))
    print(tables(report))
    sys.exit(1 if report["failures"] else 0)


if __name__ == "__main__":
    main()
