"""The model families: one file each, found by the model_type of config.json.

A family file has `config`, `weights` and `Model`; README.md says how to write one.
"""

import pkgutil
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from numpy.typing import NDArray

from cupaged.backend.base import Array, Backend, Communicator, KVCache
from cupaged.batch import Batch
from cupaged.config import HFConfig, ModelConfig
from cupaged.models.table import Shard, Weight

__all__ = ["Family", "Model", "ModelFactory", "Shard", "Weight", "load_model_class", "load_model_config"]


class Model(Protocol):
    """A model with its weights, ready to run on one rank."""

    def forward(self, batch: Batch, kv_cache: KVCache) -> Array:
        """Return every token's last hidden state, after the final norm, [num_tokens, hidden_size]."""

    def logits(self, hidden: Array) -> Array:
        """Return float32[n, vocab_size] of n rows of the last hidden state."""


class ModelFactory(Protocol):
    """What `Model` of a family file is called with."""

    def __call__(
        self,
        config: ModelConfig,
        backend: Backend,
        communicator: Communicator,
        weights: Mapping[str, NDArray[Any]],
        *,
        max_model_len: int,
    ) -> Model: ...


class Family(NamedTuple):
    """The three parts of a family file."""

    config: Callable[[HFConfig], ModelConfig]
    weights: Callable[[ModelConfig], list[Weight]]
    Model: ModelFactory


def load_model_class(model_type: str) -> Family:
    """Return the family of `model_type`, which is the file of that name; ValueError lists what there is."""
    modules = {name: import_module(f"{__name__}.{name}") for _, name, _ in pkgutil.iter_modules(__path__)}
    families = {name: module for name, module in modules.items() if hasattr(module, "Model")}
    if model_type not in families:
        raise ValueError(f"model_type {model_type!r} is not supported; there are {', '.join(families)}")
    module = families[model_type]
    return Family(module.config, module.weights, module.Model)


def load_model_config(directory: str | Path) -> ModelConfig:
    """Read config.json of a Hugging Face directory."""
    hf = HFConfig.from_file(Path(directory) / "config.json")
    return load_model_class(hf.get("model_type", str)).config(hf)
