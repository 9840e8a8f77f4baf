"""What gpu_check does: the names of its tasks, in order, and how long each should take.

A task's name is its kind and what it is of: "golden rms_norm-bf16-17x4096". The tasks come in parts, each in
a process of its own: kernels; whether the engine is right; how fast it is, in a process that loads nothing
else, so that what the driver takes is all its own; matrix products and copies; what others do of the same.
"""

from typing import NamedTuple

from tools.engine_model import REAL, TINY, Bench
from tools.kernel_cases import GOLDENS, PROBES, TIMED, TRAFFIC
from tools.kernel_cases.case import Case

CHECKPOINTS = ("clear_llama", "clear_mistral", "clear_qwen3", "clear_llama_f16")  # of make_tiny_model
WAYS = ("swapped", "cached", "forked")  # of agreement; "agreement" itself is of the one that recomputes


class Part(NamedTuple):
    """Tasks that share a process, as long as none fails."""

    tasks: list[str]
    most_seconds: float  # so that others get their turn if all goes slowly
    uses_numba: bool = False  # else its compiler is off, which takes 10 s for the kernels' twins alone
    first_decides: bool = True  # where the first task fails, there is nothing to run the others on


def bench_of(dry_run: bool) -> Bench:
    """Return what the engine is measured on."""
    return TINY if dry_run else REAL


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


def parts(dry_run: bool, *, kernels_only: bool) -> list[Part]:
    """Return all tasks: what decides first, what others do last."""
    bench, cases = bench_of(dry_run), cases_by_task(dry_run)
    goldens, times, sdpa = (
        [task for task in cases if kind_of(task) == kind] for kind in ("golden", "time", "sdpa")
    )
    limits = ["copy bandwidth", "matmul", "clocks"]
    kernels = ["versions", "compile", "resources", *goldens, *limits, *times, "launch overhead"]
    of_kernels = Part(kernels, most_seconds=150.0)
    if kernels_only:
        return [of_kernels, Part(sdpa, most_seconds=100.0, first_decides=False)]
    num_checkpoints, num_in_ways = (1, 1) if dry_run else (len(CHECKPOINTS), 2)
    checks = [
        "twins",
        *(f"agreement {name}" for name in CHECKPOINTS[:num_checkpoints]),
        *(f"{way} {name}" for way in WAYS for name in CHECKPOINTS[:num_in_ways]),
        "graphs",
    ]
    engine = [
        "load engine",
        *(f"step {step.name}" for step in bench.steps),
        *(f"generate {work}" for work in bench.workloads),
        "fork step",
        "swap blocks",
        "memory",
        *(() if dry_run else ("emulator",)),  # a dry run's GPU is the emulator
    ]
    products = [*(f"gemm {product}" for product in bench.products), "link bandwidth"]
    others = [*sdpa, *(f"transformers {work}" for work in bench.workloads)]
    return [
        of_kernels,
        Part(checks, most_seconds=120.0, uses_numba=True),
        Part(engine, most_seconds=160.0, uses_numba=True),
        Part(products, most_seconds=60.0, first_decides=False),
        Part(others, most_seconds=100.0, first_decides=False),
    ]


# What a task should take at most on an H200, in seconds, by its kind: many compile, import, load or tune.
# None has run on one yet.
PLANNED = {
    "versions": 8.0,
    "compile": 15.0,
    "resources": 3.0,
    "golden": 0.3,
    "copy": 2.0,
    "matmul": 5.0,
    "time": 1.2,
    "twins": 20.0,
    "agreement": 10.0,
    "swapped": 2.0,
    "cached": 2.0,
    "forked": 2.0,
    "graphs": 6.0,
    "load": 35.0,
    "step": 4.0,
    "generate": 2.0,
    "fork": 2.0,
    "swap": 1.0,
    "gemm": 0.6,
    "link": 2.0,
    "emulator": 20.0,
    "sdpa": 4.0,
    "transformers": 12.0,
}
OTHERS = 0.5
STARTING = 3.0  # a process
PATIENCE = 4.0  # a task that takes so many times as long is given up,
SHORTEST = 20.0  # but not before so many seconds
# They load the engine anew where an error ended the process before.
NEED_ENGINE = ("step", "generate", "fork", "swap", "memory")


def planned_seconds(task: str) -> float:
    """Return what a task should take at most."""
    return PLANNED.get(kind_of(task), OTHERS)


def limit_seconds(task: str) -> float:
    """Return after how long a task is given up."""
    limit = max(SHORTEST, PATIENCE * planned_seconds(task))
    return limit + planned_seconds("load engine") if kind_of(task) in NEED_ENGINE else limit


def total_seconds(planned: list[Part]) -> float:
    """Return what parts should take at most."""
    return sum(STARTING + sum(map(planned_seconds, part.tasks)) for part in planned)
