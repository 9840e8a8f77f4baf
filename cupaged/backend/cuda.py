"""CudaBackend: arrays on a GPU, the kernels' *_cuda launches, matrix products by cublasLt."""

from typing import Any

from cupaged.config import EngineConfig


def create_cuda_backend(config: EngineConfig, checkpoint_dtype: str) -> Any:  # noqa: ARG001
    """Return the backend on the GPU; None if device is "auto" and there is none. ValueError otherwise."""
    if config.device == "auto":
        return None
    raise ValueError(f"device={config.device!r} is not supported yet; use device='cpu'")
