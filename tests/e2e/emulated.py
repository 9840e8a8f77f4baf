"""Whole engines on an emulated GPU."""

from functools import partial
from pathlib import Path
from typing import Any

from cupaged.backend.cuda import CudaBackend
from cupaged.config import EngineConfig
from cupaged.engine.llm_engine import LLMEngine
from cupaged.worker.executor import UniprocExecutor
from tests.cuda_on_cpu.gpu import EmulatedGpu

MEMORY = 1 << 30  # bytes, enough for what is kept back for the driver; the host has what is allocated
RATES = {"swap_bandwidth": 50e9, "prefill_rate": 1e4}  # given: what the emulator takes hangs on the machine


def create_emulated(
    config: EngineConfig,
    checkpoint_dtype: str,
    *,
    gpu: EmulatedGpu | None = None,
    backend_class: type[CudaBackend] = CudaBackend,
) -> CudaBackend:
    """Return the backend on an emulated GPU; it stands for base.create_backend."""
    return backend_class.create(gpu or EmulatedGpu(memory=MEMORY), config, checkpoint_dtype)


def create_engine(
    model_dir: Path,
    *,
    gpu: EmulatedGpu | None = None,
    backend_class: type[CudaBackend] = CudaBackend,
    **options: Any,
) -> LLMEngine:
    """Return an engine whose emulated GPU refuses to make anything new on a step's path."""
    gpu = gpu or EmulatedGpu(memory=MEMORY)
    create_backend = partial(create_emulated, gpu=gpu, backend_class=backend_class)
    config = EngineConfig.create(model_dir, **RATES | options)
    engine = LLMEngine(config, create_executor=partial(UniprocExecutor, create_backend=create_backend))
    gpu.freeze()
    return engine
