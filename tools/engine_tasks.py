"""The engine's tasks of gpu_check: which model and which measurement each of them names."""

import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

from cupaged.backend.cpu import CpuBackend
from cupaged.scheduler.warm_up import warm_up
from tools.agreement import WAYS
from tools.engine_check import check_agreement, check_emulator, check_graphs, check_memory, check_way
from tools.engine_memory import time_forks, time_swaps
from tools.engine_model import Bench, write_model
from tools.engine_timed import TimedEngine
from tools.engine_times import time_gemm, time_step, time_workload
from tools.machine import Machine
from tools.make_tiny_model import CLEAR_CASES, write_clear_model, write_tiny_tokenizer


class EngineTasks:
    """Does the tasks; the engine that is measured is loaded for the first that needs it."""

    def __init__(self, machine: Machine, bench: Bench) -> None:
        self._machine, self._bench = machine, bench
        self._engine: TimedEngine | None = None
        self._models = tempfile.TemporaryDirectory(prefix="gpu_check-")

    def run(self, name: str) -> dict[str, Any]:
        """Do a task; return its result."""
        machine, bench = self._machine, self._bench
        kind, _, what = name.partition(" ")
        if kind == "twins":
            return compile_twins()
        if kind == "agreement":
            return check_agreement(machine, self._checkpoint(what))
        if kind in WAYS:
            return check_way(machine, self._checkpoint(what), kind)
        if kind == "graphs":
            return check_graphs(machine, self._checkpoint("clear_llama"))
        if kind == "emulator":
            return check_emulator(machine, self._checkpoint("clear_llama"))
        if kind == "load":
            start = perf_counter()
            with logged() as lines:
                plan = str(self.engine.plan)
            return {"plan": plan, "seconds": perf_counter() - start, "log": lines}
        if kind == "step":
            step = next(step for step in bench.steps if step.name == what)
            return time_step(machine, self.engine, bench, step)
        if kind == "generate":
            work = next(work for work in bench.workloads if str(work) == what)
            return {"seconds": time_workload(self.engine, work)}
        if kind == "fork":
            return time_forks(machine, self.engine, bench)
        if kind == "swap":
            return time_swaps(machine, self.engine)
        if kind == "memory":
            return check_memory(self.engine)
        self._close_engine()  # it leaves no memory to what follows
        if kind == "gemm":
            product = next(product for product in bench.products if str(product) == what)
            return time_gemm(machine, product)._asdict()
        if kind == "link":
            return dict(machine.link_bandwidth())
        raise ValueError(f"no task {name!r}; tools/gpu_tasks.py names them all")

    @property
    def engine(self) -> TimedEngine:
        """Return the engine that is measured."""
        if self._engine is None:
            bench = self._bench
            self._engine = TimedEngine(
                self._machine,
                write_model(self._directory("measured"), bench.shape),
                load_format="dummy",
                max_num_seqs=bench.max_num_seqs,
                max_num_batched_tokens=bench.max_num_batched_tokens,
                max_model_len=bench.max_model_len,
                swap_space=bench.swap_space,
            )
        return self._engine

    def _close_engine(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def _checkpoint(self, name: str) -> Path:
        """Return a tiny checkpoint with a tokenizer."""
        directory = write_clear_model(self._directory(name), CLEAR_CASES[name])
        write_tiny_tokenizer(directory)
        return directory

    def _directory(self, name: str) -> Path:
        directory = Path(self._models.name) / name
        directory.mkdir(exist_ok=True)
        return directory


@contextmanager
def logged() -> Iterator[list[str]]:
    """Keep what the product logs meanwhile, each line with the seconds since then."""
    start, lines, logger = perf_counter(), list[str](), logging.getLogger("cupaged")

    def keep(record: logging.LogRecord) -> bool:
        lines.append(f"{perf_counter() - start:.1f} s: {record.getMessage()}")
        return True

    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addFilter(keep)
    try:
        yield lines
    finally:
        logger.removeFilter(keep)
        logger.setLevel(level)


def compile_twins() -> dict[str, Any]:
    """Have Numba compile what an engine and the CPU backend need, so that nobody waits for it later."""
    for dtype in ("bfloat16", "float16"):
        CpuBackend(dtype)
    warm_up()
    return {}
