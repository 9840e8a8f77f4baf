"""Check the engine on a GPU: what it computes, then how fast, beside limits, predictions and peers.

    sh tools/gpu_check [--json PATH]                on a machine with an NVIDIA GPU, in 6 minutes at most
    sh tools/gpu_check --kernels [--json PATH]      the kernels alone, in 4
    sh tools/gpu_check [--kernels] --dry-run        through the emulator, small shapes, without a GPU

Kernels: their goldens; their times, as medians over graphs of many calls with random inputs that no call
finds in L2. Bandwidth counts each byte once, that of attention only what any kernel must move; copy bandwidth
is read + write; causal FLOPs are counted once.
Engine: agreement with the CPU backend, CUDA graphs on = off, memory as planned; then steps of an 8B llama
with random weights, by events on the GPU, beside their rooflines: the least bytes over the copy bandwidth or
the FLOPs over the matmul rate of the same run.
The exit status is 0 if all is right and every task ran, however fast. PATH is written anew after each task,
so a run that is cut short leaves what it found.
"""

import argparse
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from tools.gpu_report import progress, summary, tables
from tools.gpu_tasks import Part, limit_seconds, parts

ROOT = Path(__file__).parents[1]
START_SECONDS = 60.0  # of a process, and again in its first task: imports off a disk that nobody has read yet
END_SECONDS = 10.0  # of a process that was killed
TOTAL_SECONDS = {True: 225.0, False: 350.0}  # after which nothing runs, by whether it is kernels alone
Results = dict[str, dict[str, Any]]  # by task: "result" or "error", and "took"


def supervise(
    command: Sequence[str],
    names: Sequence[str],
    *,
    total_seconds: float,
    first_decides: bool = True,
    env: Mapping[str, str] | None = None,
    limit: Callable[[str], float] = limit_seconds,
    note: Callable[[Results], None] = lambda results: None,  # noqa: ARG005
) -> Results:
    """Have `command` run the tasks; start it again for those left if it dies or one takes too long.

    If the first one decides and fails, there is nothing to run on, and the others do not begin. `note` is
    called after each task.
    """
    results: Results = {}
    deadline = time.monotonic() + total_seconds
    pending = list(names)
    while pending and time.monotonic() < deadline:
        if first_decides and "error" in results.get(names[0], {}):
            break
        current, seconds = pending[0], START_SECONDS  # what ends with the process, and after how long
        importing = START_SECONDS  # the first task imports what it needs
        worker = subprocess.Popen([*command, *pending], stdout=subprocess.PIPE, text=True, env=env)
        lines = Lines(worker)
        while text := lines.next(min(seconds, deadline - time.monotonic())):
            if not text.startswith("{"):  # printed by a library, before gpu_worker could see to it
                continue
            line = json.loads(text)
            if "begin" in line:
                current, seconds = line["begin"], limit(line["begin"]) + importing
                importing = 0.0
                continue
            results[line.pop("end")] = line
            pending = pending[1:]
            current = ""  # a process that ends here is no task's fault
            note(results)
        has_ended = lines.end()
        if current:
            reason = f"its process ended with status {worker.returncode}"
            if lines.took_too_long:
                over = time.monotonic() >= deadline
                reason = "the time of its part was over" if over else f"it took over {seconds:.0f} s"
            results[current] = {"error": reason}
            pending.remove(current)
            note(results)
        if not has_ended:
            raise StuckError(results)
    return results


class StuckError(Exception):
    """A process cannot be killed: it waits for the GPU, and any other would."""

    def __init__(self, results: Results) -> None:
        super().__init__("a process cannot be killed, so nothing else is run; see nvidia-smi")
        self.results = results


class Lines:
    """What a process prints, line by line; it is killed if it prints nothing for too long."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.took_too_long = False
        self._process = process
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as stdout:
            for line in stdout:
                self._lines.put(line)
        self._lines.put("")

    def next(self, seconds: float) -> str:
        """Return the next line, "" at the end; or kill the process after so many seconds, and return ""."""
        try:
            return self._lines.get(timeout=max(0.0, seconds))
        except queue.Empty:
            self.took_too_long = True
            self._process.kill()
            return ""

    def end(self) -> bool:
        """Wait for the process, which prints no more, or kill it; return whether it has ended."""
        for _ in range(2):
            try:
                self._process.wait(END_SECONDS)
                return True
            except subprocess.TimeoutExpired:
                self._process.kill()
        return False


def commit() -> str:
    """Return which commit this checkout has, "-dirty" if it was changed; "unknown" without git."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def environment(part: Part) -> dict[str, str]:
    """Return the environment of a part's process: Numba compiles only where it is needed."""
    inherited = {name: value for name, value in os.environ.items() if name != "NUMBA_DISABLE_JIT"}
    return inherited if part.uses_numba else inherited | {"NUMBA_DISABLE_JIT": "1"}


def main() -> None:
    """Run the check; print each task as it ends, then the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kernels", action="store_true", help="the kernels alone: their goldens and times")
    parser.add_argument("--dry-run", action="store_true", help="through the emulator, on small shapes")
    parser.add_argument("--json", type=Path, help="write all results there")
    parser.add_argument("--commit", help="of this checkout, where git cannot say")
    args = parser.parse_args()
    start = time.monotonic()
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    made = {"date": date, "commit": args.commit or commit()}
    done: Results = {}

    def note(results: Results) -> dict[str, Any]:
        report = summary(done | results, dry_run=args.dry_run, kernels_only=args.kernels)
        report = made | report | {"took_seconds": time.monotonic() - start}
        if args.json:
            args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        return report

    def show(results: Results) -> None:
        print(progress(*list(results.items())[-1]), flush=True)
        note(results)

    command = [sys.executable, "-m", "tools.gpu_worker", *(["--dry-run"] if args.dry_run else [])]
    for part in parts(args.dry_run, kernels_only=args.kernels):
        left = TOTAL_SECONDS[args.kernels] - (time.monotonic() - start)
        try:
            done |= supervise(
                command,
                part.tasks,
                total_seconds=min(left, part.most_seconds),
                first_decides=part.first_decides,
                env=environment(part),
                note=show,
            )
        except StuckError as stuck:
            done |= stuck.results
            print(stuck, flush=True)
            break
        if "error" in done.get("versions", {}):
            break
    report = note({})
    print(tables(report))
    sys.exit(1 if report["failures"] else 0)


if __name__ == "__main__":
    main()
