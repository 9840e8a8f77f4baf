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
from functools import cached_property
from typing import Any, TextIO

from tools.engine_model import hf_config
from tools.gpu_tasks import bench_of, cases_by_task, kind_of
from tools.kernel_cases import TRAFFIC
from tools.kernel_cases.case import Case
from tools.kernel_cases.goldens import difference, load, run
from tools.machine import Generate, Machine, launch_overhead, time_case

FAILED = 3  # exit status after an error that was reported


class Runner:
    """Does tasks; what they share is made for the first that needs it."""

    def __init__(self, *, dry_run: bool) -> None:
        self._dry_run = dry_run
        self._cases = cases_by_task(dry_run)

    @cached_property
    def machine(self) -> Machine:
        """Return the machine to run on."""
        if self._dry_run:
            from tools.emulated_machine import EmulatedMachine

            return EmulatedMachine()
        from tools.gpu_machine import GpuMachine

        return GpuMachine()

    @cached_property
    def engine_tasks(self) -> Any:
        """Return what does the engine's tasks; Numba compiles as it is imported."""
        from tools.engine_tasks import EngineTasks

        return EngineTasks(self.machine, bench_of(self._dry_run))

    @cached_property
    def transformers(self) -> Generate | None:
        """Return generate of the model that the engine is measured on, if there is transformers."""
        return self.machine.transformers(hf_config(bench_of(self._dry_run).shape))

    def run(self, name: str) -> dict[str, Any]:
        """Do a task; return its result."""
        machine, cases = self.machine, list(self._cases.values())
        if case := self._cases.get(name):
            return self._run_case(kind_of(name), case)
        if name == "versions":
            return machine.versions()
        if name == "compile":
            return {"instances": machine.prepare(cases)}
        if name == "resources":
            return machine.resources(cases)
        if name == "copy bandwidth":
            return {"bytes_per_second": machine.copy_bandwidth()}
        if name == "matmul":
            return {"flops_per_second": machine.matmul_flops()}
        if name == "clocks":
            return machine.clocks()
        if name == "launch overhead":
            function, kernel = launch_overhead(machine, TRAFFIC[0])
            return {"case": TRAFFIC[0].name, "function_seconds": function, "kernel_seconds": kernel}
        if kind_of(name) == "transformers":
            work = next(work for work in bench_of(self._dry_run).workloads if name.endswith(f" {work}"))
            return {"seconds": self.transformers(*work)} if self.transformers else {}
        result: dict[str, Any] = self.engine_tasks.run(name)
        return result

    def _run_case(self, kind: str, case: Case) -> dict[str, Any]:
        machine = self.machine
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
    runner = Runner(dry_run=args.dry_run)
    for name in args.tasks:
        print(json.dumps({"begin": name}), file=stdout, flush=True)
        start = time.perf_counter()
        try:
            line: dict[str, Any] = {"result": runner.run(name)}
        except Exception as error:  # whatever it is, it is this task's result
            traceback.print_exc()
            line = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
        line |= {"end": name, "took": time.perf_counter() - start}
        print(json.dumps(line), file=stdout, flush=True)
        if "error" in line:
            sys.stderr.flush()
            os._exit(FAILED)  # at once: what would tidy up meets the same error, and may crash or hang


if __name__ == "__main__":
    main()
