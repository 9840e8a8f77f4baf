"""cupaged: PagedAttention and continuous batching without PyTorch.

Importing this package loads neither CuPy nor Numba; `LLM` does when it is first touched.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from cupaged.config import EngineConfig
from cupaged.sampling_params import BeamSearchParams, SamplingParams

if TYPE_CHECKING:
    from cupaged.llm import LLM

__all__ = ["LLM", "BeamSearchParams", "EngineConfig", "SamplingParams", "__version__"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "LLM":
        return import_module("cupaged.llm").LLM
    raise AttributeError(f"module 'cupaged' has no attribute {name!r}")
