"""Where a model's files are: a directory as it is, org/name through huggingface_hub (extra `hub`).

huggingface_hub itself honours HF_HOME, HF_HUB_OFFLINE and HF_TOKEN; it is imported only when needed.
"""

import re
from pathlib import Path

_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
# What the engine reads; not the same weights again in other formats.
_FILES = ["*.json", "*.jinja"]
_WEIGHTS = ["*.safetensors"]


def resolve_model(model: str | Path, *, with_weights: bool = True) -> Path:
    """Return the directory of `model`, downloading a repository that is not in the cache yet."""
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    name = str(model)
    if not _REPOSITORY.fullmatch(name) or name.startswith("."):
        raise ValueError(f"model {name!r} is no directory, and no org/name of a repository either")
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    except ImportError as error:
        raise ValueError(
            f"model {name!r} is no directory; to download it as a repository, pip install 'cupaged[hub]'"
        ) from error
    try:
        return Path(snapshot_download(name, allow_patterns=_FILES + _WEIGHTS * with_weights))
    except LocalEntryNotFoundError as error:
        raise ValueError(
            f"model {name!r} is no directory, is not in the cache of huggingface_hub, and its hub cannot be "
            "reached (is HF_HUB_OFFLINE set?); name a directory, or go online once"
        ) from error
    except (HfHubHTTPError, HFValidationError) as error:
        raise ValueError(f"model {name!r} is no directory, and the hub refuses it: {error}") from error
