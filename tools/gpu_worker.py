"""The process that gpu_check has run its tasks: python -m tools.gpu_worker [--dry-run] TASK ...

It prints a line of JSON as each task begins and as it ends, and nothing else reaches its standard output.
After an error it ends itself, for a GPU that met one is of no more use to this process; gpu_check then starts
another one for the tasks that are left. By itself it serves other tools on a GPU machine:

    compute-sanitizer python3 -m tools.gpu_worker versions "golden probe-ldmatrix"
"""

import argparse
import json
import os
import sys
import time
import traceback
from typing import Any, TextIO

from tools.kernel_cases import GOLDENS, PROBES, TIMED, TRAFFIC
from tools.kernel_cases.case import Case
from tools.kernel_cases.goldens import difference, load, run
from tools.machine import EmulatedMachine, Machine, launch_overhead, time_case

FAILED = 3  # exit status after an error that was reported
KINDS = ("golden", "time", "sdpa")  # of tasks that are of a case


def cases_by_task(dry_run: bool) -> dict[str, Case]:
    """Return the tasks that are of a case: "golden NAME", "time NAME" and "sdpa NAME", in order."""
    tasks = {f"golden {case.name}": case for case in (*PROBES, *GOLDENS)}
    for case in TRAFFIC if dry_run else TIMED:
        tasks[f"time {case.name}"] = case
        if case.attention:
            tasks[f"sdpa {case.name}"] = case
    return tasks


def kind_of(task: str) -> str:
    """Return a task's kind, such as "golden"."""
    return task.partition(" ")[0]


def tasks(dry_run: bool) -> list[str]:
    """Return all tasks, in order: what decides first, torch's part, whose import takes long, last."""
    cases = cases_by_task(dry_run)
    goldens, times, sdpa = ([task for task in cases if kind_of(task) == kind] for kind in KINDS)
    limits = ["copy bandwidth", "matmul", "clocks"]
    return ["versions", "compile", "resources", *goldens, *limits, *times, "launch overhead", *sdpa]


def run_task(name: str, machine: Machine, cases: dict[str, Case]) -> dict[str, Any]:
    """Do a task; return its result."""
    if case := cases.get(name):
        return run_case(kind_of(name), case, machine)
    if name == "versions":
        return machine.versions()
    if name == "compile":
        return {"instances": machine.prepare(list(cases.values()))}
    if name == "resources":
        return machine.resources(list(cases.values()))
    if name == "copy bandwidth":
        return {"bytes_per_second": machine.copy_bandwidth()}
    if name == "matmul":
        return {"flops_per_second": machine.matmul_flops()}
    if name == "clocks":
        return machine.clocks()
    if name == "launch overhead":
        function, kernel = launch_overhead(machine, TRAFFIC[0])
        return {"case": TRAFFIC[0].name, "function_seconds": function, "kernel_seconds": kernel}
    raise ValueError(f"no task {name!r}; there are {tasks(False)}")


def run_case(kind: str, case: Case, machine: Machine) -> dict[str, Any]:
    """Do a task of a case; return its result."""
    if kind == "golden":
        outputs = run(case, machine.device(case.sources), machine.to_device, machine.to_host)
        return {"difference": difference(case, outputs, load(case))}
    if kind == "time":
        times, kernels = time_case(machine, case)
        return {**times._asdict(), "kernels": kernels}
    assert case.attention, f"{case.name} has no attention"
    sdpa = machine.sdpa(case.attention)
    return sdpa._asdict() if sdpa else {}


def reserve_stdout() -> TextIO:
    """Return our standard output; from now on what others print, libraries too, goes to standard error."""
    stream = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return stream


def main() -> None:
    """Run the tasks of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("tasks", nargs="+")
    args = parser.parse_args()
    stdout = reserve_stdout()
    machine: Machine | None = None
    cases = cases_by_task(args.dry_run)
    for name in args.tasks:
        print(json.dumps({"begin": name}), file=stdout, flush=True)
        start = time.perf_counter()
        try:
            if machine is None:
                machine = make_machine(args.dry_run)
            line: dict[str, Any] = {"result": run_task(name, machine, cases)}
        except Exception as error:  # whatever it is, it is this task's result
            traceback.print_exc()
            line = {"error": f"{type(error).__name__}: {error}"}
        line |= {"end": name, "took": time.perf_counter() - start}
        print(json.dumps(line), file=stdout, flush=True)
        if "error" in line:
            sys.stderr.flush()
            os._exit(FAILED)  # at once: what would tidy up meets the same error, and may crash or hang


def make_machine(dry_run: bool) -> Machine:
    """Return the machine to run on."""
    if dry_run:
        return EmulatedMachine()
    from tools.gpu_machine import GpuMachine

    return GpuMachine()


if __name__ == "__main__":
    main()
