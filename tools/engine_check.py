"""Whether the engine is right on a machine of gpu_check: agreement, graphs, memory; ValueError if not."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np

from cupaged.backend.base import Backend
from cupaged.backend.cuda import CudaBackend
from cupaged.config import EngineConfig
from tools.agreement import WAYS, CreateBackend, Trace, compare, follow, reference, tolerance
from tools.engine_model import Workload
from tools.engine_timed import TimedEngine
from tools.machine import Machine

# Of several lengths, sampled and greedy, all at once: decodes of 1 to 9 sequences, beside prefills and alone.
GRAPH_WORKLOADS = [Workload(1 + i % 3, length, 5 + i) for i, length in enumerate((3, 17, 40, 1, 64))]


def backend_creator(machine: Machine) -> CreateBackend:
    """Return what makes the product's backend on the machine's GPU."""

    def create(config: EngineConfig, checkpoint_dtype: str) -> Backend:
        return CudaBackend.create(machine.gpu(), config, checkpoint_dtype)

    return create


def check_agreement(machine: Machine, model_dir: Path) -> dict[str, Any]:
    """Hold the device without CUDA graphs to the CPU backend, and with them to itself without."""
    lead = reference(model_dir)
    create = backend_creator(machine)
    eager = follow(model_dir, lead, create, enforce_eager=True)
    found = _held(model_dir, lead, eager)
    errors = np.abs(follow(model_dir, lead, create).logits - eager.logits)
    if num_wrong := np.count_nonzero(errors):  # NaN is not 0 either
        raise ValueError(
            f"{num_wrong} of {errors.size} logits with CUDA graphs are not those without, by up to "
            f"{errors.max():.4g}; without them it {found['agreement']}"
        )
    return found


def check_way(machine: Machine, model_dir: Path, way: str) -> dict[str, Any]:
    """Hold the device to the CPU backend while its requests are run in one of agreement's WAYS."""
    lead = reference(model_dir)
    trace = follow(model_dir, lead, backend_creator(machine), WAYS[way])
    happened = {counter.name.lower(): int(trace.counters[counter]) for counter in WAYS[way].happens}
    return _held(model_dir, lead, trace) | {"happened": happened}


def check_emulator(machine: Machine, model_dir: Path) -> dict[str, Any]:
    """Hold the device to the emulator; "skipped" where there is no g++ to build it."""
    if shutil.which("g++") is None:
        return {"skipped": "g++ is not installed"}
    from tools.emulated_machine import EmulatedMachine

    lead = reference(model_dir)
    emulated = follow(model_dir, lead, backend_creator(EmulatedMachine()))
    return _held(model_dir, emulated, follow(model_dir, lead, backend_creator(machine)))


def _held(model_dir: Path, lead: Trace, trace: Trace) -> dict[str, Any]:
    agreement = compare(lead, trace, tolerance(model_dir))
    if agreement.problems:
        raise ValueError(str(agreement))
    return {"agreement": str(agreement), **agreement._asdict()}


def check_graphs(machine: Machine, model_dir: Path) -> dict[str, Any]:
    """Compare what requests get with CUDA graphs and without: tokens and log-probabilities, every bit."""
    given = [_generate(machine, model_dir, enforce_eager=is_eager) for is_eager in (False, True)]
    for i, both in enumerate(zip(*given, strict=True)):
        for place, (with_graphs, without) in enumerate(zip(*both, strict=True)):
            if with_graphs != without:
                raise ValueError(
                    f"request {i} gets {with_graphs} at {place} with CUDA graphs and {without} without"
                )
    return {"num_tokens": sum(map(len, given[0]))}


def _generate(machine: Machine, model_dir: Path, **options: Any) -> list[list[tuple[int, Any]]]:
    """Return the tokens of each request, each with its log-probabilities."""
    engine = TimedEngine(machine, model_dir, max_model_len=96, max_num_seqs=16, swap_space=0, **options)
    for i, work in enumerate(GRAPH_WORKLOADS):
        engine.add(work, temperature=i % 2, logprobs=5)
    outputs = [output.outputs[0] for output in engine.run()]
    check_allocations(engine)
    engine.close()
    return [list(zip(output.token_ids, output.logprobs or [], strict=True)) for output in outputs]


def check_allocations(engine: TimedEngine) -> list[int]:
    """Compare what was allocated with the plan, to the byte; return it."""
    plan = engine.plan
    use = plan.use
    planned = [use.weights, use.workspace, use.activations, plan.num_blocks * plan.block_bytes]
    allocated = engine.executor.allocations
    if sorted(allocated) != sorted(planned):
        raise ValueError(f"{allocated} bytes were allocated, but {planned} were planned")
    return planned


def check_memory(engine: TimedEngine) -> dict[str, Any]:
    """Compare what was allocated with the plan, and what the driver took with its reserve.

    It takes less where a process has had an engine before, whose modules stay.
    """
    planned, plan, backend = check_allocations(engine), engine.plan, engine.executor.backend
    driver, before = backend.driver_bytes(), backend.driver_bytes_before
    without_graphs, num_graphs = before[1] if len(before) > 1 else driver, len(before) - 1
    if driver > plan.use.reserve:
        raise ValueError(
            f"modules, graphs and what else the driver keeps take {driver} bytes, {without_graphs} of them "
            f"before there were {num_graphs} graphs, but the plan has a reserve of {plan.use.reserve}; "
            "raise it in cupaged/backend/cuda.py"
        )
    return {
        "plan": str(plan),
        "planned_bytes": planned,
        "driver_bytes": driver,
        "driver_bytes_without_graphs": without_graphs,
        "num_graphs": num_graphs,
        "reserve_bytes": plan.use.reserve,
    }
