"""generation_config.json: the sampling that a model's makers recommend, and what ends its answers."""

import logging
from pathlib import Path
from typing import Any, NamedTuple

from cupaged.config import HFConfig
from cupaged.sampling_params import SamplingParams

logger = logging.getLogger("cupaged")

# SamplingParams' name of each field that is read.
_SAMPLING = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


class GenerationConfig(NamedTuple):
    """What the engine takes from the file; nothing where there is none."""

    sampling_params: dict[str, Any]  # fields of SamplingParams
    eos_token_ids: tuple[int, ...]


def read_generation_config(model_dir: Path) -> GenerationConfig:
    """Read the file of `model_dir`; ValueError names what is wrong with it.

    A recommendation that is not supported yet is left out with a warning.
    """
    path = model_dir / "generation_config.json"
    if not path.exists():
        return GenerationConfig({}, ())
    hf = HFConfig.from_file(path)
    sampling: dict[str, Any] = {}
    for key, name in _SAMPLING.items():
        value = hf.get(key, object, None)
        if value is None:
            continue
        try:
            SamplingParams(**{name: value})
        except ValueError as error:
            logger.warning("generation_config.json: %s; requests run without it", error)
        else:
            sampling[name] = value
    return GenerationConfig(sampling, hf.token_ids("eos_token_id"))
